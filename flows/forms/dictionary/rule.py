"""A rule makes a parameter here of options elsewhere: a formula, which is also the text that people read, or words."""

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
"""Names in formulas that are no option: numbers of the run and of its plan."""
OURS = ("algo.batch_size", "algo.update.", "algo.samples_per_prompt")
"""Names in formulas that are parameters here."""


class Untranslatable(Exception):
    """Options that have no counterpart at these values; the text says why, and what to do instead."""


class Unused(Exception):
    """Options that do nothing in their own library at these values. The text says why."""


class Null(enum.Enum):
    """The value that clears a parameter whose default is not empty, unlike None, which is no value at all."""

    NULL = "null"


NULL = Null.NULL


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """How a parameter here follows from options elsewhere.

    `formula` is a name, or arithmetic of names: options, parameters here, and `SPECIAL` numbers. With `words` it is a
    single option, whose value is looked up. With `by` it lists the options that the function reads; those after a bar
    only matter to others, and `words` are what the function looks up. Rules of the same parameter are alternatives:
    the first that has a value counts.

    `when`: whether the rule counts for a job; `otherwise` is the reason if it does not. `whole`: whether arithmetic
    must give a whole number, is rounded up to one, or may give any number. `where`: the value belongs into the
    parameter file, or is stated for a call in a plan, or in a play.
    """

    ours: str
    formula: str
    note: str = ""
    words: Mapping[Any, Any] = field(default_factory=dict)
    by: Callable[[Any], Any] | None = None  # of a Job, whose file imports this one
    when: Callable[[Any], bool] | None = None
    otherwise: str = ""
    whole: Literal["exactly", "about", "no"] = "exactly"
    where: Literal["file", "plan", "play", "check"] = "file"

    @property
    def options(self) -> tuple[str, ...]:
        """The options that the rule reads, in their order.

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
        """Whether the value differs from the option's own by arithmetic."""
        return self.by is None and not self.words and not NAME.fullmatch(self.formula)

    @property
    def arithmetic(self) -> str:
        """The arithmetic as the page and the messages state it; empty for a value that can be copied.

        >>> Rule("play.max_turns", "rounds + 1", "TRL counts rounds of calls").arithmetic
        'play.max_turns = rounds + 1: TRL counts rounds of calls'
        """
        if not self.is_arithmetic:
            return ""
        is_same = self.ours in self.options  # OpenRLHF has names that are ours, too
        formula = self.formula.replace(self.ours, f"their {self.ours}") if is_same else self.formula
        return f"{self.ours} = {formula}" + (f": {self.note}" if self.note else "")


def computed(formula: str, value_of: Callable[[str], Any]) -> Any:
    """Return the value of a formula; `value_of` has the values of its names.

    >>> computed("a.b * 2 / max(c, 1)", {"a.b": 6, "c": 4}.__getitem__)
    3.0
    """
    return _computed(_parsed(formula), value_of)


def written(formula: str, value_of: Callable[[str], Any]) -> str:
    """Return a formula with the values in place of the names.

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
