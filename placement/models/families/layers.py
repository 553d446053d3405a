"""Layers that several families share: their weights in the order of a forward pass, under Hugging Face names."""

from prefect_rlhf.placement.models.families.family import Weight

_BEFORE = (
    Weight("norm_before_attention", "input_layernorm", ("hidden",)),
    Weight("queries", "self_attn.q_proj", ("queries", "hidden"), 0),
    Weight("keys", "self_attn.k_proj", ("keys", "hidden"), 0),
    Weight("values", "self_attn.v_proj", ("keys", "hidden"), 0),
)
_QK_NORMS = (
    Weight("query_norm", "self_attn.q_norm", ("head",)),
    Weight("key_norm", "self_attn.k_norm", ("head",)),
)
_OUTPUT = (Weight("attention_output", "self_attn.o_proj", ("hidden", "queries"), 1),)
_FEED_FORWARD = (
    Weight("gate", "mlp.gate_proj", ("inner", "hidden"), 0),
    Weight("up", "mlp.up_proj", ("inner", "hidden"), 0),
    Weight("down", "mlp.down_proj", ("hidden", "inner"), 1),
)
_EXPERTS = (
    Weight("router", "mlp.gate", ("experts", "hidden")),
    Weight("expert_gates", "mlp.experts.gate_proj", ("experts", "inner", "hidden"), 1),
    Weight("expert_ups", "mlp.experts.up_proj", ("experts", "inner", "hidden"), 1),
    Weight("expert_downs", "mlp.experts.down_proj", ("experts", "hidden", "inner"), 2),
)
_NORM_BETWEEN = (Weight("norm_before_feed_forward", "post_attention_layernorm", ("hidden",)),)
_NORMS_AROUND = (
    Weight("norm_after_attention", "post_attention_layernorm", ("hidden",)),
    Weight("norm_before_feed_forward", "pre_feedforward_layernorm", ("hidden",)),
)
_NORM_AFTER = (Weight("norm_after_feed_forward", "post_feedforward_layernorm", ("hidden",)),)

TWO_NORMS = (*_BEFORE, *_OUTPUT, *_NORM_BETWEEN, *_FEED_FORWARD)
"""Llama's layer."""
TWO_NORMS_AND_QK = (*_BEFORE, *_QK_NORMS, *_OUTPUT, *_NORM_BETWEEN, *_FEED_FORWARD)
"""With norms of queries and keys, as in Qwen 3."""
FOUR_NORMS = (*_BEFORE, *_OUTPUT, *_NORMS_AROUND, *_FEED_FORWARD, *_NORM_AFTER)
"""With norms after attention and feed-forward layer, as in Gemma 2. `post_attention_layernorm` is a different norm
here."""
FOUR_NORMS_AND_QK = (*_BEFORE, *_QK_NORMS, *_OUTPUT, *_NORMS_AROUND, *_FEED_FORWARD, *_NORM_AFTER)
"""With both, as in Gemma 3."""
EXPERTS = (*_BEFORE, *_OUTPUT, *_NORM_BETWEEN, *_EXPERTS)
"""Llama's layer with experts instead of the feed-forward layer, as in Mixtral; a layer's experts are stacked."""
EXPERTS_AND_QK = (*_BEFORE, *_QK_NORMS, *_OUTPUT, *_NORM_BETWEEN, *_EXPERTS)
"""With norms of queries and keys, as in Qwen 3's mixtures."""
