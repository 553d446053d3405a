"""Tokens per second, utilisation and dollars, worked out by hand."""

from dataclasses import replace

import pytest

from prefect_rlhf.placement.cost.datasheets.hardware import Efficiency, Hardware
from prefect_rlhf.placement.cost.datasheets.kinds import DATASHEETS
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.sources import CostSources
from prefect_rlhf.placement.cost.workload import CallWork, Workload
from prefect_rlhf.placement.devices.mesh import ClusterShape
from prefect_rlhf.placement.models.known_models import known_shape
from prefect_rlhf.placement.planner.preset_plan import preset
from prefect_rlhf.placement.schedule.estimate import estimate
from prefect_rlhf.placement.schedule.throughput import IterationWork, call_speeds, model_flops
from tests.support.strategies import ppo, remax

LLAMA = ModelSizes.of_shape(known_shape("llama-7b"))
LAYERS, HIDDEN, INNER, VOCABULARY = 32, 4096, 11008, 32000
WEIGHTS = LAYERS * (4 * HIDDEN**2 + 3 * HIDDEN * INNER)
LENGTHS = Workload.fixed(100, 300)
FOUR = ClusterShape("four", 1, 4, 80 << 30)


def flops(kind, sizes=LLAMA, rows=8, **fields):
    return model_flops(CallWork(kind, rows, LENGTHS, **fields), sizes)


def test_a_forward_pass_has_two_flops_of_each_active_parameter_and_attention():
    """Attention: scores and their sum of values, 2 FLOPs each, of half of all pairs. The head is for responses."""
    attention = LAYERS * 4 * HIDDEN * 400 / 2
    assert flops("inference") == 8 * (400 * (2 * WEIGHTS + attention) + 300 * 2 * HIDDEN * VOCABULARY)
    assert flops("inference", replace(LLAMA, head="scalar")) == 8 * 400 * (2 * WEIGHTS + attention)
    assert flops("generate") == flops("inference")  # a key-value cache changes the order alone


def test_a_train_step_has_three_times_as_many_in_each_epoch():
    assert flops("train_step") == 3 * flops("inference")
    assert flops("train_step", epochs=2, mini_batches=4) == 6 * flops("inference")


def test_only_a_tokens_experts_count_as_active():
    mixture = ModelSizes.of_shape(known_shape("mixtral-8x7b"))
    dense = replace(mixture, num_experts=0, experts_per_token=0)
    router, expert = 8 * 4096, 3 * 4096 * 14336
    assert flops("inference", mixture) - flops("inference", dense) == 8 * 400 * 32 * 2 * (router + expert)


def test_utilisation_is_flops_over_seconds_and_peak_of_all_devices():
    graph, sources = ppo(), CostSources.equal_nodes(Hardware(DATASHEETS["h100"], 4), 1)
    made = estimate(graph, preset("flattening", graph, FOUR, FOUR.whole, 512), LENGTHS, sources)
    speeds = call_speeds(graph, made.plan, made.schedule, LENGTHS, sources)
    trained = next(call for call in graph if call.kind == "train_step")
    sizes, speed = ModelSizes.of(graph.model(trained.role)), speeds[trained.name]
    used = model_flops(CallWork.expected(trained, LENGTHS), sizes)
    assert speed.utilisation == pytest.approx(used / speed.seconds / (4 * sizes_peak(sizes)))
    assert speed.tokens_per_second == pytest.approx(trained.num_rows * trained.epochs * 400 / speed.seconds)
    assert speed.share == speed.seconds / made.seconds
    computed = next(call for call in graph if call.kind == "compute" and call.every is None)
    assert speeds[computed.name].tokens_per_second is speeds[computed.name].utilisation is None
    assert speeds.keys() == {call.name for call in graph if call.every is None}


def sizes_peak(sizes):
    return 989e12 if sizes.dtype == "bfloat16" else 67e12


def test_perfect_kernels_would_be_used_in_full():
    """Without launches, bandwidths and fixed parts a forward pass takes its FLOPs over the peak."""
    fast = replace(DATASHEETS["h100"], memory_bytes_per_second=1e30)
    hardware = Hardware(fast, 1, efficiency=Efficiency(1, 1, 1, 0, 0, 0, 0, 0))
    graph, one = ppo(), ClusterShape("one", 1, 1, 80 << 30)
    sources = CostSources.equal_nodes(hardware, 1)
    made = estimate(graph, preset("flattening", graph, one, one.whole, 512), LENGTHS, sources)
    speeds = call_speeds(graph, made.plan, made.schedule, LENGTHS, sources)
    read = [speeds[call.name].utilisation for call in graph if call.kind == "inference" and call.every is None]
    assert read and read == pytest.approx([1.0] * len(read))


def test_a_processor_has_no_peak_by_a_datasheet():
    sheet = replace(DATASHEETS["h100"], is_host=True)
    graph, sources = ppo(), CostSources.equal_nodes(Hardware(sheet, 4), 1)
    made = estimate(graph, preset("flattening", graph, FOUR, FOUR.whole, 512), LENGTHS, sources)
    assert {speed.utilisation for speed in call_speeds(graph, made.plan, made.schedule, LENGTHS, sources).values()} == {
        None
    }


def test_a_sample_is_a_row_that_is_trained():
    """PPO's actor and critic train on the same rows; ReMax generates a second row that nobody trains on."""
    for graph in (ppo(), remax()):
        (rows,) = {call.num_rows for call in graph if call.kind == "train_step"}
        work = IterationWork.of(graph, LENGTHS)
        assert (work.samples, work.tokens, work.response_tokens) == (rows, 400 * rows, 300 * rows)


def test_dollars_are_for_response_tokens():
    """Half an hour at 20 dollars an hour for 2 million of 3 million tokens."""
    assert IterationWork(1000, 3e6, 2e6, 20.0).dollars_per_million(1800) == 5.0
    assert IterationWork(1000, 3e6, 2e6).dollars_per_million(1800) is None
