"""Prompts and preference pairs: ranks read them, and the controller checks them before a run.

Prompts: a column of strings, or of chats (lists of {role, content}). Preferences: two columns of strings or of chats,
the chosen and the rejected answer, and optionally a prompt column as above (an empty prompt is allowed before strings).
A split column of strings, if present, gives the split of each row. Rows are numbered within their split, in the order
of the files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any, Literal, cast, final

from prefect_rlhf.engines.sampling.chats.answer_end import answer_end
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.tasks.data.answer_pieces import ASSISTANT, chat_pieces, masked_tokens
from prefect_rlhf.tasks.data.formats.find import Wanted
from prefect_rlhf.tasks.data.formats.pairs import Answer, pair_of_chats, pair_of_texts
from prefect_rlhf.tasks.data.messages import has_text
from prefect_rlhf.tasks.data.rows.prompt_lengths import OverlongPrompts, PromptLimit
from prefect_rlhf.tasks.data.rows.row_checks import CheckedRows, MeasuredRows
from prefect_rlhf.tasks.data.source import DatasetSource
from prefect_rlhf.tasks.data.tokenizer import (
    Prompt,
    Tools,
    answered_tokens,
    asked,
    prompts_tokens,
    template_remark,
)
from prefect_rlhf.tasks.data.tools import ShownTools

LastAnswer = Literal["refuse", "strip"]
DEFAULT_PROMPT_COLUMN = "prompt"


@final
@dataclass(frozen=True)
class PromptDataset(DatasetSource):
    """Prompts: key `prompt_tokens` of each row."""

    prompt_column: str = DEFAULT_PROMPT_COLUMN
    last_answer: LastAnswer = "refuse"
    """What to do with a chat that ends with an answer."""
    system_prompt: str | None = None
    max_prompt_length: int | None = None
    """In tokens."""
    overlong_prompts: OverlongPrompts = "refuse"
    """What to do with longer prompts. Those that are left out are not numbered."""
    tools: ShownTools | None = None
    """The chat template shows their schemas."""

    keys = ("prompt_tokens",)

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings and the kept rows, which are found only once."""
        return super().__getstate__() | ({"_kept": self._kept} if self.overlong_prompts == "drop" else {})

    def __len__(self) -> int:
        return self.num_items

    @property
    def num_items(self) -> int:
        """The number of prompts that are kept."""
        return len(self._kept) if self.overlong_prompts == "drop" else len(self.rows)

    def items_of(self, row_ids: Sequence[int]) -> Sequence[int]:
        """Return the number of the stored row behind each row."""
        return [self._kept[row] for row in row_ids] if self.overlong_prompts == "drop" else row_ids

    def read(self, row_ids: Sequence[int]) -> Mapping[str, Sequence[list[int]]]:
        """Return the tokens of some prompts."""
        items, limit = self.items_of(row_ids), self._limit
        tokens = self._tokens(items, self._prompts(items))
        return {"prompt_tokens": [limit.cut(each) for each in tokens] if limit else tokens}

    def check(self, max_tokens: int, vocabulary: int | None = None, items: Sequence[int] | None = None) -> CheckedRows:
        """Raise InvalidInput for data that would fail in some step.

        `max_tokens` is the longest prompt that fits. `vocabulary` is the vocabulary size of the models. `items` are the
        items that a run reads, by default all.
        """
        self.rows.require_text(self.prompt_column, allow_messages=True)
        self.check_texts()
        self.check_columns()
        self.check_tokenizer(has_chats=self.rows.column(self.prompt_column).holds_messages)
        if self.tools is not None:
            self.tools.check(self.name, self.loaded, self.goes_through_template)
            if self.shown_column is not None:
                expected = "null: the prompts show the tools of play"
                raise InvalidInput(f"{self.name}.tools_column", self.tools_column, expected)
        limit = self._limit
        if limit is not None and limit.most > max_tokens:
            expected = f"at most {max_tokens}: the context has no room for more"
            raise InvalidInput(f"{self.name}.max_prompt_length", limit.most, expected)
        is_whole = items is None or self.overlong_prompts == "drop"  # to leave out a prompt, all must be counted
        rows = self._all_rows if is_whole else self.measured(items or ())
        self.check_measured(rows, None if limit else max_tokens, vocabulary)
        if limit is None:
            return CheckedRows(rows.lengths, self.remarks())
        limit.check(self.name, rows)
        remark = "" if self.overlong_prompts == "refuse" else limit.remark(self.name, rows.lengths)
        lengths = [min(rows.lengths[row], limit.most) for row in limit.kept(rows.lengths)]
        return CheckedRows(lengths, (*self.remarks(), *([remark] if remark else [])))

    def remarks(self) -> tuple[str, ...]:
        """Return a log line with an example of what the chat template renders, if rows go through the template."""
        if not self.goes_through_template:
            return ()
        tokenizer = self.loaded
        return (template_remark(self.name, tokenizer, self.system_prompt, self._schemas, self.variables),)

    @property
    def goes_through_template(self) -> bool:
        """Whether rows are formatted by the tokenizer's chat template."""
        return self.chat_template or self.rows.column(self.prompt_column).holds_messages

    @property
    def message_columns(self) -> tuple[str, ...]:
        """The column of prompts."""
        return (self.prompt_column,)

    @property
    def wanted(self) -> Wanted:
        """Prompts, with their column."""
        return self.wants("prompts", {"prompt": (self.prompt_column,)}, ["prompt_column"])

    @property
    def _paths(self) -> dict[str, str]:
        """As of every dataset; `prompt` is a name of the prompts' column, unless another column has that name."""
        renamed = self.prompt_column != DEFAULT_PROMPT_COLUMN or DEFAULT_PROMPT_COLUMN in self.rows.found.makes
        return ({DEFAULT_PROMPT_COLUMN: self.prompt_column} if renamed else {}) | super()._paths

    @property
    def _schemas(self) -> Tools:
        return () if self.tools is None else self.tools.schemas

    @property
    def _limit(self) -> PromptLimit | None:
        return None if self.max_prompt_length is None else PromptLimit(self.max_prompt_length, self.overlong_prompts)

    @cached_property
    def _all_rows(self) -> MeasuredRows:
        """The lengths of all stored prompts."""
        return self.measured(range(len(self.rows)))

    @cached_property
    def _kept(self) -> tuple[int, ...]:
        """The numbers of the stored rows that are kept."""
        return self._limit.kept(self._all_rows.lengths) if self._limit else tuple(range(len(self.rows)))

    def checked_tokens(self, items: Sequence[int]) -> list[list[int]]:
        """Return the tokens of stored prompts. Raises InvalidInput for a value that is not a prompt."""
        prompts = self._prompts(items)
        for row, prompt in zip(items, prompts, strict=True):
            self.check_prompt(row, prompt, remedy=", or set last_answer to strip")
            self._check_system_turn(row, prompt)
        return self._tokens(items, prompts)

    def _tokens(self, items: Sequence[int], prompts: Sequence[Prompt]) -> list[list[int]]:
        tokenizer, own = self.loaded, self._schemas
        shown = [(prompt, own or tools) for prompt, tools in zip(prompts, self.tools_of(items), strict=True)]
        return prompts_tokens(tokenizer, shown, self.chat_template, self.system_prompt, self.variables)

    def _check_system_turn(self, row: int, prompt: Prompt) -> None:
        """Raise InvalidInput if a system prompt has no effect or is the second system message of a chat."""
        if self.system_prompt is None:
            return
        if isinstance(prompt, str):
            if not self.chat_template:
                expected = "prompts that are chats, or chat_template: true: plain text has no system message"
                raise InvalidInput(f"{self.name}.system_prompt", self.system_prompt, expected)
        elif any(turn["role"] == "system" for turn in prompt):
            expected = "a chat without a system message, because system_prompt is set"
            raise InvalidInput(f"{self.name} row {row}", "a system message", expected)

    def _prompts(self, items: Sequence[int]) -> list[Prompt]:
        prompts: list[Prompt] = self.messages(self.prompt_column, items)
        return prompts if self.last_answer == "refuse" else [_unanswered(prompt) for prompt in prompts]


@final
@dataclass(frozen=True)
class PreferenceDataset(DatasetSource):
    """Pairs of rows, 2i the chosen and 2i + 1 the rejected answer of pair i: keys `tokens` and `prompt_length`.

    Both rows begin with the prompt. An answer in a chat ends with the template's end of an answer. With `end_of_text`,
    other answers end with the end-of-sequence token.
    """

    prompt_column: str | None = DEFAULT_PROMPT_COLUMN
    chosen_column: str = "chosen"
    rejected_column: str = "rejected"
    end_of_text: bool = False

    keys = ("tokens", "prompt_length")

    def __len__(self) -> int:
        return 2 * self.num_items

    def items_of(self, row_ids: Sequence[int]) -> Sequence[int]:
        """Return the pair of each row."""
        return [row // 2 for row in row_ids]

    def read(self, row_ids: Sequence[int]) -> Mapping[str, Sequence[Any]]:
        """Return the tokens of some rows and the length of each prompt."""
        items = self.items_of(row_ids)
        rows = [
            self._answered(row, prompt, answers[row % 2], tools, variables)
            for row, (prompt, *answers), tools, variables in zip(
                row_ids, self._pairs(items), self.tools_of(items), self.variables_of(items), strict=True
            )
        ]
        return {"tokens": [tokens for tokens, _ in rows], "prompt_length": [length for _, length in rows]}

    def check(self, max_tokens: int, vocabulary: int | None = None, items: Sequence[int] | None = None) -> CheckedRows:
        """Raise InvalidInput for data that would fail in some step.

        `max_tokens` is the longest row that fits. `vocabulary` is the vocabulary size of the models. `items` are the
        items that a run reads, by default all.
        """
        for column in filter(None, (self._prompt_column, self.chosen_column, self.rejected_column)):
            self.rows.require_text(column, allow_messages=column == self._prompt_column or self._has_chats)
        self._check_sides()
        self.check_texts()
        self.check_columns()
        self.check_tokenizer(has_chats=self._has_chat_prompts)
        return self.checked_rows(items, max_tokens, vocabulary)

    def checked_tokens(self, items: Sequence[int]) -> list[list[int]]:
        """Return the tokens of both rows of each pair. Raises InvalidInput for a pair that cannot be used."""
        pairs = self._pairs(items)
        for pair, values in zip(items, pairs, strict=True):
            self._check_pair(pair, *values)
        return [
            self._answered(2 * item + side, prompt, answer, tools, variables)[0]
            for item, (prompt, *answers), tools, variables in zip(
                items, pairs, self.tools_of(items), self.variables_of(items), strict=True
            )
            for side, answer in enumerate(answers)
        ]

    @property
    def wanted(self) -> Wanted:
        """Pairs: the columns of both answers, with or without a prompt."""
        answers = (self.chosen_column, self.rejected_column)
        own = {"pairs": (*([self.prompt_column] if self.prompt_column else []), *answers)}
        return self.wants("pairs", own, ["prompt_column", "chosen_column", "rejected_column"], {"pairs": answers})

    def _check_sides(self) -> None:
        """Raise InvalidInput unless both answers are strings or both are messages."""
        rejected = self.rows.column(self.rejected_column)
        if rejected.holds_messages != self._has_chats:
            expected = f"{'messages' if self._has_chats else 'strings'}, as in {self.chosen_column}"
            raise InvalidInput(f"{self.name}.{self.rejected_column}", rejected.described, expected)

    def _answered(
        self, row: int, prompt: Prompt, answer: Answer, tools: Tools, variables: Mapping[str, Any]
    ) -> tuple[list[int], int]:
        """Return the tokens of prompt and answer, and the number of the prompt's tokens."""
        tokenizer, eos = self.loaded, self.eos_token
        if isinstance(prompt, str) and isinstance(answer, str) and not self.chat_template:
            return answered_tokens(tokenizer, prompt, answer, self.end_of_text, eos)
        before, where = asked(prompt), f"{self.name} row {row // 2}"
        said = {"role": ASSISTANT, "content": answer} if isinstance(answer, str) else answer
        pieces = chat_pieces(tokenizer, [*before, said], where, len(before), tools, variables)
        whole, end = masked_tokens(tokenizer, pieces, eos), answer_end(tokenizer, eos)
        ended = end.written is not None or end.token is None or whole.tokens[-1] == end.token
        return whole.tokens if ended else [*whole.tokens, cast(int, end.token)], whole.prompt_length

    def _check_pair(self, pair: int, prompt: Prompt | None, chosen: Answer | None, rejected: Answer | None) -> None:
        where = f"{self.name} row {pair}"
        if prompt is None or not isinstance(prompt, str):
            self.check_prompt(pair, prompt)
        for column, answer in ((self.chosen_column, chosen), (self.rejected_column, rejected)):
            if not (has_text(answer) if isinstance(answer, Mapping) else answer and answer.strip()):
                raise InvalidInput(f"{where} {column}", answer, f"an answer that is not empty, in {self.path}")
        if chosen == rejected:
            raise InvalidInput(where, chosen, f"two answers that differ, in {self.path}")

    @property
    def goes_through_template(self) -> bool:
        """Whether rows are formatted by the tokenizer's chat template."""
        return self.chat_template or self._has_chat_prompts

    @property
    def _has_chat_prompts(self) -> bool:
        column = self._prompt_column
        return self._has_chats or bool(column and self.rows.column(column).holds_messages)

    @property
    def _has_chats(self) -> bool:
        """Whether the chosen answers are messages."""
        return self.rows.column(self.chosen_column).holds_messages

    @property
    def _prompt_column(self) -> str | None:
        """The prompt column, or None. The default name counts only if the file has it, or its format makes it."""
        is_there = DEFAULT_PROMPT_COLUMN in (*self.rows.names, *self.rows.found.makes)
        return self.prompt_column if self.prompt_column != DEFAULT_PROMPT_COLUMN or is_there else None

    @property
    def message_columns(self) -> tuple[str, ...]:
        """The columns of prompts and answers."""
        return tuple(filter(None, (self._prompt_column, self.chosen_column, self.rejected_column)))

    def _pairs(self, items: Sequence[int]) -> list[tuple[Prompt, Answer, Answer]]:
        """Return pairs as (prompt, chosen, rejected).

        Without a prompt column, the prompt is what both answers begin with; with prompt_column None, strings have none.
        """
        column, has_chats = self._prompt_column, self._has_chats
        prompts = self.messages(column, items) if column else [None] * len(items)
        answers = (self.messages(name, items) for name in (self.chosen_column, self.rejected_column))
        pairs = zip(prompts, *answers, strict=True)
        rows = [(f"{self.name} row {item}", pair) for item, pair in zip(items, pairs, strict=True)]
        if has_chats:
            return [pair_of_chats(where, pair) for where, pair in rows]
        if column is None and self.prompt_column is not None:
            return [pair_of_texts(where, chosen, rejected) for where, (_, chosen, rejected) in rows]
        return [pair if column else ("", *pair[1:]) for _, pair in rows]


def _unanswered(prompt: Any) -> Any:
    """Return a chat without the assistant's messages at its end; any other prompt unchanged."""
    if not isinstance(prompt, list):
        return prompt
    answers = list(takewhile(lambda turn: turn["role"] == "assistant", reversed(prompt)))
    return prompt[: len(prompt) - len(answers)]
