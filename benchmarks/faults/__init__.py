"""Harm done to real runs, and runs long enough to show what grows."""
