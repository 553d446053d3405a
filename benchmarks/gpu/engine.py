"""Is a Megatron engine on the GPU the engine of the CPU? Its calls, its checkpoints, its fingerprints, its offloads."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.step import SEEN, YES, Expected, Found, Machine, Step
from prefect_rlhf.files.installed import installed_version

PROMPTS, SEEDS, STEPS = [[1, 2, 3], [4, 5], [6]], [1, 2, 3], 3


def environment(machine: Machine) -> Found:
    """The driver, the versions, and the imports that every later step needs."""
    found = machine.found
    found.update({"torch": torch.__version__, "cuda": str(torch.version.cuda)})
    query = "name,driver_version,memory.total,memory.free,mig.mode.current"
    if program := shutil.which("nvidia-smi"):
        command = [program, f"--query-gpu={query}", "--format=csv,noheader"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        found["nvidia_smi"] = answer.stdout.strip()
        drivers = [line.split(",")[1].strip().partition(".")[0] for line in answer.stdout.splitlines()]
        found["driver"] = min(int(driver) for driver in drivers if driver.isdigit())
    found["compiler"] = bool(shutil.which("gcc"))
    found["shared_memory_gib"] = shutil.disk_usage("/dev/shm").total / 2**30
    for name in ("megatron-core", "transformers", "triton", "vllm", "transformer-engine", "apex", "flashinfer-python"):
        found[name] = installed_version(name) or "missing"
    return found


def engine_equals_cpu(machine: Machine) -> Found:
    """Tiny Llamas in float32 and bfloat16: every call, three steps, then a checkpoint, a restore and another step."""
    from tests.engines.megatron_cases import make_folder

    found = machine.found
    lm = make_folder(machine.folder / "lm", layers=2, hidden=64)
    scalar = make_folder(machine.folder / "scalar", scalar=True, layers=2, hidden=64)
    torch.backends.cuda.matmul.allow_tf32 = False
    for dtype in ("float32", "bfloat16"):
        expected = _on_cpu(machine, lm, scalar, dtype)
        with machine.gpu():
            ours = calls(lm, scalar, dtype, machine.folder / f"restored {dtype}")
        for name, value in ours.items():
            if name == "tokens":
                found[f"{dtype}_tokens_equal"] = value == expected[name]
            else:
                found[f"{dtype}_{name}"] = float((value - expected[name]).abs().max())
        found[f"{dtype}_restored"] = float((ours["after_restore"] - ours["unrestored"]).abs().max())
    return found


def calls(lm: str, scalar: str, dtype: str, folder: Path) -> dict[str, Any]:
    """Run every kind of call on the device that torch has; return results on the host."""
    from prefect_rlhf.engines.engine import SamplingSettings
    from prefect_rlhf.engines.files.training_state import HostCopy, restore
    from tests.engines.megatron_cases import OPTIMIZER, Case, Walk, loss, make_rows, train_on

    torch.set_num_threads(1)
    sequences, columns = make_rows(8)
    case, walk = Case(lm, dtype=dtype, optimizer=OPTIMIZER), Walk("logprobs", 1, 2)
    engine = case.build(0)
    results: dict[str, Any] = {name: _host(engine.infer(sequences, name, 2, 0.7)) for name in ("logprobs", "entropy")}
    results["tokens"] = engine.generate(PROMPTS, SamplingSettings(8, temperature=0.0), SEEDS).tokens
    results["values"] = _host(Case(scalar, head="scalar", dtype=dtype).build(0).infer(sequences, "values", 2, 1.0))
    losses = [train_on(engine, sequences, columns, loss, walk) for _ in range(STEPS)]
    results["losses"] = torch.tensor([each["loss"] for each in losses])
    results["weights"] = _weights(engine)
    command = _command(case)
    copy = HostCopy(command, 0)
    copy.take(engine)
    copy.write(folder)
    train_on(engine, sequences, columns, loss, walk)
    results["unrestored"] = _weights(engine)
    again = case.build(0)
    restore(again, [folder / "actor"])
    train_on(again, sequences, columns, loss, walk)
    results["after_restore"] = _weights(again)
    return results


def fingerprints_and_offload(machine: Machine) -> Found:
    """Equal shards have equal fingerprints on both devices; weights and optimizer survive an offload bit for bit."""
    from prefect_rlhf.engines.engine import Shard
    from prefect_rlhf.engines.weights.fingerprint import Sample, digest
    from tests.engines.megatron_cases import OPTIMIZER, Case, Walk, loss, make_folder, make_rows, train_on

    fused, odd = torch.randn(4, 6, 64).to(torch.bfloat16), torch.randn(33, 7).to(torch.bfloat16)
    whole = {
        "q": (fused[:, :4], ((0, 16), (0, 64))),
        "k": (fused[:, 4:5], ((0, 4), (0, 64))),
        "odd": (odd, ((0, 33), (0, 7))),
        "norm": (torch.randn(48).to(torch.bfloat16), ((0, 48),)),
    }
    on_cpu = {name: Shard(region, view) for name, (view, region) in whole.items()}
    folder = make_folder(machine.folder / "lm", layers=2, hidden=64)
    with machine.gpu():
        there = fused.to("cuda")
        views = {"q": there[:, :4], "k": there[:, 4:5], "odd": odd.to("cuda"), "norm": whole["norm"][0].to("cuda")}
        on_gpu = {name: Shard(whole[name][1], view) for name, view in views.items()}
        found = machine.found
        found["digests_equal"] = digest(on_gpu) == digest(on_cpu)
        found["samples_equal"] = Sample(on_gpu, "key")._sums.tolist() == Sample(on_cpu, "key")._sums.tolist()
        engine = Case(folder, dtype="bfloat16", optimizer=OPTIMIZER).build(0)
        rows = make_rows(8)
        train_on(engine, *rows, loss, Walk("logprobs"))
        before, state = digest(engine.weights()), [_host(part.values) for part in engine.state_parts()]
        for part in ("all", "optimizer"):
            engine.offload(part)
            engine.reload(part)
        found["offload_keeps_weights"] = digest(engine.weights()) == before
        after = [_host(part.values) for part in engine.state_parts()]
        found["offload_keeps_optimizer"] = all(map(torch.equal, state, after))
    return found


def _on_cpu(machine: Machine, lm: str, scalar: str, dtype: str) -> dict[str, Any]:
    """Return the results of `calls` in a process that sees no GPU; of the pretend GPU this process sees no other."""
    folder = machine.folder / f"of the cpu {dtype}"
    if machine.pretend:
        return calls(lm, scalar, dtype, folder)
    hidden, os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES"), ""
    try:
        context = multiprocessing.get_context("spawn")
        with context.Pool(1) as pool:
            return pool.apply(calls, (lm, scalar, dtype, folder))
    finally:
        if hidden is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = hidden


def _host(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None  # one rank has every output
    return tensor.detach().float().cpu()


def _weights(engine: Any) -> torch.Tensor:
    return torch.cat([_host(shard.view.reshape(-1)) for shard in engine.weights().values()])


def _command(case: Any) -> Any:
    from prefect_rlhf.engines.commands import BuildCommand
    from prefect_rlhf.placement.devices.mesh import DeviceMesh
    from prefect_rlhf.placement.devices.strategy import Strategy
    from prefect_rlhf.placement.layout.layout import layout_of
    from prefect_rlhf.placement.plan import ModelInstance

    mesh = DeviceMesh(0, 1, 0, 1)
    instance = ModelInstance("actor", "megatron", mesh, Strategy())
    return BuildCommand(case.spec(), instance, (0,), layout_of(instance, case.spec(), mesh), 128, 64)


def _close(dtype: str, logprobs: float, weights: float) -> Mapping[str, Expected]:
    names = {"logprobs": logprobs, "entropy": logprobs, "values": logprobs, "losses": logprobs, "weights": weights}
    ranges = {f"{dtype}_{name}": Expected(0, high, source=SEEN) for name, high in names.items()}
    return ranges | {f"{dtype}_restored": Expected(0, 0, "a restored engine continues bit for bit", SEEN)}


STEPS_OF_ENGINE = (
    Step("environment", 1, 120, environment, {"driver": Expected(580), "compiler": YES}, findings="A10"),
    Step(
        "engine_equals_cpu",
        1,
        300,
        engine_equals_cpu,
        {"float32_tokens_equal": YES, **_close("float32", 2e-5, 1e-6), **_close("bfloat16", 0.1, 2e-2)},
        findings="B1, B4, B5",
    ),
    Step(
        "fingerprints_and_offload",
        1,
        120,
        fingerprints_and_offload,
        dict.fromkeys(("digests_equal", "samples_equal", "offload_keeps_weights", "offload_keeps_optimizer"), YES),
        findings="C7, N14",
    ),
)
