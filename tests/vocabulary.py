"""The vocabulary of an author, from the code: calls, parameters, settings, rows, losses and computations.

`python -m tests.vocabulary` writes docs/vocabulary.md.
"""

import ast
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from prefect_rlhf import computations, losses, rlhf_flow
from prefect_rlhf.blocks.chats import Chats
from prefect_rlhf.blocks.dataset import Preferences, Prompts
from prefect_rlhf.blocks.model import Model
from prefect_rlhf.blocks.rated_answers import RatedAnswers
from prefect_rlhf.engines.compute import Computed, Context, saved_state
from prefect_rlhf.engines.losses.protocol import Loss, LossValues
from prefect_rlhf.engines.rows import Batch
from prefect_rlhf.flows.forms.evaluation import EvaluationSet
from prefect_rlhf.tasks.host_rewards import HostRewards, RewardFunction
from prefect_rlhf.tasks.rl.groups import Groups, GroupScores
from prefect_rlhf.tasks.rl.old_policy import OldPolicy
from prefect_rlhf.tasks.rl.settings.offline import DPO, KTO, SFT
from prefect_rlhf.tasks.rl.settings.online import GRPO, PPO, KLControl, PolicyGradient, ReMax
from prefect_rlhf.tasks.rl.settings.policy import Importance, KLTerm, Overlong
from prefect_rlhf.tasks.rl.settings.safety import Lagrange, SafeRLHF
from prefect_rlhf.tasks.settings import Optimizer, Sampling, Settings, Update
from prefect_rlhf.tasks.tracing import calls, select
from prefect_rlhf.tasks.tracing.operations import OFFERED, Bound, Operator, computation, loss
from prefect_rlhf.tasks.tracing.terms import Terms
from tests.door import public_names

PAGE = Path(__file__).parents[1] / "docs" / "vocabulary.md"
HEAD = """# Vocabulary

The names that the file of an algorithm may import from `prefect_rlhf`. A name with a dot is in a module of it:
`from prefect_rlhf import losses`, then `losses.grpo`.
[Write an algorithm](authoring.md) shows such a file.
`python -m tests.vocabulary` generates this page from docstrings and fields.

Shapes: B rows, T response tokens, S tokens of prompt and response.
"""
WORDS = [calls.generate, calls.inference, calls.score, calls.compute, select.select, calls.train_step]
PARAMETERS = [Model, Prompts, Preferences, Chats, RatedAnswers]
SETTINGS = [Sampling, Optimizer, Update, KLControl, KLTerm, Lagrange, Importance, Overlong]
OF_ROWS = [HostRewards, RewardFunction, EvaluationSet]

ROWS = [Batch, Loss, LossValues, Terms, Context, Computed, Groups, GroupScores, OldPolicy]
ALGORITHM_SETTINGS = [PolicyGradient, PPO, SafeRLHF, GRPO, ReMax, DPO, SFT, KTO]
HELPERS = [
    computations.text_columns,
    computations.lists,
    computations.write_rows,
    saved_state,
    computations.response_mask,
    computations.masked_mean,
    computations.row_means,
    computations.row_sums,
    computations.whiten,
    computations.groups_of,
    computations.group_scores,
    losses.log_sigmoid,
    computations.kl_estimate,
    losses.implicit_rewards,
]
BODY_HELPERS = [rlhf_flow, computations.old_policy, computations.check_reference, computations.with_reward_weights]
OTHERS = {
    "Reward": "Type of a flow's parameter: a `Model` or `HostRewards`.",
    "Staleness": "Type of a field of settings: the age of the weights of a generate, in steps.",
}
"""Names of types, which have no docstring of their own."""


def name_of(thing: Any) -> str:
    """Return the name of a public value as an author writes it, or the own name of another value."""
    return next((name for name, public in public_names().items() if public is thing), thing.__name__)


def page() -> str:
    """Return the page."""
    sections = [
        ("Calls", "The calls in a flow's body.", map(function_text, WORDS)),
        ("Parameters of a flow", "The fields of a deployment's form.", map(fields_text, PARAMETERS)),
        ("Settings", docstring(Settings), map(fields_text, SETTINGS + OF_ROWS)),
        (
            "Settings of the shipped algorithms",
            "Set a field with `algo.FIELD`. Your own class may extend any of these classes.",
            map(fields_text, ALGORITHM_SETTINGS),
        ),
        ("Rows", "Arguments and results of losses and computations.", map(class_text, ROWS)),
        (
            "Decorators",
            "They register your own losses and computations.",
            map(function_text, [loss, computation, Bound.on]),
        ),
        (
            "Losses",
            "`settings` is the class that a loss needs. It also accepts a subclass with more fields.",
            operators("loss"),
        ),
        (
            "Computations",
            f"A computation gets its inputs in order, then `settings`{offered()}.",
            operators("computation"),
        ),
        ("Helpers for computations", "The shipped computations use them.", map(typed_text, HELPERS)),
        ("Helpers for flows", "The decorator of a flow, and helpers for its body.", map(typed_text, BODY_HELPERS)),
        ("Other names", "Names without a section above.", other_names()),
    ]
    return "\n".join([HEAD, *(f"## {title}\n{intro}\n\n{chr(10).join(texts)}" for title, intro, texts in sections)])


def function_text(function: Any) -> str:
    """Return a function with its parameters and docstring."""
    parameters = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters_of(function)]
    called = f"{name_of(function)}{inspect.Signature(parameters)}"
    return f"### `{called}`\n{docstring(function)}\n"


def typed_text(function: Any) -> str:
    """Return a function with the types of its parameters and of its result."""
    called = f"{name_of(function)}{inspect.signature(function)}".replace("'", "")
    return f"### `{called}`\n{docstring(function)}\n"


def other_names() -> Iterator[str]:
    """Yield a table of the public names that no other section has."""
    kinds = (*PARAMETERS, *SETTINGS, *ALGORITHM_SETTINGS, *ROWS)
    named = {name_of(thing) for thing in (*kinds, *WORDS, *HELPERS, *BODY_HELPERS, loss, computation)}
    yield "| name | meaning |\n|---|---|"
    for name, thing in public_names().items():
        if name not in named and not isinstance(thing, Operator):
            yield f"| `{name}` | {OTHERS.get(name) or docstring(thing).partition(chr(10))[0]} |"
    yield ""


def parameters_of(function: Any) -> list[inspect.Parameter]:
    """Return a function's parameters in order."""
    return list(inspect.signature(function).parameters.values())


def fields_text(kind: Any) -> str:
    """Return a form's fields as a table."""
    rows = []
    for name, schema in kind.model_json_schema()["properties"].items():
        default = kind.model_fields[name].get_default()
        if isinstance(default, BaseModel):
            stated = default.model_dump(exclude_defaults=True)
            default = f"{type(default).__name__}({', '.join(f'{key}={value}' for key, value in stated.items())})"
        shown = "required" if kind.model_fields[name].is_required() else "empty" if default in (None, "") else default
        rows.append(f"| `{name}` | {shown} | {bounds(schema)} | {schema.get('description', '')} |")
    table = ["| field | default | allowed | meaning |", "|---|---|---|---|", *rows]
    return "\n".join([f"### {name_of(kind)}", docstring(kind), "", *table, ""])


def bounds(schema: dict[str, Any]) -> str:
    """Return the values that a field accepts, in a few words."""
    choices = [choice for choice in schema.get("anyOf", [schema]) if choice.get("type") != "null"]
    if len(choices) != 1:
        return ""
    (choice,) = choices
    if "enum" in choice or "const" in choice:
        return ", ".join(map(str, choice.get("enum", [choice.get("const")])))
    words = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
    limits = [f"{word} {choice[key]:,.9g}" for key, word in words.items() if key in choice]
    return ", ".join(limits) or {"boolean": "true, false", "string": "text"}.get(choice.get("type", ""), "")


def class_text(kind: type) -> str:
    """Return a class with its docstring, its fields with their comments, and its own methods."""
    lines = [f"### {name_of(kind)}", docstring(kind), ""]
    if is_dataclass(kind):
        texts = field_texts(kind)
        for name, annotation in inspect.get_annotations(kind).items():
            lines.append(f"- `{name}: {annotation}`" + (f": {texts[name]}" if name in texts else ""))
    for name, member in vars(kind).items():
        function = member.fget if isinstance(member, property) else member
        if not name.startswith("_") and inspect.isfunction(function):
            called = (
                name
                if isinstance(member, property)
                else f"{name}({', '.join([*inspect.signature(function).parameters][1:])})"
            )
            lines.append(f"- `{called}`: {docstring(function)}")
    return "\n".join([*lines, ""])


def field_texts(kind: type) -> dict[str, str]:
    """Return what a dataclass says of its fields: comments after them, or docstrings below them."""
    source = textwrap.dedent(inspect.getsource(kind))
    texts = dict(re.findall(r"^    (\w+): [^\n]*?  # ([^\n]*)$", source, re.MULTILINE))
    body = ast.parse(source).body[0].body
    for field, below in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            texts[field.target.id] = " ".join(below.value.value.split())
    return texts


def operators(kind: str) -> Iterator[str]:
    """Return the shipped operators of a kind as a table."""
    made = "output" if kind == "loss" else "keys made"
    yield f"| {kind} | inputs | {made} | settings | meaning |\n|---|---|---|---|---|"
    for name, thing in public_names().items():
        if isinstance(thing, Operator) and thing.kind == kind:
            yield operator_row(name, thing)
    yield ""


def operator_row(name: str, operator: Operator[..., Any]) -> str:
    """Return an operator as a row: a loss with the model's output, a computation with its inputs and keys."""
    parameters = inspect.signature(operator.function).parameters
    inputs = ", ".join(name for name in parameters if name not in ("settings", *OFFERED))
    settings = str(parameters["settings"].annotation).replace(" | ", " or ")
    made = ", ".join(operator.outputs) or "metrics alone"
    pairs = "; pairs stay together" if operator.rows_per_item == 2 else ""
    text = " ".join(docstring(operator.function).split())
    return f"| `{name}` | {inputs} | {made}{pairs} | {settings} | {text} |"


def offered() -> str:
    """Return the further arguments of a computation, in words."""
    return f", and {' and '.join(f'`{name}`' for name in OFFERED)} if it has parameters of these names"


def docstring(thing: Any) -> str:
    """Return a docstring without its examples."""
    text = inspect.cleandoc(thing.__doc__ or "")
    return text.partition("\n>>>")[0].strip()


def main() -> None:
    """Write the page."""
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
