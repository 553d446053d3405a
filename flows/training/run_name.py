"""A run's name and tags, as Prefect lists them: algorithm, model and plan.

Prefect names a run `tidy-fox`; ours becomes `grpo-smollm2-tidy-fox`, and so does its folder. A name that you chose
stays. A restarted run keeps its name, because its folder has that name.
"""

import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import PurePath
from typing import Any

from coolname.data import config
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.runtime import flow_run
from prefect.utilities.names import generate_slug

from prefect_rlhf.blocks.model import Model

MAIN_ROLE = "actor"
MOST_CHARACTERS = 40  # in the name of a model or an algorithm
SNAPSHOT = re.compile(r"models--.+?--(?P<name>[^/]+)/snapshots/")  # in Hugging Face's cache, folders are hashes


def new_name(algorithm: str, arguments: Mapping[str, Any]) -> str:
    """Return a name for a run that has no name yet."""
    return described(algorithm, arguments, generate_slug(2))


def naming(algorithm: str) -> Callable[[], str]:
    """Return the function that Prefect calls to name a run of `algorithm` when the run starts."""

    def name() -> str:
        given = flow_run.name or ""
        if flow_run.run_count > 0 or not is_generated(given):
            return given
        return described(algorithm, flow_run.parameters, given)

    return name


def described(algorithm: str, arguments: Mapping[str, Any], slug: str) -> str:
    """Join algorithm, main model and slug into a name that is valid for a folder.

    >>> described("grpo", {"actor": Model(path="models/SmolLM2 135M/")}, "tidy-fox")
    'grpo-SmolLM2-135M-tidy-fox'
    """
    model = main_model(arguments)
    return "-".join([_plain(algorithm), *([model[1]] if model else []), slug])


def main_model(arguments: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the role and name of a run's main model: the actor, or else the algorithm's first model.

    >>> main_model({"reward": Model(path="/hub/models--acme--judge/snapshots/0f3a")})
    ('reward', 'judge')
    """
    models = {role: value.path for role, value in arguments.items() if isinstance(value, Model)}
    role = MAIN_ROLE if MAIN_ROLE in models else next(iter(models), "")
    if not role:
        return None
    snapshot = SNAPSHOT.search(models[role])
    name = snapshot["name"] if snapshot else PurePath(models[role]).name
    return role, _plain(name)


def tag_run(algorithm: str, arguments: Mapping[str, Any], plan: str, chosen: str = "") -> None:
    """Tag this flow run with its algorithm, main model and plan; your own tags stay.

    `plan` is the requested plan, `chosen` the name of the plan that the run uses.
    """
    asked = PurePath(plan).stem
    model = main_model(arguments)
    ours = {"algorithm": algorithm, "plan": asked if chosen in ("", asked) else f"{asked}->{chosen}"}
    ours |= {model[0]: model[1]} if model else {}
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return
    run = context.flow_run
    others = [tag for tag in run.tags if tag.partition(":")[0] not in ours]
    tags = [*others, *(f"{key}:{value}" for key, value in ours.items())]
    if set(tags) != set(run.tags):
        with get_client(sync_client=True) as client:
            client.update_flow_run(run.id, tags=tags)
        run.tags = tags


def is_generated(name: str) -> bool:
    """Whether Prefect generated the name of a run from two of its words.

    >>> is_generated(generate_slug(2)), is_generated("nightly-grpo")
    (True, False)
    """
    parts = name.split("-")
    return len(parts) == 2 and set(parts) <= _words("2")


def _plain(name: str) -> str:
    """Return a name that is valid for a folder."""
    return re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-.")[:MOST_CHARACTERS] or "unnamed"


@cache
def _words(rule: str) -> frozenset[str]:
    """Return the words of a rule of `coolname`, the library behind Prefect's names."""
    rules: Any = config  # its stub types it as object
    entry = rules.get(rule, {})
    return frozenset(entry.get("words", ())).union(*map(_words, entry.get("lists", ())))
