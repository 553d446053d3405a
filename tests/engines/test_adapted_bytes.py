"""What a model with an adapter is said to hold, against the storages and allocations of the real engine on CPU."""

from collections import Counter
from dataclasses import replace

import adapter_cases
import allocations
import megatron_cases as cases
import pytest
import vllm_cases
from allocations import make_rows, peak_allocated
from megatron_cases import OPTIMIZER, Case
from processors import bytes_with_packed

from prefect_rlhf.engines import cpu_products
from prefect_rlhf.engines.engine import SamplingSettings
from prefect_rlhf.engines.megatron import fused, layers
from prefect_rlhf.engines.megatron.cpu import kernels as cpu_kernels
from prefect_rlhf.engines.vllm.engine import VllmEngine
from prefect_rlhf.placement.cost.call_bytes import call_bytes
from prefect_rlhf.placement.cost.execution import Execution
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.workload import CallWork, Workload
from prefect_rlhf.placement.devices.mesh import DeviceMesh
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.models.adapter import AdapterSpec
from prefect_rlhf.placement.plan import ModelInstance
from tests.engines.megatron.test_saved_bytes import DEEP, LENGTH, ROWS, SHALLOW, counted_bytes, saved_bytes
from tests.engines.test_allocated_bytes import GLOO_THREADS, assert_close_above, predicted
from tests.engines.test_holdings import predicted as predicted_holdings
from tests.support.by_device import instance_holdings
from tests.support.cases import combinations, first
from tests.support.strategies import call

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
EVERY, FEW = AdapterSpec(8, 16.0, ALL), AdapterSpec(4, 8.0, ("q_proj", "v_proj"))
LAYOUTS = {
    "tp2": {"ranks": (0, 1), "tp": 2},
    "pp2": {"ranks": (2, 3), "pp": 2},
    "tp2 pp2": {"ranks": (1, 0, 3, 2), "tp": 2, "pp": 2},
    "dp2 tp2": {"ranks": (0, 1, 2, 3), "dp": 2, "tp": 2},
}
WALKS = {"plain": {}, "tokens over tp": {"tokens_over_tp": True}, "recompute": {"recompute": "all"}}
HELD = 1.02
ALLOCATED = 1.2  # of the bytes of a call: what is counted over the most that was allocated at once


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return cases.make_folder(tmp_path_factory.mktemp("models") / "tied", layers=4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("adapter", "head"), [(EVERY, "lm"), (FEW, "lm"), (EVERY, "scalar")])
@pytest.mark.parametrize("trained", [False, True])
def test_an_adapted_instance_keeps_the_predicted_bytes(tmp_path, dtype, adapter, head, trained):
    """Its base as it is, and the adapter and a scalar head in a buffer, with their gradients and moments."""
    folder = cases.make_folder(tmp_path, scalar=head == "scalar", layers=2)
    case = Case(folder, head=head, dtype=dtype, optimizer=OPTIMIZER if trained else None, adapter=adapter)
    engine = case.build(0)
    if trained:
        walk = cases.Walk("values" if head == "scalar" else "logprobs")
        cases.train_on(engine, *cases.make_rows(4), cases.loss, walk)
    found = predicted_holdings(case.spec(), engine.instance, "train_step" if trained else "inference")
    assert engine.device_bytes() <= found <= HELD * engine.device_bytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("trained", [False, True])
def test_a_base_in_four_bits_keeps_what_is_predicted(tmp_path, dtype, trained):
    """Half a byte of each number, a byte of each block, and the scales of scales of each matrix."""
    made = cases.make_folder(tmp_path, layers=2)
    case = Case(made, dtype=dtype, optimizer=OPTIMIZER if trained else None, adapter=EVERY, base_dtype="nf4")
    engine = case.build(0)
    if trained:
        cases.train_on(engine, *cases.make_rows(4), cases.loss, cases.Walk("logprobs"))
    found = predicted_holdings(case.spec(), engine.instance, "train_step" if trained else "inference")
    assert engine.device_bytes() <= found <= HELD * engine.device_bytes()
    plain = predicted_holdings(replace(case, base_dtype=None).spec(), engine.instance, "inference")
    assert trained or found < 0.7 * plain, "the embedding and the adapter are as before"


def held_by_each(case):
    """The bytes that each rank of a trained model is said to hold, in the order of its ranks."""
    strategy = Strategy(case.dp, case.tp, case.pp)
    instance = ModelInstance("actor", "megatron", DeviceMesh(0, 1, 0, len(case.ranks)), strategy)
    trains = call("a_call", "train_step", "actor", {}, num_rows=8)
    by_device = Counter()
    for holding in instance_holdings(instance, (trains,), case.spec(), 128, "cpu"):
        by_device[holding.device] += holding.num_bytes
    return [by_device[device] for device in instance.devices]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "adapter", "base_dtype", "dtype"),
    combinations(
        LAYOUTS,
        (EVERY, FEW),
        (None, "nf4"),
        ("float32", "bfloat16"),
        briefly=[("tp2", EVERY, None, "bfloat16"), ("pp2", FEW, "nf4", "float32")],
    ),
)
def test_every_shard_of_an_adapted_model_keeps_the_predicted_bytes(world, tmp_path, layout, adapter, base_dtype, dtype):
    """After a step. Three layers, so the stages of a pipeline differ, and the last has the embedding again."""
    folder = cases.make_folder(tmp_path, layers=3)
    options = {"adapter": adapter, "base_dtype": base_dtype, "dtype": dtype, "optimizer": OPTIMIZER}
    case = Case(folder, **options, **LAYOUTS[layout])
    found = world.run(case.ranks, adapter_cases.train, case, cases.Walk("logprobs"))
    for (_, _, held, _), expected in zip(found, held_by_each(case), strict=True):
        assert held <= expected <= HELD * held


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "base_dtype", "walk"),
    combinations(
        ("tp2", "pp2"),
        (None, "nf4"),
        ("plain", "tokens over tp", "recompute"),
        briefly=[("tp2", None, "plain"), ("pp2", "nf4", "recompute")],
    ),
)
def test_every_shard_of_an_adapters_train_step_holds_the_predicted_bytes(
    world, folder, tmp_path, layout, base_dtype, walk
):
    """As in `test_allocated_bytes.py`: the least of three runs, and room for what gloo's threads still have."""
    case = Case(folder, adapter=EVERY, base_dtype=base_dtype, optimizer=OPTIMIZER, **LAYOUTS[layout])
    settings = cases.Walk("logprobs", **WALKS[walk])
    peaks = [world.run(case.ranks, allocations.train_peak, case, settings, 16, 128, str(tmp_path)) for _ in range(3)]
    late = GLOO_THREADS * 16 * 128 * case.spec().shape.hidden_size * 4
    work = CallWork("train_step", 16, Workload.fixed(64, 64))
    execution = Execution(Strategy(case.dp, case.tp, case.pp), **WALKS[walk])
    for place, of_rank in enumerate(zip(*peaks, strict=True)):
        stage = Strategy(case.dp, case.tp, case.pp).coordinates()[place].pp
        found = call_bytes(work, execution, ModelSizes.of(case.spec()), stage=stage, on_cpu=True).active
        measured = min(of_rank)
        assert measured <= found <= ALLOCATED * (measured + late), (stage, found / measured)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", first(1, [FEW, EVERY]))
def test_an_adapted_vllm_instance_keeps_the_predicted_bytes(tmp_path, adapter):
    """With slots of the next rank that vLLM has, for all matrices of a fused layer if one of them is adapted."""
    made = vllm_cases.make_folder(tmp_path, 1, tied=True)
    command = vllm_cases.build_command(made, tied=True, dtype="bfloat16", adapter=adapter)
    engine = VllmEngine(command, 0)
    engine.generate(vllm_cases.make_prompts(4), SamplingSettings(2), range(4))
    instance = replace(command.instance, mesh=DeviceMesh(0, 1, 0, 1))
    found = predicted_holdings(command.model, instance, "generate", command.max_rows, command.max_sequence_length)
    held = bytes_with_packed(engine)
    engine.close()
    assert held <= found <= HELD * held


@pytest.mark.parametrize(
    ("adapter", "base_dtype", "micro_batches", "recompute"),
    first(3, [(EVERY, None, 1, 0), (FEW, None, 1, 2), (EVERY, "nf4", 1, 0), (EVERY, None, 4, "all")]),
)
def test_an_adapters_train_step_holds_the_predicted_bytes(
    folder, tmp_path, adapter, base_dtype, micro_batches, recompute
):
    """It keeps the inputs that the A's need, what lies between A's and B's, and no gradient of the base.

    Of a base in four bits it dequantises a weight at a time.
    """
    case = Case(folder, optimizer=OPTIMIZER, adapter=adapter, base_dtype=base_dtype)
    engine, walk = case.build(0), cases.Walk("logprobs", micro_batches=micro_batches, recompute=recompute)
    cases.train_on(engine, *make_rows(2, 8), cases.loss, walk)  # the moments are made in the first step
    sequences, batch = make_rows(32, 128)
    measured = peak_allocated(
        lambda: cases.train_on(engine, sequences, batch, cases.loss, walk), tmp_path / "trace.json"
    )
    found = predicted(case, "train_step", 32, 128, micro_batches, recompute=recompute)
    assert measured <= found <= ALLOCATED * measured


def test_an_adapters_inference_holds_the_predicted_bytes(folder, tmp_path):
    case = Case(folder, adapter=EVERY)
    engine = case.build(0)
    sequences, _ = make_rows(16, 128)
    engine.infer(make_rows(2, 8)[0], "logprobs", 1, 1.0)
    measured = peak_allocated(lambda: engine.infer(sequences, "logprobs", 1, 1.0), tmp_path / "trace.json")
    assert_close_above(predicted(case, "inference", 16, 128), measured)


@pytest.mark.parametrize("adapter", [EVERY, FEW])
def test_an_adapted_layer_on_cuda_keeps_the_counted_bytes(tmp_path, monkeypatch, adapter):
    """Per layer, as the difference of two depths, by the kernels of CUDA."""
    monkeypatch.setattr(cpu_products, "fewest_tokens", lambda: None)
    monkeypatch.setattr(fused, "rms_norm", cpu_kernels.rms_norm)
    monkeypatch.setattr(layers, "kernels", lambda _: fused)
    counted, kept = [], []
    for depth in (SHALLOW, DEEP):
        folder = cases.make_folder(tmp_path / str(depth), layers=depth, hidden=192, kv_heads=2)
        case = Case(folder, dtype="bfloat16", optimizer=OPTIMIZER, adapter=adapter)
        counted.append(counted_bytes(case))
        kept.append(saved_bytes(case, [LENGTH] * (ROWS - 1) + [LENGTH - 1]))
    of_layer = kept[1] - kept[0]
    assert of_layer <= counted[1] - counted[0] <= HELD * of_layer
