"""Engines of published systems beside ours: what theirs hold and take more or less of."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.papers.engines import HybridFlowExecution, RealExecution
from prefect_rlhf.placement.cost.call import call_cost
from prefect_rlhf.placement.cost.call_bytes import call_bytes, static_bytes
from prefect_rlhf.placement.cost.datasheets.hardware import NETWORKS, Hardware
from prefect_rlhf.placement.cost.datasheets.kinds import DATASHEETS
from prefect_rlhf.placement.cost.execution import Execution
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.times.roofline import DatasheetTimes
from prefect_rlhf.placement.cost.workload import CallWork, Workload
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.models.known_models import KNOWN_SHAPES

LLAMA = ModelSizes.of_shape(KNOWN_SHAPES["llama-7b"])
LLAMA3 = ModelSizes.of_shape(KNOWN_SHAPES["llama3-7b"])
H100 = Hardware(DATASHEETS["h100"], 8, NETWORKS["roce-3200"])
DEGREES = st.sampled_from([1, 2, 4])
strategies = st.builds(Strategy, DEGREES, DEGREES, DEGREES)


def test_logits_of_real_fill_its_cluster():
    """Its section 8, footnote 1: 128e3 x 512 x 2048 x 2 bytes; besides, a float32 copy of them."""
    work = CallWork("train_step", 512, Workload.fixed(1024, 1024))
    its, ours = (call_bytes(work, engine(Strategy()), LLAMA3).logits for engine in (RealExecution, Execution))
    assert its >= 512 * 2048 * 128256 * (2 + 4)
    assert ours < its / 4


def test_real_holds_the_logits_of_all_prompts_while_it_generates():
    """In 2 bytes, each tensor-parallel rank its part of the vocabulary; ours makes those of last tokens only."""
    work, split = CallWork("generate", 64, Workload.fixed(1024, 1024)), (Strategy(tp=8), 1, 8)
    its, ours = (call_bytes(work, engine(*split), LLAMA3).logits for engine in (RealExecution, Execution))
    assert its - ours == 64 * 1024 * 128256 // 8 * 2


def test_real_sums_gradients_in_the_compute_format():
    """They take half of the bytes, and half of the first of two messages: ours are float32, new weights bfloat16."""
    its, ours = (engine(Strategy(8), 1, 8) for engine in (RealExecution, Execution))
    held = [static_bytes(execution, LLAMA, trained=True) for execution in (its, ours)]
    assert 2 * held[0].gradients == held[1].gradients
    assert (held[0].weights, held[0].optimizer) == (held[1].weights, held[1].optimizer)
    times = DatasheetTimes.of(LLAMA, H100)
    seconds = [execution.replicas_seconds(LLAMA.num_parameters, times) for execution in (its, ours)]
    assert seconds[0] == pytest.approx(seconds[1] * (2 + 2) / (4 + 2), rel=1e-3)


@given(strategies, st.sampled_from([0, 3, "all"]))
def test_sequence_parallelism_keeps_less_of_split_models_only(strategy, recompute):
    """Korthikanti et al. (2022, section 4.2.2): what tp did not split of the activations, it now does."""
    work = CallWork("train_step", 64, Workload.fixed(512, 512))
    split, base = (
        call_bytes(work, engine(strategy, 8, 8, recompute=recompute), LLAMA)
        for engine in (HybridFlowExecution, Execution)
    )
    assert (split.activations < base.activations) == (strategy.tp > 1)
    assert split.static == base.static


@given(
    st.sampled_from(["inference", "train_step"]),
    strategies,
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([0, 3, "all"]),
)
def test_sequence_parallelism_is_faster_where_tp_leaves_something_to_split(kind, strategy, micro_batches, recompute):
    """Passes over [tokens, hidden] and hops between stages; matrix products and reduces are as before."""
    work, times = CallWork(kind, 512, Workload.fixed(512, 512)), DatasheetTimes.of(LLAMA, H100)
    split, base = (
        call_cost(work, engine(strategy, 8, 8, micro_batches, recompute), times)
        for engine in (HybridFlowExecution, Execution)
    )
    assert (split.total < base.total) == (strategy.tp > 1)
    assert (split.compute, split.tp_communication) == (base.compute, base.tp_communication)
