"""The reference, from the code: signature, types, result and an example of every public name, and fields of settings.

docs/conf.py puts it into docs/reference.md when the site is built. docs/examples/door.txt has the examples.
"""

import inspect
import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

import prefect_rlhf
from prefect_rlhf import door
from prefect_rlhf.flows.algorithm.rlhf_flow import AlgorithmFlow
from prefect_rlhf.flows.forms.options import RunOptions
from prefect_rlhf.tasks.tracing.operations import OFFERED, Operator
from tests.door import public_names
from tests.signatures import called, default_text, type_text
from tests.vocabulary import OTHERS, bounds, docstring, field_texts

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "docs" / "examples" / "door.txt"
NO_ROWS = ("settings", *OFFERED)
"""Parameters of a computation that are not rows."""
FIELD_LINE = re.compile(r"^(\w+): ([^\n]*)$", re.MULTILINE)
"""Of a docstring: a field and its description."""


def sections() -> str:
    """Return the sections of the page in Markdown: the groups of names, then the settings that have no name there."""
    parts = []
    for title, names in groups().items():
        parts += [f"## {title}", *(section(name) for name in names)]
    parts.append("## Settings inside of these, and the options of every run")
    parts += [settings_section(kind) for kind in inner_settings()]
    return "\n\n".join(parts) + "\n"


def groups() -> Mapping[str, list[str]]:
    """Return the public names by the comments above them in `__all__` of the door and of each public module."""
    found: dict[str, list[str]] = {}
    for module in (door, *(getattr(prefect_rlhf, name) for name in door.MODULES)):
        place = "" if module is door else f"{module.__name__.removeprefix('prefect_rlhf.')}."
        text, title = inspect.getsource(module).partition("__all__ = [")[2], ""
        for comment, name in re.findall(r'^    (?:# (.+)|"(\w+)",)$', text, re.MULTILINE):
            if comment:
                title = comment[0].upper() + comment[1:]
            elif name not in door.MODULES:
                found.setdefault(title, []).append(f"{place}{name}")
    return found


def examples() -> Mapping[str, str]:
    """Return the example of each name: Python as a person types it, with its output."""
    parts = re.split(r"^# ([\w.]+)\n", EXAMPLES.read_text(), flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], (part.strip() for part in parts[1::2]), strict=True))


def section(name: str) -> str:
    """Return the section of a name: head, docstring, result, fields and example."""
    thing = public_names()[name]
    if isinstance(thing, Operator):
        parts = operator_parts(name, thing)
    elif isinstance(thing, AlgorithmFlow):
        parts = flow_parts(name, thing)
    elif isinstance(thing, type):
        parts = class_parts(name, thing)
    elif inspect.isfunction(thing):
        parts = [code(called(name, inspect.signature(thing))), docstring(thing), returned(thing)]
    else:
        parts = [code(f"{name} = {type_text(thing)}"), OTHERS[name]]
    return "\n\n".join([f"### {name}", *filter(None, parts), "**Example**", code(examples()[name])])


def operator_parts(name: str, operator: Operator[..., Any]) -> list[str]:
    """Return how a body writes a loss or a computation, the plain function, its docstring, and the result."""
    parameters = inspect.signature(operator.function).parameters
    settings = type_text(parameters["settings"].annotation)
    keys = ", ".join(f"`{output}`" for output in operator.outputs)
    if operator.kind == "loss":
        use = f"{name}(settings).on(*rows, mean_over=None, temperature=1.0, batch_size=None, name='') -> Terms"
        result = f"a term of a `train_step`. The model computes {keys} for it. The plain function returns `LossValues`."
    else:
        inputs = ", ".join(str(one).partition(":")[0] for one in parameters.values() if one.name not in NO_ROWS)
        use = f"compute({name}, {inputs}, settings=settings) -> RowsHandle"
        keys = f"the keys {keys}" if keys else "no keys: the computation makes metrics or files"
        result = f"a handle of rows with {keys}. The plain function returns `Computed`."
    plain = called(f"{name}.function", inspect.signature(operator.function))
    text = f"# in the body of a flow; settings: {settings}\n{use}\n\n# the plain function\n{plain}"
    return [code(text), docstring(operator.function), f"**Returns** {result}"]


def flow_parts(name: str, flow: AlgorithmFlow) -> list[str]:
    """Return the parameters of an algorithm, without the options that every run has."""
    own = [one for one in inspect.signature(flow).parameters.values() if one.name not in RunOptions.model_fields]
    options = inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD)
    signature = inspect.Signature([*own, options], return_annotation=dict[str, Any])
    rest = f"`options` are the [options of every run](#{RunOptions.__name__.lower()})."
    result = "**Returns** a dict of `run_dir` and `models`. `run` returns the same as a `RunResult`."
    return [code(called(name, signature)), docstring(flow.algorithm.body), rest, result]


def class_parts(name: str, kind: type) -> list[str]:
    """Return the head of a class, its docstring, its fields and its methods."""
    bases = ", ".join(base.__name__ for base in kind.__bases__ if base is not object)
    head = f"class {name}({bases})" if bases else f"class {name}"
    if issubclass(kind, BaseModel):
        return [code(head), docstring(kind), *settings_table(kind), *methods(kind)]
    made = f"\n\n{called(name, inspect.signature(kind))}" if "__init__" in vars(kind) and not is_protocol(kind) else ""
    text = FIELD_LINE.sub("", docstring(kind)).strip() if is_dataclass(kind) else docstring(kind)
    return [code(head + made.removesuffix(" -> None")), text, *dataclass_table(kind), *methods(kind)]


def is_protocol(kind: type) -> bool:
    """Whether a class is a protocol, which has no instances of its own."""
    return getattr(kind, "_is_protocol", False)


def methods(kind: type) -> Iterator[str]:
    """Yield a list of the public methods and properties that a class defines itself."""
    lines = []
    for name, member in vars(kind).items():
        member = member.__func__ if isinstance(member, classmethod) else member
        if isinstance(member, property):
            what = f"`{name}: {type_text(inspect.signature(member.fget).return_annotation)}`"
        elif inspect.isfunction(member):
            what = f"`{' '.join(called(name, inspect.signature(member)).split())}`"
        else:
            continue
        if not name.startswith("_"):
            lines.append(f"- {what}: {' '.join(docstring(member).split())}".removesuffix(": "))
    if lines:
        yield "\n".join(lines)


def settings_section(kind: type[BaseModel]) -> str:
    """Return a class of settings that is not a name of the door."""
    return "\n\n".join([f"### {kind.__name__}", docstring(kind), *settings_table(kind)])


def settings_table(kind: type[BaseModel]) -> Iterator[str]:
    """Yield the fields of settings as a table: name, type, default, bounds and description."""
    schema = kind.model_json_schema()["properties"]
    rows = []
    for name, field in kind.model_fields.items():
        default = field.get_default(call_default_factory=True)
        stated = "required" if field.is_required() else f"`{default_text(default)}`"
        rows.append((f"`{name}`", f"`{type_text(field.annotation)}`", stated, bounds(schema[name]), field.description))
    if rows:
        yield table(("field", "type", "default", "allowed", "description"), rows)


def dataclass_table(kind: type) -> Iterator[str]:
    """Yield a dataclass's fields as a table; their descriptions are beside or below them, or in its docstring."""
    if not is_dataclass(kind):
        return
    described = field_texts(kind) | dict(FIELD_LINE.findall(docstring(kind)))
    rows = []
    for field in fields(kind):
        stated = "empty" if field.default is MISSING else f"`{field.default!r}`"
        if field.default is MISSING and field.default_factory is MISSING:
            stated = "required"
        rows.append((f"`{field.name}`", f"`{type_text(field.type)}`", stated, described.get(field.name)))
    yield table(("field", "type", "default", "description"), rows)


def table(head: Sequence[str], rows: Iterable[Sequence[str | None]]) -> str:
    """Return a table in Markdown."""
    lines = [[(cell or "").replace("|", r"\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *lines))


def inner_settings() -> list[type[BaseModel]]:
    """Return the classes of settings that the door does not show: settings in fields, of `algo`, and of every run."""
    things = list(public_names().values())
    shown = [thing for thing in things if isinstance(thing, type) and issubclass(thing, BaseModel)]
    algos = [inspect.signature(thing).parameters["algo"] for thing in things if isinstance(thing, AlgorithmFlow)]
    found = dict.fromkeys([*shown, RunOptions, *(kind for algo in algos for kind in settings_of(algo.annotation))])
    waiting = list(found)
    while waiting:
        kinds = [kind for field in waiting.pop().model_fields.values() for kind in settings_of(field.annotation)]
        waiting += [kind for kind in kinds if kind not in found]
        found |= dict.fromkeys(kinds)
    return sorted(found.keys() - shown, key=lambda kind: kind.__name__)


def settings_of(annotation: Any) -> list[type[BaseModel]]:
    """Return the classes of settings in a type."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [kind for part in typing.get_args(annotation) for kind in settings_of(part)]


def returned(function: Any) -> str:
    """Return the line on the result of a function."""
    result = type_text(inspect.signature(function).return_annotation)
    return "**Returns** nothing." if result == "None" else f"**Returns** `{result}`."


def code(text: str) -> str:
    """Return a block of Python, or of a Python session."""
    return f"```{'pycon' if text.startswith('>>>') else 'python'}\n{text}\n```"
