"""The arguments of a flow function whose models have no weights yet and whose datasets need not exist."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Mapping
from typing import Any

from prefect_rlhf.blocks.dataset import Preferences, Prompts
from prefect_rlhf.blocks.model import Model
from prefect_rlhf.flows.forms.options import RunOptions
from prefect_rlhf.flows.forms.plan_options import PlanOptions
from prefect_rlhf.flows.rlhf_flow import AlgorithmFlow
from prefect_rlhf.flows.training.lengths import parse_lengths
from prefect_rlhf.placement.errors import InvalidInput

LIKE = {"ref": "actor", "reward": "critic"}
"""Roles that have the model of another where nobody says."""
SCALAR_ROLES = ("critic", "reward")  # their head, where nobody says
ABSENT = "(not there)"  # the path of a dataset that nobody named


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
            given.setdefault(name, {"path": ABSENT})
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
