"""What a rank does in tests with a reference, an actor with an adapter and a critic with an adapter on one base."""

from dataclasses import dataclass, replace
from pathlib import Path

import adapter_cases
import megatron_cases as cases
from megatron_cases import OPTIMIZER, Case, make_rows

from prefect_rlhf.engines.commands import BuildCommand, Restore
from prefect_rlhf.engines.rank.rank import Rank
from prefect_rlhf.placement.devices.mesh import DeviceMesh
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.layout.layout import engine_layout
from prefect_rlhf.placement.models.weights import named_weights
from prefect_rlhf.placement.plan import ModelInstance

HEADS = {"ref": "lm", "actor": "lm", "critic": "lm+scalar"}
UPDATES = {"actor": 1, "critic": 0}
"""The versions of the trained roles in a checkpoint."""


@dataclass
class Found:
    """Of a rank: whether the base of each role is the first role's, and what follows."""

    in_common: dict[str, bool]
    is_reference: bool
    reference_stays: bool
    actor_moves: bool
    device_bytes: int
    bytes_of_one: int
    bytes_of_own: int


def build(rank: int, case: Case, order: tuple[str, ...], stored: Path | None = None) -> tuple[Rank, list[int]]:
    """A rank with the roles in this order, and its bytes after each build; adapters are those of a checkpoint."""
    strategy = Strategy(case.dp, case.tp, case.pp)
    placed = ("megatron", DeviceMesh(0, 1, 0, 1), strategy)
    specs = {}
    for role in order:
        trains = {"adapter": adapter_cases.ADAPTER, "optimizer": OPTIMIZER} if role != "ref" else {}
        specs[role] = replace(replace(case, head=HEADS[role], **trains).spec(), role=role)
    weights = named_weights(tuple(specs.values()), frozenset({"actor", "critic"}))
    one, sizes, holders = Rank(rank, 4), [], {}
    for role, spec in specs.items():
        instance = ModelInstance(role, *placed)
        shared = {own.name: holders[own.name] for own in weights[role] if own.name in holders}
        holders |= {own.name: instance for own in weights[role] if not own.trained and own.name not in holders}
        layout = engine_layout(spec, "megatron", strategy, case.ranks)
        restored = Restore(stored, UPDATES[role]) if stored and role in UPDATES else None
        options = {"weights": weights[role], "shared": shared, "restore": restored}
        command = BuildCommand(spec, instance, case.ranks, layout, 128, 64, **options)
        sizes.append(one.build(command).device_bytes)
    return one, sizes


def addresses(one: Rank, order: tuple[str, ...]):
    """The views of each role, the names of the base, and of each role whether its base is where the first role's is."""
    engines = {instance.role: model.engine for instance, model in one.models.items()}
    views = {role: {name: shard.view for name, shard in engine.weights().items()} for role, engine in engines.items()}
    base = [name for name in views["ref"] if name != "score.weight"]
    in_common = {
        role: all(own[name].data_ptr() == views[order[0]][name].data_ptr() for name in base)
        for role, own in views.items()
    }
    return views, base, in_common


def digests(one: Rank) -> dict[str, dict[str, int]]:
    """The fingerprint of every weight of each role."""
    return {instance.role: model.digest().by_name() for instance, model in one.models.items()}


def train_actor(one: Rank) -> None:
    """A train_step, after which the actor has version 1."""
    (model,) = (model for instance, model in one.models.items() if instance.role == "actor")
    cases.train_on(model.engine, *make_rows(24), cases.loss, cases.Walk("logprobs", 3))
    model.label(1)


def save(rank: int, case: Case, order: tuple[str, ...], folder: Path) -> dict[str, dict[str, int]]:
    """Train the actor, and write a checkpoint of both adapters; return all fingerprints."""
    one, _ = build(rank, case, order)
    train_actor(one)
    for instance in [each for each in one.models if each.role in UPDATES]:
        one.checkpoint(instance, UPDATES[instance.role])
    one.commit(folder, folder)
    found = digests(one)
    one.close_instances(tuple(one.models))
    return found


def resume(rank: int, case: Case, order: tuple[str, ...], folder: Path):
    """Build from the checkpoint and train on, with the optimizer away in between.

    Returns the fingerprints, whether each base is the first role's before and after, and the bytes on the device.
    """
    one, sizes = build(rank, case, order, folder)
    found, before = digests(one), addresses(one, order)[2]
    (actor,) = (each for each in one.models if each.role == "actor")
    one.offload(actor, "optimizer")
    one.reload(actor, "optimizer")
    train_actor(one)
    after = addresses(one, order)[2]
    one.close_instances(tuple(one.models))
    return found, before, after, sizes[-1]


def lend(rank: int, case: Case, order: tuple[str, ...]) -> Found:
    """Build the roles, compare, train the actor, and compare again."""
    one, sizes = build(rank, case, order)
    engines = {instance.role: model.engine for instance, model in one.models.items()}
    sequences, batch = make_rows(24)

    def logprobs(role: str):
        made = engines[role].infer(sequences, "logprobs", 1, 1.0)
        return None if made is None else made.clone()

    def alike(left, right) -> bool:
        return left is right is None or bool((left == right).all())

    before, of_actor = logprobs("ref"), logprobs("actor")
    cases.train_on(engines["actor"], sequences, batch, cases.loss, cases.Walk("logprobs", 3))
    after, moved = logprobs("ref"), logprobs("actor")
    views, base, in_common = addresses(one, order)
    own = [view for role in order[1:] for name, view in views[role].items() if name not in base]
    own += [view for name, view in views[order[0]].items() if name not in base]
    found = Found(
        in_common,
        is_reference=alike(before, of_actor),
        reference_stays=alike(before, after),
        actor_moves=moved is None or not alike(of_actor, moved),
        device_bytes=sizes[-1],
        bytes_of_one=sum(view.numel() * view.element_size() for view in (views["ref"][name] for name in base)),
        bytes_of_own=sum(view.numel() * view.element_size() for view in own),
    )
    one.close_instances(tuple(one.models))
    return found
