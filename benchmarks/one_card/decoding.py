"""Where a decoded token's time goes in our vLLM engine: the GPU's kernels, the host's parts, its Python by function.

One H100 took 4.0 ms a token for 8 rows and 16 ms for 256, far above its kernels. So this half generates with few and
with many rows, counts the kernels' time, times the parts of vLLM's step, and profiles the host.
"""

from __future__ import annotations

import cProfile
import pstats
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.one_card.child import say
from benchmarks.one_card.kernels import grouped, kernels_of
from benchmarks.one_card.work import Work

if TYPE_CHECKING:
    from prefect_rlhf.engines.rank.profiling.layer_clock import LayerClock

TOKENS = 64
FUNCTIONS = 40


def main() -> None:
    """Build the engine, then time, count kernels and profile for each number of rows."""
    import torch

    from prefect_rlhf.engines.commands import BuildCommand
    from prefect_rlhf.engines.engine import SamplingSettings
    from prefect_rlhf.engines.files.huggingface import read_shape
    from prefect_rlhf.engines.process_groups import ensure_world
    from prefect_rlhf.engines.vllm.engine import VllmEngine
    from prefect_rlhf.placement.devices.mesh import DeviceMesh
    from prefect_rlhf.placement.devices.strategy import Strategy
    from prefect_rlhf.placement.layout.layout import layout_of
    from prefect_rlhf.placement.models.model import ModelSpec
    from prefect_rlhf.placement.plan import ModelInstance

    work, began = Work.read(sys.argv[1]), time.monotonic()
    spec = ModelSpec("actor", str(work.model), "lm", read_shape("actor", work.model), "bfloat16")
    instance = ModelInstance("actor", "vllm", DeviceMesh(0, 1, 0, 1), Strategy())
    layout = layout_of(instance, spec, instance.mesh)
    sampling = SamplingSettings(max_new_tokens=min(TOKENS, work.response_tokens), stop_at_eos=False)
    ensure_world()
    engine = VllmEngine(BuildCommand(spec, instance, (0,), layout, work.length, max_rows=work.rows), 0)
    say("engine built", seconds=round(time.monotonic() - began, 1))
    generator = torch.Generator().manual_seed(0)
    for rows in sorted({work.batch_size, work.rows, min(8, work.rows)}):
        prompts = torch.randint(1, spec.shape.vocab_size, (rows, work.prompt_tokens), generator=generator).tolist()

        def call(prompts: list[list[int]] = prompts) -> object:
            return engine.generate(prompts, sampling, range(len(prompts)))

        decoded(rows, sampling.max_new_tokens, work.kind, call)
        with clocked_parts(engine._llm.engine_core) as clocks:
            wall = timed(call)
        front = min(timed(partial(by_front_end, engine, prompts, sampling)) for _ in range(2))
        say("vLLM's own front end", rows=rows, wall_ms=round(1e3 * front / sampling.max_new_tokens, 3))
        seconds = {part: sum(end - start for start, end in clock.forwards) for part, clock in clocks.items()}
        parts = {part: round(1e3 * each / sampling.max_new_tokens, 3) for part, each in seconds.items()}
        say("host parts", rows=rows, wall_ms=round(1e3 * wall / sampling.max_new_tokens, 3), milliseconds_a_token=parts)


def timed(call: Callable[[], object]) -> float:
    """Return the call's seconds."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def by_front_end(engine: Any, prompts: list[list[int]], sampling: Any) -> None:
    """Generate the same through LLMEngine.step, as TRL and others do: the anchor of our own way."""
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind

    from prefect_rlhf.engines.vllm.settings import sampling_parameters

    engine._begin_call()
    with engine._group.entered():
        for row, prompt in enumerate(prompts):
            parameters = sampling_parameters(sampling, row, ())
            parameters.output_kind, parameters.flat_logprobs = RequestOutputKind.FINAL_ONLY, True
            engine._llm.add_request(f"front {row}", tokens_input(list(prompt)), parameters)
        while engine._llm.has_unfinished_requests():
            engine._llm.step()


@contextmanager
def clocked_parts(client: Any) -> Iterator[Mapping[str, LayerClock]]:
    """Clock the parts of vLLM's steps while the body runs. `step` contains all others, and waits for the device."""
    from prefect_rlhf.engines.rank.profiling.layer_clock import clocked_method

    core = client.engine_core
    parts = {
        "step": (client, "get_output"),
        "schedule": (core.scheduler, "schedule"),
        "find room, within schedule": (core.scheduler.kv_cache_manager, "allocate_slots"),
        "launch the model": (core.model_executor, "execute_model"),
        "launch the sampler": (core.model_executor, "sample_tokens"),
        "take up tokens": (core.scheduler, "update_from_output"),
    }
    with ExitStack() as stack:
        yield {
            part: stack.enter_context(clocked_method(owner, name, time.perf_counter))
            for part, (owner, name) in parts.items()
        }


def decoded(rows: int, tokens: int, kind: str, call: Callable[[], object]) -> None:
    """Print the milliseconds of a token for all rows: wall, kernels by group, and the host's functions."""
    wall = min([timed(call) for _ in range(3)][1:])
    kernels, _ = kernels_of(call, kind)
    busy = sum(kernel.seconds for kernel in kernels)
    each = {"wall_ms": round(1e3 * wall / tokens, 3), "kernels_ms": round(1e3 * busy / tokens, 3)}
    say("decoding", rows=rows, tokens=tokens, **each, groups=grouped(kernels, wall))
    profile = cProfile.Profile()
    profile.runcall(call)
    say("host of decoding", rows=rows, milliseconds_a_token=functions_of(profile, tokens))


def functions_of(profile: cProfile.Profile, tokens: int) -> list[tuple[str, float, float]]:
    """Return the functions with the most time of their own: name, that time and all time within, in ms a token."""
    stats = pstats.Stats(profile)
    found = [
        (f"{Path(file).name}:{line} {name}", round(1e3 * own / tokens, 4), round(1e3 * within / tokens, 4))
        for (file, line, name), (_, _, own, within, _) in stats.stats.items()  # type: ignore[attr-defined]
    ]
    return sorted(found, key=lambda each: -each[1])[:FUNCTIONS]


if __name__ == "__main__":
    main()
