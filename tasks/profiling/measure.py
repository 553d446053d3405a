"""Measure a model's layers on some devices: what is timed, at which sizes, and the profile made of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import mean, median

from prefect_rlhf.engines.commands import MoveWeightsCommand, RankReport
from prefect_rlhf.engines.profiling.profiling_rank import STEPS
from prefect_rlhf.placement.cost.hardware import Links
from prefect_rlhf.placement.cost.profile import Measurement, ModelPiece, Profile, Subject
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.workload import ModelCallKind
from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.placement.layout.layout import layout_of
from prefect_rlhf.placement.layout.parameters import num_parameters
from prefect_rlhf.placement.plan import EngineKind
from prefect_rlhf.tasks.profiling.bench import ENGINES, Bench, Sizes, bench, part_of

FEW_TOKENS = 256  # up to which what is around the layers of a call is taken as what it always is
MESSAGE_BYTES = tuple(1 << power for power in range(12, 25, 2))
SHARED_PARAMETERS = (1 << 16, 1 << 20, 1 << 24)
MESSAGE_REPEATS = 11  # short, and easily held up

Say = Callable[[int, int, str], object]
"""Told of every measurement that is about to be made: its number, how many there are, and what it is."""


def check_sizes(subject: Subject, sizes: Sizes) -> None:
    """Raise InvalidInput for sizes that the model has not."""
    if sizes.lengths[-1] + STEPS > subject.shape.max_position_embeddings:
        most = subject.shape.max_position_embeddings - STEPS
        raise InvalidInput("longest", sizes.longest, f"at most {most}, which the model's context leaves")
    for tp in sizes.tensor_parallel:
        part_of(subject.shape, tp, subject.dtype)


def measure(subject: Subject, sizes: Sizes, say: Say) -> Profile:
    """Time everything; minutes. Raises what ranks raise, and InvalidInput for sizes that the model has not."""
    check_sizes(subject, sizes)
    found, counted = Findings(), CountedSteps(say, number_of_measurements(subject, sizes))
    for tp in sizes.tensor_parallel:
        with bench(subject, part_of(subject.shape, tp, subject.dtype), sizes, counted) as on:
            if tp == min(sizes.tensor_parallel):
                time_weights(on, found)
                time_messages(on, found)
            time_layers(on, tp, sizes, found)  # last: it trains behind the back of those who move weights
    return found.profile(subject)


def number_of_measurements(subject: Subject, sizes: Sizes) -> int:
    """How many there are."""
    layers = (2 + len(ENGINES)) * len(sizes.rows) * len(sizes.lengths)
    groups = len(group_sizes(subject.num_devices))
    messages = groups * (len(MESSAGE_BYTES) + len(SHARED_PARAMETERS))
    return len(sizes.tensor_parallel) * layers + 4 + messages


@dataclass(slots=True)
class CountedSteps:
    """Numbers the measurements."""

    say: Say
    total: int
    done: int = 0

    def __call__(self, words: str) -> None:
        self.done += 1
        self.say(self.done, self.total, words)


def group_sizes(num_devices: int) -> tuple[int, ...]:
    """Of how many consecutive ranks groups are timed: all that divide the devices."""
    return tuple(size for size in range(2, num_devices + 1) if num_devices % size == 0)


@dataclass(slots=True)
class Findings:
    """What was measured so far. Lists by what they will be the median of."""

    measurements: list[Measurement] = field(default_factory=list)
    adam: list[float] = field(default_factory=list)
    written: list[float] = field(default_factory=list)
    packed: list[float] = field(default_factory=list)
    calls: dict[tuple[ModelCallKind, EngineKind], list[float]] = field(default_factory=lambda: defaultdict(list))
    bandwidths: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    latency: float = 0.0

    def keep(
        self, piece: ModelPiece, tp: int, rows: int, length: int, seconds: float, engine: EngineKind = "megatron"
    ) -> None:
        """One measurement; a difference of two may come out below nothing."""
        self.measurements.append(Measurement(piece, tp, rows, length, max(0.0, seconds), engine))

    def profile(self, subject: Subject) -> Profile:
        """All of it as a value."""
        device = median(self.bandwidths["device"])
        node = median(self.bandwidths["node"] or [device])
        links = Links(device, node, 0.0, median(self.bandwidths["host"]), self.latency)
        calls = tuple((kind, engine, median(seconds)) for (kind, engine), seconds in self.calls.items())
        return Profile(
            shape=subject.shape,
            dtype=subject.dtype,
            device=subject.device,
            versions=subject.versions,
            measurements=tuple(self.measurements),
            links=links,
            adam_seconds=median(self.adam),
            call_seconds=calls,
            written_seconds=median(self.written),
            packed_seconds=median(self.packed),
            processor=subject.processor,
            num_devices=subject.num_devices,
        )


def time_layers(on: Bench, tp: int, sizes: Sizes, found: Findings) -> None:
    """Forward, backward, head, decoding and choice of tokens at every size."""
    heads: dict[tuple[ModelPiece, int], list[float]] = defaultdict(list)
    samples: dict[tuple[EngineKind, int], list[float]] = defaultdict(list)
    for length in sizes.lengths:
        for rows in sizes.rows:
            _time_training(on, tp, rows, length, found, heads)
            for engine in ENGINES:
                _time_generation(on, engine, tp, rows, length, found, samples)
    for (piece, tokens), seconds in sorted(heads.items()):
        found.keep(piece, tp, tokens, 1, median(seconds))
    for (engine, rows), seconds in sorted(samples.items()):
        found.keep("sample", tp, rows, 1, median(seconds), engine)


def _time_training(
    on: Bench, tp: int, rows: int, length: int, found: Findings, heads: dict[tuple[ModelPiece, int], list[float]]
) -> None:
    """A train_step's forward keeps more for the backward than another does; the backward counts what that takes."""
    layers, tokens = on.model.shape.num_layers, rows * (length // 2)
    infer, train = (on.passes(method, "megatron", rows, length) for method in ("infer", "train"))
    found.keep("forward", tp, rows, length, infer.forward / layers)
    found.keep("backward", tp, rows, length, (train.forward + train.backward - infer.forward) / layers)
    heads["head_forward", tokens].append(infer.ends)
    heads["head_backward", tokens].append(train.ends - infer.ends)
    if rows * length <= FEW_TOKENS:
        for kind in ("inference", "train_step"):
            found.calls[kind, "megatron"].append(infer.before + infer.after)
        around = train.before + train.after - infer.before
        found.adam.append(max(0.0, around) / num_parameters(on.model))


def _time_generation(
    on: Bench,
    engine: EngineKind,
    tp: int,
    rows: int,
    length: int,
    found: Findings,
    samples: dict[tuple[EngineKind, int], list[float]],
) -> None:
    """Megatron's prefill is a forward as any other."""
    layers = on.model.shape.num_layers
    made = on.passes("generate", engine, rows, length)
    found.keep("decode", tp, rows, length, made.decode / layers, engine)
    if engine == "vllm":
        found.keep("forward", tp, rows, length, made.forward / layers, engine)
    samples[engine, rows].append(made.ends)
    found.calls["generate", engine].append(made.before + made.after)


def time_weights(on: Bench, found: Findings) -> None:
    """Moving weights within a device, to another, to the host and back; their fingerprint and packing."""
    size, elements = on.gang.size, num_parameters(on.model)
    num_bytes = elements * ModelSizes.of(on.model).item
    on.step("weights within a device")
    within = [on.each("reallocate", lambda rank: (_move(on, rank, rank, "vllm", "model"),)) for _ in range(2)][-1]
    _keep_moves(within, num_bytes, elements, "device", found)
    on.step("weights to another device")
    if size > 1:
        _time_pairs(on, num_bytes, elements, found)
    on.step("weights to the host and back")
    for method in ("offload", "reload"):
        copied = on.each(method, lambda rank: (on.instance(rank, "megatron", "copy"),))
        _keep_moves(copied, num_bytes, elements, "host", found)
    on.step("packing of weights")
    found.packed += [seconds / elements for seconds in on.each("repack", lambda rank: (on.instance(rank, "vllm"),))]


def _time_pairs(on: Bench, num_bytes: int, elements: int, found: Findings) -> None:
    """Every second rank to the one after it, all at once; the first time a route is made."""
    pairs = [(rank, rank + 1) for rank in range(0, on.gang.size - 1, 2)]
    orders = {rank: (_move(on, *pair, "megatron", "copy"),) for pair in pairs for rank in pair}
    on.call("reallocate", orders)
    moved = on.call("reallocate", orders)
    _keep_moves(moved[1::2], num_bytes, elements, "node", found)


def _move(on: Bench, source: int, target: int, engine: EngineKind, role: str) -> MoveWeightsCommand:
    """From a rank's trained copy to another copy."""
    trained, read = on.instance(source, "megatron"), on.instance(target, engine, role)
    source_layout, target_layout = (layout_of(instance, on.model, on.lease) for instance in (trained, read))
    return MoveWeightsCommand(trained, read, 0, source_layout, target_layout, on.lease.devices())


def _keep_moves(reports: Iterable[RankReport], num_bytes: int, elements: int, link: str, found: Findings) -> None:
    for report in reports:
        found.bandwidths[link].append(num_bytes / (report.seconds - report.fingerprint_seconds))
        if report.fingerprint_seconds:
            found.written.append(report.fingerprint_seconds / elements)


def time_messages(on: Bench, found: Findings) -> None:
    """A message to a neighbour, sums over groups, gradients and weights of replicas."""
    for size in group_sizes(on.gang.size):
        for num_bytes in MESSAGE_BYTES:
            on.step(f"all-reduce over {size} devices: {num_bytes} bytes")
            found.keep("all_reduce", size, num_bytes, 1, mean(on.all("all_reduce", num_bytes, size, MESSAGE_REPEATS)))
        for elements in SHARED_PARAMETERS:
            on.step(f"gradients and weights of {size} replicas: {elements} parameters")
            found.keep("share", size, elements, 1, mean(on.all("share", elements, size, MESSAGE_REPEATS)))
    if on.gang.size > 1:
        found.latency = mean(on.all("send", 1, MESSAGE_REPEATS))
