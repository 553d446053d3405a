"""Rows between ranks: what arrives is what was sent, for every pattern of who sends what to whom."""

import random

import pytest
import torch

from prefect_rlhf.engines.commands import RowTransfer, TransferCommand
from prefect_rlhf.engines.gang.local import LocalGang
from prefect_rlhf.engines.gang.processes.messages import GangSettings
from prefect_rlhf.engines.rank.exchange_rows import exchange_rows
from prefect_rlhf.engines.rank.store import RowStore

SIZE = 4
KEYS = ("tokens", "prompt_length", "logprobs", "flag", "top_ids", "routes")


def row_value(key, row):
    """What every rank knows a row to be: ragged, of several formats, sometimes empty."""
    match key:
        case "tokens":
            return torch.arange(row, row + 3 + row % 5)
        case "prompt_length":
            return torch.tensor(row)
        case "logprobs":
            return -torch.arange(row % 4, dtype=torch.float32)
        case "top_ids":
            return torch.arange(row % 4 * 3, dtype=torch.int16).reshape(-1, 3)
        case "routes":
            return torch.full((row % 3, row % 2), row, dtype=torch.uint8)
        case _:
            return torch.tensor(row % 2 == 0)


class Exchanger:
    """A rank that knows what it should receive."""

    def __init__(self, rank, size):
        self.rank, self.store = rank, RowStore()

    def exchange(self, command):
        """Send and receive; return the number of rows that arrived and are right."""
        self.store.free(command.step, self.store.keys(command.step))
        for transfer in command.transfers:
            if transfer.source == self.rank:
                for key in transfer.keys:
                    self.store.put(
                        command.step, transfer.call, key, {row: row_value(key, row) for row in transfer.rows}
                    )
        received = exchange_rows(self.store, command, self.rank)
        mine = [t for t in command.transfers if t.target == self.rank]
        for transfer in mine:
            for key in transfer.keys:
                for row, value in zip(transfer.rows, self._rows(command.step, transfer, key), strict=True):
                    expected = row_value(key, row)
                    assert value.dtype == expected.dtype and value.shape == expected.shape
                    assert torch.equal(value, expected)
        return sum(len(t.rows) * len(t.keys) for t in mine), received

    def _rows(self, step, transfer, key):
        return self.store.get(step, transfer.call, key, transfer.rows)


@pytest.fixture(scope="module")
def gang():
    gang = LocalGang(
        GangSettings(SIZE, Exchanger, environment={"OMP_NUM_THREADS": "1"}, preload=("torch.distributed",))
    )
    yield gang
    gang.close()


def everywhere(gang, method, *arguments):
    return gang.call(method, dict.fromkeys(range(SIZE), arguments), doing="a test", deadline_seconds=30)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_rows_arrive(gang, seed):
    """Random patterns, all at once in both directions: every row arrives as it was sent, to whom it was sent."""
    draw = random.Random(seed)
    transfers = []
    for _ in range(draw.randint(0, 12)):
        source, target = draw.sample(range(SIZE), 2)
        keys = tuple(draw.sample(KEYS, draw.randint(1, len(KEYS))))
        rows = tuple(draw.sample(range(40), draw.randint(1, 8)))
        transfers.append(RowTransfer(source, target, draw.choice(["generate", "score"]), keys, rows))
    results = everywhere(gang, Exchanger.exchange, TransferCommand(seed, tuple(transfers)))
    assert sum(count for count, _ in results.values()) == sum(len(t.keys) * len(t.rows) for t in transfers)


@pytest.mark.slow
def test_bytes_received_are_counted(gang):
    """The bytes reported are those of the rows."""
    command = TransferCommand(100, (RowTransfer(0, 1, "generate", ("tokens", "logprobs"), (0, 1)),))
    results = everywhere(gang, Exchanger.exchange, command)
    assert {rank: received for rank, (_, received) in results.items()} == {0: 0, 1: 8 * (3 + 4) + 4 * 1, 2: 0, 3: 0}


@pytest.mark.slow
def test_a_row_that_is_missing_is_told():
    """A transfer of rows that its source does not hold fails on the source, by call, key and row."""
    store = RowStore()
    command = TransferCommand(0, (RowTransfer(0, 1, "generate", ("tokens",), (3,)),))
    with pytest.raises(Exception, match="generate.tokens of step 0: row 3 is not on this rank"):
        exchange_rows(store, command, 0)
