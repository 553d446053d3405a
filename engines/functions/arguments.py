"""The arguments with which each signature calls a function on rows, and the columns that a function names."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prefect_rlhf.engines.functions.function import Signature

Row = Mapping[str, Any]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_TRL_GIVES = ("prompts", "completions", "completion_ids", "log_extra", "log_metric")
_TRL_HIDES = ("prompt", "response", "completion", "completion_ids")
_OF_TRAINER = ("trainer_state", "environments")  # objects of TRL's trainer, which does not exist here
_ANSWER = re.compile(r"<answer>\s?(.*?)\s?</answer>", re.DOTALL)
_FORMS: Mapping[Signature, Arguments] = {
    "row": ((None,), {}),
    "verl": ((), dict.fromkeys(("data_source", "solution_str", "ground_truth", "extra_info"))),
    "reasoning_gym": ((None, None), {}),
}
_SHOWS: Mapping[str, Signature] = {
    "completions": "trl",
    "completion_ids": "trl",
    "solution_str": "verl",
    "entry": "reasoning_gym",
}
"""Arguments that show for which trainer a function was written."""
AS_WRITTEN: Mapping[Signature, str] = {
    "row": "(row)",
    "trl": "(completions, **columns)",
    "verl": "(data_source, solution_str, ground_truth, extra_info)",
    "reasoning_gym": "(answer, entry)",
}


def columns_named(function: Callable[..., Any], signature: Signature) -> tuple[str, ...]:
    """Return the columns that a TRL function names without a default; empty for other signatures.

    Raises TypeError if its signature cannot call the function.
    """
    try:
        parameters = inspect.signature(function)
    except ValueError:  # a builtin without a signature
        return ()
    if signature != "trl":
        args, kwargs = _FORMS[signature]
        parameters.bind(*args, **kwargs)
        return ()
    by_name = [p for p in parameters.parameters.values() if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = tuple(p.name for p in by_name if p.default is p.empty)
    if not _takes_all(parameters) and not {p.name for p in by_name} & {"completions", "completion_ids"}:
        raise TypeError("it takes no completions")
    foreign = [name for name in needed if name in _OF_TRAINER]
    if foreign:
        raise TypeError(f"it needs {foreign[0]}, an object of TRL's trainer")
    parameters.bind(**dict.fromkeys((*needed, *(_TRL_GIVES if _takes_all(parameters) else ()))))
    return tuple(name for name in needed if name == "completion_ids" or name not in _TRL_GIVES)


def fitting_signature(function: Callable[..., Any]) -> Signature | None:
    """Return another signature than row that a function's argument names suggest; None if they suggest no other."""
    try:
        names = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    for own, signature in _SHOWS.items():
        if own in names:
            try:
                columns_named(function, signature)
            except TypeError:
                continue
            return signature
    return None


def arguments(
    function: Callable[..., Any], signature: Signature, rows: Sequence[Row], log_metric: Callable[[str, float], None]
) -> Arguments:
    """Return the arguments of a call; every signature except TRL's takes a single row.

    `log_metric` is TRL's argument of that name.
    """
    if signature == "trl":
        return (), _trl(function, rows, log_metric)
    (row,) = rows
    if signature == "verl":
        return (), _verl(row)
    if signature == "reasoning_gym":
        return (_answer(row["response"]), _entry(row)), {}
    return (dict(row),), {}


def _trl(function: Callable[..., Any], rows: Sequence[Row], log_metric: Callable[[str, float], None]) -> dict[str, Any]:
    """Return the arguments of TRL 1.16: columns as lists, completions as chats if the prompts are chats."""
    columns = dict.fromkeys(name for row in rows for name in row if name not in _TRL_HIDES)
    given: dict[str, Any] = {name: [row.get(name) for row in rows] for name in columns}
    given["prompts"] = [row["prompt"] for row in rows]
    given["completions"] = [
        row["response"] if isinstance(row["prompt"], str) else [{"role": "assistant", "content": row["response"]}]
        for row in rows
    ]
    if all("response_ids" in row for row in rows):
        given["completion_ids"] = [row["response_ids"] for row in rows]
    given |= {"log_extra": _log_nothing, "log_metric": log_metric}
    try:
        parameters = inspect.signature(function)
    except ValueError:
        return given
    return given if _takes_all(parameters) else {name: given[name] for name in parameters.parameters if name in given}


def _log_nothing(column: str, values: Sequence[Any]) -> None:
    """Do nothing: TRL's `log_extra` adds a column to its table of completions, which does not exist here."""


def _verl(row: Row) -> dict[str, Any]:
    """Return the arguments of verl 0.9.1 (`NaiveRewardManager.run_single`)."""
    if "ground_truth" in row:
        truth = row["ground_truth"]
    elif "reward_model" in row:
        truth = row["reward_model"]["ground_truth"]
    else:
        truth = row["reward_model.ground_truth"]
    extra = {"num_turns": None, "rollout_reward_scores": {}, **(row.get("extra_info") or {})}
    return {
        "data_source": row["data_source"],
        "solution_str": row["response"],
        "ground_truth": truth,
        "extra_info": extra,
    }


def _answer(response: str) -> str:
    """Return the text in the last `<answer>`, or the whole response without such a tag."""
    found = _ANSWER.findall(response)
    return str(found[-1] if found else response).strip()


def _entry(row: Row) -> dict[str, Any]:
    return dict(row["entry"] if "entry" in row else {name: row[name] for name in ("question", "answer", "metadata")})


def _takes_all(parameters: inspect.Signature) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in parameters.parameters.values())
