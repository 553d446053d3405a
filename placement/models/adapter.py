"""A low-rank adapter (LoRA, Hu et al. 2021): two thin matrices beside some matrices of every layer."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """The adapter of a model: x W^T becomes x W^T + scale (x A^T) B^T, with A [rank, in] and B [out, rank]."""

    rank: int
    alpha: float
    matrices: tuple[str, ...]
    """The last parts of their Hugging Face names, such as `q_proj`; each layer has all of them."""
    rslora: bool = False
    """Whether the scale is alpha over the root of the rank (Kalajdzievski 2023)."""
    path: str = ""
    """The PEFT folder with its initial weights. Without a folder A is random, as PEFT draws it, and B is zero."""

    @property
    def scale(self) -> float:
        """The factor of the product of A and B.

        >>> AdapterSpec(16, 32.0, ("q_proj",)).scale, AdapterSpec(16, 32.0, ("q_proj",), rslora=True).scale
        (2.0, 8.0)
        """
        return self.alpha / (sqrt(self.rank) if self.rslora else self.rank)
