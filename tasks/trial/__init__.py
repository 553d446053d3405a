"""Tries your own code before a run: operators as ranks run them, plays and rewards, on a few rows."""
