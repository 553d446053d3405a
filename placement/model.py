"""Models as the planner and the engines know them: shape, head, number formats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from prefect_rlhf.placement.errors import InvalidInput

Head = Literal["lm", "scalar", "lm+scalar"]
"""The end of a model: in tokens, in one number a token, or in both on one trunk (an actor and critic that share it)."""
Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, slots=True)
class TransformerShape:
    """The Llama family's shape, as in a Hugging Face config.json."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float
    tied_embeddings: bool


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """AdamW with linear warm-up; `head_lr` applies to a scalar head, which starts untrained."""

    lr: float = 1e-5
    head_lr: float | None = None
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    warmup_steps: int = 0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A role's model: the Hugging Face folder `path`, how it ends, and its formats.

    `dtype` is the compute format; with bfloat16 the optimizer keeps float32 main weights. A scalar role whose
    checkpoint has no scalar head starts with a zero head only when `new_head` is true.
    """

    role: str
    path: str
    head: Head
    shape: TransformerShape
    dtype: Dtype = "bfloat16"
    new_head: bool = False
    optimizer: OptimizerSpec | None = None


def _llama(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, context: int
) -> TransformerShape:
    return TransformerShape(
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_attention_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        vocab_size=vocab,
        max_position_embeddings=context,
        rope_theta=5e5 if vocab == 128256 else 1e4,
        rms_norm_eps=1e-5,
        tied_embeddings=False,
    )


KNOWN_SHAPES: Mapping[str, TransformerShape] = MappingProxyType(
    {
        # ReaL, appendix table 1
        "llama3-7b": _llama(4096, 14336, 32, 32, 8, 128256, 8192),
        "llama3-13b": _llama(5120, 13824, 40, 40, 40, 128256, 8192),
        "llama3-34b": _llama(8192, 22016, 48, 64, 8, 128256, 8192),
        "llama3-70b": _llama(8192, 28672, 80, 64, 8, 128256, 8192),
        # Llama 2 and Code Llama (Touvron et al. 2023; Roziere et al. 2023), as HybridFlow's experiments use them
        "llama-7b": _llama(4096, 11008, 32, 32, 32, 32000, 4096),
        "llama-13b": _llama(5120, 13824, 40, 40, 40, 32000, 4096),
        "llama-34b": _llama(8192, 22016, 48, 64, 8, 32000, 16384),
        "llama-70b": _llama(8192, 28672, 80, 64, 8, 32000, 4096),
        # the first Llama's larger sizes, which APP uses
        "llama-33b": _llama(6656, 17920, 60, 52, 52, 32000, 2048),
        "llama-65b": _llama(8192, 22016, 80, 64, 64, 32000, 2048),
    }
)
"""Llama shapes by family and size."""


def known_shape(name: str, field: str = "model") -> TransformerShape:
    """Return the shape of that name. Raises InvalidInput with the names there are.

    >>> known_shape("llama-7b").num_layers
    32
    """
    if name not in KNOWN_SHAPES:
        raise InvalidInput(field, name, f"one of {', '.join(KNOWN_SHAPES)}")
    return KNOWN_SHAPES[name]
