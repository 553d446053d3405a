"""Inputs of a call: for each of its ports the rows' columns, from the store or from a dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prefect_rlhf.engines.commands import CallCommand, RowSource
from prefect_rlhf.engines.engine import Sequences
from prefect_rlhf.engines.rank.store import RowsMissing, RowStore
from prefect_rlhf.engines.rows import Batch, Column, pad
from prefect_rlhf.placement.graph import Port


@dataclass(frozen=True, slots=True)
class CallInputs:
    """The columns of a call's rows that this rank's stage uses, port by port in the order of `ports`.

    `lengths` are the tokens of each row where the controller knows them; else they are counted.
    """

    ports: tuple[Port, ...]
    columns: tuple[Mapping[str, Column], ...]
    lengths: tuple[int, ...] = ()
    keys: frozenset[str] | None = None  # those that the stage uses; None: all

    @property
    def batches(self) -> list[Batch]:
        """A Batch per port: a computation's positional arguments."""
        return [Batch(columns) for columns in self.columns]

    def first(self, key: str) -> Column | None:
        """Return the column of the first port that has it."""
        return next((columns[key] for columns in self.columns if key in columns), None)

    def response_lengths(self) -> list[int] | None:
        """Count the response tokens of each row, where some port has the tokens."""
        tokens, prompt_lengths = self.first("tokens"), self.first("prompt_length")
        if tokens is None or prompt_lengths is None:
            return None
        return [len(row) - int(prompt) for row, prompt in zip(tokens, prompt_lengths, strict=True)]

    def sequences(self, doing: str) -> Sequences:
        """Return the rows' tokens, padded; zeros for what this rank's stage does not use.

        Raises RowsMissing when it uses tokens or prompt_length and no port has them.
        """
        tokens, prompt_lengths = self.first("tokens"), self.first("prompt_length")
        if (tokens is None and self._uses("tokens")) or (prompt_lengths is None and self._uses("prompt_length")):
            raise RowsMissing(f"{doing}: none of its inputs has the keys tokens and prompt_length")
        lengths_B = torch.tensor(self.lengths if tokens is None else [len(row) for row in tokens])
        unused = lengths_B.new_zeros(1)
        tokens_BS = unused.expand(len(lengths_B), int(lengths_B.max())) if tokens is None else pad(tokens)
        prompts_B = unused.expand(len(lengths_B)) if prompt_lengths is None else torch.stack(list(prompt_lengths))
        return Sequences(tokens_BS, prompts_B.long(), lengths_B)

    def _uses(self, key: str) -> bool:
        return self.keys is None or key in self.keys

    def training_batch(self, sequences: Sequences) -> dict[str, Tensor]:
        """Make what a loss sees: every column as `port.key`, that of the first port with it also as `key`, and `mask`.

        Empty on the stages that have no loss.
        """
        if not self._uses("prompt_length"):
            return {}
        batch: dict[str, Tensor] = {}
        for port, columns in zip(self.ports, self.columns, strict=True):
            for key, column in columns.items():
                batch[f"{port.argument}.{key}"] = padded = pad(column)
                batch.setdefault(key, padded)
        return batch | {"mask": sequences.response_mask_BT()}

    def lengths_of(self, column: Tensor) -> list[int]:
        """Return the length of each row of a computed, padded column: its response's, or of a column just as wide."""
        if column.dim() == 1:
            return [1] * len(column)
        candidates = [self.response_lengths() or []]
        ragged = [rows for columns in self.columns for rows in columns.values() if rows[0].dim() == 1]
        candidates += [[len(row) for row in rows] for rows in ragged]
        fitting = (lengths for lengths in candidates if lengths and max(lengths) == column.shape[1])
        return next(fitting, [column.shape[1]] * len(column))


def read_call_inputs(command: CallCommand, store: RowStore, datasets: Mapping[str, RowSource]) -> CallInputs:
    """Collect what `command.call` reads of `command.rows` on this rank."""
    columns: list[dict[str, Column]] = []
    for port in command.call.inputs:
        keys = [key for key in port.keys if command.keys is None or key in command.keys]
        if port.source in datasets:
            rows = datasets[port.source].read(command.row_ids)
            columns.append({key: [torch.as_tensor(value) for value in rows[key]] for key in keys})
        else:
            columns.append({key: store.get(command.step, port.source, key, command.rows) for key in keys})
    return CallInputs(command.call.inputs, tuple(columns), command.lengths, command.keys)


def read_prompts(command: CallCommand, datasets: Mapping[str, RowSource]) -> Sequence[Sequence[int]]:
    """Read the prompt of each row of a generate, as token ids. Raises RowsMissing when no port is an open dataset."""
    source = next((datasets[port.source] for port in command.call.inputs if port.source in datasets), None)
    if source is None:
        raise RowsMissing(f"{command.doing}: none of its inputs is a dataset that is open on this rank")
    return source.read(command.row_ids)["prompt_tokens"]
