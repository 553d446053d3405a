"""A job elsewhere: the options in its file, the library's defaults for the others, and the parameters that follow."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from prefect_rlhf.errors.in_short import MOST_CHARACTERS, in_short
from prefect_rlhf.flows.forms.dictionary.dialect import Dialect
from prefect_rlhf.flows.forms.dictionary.rule import (
    NULL,
    OURS,
    SPECIAL,
    Rule,
    Untranslatable,
    Unused,
    computed,
    written,
)
from prefect_rlhf.flows.forms.dictionary.settings_here import default_of, refused_value

REFERENCE = re.compile(r"\$\{(?:oc\.select:)?\s*(\.?[\w.]+)\s*(?:,\s*(.*?))?\}")
"""A value of OmegaConf that is another option's: `${data.max_prompt_length}` or `${oc.select:rollout.n,1}`."""
MOST_REFERENCES = 20  # from one option to another


@dataclass(frozen=True, slots=True)
class Job:
    """A run's options elsewhere. `devices` and `rows` are the run's devices and the dataset's rows, if known."""

    dialect: Dialect
    stated: Mapping[str, Any]
    devices: int = 1
    rows: int | None = None
    completed: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, dialect: Dialect, stated: Mapping[str, Any], devices: int = 1, rows: int | None = None) -> Job:
        """Return a file's job, with options that follow from others, such as TRL's generation batch."""
        plain = cls(dialect, stated, devices, rows)
        values = {option: plain[option] for option in {**dialect.defaults, **stated}}
        return cls(dialect, stated, devices, rows, dialect.complete(values, devices))

    @property
    def flow(self) -> str:
        """The algorithm's name here."""
        return self.dialect.flow

    def __getitem__(self, option: str) -> Any:
        """Return the value of an option, or None if neither the file nor the library has one."""
        if option in self.completed:
            return self.completed[option]
        value = self.stated.get(option, self.dialect.defaults.get(option))
        for _ in range(MOST_REFERENCES):
            if not isinstance(value, str) or "${" not in value:
                return _number(value)
            if reference := REFERENCE.fullmatch(value):
                value = self._referred(option, reference)
            else:
                replaced = REFERENCE.sub(lambda part: str(self._referred(option, part)), value)
                if replaced == value:
                    return value
                value = replaced[:MOST_CHARACTERS]
        return value  # it refers to itself

    def _referred(self, option: str, reference: re.Match[str]) -> Any:
        name, default = reference[1].removeprefix("actor_rollout_ref."), reference[2]
        if name.startswith("."):
            name = option.rpartition(".")[0] + name
        return self.stated.get(name, self.dialect.defaults.get(name, _plain(default)))

    def differs(self, option: str) -> bool:
        """Whether the file sets the option to something else than the library's default."""
        return bool(option in self.stated and self.stated[option] != self.dialect.defaults.get(option))

    def value_of(self, name: str) -> Any:
        """Return the value of a name in a formula: an option, a parameter of ours, or a number of the run."""
        if name == "devices":
            return self.devices
        if name == "steps" or name.startswith(OURS):
            return self.here(name)
        if name in SPECIAL:
            raise Untranslatable(f"{name} is not in the file")
        return self[name]

    def here(self, path: str) -> Any:
        """Return our parameter's value: translated, or else its default. Raises Untranslatable."""
        for rule in self.dialect.rules:
            with suppress(Unused):
                if rule.ours == path and (value := self.made_by(rule)) is not None:
                    return None if value is NULL else value
        if path != "steps":
            return 1 if (default := default_of(self.flow, path)) is None and path.startswith(OURS) else default
        if self.rows is None:
            raise Untranslatable("it depends on the number of steps: state --rows, the rows of the dataset")
        return self.steps_of_a_pass * math.ceil(self.here("epochs") or 1)

    @property
    def steps_of_a_pass(self) -> int:
        """The number of steps in a pass over the data. Raises Untranslatable."""
        if self.rows is None:
            raise Untranslatable("it depends on the steps of an epoch: state --rows, the rows of the dataset")
        return max(1, self.rows // int(self.here("algo.batch_size")))

    def made_by(self, rule: Rule) -> Any:
        """Evaluate a rule; None if an option it needs has no value. Raises Untranslatable and Unused."""
        try:
            value = self._value(rule)
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError) as error:
            seen = {name: self.stated[name] for name in rule.options if name in self.stated}
            raise Untranslatable(f"got {in_short(seen)}, expected values of another kind") from error
        if value not in (None, NULL) and rule.where == "file" and (why := refused_value(self.flow, rule.ours, value)):
            raise Untranslatable(f"{rule.ours}: got {in_short(value)}, expected {why}")
        return value

    def _value(self, rule: Rule) -> Any:
        if rule.when is not None and not rule.when(self):
            raise Unused(rule.otherwise or "it is off")
        if rule.by is not None:
            value = rule.by(self)
        elif rule.words:
            value = _looked_up(rule, self[rule.options[0]])
        elif not rule.is_arithmetic:
            value = self[rule.formula]
        else:
            value = self._computed(rule)
        return value

    def _computed(self, rule: Rule) -> Any:
        values = {name: self[name] for name in rule.options}
        if any(value is None for value in values.values()):
            return None
        for name, value in values.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise Untranslatable(f"{name}: got {in_short(value)}, expected a number")
        try:
            value = computed(rule.formula, self.value_of)
        except ZeroDivisionError as error:
            raise Untranslatable(f"{written(rule.formula, self.value_of)} divides by 0") from error
        if rule.whole == "about":
            return max(1, math.ceil(value - 1e-9))
        if rule.whole == "exactly":
            if abs(value - round(value)) > 1e-9:  # noqa: PLR2004  what floats lose
                remedy = "; state --devices" if "devices" in rule.formula else ""
                raise Untranslatable(
                    f"{rule.ours} = {written(rule.formula, self.value_of)} is not a whole number{remedy}"
                )
            return round(value)
        return value

    def written(self, rule: Rule) -> str:
        """Return a rule's arithmetic in numbers; empty without arithmetic."""
        return written(rule.formula, self.value_of) if rule.is_arithmetic else ""


def _looked_up(rule: Rule, word: Any) -> Any:
    if word is None:
        return None
    known = word if isinstance(word, bool | int | float | str) else str(word)
    if known not in rule.words:
        words = ", ".join(str(each) for each in rule.words)
        raise Untranslatable(f"got {in_short(word)}; only these have a counterpart: {words}")
    return rule.words[known]


def _number(value: Any) -> Any:
    """Return the number of a text such as '1e-6', as shells and quoted YAML have it."""
    if isinstance(value, str) and re.fullmatch(r"[-+]?(\d{1,18}\.?\d{0,18}|\.\d{1,18})([eE][-+]?\d{1,3})?", value):
        return float(value) if re.search("[.eE]", value) else int(value)
    return value


def _plain(text: str | None) -> Any:
    words = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None, None: None}
    return words[text] if text in words else _number(text)
