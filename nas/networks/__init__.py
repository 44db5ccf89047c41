"""The choice of vocabulary, width and number of blocks before a search."""
