"""Compares two models on the same prompts, with a paired interval for each metric's difference.

Both models answer a prompt with the same random numbers, and differences are taken prompt by prompt, so hard prompts
don't widen an interval. The report shows the prompts that differ most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect import flow
from prefect.artifacts import create_markdown_artifact, create_table_artifact

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.atomic_file import write_atomically
from prefect_rlhf.flows.forms.evaluation import call_name
from prefect_rlhf.tasks.data.rollouts import step_files
from prefect_rlhf.tasks.reporting.publish import publish
from prefect_rlhf.tasks.rl.evaluation.sets import ANSWER, SetSettings, prompt_values

if TYPE_CHECKING:
    from prefect_rlhf.tasks.rl.evaluation.estimators import Floats
    from prefect_rlhf.tasks.rl.evaluation.intervals import Interval

FOLDER = "against"  # in the folder of the first model's run: a file for each set, and the page
PAGE = "against.md"
LINES = 20  # of a set on the page
LONGEST = 600  # characters of a text on the page
OF_TOKENS = ("response_tokens", "truncated")
"""Columns that depend on the tokenizer."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A metric of a set: both models' means, and the second minus the first over the same prompts."""

    of_set: str
    metric: str
    first: float
    second: float
    difference: Interval
    prompts: int

    def __str__(self) -> str:
        means = f"{self.first:.3g} -> {self.second:.3g}"
        return f"{self.of_set} {self.metric}: {means}, {self.difference.as_difference}"

    @property
    def row(self) -> dict[str, str]:
        """This metric's row of the table."""
        found = self.difference
        return {
            "set": self.of_set,
            "metric": self.metric,
            "first": f"{self.first:.4g}",
            "second": f"{self.second:.4g}",
            "difference": f"{found.mean:+.4g}",
            "95%": f"{found.low:+.4g} to {found.high:+.4g}",
            "prompts": str(self.prompts),
        }


@dataclass(frozen=True, slots=True)
class Answered:
    """The rows of a set that both models answered: columns of shape [P, N], with the same prompts in the same order.

    Raises InvalidInput without a prompt that both answered.
    """

    name: str
    first: Mapping[str, Any]
    second: Mapping[str, Any]

    @classmethod
    def read(cls, name: str, first: Path, second: Path, samples: int) -> Answered:
        """Read a set from the folders of two runs. Prompts that are too long for either model are left out."""
        tables = [_columns(step_files(folder, call_name(name))[-1], samples) for folder in (first, second)]
        shared = set(tables[0]["row_id"]) & set(tables[1]["row_id"])
        if not shared:
            raise InvalidInput(f"evaluation.{name}", "no prompt", "prompts that both models answer")
        kept = ([place for place, row in enumerate(table["row_id"]) if row in shared] for table in tables)
        return cls(
            name,
            *(
                {key: [column[place] for place in places] for key, column in table.items()}
                for table, places in zip(tables, kept, strict=True)
            ),
        )

    def differences(self, settings: SetSettings, *, same_tokens: bool) -> list[Difference]:
        """Return the difference of each metric; lengths in tokens only if the models have the same tokens."""
        from prefect_rlhf.tasks.rl.evaluation.intervals import interval  # here: --help needs no numpy

        values = [_values(table, settings, same_tokens=same_tokens) for table in (self.first, self.second)]
        found = []
        for metric in values[0].keys() & values[1].keys():
            one, other = values[0][metric], values[1][metric]
            both = other - one  # NaN where one of them has no value
            if (difference := interval(both)) is not None:
                known = both == both  # noqa: PLR0124  false for NaN
                means = float(one[known].mean()), float(other[known].mean())
                found.append(Difference(self.name, metric, *means, difference, int(known.sum())))
        order = [*values[0]]
        return sorted(found, key=lambda each: order.index(each.metric))

    def rows(self) -> list[dict[str, Any]]:
        """Return a row per prompt with the first sample's texts, the largest difference in mean reward first.

        Prompts without a reward from both models come last.
        """
        made = []
        for place, row_id in enumerate(self.first["row_id"]):
            rewards = [_mean(table["reward"][place]) for table in (self.first, self.second)]
            made.append(
                {
                    "row_id": row_id,
                    "prompt": self.first["user_message"][place][0],
                    "first": self.first["response"][place][0],
                    "second": self.second["response"][place][0],
                    "first_reward": rewards[0],
                    "second_reward": rewards[1],
                    "difference": rewards[1] - rewards[0],
                }
            )
        return sorted(made, key=lambda row: (row["difference"] != row["difference"], -abs(row["difference"])))


def _columns(file: Path, samples: int) -> dict[str, list[Any]]:
    """Return the columns of a set's rows by prompt: of each the values of its samples; `row_id` once."""
    import pyarrow.parquet as pq  # here: --help needs no Parquet

    table = pq.read_table(file)
    names = [one for one in ("user_message", "response", "reward", *OF_TOKENS, ANSWER) if one in table.column_names]
    columns = {name: table.column(name).to_pylist() for name in names}
    ids = table.column("row_id").to_pylist()[::samples]
    by_prompt = {name: [v[at : at + samples] for at in range(0, len(v), samples)] for name, v in columns.items()}
    return {"row_id": ids, **by_prompt}


def _values(table: Mapping[str, Any], settings: SetSettings, *, same_tokens: bool) -> dict[str, Floats]:
    """Return [P] of each metric: its value of each prompt."""
    import numpy as np  # here: --help needs no numpy

    from prefect_rlhf.tasks.rl.evaluation.estimators import avg

    answers = np.array(table[ANSWER], dtype=np.int64) if ANSWER in table else None
    values = prompt_values(np.array(table["reward"], dtype=np.float64), answers, settings)
    if same_tokens:
        values |= {name: avg(np.array(table[name], dtype=np.float64)) for name in OF_TOKENS}
    return values


def _mean(numbers: Sequence[float | None]) -> float:
    known = [number for number in numbers if number is not None and not isnan(number)]  # runs until 2026-11 wrote NaN
    return sum(known) / len(known) if known else float("nan")


def page(names: tuple[str, str], differences: Sequence[Difference], sets: Sequence[Answered], remark: str) -> str:
    """Return the page: all differences, and for each set the prompts that differ most."""
    lines = [f"# {names[0]} (first) and {names[1]} (second)", "", *([remark, ""] if remark else [])]
    lines += [f"- {each}" for each in differences]
    for one in sets:
        lines += ["", f"## {one.name}: where they differ most"]
        for row in [row for row in one.rows() if row["difference"]][:LINES]:
            rewards = f"{row['first_reward']:.4g} -> {row['second_reward']:.4g}"
            lines += ["", f"### row {row['row_id']}: reward {rewards}", "", *_quoted(row["prompt"])]
            lines += ["", f"first ({names[0]}):", "", *_quoted(row["first"])]
            lines += ["", f"second ({names[1]}):", "", *_quoted(row["second"])]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> list[str]:
    """Return a text as a block that Markdown shows as it is; of a long text, its start and its end."""
    half = LONGEST // 2
    short = text if len(text) <= LONGEST else f"{text[:half]} … {text[-half:]}"
    return [f"    {line}" for line in short.splitlines() or ["(empty)"]]


def write_against(folder: Path, sets: Sequence[Answered], text: str) -> Path:
    """Write the page and a Parquet file of each set's prompts into a run folder; return the page's path."""
    import pyarrow as pa  # here: --help needs no Parquet
    import pyarrow.parquet as pq

    (folder / FOLDER).mkdir(exist_ok=True)
    for one in sets:
        table = pa.Table.from_pylist(one.rows())
        write_atomically(folder / FOLDER / f"{one.name}.parquet", partial(pq.write_table, table))
    write_atomically(folder / FOLDER / PAGE, lambda part: part.write_text(text, encoding="utf-8"))
    return folder / FOLDER / PAGE


@flow(name="compare", log_prints=False)
def show_against(rows: list[dict[str, str]], text: str) -> None:
    """Show two models' differences on the page of a flow run: the table, and the most different prompts."""
    publish(create_table_artifact, rows, key="against", description="Two models on the same prompts")
    publish(create_markdown_artifact, text, key="against-lines", description="Where two models differ most")
