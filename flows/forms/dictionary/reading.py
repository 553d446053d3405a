"""Reads another library's options from YAML, JSON or a shell script, and tells which library they belong to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect_rlhf.errors.errors import InvalidInput, Missing
from prefect_rlhf.files.yaml_text import parse_yaml, read_text
from prefect_rlhf.flows.forms.dictionary import openrlhf_options, trl_options, verl_options
from prefect_rlhf.flows.forms.dictionary.dialect import NAMES, Dialect, Library
from prefect_rlhf.flows.forms.dictionary.shell_script import options_of_script

FIELD = "FILE"
EXPECTED = "YAML or JSON of the options of TRL, verl or OpenRLHF, or a shell script that passes them"
SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")
RARER: Mapping[str, str] = {"rloo": "grpo", "kto": "dpo"}
"""Trainers that are recognised only if an option distinguishes them from the usual trainer with nearly the same
options."""
LEAST_KNOWN = 0.25  # share of a file's options; below it, the file is of something else
SHOWN = 4  # options of a file, in a message
PROGRAMS: Mapping[str, tuple[Library, str | None]] = {
    "main_ppo": ("verl", None),
    "train_ppo_ray": ("openrlhf", None),
    "train_dpo": ("openrlhf", "dpo"),
    "train_sft": ("openrlhf", "sft"),
    "train_rm": ("openrlhf", "reward"),
    **{f"trl {name}": ("trl", name) for name in ("grpo", "rloo", "dpo", "kto", "sft", "reward")},
}
"""Programs that a script may call, with their library, and their trainer if it does not depend on options."""
NOT_TRANSLATED = "a trainer of verl that is translated: its PPO trainer, which has actor_rollout_ref and algorithm"
Options = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Source:
    """A file of options: `options` as written there and, for a script, the program that gets them."""

    file: Path
    options: Mapping[str, Any]
    program: str = ""


def read_source(file: Path) -> Source:
    """Return the options of a file. Raises InvalidInput for any other content."""
    text, program = read_text(FIELD, file), ""
    if file.suffix in SCRIPTS:
        found, program = options_of_script(text)
    elif file.suffix == ".py":
        raise InvalidInput(FIELD, str(file), f"{EXPECTED}; a Config in Python writes them: config.to_json_string()")
    else:
        found = parse_yaml(FIELD, str(file), text)
    if not isinstance(found, Mapping) or not found:
        raise InvalidInput(FIELD, str(file), EXPECTED)
    return Source(file, {str(key): value for key, value in found.items()}, program)


def read_dialect(
    source: Source, library: Library | None = None, algorithm: str | None = None
) -> tuple[Dialect, Options]:
    """Return the trainer that the options belong to, and the options by its own names.

    Raises InvalidInput for options that fit no trainer, or several.
    """
    named, trainer = PROGRAMS.get(source.program, (None, None))
    asked = [only] if (only := library or named) else list(NAMES)
    every = {name: [(one, _by_names_of(one, source.options)) for one in _dialects(name)] for name in asked}
    scores = {name: max(_share_known(*one) for one in fitting) for name, fitting in every.items()}
    best = [name for name, score in scores.items() if score == max(scores.values()) >= LEAST_KNOWN]
    if not best:
        raise InvalidInput(FIELD, str(source.file), f"{EXPECTED}; it has {_few(source.options)}")
    if len(best) > 1:
        raise Missing("--from", f"{' or '.join(best)}: {_few(source.options)} are options of each")
    if best[0] == "verl":
        _check_program(source)
    return _trainer(every[best[0]], best[0], algorithm or trainer)


def _check_program(source: Source) -> None:
    """Raise InvalidInput for options of another program of verl, such as its supervised trainer."""
    groups = {verl_options.group_of(name) for name in source.options}
    if not groups & {"actor_rollout_ref", "algorithm", "critic"}:
        raise InvalidInput(FIELD, str(source.file), NOT_TRANSLATED)


def _trainer(
    fitting: Sequence[tuple[Dialect, Options]], library: Library, algorithm: str | None
) -> tuple[Dialect, Options]:
    """Return the trainer of a library that an algorithm names, or else that the options tell."""
    names = [one.trainer for one, _ in fitting]
    if algorithm is not None and algorithm not in names:
        raise InvalidInput("--algorithm", algorithm, f"one of {', '.join(names)}, the trainers of {NAMES[library]}")
    scores = {one.trainer: sum(map(one.is_known_by, options)) for one, options in fitting}
    best = {algorithm} if algorithm else {name for name, score in scores.items() if score == max(scores.values())}
    best -= {name for name, usual in RARER.items() if usual in best}
    if algorithm is None and library == "verl":
        best = {verl_options.trainer_of(fitting[0][1])}
    if algorithm is None and library == "openrlhf" and "ppo" in best:
        best = {openrlhf_options.trainer_of(fitting[0][1])}
    if len(best) > 1:
        raise Missing("--algorithm", f"{' or '.join(name for name in names if name in best)}: the options fit each")
    return next(each for each in fitting if each[0].trainer in best)


def _dialects(library: Library) -> tuple[Dialect, ...]:
    tables = {"trl": trl_options.dialects, "verl": verl_options.dialects, "openrlhf": openrlhf_options.dialects}
    return tables[library]()


def _share_known(dialect: Dialect, options: Options) -> float:
    return sum(map(dialect.knows, options)) / max(len(options), 1)


def _few(options: Mapping[str, Any]) -> str:
    names = list(options)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN + 1 else ""
    return ", ".join(names[: SHOWN if more else SHOWN + 1]) + more


def _by_names_of(dialect: Dialect, raw: Mapping[str, Any]) -> Options:
    """Return the options by a trainer's own names: leaves of groups, without prefixes, with new names for old ones."""
    options: Options = {}
    old = openrlhf_options.old_names(dialect.trainer) if dialect.library == "openrlhf" else {}
    for name, value in _leaves(dialect, raw):
        for each in old.get(name, (name,)):
            group, _, key = each.rpartition(".")
            if dialect.defaults.get(group) == {}:  # an option that is a group of any names
                options[group] = {**options.get(group, {}), key: value}
            else:
                options[each] = value
    return options


def _leaves(dialect: Dialect, group: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in group.items():
        path = f"{prefix}.{key}".lstrip(".")
        name = verl_options.plain(path) if dialect.library == "verl" else path
        if key == "_target_":
            continue
        is_value = dialect.is_known_by(name) or (dialect.library == "trl" and dialect.knows(name))
        if isinstance(value, Mapping) and value and not is_value:
            yield from _leaves(dialect, value, path)
        else:
            yield name, value
