"""A call's inputs: for each port, the columns of the rows, from the store or from a dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from prefect_rlhf.engines.commands import CallCommand, PassCommand, RowSource
from prefect_rlhf.engines.engine import Sequences, TrainingRows
from prefect_rlhf.engines.rank.store import RowsMissing, RowStore
from prefect_rlhf.engines.rows import Batch, Column, ColumnKind, DatasetColumns, numbers, pad
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.storage.inputs import model_folder
from prefect_rlhf.placement.graph import Port
from prefect_rlhf.placement.rows.tokenizers import Tokenizers


@dataclass(frozen=True, slots=True)
class CallInputs:
    """The columns of a call's rows that this rank's stage uses, port by port in the order of `ports`."""

    ports: tuple[Port, ...]
    columns: tuple[Mapping[str, Column], ...]
    groups: tuple[int, ...] = ()
    """The numbers of the rows' source rows."""
    dataset: DatasetColumns | None = None
    """The columns of the dataset that they come from."""
    lengths: tuple[int, ...] = ()
    """The rows' lengths in tokens if the controller knows them; otherwise they are counted."""
    keys: frozenset[str] | None = None  # the keys that the stage uses; None: all
    tokenizers: tuple[str | InvalidInput | None, ...] = ()
    """The folders of the tokenizers that wrote each port's tokens."""

    @property
    def batches(self) -> list[Batch]:
        """A Batch per port: a computation's positional arguments."""
        groups = torch.tensor(self.groups)
        ports = zip_longest(self.columns, self.tokenizers)
        return [Batch(columns, groups, self.dataset, tokenizer) for columns, tokenizer in ports]

    def first(self, key: str) -> Column | None:
        """Return the column of the first port that has it."""
        return next((columns[key] for columns in self.columns if key in columns), None)

    def response_lengths(self) -> list[int] | None:
        """Return each row's number of response tokens, if some port has the tokens."""
        tokens, prompt_lengths = self.first("tokens"), self.first("prompt_length")
        if tokens is None or prompt_lengths is None:
            return None
        return [len(row) - int(prompt) for row, prompt in zip(tokens, prompt_lengths, strict=True)]

    def sequences(self, doing: str) -> Sequences:
        """Return the rows' tokens, padded; zeros for tokens that this rank's stage does not use.

        Raises RowsMissing if it uses tokens or prompt_length and no port has them.
        """
        tokens, prompt_lengths = self.first("tokens"), self.first("prompt_length")
        if (tokens is None and self._uses("tokens")) or (prompt_lengths is None and self._uses("prompt_length")):
            raise RowsMissing(f"{doing}: no input has the keys tokens and prompt_length")
        lengths = self.lengths if tokens is None else [len(row) for row in tokens]
        lengths_B = torch.tensor(lengths, dtype=torch.long)
        unused = lengths_B.new_zeros(1)
        if not lengths:
            return Sequences(unused.expand(0, 1), lengths_B, lengths_B)
        tokens_BS = unused.expand(len(lengths), max(lengths)) if tokens is None else pad(tokens)
        prompts_B = unused.expand(len(lengths)) if prompt_lengths is None else torch.stack(list(prompt_lengths))
        return Sequences(tokens_BS, prompts_B.long(), lengths_B)

    def _uses(self, key: str) -> bool:
        return self.keys is None or key in self.keys

    def training_batch(self, sequences: Sequences, ports: Sequence[Port] = ()) -> dict[str, Tensor]:
        """Return a loss's columns: every column as `port.key`, the first port's also as `key`, and `mask`.

        Numeric columns of the dataset are keys too. `mask` [B, T] is 1.0 at the trained response tokens: an input's
        `mask`, or else all tokens. `row_weights` [B], if given, multiply it. The columns come from `ports`, or else
        from all ports. Empty on stages without a loss, and without rows.
        """
        if not self._uses("prompt_length") or not len(sequences):
            return {}
        batch: dict[str, Tensor] = {}
        by_source: dict[str, dict[str, Column]] = {}
        for port, columns in zip(self.ports, self.columns, strict=True):
            by_source.setdefault(port.source, {}).update(columns)
        for port in ports or self.ports:
            there = by_source[port.source]
            for key in (key for key in port.keys if key in there):
                batch[f"{port.argument}.{key}"] = padded = pad(there[key])
                batch.setdefault(key, padded)
        if self.dataset is not None:
            for name, kind in self.dataset.kinds.items():
                if kind == "number" and name not in batch:
                    batch[name] = numbers(self.dataset.read(name))
        mask_BT = sequences.response_mask_BT()
        mask_BT = mask_BT * batch["mask"].to(mask_BT) if "mask" in batch else mask_BT
        if "row_weights" in batch:
            mask_BT = mask_BT * batch["row_weights"].to(mask_BT)[:, None]
        return batch | {"mask": mask_BT}

    def lengths_of(self, column: Tensor) -> list[int]:
        """Return each row's length in a computed, padded column: its response's, or that of an equally wide column."""
        if column.dim() == 1:
            return [1] * len(column)
        candidates = [self.response_lengths() or []]
        ragged = [rows for columns in self.columns for rows in columns.values() if rows[0].dim() == 1]
        candidates += [[len(row) for row in rows] for rows in ragged]
        fitting = (lengths for lengths in candidates if lengths and max(lengths) == column.shape[1])
        return next(fitting, [column.shape[1]] * len(column))


def read_call_inputs(command: CallCommand, store: RowStore, datasets: Mapping[str, RowSource]) -> CallInputs:
    """Collect the columns of `command.rows` that `command.call` reads on this rank."""
    columns: list[dict[str, Column]] = []
    rows = command.call.rows
    for port in command.call.inputs:
        keys = [key for key in port.keys if command.keys is None or key in command.keys]
        if port.source in datasets:
            read = datasets[port.source].read(command.row_ids)
            columns.append({key: [torch.as_tensor(value) for value in read[key]] for key in keys})
        else:
            numbers_there = port.source_rows(command.rows)
            stored: dict[str, Column] = {key: store.get(command.step, port.source, key, numbers_there) for key in keys}
            columns.append(stored if port.children == 1 else _together(port, stored))
    source = datasets.get(rows.dataset)
    dataset = RowsOfDataset(source, command.row_ids) if source is not None else None
    groups = rows.groups(command.rows)
    ports = command.call.inputs
    tokenizers = tuple(command.tokenizers.of_rows(port.source) for port in ports)
    return CallInputs(ports, tuple(columns), groups, dataset, command.lengths, command.keys, tokenizers)


def _together(port: Port, stored: Mapping[str, Column]) -> dict[str, Column]:
    """Return columns whose rows are the numbers of `port.children` rows, [B, k]. Raises InvalidInput for others."""
    found: dict[str, Column] = {}
    for key, rows in stored.items():
        if any(row.dim() for row in rows):
            seen, expected = f"{rows[0].dim()} dimensions", "a number for each row, as per=... reads them together"
            raise InvalidInput(f"{port.source}.{key}", seen, expected)
        found[key] = list(torch.stack(list(rows)).view(-1, port.children)) if rows else []
    return found


def tokenizers_here(tokenizers: Tokenizers) -> Tokenizers:
    """Return the tokenizers with folders on this machine, which a user's code can open."""
    return replace(tokenizers, folders={role: _folder_here(path, role) for role, path in tokenizers.folders.items()})


@lru_cache(maxsize=64)
def _folder_here(path: str, role: str) -> str:
    return str(model_folder(path, f"{role}.path", "tokenizer"))


def training_rows(
    command: CallCommand, rows: PassCommand, store: RowStore, datasets: Mapping[str, RowSource]
) -> TrainingRows:
    """Collect the inputs of a train_step's losses on a row set."""
    inputs = read_call_inputs(command.on(rows), store, datasets)
    sequences = inputs.sequences(command.doing)
    columns = tuple(inputs.training_batch(sequences, term.inputs) for term in rows.terms)
    item = rows.call.rows_per_item
    return TrainingRows(sequences, rows.terms, columns, item, rows.mini_batch_rows, rows.some_without_rows)


@dataclass(frozen=True, slots=True)
class RowsOfDataset:
    """A dataset's columns for some of its rows; see DatasetColumns."""

    source: RowSource
    row_ids: tuple[int, ...]

    @property
    def kinds(self) -> Mapping[str, ColumnKind]:
        """The kind of each column."""
        return self.source.column_kinds

    def read(self, name: str) -> list[Any]:
        """Return a column's value for each row."""
        return self.source.read_column(name, self.row_ids)


def read_prompts(command: CallCommand, store: RowStore, datasets: Mapping[str, RowSource]) -> Sequence[Sequence[int]]:
    """Read each row's prompt for a generate, as token ids: from its dataset, or made by an earlier call."""
    port = next(port for port in command.call.inputs if "prompt_tokens" in port.keys)
    if port.source in datasets:
        return datasets[port.source].read(command.row_ids)["prompt_tokens"]
    rows = port.source_rows(command.rows)
    return [tokens.tolist() for tokens in store.get(command.step, port.source, "prompt_tokens", rows)]
