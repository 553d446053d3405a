"""A dialect: the options of a library's trainer, and their translation."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from prefect_rlhf.flows.forms.dictionary.rule import Rule

_T = TypeVar("_T")
Library = str
NAMES: Mapping[Library, str] = MappingProxyType({"trl": "TRL", "verl": "verl", "openrlhf": "OpenRLHF"})
"""The libraries, with the names that people read."""
VERSIONS: Mapping[Library, str] = MappingProxyType({"trl": "1.16", "verl": "0.9", "openrlhf": "0.11"})
"""The versions whose options and defaults the tables have."""


class Refusal(NamedTuple):
    """Why an option has no counterpart. Its default may need a mention too, if it has an effect."""

    reason: str
    by_default: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Dialect:
    """A trainer of a library."""

    library: Library
    trainer: str
    defaults: Mapping[str, Any]
    """All its options."""
    rules: tuple[Rule, ...]
    refused: Mapping[str, Refusal]
    """Options without a counterpart, which are fine at their default. A key may be a pattern such as `trainer.*`."""
    without_effect: Mapping[str, str]
    """Options that need no counterpart; a key may be a pattern too."""
    flow: str
    needs: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    own: frozenset[str] = frozenset()
    complete: Callable[[dict[str, Any], int], Mapping[str, Any]] = lambda values, devices: {}

    @property
    def name(self) -> str:
        """The library and the trainer, in words."""
        return f"{NAMES[self.library]}'s {self.trainer.upper() if self.trainer != 'reward' else 'reward model'}"

    def rules_of(self, option: str) -> list[Rule]:
        """Return an option's rules: those that depend on its value alone, or else the arithmetic that includes it."""
        rules = [rule for rule in self.rules if option in rule.stands_for]
        own = [rule for rule in rules if not rule.is_arithmetic or rule.options == (option,)]
        return own or rules

    def options_of(self, rule: Rule) -> tuple[str, ...]:
        """Return the options that a rule decides: the options of its arithmetic that have no rule of their own."""
        return tuple(option for option in rule.stands_for if rule in self.rules_of(option))

    def refusal_of(self, option: str) -> Refusal | None:
        """Return why an option has no counterpart; None if it may have one."""
        found: Refusal | None = _matching(self.refused, option)
        return found

    def effect_of(self, option: str) -> str | None:
        """Return why an option needs no counterpart; None if it may need one."""
        found: str | None = _matching(self.without_effect, option)
        return found

    def is_known_by(self, option: str) -> bool:
        """Whether an option tells this trainer apart from others of its library."""
        return option in self.own or option in self.defaults or option in _options_of_rules(self)

    def knows(self, option: str) -> bool:
        """Whether the trainer or an older version of it has the option."""
        return self.is_known_by(option) or self.refusal_of(option) is not None or self.effect_of(option) is not None


@cache
def _options_of_rules(dialect: Dialect) -> frozenset[str]:
    return frozenset(option for rule in dialect.rules for option in rule.options)


def _matching(table: Mapping[str, _T], option: str) -> _T | None:
    if option in table:
        return table[option]
    return next((value for key, value in table.items() if "*" in key and fnmatchcase(option, key)), None)


def keys(table: Mapping[str, str]) -> dict[str, str]:
    """Invert a table from reasons to options: return the reason of each option.

    >>> keys({"every step is logged": "logging_steps logging_strategy"})["logging_steps"]
    'every step is logged'
    """
    return {option: reason for reason, options in table.items() for option in options.split()}


@cache
def known(library: Library) -> Mapping[str, Mapping[str, Any]]:
    """Return all options of a library's trainers with their defaults.

    `python -m tests.known_options` reads them from the packages.
    """
    text = (files(__package__) / "known_options.json").read_text()
    return MappingProxyType(json.loads(text)[library])
