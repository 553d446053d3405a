"""Reads the parameters of an evaluation from a training run's file or from a file of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefect_rlhf.errors.errors import InvalidInput, Missing, NotUsed
from prefect_rlhf.files.foreign_file import read_json_object
from prefect_rlhf.files.model_folder import ADAPTER, is_adapter
from prefect_rlhf.files.path_text import checked_path
from prefect_rlhf.flows.forms.options import RunOptions
from prefect_rlhf.tasks.settings import by_dotted_name

HELD_OUT = "held_out"
KEPT = (
    *("actor", "reward", "play", "evaluation", "seed", "output_dir", "headroom"),
    *("call_deadline_seconds", "start_deadline_seconds"),
)
"""Parameters of a training run that an evaluation reads; of `algo` it reads `sampling`."""
OF_TRAINING = (
    *("prompts", HELD_OUT, "chats", "pairs", "answers", "pretrain", "staleness"),
    *("critic", "cost_critic", "ref", "cost"),
)
"""Other parameters of the shipped algorithms."""


def read_evaluation(model: str, file: Mapping[str, Any], stated: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the parameters for evaluating `model`, and the names of the file's parameters that have no use here.

    It takes the sets, the reward, the play and the sampling of a training run's file; without sets, `held_out`. It must
    use every `stated` parameter. Raises Missing without any set, and NotUsed for `steps`.
    """
    given = {name: value for name, value in file.items() if name not in (*RunOptions.model_fields, *OF_TRAINING)}
    given |= {name: file[name] for name in KEPT if name in file}
    if isinstance(algo := given.get("algo"), Mapping):
        given["algo"] = {name: value for name, value in algo.items() if name == "sampling"}
    held_out = stated.get(HELD_OUT, file.get(HELD_OUT))
    given = merged(given, {name: value for name, value in stated.items() if name != HELD_OUT})
    if not given.get("evaluation"):
        if held_out is None:
            right = "sets of prompts: evaluation.NAME.data.path=FILE, and a reward; or held_out of a training run"
            raise Missing("evaluation", right)
        given["evaluation"], held_out = {HELD_OUT: {"data": held_out}}, None
    elif HELD_OUT in stated:
        raise NotUsed(HELD_OUT, stated[HELD_OUT], "evaluation has the sets")
    if "steps" in stated or "epochs" in stated:
        raise NotUsed("steps", stated.get("steps", stated.get("epochs")), "nothing is trained")
    actor = given.get("actor")
    given["actor"] = actor_of(model, actor if isinstance(actor, Mapping) else {})
    unused = [name for name in by_dotted_name(file) if not _is_in(name, given)]
    is_set = HELD_OUT in given["evaluation"]
    return given | {"steps": 1}, [name for name in unused if not (is_set and name.startswith(f"{HELD_OUT}."))]


def actor_of(model: str, others: Mapping[str, Any]) -> dict[str, Any]:
    """Return the actor's fields: a whole model, or a PEFT folder's adapter on its base, with `others` added.

    An adapter without a folder is left out, because only a training run would create it. Raises InvalidInput for a
    folder that does not name its base.
    """
    folder = checked_path("MODEL", model).expanduser()
    if is_adapter(folder):
        base = read_json_object("MODEL", folder / ADAPTER, "a JSON object").get("base_model_name_or_path")
        if not isinstance(base, str) or not base:
            right = "a model's folder or name; or evaluate the base with -p actor.adapter.path=FOLDER"
            raise InvalidInput(f"MODEL: {ADAPTER}: base_model_name_or_path", base, right)
        return {**others, "path": base, "adapter": {"path": model}}
    adapter = others.get("adapter")
    has_folder = isinstance(adapter, Mapping) and adapter.get("path")
    return {name: value for name, value in others.items() if has_folder or name not in ("adapter", "base_dtype")} | {
        "path": model
    }


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested groups; values of `second` replace those of `first`.

    >>> merged({"algo": {"lr": 1, "size": 8}}, {"algo": {"lr": 2}})
    {'algo': {'lr': 2, 'size': 8}}
    """
    found = dict(first)
    for name, value in second.items():
        before = found.get(name)
        both = isinstance(before, Mapping) and isinstance(value, Mapping)
        found[name] = merged(before, value) if both else value  # type: ignore[arg-type]  # `both` says it
    return found


def _is_in(name: str, given: Mapping[str, Any]) -> bool:
    place: Any = given
    for part in name.split("."):
        if not isinstance(place, Mapping) or part not in place:
            return False
        place = place[part]
    return True
