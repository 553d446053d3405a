"""Limits of what is measured, which forms and flags state before torch is imported."""

from __future__ import annotations

MOST_ROWS = 1 << 16  # of one micro-batch
MOST_TOKENS = 1 << 20  # of one row
