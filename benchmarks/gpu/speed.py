"""How long do calls take, and how often does the host wait for the device?"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.models import SHAPES, full_rows, random_engine, train
from benchmarks.gpu.processes import empty_call_seconds
from benchmarks.gpu.step import SEEN, Constant, Expected, Found, Machine, Step
from prefect_rlhf.engines.engine import SamplingSettings
from prefect_rlhf.engines.megatron.engine import MegatronEngine
from prefect_rlhf.engines.weights.fingerprint import Factors, Sample, digest
from prefect_rlhf.flows.hardware.node_hardware import CALL_SECONDS, RUNTIME
from prefect_rlhf.placement.cost.datasheets.hardware import Hardware
from prefect_rlhf.placement.cost.datasheets.kinds import DATASHEETS
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.times.roofline import DatasheetTimes
from prefect_rlhf.placement.models.model import TransformerShape

MICRO_BATCHES, PROMPT, TOKENS = 4, 16, 16


def host_waits(machine: Machine) -> Found:
    """Waits of an inference and of a training step per micro-batch, of decoding per token, of fingerprints."""
    with machine.gpu() as pretend:
        engine = random_engine(machine.folder, SHAPES["tiny"], length=256)
        sequences, columns = full_rows(8, 64, SHAPES["tiny"].vocab_size)
        prompts, table = [[1 + row] * PROMPT for row in range(8)], Factors()
        calls: dict[str, tuple[Callable[[], Any], int]] = {
            "inference": (lambda: engine.infer(sequences, "logprobs", MICRO_BATCHES, 1.0), MICRO_BATCHES),
            "training": (lambda: train(engine, sequences, columns, MICRO_BATCHES), MICRO_BATCHES),
            "greedy_token": (lambda: engine.generate(prompts, _sampling(0.0), range(8)), TOKENS),
            "sampled_token": (lambda: engine.generate(prompts, _sampling(1.0), range(8)), TOKENS),
            "filtered_token": (lambda: engine.generate(prompts, _sampling(1.0, 0.9), range(8)), TOKENS),
            "digest": (lambda: digest(engine.weights(), table), 1),
            "sample": (lambda: Sample(engine.weights(), "key", table).changed(engine.weights()), 1),
        }
        found = machine.found
        for name, (call, parts) in calls.items():
            call()
            with _counted(pretend) as waits:
                call()
            found[f"{name}_waits"] = waits.total() / parts
            found[f"{name}_places"] = dict(waits.most_common(8))
    return found


def throughput(machine: Machine) -> Found:
    """A 1.3B model: training and inference of 16,384 tokens, a decoding step, AdamW, fingerprints, an empty call.

    Needs the GPU and its cores alone.
    """
    found, peak = machine.found, DATASHEETS["h100"].bfloat16_flops
    found["seconds_of_an_empty_call"] = empty_call_seconds(machine.pick("cuda", "cpu"))  # type: ignore[arg-type]
    with machine.gpu():
        shape, tokens = machine.pick((SHAPES["1.3B"], 16384), (SHAPES["tiny"], 128))
        engine = random_engine(machine.folder, shape, length=machine.pick(4096, 128), rows=64)
        sequences, columns = full_rows(8, tokens // 8, shape.vocab_size)
        num_parameters = sum(shard.view.numel() for shard in engine.weights().values())
        found["parameters"] = num_parameters
        found["training_seconds"] = seconds = _seconds(lambda: train(engine, sequences, columns, MICRO_BATCHES))
        found["training_tokens_per_second"] = tokens / seconds
        found["training_mfu"] = 6 * num_parameters * tokens / seconds / peak
        call = partial(engine.infer, sequences, "logprobs", MICRO_BATCHES, 1.0)
        found["inference_seconds"] = seconds = _seconds(call)
        found["inference_mfu"] = 2 * num_parameters * tokens / seconds / peak
        optimizer = engine._optimizer
        assert optimizer is not None
        parts = optimizer._chain.chained_optimizers
        found["adam_ms"] = 1e3 * _seconds(lambda: [part.optimizer.step() for part in parts])
        table = Factors()
        found["digest_ms"] = 1e3 * _seconds(lambda: digest(engine.weights(), table))
        before = Sample(engine.weights(), "key", table)
        found["sample_ms"] = 1e3 * _seconds(lambda: before.changed(engine.weights()))
        found["call_seconds"] = found["seconds_of_an_empty_call"] + found["sample_ms"] / 1e3
        _decoding(machine, engine, shape)
        size = machine.pick(8192, 64)
        square = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
        found["matmul"] = 2 * size**3 / _seconds(lambda: square @ square) / peak
        line = torch.empty(machine.pick(1 << 28, 1 << 10), device="cuda", dtype=torch.bfloat16)
        bandwidth = DATASHEETS["h100"].memory_bytes_per_second
        found["memory"] = 4 * len(line) / _seconds(lambda: line.add_(1)) / bandwidth
    return found


def _decoding(machine: Machine, engine: MegatronEngine, shape: TransformerShape) -> None:
    """Time a decoding step; what the cost model counts elsewhere, such as weights and the head, is not a layer's."""
    rows, prompt, (few, many) = machine.pick((64, 64, (8, 40)), (4, 4, (2, 4)))
    prompts = [[1 + row] * prompt for row in range(rows)]
    short, long = (
        _seconds(lambda n=n: engine.generate(prompts, SamplingSettings(n, 1.0, stop_at_eos=False), range(rows)))
        for n in (few, many)
    )
    step = (long - short) / (many - few)
    model = DatasheetTimes.of(ModelSizes.of(engine._spec), Hardware(DATASHEETS["h100"], 1, efficiency=RUNTIME))
    layer = model.decode(rows, prompt + (few + many) / 2, 1, cuda_graphs=False)
    counted = shape.num_layers * (layer.total - layer.launch) + model.sample(rows, 1).total
    machine.found["decode_step_ms"] = 1e3 * step
    machine.found["counted_elsewhere_ms"] = 1e3 * counted
    machine.found["eager_layer_seconds"] = (step - counted) / shape.num_layers


def _sampling(temperature: float, top_p: float = 1.0) -> SamplingSettings:
    return SamplingSettings(TOKENS, temperature, top_p, stop_at_eos=False)


@contextmanager
def _counted(pretend: Any) -> Iterator[Counter[str]]:
    """Count waits by line: those of the pretend GPU, or torch's own warnings."""
    if pretend is not None:
        with pretend.waits.counted() as waits:
            yield waits
        return
    waits = Counter()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield waits
            waits.update(
                f"{each.filename.rpartition('/prefect_rlhf/')[2]}:{each.lineno}"
                for each in caught
                if "synchronizing CUDA operation" in str(each.message)
            )
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _seconds(call: Callable[[], Any]) -> float:
    """Return the least seconds of three calls, after one that is not measured."""
    call()
    measured = []
    for _ in range(3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        measured.append(time.perf_counter() - began)
    return min(measured)


_RUNTIME = "flows/hardware/node_hardware.py, RUNTIME"
STEPS_OF_SPEED = (
    Step(
        "host_waits",
        4,
        240,
        host_waits,
        {
            "inference_waits": Expected(0, 2, source=SEEN),
            "training_waits": Expected(0, 3, source=SEEN),
            "greedy_token_waits": Expected(0, 1.5, "1 a token and a few for the prompts", SEEN),
            "sampled_token_waits": Expected(0, 1.5, source=SEEN),
            "filtered_token_waits": Expected(0, 1.5, source=SEEN),
            "digest_waits": Expected(1, 1, source=SEEN),
            "sample_waits": Expected(1, 1, source=SEEN),
        },
        findings="C7, C8",
    ),
    Step(
        "throughput",
        4,
        240,
        throughput,
        findings="C1, C4, C7, C8",
        constants=(
            Constant("eager_layer_seconds", _RUNTIME, RUNTIME.eager_layer_seconds, "eager_layer_seconds"),
            Constant("matmul", _RUNTIME, RUNTIME.matmul, "matmul"),
            Constant("memory", _RUNTIME, RUNTIME.memory, "memory"),
            Constant("CALL_SECONDS", "flows/hardware/node_hardware.py", CALL_SECONDS, "call_seconds"),
        ),
    ),
)
