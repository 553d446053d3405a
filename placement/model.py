"""Models as the planner and the engines know them: shape, head, number formats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Head = Literal["lm", "scalar", "lm+scalar"]
"""The end of a model: in tokens, in one number a token, or in both on one trunk, which actor and critic share."""
Dtype = Literal["float32", "bfloat16"]


def head_of(output: str) -> Literal["lm", "scalar"]:
    """Return the head that makes an output.

    >>> head_of("entropy"), head_of("values")
    ('lm', 'scalar')
    """
    return "scalar" if output in ("values", "scores") else "lm"


NO_BIASES: tuple[str, ...] = ()
QUERY_BIASES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
"""The matrices of a layer that have a bias in Qwen2."""
NOT_RUN: Mapping[str, str] = MappingProxyType(
    {
        "llama": "",
        "llama3.1": "rope_type llama3",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM, biases of queries, keys and values",
        "qwen3": "Qwen3ForCausalLM, norms of queries and keys",
        "gemma": "GemmaForCausalLM, scaled embeddings and GeLU",
        "gemma2": "Gemma2ForCausalLM, norms after attention and feed-forward layer, soft caps, sliding windows",
        "gemma3": "Gemma3ForCausalLM, norms after attention and feed-forward layer, sliding windows",
    }
)
"""What our engines do not run of the models of each kind; none: nothing."""


@dataclass(frozen=True, slots=True)
class TransformerShape:
    """The shape of a dense decoder, as in a Hugging Face config.json: gated feed-forward layers and RMS norms.

    `biases` are the matrices of a layer that have one. With `qk_norm` queries and keys have a norm over the width of a
    head; with `norms_after` attention and feed-forward layer have one each after them too (Gemma 2). `not_run` says
    what our engines do not compute of it; empty: they run it. Such a model can be planned.
    """

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
    biases: tuple[str, ...] = NO_BIASES
    qk_norm: bool = False
    norms_after: bool = False
    not_run: str = ""


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

    `dtype` is the compute format; with bfloat16 the optimizer keeps float32 main weights. A role with a scalar head
    whose checkpoint has none starts with a head of zeros only when `new_head` is true.
    """

    role: str
    path: str
    head: Head
    shape: TransformerShape
    dtype: Dtype = "bfloat16"
    new_head: bool = False
    optimizer: OptimizerSpec | None = None
