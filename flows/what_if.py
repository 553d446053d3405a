"""A question about a plan, made ready: the graph that the flow would run, its workload, and where it would run.

Models need no weights and datasets need not exist. The graph is traced from the flow function with the flow's own
parameters, so that a plan for it is a plan for the run.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from prefect_rlhf.blocks.dataset import Preferences, Prompts
from prefect_rlhf.blocks.model import Model
from prefect_rlhf.flows.cluster_spec import Site, parse_cluster, site
from prefect_rlhf.flows.inputs import check_vocabularies, open_source
from prefect_rlhf.flows.lengths import distribution, parse_lengths, reaching
from prefect_rlhf.flows.options import RunOptions
from prefect_rlhf.flows.plan_options import PlanOptions
from prefect_rlhf.flows.rlhf_flow import AlgorithmFlow
from prefect_rlhf.placement.cost.profile import Profile
from prefect_rlhf.placement.cost.workload import Lengths, Workload
from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.placement.graph import DataflowGraph, Dataset
from prefect_rlhf.placement.lease import Lease
from prefect_rlhf.placement.model import ModelSpec
from prefect_rlhf.placement.planner import Planner
from prefect_rlhf.tasks.algorithm import Algorithm
from prefect_rlhf.tasks.datasets import PromptDataset
from prefect_rlhf.tasks.model_shape import model_shape
from prefect_rlhf.tasks.settings import Sampling

LIKE = {"ref": "actor", "reward": "critic"}
"""Roles that have the model of another where nobody says."""
SCALAR_ROLES = ("critic", "reward")  # their head, where nobody says
MANY = 1 << 30  # items of a dataset that is not there


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A graph with all that its plans are counted by."""

    graph: DataflowGraph
    workload: Workload
    site: Site

    @property
    def planner(self) -> Planner:
        """What its plans are made and counted by."""
        where = self.site
        return Planner(self.graph, where.cluster, where.mesh, self.workload, where.sources, where.kind)


def what_if(flow: AlgorithmFlow, options: PlanOptions) -> WhatIf:
    """Read the options. Raises InvalidInput or GraphError, one line, for what cannot be planned."""
    where = read_site(options)
    arguments = read_arguments(flow, options)
    given = {role: value for role, value in arguments.items() if isinstance(value, Model)}
    models = {role: value.to_spec(role, model_shape(role, value.path)) for role, value in given.items()}
    if not models:
        raise InvalidInput("models", (), "an algorithm with at least one Model parameter")
    check_vocabularies(models)
    known, prompts, pairs = _read_datasets(arguments, models)
    graph = _traced(flow.algorithm, arguments, models, known)
    workload = _workload(graph, options, prompts, pairs)
    _check_context(workload, models)
    return WhatIf(graph, workload, where.with_profiles(_read_profiles(options.profiles, models, where)))


def read_site(options: PlanOptions) -> Site:
    """The cluster that the options name; where they name none, the mesh that this run's work pool leases."""
    if options.cluster:
        return site(parse_cluster(options.cluster), options.network, options.device_memory_gib)
    given = Lease.from_environment()
    if given is None:
        raise InvalidInput("cluster", options.cluster, "nodes x devices : kind, such as 16x8:h100")
    return Site.of_lease(given)


def read_arguments(flow: AlgorithmFlow, options: PlanOptions) -> dict[str, Any]:
    """The body's arguments, typed. Models and datasets that nobody named are filled in."""
    hints = typing.get_type_hints(flow.algorithm.body)
    names = inspect.signature(flow.algorithm.body).parameters
    for role in options.models:
        if hints.get(role) is not Model:
            roles = ", ".join(name for name in names if hints[name] is Model)
            raise InvalidInput("models", role, f"a role of {flow.algorithm.name}: {roles}")
    given = {name: value for name, value in options.parameters.items() if name not in RunOptions.model_fields}
    for name, parameter in names.items():
        if hints[name] is Model:
            given[name] = _model(name, given.get(name), options.models, names)
        elif hints[name] in (Prompts, Preferences):
            given.setdefault(name, {"path": name})
        elif name not in given and parameter.default is inspect.Parameter.empty:
            raise InvalidInput(name, None, "a value, which the algorithm needs")
    _shorten(given, options, hints.get("algo"))
    checked = flow.validate_parameters(given)
    return {name: checked[name] for name in names if name in checked}


def _model(role: str, given: Any, models: Mapping[str, str], roles: Mapping[str, Any]) -> dict[str, Any]:
    """What a Model parameter is made of, its path from `models` first."""
    fields = dict(given) if isinstance(given, dict) else {} if given is None else given.model_dump()
    like = LIKE.get(role, "")
    named = models.get(role) or fields.get("path") or fields.get("saved") or (models.get(like) if like in roles else "")
    if not named:
        also = f", or one for {like}" if like in roles else ""
        raise InvalidInput(f"models.{role}", None, f"a known shape, such as llama-70b, or a Hugging Face folder{also}")
    if not fields.get("saved"):
        fields["path"] = named
    return {"head": "scalar" if role in SCALAR_ROLES else "lm"} | fields


def _shorten(given: dict[str, Any], options: PlanOptions, settings: Any) -> None:
    """Put `batch_size` and the longest response where the algorithm's settings have them."""
    fields = getattr(settings, "model_fields", {})
    algo = dict(given.get("algo") or {})
    if options.batch_size is not None:
        if "batch_size" not in fields:
            raise InvalidInput("batch_size", options.batch_size, "nothing: the algorithm has no algo.batch_size")
        algo["batch_size"] = options.batch_size
    if options.response_length and "sampling" in fields:
        longest = parse_lengths(options.response_length, "response_length").longest
        algo["sampling"] = {"max_new_tokens": longest} | dict(algo.get("sampling") or {})
    if algo:
        given["algo"] = algo


def _read_datasets(
    arguments: Mapping[str, Any], models: Mapping[str, ModelSpec]
) -> tuple[dict[str, Dataset], Lengths | None, Lengths | None]:
    """The datasets that exist, and the lengths in the first that is trained on: of prompts, and of pairs' answers."""
    known: dict[str, Dataset] = {}
    prompts: Lengths | None = None
    answers: Lengths | None = None
    tokenizer = next(iter(models.values())).path
    for name, value in arguments.items():
        if not isinstance(value, Prompts | Preferences) or value.path == name:
            continue
        source = open_source(name, value, tokenizer)
        source.check(min(model.shape.max_position_embeddings for model in models.values()))
        known[name] = value.to_spec(name, source.num_items)
        if prompts is not None:
            continue
        rows: Mapping[str, Any] = source.read(range(len(source)))
        if isinstance(source, PromptDataset):
            prompts = distribution([len(row) for row in rows["prompt_tokens"]])
        else:
            starts = rows["prompt_length"]
            prompts = distribution(starts)
            answers = distribution([len(row) - n for row, n in zip(rows["tokens"], starts, strict=True)])
    return known, prompts, answers


def _traced(
    algorithm: Algorithm, arguments: Mapping[str, Any], models: Mapping[str, ModelSpec], known: Mapping[str, Dataset]
) -> DataflowGraph:
    """The graph; a dataset that is not there and that evaluation alone reads is taken to be as large as a batch."""
    absent = {name: value for name, value in arguments.items() if isinstance(value, Prompts | Preferences)}
    datasets = {name: known.get(name) or value.to_spec(name, MANY) for name, value in absent.items()}
    graph = algorithm.trace(arguments, models, datasets)
    trained = [call for call in graph if call.every is None]
    batch = max(call.num_rows // (call.samples_per_prompt * call.rows_per_item) for call in trained)
    for name in datasets.keys() - known.keys() - {call.rows_from for call in trained}:
        datasets[name] = absent[name].to_spec(name, batch)
    return algorithm.trace(arguments, models, datasets)


def _workload(graph: DataflowGraph, options: PlanOptions, prompts: Lengths | None, answers: Lengths | None) -> Workload:
    """Of the lengths that the options give, else of those that the data has, else of the longest that may be made."""
    if options.prompt_length:
        prompts = parse_lengths(options.prompt_length, "prompt_length")
    if prompts is None:
        raise InvalidInput("prompt_length", options.prompt_length, "tokens of a prompt, such as 1024")
    most = _most_new_tokens(graph)
    if options.response_length:
        answers = parse_lengths(options.response_length, "response_length")
    elif most:
        answers = Lengths.fixed(most)
    if answers is None:
        raise InvalidInput("response_length", options.response_length, "tokens of an answer, such as 1024")
    if most and answers.longest > most:
        raise InvalidInput("response_length", answers.longest, f"at most {most}, the max_new_tokens of the algorithm")
    return Workload(prompts, reaching(answers, most))


def _most_new_tokens(graph: DataflowGraph) -> int:
    """The longest response that any generate may make; 0 where nothing generates."""
    sampled = [Sampling.model_validate_json(call.operation.settings) for call in graph if call.kind == "generate"]
    return max((sampling.max_new_tokens for sampling in sampled), default=0)


def _check_context(workload: Workload, models: Mapping[str, ModelSpec]) -> None:
    role, context = min(
        ((role, model.shape.max_position_embeddings) for role, model in models.items()), key=lambda pair: pair[1]
    )
    if workload.longest > context:
        words = f"{workload.longest} tokens"
        raise InvalidInput("prompt_length + response_length", words, f"at most {context}, the context of {role}")


def _read_profiles(paths: list[str], models: Mapping[str, ModelSpec], where: Site) -> list[Profile]:
    """Profiles of files. Raises InvalidInput for one of another device, model or software version."""
    devices = sorted({node.device.name for node in where.sources.nodes})
    return [_checked(Profile.read(Path(path)), models, devices) for path in paths]


def _checked(profile: Profile, models: Mapping[str, ModelSpec], devices: list[str]) -> Profile:
    like = [model for model in models.values() if (model.shape, model.dtype) == (profile.shape, profile.dtype)]
    model = (like or list(models.values()))[0]
    device = profile.device if profile.device in devices else devices[0]
    return profile.check(model.shape, model.dtype, device, {name: _version(name) for name, _ in profile.versions})


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
