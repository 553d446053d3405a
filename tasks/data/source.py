"""The common part of all datasets: settings, further columns by row number, checks of prompts and tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from types import MappingProxyType
from typing import Any

from prefect_rlhf.engines.rows import ColumnKind, keys_of_calls
from prefect_rlhf.engines.sampling.chats.tokenizers import lacks_template, template_name
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.tasks.data.answer_pieces import unwritten_thoughts
from prefect_rlhf.tasks.data.formats.find import Wanted
from prefect_rlhf.tasks.data.formats.format import Kind
from prefect_rlhf.tasks.data.formats.formatted_rows import VARIABLES, FormattedRows, MadeColumn
from prefect_rlhf.tasks.data.formats.turns import spells_turns
from prefect_rlhf.tasks.data.messages import has_text, plain_messages, shown_tools
from prefect_rlhf.tasks.data.rows.row_checks import CheckedRows, MeasuredRows, Say, measure, silent
from prefect_rlhf.tasks.data.stored.columns import Column
from prefect_rlhf.tasks.data.stored.stored_rows import DEFAULT_SPLIT, DEFAULT_SPLIT_COLUMN, StoredRows
from prefect_rlhf.tasks.data.template_checks import (
    ANOTHER_TEMPLATE,
    DEFAULT_TOOLS_COLUMN,
    RESERVED,
    check_tools,
    check_variables,
    dated,
    leaves_out,
    template_variables,
    unknown_marks,
    unshown,
)
from prefect_rlhf.tasks.data.tokenizer import Tools, load_tokenizer, template_remark


@dataclass(frozen=True)
class DatasetSource:
    """A name (the flow's parameter), the path of the rows, a split and a tokenizer's folder."""

    name: str
    path: str
    tokenizer: str
    split_column: str | None = DEFAULT_SPLIT_COLUMN
    split: str = DEFAULT_SPLIT
    chat_template: bool = False
    column_paths: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Renames columns: key -> column, or field of a struct such as `reward_model.ground_truth`."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Given to the chat template, with a row's tool schemas."""
    tools_column: str | None = DEFAULT_TOOLS_COLUMN
    eos_token: str | None = None
    """A setting of the model."""
    template: str | None = None
    """A setting of the model: a chat template that replaces the folder's."""
    form: str | None = None
    """The rows' format; None lets the columns decide."""
    say: Say = field(default=silent, kw_only=True, repr=False, compare=False)
    """Gets progress lines during a long check."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings only: rows that were read are not pickled, and a rank says nothing."""
        return {field.name: getattr(self, field.name) for field in fields(self)} | {"say": silent}

    @cached_property
    def stored(self) -> StoredRows:
        """The stored rows of this split."""
        settings = {getattr(self, one.name): one.name for one in fields(self) if one.name.endswith("_column")}
        return StoredRows(self.name, self.path, self.split_column, self.split, settings)

    @cached_property
    def rows(self) -> FormattedRows:
        """The rows of this split, with our columns."""
        return FormattedRows(self.stored, self.wanted)

    @property
    def wanted(self) -> Wanted:
        """This dataset's kind, and the columns that it reads."""
        raise NotImplementedError

    def wants(
        self,
        kind: Kind,
        own: Mapping[str, tuple[str, ...]],
        settings: Sequence[str],
        otherwise: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
    ) -> Wanted:
        """Return a kind with our own forms; columns in `settings` that differ from the defaults count as stated."""
        default = {one.name: one.default for one in fields(self)}
        stated = {name: getattr(self, name) for name in settings if getattr(self, name) != default[name]}
        return Wanted(kind, own, otherwise, stated, self.form, self.tools_column)

    @property
    def loaded(self) -> Any:
        """The tokenizer, with the chat template for the rows. Raises InvalidInput as `load_tokenizer` does."""
        return load_tokenizer(self.tokenizer, self.template)

    @property
    def num_items(self) -> int:
        """The number of stored rows."""
        return len(self.stored)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names that `read_column` accepts: keys of `column_paths`, and stored columns not hidden by a call's
        key.
        """
        return tuple(name for name in self._paths if name not in keys_of_calls())

    @property
    def column_kinds(self) -> Mapping[str, ColumnKind]:
        """The kind of each of the `columns`."""
        return {name: self._further(name).kind for name in self.columns}

    def read_column(self, name: str, row_ids: Sequence[int]) -> list[Any]:
        """Return plain Python values of some rows: numbers, text, lists, dicts, or None for a missing value.

        Raises InvalidInput for a name that is not in `columns`.
        """
        if name not in self.columns:
            raise InvalidInput(f"{self.name}.columns", name, f"one of {', '.join(self.columns)}, in {self.path}")
        place, items = self._paths[name], self.items_of(row_ids)
        return self.rows.read(place, items) if self._is_made(place) else self.stored.read(place, items)

    def _further(self, name: str) -> Column | MadeColumn:
        place = self._paths[name]
        return self.rows.column(place) if self._is_made(place) else self.stored.column(place)

    def _is_made(self, place: str) -> bool:
        """Whether a format makes a column that the file lacks."""
        return place in self.rows.found.makes and place not in self.stored.names

    def remarks(self) -> tuple[str, ...]:
        """Return log lines about changes made to the rows when reading them."""
        if not self.goes_through_template:
            return ()
        lines = [template_remark(self.name, self.loaded, variables=self.variables)]
        if thoughts := unwritten_thoughts(self.loaded, self.variables):
            learned = "answers are learned as the template writes them, without it"
            lines.append(f"{self.name}: the template prompts with {thoughts!r}; {learned}")
        return tuple(lines)

    def warnings(self) -> tuple[str, ...]:
        """Return log lines about what the tokens do not show: tools, calls, marks that are no tokens, and dates."""
        return (*unknown_marks(self), *dated(self), *unshown(self))

    @property
    def variables(self) -> Mapping[str, Any]:
        """The variables for the chat template."""
        return template_variables(self.chat_template_kwargs, self.eos_token)

    def variables_of(self, items: Sequence[int]) -> list[Mapping[str, Any]]:
        """Return the template's variables by row: the settings', and over them those in TRL's column of variables.

        Raises InvalidInput for a value that is not an object, and for a name that has a setting of its own.
        """
        if VARIABLES not in self.rows.names or not self.goes_through_template:
            return [self.variables] * len(items)
        stated, found = self.variables, list[Mapping[str, Any]]()
        for item, value in zip(items, self.rows.read(VARIABLES, items), strict=True):
            where = f"{self.name} row {item} {VARIABLES}"
            own = {} if value is None else value
            if not isinstance(own, Mapping):
                raise InvalidInput(where, value, f"an object of the chat template's variables, in {self.path}")
            if reserved := next((name for name in RESERVED if name in own), None):
                right = f"variables of the chat template: this name has its own setting, in {self.path}"
                raise InvalidInput(where, reserved, right)
            found.append({**stated, **{name: each for name, each in own.items() if each is not None}})
        return found

    @property
    def message_columns(self) -> tuple[str, ...]:
        """The columns that may hold messages."""
        return ()

    def messages(self, column: str, items: Sequence[int]) -> list[Any]:
        """Return a column's values, with chats as the template takes them. Raises InvalidInput for image parts."""
        values, found = self.rows.read(column, items), self.rows.column(column)
        if not found.holds_messages:
            return values
        tokenizer, has_all_keys = self.loaded, found.has_all_keys
        return [
            plain_messages(tokenizer, value, has_all_keys, f"{self.name} row {item}")
            for item, value in zip(items, values, strict=True)
        ]

    def tools_of(self, items: Sequence[int]) -> list[Tools]:
        """Return the tool schemas that the chat template shows, by row. Raises InvalidInput for other values."""
        column = self.shown_column
        if column is None:
            return [()] * len(items)
        has_all_keys = self.rows.column(column).has_all_keys
        return [
            shown_tools(value, has_all_keys, f"{self.name} row {item} {column}")
            for item, value in zip(items, self.rows.read(column, items), strict=True)
        ]

    @property
    def shown_column(self) -> str | None:
        """The column of tools, if the rows have it and a template can show it; a column named in settings must
        exist.
        """
        column = self.tools_column
        is_there = column is not None and (column in self.rows.names or column != DEFAULT_TOOLS_COLUMN)
        return column if is_there and self.goes_through_template else None

    @property
    def goes_through_template(self) -> bool:
        """Whether rows are formatted by the tokenizer's chat template."""
        return self.chat_template

    def items_of(self, row_ids: Sequence[int]) -> Sequence[int]:
        """Return the number of the stored row behind each row."""
        return row_ids

    def check_columns(self) -> None:
        """Raise InvalidInput for a missing column, and for a name in `column_paths` that a call's key hides."""
        for key, path in self.column_paths.items():
            if key in keys_of_calls():
                raise InvalidInput(
                    f"{self.name}.columns", key, f"another name: calls make {', '.join(keys_of_calls())}"
                )
            self.stored.column(path, f"{self.name}.columns.{key}")
            self.stored.read(path, [0])

    @property
    def _paths(self) -> dict[str, str]:
        """The place of each name's column."""
        return {name: name for name in self.stored.names} | dict(self.column_paths)

    def check_texts(self) -> None:
        """Raise InvalidInput for a column of text whose first row is the text of messages."""
        for column in self.message_columns:
            (value,) = self.rows.read(column, [0]) if self.rows.column(column).kind == "text" else [None]
            if isinstance(value, str) and spells_turns(value):
                right = f"messages, not their text: decode it and write the file again, {self.path}"
                raise InvalidInput(f"{self.name} row 0 {column}", value[:80], right)

    def check_tokenizer(self, has_chats: bool) -> None:
        """Raise InvalidInput unless the tokenizer can be loaded and, if needed, has a chat template."""
        tokenizer = self.loaded
        if (self.chat_template or has_chats) and (lack := lacks_template(tokenizer)) is not None:
            right = f"a tokenizer that has a chat template{lack}; or {ANOTHER_TEMPLATE}"
            raise InvalidInput(f"{self.name}.chat_template", self.tokenizer, right)
        check_variables(self, tokenizer)
        check_tools(self, tokenizer)

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
        """Raise InvalidInput, at `where`, for a text or chat that is missing or blank, and for messages that have no
        role, or a role that the template leaves out.

        `what` names the value in the error, such as "a prompt".
        """
        is_text = isinstance(value, str) or not value
        if not (value and value.strip() if is_text else all(map(has_text, value))):
            raise InvalidInput(where, value, f"{what} that is not empty, in {self.path}")
        if is_text:
            return
        if not all(turn["role"] for turn in value):
            raise InvalidInput(where, value, f"messages that all have a role, in {self.path}")
        tokenizer = self.loaded
        for number, turn in enumerate(value):
            if leaves_out(tokenizer, turn["role"]):
                leaves = f"{template_name(tokenizer)} leaves out messages of this role"
                right = f"a role that the chat template writes, such as user; {leaves}, in {self.path}"
                raise InvalidInput(f"{where} message {number} role", turn["role"], right)

    def checked_rows(self, items: Sequence[int] | None, max_tokens: int, vocabulary: int | None) -> CheckedRows:
        """Return the rows of some items, by default all. Raises as `measured` and `check_measured` do."""
        rows = self.measured(range(self.num_items) if items is None else items)
        self.check_measured(rows, max_tokens, vocabulary)
        return CheckedRows(rows.lengths, self.remarks())

    def measured(self, items: Sequence[int]) -> MeasuredRows:
        """Measure the rows of some items. Raises InvalidInput for a row that can never be used."""
        tokenizer = self.loaded
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
        """Return these items' tokens. Raises InvalidInput for an item that gives no row."""
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
