"""Finds algorithms without importing them: names of shipped and installed ones, and errors for wrong names."""

import ast
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.path_text import resolved

ALGORITHMS = ("ppo", "reward", "sft", "dpo", "kto", "grpo", "remax", "safe-rlhf")
EVALUATE = "evaluate"  # the algorithm behind the command of this name: it trains no model
MOST_NAMES = 3  # in a hint at what a wrong name may mean
ENTRY_POINTS = "prefect_rlhf.algorithms"  # the group for the algorithms of other packages
_DYNAMIC = re.compile(r"import \*|\b(globals|vars|setattr|exec|eval|__getattr__)\b")


def algorithm_places() -> dict[str, str]:
    """Return `module:function` of every named algorithm: ours, and entry points of installed packages.

    A package lists its algorithms in the group `prefect_rlhf.algorithms`; it cannot replace a name of ours.
    """
    modules = {name: name.replace("-", "_") for name in ALGORITHMS}
    ours = {name: f"prefect_rlhf.flows.{module}:{module}" for name, module in modules.items()}
    ours[EVALUATE] = "prefect_rlhf.flows.algorithm.evaluation.flow:evaluate"
    others = entry_points(group=ENTRY_POINTS)
    return ours | {point.name: point.value for point in others if point.name not in ours}


def find_place(name: str) -> tuple[str, str]:
    """Return the module or file of a named algorithm, and its function, without importing anything.

    Raises InvalidInput for a name, a file, a module, or a function of a file that does not exist.

    >>> find_place("safe-rlhf")
    ('prefect_rlhf.flows.safe_rlhf', 'safe_rlhf')
    """
    place, _, function = (name if ":" in name else algorithm_places().get(name, "")).rpartition(":")
    if not place and ":" not in name:
        known = ", ".join(each for each in algorithm_places() if each != EVALUATE)
        raise InvalidInput(
            "algorithm", name, f"one of {known}, module:function or file.py:function{meant_algorithm(name)}"
        )
    if place.endswith(".py"):
        try:
            file = resolved(Path(place))
        except (RuntimeError, ValueError, OSError):  # the home of an unknown user, a NUL, a loop of links
            file = Path(place)
        if not file.is_file():
            raise InvalidInput("algorithm", name, f"an existing file; {file} does not exist")
        if (flows := _flows_without(function, file)) is not None:
            raise InvalidInput("algorithm", name, expected_flow(place, function, flows, "does not exist"))
    elif not all(part.isidentifier() for part in place.split(".")):
        raise InvalidInput("algorithm", name, "module:function, such as mine.rloo:rloo, or file.py:function")
    elif not _is_found(place.partition(".")[0]):
        raise InvalidInput("algorithm", name, no_module(place.partition(".")[0]))
    return place, function


def meant_algorithm(word: str) -> str:
    """Return a hint at what a word without a colon may mean: the algorithms in a file, or similar names.

    >>> meant_algorithm("GRPO"), meant_algorithm("nothing-like-it")
    ('; closest: grpo', '')
    """
    if word.endswith(".py"):
        try:
            flows = _flows_of(resolved(Path(word)))
        except (OSError, ValueError, SyntaxError, RecursionError, RuntimeError):
            flows = []
        return f"; here: {', '.join(f'{word}:{name}' for name in flows[:MOST_NAMES])}" if flows else ""
    places = {name.lower(): name for name in algorithm_places()}
    near = get_close_matches(word[:100].lower().replace("_", "-"), places, MOST_NAMES)
    return f"; closest: {', '.join(places[name] for name in near)}" if near else ""


def expected_flow(place: str, function: str, flows: Sequence[str], problem: str) -> str:
    """Return an error text that lists the @rlhf_flow functions of a module or file, which lacks `function`."""
    known = ", ".join(flows) or "it has no such function"
    return f"an @rlhf_flow function of {place}: {known} ({function!r} {problem})"


def no_module(module: str) -> str:
    """Return an error text for a module that was not found."""
    return f"an existing module: {module} is neither in {Path.cwd()} nor installed"


def _is_found(module: str) -> bool:
    """Whether the working folder or the environment has a module, as for `python -m`."""
    folder = Path.cwd()
    is_here = (folder / module).is_dir() or (folder / f"{module}.py").is_file()
    return is_here or module in sys.modules or find_spec(module) is not None


def _flows_without(function: str, file: Path) -> list[str] | None:
    """Return the @rlhf_flow functions of a file that cannot define `function`, or None if only an import can decide.

    A file may define any word that occurs in its text, and any word at all if it creates names at run time.
    """
    try:
        text = file.read_text()
        if _DYNAMIC.search(text) or re.search(rf"\b{re.escape(function)}\b", text):
            return None
        return _flows_of(file) or None
    except (OSError, ValueError, SyntaxError, RecursionError):  # its import reports the error
        return None


def _flows_of(file: Path) -> list[str]:
    """Return the @rlhf_flow functions in the text of a file."""
    functions = (part for part in ast.parse(file.read_text()).body if isinstance(part, ast.FunctionDef))
    return [part.name for part in functions if any("rlhf_flow" in ast.dump(mark) for mark in part.decorator_list)]
