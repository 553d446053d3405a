"""Prepare a planning question: the graph that the flow would run, its workload, and its cluster.

Models need no weights and datasets need not exist. The graph is traced from the flow function with the flow's own
parameters, so a plan for it is a plan for the run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from prefect_rlhf.blocks.lease import given_lease
from prefect_rlhf.blocks.model import Model
from prefect_rlhf.errors.errors import InvalidInput, NotUsed
from prefect_rlhf.files.installed import installed_version
from prefect_rlhf.flows.algorithm.rlhf_flow import AlgorithmFlow
from prefect_rlhf.flows.forms.plan_options import PlanOptions
from prefect_rlhf.flows.hardware.cluster_spec import Groups, parse_clusters, site_of
from prefect_rlhf.flows.hardware.described_device import read_device
from prefect_rlhf.flows.hardware.profiles import measured_sources
from prefect_rlhf.flows.hardware.runtimes import OURS, runtime, with_runtime
from prefect_rlhf.flows.planning.assumptions import tail
from prefect_rlhf.flows.planning.what_if_arguments import read_arguments
from prefect_rlhf.flows.training.inputs import MANY, RunInputs, read_inputs, with_adapter
from prefect_rlhf.flows.training.lengths import PlayedTurns, names_rollouts, parse_lengths, rollout_turns, together
from prefect_rlhf.flows.training.tokenizers import check_vocabulary_sizes
from prefect_rlhf.flows.training.workload import run_workload
from prefect_rlhf.placement.cost.made_rows import with_made_rows
from prefect_rlhf.placement.cost.times.profile import Profile
from prefect_rlhf.placement.cost.workload import LengthDistribution, Workload
from prefect_rlhf.placement.graph import DataflowGraph, PlayBounds
from prefect_rlhf.placement.memory.room import with_room
from prefect_rlhf.placement.models.engine_constants import EXPERT_IMBALANCE
from prefect_rlhf.placement.models.model import ModelSpec
from prefect_rlhf.placement.planner.question import Question, Site
from prefect_rlhf.tasks.model_shape import model_content, model_shape


def read_question(flow: AlgorithmFlow, options: PlanOptions) -> Question:
    """Read the question of the options.

    Raises InvalidInput or GraphError with a single-line message if no plan is possible.
    """
    prompts = parse_lengths(options.prompt_length, "prompt_length", "prompt") if options.prompt_length else None
    stated = options.response_length
    responses = parse_lengths(stated, "response_length", "response") if stated else None
    limit = responses.longest if responses and options.response_length.strip().isdecimal() else None
    arguments = read_arguments(flow, options, responses)
    inputs = read_inputs(arguments, read_model_shape, may_be_absent=True).checked()
    inputs = replace(inputs, models=with_named_bases(inputs.models))
    site = read_site(options, inputs.models)
    graph = resize_evaluation(flow.algorithm.trace(arguments, inputs.models, inputs.datasets), inputs)
    if options.response_length and names_rollouts(options.response_length):
        graph = expect_turns(graph, rollout_turns(options.response_length, "response_length"))
    check_vocabulary_sizes(graph)
    if limit is not None and any(call.kind == "generate" for call in graph):
        responses = tail(limit)
    workload = read_workload(graph, inputs, prompts, responses)
    context, role = min((model.shape.max_position_embeddings, role) for role, model in inputs.models.items())
    if workload.longest > context:
        seen, expected = f"{workload.longest} tokens", f"at most {context}, the context of {role}"
        raise InvalidInput("prompt_length + response_length", seen, expected)
    imbalance = read_imbalance(options, graph)
    return Question(graph, site, replace(workload, has_checkpoints=True, expert_imbalance=imbalance))


def read_imbalance(options: PlanOptions, graph: DataflowGraph) -> float:
    """Return the expert imbalance of the options, or the assumed value. Raises NotUsed if no model has experts."""
    if options.expert_imbalance is None:
        return EXPERT_IMBALANCE
    if not any(model.shape.experts for model in graph.models):
        raise NotUsed("expert_imbalance", options.expert_imbalance, "no model is a mixture of experts")
    return options.expert_imbalance


def read_model_shape(role: str, model: Model) -> ModelSpec:
    """Read a model's shape, and its adapter's folder; it needs no weights."""
    plain = model.to_spec(role, model_shape(role, model.path))
    return with_adapter(replace(plain, content=model_content(role, model.path)), model)


def with_named_bases(models: Mapping[str, ModelSpec]) -> dict[str, ModelSpec]:
    """Fill in the content of bases: if an adapter's base is known only by name, the name stands for its weights.

    A language model of that name without an adapter is the base itself. A scalar model without an adapter was trained
    from it, so it has other weights. Without any adapter, a name is just a size.
    """
    bases = {model.path for model in models.values() if model.adapter is not None and not model.content}
    return {
        role: replace(model, content=model.path)
        if not model.content and model.path in bases and (model.adapter is not None or model.head == "lm")
        else model
        for role, model in models.items()
    }


def read_site(options: PlanOptions, models: Mapping[str, ModelSpec]) -> Site:
    """Read the cluster that the options name, or else the mesh that this run's work pool leases.

    A lease uses the profiles measured on it; a named cluster uses the profiles that the options name.
    """
    if options.call_seconds is not None and (options.profiles or not options.cluster):
        raise InvalidInput(
            "call_seconds", options.call_seconds, "a named cluster without profiles, because profiles measure it"
        )
    if options.runtime != OURS.name and (options.profiles or not options.cluster):
        right = f"{OURS.name}, or a named cluster of GPUs without profiles, because profiles measure ours"
        raise InvalidInput("runtime", options.runtime, right)
    if options.cluster:
        clusters = parse_clusters(options.cluster, options.sweep, read_device(options.device))
        kinds = sorted({group.device for groups in clusters for group in groups})
        profiles = [read_profile(Path(path), models, kinds) for path in options.profiles]
        return named_site(options, clusters[0]).with_profiles(profiles)
    leased = given_lease()
    if leased is None:
        raise InvalidInput("cluster", options.cluster, "nodes x devices : kind, such as 16x8:h100")
    leased = replace(leased, cluster=with_room(leased.cluster, options.headroom, leased.kind))
    return Site.of_lease(leased, measured_sources(models.values(), leased))


def named_site(options: PlanOptions, groups: Groups) -> Site:
    """Return a named cluster as a site, with the memory and network of the options and without profiles."""
    memory, call_seconds = options.device_memory_gib, options.call_seconds
    site = site_of(groups, options.network, memory, call_seconds, options.host_memory_gib, options.headroom)
    return site if options.runtime == OURS.name else with_runtime(site, runtime(options.runtime), call_seconds)


def read_profile(file: Path, models: Mapping[str, ModelSpec], devices: Sequence[str]) -> Profile:
    """Read a profile. Raises InvalidInput if it is for another device, model or software version."""
    profile = Profile.read(file)
    alike = (model for model in models.values() if (model.shape, model.dtype) == (profile.shape, profile.dtype))
    model = next(alike, next(iter(models.values())))
    device = profile.device if profile.device in devices else devices[0]
    versions = {name: installed_version(name) or "none" for name, _ in profile.versions}
    return profile.check(model.shape, model.dtype, device, versions)


def resize_evaluation(graph: DataflowGraph, inputs: RunInputs) -> DataflowGraph:
    """Return the graph with evaluations of absent datasets resized to a step's number of items."""
    trained = [call for call in graph if call.every is None]
    num_items = max(call.span // call.rows.rows_per_item for call in trained)
    evaluated = inputs.datasets.keys() - inputs.sources.keys() - {call.rows.dataset for call in trained}
    datasets = (replace(data, num_items=num_items) if data.name in evaluated else data for data in graph.datasets)
    calls = (
        replace(call, num_rows=call.num_rows // MANY * num_items)
        if call.rows.dataset in evaluated and call.num_rows >= MANY
        else call
        for call in graph
    )
    return replace(graph, datasets=tuple(datasets), calls=tuple(calls))


def expect_turns(graph: DataflowGraph, played: PlayedTurns | None) -> DataflowGraph:
    """Return the graph with the turns, answers and delays of `played` expected of its plays."""
    if played is None:
        return graph
    return replace(
        graph, calls=tuple(replace(call, play=call.play and _as_before(call.play, played)) for call in graph)
    )


def _as_before(play: PlayBounds, played: PlayedTurns) -> PlayBounds:
    seconds = play.seconds if played.seconds is None else played.seconds
    turns, observed = min(played.turns, play.max_turns), min(played.observed, play.max_tokens)
    return replace(play, turns=turns, observed=observed, seconds=seconds)


def read_workload(
    graph: DataflowGraph, inputs: RunInputs, prompts: LengthDistribution | None, responses: LengthDistribution | None
) -> Workload:
    """Return the workload with the given lengths; missing lengths come from the data, if it exists.

    Unknown response lengths have a long tail, up to the sampling limit. If no call generates, any token may be scored,
    so all tokens count as responses.
    """
    trained = next(call for call in graph if call.every is None)
    of_run = run_workload(graph, inputs) if trained.rows.dataset in inputs.sources else None
    if of_run and prompts is None and responses is None:
        return of_run
    sampled = [call.max_new_tokens for call in graph if call.kind == "generate"]
    if prompts is None and of_run and sampled:
        prompts = of_run.prompts
    if prompts is None:
        raise InvalidInput("prompt_length", "", "tokens of a prompt, such as 1024")
    if not sampled:
        if responses is None:
            raise InvalidInput("response_length", "", "tokens of an answer, such as 1024")
        workload = Workload(LengthDistribution.fixed(0), together(prompts, responses))
        return with_made_rows(workload, graph, dict.fromkeys(inputs.longest, workload.longest))
    most = max(sampled)
    if responses is None:
        responses = tail(most)
    if responses.longest > most:
        raise InvalidInput("response_length", responses.longest, f"at most {most}, the algorithm's max_new_tokens")
    workload = Workload(prompts, responses.reaching(most))
    return with_made_rows(workload, graph, dict.fromkeys(inputs.longest, prompts.longest))
