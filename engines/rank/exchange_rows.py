"""Exchanges rows between ranks: each pair sends a header and its rows, in a single message if the rows are short.

Only a row's holder knows its length, so bytes that do not fit in the first message follow in a second message.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from prefect_rlhf.engines.commands import RowTransfer, TransferCommand
from prefect_rlhf.engines.rank.store import RowStore
from prefect_rlhf.engines.weights.send_receive import send_receive

_DTYPES = (
    torch.int64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int32,
    torch.float64,
    torch.bool,
    torch.uint8,
    torch.int16,
)
_SCALAR = -1  # in a header, in place of the length of a 0-d row
_NO_WIDTH = -1  # in a header, in place of the width of a row without vectors
_HEADER_BYTES = 24  # of a row: its length, its width and its number format, as int64
_FIRST_BYTES = 256  # of a row, on average: room in the first message, for some fifty tokens and their log-probabilities


def exchange_rows(store: RowStore, command: TransferCommand, rank: int) -> int:
    """Do this rank's part of `command`; return how many bytes of rows were received. Collective over the named
    ranks.
    """
    sent = _by_peer((t.target, t) for t in command.transfers if t.source == rank)
    received = _by_peer((t.source, t) for t in command.transfers if t.target == rank)
    outgoing = {
        peer: _parts([row for t in ts for key in t.keys for row in store.get(command.step, t.call, key, t.rows)])
        for peer, ts in sent.items()
    }
    first = {peer: _bytes(_first_bytes(len(_names(transfers)))) for peer, transfers in received.items()}
    send_receive({peer: [part] for peer, (part, _) in outgoing.items()}, {peer: [part] for peer, part in first.items()})
    rest = {peer: _bytes(_rest_bytes(part, len(_names(received[peer])))) for peer, part in first.items()}
    send_receive({peer: [part] for peer, (_, part) in outgoing.items()}, {peer: [part] for peer, part in rest.items()})
    num_bytes = 0
    for peer, transfers in received.items():
        names = _names(transfers)
        for (call, key, row), tensor in zip(
            names, _rows(torch.cat([first[peer], rest[peer]]), len(names)), strict=True
        ):
            store.put(command.step, call, key, {row: tensor})
            num_bytes += tensor.nbytes
    return num_bytes


def _parts(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the first and the second message of some rows: a header, [rows, 3], and the bytes of the rows."""
    lengths = [len(row) if row.dim() else _SCALAR for row in rows]
    widths = [row.shape[1] if row.dim() == 2 else _NO_WIDTH for row in rows]
    header = torch.tensor([lengths, widths, [_DTYPES.index(row.dtype) for row in rows]]).t().contiguous()
    packed = torch.cat([part.reshape(-1).view(torch.uint8) for part in (header, *rows)])
    room = _first_bytes(len(rows))
    first, rest = packed[:room], packed[room:]
    return torch.cat([first, first.new_zeros(room - len(first))]) if len(first) < room else first, rest


def _first_bytes(num_rows: int) -> int:
    return (_HEADER_BYTES + _FIRST_BYTES) * num_rows


def _rest_bytes(first: Tensor, num_rows: int) -> int:
    """Return the bytes of the second message."""
    sizes = (num_bytes for *_, num_bytes in _header(first, num_rows))
    return max(0, _HEADER_BYTES * num_rows + sum(sizes) - len(first))


def _header(packed: Tensor, num_rows: int) -> Iterator[tuple[tuple[int, ...], torch.dtype, int]]:
    """Yield the shape, number format and bytes of each row."""
    for length, width, format_ in packed[: _HEADER_BYTES * num_rows].view(torch.int64).reshape(num_rows, 3).tolist():
        dtype = _DTYPES[format_]
        shape = () if length == _SCALAR else (length,) if width == _NO_WIDTH else (length, width)
        yield shape, dtype, dtype.itemsize * math.prod(shape)


def _rows(packed: Tensor, num_rows: int) -> Iterator[Tensor]:
    """Yield copies of the rows, so that a message does not outlive the last of its rows in the store."""
    start = _HEADER_BYTES * num_rows
    for shape, dtype, num_bytes in _header(packed, num_rows):
        yield packed[start : start + num_bytes].clone().view(dtype).reshape(shape)
        start += num_bytes


def _bytes(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)


def _by_peer(pairs: Iterator[tuple[int, RowTransfer]]) -> dict[int, list[RowTransfer]]:
    by_peer: dict[int, list[RowTransfer]] = {}
    for peer, transfer in pairs:
        by_peer.setdefault(peer, []).append(transfer)
    return by_peer


def _names(transfers: Sequence[RowTransfer]) -> list[tuple[str, str, int]]:
    """Name (call, key, row) of every row transferred, in the order both ends pack and unpack."""
    return [(t.call, key, row) for t in transfers for key in t.keys for row in t.rows]
