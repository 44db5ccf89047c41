"""The search among whole networks by trials."""
