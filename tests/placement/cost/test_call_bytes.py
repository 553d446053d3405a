"""Bytes of calls: against layouts, against published figures, and what sharding does to them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_rlhf.placement.cost.call_bytes import CallBytes, call_bytes, static_bytes
from prefect_rlhf.placement.cost.execution import Execution
from prefect_rlhf.placement.cost.paged_cache import whole_cache_bytes
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.workload import CallWork, Workload
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.layout.regions import num_elements
from prefect_rlhf.placement.models.known_models import KNOWN_SHAPES
from prefect_rlhf.placement.models.model import ModelSpec
from tests.support.layouts import megatron_layout
from tests.support.strategies import MIXTURE, SMALL

LLAMA = ModelSizes.of_shape(KNOWN_SHAPES["llama-7b"])
WORKLOAD = Workload.fixed(512, 512)
DEGREES = st.sampled_from([1, 2, 4])
strategies = st.builds(Strategy, DEGREES, DEGREES, DEGREES)


def train(execution, rows=64, mini_batches=1):
    return call_bytes(CallWork("train_step", rows, WORKLOAD, mini_batches), execution, LLAMA)


@given(
    st.builds(Strategy, st.sampled_from([1, 2]), DEGREES, st.integers(1, 5)),
    st.booleans(),
    st.sampled_from(["lm", "scalar"]),
    st.booleans(),
)
def test_weight_bytes_match_the_layout(strategy, tied, head, mixture):
    """Elements that a rank of each stage holds, counted from regions; experts are over all replicas."""
    shape = replace(MIXTURE if mixture else SMALL, num_layers=5, num_kv_heads=4, tied_embeddings=tied)
    strategy = replace(strategy, ep=strategy.dp if mixture else 1)
    model = ModelSpec("actor", "", head, shape)
    layout = megatron_layout(model, strategy, tuple(range(strategy.num_devices)))
    for rank, at in enumerate(strategy.coordinates()):
        elements = sum(num_elements(region) for region in layout.of_rank(rank).values())
        assert ModelSizes.of(model).stage_parameters(strategy, at.pp) == elements


def test_training_states_take_eighteen_bytes_a_parameter_twelve_of_them_shared_by_replicas():
    """Mixed-precision Adam (ZeRO, section 3.1) with gradients in float32, as Megatron keeps them."""
    parameters = LLAMA.num_parameters
    alone = static_bytes(Execution(Strategy()), LLAMA, trained=True)
    assert alone.static == 18 * parameters
    assert static_bytes(Execution(Strategy(4)), LLAMA, trained=True).static == pytest.approx((6 + 3) * parameters)


def test_the_cache_of_a_13b_model_takes_800_kb_per_token():
    """PagedAttention (Kwon et al. 2023, section 3), for a model of the same width and depth."""
    sizes = ModelSizes.of_shape(KNOWN_SHAPES["llama-13b"])
    assert sizes.num_layers * sizes.cache_bytes_per_token(1) == 800 * 1024


def test_vllm_reserves_whole_blocks_for_every_row():
    work = CallWork("generate", 8, Workload.fixed(100, 50))
    found = call_bytes(work, Execution(Strategy()), LLAMA, "vllm")
    assert found.kv_cache == (8 * 5 + 2) * 32 * 512 * 1024
    few = call_bytes(work, replace(Execution(Strategy()), cache_bytes=1 << 30), LLAMA, "vllm")
    assert few.kv_cache == 1 << 30


@given(strategies, st.sampled_from([1, 2, 4]))
def test_smaller_micro_batches_and_recomputation_save_activations(strategy, micro_batches):
    execution = Execution(strategy, 8, 8, micro_batches)
    base = train(execution)
    if strategy.pp == 1:
        assert train(replace(execution, micro_batches=2 * micro_batches)).activations < base.activations
    again = train(replace(execution, recompute="all"))
    assert again.activations < base.activations
    assert again.static == base.static


@given(strategies)
def test_sharding_never_adds_bytes(strategy):
    """Of anything, on any device, when tp or dp double and micro-batches stay."""
    base = train(Execution(strategy, 8, 8))
    for finer in (replace(strategy, tp=2 * strategy.tp), replace(strategy, dp=2 * strategy.dp)):
        found = train(Execution(finer, 8, 8))
        assert found.static <= base.static
        assert found.active <= base.active


def test_early_stages_keep_more_micro_batches():
    """1F1B: the first stage has as many in flight as there are stages, the last has one."""
    work = CallWork("train_step", 64, WORKLOAD)
    execution = Execution(Strategy(pp=4), micro_batches=8)
    first, last = (call_bytes(work, execution, LLAMA, stage=stage).activations for stage in (0, 3))
    assert first > 3 * last


@given(st.sampled_from(["generate", "inference", "train_step"]), strategies)
def test_terms_are_counts_and_add_up(kind, strategy):
    found = call_bytes(CallWork(kind, 64, WORKLOAD), Execution(strategy, 8, 8), LLAMA)
    assert sum(found.by_term().values()) == found.total == found.static + found.active
    assert all(isinstance(value, int) and value > 0 for value in found.by_term().values())
    assert found.gradients == found.optimizer == 0 or kind == "train_step"
    assert isinstance(found, CallBytes)


def test_a_step_of_vllm_has_logits_of_the_rows_in_flight_alone():
    """On CUDA at most 1024, and no more than eight times what the cache holds at the longest; on CPU all rows."""
    work, step = CallWork("generate", 4096, WORKLOAD), LLAMA.vocab * 3 * 4

    def logits(cache_bytes: int | None, on_cpu: bool) -> int:
        execution = Execution(Strategy(1, 1, 1), cache_bytes=cache_bytes)
        return call_bytes(work, execution, LLAMA, "vllm", on_cpu=on_cpu).logits

    small = whole_cache_bytes(16, 1024, LLAMA, 1)
    assert logits(None, on_cpu=False) - logits(small, on_cpu=False) == (1024 - 8 * 16) * step
    assert logits(None, on_cpu=True) - logits(None, on_cpu=False) == (4096 - 1024) * step
