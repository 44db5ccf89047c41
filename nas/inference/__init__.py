"""The use of a trained model: generation, scoring, and export."""
