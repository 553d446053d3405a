"""How a replica's rows are cut into mini-batches and micro-batches.

Shapes: B rows of the replica, b rows of a micro-batch, S tokens of a row, N response tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from prefect_rlhf.engines.engine import Sequences
from prefect_rlhf.engines.megatron.packing import Packing
from prefect_rlhf.placement.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows that go through the model together. `rows` are their positions among the replica's rows."""

    rows: Tensor
    sequences: Sequences
    packing: Packing
    width: int  # T of the whole replica, so that outputs line up with the batch's columns

    @property
    def input_ids(self) -> Tensor:
        """What the model is given: [1, N] packed tokens, or [b, S] where the packing keeps padding."""
        if self.packing.keeps_padding:
            return self.sequences.tokens_BS
        return self.sequences.tokens_BS.t().flatten()[self.packing.token_N][None]

    def response_index(self) -> tuple[Tensor, Tensor]:
        """(row, t) of each of the N response tokens."""
        lengths = self.sequences.lengths_B - self.sequences.prompt_lengths_B
        t = torch.arange(self.width, device=lengths.device)
        row_N, t_N = (t[None] < lengths[:, None]).nonzero(as_tuple=True)
        return row_N, t_N

    def columns(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """These rows of every column."""
        return {key: column[self.rows] for key, column in batch.items()}


def mini_batch_rows(num_rows: int, mini_batches: int, sizes: Sequence[int] = ()) -> list[Tensor]:
    """Positions of each mini-batch: chunks of these sizes in order, without them equal ones."""
    if sizes:
        return list(torch.arange(num_rows).tensor_split(list(accumulate(sizes))[:-1]))
    if num_rows % mini_batches:
        raise InvalidInput("mini_batches", mini_batches, f"a divisor of the {num_rows} rows of a replica")
    return list(torch.arange(num_rows).chunk(mini_batches))


def micro_batches(
    sequences: Sequences, rows: Tensor, count: int, rows_per_item: int = 1, equal_shapes: bool = False
) -> list[MicroBatch]:
    """Cut `rows` into at most `count` micro-batches of whole items, rows of like length together.

    With `equal_shapes` (pipelines) all have as many rows and are padded to the same length; else padding is left out.
    """
    items = rows.view(-1, rows_per_item)
    if equal_shapes and items.shape[0] % count:
        raise InvalidInput("micro_batches", count, f"a divisor of the {items.shape[0]} items of a mini-batch")
    longest = sequences.lengths_B.cpu()[items].amax(1)
    groups = items[longest.argsort(descending=True)].tensor_split(min(count, items.shape[0]))
    width = sequences.num_response_tokens
    fixed = int(longest.max()) if equal_shapes else None
    return [_micro_batch(sequences, group.flatten(), width, fixed) for group in groups]


def _micro_batch(sequences: Sequences, rows: Tensor, width: int, padded_length: int | None) -> MicroBatch:
    lengths = sequences.lengths_B[rows]
    longest = padded_length or int(lengths.max())
    picked = Sequences(sequences.tokens_BS[rows, :longest], sequences.prompt_lengths_B[rows], lengths)
    packing = Packing.of(lengths, longest, keep_padding=padded_length is not None)
    return MicroBatch(rows, picked, packing, width)


def on_device(sequences: Sequences, device: torch.device) -> Sequences:
    """The same rows on the device."""
    return Sequences(
        sequences.tokens_BS.to(device), sequences.prompt_lengths_B.to(device), sequences.lengths_B.to(device)
    )


def scatter_rows(parts: Sequence[tuple[MicroBatch, Tensor]], num_rows: int) -> Tensor:
    """Put the outputs of micro-batches back in the order of the replica's rows."""
    first = parts[0][1]
    whole = first.new_zeros((num_rows, *first.shape[1:]))
    for micro, values in parts:
        whole[micro.rows] = values
    return whole
