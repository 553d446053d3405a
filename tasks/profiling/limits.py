"""Limits on measured sizes, needed by forms and flags before torch is imported."""

MOST_ROWS = 1 << 16  # of a micro-batch
MOST_TOKENS = 1 << 20  # of a row
