"""A planning problem as flat arrays for compiled functions."""
