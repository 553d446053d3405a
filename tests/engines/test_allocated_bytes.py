"""What a call is said to hold while it runs, against every allocation that torch makes during it."""

from pathlib import Path

import allocations
import megatron_cases as cases
import pytest
from allocations import make_rows, peak_allocated
from megatron_cases import OPTIMIZER, Case

from prefect_rlhf.engines.cpu_products import fewest_tokens
from prefect_rlhf.engines.engine import TrainingRows, TrainSettings
from prefect_rlhf.engines.losses.protocol import LossTerm
from prefect_rlhf.placement.cost.call_bytes import call_bytes
from prefect_rlhf.placement.cost.execution import Execution
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.workload import CallWork, Workload
from prefect_rlhf.placement.devices.strategy import Strategy
from tests.support.cases import combinations, first

FLAGS = set(Path("/proc/cpuinfo").read_text().split())
BFLOAT16 = pytest.param(
    "bfloat16",
    marks=pytest.mark.skipif(
        FLAGS.isdisjoint({"avx512_bf16", "amx_bf16"}) or fewest_tokens() is not None,
        reason="this CPU multiplies bfloat16 in float32: its products stage results in float32, which is not counted",
    ),
)
SHORT, LONG = 48, 128
DEPTH = 12
TOLERANCE = 1.15
GLOO_THREADS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return cases.make_folder(tmp_path_factory.mktemp("models") / "tied")


@pytest.fixture(scope="module")
def deep_folder(tmp_path_factory):
    return cases.make_folder(tmp_path_factory.mktemp("models") / "deep", layers=DEPTH)


@pytest.fixture(scope="module")
def scalar_folder(tmp_path_factory):
    return cases.make_folder(tmp_path_factory.mktemp("models") / "scalar", scalar=True, layers=6, kv_heads=4)


def predicted(case: Case, kind: str, rows: int, length: int, micro_batches: int = 1, **activations: object) -> int:
    work = CallWork(kind, rows, Workload.fixed(length // 2, length - length // 2))
    execution = Execution(Strategy(tp=case.tp), micro_batches=micro_batches, **activations)
    return call_bytes(work, execution, ModelSizes.of(case.spec()), stage=0, on_cpu=True).active


def assert_close_above(found: int, measured: int, tolerance: float = TOLERANCE):
    assert measured <= found <= tolerance * measured, f"{found / measured:.3f} of what was allocated"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("rows", "length", "micro_batches"), [(24, SHORT, 1), (16, LONG, 1), (32, LONG, 4)])
def test_a_train_step_never_exceeds_the_predicted_bytes(folder, tmp_path, dtype, rows, length, micro_batches):
    case = Case(folder, dtype=dtype, optimizer=OPTIMIZER)
    engine, settings = case.build(0), cases.Walk("logprobs", micro_batches=micro_batches)
    cases.train_on(engine, *make_rows(2, 8), cases.loss, settings)  # the moments are made in the first step
    sequences, batch = make_rows(rows, length)
    measured = peak_allocated(
        lambda: cases.train_on(engine, sequences, batch, cases.loss, settings), tmp_path / "trace.json"
    )
    assert_close_above(predicted(case, "train_step", rows, length, micro_batches), measured)


@pytest.mark.parametrize(
    ("recompute", "dtype"),
    combinations((2, DEPTH - 1, "all"), ("float32", "bfloat16"), briefly=[(2, "float32"), ("all", "bfloat16")]),
)
def test_recomputed_layers_hold_the_predicted_bytes(deep_folder, tmp_path, dtype, recompute):
    """Deep enough that without recomputation nearly all bytes are saved inputs."""
    case = Case(deep_folder, dtype=dtype, optimizer=OPTIMIZER)
    engine, settings = case.build(0), cases.Walk("logprobs", recompute=recompute)
    cases.train_on(engine, *make_rows(2, 8), cases.loss, settings)
    sequences, batch = make_rows(16, LONG)
    measured = peak_allocated(
        lambda: cases.train_on(engine, sequences, batch, cases.loss, settings), tmp_path / "trace.json"
    )
    # Where a processor multiplies bfloat16 itself but has no AMX, a layer's products stage less: 1.19 was seen.
    tolerance = 1.2 if dtype == "bfloat16" and "amx_bf16" not in FLAGS else TOLERANCE
    assert_close_above(predicted(case, "train_step", 16, LONG, recompute=recompute), measured, tolerance)
    assert measured < 0.9 * predicted(case, "train_step", 16, LONG)


@pytest.mark.slow
@pytest.mark.parametrize(("recompute", "sequence_parallel"), first(1, [("all", True), (0, True), (0, False)]))
def test_a_train_steps_shard_holds_the_predicted_bytes(world, deep_folder, tmp_path, recompute, sequence_parallel):
    """Of two shards; sequence parallelism divides the norms' inputs and outputs, which both hold otherwise.

    Collectives are prompt here. Beside that there is room for what gloo's two threads may still have of collectives
    that have ended: the gathered tokens. The profiler loses a free now and then, which only adds; so the least of three
    runs is the true one.
    """
    case = Case(deep_folder, ranks=(0, 1), tp=2, optimizer=OPTIMIZER)
    settings = cases.Walk("logprobs", recompute=recompute, tokens_over_tp=sequence_parallel)
    peaks = [world.run(case.ranks, allocations.train_peak, case, settings, 16, LONG, str(tmp_path)) for _ in range(3)]
    measured = min(max(of_ranks) for of_ranks in peaks)
    expected = predicted(case, "train_step", 16, LONG, recompute=recompute, tokens_over_tp=sequence_parallel)
    late = GLOO_THREADS * 16 * LONG * case.spec().shape.hidden_size * 4
    assert measured <= expected <= TOLERANCE * (measured + late), (expected, peaks)


@pytest.mark.parametrize("dtype", ["float32", BFLOAT16])
@pytest.mark.parametrize(("rows", "length", "micro_batches"), [(24, SHORT, 1), (16, LONG, 1), (32, LONG, 4)])
def test_an_inference_never_exceeds_the_predicted_bytes(folder, tmp_path, dtype, rows, length, micro_batches):
    case = Case(folder, dtype=dtype)
    engine = case.build(0)
    sequences, _ = make_rows(rows, length)
    engine.infer(make_rows(2, 8)[0], "logprobs", 1, 1.0)
    measured = peak_allocated(lambda: engine.infer(sequences, "logprobs", micro_batches, 1.0), tmp_path / "trace.json")
    assert_close_above(predicted(case, "inference", rows, length, micro_batches), measured)


def test_a_critic_without_grouped_queries_is_predicted_too(scalar_folder, tmp_path):
    """Another depth, as many key-value heads as heads, and a head without logits."""
    case = Case(scalar_folder, head="scalar", optimizer=OPTIMIZER)
    engine, settings = case.build(0), cases.Walk("values")
    cases.train_on(engine, *make_rows(2, 8), cases.loss, settings)
    sequences, batch = make_rows(16, LONG)
    measured = peak_allocated(
        lambda: cases.train_on(engine, sequences, batch, cases.loss, settings), tmp_path / "trace.json"
    )
    assert_close_above(predicted(case, "train_step", 16, LONG), measured)


@pytest.mark.parametrize("dtype", ["float32", BFLOAT16])
@pytest.mark.parametrize(("rows", "length", "micro_batches"), [(16, LONG, 1), (32, LONG, 4)])
def test_bytes_of_both_heads_in_a_pass_are_predicted(folder, tmp_path, dtype, rows, length, micro_batches):
    case = Case(folder, head="lm+scalar", new_head=True, dtype=dtype, optimizer=OPTIMIZER)
    engine = case.build(0)
    terms = (LossTerm(cases.loss, ("logprobs",), "one"), LossTerm(cases.loss, ("values",), "other"))

    def train(sequences, batch):
        engine.train([TrainingRows(sequences, terms, (batch, batch), 1)], TrainSettings(1, micro_batches))

    train(*make_rows(4, 8))
    given = make_rows(rows, length)
    measured = peak_allocated(lambda: train(*given), tmp_path / "trace.json")
    assert_close_above(predicted(case, "train_step", rows, length, micro_batches), measured)
