"""Prompts and preference pairs in Parquet, as ranks read them and as the controller checks them before a run.

Prompts: a column of strings, or of chats (list<struct<role: string, content: string>>). Preferences: two columns of
strings, the chosen and the rejected answer, and if wanted a prompt column as above (an empty prompt is allowed there).
A split column of strings, if there is one, says which rows are for training. Rows are numbered within their split, in
the file's order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, final

from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.tasks.data.parquet_rows import ParquetRows, require_text
from prefect_rlhf.tasks.data.tokenizer import Prompt, answered_tokens, load_tokenizer, prompt_tokens


@dataclass(frozen=True)
class ParquetSource:
    """The common part of datasets: a name (the flow's parameter), a file, a split and a tokenizer's folder."""

    name: str
    path: str
    tokenizer: str
    split_column: str | None = "split"
    split: str = "train"
    chat_template: bool = False

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings only: rows stay where they were read."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def rows(self) -> ParquetRows:
        """The rows' place on disk."""
        return ParquetRows(self.name, self.path, self.split_column, self.split)

    def check_tokenizer(self, has_chats: bool) -> None:
        """Raise InvalidInput unless the tokenizer can be loaded and has a chat template where one is needed."""
        tokenizer = load_tokenizer(self.tokenizer)
        if (self.chat_template or has_chats) and not tokenizer.chat_template:
            raise InvalidInput(f"{self.name}.chat_template", self.tokenizer, "a tokenizer that has a chat template")

    def check_prompt(self, row: int, prompt: Any) -> None:
        """Raise InvalidInput for a prompt that is missing or empty, in a chat too."""
        texts = [prompt] if isinstance(prompt, str) or not prompt else [turn["content"] for turn in prompt]
        for text in texts:
            if not isinstance(text, str) or not text.strip():
                raise InvalidInput(f"{self.name} row {row}", prompt, f"a prompt that is not empty, in {self.path}")
        if not isinstance(prompt, str) and not all(turn["role"] for turn in prompt):
            raise InvalidInput(f"{self.name} row {row}", prompt, f"messages that all have a role, in {self.path}")
        if not isinstance(prompt, str) and prompt[-1]["role"] == "assistant":
            expected = (
                f"a chat that waits for an answer; drop the last message, which is the assistant's, in {self.path}"
            )
            raise InvalidInput(f"{self.name} row {row}", prompt[-1], expected)

    def check_tokens(
        self, rows: Sequence[Sequence[int]], max_tokens: int, vocabulary: int | None, rows_per_item: int = 1
    ) -> int:
        """Return the longest row's number of tokens.

        Raises InvalidInput for a row that does not fit, says nothing, or has a token that is not in the `vocabulary`.
        """
        tokenizer = load_tokenizer(self.tokenizer)
        meaningless = {*tokenizer.all_special_ids}
        for row, tokens in enumerate(rows):
            if meaningless.issuperset(tokens):
                seen = "no token" if not tokens else f"none but {tokenizer.decode(sorted(set(tokens)))}"
                expected = f"text that the tokenizer of {self.tokenizer} knows, in {self.path}"
                raise InvalidInput(f"{self.name} row {row // rows_per_item}", seen, expected)
            if None in tokens:
                raise InvalidInput(f"{self.name}.tokenizer", self.tokenizer, "one with an end-of-sequence token")
            if vocabulary is not None and max(tokens) >= vocabulary:
                expected = f"tokens below {vocabulary}, the models' vocab_size; this tokenizer is another's"
                raise InvalidInput(f"{self.name} row {row // rows_per_item}", f"token {max(tokens)}", expected)
            if len(tokens) > max_tokens:
                expected = f"at most {max_tokens} to fit the context; shorten or remove the row of {self.path}"
                raise InvalidInput(f"{self.name} row {row // rows_per_item}", f"{len(tokens)} tokens", expected)
        return max(map(len, rows))


@final
@dataclass(frozen=True)
class PromptDataset(ParquetSource):
    """Prompts, one a row: key `prompt_tokens`."""

    prompt_column: str = "prompt"

    keys = ("prompt_tokens",)

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def num_items(self) -> int:
        """The number of prompts."""
        return len(self)

    def read(self, row_ids: Sequence[int]) -> Mapping[str, Sequence[list[int]]]:
        """Return the tokens of some prompts."""
        tokenizer = load_tokenizer(self.tokenizer)
        return {"prompt_tokens": [prompt_tokens(tokenizer, self._prompts[i], self.chat_template) for i in row_ids]}

    def check(self, max_tokens: int, vocabulary: int | None = None) -> int:
        """Raise InvalidInput for data that some step would choke on; return the longest prompt's number of tokens.

        `max_tokens` is the longest prompt that fits, `vocabulary` the number of tokens that the models know.
        """
        self.rows.read([self.prompt_column])
        require_text(self.rows, self.prompt_column, allow_messages=True)
        for row, prompt in enumerate(self._prompts):
            self.check_prompt(row, prompt)
        self.check_tokenizer(has_chats=not isinstance(self._prompts[0], str))
        return self.check_tokens(self.read(range(len(self)))["prompt_tokens"], max_tokens, vocabulary)

    @cached_property
    def _prompts(self) -> list[Prompt]:
        prompts: list[Prompt] = self.rows.read([self.prompt_column])[self.prompt_column].to_pylist()
        return prompts


@final
@dataclass(frozen=True)
class PreferenceDataset(ParquetSource):
    """Pairs of rows, 2i the chosen answer of pair i and 2i + 1 the rejected: keys `tokens` and `prompt_length`.

    Both begin with the prompt. The end-of-sequence token closes an answer in a chat, and elsewhere with `end_of_text`.
    """

    prompt_column: str | None = "prompt"
    chosen_column: str = "chosen"
    rejected_column: str = "rejected"
    end_of_text: bool = False

    keys = ("tokens", "prompt_length")

    def __len__(self) -> int:
        return 2 * self.num_items

    @property
    def num_items(self) -> int:
        """The number of pairs."""
        return len(self._pairs)

    def read(self, row_ids: Sequence[int]) -> Mapping[str, Sequence[Any]]:
        """Return the tokens of some rows, and how many of them are the prompt's."""
        rows = [self._tokens(i) for i in row_ids]
        return {"tokens": [tokens for tokens, _ in rows], "prompt_length": [length for _, length in rows]}

    def check(self, max_tokens: int, vocabulary: int | None = None) -> int:
        """Raise InvalidInput for data that some step would choke on; return the longest row's number of tokens.

        `max_tokens` is the longest row that fits, `vocabulary` the number of tokens that the models know.
        """
        self.rows.read(self._columns)
        for column in (self.chosen_column, self.rejected_column):
            require_text(self.rows, column)
        if self.prompt_column:
            require_text(self.rows, self.prompt_column, allow_messages=True)
        for pair, values in enumerate(self._pairs):
            self._check_pair(pair, *values)
        self.check_tokenizer(has_chats=not isinstance(self._pairs[0][0], str))
        return self.check_tokens(self.read(range(len(self)))["tokens"], max_tokens, vocabulary, rows_per_item=2)

    def _check_pair(self, pair: int, prompt: Prompt | None, chosen: str | None, rejected: str | None) -> None:
        where = f"{self.name} row {pair}"
        if prompt is None or not isinstance(prompt, str):
            self.check_prompt(pair, prompt)
        for column, answer in ((self.chosen_column, chosen), (self.rejected_column, rejected)):
            if answer is None or not answer.strip():
                raise InvalidInput(f"{where} {column}", answer, f"an answer that is not empty, in {self.path}")
        if chosen == rejected:
            raise InvalidInput(where, chosen, f"two answers that differ, in {self.path}")

    def _tokens(self, row_id: int) -> tuple[list[int], int]:
        prompt, *answers = self._pairs[row_id // 2]
        tokenizer = load_tokenizer(self.tokenizer)
        return answered_tokens(tokenizer, prompt, answers[row_id % 2], self.chat_template, self.end_of_text)

    @property
    def _columns(self) -> list[str]:
        prompt = [self.prompt_column] if self.prompt_column else []
        return [*prompt, self.chosen_column, self.rejected_column]

    @cached_property
    def _pairs(self) -> list[tuple[Prompt, str, str]]:
        """Pairs as (prompt, chosen, rejected); the prompt is empty where there is no such column."""
        table = self.rows.read(self._columns)
        columns = [table[name].to_pylist() for name in self._columns]
        prompts = columns[0] if self.prompt_column else [""] * table.num_rows
        return list(zip(prompts, columns[-2], columns[-1], strict=True))
