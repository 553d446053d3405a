"""Models as the planner and the engines know them: shape, head, number formats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from prefect_rlhf.placement.models.adapter import AdapterSpec

Head = Literal["lm", "scalar", "lm+scalar"]
"""A model's output: tokens, a number per token, or both on one trunk, which actor and critic share."""
Dtype = Literal["float32", "bfloat16"]
BaseDtype = Literal["nf4"]
"""The formats of a frozen base in fewer bits: nf4 is QLoRA's, with double quantisation (`models/four_bits.py`)."""
Schedule = Literal["constant", "linear", "cosine"]
"""What the learning rate does after the warm-up: it stays, falls linearly, or falls along half a cosine."""


NO_BIASES: tuple[str, ...] = ()
QUERY_BIASES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
"""The matrices of a layer that have a bias in Qwen2."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3.1's slower rotation of long wavelengths (`rope_type: llama3`), for contexts beyond `original_context`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """Layers, by number, in which a token attends only to `tokens` tokens, including itself, and their rotary base."""

    tokens: int
    layers: tuple[int, ...]
    rope_theta: float


@dataclass(frozen=True, slots=True)
class Experts:
    """Parallel feed-forward layers in every layer; a router sends each token to `per_token` of them."""

    count: int
    per_token: int


@dataclass(frozen=True, slots=True)
class TransformerShape:
    """The shape of a decoder, as in a Hugging Face config.json: gated feed-forward layers and RMS norms."""

    hidden_size: int
    intermediate_size: int
    """The width of a feed-forward layer, or of each expert."""
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
    """The matrices of a layer that have a bias."""
    qk_norm: bool = False
    """Whether queries and keys have a norm over the head width."""
    norms_after: bool = False
    """Whether attention and feed-forward layers are also followed by a norm (Gemma 2)."""
    not_run: str = ""
    """The parts that our engines do not compute; a model with such parts can only be planned."""
    family: str = "llama"
    """Its `model_type`, which determines the names of its weights."""
    rope_scaling: RopeScaling | None = None
    window: SlidingWindow | None = None
    score_width: int | None = None
    """Scores are divided by the root of this, or else of the head width."""
    experts: Experts | None = None


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """AdamW, linear warm-up and a schedule."""

    lr: float = 1e-5
    head_lr: float | None = None
    """For a scalar head, which starts untrained."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    warmup_steps: int = 0
    """In optimizer steps; after them the rate falls, unless it is constant."""
    schedule: Schedule = "constant"
    decay_steps: int | None = None
    """The optimizer step at which the rate has fallen to its lowest; None if it is constant."""
    min_lr_ratio: float = 0.0
    """The lowest rate over the first; a constant rate ignores it."""


@dataclass(frozen=True, slots=True)
class FollowSpec:
    """How a model follows another: after every `every` steps its weights become (1 - share) own + share leader.

    The leader's weights are those that its train_step makes in the same step. `after` is the call before it in the
    body; later calls of the body read the new version in the same step.
    """

    leader: str
    every: int
    share: float
    after: str

    def version(self, step: int) -> int:
        """Return the follower's version after `step` steps; versions are numbered by the step that makes them.

        >>> [FollowSpec("actor", 2, 0.5, "").version(step) for step in range(6)]
        [0, 0, 2, 2, 4, 4]
        """
        return max(0, step) // self.every * self.every

    def has_main_weights(self, dtype: Dtype) -> bool:
        """Whether it keeps float32 main weights, because an average in bfloat16 would lose small shares."""
        return self.share < 1 and dtype != "float32"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A role's model: the Hugging Face folder `path`, its head, and its formats."""

    role: str
    path: str
    head: Head
    shape: TransformerShape
    dtype: Dtype = "bfloat16"
    """The compute format; with bfloat16 the optimizer keeps float32 main weights."""
    new_head: bool = False
    """Whether a scalar head may start with zeros, if the role needs it and its checkpoint lacks it."""
    optimizer: OptimizerSpec | None = None
    eos_token: str | None = None
    """The text of the token that ends an answer; None leaves it to the chat template or the tokenizer."""
    chat_template: str | None = None
    """The text of a template that replaces the folder's."""
    content: str = ""
    """The folder that was read: models with the same content have the same weights until they are trained. Empty for a
    model that is only planned, because its path is then just a size."""
    adapter: AdapterSpec | None = None
    """With an adapter, a train_step writes only the adapter and a scalar head; the other weights are frozen."""
    base_dtype: BaseDtype | None = None
    """The format of the matrices of its layers, which are then frozen."""
    follows: FollowSpec | None = None
    """In a model that follows another, the weights change that a train_step of its own would write."""
