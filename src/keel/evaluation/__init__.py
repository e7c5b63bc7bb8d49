"""Measurements: one a file, with intervals, and the results file that holds them."""
