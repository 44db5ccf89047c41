"""The method of Mandava et al. 2020 (arXiv 2009.04534): search.method=gumbel."""
