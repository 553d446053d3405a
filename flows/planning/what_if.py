"""A question about a plan, made ready: the graph that the flow would run, its workload, and where it would run.

Models need no weights and datasets need not exist. The graph is traced from the flow function with the flow's own
parameters, so that a plan for it is a plan for the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from prefect_rlhf.blocks.dataset import Preferences, Prompts
from prefect_rlhf.blocks.model import Model
from prefect_rlhf.flows.forms.plan_options import PlanOptions
from prefect_rlhf.flows.hardware.cluster_spec import parse_cluster, site_of
from prefect_rlhf.flows.hardware.profiles import installed_version, measured_sources
from prefect_rlhf.flows.planning.what_if_arguments import ABSENT, read_arguments
from prefect_rlhf.flows.rlhf_flow import AlgorithmFlow
from prefect_rlhf.flows.training.inputs import RunInputs, check_vocabularies, open_source
from prefect_rlhf.flows.training.lengths import parse_lengths, reaching, together
from prefect_rlhf.flows.training.workload import run_workload
from prefect_rlhf.placement.cost.profile import Profile
from prefect_rlhf.placement.cost.workload import LengthDistribution, Workload
from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.lease import Lease
from prefect_rlhf.placement.model import ModelSpec
from prefect_rlhf.placement.planner.question import Question, Site
from prefect_rlhf.tasks.model_shape import model_shape
from prefect_rlhf.tasks.trace import Algorithm

MANY = 1 << 30  # items of a dataset that is not there


def read_question(flow: AlgorithmFlow, options: PlanOptions) -> Question:
    """Read what the options ask. Raises InvalidInput or GraphError, one line, for what cannot be planned."""
    arguments = read_arguments(flow, options)
    models = {
        role: value.to_spec(role, model_shape(role, value.path))
        for role, value in arguments.items()
        if isinstance(value, Model)
    }
    if not models:
        raise InvalidInput("models", (), "an algorithm with at least one Model parameter")
    check_vocabularies(models)
    site = read_site(options, models)
    inputs = _read_inputs(arguments, models)
    graph = _traced(flow.algorithm, arguments, inputs)
    workload = _workload(graph, options, inputs)
    _check_context(workload, models)
    return Question(graph, site, workload)


def read_site(options: PlanOptions, models: Mapping[str, ModelSpec]) -> Site:
    """Read the cluster that the options name; where they name none, the mesh that this run's work pool leases.

    A lease is counted by the profiles that were made of it; a named cluster by those that the options name.
    """
    if options.cluster:
        site = site_of(parse_cluster(options.cluster), options.network, options.device_memory_gib)
        return site.with_profiles(_read_profiles(options.profiles, models, site))
    leased = Lease.from_environment()
    if leased is None:
        raise InvalidInput("cluster", options.cluster, "nodes x devices : kind, such as 16x8:h100")
    return Site.of_lease(leased, measured_sources(models.values(), leased))


def _read_inputs(arguments: Mapping[str, Any], models: Mapping[str, ModelSpec]) -> RunInputs:
    """The datasets that exist, checked as for a run; of the others only the name is known."""
    tokenizer = next(iter(models.values())).path
    context = min(model.shape.max_position_embeddings for model in models.values())
    named = {name: value for name, value in arguments.items() if isinstance(value, Prompts | Preferences)}
    sources = {n: open_source(n, value, tokenizer) for n, value in named.items() if value.path != ABSENT}
    longest = dict.fromkeys(named, 0) | {name: source.check(context) for name, source in sources.items()}
    datasets = {n: v.to_spec(n, sources[n].num_items if n in sources else MANY) for n, v in named.items()}
    return RunInputs(models, sources, datasets, longest, tokenizer)


def _traced(algorithm: Algorithm, arguments: Mapping[str, Any], inputs: RunInputs) -> DataflowGraph:
    """The graph; a dataset that is not there and that evaluation alone reads is taken to be as large as a batch."""
    graph = algorithm.trace(arguments, inputs.models, inputs.datasets)
    trained = [call for call in graph if call.every is None]
    batch = max(call.num_rows // (call.samples_per_prompt * call.rows_per_item) for call in trained)
    held_out = inputs.datasets.keys() - inputs.sources.keys() - {call.rows_from for call in trained}
    resized = {name: replace(inputs.datasets[name], num_items=batch) for name in held_out}
    return algorithm.trace(arguments, inputs.models, {**inputs.datasets, **resized})


def _workload(graph: DataflowGraph, options: PlanOptions, inputs: RunInputs) -> Workload:
    """Of the lengths that the options give; else as in a run on the data that is there."""
    trained = next(call for call in graph if call.every is None)
    of_data = run_workload(graph, inputs) if trained.rows_from in inputs.sources else None
    if of_data and not (options.prompt_length or options.response_length):
        return of_data
    sampled = [call for call in graph if call.kind == "generate"]
    most = max((call.max_new_tokens for call in sampled), default=0)
    prompts = of_data.prompts if of_data and sampled else None
    if options.prompt_length:
        prompts = parse_lengths(options.prompt_length, "prompt_length")
    answers = parse_lengths(options.response_length, "response_length") if options.response_length else None
    if prompts is None:
        raise InvalidInput("prompt_length", options.prompt_length, "tokens of a prompt, such as 1024")
    if not sampled and answers is None:
        raise InvalidInput("response_length", options.response_length, "tokens of an answer, such as 1024")
    if answers is not None and sampled and answers.longest > most:
        raise InvalidInput("response_length", answers.longest, f"at most {most}, the max_new_tokens of the algorithm")
    if not sampled and answers is not None:
        return Workload(LengthDistribution.fixed(0), together(prompts, answers))
    return Workload(prompts, reaching(answers or LengthDistribution.fixed(most), most))


def _check_context(workload: Workload, models: Mapping[str, ModelSpec]) -> None:
    context, role = min((model.shape.max_position_embeddings, role) for role, model in models.items())
    if workload.longest > context:
        words = f"{workload.longest} tokens"
        raise InvalidInput("prompt_length + response_length", words, f"at most {context}, the context of {role}")


def _read_profiles(paths: list[str], models: Mapping[str, ModelSpec], site: Site) -> list[Profile]:
    """Profiles of files. Raises InvalidInput for one of another device, model or software version."""
    devices = sorted({node.device.name for node in site.sources.nodes})
    return [_checked(Profile.read(Path(path)), models, devices) for path in paths]


def _checked(profile: Profile, models: Mapping[str, ModelSpec], devices: list[str]) -> Profile:
    like = [model for model in models.values() if (model.shape, model.dtype) == (profile.shape, profile.dtype)]
    model = (like or list(models.values()))[0]
    device = profile.device if profile.device in devices else devices[0]
    versions = {name: installed_version(name) for name, _ in profile.versions}
    return profile.check(model.shape, model.dtype, device, versions)
