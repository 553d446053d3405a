"""The setup for measurements: a gang that holds part of a model on each rank, for both training and generation.

A tensor-parallel shard is timed as a separate model with its share of the heads, feed-forward columns and vocabulary.
So it needs no other ranks, and its time excludes communication. Each rank of the gang works on its own copy.
"""

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

from prefect_rlhf.engines.commands import BuildCommand, MoveWeightsCommand
from prefect_rlhf.engines.gang.open import open_gang
from prefect_rlhf.engines.gang.protocol import Arguments, Gang, Result
from prefect_rlhf.engines.rank.profiling.profiling_rank import STEPS, PassSeconds, ProfilingRank
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.times.profile import Subject
from prefect_rlhf.placement.devices.mesh import Backend, DeviceMesh
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.engine_traits import TRAITS
from prefect_rlhf.placement.layout.layout import layout_of
from prefect_rlhf.placement.models.families.known import FAMILIES
from prefect_rlhf.placement.models.families.llama import LLAMA
from prefect_rlhf.placement.models.model import NO_BIASES, Dtype, ModelSpec, OptimizerSpec, TransformerShape
from prefect_rlhf.placement.plan import EngineKind, ModelInstance

ENGINES: tuple[EngineKind, ...] = ("megatron", "vllm")
TIMED_BYTES = 256 << 20  # of layers: with fewer, caches and page tables still hold them from the previous pass
SHORTEST = 16  # tokens of a row
MANY_TOKENS = 1024  # sizes of at least this many tokens are timed once, after their warm-up
REPEATS = 3
BUSY_REPEATS = 9  # of a matrix product that shows whether other programs run: some tenths of a second
DEADLINE_SECONDS = 900.0

PassMethod = Callable[[ProfilingRank, ModelInstance, int, int, int, int], PassSeconds]
"""A method that times a call of an instance: its rows, their length, the repeats and the number of busy ranks."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The largest sizes to time (in powers of two), and the degrees of tensor parallelism."""

    most_rows: int = 32
    longest: int = 128
    tensor_parallel: tuple[int, ...] = (1,)

    @property
    def rows(self) -> tuple[int, ...]:
        return powers(1, self.most_rows)

    @property
    def lengths(self) -> tuple[int, ...]:
        return powers(SHORTEST, self.longest)


def powers(first: int, last: int) -> tuple[int, ...]:
    """Return `first` times powers of two, up to the first product that is at least `last`.

    >>> powers(16, 100)
    (16, 32, 64, 128)
    """
    return tuple(first << power for power in range(math.ceil(math.log2(max(1.0, last / first))) + 1))


def part_of(shape: TransformerShape, tp: int, dtype: Dtype) -> TransformerShape:
    """Return the shape of one of `tp` shards, with enough layers to defeat caches.

    Raises InvalidInput if `tp` does not divide it. For families that derive the head width from the hidden size (Qwen
    2), it is a Llama without biases, since a shard has fewer heads of unchanged width.

    >>> from prefect_rlhf.placement.models.known_models import KNOWN_SHAPES
    >>> part = part_of(KNOWN_SHAPES["llama-7b"], 2, "bfloat16")
    >>> part.num_layers, part.num_attention_heads, part.intermediate_size, part.hidden_size
    (2, 16, 5504, 4096)
    """
    for name, count in (("heads", shape.num_attention_heads), ("feed-forward columns", shape.intermediate_size)):
        if count % tp:
            raise InvalidInput("tensor_parallel", tp, f"a divisor of the model's {count} {name}")
    if not FAMILIES[shape.family].head_dim_is_free:
        shape = replace(shape, family=LLAMA.model_type, biases=NO_BIASES)
    sizes = ModelSizes.of_shape(shape, dtype=dtype)
    layer_bytes = sizes.layer_matrices // tp * sizes.item
    return replace(
        shape,
        num_layers=min(shape.num_layers, max(2, -(-TIMED_BYTES // layer_bytes))),
        num_attention_heads=shape.num_attention_heads // tp,
        num_kv_heads=max(1, shape.num_kv_heads // tp),
        intermediate_size=shape.intermediate_size // tp,
        vocab_size=-(-shape.vocab_size // tp),
    )


@dataclass(frozen=True, slots=True)
class Bench:
    """A gang whose ranks each hold a trained copy of a part of the model in Megatron (`model`) and a copy in vLLM.

    `device` is the kind of the ranks' devices.
    """

    gang: Gang[ProfilingRank]
    model: ModelSpec
    lease: DeviceMesh
    step: Callable[[str], None]
    device: Backend = "cpu"

    def replays(self, engine: EngineKind) -> bool:
        """Whether the engine decodes with CUDA graphs, as in a run. Then only all layers together can be timed."""
        return self.device == "cuda" and TRAITS[engine].replays_graphs

    def instance(self, rank: int, engine: EngineKind, role: str = "model") -> ModelInstance:
        """Return a rank's copy."""
        return ModelInstance(role, engine, DeviceMesh(0, 1, rank, 1), Strategy())

    def each(
        self, method: Callable[[ProfilingRank, *Arguments], Result], arguments: Callable[[int], tuple[*Arguments]]
    ) -> list[Result]:
        """Run a method on all ranks concurrently, with arguments for each rank."""
        return self.call(method, {rank: arguments(rank) for rank in range(self.gang.size)})

    def all(self, method: Callable[[ProfilingRank, *Arguments], Result], *arguments: *Arguments) -> list[Result]:
        """Run a method on all ranks concurrently, with the same arguments."""
        return self.each(method, lambda _: arguments)

    def call(
        self, method: Callable[[ProfilingRank, *Arguments], Result], arguments: Mapping[int, tuple[*Arguments]]
    ) -> list[Result]:
        """Run a method on some ranks concurrently."""
        doing = f"profile: {method.__name__}"
        results = self.gang.call(method, arguments, doing=doing, deadline_seconds=DEADLINE_SECONDS)
        return [results[rank] for rank in sorted(results)]

    def passes(self, method: PassMethod, engine: EngineKind, rows: int, length: int) -> PassSeconds:
        """Announce a measurement and make it."""
        self.step(f"{engine} {method.__name__}: {rows} x {length} tokens")
        return self.time(method, engine, rows, length)

    def time(self, method: PassMethod, engine: EngineKind, rows: int, length: int) -> PassSeconds:
        """Time a call on all ranks concurrently; return each part of its time as a mean over ranks."""
        repeats = 1 if rows * length >= MANY_TOKENS else REPEATS
        by_rank = self.each(method, lambda rank: (self.instance(rank, engine), rows, length, repeats, self.gang.size))
        names = PassSeconds.__dataclass_fields__
        return PassSeconds(**{name: mean(getattr(seconds, name) for seconds in by_rank) for name in names})

    def busy_call(
        self, method: PassMethod, engine: EngineKind, rows: int, length: int, busy: int
    ) -> tuple[float, float]:
        """Time a whole call on the first `busy` ranks concurrently, while the other ranks wait.

        Returns the seconds until the last of them has finished, and their mean.
        """
        self.step(f"{engine} {method.__name__} on {busy} devices at once")
        by_rank = self.each(method, lambda rank: (self.instance(rank, engine), rows, length, REPEATS, busy))
        return max(seconds.together for seconds in by_rank[:busy]), mean(seconds.call for seconds in by_rank[:busy])

    def busy(self) -> float:
        """Return the share of the cores that other programs are using, from 0 to 1; 0 on GPUs."""
        work = self.all(ProfilingRank.multiply, MANY_TOKENS, MANY_TOKENS, self.model.dtype, BUSY_REPEATS)
        return max(each.busy for each in work)

    def move(self, source: int, target: int, engine: EngineKind, role: str) -> MoveWeightsCommand:
        """Return the command that moves weights from a rank's trained copy to another copy."""
        trained, read = self.instance(source, "megatron"), self.instance(target, engine, role)
        source_layout, target_layout = (layout_of(instance, self.model, self.lease) for instance in (trained, read))
        return MoveWeightsCommand(trained, read, 0, source_layout, target_layout, self.lease.devices())

    def build(self, engine: EngineKind, sizes: Sizes, role: str = "model") -> None:
        """Build a copy on each rank."""
        graphs = self.replays(engine)

        def command(rank: int) -> tuple[BuildCommand]:
            trains = "train_step" in TRAITS[engine].serves and role == "model"
            model = self.model if trains else replace(self.model, optimizer=None)
            instance = self.instance(rank, engine, role)
            layout = layout_of(instance, model, self.lease)
            length = sizes.lengths[-1] + STEPS
            return (BuildCommand(model, instance, (rank,), layout, length, sizes.rows[-1], cuda_graphs=graphs),)

        self.each(ProfilingRank.build, command)


@contextmanager
def open_bench(
    subject: Subject,
    part: TransformerShape,
    sizes: Sizes,
    step: Callable[[str], None],
    node_devices: Sequence[str] = (),
    gpus: Sequence[int] | None = None,
) -> Iterator[Bench]:
    """Open a bench: ranks on `gpus` that have built all measured models for a part of the subject's shape."""
    gang = open_gang(
        (subject.num_devices,),
        rank_factory=ProfilingRank,
        device=subject.kind,
        engines=ENGINES,
        through_ray=subject.num_nodes > 1 or bool(node_devices),
        node_devices=node_devices[:1],
        gpus=gpus,
    )
    with closing(gang), bench_of(gang, part, subject.dtype, step, subject.kind) as bench:
        for engine in ENGINES:
            bench.build(engine, sizes)
        bench.build("megatron", sizes, "copy")
        yield bench


@contextmanager
def bench_of(
    gang: Gang[ProfilingRank], part: TransformerShape, dtype: Dtype, step: Callable[[str], None], device: Backend
) -> Iterator[Bench]:
    """Yield a bench without built models. Their random weights are in a temporary folder of the first node.

    On a Ray cluster, the gang is on the first node.
    """
    with tempfile.TemporaryDirectory(prefix="rlhf-profile-") as folder:
        model = ModelSpec("model", str(Path(folder, "model")), "lm", part, dtype, optimizer=OptimizerSpec())
        bench = Bench(gang, model, DeviceMesh(0, 1, 0, gang.size), step, device)
        bench.call(ProfilingRank.write_model, {0: (model,)})
        yield bench
        bench.call(ProfilingRank.remove_model, {0: (model,)})  # on another machine, no other process removes it
