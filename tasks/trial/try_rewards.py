"""Tries reward functions before any model is built: each is imported and called on a few rows of each dataset.

The rows are the user's own, with a made-up response, in a process that is killed at its deadline. An error that no
response can cure is refused, and so is a function that returns no number for any row. Any other error may come from the
made-up response, so it is only a warning.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from prefect_rlhf.engines.commands import RowSource
from prefect_rlhf.engines.functions.function import HostFunction, HostSettings
from prefect_rlhf.engines.functions.load import at
from prefect_rlhf.engines.functions.scores import RowFailure
from prefect_rlhf.engines.functions.scoring.pool import HostPool, check_columns
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.tasks.data.tokenizer import load_tokenizer
from prefect_rlhf.tasks.host_rewards import HostRewards

Rows = Mapping[int, Mapping[str, Any]]
"""Rows of a dataset by their number, as a function gets them."""
ROWS = 4  # of each dataset
TOKENS = 8  # of a made-up response
ROW_SECONDS = 20.0  # limit of a row's call
QUICK_SECONDS = 5.0  # after a first row that takes longer, no other is tried


class TokenizedSource(RowSource, Protocol):
    """A dataset, with the folder of the tokenizer that makes its tokens."""

    @property
    def tokenizer(self) -> str: ...

    @property
    def num_items(self) -> int: ...


def try_rewards(
    graph: DataflowGraph,
    sources: Mapping[str, TokenizedSource],
    seed: int = 0,
    *,
    items: Mapping[str, Sequence[int]] = MappingProxyType({}),
    calls: bool = True,
) -> list[str]:
    """Import each reward function and call it on rows of the datasets that it scores; return a line per warning.

    `items` are the items of each dataset that may be read, by default all. Functions with `try_first: false` are only
    imported; without `calls`, all are. Raises InvalidInput for a function that cannot be imported, takes other
    arguments, needs a column that rows lack, or fails with every response.
    """
    scored: dict[str, dict[str, None]] = {}  # names of datasets, by the settings of rewards
    for call in graph:
        if call.on_hosts:
            scored.setdefault(call.operation.settings, {})[call.rows.dataset] = None
    rows: dict[str, Rows] = {}
    warnings = []
    for settings, names in scored.items():
        rewards = HostRewards.model_validate_json(settings)
        seconds = min(rewards.deadline_seconds, ROW_SECONDS)
        limits = HostSettings(1, seconds, retries=0, most_failed=1.0, start_seconds=rewards.start_seconds)
        for function in rewards.host_functions:
            with HostPool((function,), limits) as pool:
                (loaded,) = pool.load()
                for name in names:
                    check_columns(function, loaded, tuple(sources[name].column_kinds), name)
                if not calls or not rewards.functions[function.name].try_first:
                    continue
                rows |= {name: made_up_rows(sources[name], seed, items.get(name)) for name in names if name not in rows}
                found = [Tried(function, name, rows[name], pool).remark(loaded.place) for name in names]
                warnings += list(filter(None, found))[:1]  # of held-out rows it says the same again
    return warnings


def made_up_rows(source: TokenizedSource, seed: int, items: Sequence[int] | None = None) -> Rows:
    """Return a few items' rows by row number, as a function gets them: the first and last item, and others drawn by
    `seed`.

    The response repeats tokens of the prompt, so that every token exists; rows that have an answer keep it.
    """
    numbers, per_item = range(source.num_items) if items is None else items, len(source) // source.num_items
    between = random.Random(seed).sample(numbers[1:-1], min(ROWS - 2, max(len(numbers) - 2, 0)))
    items_tried = dict.fromkeys((numbers[0], numbers[-1], *between))
    chosen = [item * per_item + row for item in items_tried for row in range(per_item)][:ROWS]
    read = source.read(chosen)
    if "prompt_tokens" in read:
        prompts = read["prompt_tokens"]
        responses = [(list(prompt) * TOKENS)[:TOKENS] for prompt in prompts]
    else:
        lengths = read["prompt_length"]
        prompts = [tokens[:length] for tokens, length in zip(read["tokens"], lengths, strict=True)]
        responses = [list(tokens[length:]) for tokens, length in zip(read["tokens"], lengths, strict=True)]
    text = load_tokenizer(source.tokenizer).batch_decode
    columns: dict[str, Sequence[Any]] = {"prompt": text(prompts, skip_special_tokens=True)}
    columns |= {name: source.read_column(name, chosen) for name in source.column_kinds}
    columns |= {"response_ids": responses, "response": text(responses, skip_special_tokens=True)}
    values = zip(*columns.values(), strict=True)
    return {row: dict(zip(columns, each, strict=True)) for row, each in zip(chosen, values, strict=True)}


@dataclass(frozen=True, slots=True)
class Tried:
    """A reward function and the rows of a dataset that it is tried on."""

    function: HostFunction
    dataset: str
    rows: Rows
    pool: HostPool

    def remark(self, place: str) -> str:
        """Call the function on the rows; return a one-line warning, or an empty text.

        `place` is where the function is defined. Raises InvalidInput for a failure that no response can cure.
        """
        values, failures = self._scores()
        self._refuse(failures, num_rows=len(values))
        named, rows = f"reward {self.function.name} ({self.function.function})", f"{len(values)} rows of {self.dataset}"
        if failures:
            (row, first), *_ = sorted(failures.items(), key=lambda item: item[1].blame != "row")
            failed = f"failed on {len(failures)} of {rows} with a made-up response, and may fail on real responses"
            return f"{named} {failed}; row {row}: {first.reason}"
        if all(value is None for value in values):
            return at(f"{named} returned None for a made-up response to each of {rows}: they have no score", place)
        return ""

    def _scores(self) -> tuple[list[float | None], dict[int, RowFailure]]:
        """Return the values of the rows that were tried, and the failures by row."""
        began, numbers = time.monotonic(), list(self.rows)
        values: list[float | None] = []
        failures: dict[int, RowFailure] = {}
        for part in filter(None, (numbers[:1], numbers[1:])):
            if time.monotonic() - began > QUICK_SECONDS:
                break
            made = self.pool.score([self.rows[row] for row in part], f"trial of {self.function.name}")
            values += made.values[self.function.name]
            failures |= {part[failure.row]: failure for failure in made.failures}
        return values, failures

    def _refuse(self, failures: Mapping[int, RowFailure], num_rows: int) -> None:
        """Raise InvalidInput for a mistake in the code, and for a key or a type of result that fails every row."""
        blamed: dict[str, dict[int, RowFailure]] = {}
        for row, failure in failures.items():
            blamed.setdefault(failure.blame, {})[row] = failure
        of_all = (blamed[blame] for blame in ("row", "result") if len(blamed.get(blame, ())) == num_rows)
        for row, failure in (blamed.get("code") or next(of_all, {})).items():
            has = f"; a row has {', '.join(self.rows[row])}" if failure.blame == "row" else ""
            expected = f"a function that can score row {row} of {self.dataset}: {failure.reason}{has}"
            raise InvalidInput(self.function.field, self.function.function, expected)
