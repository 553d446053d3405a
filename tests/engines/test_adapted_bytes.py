"""What a model with an adapter is said to hold, against the storages and allocations of the real engine on CPU."""

from dataclasses import replace

import megatron_cases as cases
import pytest
import torch
import vllm_cases
from allocations import make_rows, peak_allocated
from megatron_cases import OPTIMIZER, Case

from prefect_rlhf.engines.engine import SamplingSettings
from prefect_rlhf.engines.megatron import fused, layers
from prefect_rlhf.engines.megatron.cpu import kernels as cpu_kernels
from prefect_rlhf.engines.vllm.engine import VllmEngine
from prefect_rlhf.placement.devices.mesh import DeviceMesh
from prefect_rlhf.placement.models.adapter import AdapterSpec
from tests.cases import first
from tests.engines.megatron.test_saved_bytes import DEEP, LENGTH, ROWS, SHALLOW, counted_bytes, saved_bytes
from tests.engines.test_allocated_bytes import assert_close_above, predicted
from tests.engines.test_holdings import predicted as predicted_holdings

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
EVERY, FEW = AdapterSpec(8, 16.0, ALL), AdapterSpec(4, 8.0, ("q_proj", "v_proj"))
HELD = 1.02
ALLOCATED = 1.2  # of the bytes of a call: what is counted over the most that was allocated at once


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


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
    held = engine.device_bytes()
    engine.close()
    assert held <= found <= HELD * held


@pytest.mark.parametrize(
    ("adapter", "micro_batches", "recompute"), first(2, [(EVERY, 1, 0), (FEW, 1, 2), (EVERY, 4, "all")])
)
def test_an_adapters_train_step_holds_the_predicted_bytes(folder, tmp_path, adapter, micro_batches, recompute):
    """It keeps the inputs that the A's need, what lies between A's and B's, and no gradient of the base."""
    case = Case(folder, optimizer=OPTIMIZER, adapter=adapter)
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
