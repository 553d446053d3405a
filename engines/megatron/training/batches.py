"""Mini-batches and micro-batches of a replica's rows.

Shapes: B rows of the replica, b rows of a micro-batch, S tokens of a row, N response tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from prefect_rlhf.engines.engine import Sequences
from prefect_rlhf.engines.megatron.packing import Packing, to_device
from prefect_rlhf.errors.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows that pass through the model together. `rows` are their positions among the replica's rows.

    It is made on the host, which then knows every shape without waiting for the device.
    """

    rows: Tensor
    sequences: Sequences
    packing: Packing
    width: int  # T of the whole replica, so that outputs line up with the batch's columns
    num_response_tokens: int  # N

    @property
    def input_ids(self) -> Tensor:
        """The model's input: [1, N] packed tokens."""
        return self.sequences.tokens_BS.t().flatten()[self.packing.token_N][None]

    def response_index(self) -> tuple[Tensor, Tensor]:
        """Return (row, t) of each of the N response tokens."""
        lengths_b = self.sequences.lengths_B - self.sequences.prompt_lengths_B
        row_N = torch.repeat_interleave(lengths_b, output_size=self.num_response_tokens)
        first_b = lengths_b.cumsum(0) - lengths_b
        return row_N, torch.arange(self.num_response_tokens, device=row_N.device) - first_b[row_N]

    def to(self, device: torch.device) -> MicroBatch:
        """Return it on a device."""
        of = self.sequences
        rows, *tensors = to_device((self.rows, of.tokens_BS, of.prompt_lengths_B, of.lengths_B), device)
        return replace(self, rows=rows, sequences=Sequences(*tensors), packing=self.packing.to(device))


def mini_batch_rows(num_rows: int, mini_batches: int, sizes: Sequence[int] = ()) -> list[Tensor]:
    """Return the positions of each mini-batch: chunks of these sizes, or equal chunks without sizes."""
    if sizes:
        return list(torch.arange(num_rows).tensor_split(list(accumulate(sizes))[:-1]))
    if num_rows % mini_batches:
        raise InvalidInput("mini_batches", mini_batches, f"a divisor of the {num_rows} rows of a replica")
    return list(torch.arange(num_rows).chunk(mini_batches))


def micro_batches(
    sequences: Sequences, rows: Tensor, count: int, rows_per_item: int = 1, equal_shapes: bool = False
) -> list[MicroBatch]:
    """Cut `rows` into at most `count` micro-batches of whole items, with about equal tokens and rows of similar length.

    With `equal_shapes` (for pipelines), all are padded to the same number of tokens. Without rows the result is empty.
    """
    rows_of = micro_batch_rows(sequences, rows, count, rows_per_item)
    num_tokens = max((tokens_of(sequences, rows) for rows in rows_of), default=0) if equal_shapes else None
    return [micro_batch(sequences, rows, num_tokens) for rows in rows_of]


def micro_batch_rows(sequences: Sequences, rows: Tensor, count: int, rows_per_item: int = 1) -> list[Tensor]:
    """Return each micro-batch's rows; see `micro_batches`."""
    if not len(rows):
        return []
    groups = like_lengths(sequences.lengths_B[rows].view(-1, rows_per_item), count)
    return [rows.view(-1, rows_per_item)[group].flatten() for group in groups]


def tokens_of(sequences: Sequences, rows: Tensor) -> int:
    """Count the tokens of these rows."""
    return int(sequences.lengths_B[rows].sum())


def micro_batch(sequences: Sequences, rows: Tensor, num_tokens: int | None = None) -> MicroBatch:
    """Return these rows as a micro-batch, filled up to `num_tokens` tokens."""
    prompts, lengths = sequences.prompt_lengths_B[rows], sequences.lengths_B[rows]
    longest = int(lengths.max())
    packing = Packing.of(lengths, longest, num_tokens)
    cut = Sequences(sequences.tokens_BS[rows, :longest], prompts, lengths)
    return MicroBatch(rows, cut, packing, sequences.num_response_tokens, int((lengths - prompts).sum()))


def like_lengths(lengths: Tensor, count: int) -> list[Tensor]:
    """Divide items with `lengths` [items, rows], in tokens, into at most `count` groups, longest first.

    All tokens are divided equally among the groups, and an item belongs to the group that contains its middle.

    >>> [group.tolist() for group in like_lengths(torch.tensor([[2], [9], [3], [4]]), count=2)]
    [[1], [3, 2, 0]]
    """
    by_length = lengths.amax(1).argsort(descending=True, stable=True)
    tokens = lengths.sum(1)[by_length]
    twice_middle = 2 * tokens.cumsum(0) - tokens
    group = twice_middle * count // (2 * tokens.sum())
    return [part for g in range(count) if len(part := by_length[group == g])]


def scatter_rows(parts: Sequence[tuple[MicroBatch, Tensor]], num_rows: int) -> Tensor:
    """Put the outputs of micro-batches back in the order of the replica's rows."""
    first = parts[0][1]
    whole = first.new_zeros((num_rows, *first.shape[1:]))
    for micro, values in parts:
        whole[micro.rows] = values
    return whole
