"""Exchange of rows between ranks: each pair sends a header and then, for each number format, a payload.

Only the holder of a row knows its length, so all headers precede all payloads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prefect_rlhf.engines.commands import RowTransfer, TransferCommand
from prefect_rlhf.engines.rank.store import RowStore
from prefect_rlhf.engines.weights.send_receive import send_receive

_DTYPES = (torch.int64, torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.float64, torch.bool)
_SCALAR = -1  # in a header, in place of the length of a 0-d row


def exchange_rows(store: RowStore, command: TransferCommand, rank: int) -> int:
    """Do this rank's part of `command`; return the bytes received. Collective over the ranks it names."""
    sent = _by_peer((t.target, t) for t in command.transfers if t.source == rank)
    received = _by_peer((t.source, t) for t in command.transfers if t.target == rank)
    outgoing = {
        peer: _Packet.pack([row for t in ts for key in t.keys for row in store.get(command.step, t.call, key, t.rows)])
        for peer, ts in sent.items()
    }
    headers = {peer: torch.empty(len(_names(transfers)), 2).long() for peer, transfers in received.items()}
    send_receive(
        {peer: [packet.header] for peer, packet in outgoing.items()}, {peer: [h] for peer, h in headers.items()}
    )
    incoming = {peer: _Packet.empty(header) for peer, header in headers.items()}
    send_receive(
        {peer: packet.payloads for peer, packet in outgoing.items()},
        {peer: packet.payloads for peer, packet in incoming.items()},
    )
    for peer, packet in incoming.items():
        for (call, key, row), tensor in zip(_names(received[peer]), packet.unpack(), strict=True):
            store.put(command.step, call, key, {row: tensor})
    return sum(payload.nbytes for packet in incoming.values() for payload in packet.payloads)


@dataclass(frozen=True, slots=True)
class _Packet:
    """Rows under way: `header` is [rows, 2], length and number format of each; a payload for each format used."""

    header: Tensor
    payloads: tuple[Tensor, ...]

    @classmethod
    def pack(cls, rows: Sequence[Tensor]) -> _Packet:
        lengths = [len(row) if row.dim() else _SCALAR for row in rows]
        formats = [_DTYPES.index(row.dtype) for row in rows]
        flat = [row.reshape(-1) for row in rows]
        payloads = [
            torch.cat([row for row, format_ in zip(flat, formats, strict=True) if format_ == used])
            for used in sorted(set(formats))
        ]
        return cls(torch.tensor([lengths, formats]).t().contiguous(), tuple(payloads))

    @classmethod
    def empty(cls, header: Tensor) -> _Packet:
        """Make room for what `header` announces."""
        lengths, formats = header[:, 0], header[:, 1]
        numels = torch.where(lengths == _SCALAR, 1, lengths)
        used = sorted(set(formats.tolist()))
        return cls(header, tuple(torch.empty(int(numels[formats == i].sum()), dtype=_DTYPES[i]) for i in used))

    def unpack(self) -> Iterator[Tensor]:
        """Yield copies of the rows, so that a payload does not outlive the last of its rows in the store."""
        rest = {payload.dtype: payload for payload in self.payloads}
        for length, format_ in self.header.tolist():
            dtype, numel = _DTYPES[format_], 1 if length == _SCALAR else length
            row, rest[dtype] = rest[dtype][:numel].clone(), rest[dtype][numel:]
            yield row[0] if length == _SCALAR else row


def _by_peer(pairs: Iterator[tuple[int, RowTransfer]]) -> dict[int, list[RowTransfer]]:
    by_peer: dict[int, list[RowTransfer]] = {}
    for peer, transfer in pairs:
        by_peer.setdefault(peer, []).append(transfer)
    return by_peer


def _names(transfers: Sequence[RowTransfer]) -> list[tuple[str, str, int]]:
    """Name (call, key, row) of every row transferred, in the order both ends pack and unpack."""
    return [(t.call, key, row) for t in transfers for key in t.keys for row in t.rows]
