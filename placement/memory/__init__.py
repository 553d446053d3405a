"""Proves that a plan fits, by a memory model that no GPU has confirmed as a whole: device bytes by moment."""
