"""The ways to search a plan, which forms and flags state before a search is imported."""

from __future__ import annotations

from typing import Literal

Method = Literal["exact", "metropolis-hastings"]
