"""Reads the options of another library: YAML or JSON of them, or a shell script with its command; and says which."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.yaml_text import parse_yaml, read_text
from prefect_rlhf.flows.forms.dictionary import openrlhf_options, trl_options, verl_options
from prefect_rlhf.flows.forms.dictionary.dialect import NAMES, Dialect, Library

FIELD = "FILE"
EXPECTED = "YAML or JSON of the options of TRL, verl or OpenRLHF, or a shell script that passes them"
SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")
RARER = {"rloo": "grpo", "kto": "dpo"}
"""Trainers that are read only if something tells them from the usual one with nearly the same options."""
_PROGRAM = re.compile(r"(?:.*[./])?(?:openrlhf\.cli\.train_\w+|main_ppo|trl|\w+\.py)$")
_ASSIGNMENT = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=(\S+|'[^']*'|\"[^\"]*\")\s*$")
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?::?-([^}]*))?\}|([A-Za-z_]\w*))")
_OVERRIDE = re.compile(r"[+~]{0,2}([A-Za-z_]\w*(?:\.\w+)+)=(.*)", re.DOTALL)
Options = dict[str, Any]


def read_options(file: Path) -> Mapping[str, Any]:
    """Return the options of a file as it has them. Raises InvalidInput for any other content."""
    text = read_text(FIELD, file)
    if file.suffix in SCRIPTS:
        found: Any = options_of_script(text)
    elif file.suffix == ".py":
        raise InvalidInput(FIELD, str(file), f"{EXPECTED}; of a Config in Python, print(config.to_json_string())")
    else:
        found = parse_yaml(FIELD, str(file), text)
    if not isinstance(found, Mapping) or not found:
        raise InvalidInput(FIELD, str(file), EXPECTED)
    return {str(key): value for key, value in found.items()}


def options_of_script(text: str) -> Options:
    """Return the options that a shell script passes to a trainer: `a.b=1` of Hydra, and `--flag value`.

    >>> options_of_script("N=8\\npython3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.n=$N")
    {'actor_rollout_ref.rollout.n': 8}
    """
    lines = re.sub(r"\\\s*\n", " ", re.sub(r"(?m)^\s*#.*$", "", text)).splitlines()
    variables: dict[str, str] = {}
    options: Options = {}
    for line in lines:
        plain = _VARIABLE.sub(lambda name: variables.get(name[1] or name[3], name[2] or name[0]), line)
        if assigned := _ASSIGNMENT.match(plain):
            variables[assigned[1]] = assigned[2].strip("'\"")
            continue
        try:
            words = shlex.split(plain, comments=True)
        except ValueError:
            continue
        options |= _overrides(words) | _flags(words)
    return options


def _overrides(words: Sequence[str]) -> Options:
    found = (_OVERRIDE.fullmatch(word) for word in words)
    return {match[1]: _value(match[2]) for match in found if match and not match[0].startswith("~")}


def _flags(words: Sequence[str]) -> Options:
    """Return the flags after the program's name; flags before it are of the launcher."""
    starts = [place for place, word in enumerate(words) if _PROGRAM.match(word)]
    options: Options = {}
    name = None
    for word in words[starts[0] + 1 :] if starts else ():
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            options[name] = _value(value) if equals else True
        elif name is not None and options[name] is True:
            options[name] = _value(word)
        elif name is not None:
            options[name] = [*(options[name] if isinstance(options[name], list) else [options[name]]), _value(word)]
    return options


def _value(text: str) -> Any:
    try:
        return parse_yaml(FIELD, text, text)
    except InvalidInput:
        return text


def read_dialect(
    file: Path, raw: Mapping[str, Any], library: Library | None = None, algorithm: str | None = None
) -> tuple[Dialect, Options]:
    """Return the trainer that the options are of, and the options by its own names.

    Raises InvalidInput for options of no trainer, and for those that fit several.
    """
    asked = [library] if library else list(NAMES)
    every = {name: [(one, _by_names_of(one, raw)) for one in _dialects(name)] for name in asked}
    scores = {name: max(_known(*one) for one in every[name]) for name in asked}
    best = [name for name, score in scores.items() if score == max(scores.values()) > 0]
    if not best:
        raise InvalidInput(FIELD, str(file), f"{EXPECTED}; it has {_few(list(raw))}")
    if len(best) > 1:
        raise InvalidInput("--from", None, f"{' or '.join(best)}: {_few(list(raw))} are options of each")
    return _trainer(every[best[0]], best[0], algorithm)


def _trainer(
    fitting: Sequence[tuple[Dialect, Options]], library: Library, algorithm: str | None
) -> tuple[Dialect, Options]:
    """Return the trainer of a library that an algorithm names, or else that the options tell."""
    names = [one.trainer for one, _ in fitting]
    if algorithm is not None:
        if algorithm not in names:
            raise InvalidInput("--algorithm", algorithm, f"one of {', '.join(names)}, the trainers of {NAMES[library]}")
        return next(each for each in fitting if each[0].trainer == algorithm)
    if library == "verl":
        asked = verl_options.trainer_of(fitting[0][1])
        return next(each for each in fitting if each[0].trainer == asked)
    scores = {one.trainer: sum(map(one.is_known_by, options)) for one, options in fitting}
    best = {name for name, score in scores.items() if score == max(scores.values())}
    best -= {name for name, usual in RARER.items() if usual in best}
    if library == "openrlhf" and "ppo" in best:
        best = {openrlhf_options.trainer_of(fitting[0][1])}
    if len(best) > 1:
        raise InvalidInput("--algorithm", None, f"{' or '.join(n for n in names if n in best)}: the options fit each")
    return next(each for each in fitting if each[0].trainer in best)


def _dialects(library: Library) -> tuple[Dialect, ...]:
    tables = {"trl": trl_options, "verl": verl_options, "openrlhf": openrlhf_options}
    return tables[library].dialects()


def _known(dialect: Dialect, options: Options) -> int:
    return sum(map(dialect.knows, options))


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 5 else ""  # noqa: PLR2004
    return ", ".join(names[: 4 if more else 5]) + more


def _by_names_of(dialect: Dialect, raw: Mapping[str, Any]) -> Options:
    """Return the options by a trainer's own names: leaves of groups, without prefixes, with new names for old ones."""
    options: Options = {}
    old = openrlhf_options.old_names(dialect.trainer) if dialect.library == "openrlhf" else {}
    for name, value in _leaves(dialect, raw):
        for each in old.get(name, (name,)):
            options[each] = value
    return options


def _leaves(dialect: Dialect, group: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in group.items():
        path = f"{prefix}.{key}".lstrip(".")
        name = verl_options.plain(path) if dialect.library == "verl" else path
        if key == "_target_":
            continue
        is_group = isinstance(value, Mapping) and value and not dialect.is_known_by(name)
        if is_group and not (dialect.library == "trl" and dialect.knows(name)):
            yield from _leaves(dialect, value, path)
        else:
            yield name, value
