"""Refuses a plan that cannot run, before any device is taken: a line with field, value and a valid value."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from prefect_rlhf.errors.errors import InvalidInput, Missing, SeveralMistakes
from prefect_rlhf.placement.devices.axes import ORDER
from prefect_rlhf.placement.devices.mesh import Backend, DeviceMesh
from prefect_rlhf.placement.engine_traits import TRAITS, engines_of, has_not_slept, refused_heads, slot_rank
from prefect_rlhf.placement.graph import Call, DataflowGraph
from prefect_rlhf.placement.layout.experts import wrong_ep
from prefect_rlhf.placement.layout.layout import wrong_tp
from prefect_rlhf.placement.layout.sharing import one_base
from prefect_rlhf.placement.models.model import ModelSpec
from prefect_rlhf.placement.plan import EngineKind, ExecutionPlan, ModelInstance, Placement, instances
from prefect_rlhf.placement.words.table import WORDS, stated
from prefect_rlhf.placement.words.word import shown


def check_plan(plan: ExecutionPlan, graph: DataflowGraph, mesh: DeviceMesh) -> ExecutionPlan:
    """Return `plan`, or raise InvalidInput, which lists the mistakes of all calls.

    `mesh` is the leased mesh; every call must lie inside.
    """
    plan.cluster.check_mesh(mesh, "mesh")
    plan.cluster.with_speeds(plan.cluster.node_speeds, "cluster.node_speeds")
    plan.cluster.with_memory(plan.cluster.node_memory_bytes, "cluster.node_memory_bytes")
    mistakes = [*_wrong_names(plan, graph), *_wrong_calls(plan, graph, mesh)]
    if mistakes:
        raise SeveralMistakes.of(mistakes)
    _check_copies(plan, graph)
    for call, *_ in sleepless(plan, graph):
        right = "none: on cuda only a single vllm instance per device can be offloaded, and this device has two"
        if _has_not_slept(plan[call.name].engine, graph.model(call.role or ""), "cuda"):
            right = "no offload: no GPU has shown yet that an adapter comes back after an offload of vllm on cuda"
        raise InvalidInput(_field(call.name, "offload"), plan[call.name].offload, right)
    _check_bases(plan, graph)
    return plan


def violations(call: Call, placement: Placement, graph: DataflowGraph, backend: Backend) -> Iterator[InvalidInput]:
    """Yield everything wrong with this placement of `call`, wherever its mesh of `backend` lies; empty if it is
    legal.
    """
    yield from _degrees(call, placement)
    if min(placement.strategy.degrees.values()) < 1:
        return  # what follows divides by them
    yield from _engine(call, placement)
    if placement.engine not in TRAITS:
        return  # what follows asks for its traits
    yield from _plays(call, placement)
    if call.role is not None:
        yield from _shape(call, placement, graph.model(call.role))
        yield from _able(call, placement.engine, graph.model(call.role), backend)
    for word in stated(placement):
        yield from word.mistakes(call, placement, graph)
    yield from _rows(call)


def able_engines(
    call: Call, graph: DataflowGraph, backend: Backend, among: Sequence[EngineKind] = ()
) -> Sequence[EngineKind]:
    """Return the engines (of `among`, if given) that can run the call's model, the usual engine first.

    If no engine can, returns all of them, and `violations` says why.
    """
    among = among or engines_of(call.kind)
    if call.role is None:
        return among
    model = graph.model(call.role)
    return [engine for engine in among if not _refused(engine, model, backend)] or among


def sleepless(plan: ExecutionPlan, graph: DataflowGraph) -> Iterator[tuple[Call, ...]]:
    """Yield the calls of each vLLM instance that is offloaded on cuda although it must not be.

    vLLM's allocator, which maps and unmaps an instance's memory there, serves only one instance per process. See also
    `has_not_slept`.
    """
    asleep: list[ModelInstance] = []
    for instance, calls in instances(graph, plan).items() if plan.cluster.backend == "cuda" else ():
        if TRAITS[instance.engine].sleeps_on_cuda and plan[calls[0].name].offload != "none":
            adapted = _has_not_slept(instance.engine, graph.model(instance.role), "cuda")
            if adapted or any(other.mesh.overlaps(instance.mesh) for other in asleep):
                yield calls
            else:
                asleep.append(instance)


def _field(call: str, key: str) -> str:
    return f"plan.calls.{call}.{key}"


def _plays(call: Call, placement: Placement) -> Iterator[InvalidInput]:
    if call.play is not None and not TRAITS[placement.engine].plays:
        able = ", ".join(engine for engine in engines_of("generate") if TRAITS[engine].plays)
        yield InvalidInput(_field(call.name, "engine"), placement.engine, f"an engine that plays: {able}")


def _wrong_names(plan: ExecutionPlan, graph: DataflowGraph) -> Iterator[InvalidInput]:
    calls = [call.name for call in graph]
    placed = [name for name, _ in plan.placements]
    for name in dict.fromkeys(placed):
        if name not in calls:
            yield InvalidInput("plan.calls", name, f"a call of flow {graph.name}: {', '.join(calls)}")
        if placed.count(name) > 1:
            yield InvalidInput(f"plan.calls.{name}", f"{placed.count(name)} placements", "one placement")
    if missing := [name for name in calls if name not in placed]:
        yield Missing("plan.calls", f"a placement for every call of flow {graph.name}, also {', '.join(missing)}")


def _wrong_calls(plan: ExecutionPlan, graph: DataflowGraph, mesh: DeviceMesh) -> Iterator[InvalidInput]:
    """Yield the mistakes of each placed call: its mesh, or else everything wrong with running it so."""
    placements = dict(plan.placements)
    for call in (call for call in graph if call.name in placements):
        placement, field = placements[call.name], _field(call.name, "mesh")
        try:
            plan.cluster.check_mesh(placement.mesh, field)
        except InvalidInput as error:
            yield error
            continue
        if not mesh.contains(placement.mesh):
            yield InvalidInput(field, placement.mesh.name, f"devices of the leased mesh {mesh.name}")
        yield from violations(call, placement, graph, plan.cluster.backend)


def _degrees(call: Call, placement: Placement) -> Iterator[InvalidInput]:
    strategy, mesh = placement.strategy, placement.mesh
    for axis, degree in strategy.degrees.items():
        if degree < 1:
            yield InvalidInput(_field(call.name, axis), degree, "1 or more")
            return  # what follows divides by it
    own = (f"{axis} {degree}" for axis, degree in strategy.degrees.items() if axis in ORDER)
    product = f"{' * '.join(own)} = {strategy.num_devices}"
    if call.kind == "compute" and max(mesh.num_devices, strategy.num_devices) > 1:
        right = "a mesh of a single device and dp 1, since a computation sees all rows together"
        yield InvalidInput(f"plan.calls.{call.name}", f"{mesh.name} with {product}", right)
    elif strategy.num_devices != mesh.num_devices:
        right = f"{mesh.num_devices}, the devices of mesh {mesh.name}"
        yield InvalidInput(f"plan.calls.{call.name}", product, right)
    if call.kind == "compute" and strategy.ep > 1:
        yield InvalidInput(_field(call.name, "ep"), strategy.ep, "1: a computation has no experts")
    if placement.device_order and sorted(placement.device_order) != list(range(mesh.num_devices)):
        right = f"each of 0 to {mesh.num_devices - 1}, the devices of mesh {mesh.name}, once"
        yield InvalidInput(_field(call.name, "order"), list(placement.device_order), right)


def _engine(call: Call, placement: Placement) -> Iterator[InvalidInput]:
    engine = placement.engine
    if engine not in engines_of(call.kind):
        right = " or ".join(engines_of(call.kind))
        yield InvalidInput(_field(call.name, "engine"), engine, f"{right}, which runs {call.kind}")
    if engine not in TRAITS:
        return  # `violations` ends here too
    if not TRAITS[engine].pipelines and placement.strategy.pp > 1:
        yield InvalidInput(_field(call.name, "pp"), placement.strategy.pp, f"1: {engine} runs no pipeline here")


def _shape(call: Call, placement: Placement, model: ModelSpec) -> Iterator[InvalidInput]:
    shape, tp, pp = model.shape, placement.strategy.tp, placement.strategy.pp
    if right := wrong_tp(model, placement.engine, tp):
        yield InvalidInput(_field(call.name, "tp"), tp, f"{right} of {model.role}")
    if right := wrong_ep(model, placement.engine, placement.strategy):
        yield InvalidInput(_field(call.name, "ep"), placement.strategy.ep, right)
    if pp > shape.num_layers:
        yield InvalidInput(_field(call.name, "pp"), pp, f"at most {shape.num_layers}, the layers of {model.role}")
    if call.kind == "generate" and "lm" not in model.head:
        yield InvalidInput(f"models.{model.role}.head", model.head, f"lm, since {call.name} generates with it")


def _able(call: Call, engine: EngineKind, model: ModelSpec, backend: Backend) -> Iterator[InvalidInput]:
    """Check that the engine computes heads of the model's width, any adapter, and any base in four bits."""
    if reason := _refused(engine, model, backend):
        able = [other for other in engines_of(call.kind) if not _refused(other, model, backend)]
        right = f"{' or '.join(able) or 'another model'} for {model.role} ({model.path}): {reason}"
        yield InvalidInput(_field(call.name, "engine"), engine, right)


def _refused(engine: EngineKind, model: ModelSpec, backend: Backend) -> str:
    """Return why an engine cannot compute a model; empty: it can."""
    if model.adapter is not None and not TRAITS[engine].adapts:
        return f"it has an adapter, which {engine} does not compute here"
    if model.adapter is not None and slot_rank(engine, model.adapter.rank) is None:
        most = TRAITS[engine].adapter_ranks[-1]
        return f"its adapter has rank {model.adapter.rank}, and {engine} has room for {most}"
    if model.base_dtype is not None and not TRAITS[engine].dequantizes:
        return f"its base is in four bits (base_dtype {model.base_dtype}), from which {engine} does not compute here"
    return refused_heads(engine, model.shape.head_dim, model.dtype, backend)


def _has_not_slept(engine: EngineKind, model: ModelSpec, backend: Backend) -> bool:
    return has_not_slept(engine, model.adapter is not None, backend)


def _rows(call: Call) -> Iterator[InvalidInput]:
    """Check that items are whole, and that each mini-batch has an item; they need not be equally many."""
    if call.kind == "compute":
        return
    for each in call.by_row_set:
        seen = f"{each.num_rows} rows a step" + (f" of {each.rows.name}" if len(call.by_row_set) > 1 else "")
        item, cuts = each.rows_per_item, each.mini_batches
        if each.num_rows % item:
            yield InvalidInput(_field(call.name, "rows"), seen, f"a multiple of {item}, the rows of an item")
        elif each.num_items < cuts:
            right = f"at least {cuts * item}, an item for each of {cuts} mini-batches"
            yield InvalidInput(_field(call.name, "rows"), seen, right)


def _check_copies(plan: ExecutionPlan, graph: DataflowGraph) -> None:
    """Check that calls with a common copy of weights agree on words of a copy; copies differ in more than order."""
    users = instances(graph, plan)
    first: dict[ModelInstance, tuple[Call, ModelInstance]] = {}
    for instance, calls in users.items():
        call, twin = first.setdefault(replace(instance, device_order=()), (calls[0], instance))
        if twin.device_order != instance.device_order:
            right = f"{list(twin.device_order)} as for {call.name}: both use {instance.name}"
            raise InvalidInput(_field(calls[0].name, "order"), list(instance.device_order), right)
    for instance, calls in users.items():
        offload = plan[calls[0].name].offload
        for call in calls:
            for word in (word for word in WORDS.values() if word.of_copy):
                seen, common = word.of(plan[call.name]), word.of(plan[calls[0].name])
                if seen != common:
                    right = f"{shown(common)} as for {calls[0].name}: both use the copy {instance.name}"
                    raise InvalidInput(_field(call.name, word.name), seen, right)
        if offload == "optimizer" and all(call.kind != "train_step" for call in calls):
            right = f"none or all: no call trains {instance.name}, so it has no optimizer"
            raise InvalidInput(_field(calls[0].name, "offload"), offload, right)


def _check_bases(plan: ExecutionPlan, graph: DataflowGraph) -> None:
    """Check that frozen weights that several models use leave their devices for all of them, or stay for all."""
    users = instances(graph, plan)
    for alike in one_base(graph, plan):
        away = [instance for instance in alike if plan[users[instance][0].name].offload == "all"]
        if away and len(away) < len(alike):
            first = alike[0]
            names = [model.role for model in graph.models if any(each.role == model.role for each in alike)]
            if any(each.engine != first.engine for each in alike):  # the first lends it to another engine
                names = [f"{each.role} ({each.engine})" for each in alike]
            right = f"none, or all for each of {', '.join(names)}: they share a base"
            if _has_not_slept(first.engine, graph.model(first.role), plan.cluster.backend):
                right = f"no offload: its base is in the memory of {names[0]}, which cannot leave"
            raise InvalidInput(_field(users[away[0]][0].name, "offload"), "all", f"{right}, on {first.mesh.name}")
