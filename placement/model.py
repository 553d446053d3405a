"""What the planner and the engines must know of a model: its shape, its head, its number formats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Head = Literal["lm", "scalar", "lm+scalar"]
"""How a model ends: in tokens, in one number a token, or in both on one trunk (an actor and critic that share it)."""
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
