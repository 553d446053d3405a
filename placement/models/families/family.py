"""The form of a model family: the keys of its config.json, and the weights of its layers.

A family is a value of `Family`. Engines, layouts, costs and exports follow it; they know only parts and options, not
names.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from prefect_rlhf.placement.models.model import NO_BIASES, QUERY_BIASES, Head, TransformerShape

Part = Literal[
    "norm_before_attention",
    "queries",
    "keys",
    "values",
    "query_norm",
    "key_norm",
    "attention_output",
    "norm_after_attention",
    "norm_before_feed_forward",
    "gate",
    "up",
    "down",
    "norm_after_feed_forward",
    "router",
    "expert_gates",
    "expert_ups",
    "expert_downs",
]
"""The parts of a layer: those of engines, and those of a mixture of experts, which can only be planned."""
Activation = Literal["silu", "gelu_tanh"]
Axis = Literal["hidden", "queries", "keys", "inner", "head", "experts"]
"""The length of an axis: the hidden size, all query heads, all key-value heads, the feed-forward layer or one expert's,
one head, the number of experts."""

ATTENTION_BIASES = (*QUERY_BIASES, "self_attn.o_proj")
MLP_BIASES = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight of a layer: its part, its name in a checkpoint's layer, its axes, and the axis that tp splits.

    All experts' weights are a single weight; expert parallelism divides its first axis.
    """

    part: Part
    name: str
    axes: tuple[Axis, ...]
    split_axis: int | None = None

    @property
    def of_experts(self) -> bool:
        return self.part in ("expert_gates", "expert_ups", "expert_downs")


@dataclass(frozen=True, slots=True)
class Window:
    """The config key of a sliding window in tokens: `sliding_window`, unless `switch` is off."""

    default: int | None
    switch: str | None = None
    others: tuple[str, ...] = ()  # keys that say which layers have it


@dataclass(frozen=True, slots=True)
class LocalLayers:
    """Layers that attend only to a window, with their own rotary base: all but every `every`-th, unless listed.

    The keys are `sliding_window`, `layer_types`, `sliding_window_pattern`, `rope_local_base_freq` and, since
    transformers 5, `sliding_attention` in `rope_parameters`.
    """

    tokens: int
    every: int
    rope_theta: float


@dataclass(frozen=True, slots=True)
class ExpertKeys:
    """The config keys for a layer's number of experts, the experts per token, and an expert's width.

    `count_keys` are synonyms; the first present key counts. The numbers are transformers' defaults. `uniform` keys must
    have these values, because others give some layers no experts.
    """

    count_keys: tuple[str, ...]
    count: int
    per_token: int
    width_key: str
    uniform: Mapping[str, Any] = field(default_factory=dict)


LOCAL_KEYS = ("sliding_window", "layer_types", "sliding_window_pattern", "rope_local_base_freq")


@dataclass(frozen=True, slots=True)
class Family:
    """The models of a `model_type`. The numbers are transformers' defaults."""

    model_type: str
    name: str
    """What transformers' class names begin with."""
    layer: tuple[Weight, ...]
    context: int
    head_dim: int | None = None
    """None means hidden size over heads."""
    heads: int | None = None
    kv_heads: int | None = None
    """None means as many as heads."""
    vocabulary: int | None = None
    tied: bool = False
    head_dim_is_free: bool = True  # else vLLM uses hidden size over heads, and ignores the config's value
    rope_theta: float = 1e4
    activation: Activation = "silu"
    scaled_embedding: bool = False  # by the root of the hidden size
    zero_centered_norms: bool = False  # they multiply by their weight and 1
    always_biases: tuple[str, ...] = NO_BIASES
    bias_switches: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Keys which, if true, give the named matrices a bias."""
    window: Window | None = None
    local_layers: LocalLayers | None = None
    classifier: str = ""  # first part of the name of the class with a scalar head, if it differs
    reads: tuple[str, ...] = ()
    """Other keys of its own."""
    only: Mapping[str, Any] = field(default_factory=dict)
    """The values that our engines support for some keys; an absent key counts as supported."""
    written: Mapping[str, Any] = field(default_factory=dict)
    """Further keys that we write to a config.json."""
    not_run: str = ""
    """Why models of the family can only be planned, in words; empty if engines run them."""
    experts: ExpertKeys | None = None

    def architecture(self, head: Head) -> str:
        """Return the name of transformers' class with this ending; a second, scalar head has its own file."""
        if head == "scalar":
            return f"{self.classifier or self.name}ForSequenceClassification"
        return f"{self.name}ForCausalLM"

    @property
    def architectures(self) -> tuple[str, str]:
        return self.architecture("lm"), self.architecture("scalar")

    @property
    def keys(self) -> frozenset[str]:
        """The keys of a config.json that this family reads beyond the common keys."""
        window = () if self.window is None else ("sliding_window", self.window.switch or "", *self.window.others)
        local = LOCAL_KEYS if self.local_layers is not None else ()
        return frozenset((*self.bias_switches, *self.only, *window, *local, *self.reads))

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys have a norm over the head width."""
        return any(weight.part == "query_norm" for weight in self.layer)

    @property
    def norms_after(self) -> bool:
        """Whether attention and feed-forward layers are also followed by a norm."""
        return any(weight.part == "norm_after_attention" for weight in self.layer)


def axis_length(axis: Axis, shape: TransformerShape) -> int:
    """Return the length of an axis in a model of this shape."""
    return {
        "hidden": shape.hidden_size,
        "queries": shape.num_attention_heads * shape.head_dim,
        "keys": shape.num_kv_heads * shape.head_dim,
        "inner": shape.intermediate_size,
        "head": shape.head_dim,
        "experts": shape.experts.count if shape.experts else 0,
    }[axis]
