"""What a rank does in tests with an actor with an adapter and a reference, whose base vLLM and Megatron hold once."""

from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

import adapter_cases
import megatron_cases as cases
from megatron_cases import OPTIMIZER, Case, make_rows

from prefect_rlhf.engines.commands import BuildCommand, Digest, MoveWeightsCommand, Restore
from prefect_rlhf.engines.engine import SamplingSettings
from prefect_rlhf.engines.rank.rank import Rank
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.devices.mesh import ClusterShape
from prefect_rlhf.placement.graph import DataflowGraph, Dataset
from prefect_rlhf.placement.layout.layout import engine_layout, held_parts
from prefect_rlhf.placement.layout.sharing import in_build_order, shared_weights
from prefect_rlhf.placement.plan import ExecutionPlan, ModelInstance, trained_instance
from tests.support.strategies import GIB, ROLLOUT, call, on

WORK = Workload.fixed(64, 64)
STEPS = 2
SAMPLED = SamplingSettings(12, stop_at_eos=False)
PROMPTS = [[(7 * row + 3 * place) % 400 + 1 for place in range(6 + 8 * row)] for row in range(6)]


@dataclass
class Found:
    """Of a rank: the parameters of each role in Megatron that have vLLM's addresses, and what the engines made."""

    common: dict[str, set[str]]
    common_in_megatron: set[str]
    made: list[object]
    digests: list[dict[str, int]]
    device_bytes: int


def load_vllm(rank: int) -> None:
    """Import vLLM, which takes a rank as long as all else."""
    import_module("prefect_rlhf.engines.vllm.engine")


def planned(case: Case) -> tuple[DataflowGraph, ExecutionPlan]:
    """GRPO's calls with an adapted actor, all on the case's devices with its strategy."""
    reads = {"actor_generate": ROLLOUT, "ref_inference": ("logprobs",)}
    calls = (
        call("actor_generate", "generate", "actor", {"prompts": ("prompt_tokens",)}, ROLLOUT),
        call("ref_inference", "inference", "ref", {"actor_generate": ROLLOUT[:2]}, ("logprobs",)),
        call("actor_train_step", "train_step", "actor", reads),
    )
    adapted = replace(case, adapter=adapter_cases.ADAPTER, optimizer=OPTIMIZER).spec()
    models = (replace(adapted, content=case.folder), replace(case.spec(), role="ref", content=case.folder))
    graph = DataflowGraph("lent", models, (Dataset("prompts", ("prompt_tokens",), 8),), calls)
    cluster = ClusterShape("few", 1, len(case.ranks), 8 * GIB, backend="cpu")
    placed = {
        each.name: on(cluster.whole.name, "vllm" if each.kind == "generate" else "megatron", dp=case.dp, tp=case.tp)
        for each in graph
    }
    return graph, ExecutionPlan("plan", cluster, tuple(placed.items()))


def build(rank: int, case: Case, together: bool = True, stored: Path | None = None) -> dict[str, ModelInstance]:
    """A rank with the plan's instances, whose adapter is a checkpoint's if it is stored; and these by a short name."""
    graph, plan = planned(case)
    one, shared = Rank(rank, 4), shared_weights(graph, plan) if together else {}
    for instance in in_build_order(graph, plan):
        model, trains = graph.model(instance.role), instance == trained_instance(graph, plan, instance.role)
        held = held_parts(model, instance.engine)
        command = BuildCommand(
            model if trains else replace(model, optimizer=None),
            instance,
            case.ranks,
            engine_layout(model, instance.engine, instance.strategy, case.ranks),
            max_sequence_length=128,
            max_rows=8 // case.dp,
            weights=tuple(own for own in graph.weights(instance.role) if own.part in held),
            shared=shared.get(instance, {}),
            restore=Restore(stored, STEPS) if stored and trains else None,
        )
        one.build(command)
    return one, {f"{instance.role}.{instance.engine}": instance for instance in one.models}


def move(one: Rank, case: Case, placed: dict[str, ModelInstance], version: int) -> None:
    """Bring the adapter to vLLM."""
    graph, _ = planned(case)
    source, target = placed["actor.megatron"], placed["actor.vllm"]
    layouts = (
        engine_layout(graph.model("actor"), each.engine, each.strategy, case.ranks, ("adapter",))
        for each in (source, target)
    )
    one.reallocate(MoveWeightsCommand(source, target, version, *layouts))


def train(one: Rank, placed: dict[str, ModelInstance], version: int) -> dict[str, float]:
    """A train_step on rows, after which the adapter has this version."""
    model = one.models[placed["actor.megatron"]]
    metrics = cases.train_on(model.engine, *make_rows(24), cases.loss, cases.Walk("logprobs", 3))
    model.label(version)
    return metrics


def addresses(one: Rank, placed: dict[str, ModelInstance]) -> tuple[dict[str, set[str]], set[str]]:
    """The parameters of each role in Megatron at vLLM's addresses, and of the actor at the reference's."""
    places = {
        name: {each: shard.view.data_ptr() for each, shard in one.models[instance].engine.weights().items()}
        for name, instance in placed.items()
    }

    def common(name: str, other: str) -> set[str]:
        return {each for each, place in places[name].items() if places[other].get(each) == place}

    of_vllm = {name: common(name, "actor.vllm") for name in ("ref.megatron", "actor.megatron")}
    return of_vllm, common("actor.megatron", "ref.megatron")


def work(one: Rank, case: Case, placed: dict[str, ModelInstance], version: int) -> list[object]:
    """Of each step what generate, inference and training make; the optimizer is away after it."""
    vllm, ref = (one.models[placed[name]].engine for name in ("actor.vllm", "ref.megatron"))
    made: list[object] = []
    for number in range(version, version + STEPS):
        tokens = vllm.generate(PROMPTS, SAMPLED, range(6))
        inferred = ref.infer(make_rows(24)[0], "logprobs", 1, 1.0)
        trained = train(one, placed, number + 1)
        one.offload(placed["actor.megatron"], "optimizer")
        one.reload(placed["actor.megatron"], "optimizer")
        move(one, case, placed, number + 1)
        made += [tokens.tokens, tokens.logprobs, None if inferred is None else inferred.tolist(), trained]
    return made


def run(rank: int, case: Case, together: bool, folder: Path, stored: Path | None = None) -> Found:
    """Build, work some steps, and write a checkpoint after the last in a folder."""
    one, placed = build(rank, case, together, stored)
    first = STEPS if stored else 0
    if stored:
        move(one, case, placed, first)
    before = addresses(one, placed)
    made = work(one, case, placed, first)
    for model in one.models.values():
        model.require(model.version, "at the end")
    assert addresses(one, placed) == before
    digests = [model.digest() for model in one.models.values()]
    from processors import bytes_with_packed  # with vLLM, which a rank imports in its first task

    num_bytes = sum(
        bytes_with_packed(model.engine) if model.command.instance.engine == "vllm" else model.device_bytes()
        for model in one.models.values()
    )
    if stored is None:
        one.checkpoint(placed["actor.megatron"], STEPS)
        one.commit(folder, folder)
    one.close_instances(tuple(one.models))
    return Found(*before, made, [Digest.by_name(each) for each in digests], num_bytes)
