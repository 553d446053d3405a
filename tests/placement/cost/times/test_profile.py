"""Profiles: values that survive JSON, refuse what they were not measured for, and stand in for a datasheet."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.cost.call import call_cost
from prefect_rlhf.placement.cost.datasheets.collectives import CollectiveGroup
from prefect_rlhf.placement.cost.datasheets.hardware import NETWORKS, Hardware
from prefect_rlhf.placement.cost.datasheets.kinds import DATASHEETS, datasheet
from prefect_rlhf.placement.cost.execution import Execution
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.sources import CostSources
from prefect_rlhf.placement.cost.times.profile import Grid, Measurement, Profile, ProfiledTimes
from prefect_rlhf.placement.cost.times.roofline import DatasheetTimes
from prefect_rlhf.placement.cost.workload import CallWork, Workload
from prefect_rlhf.placement.devices.mesh import DeviceMesh
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.models.known_models import KNOWN_SHAPES

SHAPE = KNOWN_SHAPES["llama-7b"]
SIZES = ModelSizes.of_shape(SHAPE)
HARDWARE = Hardware(DATASHEETS["h100"], 8, NETWORKS["roce-3200"])
SHEET = DatasheetTimes.of(SIZES, HARDWARE)
VERSIONS = {"torch": "2.13.0", "vllm": "0.32.0"}
ROWS, LENGTHS, TOKENS = (1, 2, 4, 8, 16, 32, 64, 128), (256, 512, 1024, 2048), tuple(2**n for n in range(10, 19))


def measure(source, tps=(1, 2)):
    """A profile of whatever layer times."""
    found = []
    for tp in tps:
        for rows in ROWS:
            found += [Measurement("sample", tp, rows, 1, source.sample(rows, tp).total)]
            for length in LENGTHS:
                for piece, times in (
                    ("forward", source.forward(rows, length, tp)),
                    ("backward", source.backward(rows, length, tp)),
                    ("decode", source.decode(rows, length, tp, False)),
                    ("decode_graphs", source.decode(rows, length, tp, True)),
                ):
                    found.append(Measurement(piece, tp, rows, length, times.total))
        for tokens in TOKENS:
            found.append(Measurement("head_forward", tp, tokens, 1, source.head_forward(tokens, tp).total))
            found.append(Measurement("head_backward", tp, tokens, 1, source.head_backward(tokens, tp).total))
    fixed = tuple((kind, "megatron", source.fixed(kind)) for kind in ("generate", "inference", "train_step"))
    versions = tuple(VERSIONS.items())
    return Profile(SHAPE, "bfloat16", "h100", versions, tuple(found), source.links, source.adam(1), fixed)


PROFILE = measure(SHEET)


def test_a_profile_survives_json():
    assert Profile.from_json(PROFILE.to_json()) == PROFILE


@given(
    st.sampled_from(["generate", "inference", "train_step"]),
    st.sampled_from([Strategy(4, 2), Strategy(8), Strategy(2, 1, 4), Strategy(2, 2, 2)]),
    st.integers(65, 512),
    st.sampled_from([0, 3, "all"]),
)
def test_a_profile_of_a_datasheet_costs_calls_as_the_datasheet_does(kind, strategy, rows, recompute):
    """At sizes between powers of two as well: interpolation loses a few percent, where attention is quadratic."""
    execution = Execution(strategy, 1, 8, micro_batches=4, recompute=recompute)
    call = CallWork(kind, rows, Workload.fixed(300, 500))
    costs = (call_cost(call, execution, times).total for times in (SHEET, ProfiledTimes(PROFILE, SIZES)))
    measured, expected = costs
    assert measured == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            {"device": "a100-80"},
            "profile.device: got 'h100', expected a100-80, which this run has: run rlhf/profile again",
        ),
        ({"dtype": "float32"}, "profile.dtype: got 'bfloat16', expected float32"),
        (
            {"shape": KNOWN_SHAPES["llama-13b"]},
            "profile.shape: got '32 layers of 4096, feed-forward 11008', expected 40",
        ),
        ({"shape": replace(SHAPE, vocab_size=9)}, "profile.shape: got"),
        ({"versions": {"torch": "2.14.0", "vllm": "0.32.0"}}, "profile.versions.torch: got '2.13.0', expected 2.14.0"),
        ({"versions": {"torch": "2.13.0"}}, "profile.versions.vllm: got '0.32.0', expected none"),
    ],
)
def test_a_profile_of_something_else_is_refused_in_one_line(change, complaint):
    run = {"shape": SHAPE, "dtype": "bfloat16", "device": "h100", "versions": VERSIONS}
    assert PROFILE.check(**run) is PROFILE
    with pytest.raises(InvalidInput) as error:
        PROFILE.check(**(run | change))
    assert str(error.value).startswith(complaint)
    assert "\n" not in str(error.value)


def test_a_model_of_either_head_uses_the_same_profile():
    critic = ProfiledTimes(PROFILE, ModelSizes.of_shape(SHAPE, "scalar"))
    assert critic.head_forward(1024, 1).total == 0
    assert critic.forward(8, 512, 1) == ProfiledTimes(PROFILE, SIZES).forward(8, 512, 1)


def test_a_degree_that_was_not_measured_is_refused():
    with pytest.raises(InvalidInput, match=r"profile.megatron.forward: got 'tp \[1, 2\]', expected .* with tp 4"):
        ProfiledTimes(PROFILE, SIZES).forward(8, 512, 4)


@pytest.mark.parametrize("text", ["", "{}", "[1]", PROFILE.to_json()[:-3], PROFILE.to_json().replace("tp", "pt", 1)])
def test_a_malformed_profile_is_one_line(text, tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(text)
    for file in (path, tmp_path / "absent.json"):
        with pytest.raises(InvalidInput) as error:
            Profile.read(file)
        assert "\n" not in str(error.value)


@given(st.lists(st.floats(0, 1), min_size=9, max_size=9), st.floats(0.1, 40), st.floats(0.1, 40))
def test_a_grid_is_exact_where_measured_and_between_its_neighbours_elsewhere(values, rows, length):
    sizes = (2, 8, 16)
    points = [(r, c, values[3 * i + j]) for i, r in enumerate(sizes) for j, c in enumerate(sizes)]
    grid = Grid.of(points)
    for r, c, value in points:
        assert grid.at(r, c) == pytest.approx(value)
    if rows <= 16 and length <= 16:
        assert min(values) - 1e-9 <= grid.at(rows, length) <= max(values) + 1e-9
    assert grid.at(rows, length) >= 0


@pytest.mark.parametrize("points", [[], [(1, 1, 0.1), (2, 2, 0.1)], [(1, 1, 0.1), (1, 1, 0.2)]])
def test_an_incomplete_grid_is_refused(points):
    with pytest.raises(InvalidInput, match="lengths once"):
        Grid.of(points)


def test_sources_prefer_profiles_and_require_them_without_a_datasheet():
    slow = replace(PROFILE, measurements=tuple(replace(m, seconds=10 * m.seconds) for m in PROFILE.measurements))
    mesh, execution = DeviceMesh(0, 1, 0, 8), Execution(Strategy(8), 1, 8)
    call = CallWork("inference", 64, Workload.fixed(300, 500))
    sheet, profiled = (
        CostSources.equal_nodes(HARDWARE, 1, some).call_cost(call, execution, SIZES, mesh) for some in ((), (slow,))
    )
    assert profiled.total > 5 * (sheet.total - sheet.call)
    other = ModelSizes.of_shape(KNOWN_SHAPES["llama-13b"])
    with pytest.raises(InvalidInput, match="profiles of h100: got 'no profile of 40 layers of 5120 in bfloat16'"):
        CostSources.equal_nodes(HARDWARE, 1, (slow,)).call_cost(call, execution, other, mesh)
    with pytest.raises(InvalidInput, match="run rlhf/profile"):
        CostSources.equal_nodes(Hardware(datasheet("cpu"), 8), 1).call_cost(call, execution, SIZES, mesh)


def test_a_mesh_of_two_kinds_of_nodes_is_as_slow_as_the_slower():
    fast, slow = (Hardware(DATASHEETS[kind], 8, NETWORKS["infiniband-200"]) for kind in ("a100-80", "v100-32"))
    call, execution = CallWork("inference", 64, Workload.fixed(300, 500)), Execution(Strategy(16), 2, 8)
    mesh = DeviceMesh(0, 2, 0, 8)
    mixed, both = CostSources((fast, slow)), CostSources((slow, slow))
    assert mixed.call_cost(call, execution, SIZES, mesh) == both.call_cost(call, execution, SIZES, mesh)
    assert mixed.links([mesh]) == slow.links()


def test_each_engine_has_its_own_times():
    """Generation in vLLM is made of vLLM's prefill, steps and choices; what it has none of is refused."""
    slower = tuple(
        replace(m, engine="vllm", seconds=3 * m.seconds)
        for m in PROFILE.measurements
        if m.piece in ("forward", "decode", "sample")
    )
    both = replace(PROFILE, measurements=PROFILE.measurements + slower, call_seconds=())
    work, execution = (
        CallWork("generate", 64, Workload.fixed(300, 500, cuda_graphs=False)),
        Execution(Strategy(8), 1, 8),
    )
    megatron, vllm = (call_cost(work, execution, ProfiledTimes(both, SIZES, e)).total for e in ("megatron", "vllm"))
    assert vllm == pytest.approx(3 * megatron)
    with pytest.raises(InvalidInput, match="profile.vllm.backward"):
        ProfiledTimes(both, SIZES, "vllm").backward(8, 512, 1)


@pytest.mark.parametrize(("only", "graphs"), [("decode", False), ("decode_graphs", True)])
def test_a_profile_that_timed_decoding_in_one_way_has_that_time(only, graphs):
    """A profile of GPUs times vLLM with CUDA graphs alone, a profile of CPUs without."""
    left = tuple(m for m in PROFILE.measurements if m.piece == only or not m.piece.startswith("decode"))
    times = ProfiledTimes(replace(PROFILE, measurements=left), SIZES)
    expected = SHEET.decode(8, 512, 1, graphs).total
    assert [times.decode(8, 512, 1, asked).total for asked in (False, True)] == [pytest.approx(expected)] * 2


def test_new_weights_cost_their_fingerprint_and_their_packing():
    """A train_step makes them; the generate after it is the first to use them, and vLLM packs them."""
    work, execution = Workload.fixed(300, 500), Execution(Strategy(pp=2), 1, 8)
    more = replace(PROFILE, written_seconds=1e-9, packed_seconds=2e-9)
    fullest = SIZES.stage_parameters(execution.strategy, 1)
    for kind, engine, each in (
        ("train_step", "megatron", 1e-9),
        ("generate", "megatron", 0.0),
        ("inference", "megatron", 0),
    ):
        costs = (
            call_cost(CallWork(kind, 64, work), execution, ProfiledTimes(p, SIZES, engine)).total
            for p in (PROFILE, more)
        )
        before, after = costs
        assert after - before == pytest.approx(each * fullest)
    assert ProfiledTimes(more, SIZES, "vllm").packed(1000) == pytest.approx(2e-6)


def test_measured_messages_count_in_place_of_bandwidths():
    group = CollectiveGroup(2, "node", 2)
    sums = [Measurement("all_reduce", 2, size, 1, seconds) for size, seconds in ((1000, 1.0), (2000, 2.0))]
    shares = [Measurement("share", 2, size, 1, seconds) for size, seconds in ((1000, 3.0), (2000, 4.0))]
    times = ProfiledTimes(replace(PROFILE, measurements=(*PROFILE.measurements, *sums, *shares)), SIZES)
    assert (times.all_reduce(1500, group), times.share(1500, group)) == (1.5, 3.5)
    for other in (CollectiveGroup(4, "node", 4), CollectiveGroup(2, "network", 1)):
        assert times.all_reduce(1500, other) == SHEET.all_reduce(1500, other)
        assert times.share(1500, other) == SHEET.share(1500, other)


def test_a_tied_embedding_is_added_up_over_a_pipeline():
    """Its two copies are on the first stage and on the last; critics have but one."""
    tied = replace(SHAPE, tied_embeddings=True)
    work = CallWork("train_step", 64, Workload.fixed(300, 500))
    for head, num_sums in (("lm", 1), ("scalar", 0)):
        sizes = ModelSizes.of_shape(tied, head)
        times = DatasheetTimes.of(sizes, HARDWARE)
        found = call_cost(work, Execution(Strategy(pp=2), 1, 8), times).dp_communication
        assert found == pytest.approx(num_sums * times.all_reduce(4 * sizes.table, CollectiveGroup(2, "node", 1)))


def test_sequence_parallelism_takes_the_layers_that_were_measured_and_another_gather():
    """A profile has no layers with it, so a plan with it is priced as slower, never as faster."""
    work, times = CallWork("train_step", 32, Workload.fixed(256, 256)), ProfiledTimes(PROFILE, SIZES)
    plain = Execution(Strategy(tp=2), 1, 8, micro_batches=4)
    divided = replace(plain, tokens_over_tp=True)
    (before, after) = (call_cost(work, execution, times) for execution in (plain, divided))
    assert (after.compute, after.total > before.total) == (before.compute, True)
