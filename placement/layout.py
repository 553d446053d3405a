"""Which hyper-rectangle of each global tensor each device of a model instance holds.

Names, shapes and regions are those of the Hugging Face checkpoint, whatever the engine fuses or interleaves; so
resharding, checkpoints and weight fingerprints know neither Megatron nor vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Region = tuple[tuple[int, int], ...]
"""(start, stop) for each axis of the global tensor."""


@dataclass(frozen=True, slots=True)
class Layout:
    """For each parameter its global shape, and for each rank the region it holds (absent: holds nothing of it)."""

    shapes: Mapping[str, tuple[int, ...]]
    regions: Mapping[str, Mapping[int, Region]]
