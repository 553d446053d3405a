"""Flags that several commands share, their parsers, and the error line for a wrong flag."""

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, TypeVar

from cyclopts import (
    App,
    CoercionError,
    CycloptsError,
    MissingArgumentError,
    Parameter,
    RepeatArgumentError,
    Token,
    UnknownOptionError,
    UnusedCliTokensError,
)

from prefect_rlhf.errors.errors import InvalidInput, refusing
from prefect_rlhf.errors.in_short import in_short, one_line
from prefect_rlhf.files.yaml_text import parse_yaml, read_yaml
from prefect_rlhf.flows.commands.guesses import meant_argument, meant_flag, meant_pair
from prefect_rlhf.placement.devices.mesh import Backend
from prefect_rlhf.tasks.settings import set_by_dotted_name

Flags = TypeVar("Flags")
PROGRAM = "prefect-rlhf"
MOST_NAMES = 3  # in a hint at names close to a wrong name

ALL_AT_ONCE = Parameter(name="*")
"""For a dataclass: its fields are the flags."""
ParametersFile = Annotated[
    Path | None,
    Parameter(
        metavar="FILE",
        help="YAML or JSON file of the flow's parameters, at most once. Its paths are relative to the working folder.",
        allow_repeating=False,
    ),
]
Assignments = Annotated[
    tuple[str, ...],
    Parameter(
        name=("--param", "-p"),
        metavar="NAME=VALUE",
        help="A parameter, with its value as YAML; dots separate groups: -p algo.clip=0.2. May be repeated.",
    ),
]

ChosenKind = Annotated[
    Backend | None,
    Parameter(help="Kind of the devices: cuda for GPUs, cpu for cores; default: cuda if a GPU can be used."),
]


def app_of(command: Callable[[Flags], int]) -> App:
    """Return the app that reads the flags of a command and calls it. The command's docstring is the help."""
    app = App(
        name=f"{PROGRAM} {command.__name__}",
        default_command=command,
        version_flags=[],
        default_parameter=Parameter(negative=(), allow_repeating=True, show_default=False),
        help_format="plaintext",
        exit_on_error=False,
        print_error=False,
        suppress_keyboard_interrupt=False,  # cyclopts would exit without a message
        result_action="return_value",
    )
    app["--help"].show = False  # its reader already knows it
    return app


def explained(error: CycloptsError) -> str:
    """Return a line with the mistake in a flag, the correction, and a pointer to the list of flags."""
    known = f"see {error.app.name[0]} --help" if error.app else ""
    return one_line("; ".join(part for part in (_mistake(error), known) if part))


def _mistake(error: CycloptsError) -> str:
    if isinstance(error, UnknownOptionError):
        word = (error.token.keyword or error.token.value).partition("=")[0]
        names = [name for argument in error.argument_collection for name in argument.names]
        begins = any(name.startswith(word) for name in names)
        hint = meant_flag(word, names) or ("-p" in names and not begins and _parameter(word))
        near = closest_names(word, [name for name in names if len(name) > 2])
        return f"unknown flag {in_short(word, str)}{hint or near}"
    if isinstance(error, UnusedCliTokensError):
        rest, words = list(error.unused_tokens or []), list(error.root_input_tokens or [])
        names = [name for one in error.app.assemble_argument_collection() for name in one.names] if error.app else []
        return f"too many arguments: {in_short(' '.join(rest), str)}{meant_argument(rest, words, names)}"
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        name = error.keyword or error.argument.name.lstrip("-").upper()
        return f"{name}: missing value"
    if isinstance(error, RepeatArgumentError):
        return f"{error.token.keyword} is repeated; expected a single value"
    if isinstance(error, CoercionError) and error.token is not None:
        literals = getattr(error.target_type, "__args__", ())  # for a Literal; for a union they are types
        choices = ", ".join(word for word in literals if isinstance(word, str))
        expected = f"got {in_short(error.token.value)}, expected one of {choices}" if choices else str(error.msg)
        return f"{error.token.keyword}: {expected}"
    return in_short(error, str)


def _parameter(word: str) -> str:
    """Return a hint at the parameter similar to a flag, or its replacement: other trainers have parameters as flags."""
    from prefect_rlhf.flows.forms.dictionary.answer import answer  # imported here: a valid flag needs no dictionary
    from prefect_rlhf.flows.forms.options import RunOptions

    if foreign := answer(word):
        return f"; {foreign}"

    fields = [name for name in RunOptions.model_fields if name != "dry_run"]  # that one is a flag
    near = get_close_matches(word[:100].lstrip("-").replace("-", "_"), fields, 1, cutoff=0.85)
    return f"; closest: -p {near[0]}=VALUE" if near else ""


def closest_names(word: str, names: Iterable[str]) -> str:
    """Return a hint after an unknown word: the `names` that look or begin like it."""
    names = dict.fromkeys(names)
    begin = [name for name in names if len(word) > len("--x") and name.startswith(word)]
    alike = dict.fromkeys([*begin, *get_close_matches(word[:100], names, MOST_NAMES, cutoff=0.5)])
    return f"; closest: {', '.join(list(alike)[:MOST_NAMES])}" if alike else ""


def whole_number(least: int, most: int) -> Parameter:
    """Return a converter that accepts only integers from `least` to `most`."""

    def read(kind: type, tokens: Sequence[Token]) -> int:
        text = tokens[0].value
        if not re.fullmatch(r"-?[0-9]{1,18}", text) or not least <= int(text) <= most:
            raise ValueError(f"got {in_short(text)}, expected a whole number from {least} to {most}")
        return int(text)

    return Parameter(converter=read, metavar="N", show_default=True)


def read_parameters(file: Path | None, assignments: Sequence[str]) -> dict[str, Any]:
    """Return the parameters of a file, updated with the assignments; a dotted name refers to a field of a group.

    Raises InvalidInput for text that is not YAML, for a dotted name below a value that is not a group, and for two
    assignments of the same value.
    """
    parameters: dict[str, Any] = {}
    if file is not None:
        parameters = read_yaml("--parameters", file)
        parameters = {} if parameters is None else parameters
        if not isinstance(parameters, dict):
            raise InvalidInput("--parameters", str(file), "a mapping of parameter names to values")
    stated: dict[str, str] = {}
    for name, text in read_pairs("--param", assignments).items():
        value = parse_yaml(name, text, text)
        for place in _places(name, value):
            if place in stated:
                raise InvalidInput("--param", f"{name}={text}", f"a single value of {place}{_repeated(stated[place])}")
            stated[place] = f"{name}={text}"
        with refusing(ValueError, "--param", name, "a name inside a group"):
            set_by_dotted_name(parameters, name, value)
    return parameters


def _places(name: str, value: object) -> Iterator[str]:
    """Yield the dotted names of the values in a group; of any other value its own name."""
    if not isinstance(value, dict) or not value:
        yield name
        return
    for key, one in value.items():
        yield from _places(f"{name}.{key}", one)


def _repeated(earlier: str) -> str:
    return f"; {earlier} is repeated by it"


def read_pairs(flag: str, assignments: Sequence[str], form: str = "NAME=VALUE, such as steps=3") -> dict[str, str]:
    """Return the texts left and right of each `=`. `form` is what a message shows as right.

    Raises InvalidInput for a text without `=`, and for a name that would replace an earlier name or a part of it.
    """
    pairs: dict[str, str] = {}
    for text in assignments:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise InvalidInput(flag, text, meant_pair(flag, text) or form)
        if (earlier := next((each for each in pairs if f"{each}.".startswith(f"{name}.")), None)) is not None:
            first = f"{earlier}={pairs[earlier]}"
            raise InvalidInput(flag, text, f"a single value of {name}{_repeated(first)}")
        pairs[name] = value
    return pairs


def read_numbers(flag: str, text: str | None, expected: str) -> list[int]:
    """Return the numbers of a list such as 1,2,4. Raises InvalidInput with `expected` for any other text."""
    with refusing(ValueError, flag, text, expected, most=0):
        return [int(part) for part in text.split(",")] if text else []


def print_error(words: object) -> None:
    """Print to stderr and flush. Messages during a command's work are not part of its output."""
    print(words, file=sys.stderr, flush=True)
