"""Reads options from a shell script that starts a trainer: `a.b=1` as in Hydra, and `--flag value`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Any

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.yaml_text import parse_yaml
from prefect_rlhf.flows.forms.dictionary.rule import computed

PROGRAM = re.compile(r"(?:.*[./])?(openrlhf\.cli\.train_\w+|main_ppo\w*|sft_trainer\w*|fsdp_sft_trainer|trl|\w+\.py)$")
MOST_ROUNDS = 4  # of replacing variables by values that have variables
_ASSIGNMENT = re.compile(r"^\s*(?:export\s+|readonly\s+)?([A-Za-z_]\w*)=(\"[^\"]*\"|'[^']*'|[^\s()]*)\s*$")
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?::?-([^{}$]*))?\}|([A-Za-z_]\w*))")
_ARITHMETIC = re.compile(r"\$\(\(([\d\s*+/()-]+)\)\)")
_OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_]\w*(?:\.\w+)+)=(.*)", re.DOTALL)
_WORD = re.compile(r"(?:\"[^\"]*\"|'[^']*'|[^\s\"'])+")


def options_of_script(text: str) -> tuple[dict[str, Any], str]:
    """Return the options and the name of the program that gets them; the name is empty if the script has no program.

    >>> options_of_script("N=$((2 * 4))\\npython3 -m verl.trainer.main_ppo rollout.n=${N} data.train_files=$HOME/a")
    ({'rollout.n': 8, 'data.train_files': '~/a'}, 'main_ppo')
    """
    lines = re.sub(r"\\[ \t]*\n", " ", re.sub(r"(?m)^\s*#.*\n?", "", text)).splitlines()
    variables = {"HOME": "~"}
    options: dict[str, Any] = {}
    program = ""
    for line in lines:
        plain = _without_variables(line, variables)
        if assigned := _ASSIGNMENT.match(plain):
            variables[assigned[1]] = assigned[2].strip("'\"")
            continue
        words = _words(plain)
        named = [place for place, word in enumerate(words) if PROGRAM.match(word)]
        start = 0 if words and words[0].startswith("--") else named[0] + 1 if named else len(words)
        found = _overrides(words) | _flags(words[start:])
        options |= found
        if named and (found or not program):
            program = _name_of(words, named[0])
    return options, program


def _without_variables(line: str, variables: dict[str, str]) -> str:
    for _ in range(MOST_ROUNDS):
        before = line
        line = _VARIABLE.sub(lambda name: variables.get(name[1] or name[3], _unquoted(name[2]) or name[0]), line)
        line = _ARITHMETIC.sub(lambda sum_: f"{_sum(sum_[1]):g}", line)
        if line == before:
            break
    return line


def _unquoted(text: str | None) -> str:
    return (text or "").strip("'\"")


def _sum(text: str) -> float:
    try:
        return float(computed(" ".join(text.split()), lambda name: 0))
    except (SyntaxError, ValueError, ZeroDivisionError, MemoryError, RecursionError):
        return 0.0


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:  # quotes inside of quotes, by a variable
        return [word.replace('"', "").replace("'", "") for word in _WORD.findall(line)]


def _name_of(words: Sequence[str], place: int) -> str:
    match = PROGRAM.match(words[place])
    name = match[1].removeprefix("openrlhf.cli.") if match else ""
    return f"trl {words[place + 1]}" if name == "trl" and len(words) > place + 1 else name


def _overrides(words: Sequence[str]) -> dict[str, Any]:
    found = (_OVERRIDE.fullmatch(word) for word in words)
    return {match[1]: _value(match[2]) for match in found if match}


def _flags(words: Sequence[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            options[name] = _value(value) if equals else True
        elif name and not _OVERRIDE.fullmatch(word):
            before = options[name]
            options[name] = _value(word) if before is True else [*_listed(before), _value(word)]
    return {name: value for name, value in options.items() if name}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _value(text: str) -> Any:
    try:
        return parse_yaml("", text, text)
    except InvalidInput:
        return text
