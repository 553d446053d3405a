"""The cost of calls: what physics says of any model of it, and figures worked out by hand."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.papers.engines import HybridFlowExecution, RealExecution
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.cost.call import _CallSeconds, call_cost, train_step_costs
from prefect_rlhf.placement.cost.call_bytes import call_bytes
from prefect_rlhf.placement.cost.datasheets.hardware import NETWORKS, Efficiency, Hardware
from prefect_rlhf.placement.cost.datasheets.kinds import DATASHEETS, datasheet
from prefect_rlhf.placement.cost.execution import Execution
from prefect_rlhf.placement.cost.paged_cache import expected_cache_bytes, whole_cache_bytes
from prefect_rlhf.placement.cost.seconds import Seconds
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.times.roofline import DatasheetTimes
from prefect_rlhf.placement.cost.workload import CallWork, LengthDistribution, Workload
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.graph import Operation, Term
from prefect_rlhf.placement.models.known_models import KNOWN_SHAPES
from prefect_rlhf.placement.models.model import ModelSpec
from prefect_rlhf.placement.models.weights import num_parameters
from tests.support.strategies import ppo

LLAMA = ModelSizes.of_shape(KNOWN_SHAPES["llama-7b"])
H100 = Hardware(DATASHEETS["h100"], 8, NETWORKS["roce-3200"])
PERFECT = Efficiency(1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0)
KINDS = ("generate", "inference", "train_step")
POWERS = st.sampled_from([1, 2, 4, 8])

kinds = st.sampled_from(KINDS)
models = st.sampled_from([ModelSizes.of_shape(KNOWN_SHAPES[name]) for name in ("llama-7b", "llama-13b", "llama-70b")])
devices = st.sampled_from([kind for kind in DATASHEETS.values() if not kind.measured])


@st.composite
def executions(draw):
    """A strategy on whole nodes of eight devices."""
    nodes, tp, pp = draw(st.integers(1, 4)), draw(POWERS), draw(POWERS)
    dp = max(1, 8 * nodes // tp // pp)
    engine = draw(st.sampled_from([RealExecution, HybridFlowExecution, Execution]))
    return engine(
        Strategy(dp, tp, pp), nodes, 8, micro_batches=draw(POWERS), recompute=draw(st.sampled_from([0, 3, "all"]))
    )


def work(kind, rows=512, prompt=512, response=512, mini_batches=1):
    return CallWork(kind, rows, Workload.fixed(prompt, response), mini_batches)


def cost(call, execution, sizes=LLAMA, hardware=H100):
    return call_cost(call, execution, DatasheetTimes.of(sizes, hardware))


@given(st.sampled_from(["generate", "inference"]), executions(), models, st.integers(1, 700))
def test_a_cost_does_not_depend_on_other_meshes(kind, execution, sizes, rows):
    """A cost that meshes with equal replicas have in common is what the formulas give for this mesh alone."""
    times = DatasheetTimes.of(sizes, H100)
    call = _CallSeconds(work(kind, rows), execution, times)
    alone = call.generate() if kind == "generate" else call.inference()
    assert call_cost(call.work, execution, times) == alone + Seconds(call=times.fixed(kind))


@given(executions(), models, st.integers(1, 700), st.lists(st.sampled_from([0, 1, 3, "all"]), max_size=4))
def test_costs_of_several_recompute_counts_match_each_alone(execution, sizes, rows, recomputes):
    times, call = DatasheetTimes.of(sizes, H100), work("train_step", rows)
    each = [call_cost(call, replace(execution, recompute=recompute), times) for recompute in recomputes]
    assert train_step_costs(call, execution, times, recomputes) == each


@given(kinds, executions(), models, devices)
def test_every_term_is_a_time(kind, execution, sizes, device):
    terms = cost(work(kind), execution, sizes, replace(H100, device=device)).by_term()
    assert terms
    assert all(0 < seconds < 1e6 for seconds in terms.values())


@given(kinds, executions(), st.integers(1, 600), st.integers(1, 5), st.sampled_from([1, 2]))
def test_uneven_rows_cost_as_much_as_the_fullest_replica(kind, execution, items, cuts, width):
    """Of every mini-batch; counted by dealing items one by one. And no row more takes less."""
    cuts = cuts if kind == "train_step" else 1
    fullest, dp = 0, execution.strategy.dp
    for m in range(cuts):
        of_mini_batch = range(m * items // cuts, (m + 1) * items // cuts)
        fullest = max(fullest, sum(index % dp == 0 for index, _ in enumerate(of_mini_batch)))
    uneven, even, more = (
        CallWork(kind, count * width, Workload.fixed(512, 512), cuts, rows_per_item=width)
        for count in (items, fullest * dp * cuts, items + 1)
    )
    assert cost(uneven, execution) == cost(even, execution)
    assert cost(uneven, execution).total <= cost(more, execution).total * (1 + 1e-9)
    num_bytes = [call_bytes(each, execution, LLAMA) for each in (uneven, even, more)]
    assert num_bytes[0].total <= min(num_bytes[1].total, num_bytes[2].total)
    assert num_bytes[0].kv_cache == num_bytes[1].kv_cache


@given(kinds, executions(), models, st.integers(1, 3), st.integers(1, 3))
def test_more_tokens_take_longer(kind, execution, sizes, prompts, responses):
    """Longer prompts, longer answers, more rows; work that comes in the same cuts."""
    base = cost(work(kind), execution, sizes).total
    assert cost(work(kind, prompt=512 * prompts), execution, sizes).total >= base - 1e-9
    assert cost(work(kind, response=512 * responses), execution, sizes).total >= base - 1e-9
    assert cost(work(kind, rows=512 * prompts), execution, sizes).total >= base - 1e-9
    assert cost(work(kind, response=1024), execution, sizes).total > base


@given(kinds, executions(), st.floats(1.1, 20))
def test_a_slower_link_never_helps(kind, execution, factor):
    times = DatasheetTimes.of(LLAMA, H100)
    links = replace(times.links, node=times.links.node / factor, network=times.links.network / factor)
    slower = replace(times, links=links)
    fast, slow = (call_cost(work(kind), execution, some).total for some in (times, slower))
    assert slow >= fast
    if execution.strategy.tp > 1:
        assert slow > fast


@given(st.sampled_from([2, 4, 8]), st.sampled_from([1, 8, 64]))
def test_every_micro_batch_pays_for_each_hop_of_a_pipeline_and_more_between_nodes(pp, pieces):
    """Forward and back: the message's latency, and the hosts' part while devices wait."""
    on_node, between = (
        cost(work("train_step", rows=pieces, response=1), Execution(Strategy(1, 1, pp), nodes, pp // nodes, pieces))
        for nodes in (1, 2)
    )
    assert on_node.pp_communication >= pieces * 2 * H100.efficiency.link_latency_seconds
    more = between.pp_communication - on_node.pp_communication
    assert more >= pieces * 2 * (H100.network.latency_seconds - H100.efficiency.link_latency_seconds)


@given(kinds, executions(), st.sampled_from(["matmul", "memory", "link"]))
def test_better_hardware_never_hurts(kind, execution, constant):
    better = replace(H100.efficiency, **{constant: 1.0})
    assert cost(work(kind), execution, hardware=replace(H100, efficiency=better)).total <= cost(
        work(kind), execution
    ).total * (1 + 1e-9)


@given(kinds, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]))
def test_twice_the_replicas_halve_the_compute(kind, tp, dp):
    """Each has half of the rows, and FLOPs are all that compute counts when rows are many."""
    one, two = (cost(work(kind, rows=4096), Execution(Strategy(d, tp), 1, 8)) for d in (dp, 2 * dp))
    if kind != "generate":  # a decoding step reads the weights however few its rows are
        assert two.compute == pytest.approx(one.compute / 2)
    assert two.total < one.total


@given(kinds, executions())
def test_one_stage_has_no_bubble_one_shard_no_reduces_one_replica_no_sums(kind, execution):
    terms = cost(work(kind), execution)
    strategy = execution.strategy
    if strategy.pp == 1:
        assert terms.pipeline_bubble == terms.pp_communication == 0
    if strategy.tp == 1:
        assert terms.tp_communication == 0
    if strategy.dp == 1 or kind != "train_step":
        assert terms.dp_communication == 0


@given(kinds, st.sampled_from([2, 4, 8]))
def test_pipelines_need_micro_batches(kind, pp):
    """With one micro-batch only one stage works at a time; with many the bubble is a small part."""
    few, many = (cost(work(kind, rows=1024), Execution(Strategy(1, 1, pp), 1, 8, m)) for m in (1, 64))
    if kind != "generate":
        busy = few.total - few.pipeline_bubble - few.call
        assert few.pipeline_bubble >= 0.5 * (pp - 1) * busy / pp
        assert many.pipeline_bubble < few.pipeline_bubble / 4


@given(kinds, st.sampled_from(sorted(NETWORKS)))
def test_tensor_parallelism_across_nodes_is_dearer(kind, network):
    """One replica of 16 shards is slower than two of 8, although each device has as much to compute."""
    hardware = replace(H100, network=NETWORKS[network])
    within = cost(work(kind), Execution(Strategy(2, 8), 2, 8), hardware=hardware)
    across = cost(work(kind), Execution(Strategy(1, 16), 2, 8), hardware=hardware)
    assert across.tp_communication > 1.5 * within.tp_communication
    assert across.total > within.total


def test_cuda_graphs_save_only_launches():
    """ReaL, table 6: generation of 34.5 s takes 16.3 s with graphs."""
    graphs, eager = (
        cost(CallWork("generate", 512, Workload.fixed(1024, 1024, on)), Execution(Strategy(8, 2), 2, 8, engine="vllm"))
        for on in (True, False)
    )
    assert eager.total > 1.5 * graphs.total
    assert eager._replace(launch=0) == graphs._replace(launch=0)


def test_megatron_decoding_launches_every_kernel_without_cuda_graphs():
    """Only vLLM captures CUDA graphs among our engines."""
    allowed, forbidden = (
        cost(CallWork("generate", 512, Workload.fixed(1024, 1024, on)), Execution(Strategy(8, 2), 2, 8))
        for on in (True, False)
    )
    assert allowed == forbidden
    replayed = cost(CallWork("generate", 512, Workload.fixed(1024, 1024)), RealExecution(Strategy(8, 2), 2, 8))
    assert replayed.launch < allowed.launch / 3


def test_training_on_perfect_hardware_takes_six_flops_per_parameter_and_token():
    """Kaplan et al. (2020): 6 N tokens, N without the embedding; attention adds 6 x width x context per layer."""
    hardware = replace(H100, efficiency=PERFECT)
    shape = KNOWN_SHAPES["llama-7b"]
    tokens = 64 * 1024
    weights = shape.num_layers * (4 * 4096 * 4096 + 3 * 4096 * 11008)
    attention = shape.num_layers * 4096 * 1024
    flops = 6 * tokens * (weights + attention)
    critic = ModelSizes.of_shape(shape, head="scalar")
    found = cost(work("train_step", rows=64), Execution(Strategy(1, 1)), critic, hardware)
    assert found.compute == pytest.approx(flops / 989e12, rel=1e-12)
    again = cost(work("train_step", rows=64), Execution(Strategy(), recompute="all"), critic, hardware)
    assert again.compute == pytest.approx(found.compute * 4 / 3)


def test_decoding_a_row_reads_every_weight_once_per_token():
    """The well-known bound of a token's latency: bytes of the weights over the memory bandwidth."""
    hardware = replace(H100, efficiency=PERFECT)
    steps = 100
    found = cost(CallWork("generate", 1, Workload.fixed(1, steps)), Execution(Strategy()), LLAMA, hardware)
    read = 2 * (LLAMA.num_parameters - LLAMA.table)  # the embedding is looked up, not read
    assert found.total == pytest.approx(steps * read / 3.35e12, rel=0.02)


def test_gradients_of_replicas_cross_the_network_once_per_optimizer_step():
    """Reduce-scatter in float32 and all-gather in bfloat16: (dp - 1) / dp x 6 bytes per parameter (ZeRO, section 7)."""
    hardware = replace(H100, efficiency=PERFECT, network=replace(H100.network, latency_seconds=0.0))
    call = work("train_step", mini_batches=4)
    found = cost(call, Execution(Strategy(2, 8), 2, 8), LLAMA, hardware)
    bandwidth = 400e9 / 8  # a device's share of its node's way out
    assert found.dp_communication == pytest.approx(4 * 0.5 * 6 * (LLAMA.num_parameters / 8) / bandwidth, rel=1e-3)


def test_continuous_batching_pays_for_rows_that_still_run():
    """A third of the rows ends early: cheaper than all rows to the end, dearer than the mean length."""
    execution = Execution(Strategy(8), 1, 8)
    prompts = LengthDistribution.fixed(512)
    mixed, longest, mean = (
        cost(CallWork("generate", 512, Workload(prompts, responses)), execution).total
        for responses in (
            LengthDistribution.of({256: 1, 1024: 2}),
            LengthDistribution.fixed(1024),
            LengthDistribution.fixed(768),
        )
    )
    assert mean < mixed < longest


def test_a_cache_too_small_for_all_rows_makes_generation_longer():
    execution = Execution(Strategy(8), 1, 8)
    room_for_half = whole_cache_bytes(32, work("generate").workload.longest, LLAMA, 1)
    whole, halves = (cost(work("generate"), replace(execution, cache_bytes=room)) for room in (None, room_for_half))
    assert halves.launch == pytest.approx(2 * whole.launch, rel=0.01)
    assert halves.total > whole.total


@given(st.integers(1, 64), st.lists(st.tuples(st.integers(1, 400), st.floats(0.01, 1)), min_size=1, max_size=6))
def test_a_larger_cache_never_makes_generation_longer(rows, shares):
    """And one for the rows as they are expected to grow takes no longer than one for all at their longest."""
    lengths = Workload(LengthDistribution.fixed(100), LengthDistribution.of(dict(shares)))
    made, execution = CallWork("generate", rows, lengths), Execution(Strategy(), 1, 1, engine="vllm")
    longest = whole_cache_bytes(rows, lengths.longest, LLAMA, 1)
    expected = expected_cache_bytes(rows, lengths, LLAMA, 1)
    caches = [whole_cache_bytes(1, lengths.longest, LLAMA, 1), expected // 4, expected // 2, expected, longest]
    seconds = [cost(made, replace(execution, cache_bytes=cache)).total for cache in sorted(caches)]
    assert all(more <= less * (1 + 1e-9) for less, more in pairwise(seconds))
    assert cost(made, replace(execution, cache_bytes=expected)).total == pytest.approx(cost(made, execution).total)


def test_zero_lengths_and_shares_are_refused():
    for shares in ({-1: 1.0}, {5: -1.0}, {5: 0.0}):
        with pytest.raises(InvalidInput, match="lengths"):
            LengthDistribution.of(shares)


def test_a_plan_over_nodes_without_a_network_is_refused_in_one_line():
    with pytest.raises(InvalidInput, match=r"cluster.network: got 'none', expected a network between nodes"):
        cost(work("inference"), Execution(Strategy(1, 16), 2, 8), hardware=replace(H100, network=None))


def test_a_device_without_a_datasheet_asks_for_a_profile():
    with pytest.raises(InvalidInput, match="run rlhf/profile"):
        DatasheetTimes.of(LLAMA, Hardware(datasheet("cpu"), 2))


@pytest.mark.parametrize("name", sorted(KNOWN_SHAPES))
def test_sizes_agree_with_the_parameters_themselves(name):
    """In closed form, and summed over the list of parameters."""
    for head in ("lm", "scalar"):
        model = ModelSpec("actor", "", head, KNOWN_SHAPES[name])
        assert ModelSizes.of(model).num_parameters == num_parameters(model)


ASKED = {  # by a train_step of two terms: the outputs of each, and the temperature
    0: (("values",), 1.0, ("values",), 1.0),
    1: (("logprobs", "values"), 0.7, ("logprobs",), 0.7),
    2: (("logprobs", "entropy"), 1.0, ("logprobs",), 1.0),
    3: (("logprobs", "entropy"), 1.0, ("logprobs",), 0.7),
}


@pytest.mark.parametrize("passes", ASKED)
def test_each_output_of_logits_is_a_pass_over_the_vocabulary(passes):
    """Another temperature is another pass; values need none, so an inference of them takes less."""
    graph = ppo()
    train = graph.call("actor_train_step")
    outputs, temperature, others, other = ASKED[passes]
    first, second = (
        Term(str(asked), Operation("some"), asked, train.inputs, train.rows, train.num_rows, temperature=degree)
        for asked, degree in ((outputs, temperature), (others, other))
    )
    made = CallWork.of(replace(train, terms=(first, second)), Workload.fixed(512, 512))
    assert made.vocabulary_passes == passes
    single, none = (cost(replace(made, vocabulary_passes=count), Execution(Strategy())).total for count in (1, 0))
    assert cost(made, Execution(Strategy())).total == pytest.approx(none + passes * (single - none))
    assert single > none
    read = {name: CallWork.of(graph.call(f"{name}_inference"), Workload.fixed(512, 512)) for name in ("critic", "ref")}
    two = ModelSizes.of_shape(KNOWN_SHAPES["llama-7b"], "lm+scalar")
    assert cost(read["critic"], Execution(Strategy()), two).total < cost(read["ref"], Execution(Strategy()), two).total


def test_the_papers_models_have_the_papers_sizes():
    """ReaL's table 1 gives the totals; its `without output embedding` is our scalar model without its one row."""
    totals = {"7b": 8030261248, "13b": 14001525760, "34b": 35321028608, "70b": 70553706496}
    for size, total in totals.items():
        assert ModelSizes.of_shape(KNOWN_SHAPES[f"llama3-{size}"]).num_parameters == total


TERMS = st.builds(Seconds, *[st.floats(0, 10)] * len(Seconds._fields))


@given(st.tuples(TERMS, TERMS), st.floats(0, 10))
def test_terms_add_up(pair, factor):
    one, other = pair
    assert (one + other).total == pytest.approx(one.total + other.total)
    assert one.times(factor).total == pytest.approx(one.total * factor)
    assert sum(one.by_term().values()) == pytest.approx(one.total)
