"""A ModelSpec as this rank's part of a Megatron GPTModel that ends in hidden states.

Shapes: S tokens of a row, B rows, H hidden, D head dimension.
"""

import math
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from prefect_rlhf.engines.megatron.adapters.four_bits import in_four_bits
from prefect_rlhf.engines.megatron.adapters.linear import (
    AdaptedColumnLinear,
    AdaptedNormedRowLinear,
    AdaptedRowLinear,
)
from prefect_rlhf.engines.megatron.adapters.linear_layers import LINEAR_LAYERS, Fusion, HeldMatrices
from prefect_rlhf.engines.megatron.core_versions import feed_forward_parts, mark_split, silence_advice
from prefect_rlhf.engines.megatron.groups import Groups
from prefect_rlhf.engines.megatron.layers import (
    GatedActivation,
    NoCoreAttention,
    NormedRowParallelLinear,
    RecomputingLayer,
    RMSNorm,
    RotaryAttention,
)
from prefect_rlhf.engines.megatron.packing import Packing
from prefect_rlhf.engines.megatron.rotary import Rotary
from prefect_rlhf.engines.megatron.vocabulary.embedding import embed
from prefect_rlhf.placement.layout.layout import padded_vocabulary, stages, vocabulary_rows
from prefect_rlhf.placement.models.adapter import AdapterSpec
from prefect_rlhf.placement.models.families.known import FAMILIES
from prefect_rlhf.placement.models.model import ModelSpec, TransformerShape

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Transformer(GPTModel):  # type: ignore[misc]
    """GPTModel with a last stage that returns hidden states [S, B, H]; logits are made later, by the code that needs
    them.
    """

    embedding_scale: float | None = None

    def forward(self, tokens_BS: Tensor, packing: Packing) -> Tensor:
        """Return hidden states, or the next stage's input. Only the first stage uses the tokens."""
        embedded = None
        if self.pre_process:
            embedded = embed(tokens_BS, self.embedding.word_embeddings.weight, self.pg_collection.tp)
            if self.embedding_scale is not None:
                embedded = embedded * self.embedding_scale
            if self.config.sequence_parallel:  # the part is a view, which would keep the whole
                embedded = scatter_to_sequence_parallel_region(embedded, self.pg_collection.tp).clone()
        hidden: Tensor = super().forward(tokens_BS, None, None, decoder_input=embedded, packed_seq_params=packing)
        return hidden

    def head_weight(self, head: Literal["lm", "scalar"]) -> Tensor:
        """Return the weight that turns the last stage's hidden states into logits, or into a number per token."""
        if head == "scalar":
            return cast(Tensor, self.scalar_head.weight)
        if self.share_embeddings_and_output_weights:
            return cast(Tensor, self.shared_embedding_or_output_weight())
        return cast(Tensor, self.output_layer.weight)

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return the hidden states of all tokens: every rank computes the same from them on."""
        if not (self.post_process and self.config.sequence_parallel):
            return hidden_states
        group = self.pg_collection.tp
        return cast(Tensor, gather_from_sequence_parallel_region(hidden_states, False, group))


class ScalarHead(torch.nn.Module):
    """A number per token, for critics and reward models; every tensor-parallel rank holds all of it."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype))
        set_tensor_model_parallel_attributes(self.weight, False, 0, 1)
        self.weight.is_scalar_head = True  # type: ignore[attr-defined]  # the optimizer gives it its own learning rate


def build_model(spec: ModelSpec, groups: Groups, on_host: bool = False) -> Transformer:
    """Allocate this rank's layers, with weights unset. The embedding is on the first stage, the heads are on the last.

    With `on_host`, they use no device memory yet.
    """
    shape, config, strategy = spec.shape, transformer_config(spec, groups, on_host), groups.strategy
    layers = stages(shape.num_layers, strategy.pp)[groups.coordinate.pp]
    silence_advice()
    model = Transformer(
        config,
        TransformerBlockSubmodules(_layer_specs(spec, layers, strategy.tp, groups.coordinate.tp), RMSNorm),
        vocab_size=padded_vocabulary(spec, "megatron", strategy.tp),
        max_sequence_length=shape.max_position_embeddings,
        pre_process=groups.is_first_stage,
        post_process=groups.is_last_stage,
        position_embedding_type="none",  # RotaryAttention applies positions
        share_embeddings_and_output_weights="lm" in spec.head and shape.tied_embeddings,
        pg_collection=groups.collection,
    )
    if FAMILIES[shape.family].scaled_embedding:
        model.embedding_scale = float(torch.tensor(math.sqrt(shape.hidden_size), dtype=DTYPES[spec.dtype]))
    if "lm" not in spec.head:
        model.output_layer = None  # Megatron makes it on the last stage
    if "scalar" in spec.head and groups.is_last_stage:
        model.scalar_head = ScalarHead(shape.hidden_size, DTYPES[spec.dtype])
    _mark_split_weights(model)
    if spec.adapter is not None:
        _freeze_base(model)
    clear_padding(model, num_vocabulary_rows(spec, groups))
    return cast(Transformer, model.to(device="cpu" if on_host else own_device(), dtype=DTYPES[spec.dtype]))


def own_device() -> torch.device:
    """Return this process's device."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def num_vocabulary_rows(spec: ModelSpec, groups: Groups) -> int:
    """Count this rank's rows of embedding and output that are tokens; the others are zeros that make the split even.

    Code that computes logits must exclude the rest.
    """
    start, stop = vocabulary_rows(spec, "megatron", groups.strategy.tp, groups.coordinate.tp)
    return stop - start


def transformer_config(spec: ModelSpec, groups: Groups, on_host: bool = False) -> TransformerConfig:
    """Return Megatron's settings for a dense decoder, without randomness and without fusions that need CUDA.

    If tp exceeds the number of key-value heads, each rank has a copy of the head for its queries, as if the model had
    tp heads; see `KeyValueCopies`.
    """
    shape, strategy, dtype = spec.shape, groups.strategy, DTYPES[spec.dtype]
    family = FAMILIES[shape.family]
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.intermediate_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=max(shape.num_kv_heads, strategy.tp),
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu if family.activation == "silu" else F.gelu,
        use_te_activation_func=True,  # a module of the layer spec: GatedActivation
        layernorm_zero_centered_gamma=family.zero_centered_norms,
        softmax_scale=None if shape.score_width is None else shape.score_width**-0.5,
        add_bias_linear=False,
        add_qkv_bias=bool(shape.biases),
        qk_layernorm=shape.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=strategy.tp,
        pipeline_model_parallel_size=strategy.pp,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        calculate_per_token_loss=True,  # gradients are sums; each micro-batch's part of the loss is divided already
        use_cpu_initialization=on_host or not torch.cuda.is_available(),
        perform_initialization=False,
        persist_layer_norm=False,
        deallocate_pipeline_outputs=False,
        batch_p2p_sync=False,  # it is for old versions of torch, and each message would wait for the device
        gradient_accumulation_fusion=not torch.cuda.is_available(),  # on CUDA it needs Apex
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
    )


def _layer_specs(spec: ModelSpec, numbers: range, tp: int, index: int) -> list[ModuleSpec]:
    """Make the Megatron layers with these numbers on the index-th of tp ranks; equal layers share a spec."""
    shape, window = spec.shape, spec.shape.window
    whole = _layer_spec(spec, Rotary(shape.rope_theta, shape.head_dim, shape.rope_scaling), None, tp, index)
    if window is None:
        return [whole] * len(numbers)
    local = _layer_spec(spec, Rotary(window.rope_theta, shape.head_dim), window.tokens, tp, index)
    return [local if number in window.layers else whole for number in numbers]


def _layer_spec(spec: ModelSpec, rotary: Rotary, window: int | None, tp: int, index: int) -> ModuleSpec:
    """Make Megatron's layer with the pieces of `layers` and `adapters`."""
    shape = spec.shape
    layer = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=shape.qk_norm)
    layer.module, parts = RecomputingLayer, layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    parts.self_attention.module = RotaryAttention
    parts.self_attention.params |= {"rotary": rotary, "window": window}
    parts.self_attention.submodules.core_attention = NoCoreAttention
    if shape.qk_norm:
        parts.self_attention.submodules.q_layernorm = parts.self_attention.submodules.k_layernorm = RMSNorm
    feed_forward_parts(parts).activation_func = GatedActivation
    if shape.norms_after:
        parts.self_attention.submodules.linear_proj = NormedRowParallelLinear
        feed_forward_parts(parts).linear_fc2 = NormedRowParallelLinear
    if spec.adapter is not None:
        _adapt(parts, spec.adapter, shape, tp)
    if spec.base_dtype is not None:
        _quantize(parts, shape, tp, index)
    return layer


def _quantize(parts: Any, shape: TransformerShape, tp: int, index: int) -> None:
    """Give a layer's submodules, adapted or not, classes with a weight in four bits."""
    for linear in LINEAR_LAYERS:
        before = linear.in_spec(parts)
        options = before.keywords if isinstance(before, partial) else getattr(before, "params", {})
        kind = before.func if isinstance(before, partial) else getattr(before, "module", before)
        held = HeldMatrices.of(linear, shape, tp, index)
        linear.put(parts, in_four_bits(kind), {**options, "held": held})


def _adapt(parts: Any, adapter: AdapterSpec, shape: TransformerShape, tp: int) -> None:
    """Give a layer's submodules the adapted classes if some of their matrices are adapted."""
    by_inputs = AdaptedNormedRowLinear if shape.norms_after else AdaptedRowLinear
    for linear in LINEAR_LAYERS:
        if not set(adapter.matrices).isdisjoint(linear.matrices.values()):
            kind = AdaptedColumnLinear if linear.split_axis == 0 else by_inputs
            linear.put(parts, kind, {"adapter": adapter, "fusion": Fusion.of(linear, shape, tp)})


def _freeze_base(model: Transformer) -> None:
    """Leave gradients to the adapter and a scalar head: Megatron makes no buffers and no optimizer for the others."""
    for parameter in model.parameters():
        parameter.requires_grad = hasattr(parameter, "is_adapter") or hasattr(parameter, "is_scalar_head")


def clear_padding(model: Transformer, num_rows: int) -> None:
    """Zero the vocabulary's padding, which is never written again."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "word_embeddings" in name or "output_layer" in name:
                parameter[num_rows:].zero_()


def _mark_split_weights(model: Transformer) -> None:
    """Mark the weights that are split over tp: without marks gradient norms are wrong.

    Megatron always marks the biases, and adapters mark themselves. With sequence parallelism norms of hidden states see
    a part of the tokens, and Megatron sums their gradients over tp.
    """
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "is_adapter"):
            continue
        parameter.sequence_parallel = (
            name.endswith("norm.weight") and "q_layernorm" not in name and "k_layernorm" not in name
        )
        is_linear = "linear" in name and not name.endswith(("bias", "norm.weight"))
        if is_linear or "word_embeddings" in name or "output_layer" in name:
            axis = next((linear.split_axis for linear in LINEAR_LAYERS if linear.name in name), 0)
            mark_split(parameter, axis)
