"""Writes a translation: as a table for a person, and as a parameter file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.errors.in_short import one_line
from prefect_rlhf.files.yaml_text import parse_yaml
from prefect_rlhf.flows.forms.dictionary.dialect import NAMES, VERSIONS
from prefect_rlhf.flows.forms.dictionary.rule import NULL
from prefect_rlhf.flows.forms.dictionary.settings_here import ROWS
from prefect_rlhf.flows.forms.dictionary.translation import Made, Outcome, Translation

WIDTH = 42  # of the column of options; a longer option makes its line longer
MOST_OF_A_VALUE = 60  # characters of a value in the table
HEADS = {
    "translated": "translated",
    "without effect": "without effect here",
    "refused": "refused: not in the file",
    "unknown": "unknown",
}


def table(found: Translation, file: str) -> str:
    """Return lines that tell a person the outcome of each option."""
    dialect, library = found.job.dialect, found.job.dialect.library
    theirs = f"{NAMES[library]} {VERSIONS[library]}"
    numbers = {what: [each for each in found.outcomes if each.what == what] for what in HEADS}
    counts = ", ".join(f"{len(each)} {what}" for what, each in numbers.items() if each)
    lines = [f"{file}: {dialect.name}, {len(found.job.stated)} options: {counts or 'all at their defaults'}"]
    for what, head in HEADS.items():
        named = f" option{'s' if len(numbers[what]) > 1 else ''} of {theirs}" if what == "unknown" else ""
        lines += _section(head + named, numbers[what])
    if left := len(found.job.stated) - len(found.outcomes):
        lines += ["", f"{left} more options have the default of {theirs}"]
    parts = ([each for each in found.of_defaults if each.made], [each for each in found.of_defaults if not each.made])
    lines += _section(f"defaults of {theirs} that are not ours", parts[0])
    lines += _section(f"defaults of {theirs} without a counterpart", parts[1])
    gaps = [f"  {f'{path}: {_short(word)}':{WIDTH}} {what}" for path, (word, what) in found.to_fill_in.items() if what]
    if gaps:
        lines += ["", "to fill in", *gaps]
    return "\n".join(map(one_line, lines))


def _section(head: str, outcomes: Sequence[Outcome]) -> list[str]:
    lines, told = ["", head], set[str]()
    for each in outcomes:
        texts = []
        for made in each.made:
            texts.append(f"{made.path}: as above" if made.path in told and _is_long(made) else _text(made))
            told.add(made.path)
        option = f"{each.option} {_short(each.value)}" if each.option else ""
        lines.append(f"  {option:{WIDTH}} {'; '.join(texts) or each.why}".rstrip())
    return lines if outcomes else []


def _text(made: Made) -> str:
    return f"{made.path}: {_short(made.value)}{made.how}"


def _is_long(made: Made) -> bool:
    return len(_text(made)) > MOST_OF_A_VALUE


def _short(value: Any) -> str:
    text = plain(value)
    return text if len(text) <= MOST_OF_A_VALUE else f"{text[: MOST_OF_A_VALUE - 3]}..."


def plain(value: Any) -> str:
    """Format a value as YAML on a single line.

    >>> plain([1e-6, "a: b"]), plain("two" + chr(10) + "lines")
    ("[1.0e-06, 'a: b']", '"two\\\\nlines"')
    """
    value = None if value is NULL else value
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    text = text.removesuffix("\n").removesuffix("\n...").strip()
    return text if text.isprintable() and _is_read_as(text, value) else json.dumps(value)


def _is_read_as(text: str, value: Any) -> bool:
    """Whether our reader, which has the numbers of JSON, reads a text of PyYAML as the same value."""
    try:
        return bool(parse_yaml("", "", text) == value)
    except InvalidInput:
        return False


def parameter_file(found: Translation, file: str) -> str:
    """Return a parameter file's text, in which each value names the option it comes from."""
    dialect = found.job.dialect
    origins = {path: f"to fill in: {what}" for path, (_, what) in found.to_fill_in.items() if what}
    for each in found.outcomes:
        origins |= {made.path: f"{each.option}{made.how}" for made in each.made if made.path not in origins}
    theirs = f"the default of {NAMES[dialect.library]}"
    for each in found.of_defaults:
        name = f"{each.option}, {theirs}" if each.option else theirs
        origins |= {made.path: f"{name}{made.how}" for made in each.made}
    lines = [f"# From {file}, {dialect.name}. Check it: prefect-rlhf run {found.job.flow} --parameters FILE --dry-run"]
    for each in (*found.outcomes, *(each for each in found.of_defaults if not each.made)):
        if each.what in ("refused", "unknown"):
            why = each.why or f"no option of {NAMES[dialect.library]} {VERSIONS[dialect.library]}"
            lines.append(f"# not translated: {each.option} {_short(each.value)}: {why}")
    return "\n".join([*map(one_line, lines), *_lines(_in_order(found), origins)]) + "\n"


def _in_order(found: Translation) -> dict[str, Any]:
    """Return the parameters with rows and models first."""
    parameters = found.parameters
    first = (ROWS[found.job.flow], "held_out", "actor", "ref", "critic", "reward", "algo")
    return {name: parameters[name] for name in dict.fromkeys((*first, *parameters)) if name in parameters}


def _lines(group: Mapping[str, Any], origins: Mapping[str, str], path: str = "", indent: str = "") -> Iterator[str]:
    for name, value in group.items():
        whole = f"{path}.{name}".lstrip(".")
        origin = f"  # {one_line(origins[whole])}" if whole in origins else ""
        if isinstance(value, dict) and value and whole not in origins:
            yield f"{indent}{name}:"
            yield from _lines(value, origins, whole, f"{indent}  ")
        else:
            yield f"{indent}{name}: {plain(value)}{origin}"
