"""The default search: networks trained for parts of a training, led by a surrogate model of their losses."""
