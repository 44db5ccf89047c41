"""How trainings are started: commands in processes of their own."""
