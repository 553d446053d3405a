"""The common part of all datasets: their settings, further columns by row number, checks of prompts and tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from prefect_rlhf.engines.rows import KEYS_OF_CALLS, ColumnKind
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.tasks.data.row_checks import MeasuredRows, Say, measure, silent
from prefect_rlhf.tasks.data.stored.stored_rows import DEFAULT_SPLIT, DEFAULT_SPLIT_COLUMN, StoredRows
from prefect_rlhf.tasks.data.tokenizer import load_tokenizer, template_remark


@dataclass(frozen=True)
class DatasetSource:
    """A name (the flow's parameter), the path of the rows, a split and a tokenizer's folder.

    `column_paths` gives columns other names: key -> column, or field of a struct such as `reward_model.ground_truth`.
    `say` gets a line now and then during a long check.
    """

    name: str
    path: str
    tokenizer: str
    split_column: str | None = DEFAULT_SPLIT_COLUMN
    split: str = DEFAULT_SPLIT
    chat_template: bool = False
    column_paths: Mapping[str, str] = field(default_factory=dict, hash=False)
    say: Say = field(default=silent, kw_only=True, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings only: rows that were read are not pickled, and a rank says nothing."""
        return {field.name: getattr(self, field.name) for field in fields(self)} | {"say": silent}

    @cached_property
    def rows(self) -> StoredRows:
        """The stored rows of this split."""
        settings = {getattr(self, one.name): one.name for one in fields(self) if one.name.endswith("_column")}
        return StoredRows(self.name, self.path, self.split_column, self.split, settings)

    @property
    def num_items(self) -> int:
        """The number of stored rows."""
        return len(self.rows)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names that `read_column` accepts: keys of `column_paths`, and stored columns that no call's key hides."""
        return tuple(name for name in self._paths if name not in KEYS_OF_CALLS)

    @property
    def column_kinds(self) -> Mapping[str, ColumnKind]:
        """The kind of each of the `columns`."""
        return {name: self.rows.column(self._paths[name]).kind for name in self.columns}

    def read_column(self, name: str, row_ids: Sequence[int]) -> list[Any]:
        """Return plain Python values of some rows: numbers, text, lists, dicts, or None for a missing value.

        Raises InvalidInput for a name that is not in `columns`.
        """
        if name not in self.columns:
            raise InvalidInput(f"{self.name}.columns", name, f"one of {', '.join(self.columns)}, in {self.path}")
        return self.rows.read(self._paths[name], self.items_of(row_ids))

    def remarks(self) -> tuple[str, ...]:
        """Return lines for the log: changes to rows beyond reading them."""
        if not self.goes_through_template:
            return ()
        return (template_remark(self.name, load_tokenizer(self.tokenizer)),)

    @property
    def goes_through_template(self) -> bool:
        """Whether the tokenizer's chat template writes the rows."""
        return self.chat_template

    def items_of(self, row_ids: Sequence[int]) -> Sequence[int]:
        """Return the number of the stored row behind each row."""
        return row_ids

    def check_columns(self) -> None:
        """Raise InvalidInput for a name of `column_paths` that a call's key hides, and for a missing column."""
        for key, path in self.column_paths.items():
            if key in KEYS_OF_CALLS:
                raise InvalidInput(f"{self.name}.columns", key, f"another name: calls make {', '.join(KEYS_OF_CALLS)}")
            self.rows.column(path, f"{self.name}.columns.{key}")
            self.rows.read(path, [0])

    @property
    def _paths(self) -> dict[str, str]:
        """The place of each name's column."""
        return {name: name for name in self.rows.names} | dict(self.column_paths)

    def check_tokenizer(self, has_chats: bool) -> None:
        """Raise InvalidInput unless the tokenizer can be loaded and, if needed, has a chat template."""
        tokenizer = load_tokenizer(self.tokenizer)
        if (self.chat_template or has_chats) and not tokenizer.chat_template:
            raise InvalidInput(f"{self.name}.chat_template", self.tokenizer, "a tokenizer that has a chat template")

    def check_prompt(self, row: int, prompt: Any, remedy: str = "") -> None:
        """Raise InvalidInput for a prompt that is missing or empty, also within a chat, or that ends with an answer.

        `remedy` is added to the error about an answered prompt.
        """
        where = f"{self.name} row {row}"
        self.check_text(where, prompt, "a prompt")
        if not isinstance(prompt, str) and prompt[-1]["role"] == "assistant":
            expected = "a chat without an answer at its end; drop the assistant's last message"
            raise InvalidInput(where, prompt[-1], f"{expected}{remedy}, in {self.path}")

    def check_text(self, where: str, value: Any, what: str) -> None:
        """Raise InvalidInput, at `where`, for a text or chat that is missing or blank, and for messages without a role.

        `what` names the value in the error, such as "a prompt".
        """
        texts = [value] if isinstance(value, str) or not value else [turn["content"] for turn in value]
        for text in texts:
            if not isinstance(text, str) or not text.strip():
                raise InvalidInput(where, value, f"{what} that is not empty, in {self.path}")
        if not isinstance(value, str) and not all(turn["role"] for turn in value):
            raise InvalidInput(where, value, f"messages that all have a role, in {self.path}")

    def measured(self, items: Sequence[int]) -> MeasuredRows:
        """Measure the rows of some items. Raises InvalidInput for a row that can never be used."""
        tokenizer = load_tokenizer(self.tokenizer)
        meaningless = {*tokenizer.all_special_ids}

        def tokens_of(chunk: Sequence[int]) -> list[list[int]]:
            rows = self.checked_tokens(chunk)
            for row, tokens in enumerate(rows):
                if None in tokens:
                    expected = "a tokenizer with an end-of-sequence token"
                    raise InvalidInput(f"{self.name}.tokenizer", self.tokenizer, expected)
                if meaningless.issuperset(tokens):
                    seen = "no token" if not tokens else f"only {tokenizer.decode(sorted(set(tokens)))}"
                    expected = f"text that the tokenizer of {self.tokenizer} knows, in {self.path}"
                    raise InvalidInput(f"{self.name} row {chunk[row * len(chunk) // len(rows)]}", seen, expected)
            return rows

        return measure(self.name, items, tokens_of, self.say)

    def checked_tokens(self, items: Sequence[int]) -> list[list[int]]:
        """Return the tokens of the items' rows. Raises InvalidInput for an item that cannot be a row."""
        raise NotImplementedError

    def check_measured(self, rows: MeasuredRows, max_tokens: int | None, vocabulary: int | None) -> None:
        """Raise InvalidInput for a row of more than `max_tokens`, and for a token outside the `vocabulary`."""
        if vocabulary is not None and rows.highest_token >= vocabulary:
            expected = f"tokens below {vocabulary}, the models' vocab_size; use the models' own tokenizer"
            raise InvalidInput(f"{self.name} row {rows.highest_item}", f"token {rows.highest_token}", expected)
        if max_tokens is not None and max(rows.lengths) > max_tokens:
            row = next(row for row, length in enumerate(rows.lengths) if length > max_tokens)
            drop = f", or set max_prompt_length: {max_tokens} and overlong_prompts: drop"
            remedy = f"shorten or remove the row of {self.path}{drop if hasattr(self, 'overlong_prompts') else ''}"
            expected = f"at most {max_tokens} to fit the context; {remedy}"
            raise InvalidInput(f"{self.name} row {rows.item_of(row)}", f"{rows.lengths[row]} tokens", expected)
