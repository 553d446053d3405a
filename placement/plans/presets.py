"""Plans by name: each preset is a rule for a call's part of the leased mesh and its strategies.

Every preset is a restriction of the space that the planner searches. `preset` uses its first strategies that are legal
and fit, and the planner its best strategies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.errors.right_value import closest
from prefect_rlhf.placement.devices.mesh import DeviceMesh
from prefect_rlhf.placement.devices.strategy import Strategy, strategies
from prefect_rlhf.placement.engine_traits import engines_of
from prefect_rlhf.placement.graph import Call, DataflowGraph
from prefect_rlhf.placement.models.outputs import head_of
from prefect_rlhf.placement.plan import EngineKind

REAL_TOKENS = 512 * 2048 // 16 // 4
"""A device's part of a micro-batch of ReaL's heuristic: in each call 512 rows of 2048 on 16 devices, in 4 (table 5)."""

MeshRule = Callable[[Call, DeviceMesh, DataflowGraph, float], DeviceMesh]
"""The part of the leased mesh that a call gets, given the preset's ratio; a computation takes its first device."""


def any_strategy(mesh: DeviceMesh) -> Iterator[Strategy]:
    return strategies(mesh.num_devices)


def as_in_pre_training(mesh: DeviceMesh) -> Iterator[Strategy]:
    """Yield tensor parallelism within a node, pipelines across nodes, and data parallelism over the rest."""
    for pp in range(1, mesh.num_nodes + 1):
        if mesh.num_nodes % pp == 0:
            yield Strategy(mesh.num_nodes // pp, mesh.devices_per_node, pp)


@dataclass(frozen=True, slots=True)
class Preset:
    """A rule that assigns devices to every call of any graph."""

    mesh_rule: MeshRule
    ratio: float | None = None
    """The share of devices for the calls that `first` describes: the placement ratio of Adaptive Placement and
    Parallelism."""
    first: str = ""
    strategies: Callable[[DeviceMesh], Iterator[Strategy]] = any_strategy
    """What a call may have on its mesh, the most data parallelism first."""
    symmetric: bool = False
    """Whether all calls have the same strategy, the first that fits."""
    engine: EngineKind | None = None
    """The engine that generates; None allows any."""
    micro_batch_tokens: int | None = None
    """The most tokens of a device in a micro-batch of a symmetric preset, whose calls all have the same number of
    micro-batches; with None each call has a suitable number."""
    parts: int = 1
    """How many streamed parts generation and inference have on disjoint devices, halved until they divide a step's
    rows."""
    what: str = ""
    """The preset in a few words."""

    def mesh(self, call: Call, lease: DeviceMesh, graph: DataflowGraph) -> DeviceMesh:
        """Return a call's mesh. Raises InvalidInput if the lease has no such part."""
        try:
            return self.mesh_rule(call, lease, graph, 0.5 if self.ratio is None else self.ratio)
        except InvalidInput as error:
            part = "" if error.seen == lease.name else f"; its part {error.seen} has no halves"
            raise InvalidInput("mesh", lease.name, f"{error.expected}{part}") from None

    def engines(self, call: Call) -> tuple[EngineKind, ...]:
        """Return the engines that may run the call."""
        able = engines_of(call.kind)
        return (self.engine,) if self.engine in able else able

    def with_ratio(self, ratio: float, name: str) -> Preset:
        """Return the preset with another ratio. Raises InvalidInput if it has no ratio, or for a ratio outside 0 to
        1.
        """
        if self.ratio is None:
            raise InvalidInput("plan", f"{name}:{ratio}", f"{name}: it has no ratio")
        if not 0 < ratio < 1:
            raise InvalidInput("plan", f"{name}:{ratio}", f"a share of the devices, between 0 and 1, for {self.first}")
        return replace(self, ratio=ratio)


def preset_named(name: str) -> Preset:
    """Return the preset named `name` or `name:ratio`. Raises InvalidInput for any other text.

    >>> preset_named("separation:0.25").ratio
    0.25
    """
    plain, colon, ratio = name.partition(":")
    preset = PRESETS.get(ALIASES.get(plain, plain))
    if preset is None:
        expected = f"auto, measure(k), a plan file, or a preset ({', '.join(PRESETS)})"
        raise InvalidInput("plan", name, f"{expected}{closest(plain, PRESETS)}")
    if not colon:
        return preset
    try:
        share = float(ratio)
    except ValueError:
        raise InvalidInput("plan", name, f"a number after {plain}:, the share of the devices") from None
    return preset.with_ratio(share, plain)


def is_preset(name: str) -> bool:
    """Whether the text names a preset, with or without a ratio."""
    plain = name.partition(":")[0]
    return ALIASES.get(plain, plain) in PRESETS


def everywhere(call: Call, mesh: DeviceMesh, graph: DataflowGraph, ratio: float) -> DeviceMesh:
    """Place every call on the whole mesh, in sequence."""
    return mesh


def interleaved(call: Call, mesh: DeviceMesh, graph: DataflowGraph, ratio: float, critic_apart: bool) -> DeviceMesh:
    """Place inference of frozen models on two parts: outputs of an lm head on the first, scores on the second.

    With `critic_apart` the critic's inference is on the second too, so that it does not wait for the reference model.
    """
    frozen = call.role is not None and graph.trained_by(call.role) is None
    if call.kind != "inference" or not (frozen or critic_apart):
        return mesh
    first, second = cut(mesh, ratio)
    return first if "lm" in map(head_of, call.outputs) else second


def halved_by_head(
    call: Call, mesh: DeviceMesh, graph: DataflowGraph, ratio: float, generate_everywhere: bool
) -> DeviceMesh:
    """Place models that output tokens (actor, reference) on the first part, the others (critic, reward) on the
    second.
    """
    if call.role is None or (generate_everywhere and call.kind == "generate"):
        return mesh
    first, second = cut(mesh, ratio)
    return second if graph.model(call.role).head == "scalar" else first


def separated(call: Call, mesh: DeviceMesh, graph: DataflowGraph, ratio: float) -> DeviceMesh:
    """Place generation and inference on the first part, training on the second: trained models have a copy on each."""
    first, second = cut(mesh, ratio)
    return second if call.kind in ("train_step", "compute") else first


def separated_in_three(call: Call, mesh: DeviceMesh, graph: DataflowGraph, ratio: float) -> DeviceMesh:
    """Place training on the second part, and generation and inference each on half of the first."""
    first, second = cut(mesh, ratio)
    if call.kind in ("train_step", "compute"):
        return second
    generating, inferring = cut(first, 0.5)
    return generating if call.kind == "generate" else inferring


def alone(call: Call, mesh: DeviceMesh, graph: DataflowGraph, ratio: float) -> DeviceMesh:
    """Place each model on its own devices: the first trained model gets its share, each next model half of the rest."""
    if call.role is None:
        return mesh
    roles = [model.role for model in graph.models]
    roles.sort(key=lambda role: (graph.trained_by(role) is None, graph.model(role).head == "scalar"))
    rest = mesh
    for role in roles[:-1]:
        part, rest = cut(rest, ratio)
        if role == call.role:
            return part
        ratio = 0.5
    return rest


def cut(mesh: DeviceMesh, ratio: float) -> tuple[DeviceMesh, DeviceMesh]:
    """Cut a mesh in two, with about `ratio` of it in the first part: whole nodes, or half of a node.

    Raises InvalidInput if a half is not a mesh: a single device cannot be cut, nor a number of devices that is not a
    power of two.

    >>> [part.name for part in cut(DeviceMesh(0, 4, 0, 8), 0.25)]
    ['n0:0-7', 'n1-3:0-7']
    """
    if mesh.num_nodes > 1:
        count = min(mesh.num_nodes - 1, max(1, round(ratio * mesh.num_nodes)))
        first = replace(mesh, num_nodes=count)
        return first, replace(mesh, first_node=mesh.first_node + count, num_nodes=mesh.num_nodes - count)
    count = mesh.devices_per_node // 2
    if ratio != 0.5:
        raise InvalidInput("mesh", mesh.name, f"several nodes to give {ratio} of them for this preset")
    if not count or count * 2 != mesh.devices_per_node or count & (count - 1):
        right = "a mesh of two equal halves for this preset, each of 1, 2, 4, ... devices or of whole nodes"
        raise InvalidInput("mesh", mesh.name, right)
    first = replace(mesh, devices_per_node=count)
    return first, replace(first, first_device=mesh.first_device + count)


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "flattening": Preset(everywhere, what="every call on all devices, so calls take turns"),
        # Xiao et al. 2023 (arXiv:2312.11819), sections V-A1 and V-A2
        "interleaving": Preset(
            partial(interleaved, critic_apart=False),
            0.5,
            "the reference model",
            what="reference and reward model on a half each, all else on all devices",
        ),
        "side_by_side": Preset(
            partial(interleaved, critic_apart=True),
            0.5,
            "the reference model",
            what="as interleaving, and the critic's values next to the reward model",
        ),
        "separation": Preset(separated, 0.5, "generation and inference", what="training on a half of its own"),
        # the same, section V-A2 and figure 5
        "separation-streamed": Preset(
            separated_in_three,
            0.5,
            "generation and inference",
            parts=4,
            what="training on a half, generation and inference on a quarter each, in parts",
        ),
        "split": Preset(
            partial(halved_by_head, generate_everywhere=True),
            0.5,
            "actor and reference model",
            what="models that score on a half of their own, generation on all devices",
        ),
        # Sheng et al. 2024 (arXiv:2409.19256), section 8.3: what NeMo-Aligner and OpenRLHF do; colocate is flattening
        "hybridflow-split": Preset(
            partial(halved_by_head, generate_everywhere=False),
            0.5,
            "actor and reference model",
            what="as split, and generation on the actor's half",
        ),
        "standalone": Preset(alone, 0.5, "the actor", what="each model on devices of its own"),
        # Mei et al. 2024 (arXiv:2406.14088), section 8.1
        "real-heuristic": Preset(
            everywhere,
            strategies=as_in_pre_training,
            symmetric=True,
            engine="megatron",
            micro_batch_tokens=REAL_TOKENS,
            what="one strategy for all calls, tensor parallelism within nodes, pipelines across",
        ),
    }
)
"""Every preset by its name."""

ALIASES: Mapping[str, str] = MappingProxyType({"colocate": "flattening", "hybridflow-colocate": "flattening"})
"""Other names for the same presets: HybridFlow's (section 8.3)."""
