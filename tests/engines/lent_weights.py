"""What a rank does in tests with two frozen models of a folder: the second computes from the first one's tensors."""

from dataclasses import dataclass, replace

from megatron_cases import Case, make_rows

from prefect_rlhf.engines.commands import BuildCommand
from prefect_rlhf.engines.rank.rank import Rank
from prefect_rlhf.engines.weights.memory import storage_bytes
from prefect_rlhf.placement.devices.mesh import DeviceMesh
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.layout.layout import engine_layout
from prefect_rlhf.placement.models.weights import named_weights
from prefect_rlhf.placement.plan import ModelInstance

ROLES = {"ref": "lm", "judge": "lm+scalar"}


@dataclass
class Found:
    """Of a rank: the parameters of the judge in memory of the reference, whether outputs are those without sharing."""

    common: set[str]
    own: set[str]
    same_outputs: bool
    same_digests: bool
    device_bytes: int
    bytes_of_one: int
    bytes_of_own: int
    left_bytes: int


def commands(case: Case, together: bool):
    """The builds of both roles, of which the second names the first if they are held together."""
    strategy = Strategy(case.dp, case.tp, case.pp)
    placed = ("megatron", DeviceMesh(0, 1, 0, 1), strategy)
    specs = {role: replace(Case(case.folder, head=head).spec(), role=role) for role, head in ROLES.items()}
    weights = named_weights(tuple(specs.values()), frozenset())
    first = ModelInstance("ref", *placed)
    theirs = {own.name for own in weights["ref"]}
    for role, spec in specs.items():
        shared = {own.name: first for own in weights[role] if own.name in theirs} if together and role != "ref" else {}
        layout = engine_layout(spec, "megatron", strategy, case.ranks)
        instance = ModelInstance(role, *placed)
        yield BuildCommand(spec, instance, case.ranks, layout, 128, 64, weights=weights[role], shared=shared)


def built(rank: int, case: Case, together: bool):
    """A rank with both, and the reports of their builds."""
    one = Rank(rank, 4)
    reports = [one.build(command) for command in commands(case, together)]
    return one, [model.engine for model in one.models.values()], reports


def lend(rank: int, case: Case) -> Found:
    """Build both twice, with a trunk each and with one trunk, and compare."""
    apart, (ref, judge), apart_reports = built(rank, case, together=False)
    together, (first, second), reports = built(rank, case, together=True)
    sequences, _ = make_rows(6)
    alike = []
    for output, one, other in (("logprobs", ref, first), ("logprobs", judge, second), ("values", judge, second)):
        made = [engine.infer(sequences, output, 1, 1.0) for engine in (one, other)]
        alike.append(made[0] is made[1] is None or bool((made[0] == made[1]).all()))
    of_first = {name: shard.view.data_ptr() for name, shard in first.weights().items()}
    of_second = {name: shard.view.data_ptr() for name, shard in second.weights().items()}
    common = {name for name, place in of_second.items() if of_first.get(name) == place}
    device_bytes = reports[1].device_bytes
    bytes_of_one = apart_reports[0].device_bytes
    bytes_of_own = storage_bytes([shard.view for name, shard in second.weights().items() if name not in common])
    together.close_instances(tuple(together.models)[1:])
    left = sum(model.engine.device_bytes() for model in together.models.values())
    again = first.infer(sequences, "logprobs", 1, 1.0)
    before = ref.infer(sequences, "logprobs", 1, 1.0)
    alike.append(again is before is None or bool((again == before).all()))
    digests = [a.digest == b.digest for a, b in zip(apart_reports, reports, strict=True)]
    apart.close_instances(tuple(apart.models))
    together.close_instances(tuple(together.models))
    own = set(of_second) - common
    return Found(common, own, all(alike), all(digests), device_bytes, bytes_of_one, bytes_of_own, left)
