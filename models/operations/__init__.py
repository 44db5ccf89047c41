"""The operations of blocks: a file for each family, and one registry, which needs no torch."""
