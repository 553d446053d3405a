"""Profiling real engines on two ranks: every piece that the cost model asks for is there, told as it comes."""

import pytest

from prefect_rlhf.engines.rank.profiling.profiling_rank import PassSeconds
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.cost.call import call_cost
from prefect_rlhf.placement.cost.execution import Execution
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.times.profile import Profile, ProfiledTimes, Subject
from prefect_rlhf.placement.cost.workload import CallWork, Workload
from prefect_rlhf.placement.devices.mesh import DeviceMesh
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.models.model import ModelSpec, TransformerShape
from prefect_rlhf.tasks.profiling.bench import Bench, Sizes, part_of
from prefect_rlhf.tasks.profiling.measure import Findings, _keep_generation, held_up, measure
from tests.support.nccl_rules import nccl_rules

pytestmark = pytest.mark.slow

SHAPE = TransformerShape(64, 128, 4, 4, 2, 32, 64, 64, 1e4, 1e-5, True)
SUBJECT = Subject(SHAPE, "bfloat16", "cpu", "cpu", 2, "a processor", (("torch", "2"),))


@pytest.fixture(scope="module")
def told():
    return []


@pytest.fixture(scope="module")
def profile(told):
    return measure(SUBJECT, Sizes(2, 16, (1,)), lambda number, total, words: told.append((number, total, words)))


def test_every_measurement_is_announced(profile, told):
    numbers, totals, _ = zip(*told, strict=True)
    assert numbers == tuple(range(1, totals[0] + 1))
    assert set(totals) == {totals[0]}


def test_a_profile_records_its_machine_and_survives_json(profile):
    assert (profile.shape, profile.num_devices, profile.processor) == (SHAPE, 2, "a processor")
    assert 0 <= profile.busy < 1
    assert Profile.from_json(profile.to_json()) == profile


@pytest.mark.parametrize(
    ("kind", "strategy", "engine"),
    [
        ("generate", Strategy(2), "vllm"),
        *(
            (kind, s, "megatron")
            for kind in ("generate", "inference", "train_step")
            for s in (Strategy(2), Strategy(pp=2))
        ),
    ],
)
def test_a_profile_times_every_call_under_every_strategy(profile, kind, strategy, engine):
    """Also at sizes beyond those that were timed."""
    times = ProfiledTimes(profile, ModelSizes.of_shape(SHAPE), engine)
    cost = call_cost(CallWork(kind, 8, Workload.fixed(6, 6)), Execution(strategy, 1, 2, engine=engine), times)
    assert 0 < cost.total < 60


def test_weights_and_links_are_measured(profile):
    links = profile.links
    assert min(links.device, links.node, links.host, profile.adam_seconds, profile.written_seconds) > 0
    assert profile.packed_seconds >= 0


def test_the_same_work_is_timed_on_one_and_on_both_devices(profile):
    """Every kind of call in every engine, and a move of weights."""
    works = {(one.work, one.engine): one.busy for one in profile.slow_downs}
    kinds = ("inference", "train_step", "generate", "move")
    assert works == {(kind, "megatron"): (1, 2) for kind in kinds} | {("generate", "vllm"): (1, 2)}
    assert all(seconds > 0 for one in profile.slow_downs for seconds in one.seconds)


def test_a_part_has_no_more_layers_than_the_model():
    assert part_of(SHAPE, 2, "bfloat16").num_layers == 4
    assert part_of(SHAPE, 2, "bfloat16").num_kv_heads == 1


@pytest.mark.parametrize(
    ("sizes", "complaint"),
    [
        (Sizes(2, 16, (3,)), "tensor_parallel: got 3, expected a divisor of the model's 4 heads"),
        (Sizes(2, 64), "longest: got 64, expected at most 58: the model's context has no room for more"),
    ],
)
def test_impossible_sizes_are_refused_before_a_rank_starts(sizes, complaint):
    with pytest.raises(InvalidInput) as error:
        measure(SUBJECT, sizes, lambda *_: pytest.fail("nothing may begin"))
    assert str(error.value) == complaint


def test_a_size_slower_than_a_larger_size_is_timed_again():
    """What only has more rows or only a longer row says nothing about the other."""
    took = {(1, 16): 1.0, (2, 16): 2.4, (4, 16): 1.8, (1, 32): 2.0, (4, 32): 3.0, (8, 16): 2.9}
    timed = {size: PassSeconds(0.0, seconds, 0.0, call=seconds) for size, seconds in took.items()}
    assert held_up(timed) == [(2, 16)]


@pytest.mark.all  # tests/test_plan_invariance.py runs a plan under the rules
def test_a_profile_keeps_the_rules_of_nccl(tmp_path):
    """Messages as gloo sends them would hang on GPUs."""
    with nccl_rules(tmp_path / "rules") as records:
        measured = measure(SUBJECT, Sizes(1, 16, (1,)), lambda number, total, words: None)
    assert records.broken() == []
    assert {"allreduce", "batch"} <= records.checked()
    assert any("reduce_scatter" in name for name in records.checked())
    assert measured.links.device > 0


@pytest.mark.parametrize(("device", "piece"), [("cpu", "decode"), ("cuda", "decode_graphs")])
def test_vllms_decoding_is_timed_with_graphs_only_on_gpus(device, piece):
    bench = Bench(None, ModelSpec("model", "", "lm", SHAPE), DeviceMesh(0, 1, 0, 1), print, device)
    findings = Findings()
    for engine in ("vllm", "megatron"):
        _keep_generation(bench, engine, 1, 2, 16, PassSeconds(0.0, 1.0, 0.0, decode=SHAPE.num_layers), findings)
    decoded = {found.engine: found.piece for found in findings.measurements if found.piece.startswith("decode")}
    assert decoded == {"vllm": piece, "megatron": "decode"}
    assert all(found.seconds == 1.0 for found in findings.measurements if found.piece.startswith("decode"))
