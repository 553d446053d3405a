"""A rule derives a parameter from another library's options: by a formula, which people read too, or by words."""

from __future__ import annotations

import ast
import enum
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any, Literal

NAME = re.compile(r"[a-zA-Z_][\w.]*")
FUNCTIONS: Mapping[str, Callable[..., float]] = MappingProxyType({"max": max, "min": min})
SPECIAL = frozenset({"devices", "steps", "dp", "replicas", "response_tokens", *FUNCTIONS})
"""Names in formulas that are not options: numbers of the run and of its plan."""
OURS = ("algo.batch_size", "algo.update.", "algo.samples_per_prompt")
"""Names in formulas that are parameters here."""


class Untranslatable(Exception):
    """These options have no counterpart at these values; the text says why, and what to do instead."""


class Unused(Exception):
    """These options have no effect in their own library at these values; the text says why."""


class Null(enum.Enum):
    """Clears a parameter whose default is not empty. None, in contrast, means that there is no value."""

    NULL = "null"


NULL = Null.NULL


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """Derives a parameter here from options elsewhere.

    Rules of the same parameter are alternatives: the first that gives a value counts.
    """

    ours: str
    formula: str
    """A name, or arithmetic with names: options, parameters here, and `SPECIAL` numbers. With `words` it is a single
    option, looked up there. With `by` it lists the options that the function reads, and the function uses `words`;
    options after a bar are read but not replaced."""
    note: str = ""
    words: Mapping[Any, Any] = field(default_factory=dict)
    by: Callable[[Any], Any] | None = None  # of a Job, whose file imports this one
    when: Callable[[Any], bool] | None = None
    """Whether the rule applies to a job."""
    otherwise: str = ""
    """Why it does not."""
    whole: Literal["exactly", "about", "no"] = "exactly"
    """Whether arithmetic must give a whole number, is rounded up, or may give any number."""
    where: Literal["file", "plan", "play", "check"] = "file"
    """What the value belongs into: the parameter file, a call's placement in a plan, or a play."""

    @property
    def options(self) -> tuple[str, ...]:
        """The options that the rule reads, in order.

        >>> Rule("algo.batch_size", "devices * max(steps_per_generation, 1) / num_generations").options
        ('steps_per_generation', 'num_generations')
        """
        return _options_in(self.formula)

    @property
    def stands_for(self) -> tuple[str, ...]:
        """The options that the parameter replaces: those before the bar."""
        return _options_in(self.formula.partition("|")[0])

    @property
    def is_arithmetic(self) -> bool:
        """Whether arithmetic changes the option's value."""
        return self.by is None and not self.words and not NAME.fullmatch(self.formula)

    @property
    def arithmetic(self) -> str:
        """The arithmetic as pages and messages show it; empty if the value is copied.

        >>> Rule("play.max_turns", "rounds + 1", "TRL counts rounds of calls").arithmetic
        'play.max_turns = rounds + 1: TRL counts rounds of calls'
        """
        if not self.is_arithmetic:
            return ""
        is_same = self.ours in self.options  # OpenRLHF has names that are ours, too
        formula = self.formula.replace(self.ours, f"their {self.ours}") if is_same else self.formula
        return f"{self.ours} = {formula}" + (f": {self.note}" if self.note else "")


def computed(formula: str, value_of: Callable[[str], Any]) -> Any:
    """Compute a formula; `value_of` maps each name to its value.

    >>> computed("a.b * 2 / max(c, 1)", {"a.b": 6, "c": 4}.__getitem__)
    3.0
    """
    return _computed(_parsed(formula), value_of)


def written(formula: str, value_of: Callable[[str], Any]) -> str:
    """Return a formula with values in place of names.

    >>> written("a.b * 2 / max(c, 1)", {"a.b": 6, "c": 4}.__getitem__)
    '6 * 2 / max(4, 1)'
    """
    return NAME.sub(lambda name: name[0] if name[0] in FUNCTIONS else f"{value_of(name[0]):g}", formula)


@cache
def _options_in(formula: str) -> tuple[str, ...]:
    names = dict.fromkeys(NAME.findall(formula))
    return tuple(name for name in names if name not in SPECIAL and not name.startswith(OURS))


@cache
def _parsed(formula: str) -> ast.expr:
    return ast.parse(formula, mode="eval").body


def _computed(node: ast.expr, value_of: Callable[[str], Any]) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name() | ast.Attribute():
            return value_of(ast.unparse(node))
        case ast.Call(func=ast.Name(id=name), args=arguments):
            return FUNCTIONS[name](*(_computed(each, value_of) for each in arguments))
        case ast.BinOp(left=left, op=operator, right=right):
            one, other = _computed(left, value_of), _computed(right, value_of)
            if isinstance(operator, ast.Add | ast.Sub):
                return one + other if isinstance(operator, ast.Add) else one - other
            return one * other if isinstance(operator, ast.Mult) else one / other
    raise ValueError(ast.unparse(node))


def only(option: str, *allowed: Any, why: str) -> Rule:
    """Return a rule that refuses every other value of an option, because of `why`.

    A function among the `allowed` values gets the job and returns a value.
    """

    def check(job: Any) -> None:  # a Job, whose file imports this one
        if job[option] not in [each(job) if callable(each) else each for each in allowed]:
            raise Untranslatable(why)

    return Rule("", option, by=check, where="check")
