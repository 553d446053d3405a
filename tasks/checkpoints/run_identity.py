"""The identity of a run, as plain values: runs with equal identities differ only in how and where they run."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from hashlib import blake2b
from typing import Any

from pydantic import ValidationError

from prefect_rlhf.placement.graph import Call, DataflowGraph, Operation
from prefect_rlhf.tasks.play import Play
from prefect_rlhf.tasks.tracing.operations import Bound

ORIGIN = ("path", "new_head", "content")
"""A model's fields that only say where its version 0 comes from."""

_OF_EXECUTION = (
    *("python", "workers", "at_once", "start_seconds"),
    *("expected_turns", "expected_answer_tokens", "seconds_per_answer", "seconds_per_row"),
    *("deadline_seconds", "play_seconds", "retries", "most_failed"),
)
"""Settings of plays and rewards that affect only where they run, their processes, the planner, and which rows fail. A
run that ended because too many rows failed may resume with other limits, because these change no token and no score of
a row that does not fail."""

_OF_TRIAL = ("try_first",)
"""A reward function's settings that affect only its trial before a run."""

_EXPECTED: Mapping[str, None] = {"row_limit": None, "host_seconds": None}
"""A call's fields that only the planner reads: they follow from stated lengths, and from settings of execution."""

_HASH = re.compile(r"hash [0-9a-f]{16}")


def run_identity(graph: DataflowGraph, seed: int, checkpoint_every: int | None) -> dict[str, Any]:
    """Return the algorithm with all its settings, the models' shapes and optimizers, the datasets' sizes, and the seed.

    Excluded are where models are stored, the plan, and where and in how many processes plays run. With staleness the
    checkpoint interval is included, because a checkpoint then decides which weights are read after it (`Span.drained`).
    Stated lengths of computed rows are excluded, so a run that failed on a long row may resume with a larger length.
    """
    models = {model.role: asdict(model) for model in graph.models}
    for role, model in models.items():
        for name in ORIGIN:
            del model[name]
        model["weights"] = [own.name for own in graph.weights(role)]
    content = {
        "algorithm": graph.name,
        "seed": seed,
        "staleness": graph.staleness,
        "checkpoint_every": checkpoint_every if graph.staleness else None,
        "models": models,
        "datasets": {dataset.name: asdict(dataset) for dataset in graph.datasets},
        "calls": {call.name: _call(call) for call in graph},
    }
    plain: dict[str, Any] = json.loads(json.dumps(content))
    return plain


def with_defaults(identity: Mapping[str, Any], graph: DataflowGraph) -> dict[str, Any]:
    """Return a saved identity, with defaults for fields that did not exist when it was saved.

    Defaults come from the object at the same place in `graph`, so a new field makes no difference unless this run uses
    it.
    """
    groups: Mapping[str, Mapping[str, object]] = {
        "models": {model.role: model for model in graph.models},
        "datasets": {dataset.name: dataset for dataset in graph.datasets},
        "calls": {call.name: call for call in graph},
    }
    filled = {
        group: {name: _filled(saved, now.get(name)) for name, saved in identity.get(group, {}).items()}
        for group, now in groups.items()
    }
    for name, call in filled["calls"].items():
        if isinstance(call, dict):
            play = call.get("play") and _filled_play(call["play"]["settings"])
            filled["calls"][name] = {**call, **_EXPECTED, "play": play}
    plain: dict[str, Any] = json.loads(json.dumps({**identity, **filled}, default=asdict))
    return plain


def first_difference(left: Any, right: Any) -> tuple[str, Any, Any] | None:
    """Return the path of the first difference between two plain values, with both values there; None if they are
    equal.

    >>> first_difference({"lr": 1, "model": {"layers": 2}}, {"lr": 1, "model": {"layers": 3}})
    ('model.layers', 2, 3)
    """
    return next(all_differences(left, right), None)


def all_differences(left: Any, right: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the path of each difference between two plain values, with both values there.

    >>> list(all_differences({"lr": 1, "model": {"layers": 2}}, {"lr": 2, "model": {"layers": 3}}))
    [('lr', 1, 2), ('model.layers', 2, 3)]
    """
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        for key in dict.fromkeys((*left, *right)):
            yield from all_differences(left.get(key), right.get(key), f"{path}.{key}" if path else str(key))
    elif left != right:
        yield path, left, right


def _filled(saved: Any, now: object) -> Any:
    if isinstance(now, Operation):
        return saved | {"settings": _filled_settings(saved["settings"], now)}
    if isinstance(now, tuple) and isinstance(saved, Mapping):  # terms, by name
        by_name = {term.name: term for term in now}
        return {name: _filled(value, by_name.get(name)) for name, value in saved.items()}
    if isinstance(now, tuple) and isinstance(saved, list) and len(now) == len(saved):
        return [_filled(one, other) for one, other in zip(saved, now, strict=True)]
    if not is_dataclass(now) or not isinstance(saved, Mapping):
        return saved
    default = {field.name: field.default for field in fields(now) if field.default is not MISSING}
    known = {name: _filled(value, getattr(now, name, None)) for name, value in saved.items()}
    return {name: value for name, value in default.items() if name not in ORIGIN} | known


def _filled_settings(saved: Any, now: Operation) -> Any:
    """Return settings with the defaults of their class; unchanged if the class no longer accepts them."""
    if not now.settings_type:
        return saved
    try:
        return _without_execution(
            type(Bound(now).settings).model_validate_json(json.dumps(saved)).model_dump(mode="json")
        )
    except ValidationError:
        return saved


def _filled_play(saved: Any) -> dict[str, Any]:
    """Return a play with the defaults of settings that came later."""
    default = {name: field.default for name, field in Play.model_fields.items() if not field.is_required()}
    return _play(default | saved)


def _call(call: Call) -> dict[str, Any]:
    terms = {term.name: asdict(term) | _operation(term.operation) for term in call.terms}
    play = call.play and _play(json.loads(call.play.settings))
    return {**asdict(call), **_operation(call.operation), **_EXPECTED, "terms": terms, "play": play}


def _operation(operation: Operation) -> dict[str, Any]:
    return {"operation": {"name": operation.name, "settings": _without_execution(json.loads(operation.settings))}}


def _without_execution(settings: Any) -> Any:
    """Return settings of rewards without those that affect only their execution; other settings unchanged."""
    functions = settings.get("functions") if isinstance(settings, dict) else None
    if not isinstance(functions, dict) or not all(isinstance(each, dict) for each in functions.values()):
        return settings
    kept = {
        name: {key: value for key, value in each.items() if key not in _OF_TRIAL} for name, each in functions.items()
    }
    return {key: value for key, value in settings.items() if key not in _OF_EXECUTION} | {"functions": kept}


def _play(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return a play by its settings, of which its bounds follow."""
    settings = {name: value for name, value in stated.items() if name not in _OF_EXECUTION}
    return {"settings": _without_secrets(settings)}


def _hashed(value: object) -> str:
    """Return a hash of a value; a hash is returned unchanged."""
    if isinstance(value, str) and _HASH.fullmatch(value):
        return value
    digest = blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=8).hexdigest()
    return f"hash {digest}"


def _without_secrets(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a play's settings with hashes of the values that may be secrets, and without folders of MCP servers.

    Settings in this form are returned unchanged.
    """
    arguments = settings.get("arguments")
    if not isinstance(arguments, dict):
        return dict(settings)
    servers = arguments.get("servers")
    if settings.get("signature") == "mcp" and isinstance(servers, dict):
        hashed = arguments | {"servers": {name: _server(server) for name, server in servers.items()}}
    else:
        hashed = {name: _hashed(value) for name, value in arguments.items()}
    return {**settings, "arguments": hashed}


def _server(server: Any) -> Any:
    """Return an MCP server without its folder, with hashes of its variables, its arguments and its address."""
    if not isinstance(server, dict):
        return server
    here = {name: value for name, value in server.items() if name != "cwd"}
    variables = here.pop("env", None)
    hashed = {name: value if name == "command" else _hashed(value) for name, value in here.items()}
    if isinstance(variables, dict):
        return hashed | {"env": {name: _hashed(value) for name, value in variables.items()}}
    return hashed if variables is None else hashed | {"env": _hashed(variables)}
