"""Search methods, which forms and flags name before a search is imported."""

from __future__ import annotations

from typing import Literal

Method = Literal["exact", "metropolis-hastings"]
