"""The tables of docs/coming_from.md that follow from code: the arithmetic, and the defaults that differ.

`python -m tests.foreign_tables` writes them anew.
"""

import re
from pathlib import Path

from prefect_rlhf.flows.forms.dictionary.answer import every_dialect
from prefect_rlhf.flows.forms.dictionary.dialect import NAMES
from prefect_rlhf.flows.forms.dictionary.job import Job
from prefect_rlhf.flows.forms.dictionary.settings_here import default_of
from prefect_rlhf.flows.forms.dictionary.translation import translation
from prefect_rlhf.flows.forms.dictionary.written import plain

PAGE = Path(__file__).parents[1] / "docs" / "coming_from.md"
OF_ROLES = ("actor_optimizer", "critic_optimizer")
COMPARED = {
    "grpo": {
        "trl": {},
        "verl": {"algorithm.adv_estimator": "grpo"},
        "openrlhf": {"algo.advantage.estimator": "group_norm"},
    },
    "ppo": {"verl": {}, "openrlhf": {}},
}
"""The algorithms whose defaults the page compares, and what a file states to get them."""
NAMES_OF_THE_FILE = re.compile(r"(path|split_column|head|new_head|text_column)$")


def between(name, text):
    """The lines between the marks of a table on the page."""
    return re.search(rf"<!-- {name} -->\n(.*?)<!-- end of {name} -->", text, re.DOTALL)


def replaced(library):
    """Each rule of a library with the options that it stands for."""
    dialects = [one for one in every_dialect() if one.library == library]
    return {(rule, option) for one in dialects for rule in one.rules for option in one.options_of(rule)}


def arithmetic():
    """A row for each formula: the options that it is about, and the formula."""
    rows = {}
    for dialect in every_dialect():
        for rule in dialect.rules:
            if rule.arithmetic and not any(role in rule.ours for role in OF_ROLES):
                rows.setdefault(rule.arithmetic, dialect.options_of(rule))
    lines = [f"| {', '.join(f'`{option}`' for option in options)} | {text} |" for text, options in rows.items()]
    return "\n".join(["| option | here |", "|---|---|", *lines, ""])


def theirs(flow, library, stated):
    """The defaults of a library that are not ours, as a cell for each of our parameters."""
    (dialect,) = [one for one in every_dialect() if (one.library, one.trainer) == (library, flow)]
    cells = {}
    for outcome in translation(Job.of(dialect, stated)).of_defaults:
        for made in outcome.made:
            if not NAMES_OF_THE_FILE.search(made.path):
                option = f"`{outcome.option}` {plain(outcome.value)}" if outcome.option else ""
                value = "" if option.endswith(f" {plain(made.value)}") else f"{plain(made.value)}"
                cells[made.path] = ": ".join(filter(None, (option, value)))
    return cells


def defaults(flow):
    """A row for each of our parameters whose default a library does not share."""
    columns = {library: theirs(flow, library, stated) for library, stated in COMPARED[flow].items()}
    paths = sorted({path for cells in columns.values() for path in cells})
    head = ["parameter", "ours", *(NAMES[library] for library in columns)]
    lines = []
    for path in paths:
        cells = (f"`{path}`", plain(default_of(flow, path)), *(each.get(path, "") for each in columns.values()))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *lines, ""])


def tables():
    """The text of each table by the name of its marks."""
    return {"arithmetic": arithmetic(), **{f"defaults of {flow}": defaults(flow) for flow in COMPARED}}


if __name__ == "__main__":
    text = PAGE.read_text()
    for name, table in tables().items():
        found = between(name, text)
        text = text[: found.start(1)] + table + text[found.end(1) :]
    PAGE.write_text(text)
