"""Chats, answered prompts and texts to learn from: ranks read them, and the controller checks them before a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, final

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.tasks.data.answer_pieces import ASSISTANT, MaskedTokens, Piece, chat_pieces, masked, masked_tokens
from prefect_rlhf.tasks.data.formats.find import Wanted
from prefect_rlhf.tasks.data.rows.row_checks import CheckedRows
from prefect_rlhf.tasks.data.source import DatasetSource
from prefect_rlhf.tasks.data.tokenizer import Tools, answered_tokens

Form = Literal["messages", "completion", "text"]
DEFAULT_LABEL_COLUMN = "label"
MASKED_KEYS = ("tokens", "prompt_length", "mask")
LEARNT_KEYS = ("train", "weight", "loss")
"""Keys of a message that say whether the answer is learnt, of axolotl, OpenAI and ms-swift."""


@final
@dataclass(frozen=True)
class ChatDataset(DatasetSource):
    """Rows to learn from: keys `tokens`, `prompt_length` and `mask`, which is 1 at trained tokens.

    The trained tokens are the assistant's in `messages`, the completion's after a prompt, and all but the first of a
    text. A message with `train: false`, `loss: false` or `weight: 0` is context. A text, or a completion that is a
    string, ends with the end-of-sequence token; a message ends as the chat template writes it. A `label_column` says
    whether an answer is good, and adds the key `label`, 1 or 0.
    """

    messages_column: str = "messages"
    prompt_column: str = "prompt"
    completion_column: str = "completion"
    text_column: str = "text"
    label_column: str | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that `read` returns."""
        return MASKED_KEYS if self.label_column is None else (*MASKED_KEYS, "label")

    def __len__(self) -> int:
        return self.num_items

    def read(self, row_ids: Sequence[int]) -> Mapping[str, Sequence[Any]]:
        """Return the tokens of some rows, the length of each prompt, the mask of the later tokens, and labels."""
        rows = self._masked(row_ids, self._values(row_ids))
        read: dict[str, Sequence[Any]] = {
            "tokens": [row.tokens for row in rows],
            "prompt_length": [row.prompt_length for row in rows],
            "mask": [row.mask for row in rows],
        }
        if self.label_column is not None:
            read["label"] = [float(label) for label in self._labels(row_ids)]
        return read

    def check(self, max_tokens: int, vocabulary: int | None = None, items: Sequence[int] | None = None) -> CheckedRows:
        """Raise InvalidInput for data that would fail in some step.

        `max_tokens` is the longest row that fits. `vocabulary` is the vocabulary size of the models. `items` are the
        items that a run reads, by default all.
        """
        columns = self._columns
        for column in columns:
            self.rows.require_text(column, allow_messages=self._form != "text")
        if self._form == "messages" and not self._holds_messages(columns[0]):
            raise InvalidInput(
                f"{self.name}.{columns[0]}", "text", "lists of {role, content}; for plain text, set form to text"
            )
        if self._form == "text" and self.chat_template:
            raise InvalidInput(f"{self.name}.chat_template", True, "false: a text is not a chat")
        self.check_texts()
        self.check_columns()
        self._check_labels()
        self.check_tokenizer(has_chats=any(map(self._holds_messages, columns)))
        return self.checked_rows(items, max_tokens, vocabulary)

    def checked_tokens(self, items: Sequence[int]) -> list[list[int]]:
        """Return the tokens of some rows. Raises InvalidInput for a row without text, or without anything to learn."""
        columns, read = self._columns, self._values(items)
        for row, values in zip(items, read, strict=True):
            for column, value in zip(columns, values, strict=True):
                if value != "" or column == columns[-1]:  # the context of the trained column may be an empty text
                    self.check_text(f"{self.name} row {row} {column}", value, "text")
                self._check_learnt(row, column, value)
        rows = self._masked(items, read)
        for row, each in zip(items, rows, strict=True):
            if not any(each.mask):
                expected = f"a message of the assistant, or two tokens of text, in {self.path}"
                raise InvalidInput(f"{self.name} row {row} {columns[-1]}", "nothing to learn", expected)
        return [each.tokens for each in rows]

    def _check_learnt(self, row: int, column: str, value: Any) -> None:
        """Raise InvalidInput for a message whose key says neither that it is learnt nor that it is not."""
        for number, turn in enumerate(value if isinstance(value, list) else ()):
            for key in LEARNT_KEYS:
                if turn["role"] == ASSISTANT and turn.get(key) not in (None, 0, 1):
                    where = f"{self.name} row {row} {column} message {number} {key}"
                    raise InvalidInput(where, turn[key], f"true or false, or 1 or 0, in {self.path}")

    @property
    def wanted(self) -> Wanted:
        """Chats, completions or texts, with their columns; with labels, only rated completions."""
        completion = (self.prompt_column, self.completion_column)
        if self.label_column is not None:
            settings = ["prompt_column", "completion_column"]
            settings += [] if self.label_column == DEFAULT_LABEL_COLUMN else ["label_column"]
            return self.wants("answers", {"completion": (*completion, self.label_column)}, settings)
        own = {"messages": (self.messages_column,), "completion": completion, "text": (self.text_column,)}
        return self.wants("chats", own, ["messages_column", "prompt_column", "completion_column", "text_column"])

    @property
    def _form(self) -> Form:
        """What the rows have: messages, a completion or a text."""
        made, form = self.rows.found.makes, self.rows.found.form
        if self.rows.found.format is None:
            return cast(Form, form)
        return "messages" if "messages" in made else "completion"

    @property
    def _columns(self) -> tuple[str, ...]:
        """The columns that are read; the trained column is last."""
        if self._form == "completion":
            return self.prompt_column, self.completion_column
        return (self.messages_column if self._form == "messages" else self.text_column,)

    @property
    def goes_through_template(self) -> bool:
        """Whether rows are formatted by the tokenizer's chat template."""
        return self.chat_template or any(map(self._holds_messages, self._columns))

    def _holds_messages(self, column: str) -> bool:
        return self.rows.column(column).holds_messages

    def _labels(self, row_ids: Sequence[int]) -> list[Any]:
        return self.rows.read(self.label_column or "", row_ids)

    def _check_labels(self) -> None:
        """Raise InvalidInput for a label other than 1, 0, true or false, and for labels that are all the same."""
        if self.label_column is None:
            return
        labels = self._labels(range(len(self)))
        for row, label in enumerate(labels):
            if not isinstance(label, bool | int | float) or label not in (0, 1):
                where = f"{self.name} row {row} {self.label_column}"
                raise InvalidInput(where, label, f"true or false, or 1 or 0, in {self.path}")
        if len(set(labels)) == 1:
            expected = f"both good and bad answers, in {self.path}"
            raise InvalidInput(f"{self.name}.{self.label_column}", f"{bool(labels[0])} in all rows", expected)

    @property
    def message_columns(self) -> tuple[str, ...]:
        """The columns that may hold messages."""
        return self._columns

    def _values(self, row_ids: Sequence[int]) -> list[tuple[Any, ...]]:
        return list(zip(*(self.messages(column, row_ids) for column in self._columns), strict=True))

    def _masked(self, row_ids: Sequence[int], values: Sequence[tuple[Any, ...]]) -> list[MaskedTokens]:
        rows = zip(row_ids, values, self.tools_of(row_ids), self.variables_of(row_ids), strict=True)
        return [self._masked_row(*row) for row in rows]

    def _masked_row(
        self, row: int, values: tuple[Any, ...], tools: Tools, variables: Mapping[str, Any]
    ) -> MaskedTokens:
        tokenizer, where = self.loaded, f"{self.name} row {row} {self._columns[-1]}"
        *prompt, said = values
        if self._form == "messages":
            return self._learnt(chat_pieces(tokenizer, said, where, 0, tools, variables, _unlearnt(said)))
        before = prompt[0] if prompt else ""
        if self._form == "completion" and (
            self.chat_template or not (isinstance(before, str) and isinstance(said, str))
        ):
            asked = _messages(before, "user")
            chat = asked + _messages(said, ASSISTANT)
            pieces = chat_pieces(tokenizer, chat, where, len(asked), tools, variables, _unlearnt(chat))
            return self._learnt(pieces)
        tokens, length = answered_tokens(tokenizer, before, said, True, self.eos_token)
        return masked(tokens, [place >= length for place in range(len(tokens))])

    def _learnt(self, pieces: Sequence[Piece]) -> MaskedTokens:
        return masked_tokens(self.loaded, pieces, self.eos_token)


def _unlearnt(chat: Sequence[Mapping[str, Any]]) -> frozenset[int]:
    """Return the numbers of the messages that a key takes out of the learnt ones."""
    return frozenset(n for n, turn in enumerate(chat) if any(turn.get(key) in (False, 0) for key in LEARNT_KEYS))


def _messages(value: Any, role: str) -> list[Any]:
    """Return messages as they are, and a text as a message of `role`; an empty text is no message."""
    if isinstance(value, str):
        return [{"role": role, "content": value}] if value else []
    return list(value)
