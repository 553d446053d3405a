"""An execution plan: which mesh, strategy and engine each call gets."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from prefect_rlhf.placement.devices.hashed_once import HashedOnce, hashed_once
from prefect_rlhf.placement.devices.mesh import ClusterShape, Device, DeviceMesh
from prefect_rlhf.placement.devices.strategy import Coordinate, Strategy
from prefect_rlhf.placement.graph import Call, DataflowGraph

EngineKind = Literal["megatron", "vllm", "python"]
Offload = Literal["none", "optimizer", "all"]
"""The part that leaves device memory between uses: none, the optimizer's state and gradients, or the whole instance."""
OffloadPart = Literal["all", "weights", "optimizer"]
"""The part of an instance that an offload moves: the whole; of a trained one its compute weights alone, or its main
weights, moments and gradients."""
Recompute = int | Literal["all"]
"""The number of layers of each pipeline stage, or all, that a train_step runs forward again during its backward."""


@hashed_once
@dataclass(frozen=True, slots=True)
class Placement(HashedOnce):
    """The mesh, strategy and engine of a call, and its words.

    `placement/words/` has a file for each word, with its check, its effect on costs and its setting for engines.
    """

    mesh: DeviceMesh
    strategy: Strategy
    engine: EngineKind
    """`python` is the engine of compute calls, which use the host CPU of a single device."""
    micro_batches: int = 1
    """Per data-parallel replica and mini-batch; vLLM does not use it."""
    offload: Offload = "none"
    """The part of the call's instance that is in host memory while no call uses it."""
    device_order: tuple[int, ...] = ()
    """The mesh's devices, by position, in the order of the strategy's coordinates; empty means as the mesh lists
    them."""
    prefetch: bool = True
    """Whether an offloaded part is reloaded while the previous call runs. Otherwise it is reloaded only when its
    devices are idle, so no other call needs memory for it."""
    cache_gib: float | None = None
    """GiB of vLLM's key-value cache on each device; None means room for all rows of a replica at maximum length. Rows
    without room in the cache wait, or are preempted."""
    recompute: Recompute = 0
    """How many layers of each pipeline stage keep only their input for a train_step's backward pass, which runs their
    forward again."""
    sequence_parallel: bool = False
    """Whether a train_step divides tokens over tp wherever it does not divide products."""
    parts: int = 1
    """Into how many equal parts the rows of a generate or an inference are cut, by whole groups. Each part is a task
    run, and a reader's part may begin when the parts of its input with its rows have ended."""
    rows_first: bool = False
    """Whether the call's rows move to their readers directly after it, ahead of other calls that could begin then."""
    registered: tuple[tuple[str, Any], ...] = ()
    """Words from other packages, by name, unless they have their default."""

    @property
    def cache_bytes(self) -> int | None:
        """Bytes of vLLM's key-value cache on each device; None means room for all rows at maximum length."""
        return None if self.cache_gib is None else int(self.cache_gib * (1 << 30))

    @property
    def name(self) -> str:
        """`n0:0-1 dp2`, as in task run names."""
        return f"{self.mesh.name} {self.strategy}"

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices in the order of the strategy's coordinates."""
        return _devices_of(self)


@hashed_once
@dataclass(frozen=True, slots=True)
class ModelInstance(HashedOnce):
    """A resident copy of a role's weights, shared by calls with the same role, engine, mesh and strategy.

    >>> ModelInstance("actor", "vllm", DeviceMesh(0, 1, 0, 2), Strategy(dp=2)).name
    'actor.vllm n0:0-1 dp2'
    """

    role: str
    engine: EngineKind
    mesh: DeviceMesh
    strategy: Strategy
    device_order: tuple[int, ...] = ()

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices in the order of the strategy's coordinates."""
        return _devices_of(self)

    @property
    def name(self) -> str:
        return f"{self.role}.{self.engine} {self.mesh.name} {self.strategy}"


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """A placement for every call of a graph, on a single cluster."""

    name: str
    cluster: ClusterShape
    placements: tuple[tuple[str, Placement], ...]
    _by_call: dict[str, Placement] = field(init=False, repr=False, compare=False, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_call", dict(self.placements))

    def __getitem__(self, call: str) -> Placement:
        return self._by_call[call]

    def parts(self, call: str) -> int:
        """Return how many parts a call's rows are cut into; 1 for a call that has no placement yet."""
        placement = self._by_call.get(call)
        return 1 if placement is None else placement.parts


def ordered_devices(mesh: DeviceMesh, order: tuple[int, ...]) -> tuple[Device, ...]:
    """Return the mesh's devices in the order of these positions; without positions, as the mesh lists them.

    >>> [str(device) for device in ordered_devices(DeviceMesh(0, 1, 0, 4), (0, 2, 1, 3))]
    ['n0:0', 'n0:2', 'n0:1', 'n0:3']
    """
    devices = mesh.devices()
    return tuple(devices[position] for position in order) if order else devices


@lru_cache(maxsize=512)  # its hash is kept, other than that of an order
def _devices_of(placed: Placement | ModelInstance) -> tuple[Device, ...]:
    return ordered_devices(placed.mesh, placed.device_order)


def recomputed_layers(recompute: Recompute, num_layers: int) -> int:
    """Return how many layers of a pipeline stage with `num_layers` layers are recomputed; these are its first layers.

    >>> recomputed_layers("all", 8), recomputed_layers(3, 8), recomputed_layers(8, 7)
    (8, 3, 7)
    """
    return num_layers if recompute == "all" else min(recompute, num_layers)


def device_coordinates(placed: Placement | ModelInstance) -> Iterator[tuple[Device, Coordinate]]:
    """Pair each device with its coordinate in the strategy."""
    return zip(placed.devices, placed.strategy.coordinates(), strict=True)


def instance_of(call: Call, placement: Placement) -> ModelInstance | None:
    """Return the copy of weights that `call` uses with this placement; None for compute calls."""
    return None if call.role is None else _instance(call.role, placement)


@lru_cache(maxsize=4096)  # a single object, whose hash is computed once, for all requests
def _instance(role: str, placement: Placement) -> ModelInstance:
    return ModelInstance(role, placement.engine, placement.mesh, placement.strategy, placement.device_order)


def instances(graph: DataflowGraph, plan: ExecutionPlan) -> dict[ModelInstance, tuple[Call, ...]]:
    """Return every instance of the plan with the calls that share it, in the order of the graph's calls."""
    return dict(_instances(graph, plan.placements))


@lru_cache(maxsize=256)  # every step of an estimate and of a certificate asks for the same
def _instances(
    graph: DataflowGraph, placements: tuple[tuple[str, Placement], ...]
) -> Mapping[ModelInstance, tuple[Call, ...]]:
    placed = dict(placements)
    users: dict[ModelInstance, tuple[Call, ...]] = {}
    for call in graph:
        instance = instance_of(call, placed[call.name])
        if instance is not None:
            users[instance] = (*users.get(instance, ()), call)
    return users


def trained_instance(graph: DataflowGraph, plan: ExecutionPlan, role: str) -> ModelInstance | None:
    """Return the instance in which the role's train_step writes weights in place; None for a frozen role."""
    trainer = graph.trained_by(role)
    return None if trainer is None else instance_of(trainer, plan[trainer.name])


def stored_instance(graph: DataflowGraph, plan: ExecutionPlan, role: str) -> ModelInstance | None:
    """Return the instance that provides the state for a checkpoint or a switch; None for a frozen role.

    All instances of a follower have the same state; it is copied from the first.
    """
    if graph.model(role).follows is None:
        return trained_instance(graph, plan, role)
    return next(instance for instance in instances(graph, plan) if instance.role == role)


def has_state(graph: DataflowGraph, plan: ExecutionPlan, instance: ModelInstance) -> bool:
    """Whether an instance gets its weights from a checkpoint or a switch, because it is trained or follows."""
    follows = graph.model(instance.role).follows is not None
    return follows or instance == trained_instance(graph, plan, instance.role)


def built_version(graph: DataflowGraph, plan: ExecutionPlan, instance: ModelInstance, finished: int) -> int:
    """Return the weight version of a newly built instance, in a run that starts after `finished` steps.

    A checkpoint has a single copy of trained weights, and the first reallocate writes the other copies. All instances
    of a follower are restored.
    """
    return graph.version_after(instance.role, finished) if has_state(graph, plan, instance) else 0


def offloaded_parts(graph: DataflowGraph, plan: ExecutionPlan) -> dict[ModelInstance, OffloadPart]:
    """Return the part of each offloaded instance that leaves device memory whenever no call uses it.

    Such a part is built, then offloaded before the first step.
    """
    return {
        instance: part
        for instance, calls in instances(graph, plan).items()
        for call in calls
        if (part := plan[call.name].offload) != "none"
    }


def moved_parts(graph: DataflowGraph, plan: ExecutionPlan) -> dict[ModelInstance, tuple[OffloadPart, ...]]:
    """Return each offloaded instance's parts, which come and go separately.

    A trained instance that is offloaded completely moves in two parts, because its train_step needs both and other
    calls need only its weights. Gradients go with the optimizer; they are zeroed before each step.
    """
    return {
        instance: ("weights", "optimizer") if _goes_in_two(graph, plan, instance, part) else (part,)
        for instance, part in offloaded_parts(graph, plan).items()
    }


def _goes_in_two(graph: DataflowGraph, plan: ExecutionPlan, instance: ModelInstance, part: OffloadPart) -> bool:
    return part == "all" and instance == trained_instance(graph, plan, instance.role)


def prefetched(graph: DataflowGraph, plan: ExecutionPlan) -> frozenset[ModelInstance]:
    """Return the instances with an offloaded part that is reloaded while the previous call runs."""
    users = instances(graph, plan)
    return frozenset(instance for instance, calls in users.items() if all(plan[call.name].prefetch for call in calls))


def labels(graph: DataflowGraph, plan: ExecutionPlan) -> dict[ModelInstance, str]:
    """Return a short, unique name for each of the plan's instances: `actor.vllm`, or longer if two would share it."""
    placed = tuple(instances(graph, plan))
    short = [f"{instance.role}.{instance.engine}" for instance in placed]
    return {
        instance: name if short.count(name) == 1 else instance.name.replace(" ", ".")
        for instance, name in zip(placed, short, strict=True)
    }
