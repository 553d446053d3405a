"""Rows in and out: datasets, tokens, the order of rows, rollouts on disk."""
