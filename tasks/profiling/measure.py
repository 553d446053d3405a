"""Measures a model's layers, weights and messages on some devices, and makes a profile of them."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from statistics import mean, median

from prefect_rlhf.engines.commands import RankReport
from prefect_rlhf.engines.rank.profiling.profiling_rank import STEPS, PassSeconds, ProfilingRank
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.cost.contention import SlowDown
from prefect_rlhf.placement.cost.datasheets.hardware import Links
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.times.profile import Measurement, ModelPiece, Profile, Subject
from prefect_rlhf.placement.cost.workload import ModelCallKind
from prefect_rlhf.placement.engine_traits import TRAITS, refused_heads
from prefect_rlhf.placement.models.weights import num_parameters
from prefect_rlhf.placement.plan import EngineKind
from prefect_rlhf.tasks.profiling.bench import ENGINES, Bench, PassMethod, Sizes, open_bench, part_of
from prefect_rlhf.tasks.profiling.contention import number_of_probes, time_contention
from prefect_rlhf.tasks.profiling.network import NETWORK_MESSAGES, time_network

FEW_TOKENS = 256  # with at most this many tokens, the time outside of layers counts as a call's constant overhead
MESSAGE_BYTES = tuple(1 << power for power in range(12, 25, 2))
SHARED_PARAMETERS = (1 << 16, 1 << 20, 1 << 24)
MESSAGE_REPEATS = 11  # they are short and easily delayed
HELD_UP = 1.25  # times the seconds of a larger size: kernels of two sizes differ by less

Pass = tuple[PassMethod, EngineKind]
"""A call of an engine that is timed: its method, and the engine."""

PASSES: tuple[Pass, ...] = (
    (ProfilingRank.infer, "megatron"),
    (ProfilingRank.train, "megatron"),
    *((ProfilingRank.generate, engine) for engine in ENGINES),
)

TimedSizes = dict[tuple[int, int], PassSeconds]
"""A pass's time in seconds, by (rows, length)."""

Say = Callable[[int, int, str], object]
"""Called before every measurement with its number, the number of all measurements, and a description.

It is not called when a size is timed again.
"""


def check_sizes(subject: Subject, sizes: Sizes) -> None:
    """Raise InvalidInput for sizes that the model does not allow."""
    if sizes.lengths[-1] + STEPS > subject.shape.max_position_embeddings:
        most = subject.shape.max_position_embeddings - STEPS
        raise InvalidInput("longest", sizes.longest, f"at most {most}: the model's context has no room for more")
    width = subject.shape.head_dim
    for engine in ENGINES:  # all are timed
        if reason := refused_heads(engine, width, subject.dtype, subject.kind):
            raise InvalidInput("model", f"heads {width} wide", f"another model: {reason}")
    for tp in sizes.tensor_parallel:
        part_of(subject.shape, tp, subject.dtype)


def measure(
    subject: Subject,
    sizes: Sizes,
    say: Say,
    node_devices: Sequence[str] = (),
    gpus: Sequence[int] | None = None,
) -> Profile:
    """Measure everything, which takes minutes. Raises the ranks' errors, and InvalidInput for sizes that do not fit.

    `node_devices` are the kinds of a Ray cluster's nodes, as `open_gang` takes them. Without them, this machine is
    measured; `gpus` are the numbers of the GPUs to time, by default the first.
    """
    check_sizes(subject, sizes)
    findings, steps = Findings(), CountedSteps(say, number_of_measurements(subject, sizes))
    for tp in sizes.tensor_parallel:
        with open_bench(subject, part_of(subject.shape, tp, subject.dtype), sizes, steps, node_devices, gpus) as bench:
            if tp == min(sizes.tensor_parallel):
                time_weights(bench, findings)
                time_messages(bench, findings)
                findings.slow_downs = time_contention(bench, sizes)
            time_layers(bench, tp, sizes, findings)  # last: it changes weights, which the moves before must not see
    if subject.num_nodes > 1:
        findings.network = time_network(subject, steps, node_devices)
    return findings.profile(subject)


def number_of_measurements(subject: Subject, sizes: Sizes) -> int:
    """Return how many measurements `measure` makes."""
    layers = len(PASSES) * len(sizes.rows) * len(sizes.lengths)
    groups = len(group_sizes(subject.num_devices))
    between = NETWORK_MESSAGES if subject.num_nodes > 1 else 0
    messages = groups * (len(MESSAGE_BYTES) + len(SHARED_PARAMETERS))
    return len(sizes.tensor_parallel) * layers + 4 + messages + number_of_probes(subject.num_devices) + between


@dataclass(slots=True)
class CountedSteps:
    """Numbers the steps of a measurement as they begin."""

    say: Say
    total: int
    done: int = 0

    def __call__(self, words: str) -> None:
        self.done += 1
        self.say(self.done, self.total, words)


def group_sizes(num_devices: int) -> tuple[int, ...]:
    """Return the sizes of timed groups of consecutive ranks: all divisors of the number of devices."""
    return tuple(size for size in range(2, num_devices + 1) if num_devices % size == 0)


@dataclass(slots=True)
class Findings:
    """The measurements so far. Lists hold the values for a median or mean; `heads` is keyed by tokens, `samples` by
    rows.
    """

    measurements: list[Measurement] = field(default_factory=list)
    adam: list[float] = field(default_factory=list)
    written: list[float] = field(default_factory=list)
    packed: list[float] = field(default_factory=list)
    calls: dict[tuple[ModelCallKind, EngineKind], list[float]] = field(default_factory=lambda: defaultdict(list))
    bandwidths: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    heads: dict[tuple[ModelPiece, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    samples: dict[tuple[EngineKind, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    latency: float = 0.0
    network: tuple[float, float] = (0.0, 0.0)  # bytes per second, and seconds of a message
    slow_downs: tuple[SlowDown, ...] = ()
    busy: list[float] = field(default_factory=list)  # shares of the cores, from time to time

    def keep(
        self, piece: ModelPiece, tp: int, rows: int, length: int, seconds: float, engine: EngineKind = "megatron"
    ) -> None:
        """Keep a measurement. A difference of two times may be negative and counts as 0."""
        self.measurements.append(Measurement(piece, tp, rows, length, max(0.0, seconds), engine))

    def profile(self, subject: Subject) -> Profile:
        """Return all measurements as a profile."""
        device = median(self.bandwidths["device"])
        node = median(self.bandwidths["node"] or [device])
        network, network_latency = self.network
        links = Links(device, node, network, median(self.bandwidths["host"]), self.latency, network_latency)
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
            num_nodes=subject.num_nodes,
            slow_downs=self.slow_downs,
            busy=mean(self.busy),
        )


def time_layers(bench: Bench, tp: int, sizes: Sizes, findings: Findings) -> None:
    """Time forward, backward, head, decoding and sampling at every size."""
    timed: dict[Pass, TimedSizes] = {which: {} for which in PASSES}
    for length in sizes.lengths:
        for rows in sizes.rows:
            for which in PASSES:
                timed[which][rows, length] = bench.passes(*which, rows, length)
        findings.busy.append(bench.busy())
    for which, of_pass in timed.items():
        for size in held_up(of_pass):
            again = bench.time(*which, *size)
            of_pass[size] = min(of_pass[size], again, key=attrgetter("call"))
    for size, infer in timed[ProfilingRank.infer, "megatron"].items():
        _keep_training(bench, tp, *size, infer, timed[ProfilingRank.train, "megatron"][size], findings)
        for engine in ENGINES:
            _keep_generation(bench, engine, tp, *size, timed[ProfilingRank.generate, engine][size], findings)
    for (piece, tokens), seconds in sorted(findings.heads.items()):
        findings.keep(piece, tp, tokens, 1, median(seconds))
    for (engine, rows), seconds in sorted(findings.samples.items()):
        findings.keep("sample", tp, rows, 1, median(seconds), engine)
    findings.heads.clear()  # the next degree has its own values
    findings.samples.clear()


def held_up(timed: TimedSizes) -> list[tuple[int, int]]:
    """Return the sizes (rows, length) that took much longer than a size that is at least as large in both.

    Another program probably ran at the same time, so these sizes are timed again.
    """
    return [
        (rows, length)
        for (rows, length), seconds in timed.items()
        if any(
            seconds.call > HELD_UP * other.call
            for (more, longer), other in timed.items()
            if more >= rows and longer >= length
        )
    ]


def _keep_training(
    bench: Bench, tp: int, rows: int, length: int, infer: PassSeconds, train: PassSeconds, findings: Findings
) -> None:
    """Keep forward and backward; the backward includes the extra time of a train_step's forward."""
    layers, tokens = bench.model.shape.num_layers, rows * (length // 2)
    findings.keep("forward", tp, rows, length, infer.forward / layers)
    findings.keep("backward", tp, rows, length, (train.forward + train.backward - infer.forward) / layers)
    findings.heads["head_forward", tokens].append(infer.ends)
    findings.heads["head_backward", tokens].append(train.ends - infer.ends)
    if rows * length <= FEW_TOKENS:
        for kind in ("inference", "train_step"):
            findings.calls[kind, "megatron"].append(infer.before + infer.after)
        around = train.before + train.after - infer.before
        findings.adam.append(max(0.0, around) / num_parameters(bench.model))


def _keep_generation(
    bench: Bench, engine: EngineKind, tp: int, rows: int, length: int, seconds: PassSeconds, findings: Findings
) -> None:
    """Keep decoding, and the prefill of an engine without inference; with inference, prefill is an ordinary forward.

    If the engine replays CUDA graphs, it counts the embedding and the last norm as a part of the layers.
    """
    layers = bench.model.shape.num_layers
    findings.keep(
        "decode_graphs" if bench.replays(engine) else "decode", tp, rows, length, seconds.decode / layers, engine
    )
    if "inference" not in TRAITS[engine].serves:
        findings.keep("forward", tp, rows, length, seconds.forward / layers, engine)
    findings.samples[engine, rows].append(seconds.ends)
    findings.calls["generate", engine].append(seconds.before + seconds.after)


def time_weights(bench: Bench, findings: Findings) -> None:
    """Time moves of weights within a device, to another device, and to the host and back; also fingerprints and
    packing.
    """
    size, elements = bench.gang.size, num_parameters(bench.model)
    num_bytes = elements * ModelSizes.of(bench.model).item
    bench.step("weights within a device")
    within = [
        bench.each(ProfilingRank.reallocate, lambda rank: (bench.move(rank, rank, "vllm", "model"),)) for _ in range(2)
    ][-1]
    _keep_moves(within, num_bytes, elements, "device", findings)
    bench.step("weights to another device")
    if size > 1:  # every second rank sends to the next rank, all concurrently; the first time creates a route
        pairs = [(rank, rank + 1) for rank in range(0, size - 1, 2)]
        commands = {rank: (bench.move(*pair, "megatron", "copy"),) for pair in pairs for rank in pair}
        moved = [bench.call(ProfilingRank.reallocate, commands) for _ in range(2)][-1]
        _keep_moves(moved[1::2], num_bytes, elements, "node", findings)
    bench.step("weights to the host and back")
    for method in (ProfilingRank.offload, ProfilingRank.reload):
        copied = bench.each(method, lambda rank: (bench.instance(rank, "megatron", "copy"),))
        _keep_moves(copied, num_bytes, elements, "host", findings)
    bench.step("packing of weights")
    findings.packed += [
        seconds / elements for seconds in bench.each(ProfilingRank.repack, lambda rank: (bench.instance(rank, "vllm"),))
    ]


def _keep_moves(reports: Iterable[RankReport], num_bytes: int, elements: int, link: str, findings: Findings) -> None:
    for report in reports:
        findings.bandwidths[link].append(num_bytes / (report.seconds - report.fingerprint_seconds))
        if report.fingerprint_seconds:
            findings.written.append(report.fingerprint_seconds / elements)


def time_messages(bench: Bench, findings: Findings) -> None:
    """Time a message to a neighbour, sums over groups, and replicas' gradients and weights."""
    for size in group_sizes(bench.gang.size):
        for num_bytes in MESSAGE_BYTES:
            bench.step(f"all-reduce over {size} devices: {num_bytes} bytes")
            findings.keep(
                "all_reduce",
                size,
                num_bytes,
                1,
                mean(bench.all(ProfilingRank.all_reduce, num_bytes, size, MESSAGE_REPEATS)),
            )
        for elements in SHARED_PARAMETERS:
            bench.step(f"gradients and weights of {size} replicas: {elements} parameters")
            findings.keep(
                "share", size, elements, 1, mean(bench.all(ProfilingRank.share, elements, size, MESSAGE_REPEATS))
            )
    if bench.gang.size > 1:
        findings.latency = mean(bench.all(ProfilingRank.send, 1, MESSAGE_REPEATS))
