"""Prompts and preference pairs: reading by ranks, and checks by the controller before a run.

Prompts: a column of strings, or of chats (lists of {role, content}). Preferences: two columns of strings or of chats,
the chosen and the rejected answer, and optionally a prompt column as above (an empty prompt is allowed before strings).
A split column of strings, if present, gives the split of each row. Rows are numbered within their split, in the order
of the files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any, Literal, final

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.tasks.data.answer_pieces import chat_pieces, masked_tokens
from prefect_rlhf.tasks.data.messages import has_text
from prefect_rlhf.tasks.data.pairs import Answer, pair_of_chats
from prefect_rlhf.tasks.data.prompt_lengths import OverlongPrompts, PromptLimit
from prefect_rlhf.tasks.data.source import DatasetSource
from prefect_rlhf.tasks.data.stored.stored_rows import require_text
from prefect_rlhf.tasks.data.tokenizer import (
    Prompt,
    Tools,
    answered_tokens,
    asked,
    load_tokenizer,
    prompt_tokens,
    template_remark,
)
from prefect_rlhf.tasks.data.tools import ShownTools

LastAnswer = Literal["refuse", "strip"]
DEFAULT_PROMPT_COLUMN = "prompt"


@final
@dataclass(frozen=True)
class PromptDataset(DatasetSource):
    """Prompts: key `prompt_tokens` of each row. `last_answer`: what to do if a chat ends with an answer.

    Prompts of more than `max_prompt_length` tokens are treated as `overlong_prompts` says. The numbering of rows skips
    prompts that are left out. The chat template shows the schemas of `tools`.
    """

    prompt_column: str = DEFAULT_PROMPT_COLUMN
    last_answer: LastAnswer = "refuse"
    system_prompt: str | None = None
    max_prompt_length: int | None = None
    overlong_prompts: OverlongPrompts = "refuse"
    tools: ShownTools | None = None

    keys = ("prompt_tokens",)

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings and the kept rows, which are found only once."""
        return super().__getstate__() | ({"_kept": self._kept} if self.overlong_prompts == "drop" else {})

    def __len__(self) -> int:
        return self.num_items

    @property
    def num_items(self) -> int:
        """The number of prompts, without prompts that are left out."""
        return len(self._kept) if self.overlong_prompts == "drop" else len(self.rows)

    def items_of(self, row_ids: Sequence[int]) -> Sequence[int]:
        """Return the number of the stored row behind each row."""
        return [self._kept[row] for row in row_ids] if self.overlong_prompts == "drop" else row_ids

    def read(self, row_ids: Sequence[int]) -> Mapping[str, Sequence[list[int]]]:
        """Return the tokens of some prompts."""
        tokens, limit = self._tokens(self.items_of(row_ids)), self._limit
        return {"prompt_tokens": [limit.cut(each) for each in tokens] if limit else tokens}

    def check(self, max_tokens: int, vocabulary: int | None = None) -> int:
        """Raise InvalidInput for data that would fail in some step; return the longest prompt's number of tokens.

        `max_tokens` is the longest prompt that fits. `vocabulary` is the vocabulary size of the models.
        """
        require_text(self.rows, self.prompt_column, allow_messages=True)
        self.check_columns()
        prompts = self._prompts(range(len(self.rows)))
        for row, prompt in enumerate(prompts):
            self.check_prompt(row, prompt, remedy=", or set last_answer to strip")
            self._check_system_turn(row, prompt)
        self.check_tokenizer(has_chats=not isinstance(prompts[0], str))
        if self.tools is not None:
            self.tools.check(self.name, load_tokenizer(self.tokenizer), self.goes_through_template)
            if self.shown_column is not None:
                expected = "null: the prompts show the tools of play"
                raise InvalidInput(f"{self.name}.tools_column", self.tools_column, expected)
        tokens, limit = self._tokens(range(len(self.rows))), self._limit
        if limit is None:
            return self.check_tokens(tokens, max_tokens, vocabulary)
        if limit.most > max_tokens:
            expected = f"at most {max_tokens}, which the context leaves"
            raise InvalidInput(f"{self.name}.max_prompt_length", limit.most, expected)
        longest = self.check_tokens(tokens, max(map(len, tokens)), vocabulary)
        limit.check(self.name, [len(each) for each in tokens])
        return min(longest, limit.most)

    def remarks(self) -> tuple[str, ...]:
        """Return lines for the log: the chat template's rendering, and the number of prompts above the limit."""
        lines = []
        if self.goes_through_template:
            tokenizer = load_tokenizer(self.tokenizer)
            lines.append(template_remark(self.name, tokenizer, self.system_prompt, self._schemas, self.variables))
        if self._limit and self.overlong_prompts != "refuse":
            lines.append(self._limit.remark(self.name, self._lengths))
        return tuple(lines)

    @property
    def goes_through_template(self) -> bool:
        """Whether the tokenizer's chat template writes the rows."""
        return self.chat_template or self.rows.column(self.prompt_column).holds_messages

    @property
    def message_columns(self) -> tuple[str, ...]:
        """The column of prompts."""
        return (self.prompt_column,)

    @property
    def _paths(self) -> dict[str, str]:
        """As of every dataset; `prompt` is a name of the prompts' column, unless another column has that name."""
        renamed = self.prompt_column != DEFAULT_PROMPT_COLUMN
        return ({DEFAULT_PROMPT_COLUMN: self.prompt_column} if renamed else {}) | super()._paths

    @property
    def _schemas(self) -> Tools:
        return () if self.tools is None else self.tools.schemas

    @property
    def _limit(self) -> PromptLimit | None:
        return None if self.max_prompt_length is None else PromptLimit(self.max_prompt_length, self.overlong_prompts)

    @cached_property
    def _lengths(self) -> tuple[int, ...]:
        """The tokens of every stored prompt."""
        return tuple(map(len, self._tokens(range(len(self.rows)))))

    @cached_property
    def _kept(self) -> tuple[int, ...]:
        """The numbers of the stored rows that are kept."""
        return self._limit.kept(self._lengths) if self._limit else tuple(range(len(self.rows)))

    def _tokens(self, items: Sequence[int]) -> list[list[int]]:
        tokenizer, variables, own = load_tokenizer(self.tokenizer), self.variables, self._schemas
        return [
            prompt_tokens(tokenizer, prompt, self.chat_template, self.system_prompt, own or tools, variables)
            for prompt, tools in zip(self._prompts(items), self.tools_of(items), strict=True)
        ]

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

    Both rows begin with the prompt. The end of an answer closes an answer in a chat; with `end_of_text` the
    end-of-sequence token closes other answers too.
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
            self._answered(row, prompt, answers[row % 2], tools)
            for row, (prompt, *answers), tools in zip(row_ids, self._pairs(items), self.tools_of(items), strict=True)
        ]
        return {"tokens": [tokens for tokens, _ in rows], "prompt_length": [length for _, length in rows]}

    def check(self, max_tokens: int, vocabulary: int | None = None) -> int:
        """Raise InvalidInput for data that would fail in some step; return the longest row's number of tokens.

        `max_tokens` is the longest row that fits. `vocabulary` is the vocabulary size of the models.
        """
        for column in filter(None, (self._prompt_column, self.chosen_column, self.rejected_column)):
            require_text(self.rows, column, allow_messages=column == self._prompt_column or self._has_chats)
        self._check_sides()
        self.check_columns()
        pairs = self._pairs(range(self.num_items))
        for pair, values in enumerate(pairs):
            self._check_pair(pair, *values)
        self.check_tokenizer(has_chats=not isinstance(pairs[0][0], str))
        return self.check_tokens(self.read(range(len(self)))["tokens"], max_tokens, vocabulary, rows_per_item=2)

    def _check_sides(self) -> None:
        """Raise InvalidInput unless both answers are strings or both are messages."""
        rejected = self.rows.column(self.rejected_column)
        if rejected.holds_messages != self._has_chats:
            expected = f"{'messages' if self._has_chats else 'strings'}, as in {self.chosen_column}"
            raise InvalidInput(f"{self.name}.{self.rejected_column}", rejected.described, expected)

    def _answered(self, row: int, prompt: Prompt, answer: Answer, tools: Tools) -> tuple[list[int], int]:
        """Return the tokens of prompt and answer, and the number of the prompt's tokens."""
        tokenizer, variables, eos = load_tokenizer(self.tokenizer), self.variables, self.eos_token
        if isinstance(answer, str):
            is_chat = self.chat_template
            return answered_tokens(tokenizer, prompt, answer, is_chat, self.end_of_text, tools, variables, eos)
        before, where = asked(prompt), f"{self.name} row {row // 2}"
        pieces = chat_pieces(tokenizer, [*before, answer], where, len(before), tools, variables)
        whole = masked_tokens(tokenizer, pieces, eos)
        return whole.tokens, whole.prompt_length

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
        """Whether the tokenizer's chat template writes the rows."""
        column = self._prompt_column
        return self.chat_template or self._has_chats or bool(column and self.rows.column(column).holds_messages)

    @property
    def _has_chats(self) -> bool:
        """Whether the chosen answers are messages."""
        return self.rows.column(self.chosen_column).holds_messages

    @property
    def _prompt_column(self) -> str | None:
        """The column of prompts, if any: for messages only if it is named, or exists under the default name."""
        is_implicit = self.prompt_column == DEFAULT_PROMPT_COLUMN not in self.rows.names and self._has_chats
        return None if is_implicit else self.prompt_column

    @property
    def message_columns(self) -> tuple[str, ...]:
        """The columns of prompts and answers."""
        return tuple(filter(None, (self._prompt_column, self.chosen_column, self.rejected_column)))

    def _pairs(self, items: Sequence[int]) -> list[tuple[Prompt, Answer, Answer]]:
        """Return pairs as (prompt, chosen, rejected); without a prompt column, the prompt of strings is empty."""
        none = None if self._has_chats else ""
        column = self._prompt_column
        prompts = self.messages(column, items) if column else [none] * len(items)
        answers = (self.messages(name, items) for name in (self.chosen_column, self.rejected_column))
        pairs = list(zip(prompts, *answers, strict=True))
        if not self._has_chats:
            return pairs
        return [pair_of_chats(f"{self.name} row {item}", pair) for item, pair in zip(items, pairs, strict=True)]


def _unanswered(prompt: Any) -> Any:
    """Return a chat without the assistant's messages at its end; any other prompt unchanged."""
    if not isinstance(prompt, list):
        return prompt
    answers = list(takewhile(lambda turn: turn["role"] == "assistant", reversed(prompt)))
    return prompt[: len(prompt) - len(answers)]
