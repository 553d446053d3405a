"""Rows and weights between ranks: what arrives is what was sent, for every pattern of who sends what to whom."""

import random
from itertools import pairwise

import pytest
import torch

from prefect_rlhf.engines.engine import Shard
from prefect_rlhf.engines.exchange import exchange_rows
from prefect_rlhf.engines.local_gang import LocalGang
from prefect_rlhf.engines.move_weights import RegionWriter, buckets, move_weights, read_region, within
from prefect_rlhf.engines.orders import MoveWeightsOrder, RowTransfer, TransferOrder
from prefect_rlhf.engines.store import RowStore
from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.placement.layout import Layout
from prefect_rlhf.placement.mesh import DeviceMesh
from prefect_rlhf.placement.plan import ModelInstance
from prefect_rlhf.placement.reshard import Piece, num_elements
from prefect_rlhf.placement.strategy import Strategy

SIZE = 4
KEYS = ("tokens", "prompt_length", "logprobs", "flag")
MESH = DeviceMesh(0, 1, 0, SIZE)
SOURCE = ModelInstance("actor", "megatron", MESH, Strategy(dp=SIZE))
TARGET = ModelInstance("actor", "vllm", MESH, Strategy(tp=SIZE))


def row_value(key, row):
    """What every rank knows a row to be: ragged, of several formats, sometimes empty."""
    match key:
        case "tokens":
            return torch.arange(row, row + 3 + row % 5)
        case "prompt_length":
            return torch.tensor(row)
        case "logprobs":
            return -torch.arange(row % 4, dtype=torch.float32)
        case _:
            return torch.tensor(row % 2 == 0)


def global_value(name, shape, dtype):
    """What every rank knows a parameter to be."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return torch.randn(shape, generator=generator).to(dtype)


class FakeEngine:
    """Holds shards of known parameters; `split` views their rows on two axes, as a fused storage does."""

    def __init__(self, layout, rank, dtype, *, filled, split):
        self.shards, self.told = {}, 0
        for name, regions in layout.regions.items():
            if rank in regions:
                whole = global_value(name, layout.shapes[name], dtype)
                part = whole[tuple(slice(*span) for span in regions[rank])]
                self.shards[name] = Shard(
                    regions[rank], self._storage(part if filled else torch.zeros_like(part), split)
                )

    @staticmethod
    def _storage(part, split):
        if split and part.dim() == 2 and part.shape[0] % 2 == 0:
            fused = torch.zeros(2, 2, part.shape[0] // 2, part.shape[1], dtype=part.dtype)
            fused[:, 1] = part.reshape(fused[:, 1].shape)
            return fused[:, 1]
        return part.clone()

    def weights(self):
        return self.shards

    def weights_written(self):
        self.told += 1


class Exchanger:
    """A rank that knows what it should receive."""

    def __init__(self, rank, size):
        self.rank, self.store = rank, RowStore()

    def exchange(self, order):
        """Send and receive; return the number of rows that arrived and are right."""
        self.store.free(order.step, self.store.keys(order.step))
        for transfer in order.transfers:
            if transfer.source == self.rank:
                for key in transfer.keys:
                    self.store.put(order.step, transfer.call, key, {row: row_value(key, row) for row in transfer.rows})
        received = exchange_rows(self.store, order, self.rank)
        mine = [t for t in order.transfers if t.target == self.rank]
        for transfer in mine:
            for key in transfer.keys:
                for row, value in zip(transfer.rows, self._rows(order.step, transfer, key), strict=True):
                    expected = row_value(key, row)
                    assert value.dtype == expected.dtype and value.shape == expected.shape
                    assert torch.equal(value, expected)
        return sum(len(t.rows) * len(t.keys) for t in mine), received

    def _rows(self, step, transfer, key):
        return self.store.get(step, transfer.call, key, transfer.rows)

    def move(self, order, dtype, target_dtype, split):
        """Move weights; return which are wrong afterwards, the bytes written and how often the engine was told."""
        source = FakeEngine(order.source_layout, self.rank, dtype, filled=True, split=split)
        target = FakeEngine(order.target_layout, self.rank, target_dtype, filled=False, split=split)
        written = move_weights(source, target, order, self.rank)
        expected = FakeEngine(order.target_layout, self.rank, dtype, filled=True, split=False)
        wrong = [
            n for n, s in target.shards.items() if not torch.equal(s.view.reshape(s.shape), expected.shards[n].view)
        ]
        return wrong, written, target.told


@pytest.fixture(scope="module")
def gang():
    gang = LocalGang(SIZE, Exchanger, environment={"OMP_NUM_THREADS": "1"}, preload=("torch.distributed",))
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
    results = everywhere(gang, "exchange", TransferOrder(seed, tuple(transfers)))
    assert sum(count for count, _ in results.values()) == sum(len(t.keys) * len(t.rows) for t in transfers)


@pytest.mark.slow
def test_bytes_received_are_counted(gang):
    """The bytes reported are those of the rows."""
    order = TransferOrder(100, (RowTransfer(0, 1, "generate", ("tokens", "logprobs"), (0, 1)),))
    results = everywhere(gang, "exchange", order)
    assert {rank: received for rank, (_, received) in results.items()} == {0: 0, 1: 8 * (3 + 4) + 4 * 1, 2: 0, 3: 0}


@pytest.mark.slow
def test_a_row_that_is_missing_is_told():
    """A transfer of rows that its source does not hold fails on the source, by call, key and row."""
    store = RowStore()
    order = TransferOrder(0, (RowTransfer(0, 1, "generate", ("tokens",), (3,)),))
    with pytest.raises(Exception, match="generate.tokens of step 0: row 3 is not on this rank"):
        exchange_rows(store, order, 0)


def random_layout(draw, shapes):
    """Each parameter tiled by a grid; tiles dealt to ranks, each at least once, some ranks with a copy or nothing."""
    regions = {}
    for name, shape in shapes.items():
        tiles = [()]
        budget = SIZE
        for size in shape:
            parts = draw.choice([p for p in (1, 2, 4) if p <= budget and size >= p])
            budget //= parts
            cuts = sorted([0, size, *draw.sample(range(1, size), parts - 1)])
            tiles = [(*tile, span) for tile in tiles for span in pairwise(cuts)]
        ranks = draw.sample(range(SIZE), SIZE)
        dealt = dict(zip(ranks, tiles, strict=False))
        for rank in ranks[len(tiles) :]:
            if draw.random() < 0.5:
                dealt[rank] = draw.choice(tiles)
        regions[name] = dealt
    return Layout(shapes, regions)


@pytest.mark.slow
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_weights_arrive(gang, seed, split):
    """Between any two layouts every target rank ends with its part of the whole, and its engine is told once."""
    draw = random.Random(seed)
    shapes = {"embed": (24, 16), "q": (16, 16), "o": (16, 20), "norm": (16,)}
    source, target = random_layout(draw, shapes), random_layout(draw, shapes)
    order = MoveWeightsOrder(SOURCE, TARGET, 3, source, target)
    dtype = draw.choice([torch.bfloat16, torch.float32])
    results = everywhere(gang, "move", order, dtype, dtype, split)
    for rank, (wrong, written, told) in results.items():
        assert not wrong
        assert told == 1
        held = [regions[rank] for regions in target.regions.values() if rank in regions]
        assert written == sum(num_elements(region) for region in held) * dtype.itemsize


@pytest.mark.slow
def test_another_number_format_is_refused(gang):
    """Weights are never converted on their way: that is refused, with both formats."""
    layout = Layout({"w": (4, 4)}, {"w": {0: ((0, 4), (0, 4))}})
    order = MoveWeightsOrder(SOURCE, TARGET, 3, layout, layout)
    with pytest.raises(InvalidInput, match=r"actor.vllm n0:0-3 tp4 w: got 'torch.float32', expected torch.bfloat16"):
        everywhere(gang, "move", order, torch.bfloat16, torch.float32, False)


def whole_shard(rows, columns):
    return Shard(((0, rows), (0, columns)), torch.arange(rows * columns, dtype=torch.float32).view(rows, columns))


def test_buckets_are_bounded():
    """No bucket is larger than the limit, large pieces are cut by rows, and nothing is lost or reordered."""
    shards = {"w": whole_shard(100, 8), "v": whole_shard(3, 8)}
    pieces = [Piece(0, 1, "w", ((0, 100), (0, 8))), Piece(0, 1, "v", ((1, 3), (2, 8)))]
    rounds = buckets(pieces, shards, limit=10 * 32)
    assert all(sum(p.num_elements * 4 for p in bucket) <= 320 for bucket in rounds)
    spans = [p.region[0] for bucket in rounds for p in bucket if p.parameter == "w"]
    assert [row for start, stop in spans for row in range(start, stop)] == list(range(100))
    assert [p for bucket in rounds for p in bucket if p.parameter == "v"] == [pieces[1]]


def test_a_row_larger_than_a_bucket_still_goes():
    """One row is the least that a bucket holds."""
    shards = {"w": whole_shard(3, 100)}
    assert len(buckets([Piece(0, 1, "w", ((0, 3), (0, 100)))], shards, limit=64)) == 3


def test_regions_are_read_and_written_through_views():
    """A region inside a shard whose rows are two axes of the storage is read and written in place."""
    storage = torch.arange(32.0).view(2, 2, 2, 4)
    shard = Shard(((8, 12), (0, 4)), storage[:, 1])
    whole = storage[:, 1].reshape(4, 4).clone()
    region = ((9, 11), (1, 3))
    assert torch.equal(read_region(shard, region), whole[1:3, 1:3])
    writer = RegionWriter({"w": shard})
    writer.write("w", region, torch.full((2, 2), -1.0))
    writer.flush()
    whole[1:3, 1:3] = -1
    assert torch.equal(storage[:, 1].reshape(4, 4), whole)
    assert within(region, shard.region) == (slice(1, 3), slice(1, 3))
