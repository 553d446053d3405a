"""Weights between ranks: what arrives is what was sent, in the target's own storage, with little staged on the way."""

import random
from contextlib import nullcontext
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch

from prefect_rlhf.engines.commands import MoveWeightsCommand
from prefect_rlhf.engines.engine import Shard
from prefect_rlhf.engines.gang.local import LocalGang
from prefect_rlhf.engines.gang.processes.messages import GangSettings
from prefect_rlhf.engines.weights import read_peer_memory
from prefect_rlhf.engines.weights.buckets import IN_FLIGHT, cut_into_buckets, message_bytes
from prefect_rlhf.engines.weights.move_weights import WeightMover
from prefect_rlhf.engines.weights.views import blocks, copy_rows
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.devices.mesh import DeviceMesh
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.layout.layout import Layout
from prefect_rlhf.placement.layout.regions import num_elements
from prefect_rlhf.placement.layout.reshard import Piece
from prefect_rlhf.placement.models.engine_constants import BUCKET_BYTES
from prefect_rlhf.placement.plan import ModelInstance
from tests.support.cases import combinations, first
from tests.support.layouts import num_lacking

SIZE = 4
MESH = DeviceMesh(0, 1, 0, SIZE)
SOURCE = ModelInstance("actor", "megatron", MESH, Strategy(dp=SIZE))
TARGET = ModelInstance("actor", "vllm", MESH, Strategy(tp=SIZE))


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


class Mover:
    """A rank that knows what it should receive."""

    def __init__(self, rank, size):
        self.rank = rank

    def move(self, command, dtype, target_dtype, split, refused=(), bucket_bytes=BUCKET_BYTES):
        """Move weights; return which are wrong afterwards, what was moved and how often the engine was told.

        Ranks in `refused` may not read the memory of others.
        """
        source = FakeEngine(command.source_layout, self.rank, dtype, filled=True, split=split)
        target = FakeEngine(command.target_layout, self.rank, target_dtype, filled=False, split=split)
        may_read = (
            nullcontext() if self.rank not in refused else patch.object(read_peer_memory, "_copy", lambda *_: False)
        )
        with may_read:
            moved = WeightMover(self.rank, bucket_bytes).move(source, target, command)
        expected = FakeEngine(command.target_layout, self.rank, dtype, filled=True, split=False)
        wrong = [
            n for n, s in target.shards.items() if not torch.equal(s.view.reshape(s.shape), expected.shards[n].view)
        ]
        return wrong, moved, target.told


@pytest.fixture(scope="module")
def gang():
    gang = LocalGang(GangSettings(SIZE, Mover, environment={"OMP_NUM_THREADS": "1"}, preload=("torch.distributed",)))
    yield gang
    gang.close()


def everywhere(gang, method, *arguments):
    return gang.call(method, dict.fromkeys(range(SIZE), arguments), doing="a test", deadline_seconds=60)


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
@pytest.mark.parametrize("refused", [(), (1, 2), range(SIZE)])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("seed", first(3, range(12)))
def test_weights_arrive(gang, seed, split, refused):
    """Between any two layouts every target rank ends with its part of the whole, and its engine is told once.

    Whether all, some or no ranks may read the memory of others.
    """
    draw = random.Random(seed)
    shapes = {"embed": (24, 16), "q": (16, 16), "o": (16, 20), "norm": (16,)}
    source, target = random_layout(draw, shapes), random_layout(draw, shapes)
    command = MoveWeightsCommand(SOURCE, TARGET, 3, source, target)
    dtype = draw.choice([torch.bfloat16, torch.float32])
    results = everywhere(gang, Mover.move, command, dtype, dtype, split, refused)
    for rank, (wrong, moved, told) in results.items():
        assert not wrong
        assert told == 1
        held = [regions[rank] for regions in target.regions.values() if rank in regions]
        written = sum(num_elements(region) for region in held) * dtype.itemsize
        assert moved.bytes_moved + moved.bytes_copied == written
    assert sum(moved.bytes_moved for _, moved, _ in results.values()) == num_lacking(source, target) * dtype.itemsize


@pytest.mark.slow
def test_another_number_format_is_refused(gang):
    """Weights are never converted on their way: that is refused, with both formats."""
    layout = Layout({"w": (4, 4)}, {"w": {0: ((0, 4), (0, 4))}})
    command = MoveWeightsCommand(SOURCE, TARGET, 3, layout, layout)
    with pytest.raises(InvalidInput, match=r"actor.vllm n0:0-3 tp4 w: got 'torch.float32', expected torch.bfloat16"):
        everywhere(gang, Mover.move, command, torch.bfloat16, torch.float32, False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bucket_bytes", "split"), combinations((1 << 20, BUCKET_BYTES), (False, True), briefly=[(1 << 20, True)])
)
def test_large_weights_arrive_with_at_most_two_buckets_staged(gang, split, bucket_bytes):
    """Many messages for each pair of ranks, of rows and of columns, while every rank sends to all and keeps its own.

    Nothing is staged of what is read from the other rank's memory.
    """
    shapes = {"rows": (4096, 2048), "columns": (2048, 4096), "norm": (4096,)}

    def tiled(axis, ranks):
        regions = {"norm": dict.fromkeys(range(SIZE), ((0, 4096),))}
        for name, size in shapes.items():
            if name != "norm":
                part = size[axis] // SIZE
                spans = [(place * part, (place + 1) * part) for place in range(SIZE)]
                rows, columns = ((0, length) for length in size)
                tiles = [(span, columns) if axis == 0 else (rows, span) for span in spans]
                regions[name] = dict(zip(ranks, tiles, strict=True))
        return Layout(shapes, regions)

    source, target = tiled(0, (0, 1, 2, 3)), tiled(1, (2, 0, 3, 1))
    command = MoveWeightsCommand(SOURCE, TARGET, 3, source, target)
    numbers = torch.float32, torch.float32, split
    for refused in (range(SIZE), ()):
        results = everywhere(gang, Mover.move, command, *numbers, refused, bucket_bytes)
        for wrong, moved, _ in results.values():
            assert not wrong
            assert moved.bytes_moved == 2 * (32 << 20) // SIZE * (SIZE - 1) // SIZE
            assert 0 < moved.peak_extra_bytes <= 2 * bucket_bytes if refused else moved.peak_extra_bytes == 0


@pytest.mark.slow
def test_a_contiguous_slice_needs_no_extra_memory(gang):
    """Rows of a whole tensor are sent from where they lie and received where they belong, in messages too."""
    shapes = {"w": (4096, 1024)}
    source = Layout(shapes, {"w": {0: ((0, 4096), (0, 1024))}})
    target = Layout(shapes, {"w": {1: ((0, 2048), (0, 1024)), 2: ((2048, 4096), (0, 1024))}})
    command = MoveWeightsCommand(SOURCE, TARGET, 3, source, target)
    results = everywhere(gang, Mover.move, command, torch.float32, torch.float32, False, range(SIZE))
    assert all(not wrong and moved.peak_extra_bytes == 0 for wrong, moved, _ in results.values())
    assert [results[rank][1].bytes_moved for rank in range(SIZE)] == [0, 8 << 20, 8 << 20, 0]


@pytest.mark.slow
def test_a_layout_that_does_not_cover_a_parameter_is_refused(gang):
    """On every rank alike, by name, before anything is moved; the gang is as good as before."""
    target = Layout({"w": (4, 4), "v": (4,)}, {"w": {0: ((0, 4), (0, 4))}, "v": {1: ((0, 4),)}})
    half = Layout(target.shapes, {"w": {0: ((0, 4), (0, 4))}, "v": {0: ((0, 3),)}})
    with pytest.raises(
        InvalidInput, match=r"layout.v: got \(\(3, 4\),\), expected a region that some rank of the source"
    ):
        everywhere(
            gang, Mover.move, MoveWeightsCommand(SOURCE, TARGET, 3, half, target), torch.float32, torch.float32, False
        )
    other = Layout({"w": (4, 5), "v": (4,)}, target.regions)
    with pytest.raises(InvalidInput, match=r"layout.w: got \(4, 5\), expected \(4, 4\) as in the target"):
        everywhere(
            gang, Mover.move, MoveWeightsCommand(SOURCE, TARGET, 3, other, target), torch.float32, torch.float32, False
        )
    results = everywhere(gang, Mover.move, MoveWeightsCommand(SOURCE, TARGET, 3, target, target), torch.float32,
                         torch.float32, False)  # fmt: skip
    assert all(not wrong for wrong, _, _ in results.values())


def test_messages_are_bounded():
    """None is larger than the limit, large pieces are cut by rows, formats do not mix, nothing is lost or repeated."""
    pieces = [
        Piece(0, 1, "w", ((0, 100), (0, 8))),
        Piece(0, 1, "v", ((1, 3), (2, 8))),
        Piece(0, 1, "half", ((0, 10),)),
        Piece(0, 1, "u", ((0, 5), (0, 8))),
        Piece(0, 1, "v", ((3, 9), (2, 8))),
    ]
    formats = {"w": torch.float32, "v": torch.float32, "u": torch.float32, "half": torch.bfloat16}
    buckets = cut_into_buckets(pieces, formats, 320)
    assert all(sum(p.num_elements * formats[p.parameter].itemsize for p in bucket) <= 320 for bucket in buckets)
    assert all(len({formats[p.parameter] for p in bucket}) == 1 for bucket in buckets)
    spans = [p.region[0] for bucket in buckets for p in bucket if p.parameter == "w"]
    assert [row for start, stop in spans for row in range(start, stop)] == list(range(100))
    assert {p for bucket in buckets for p in bucket if p.parameter != "w"} == set(pieces[1:])
    assert sum(len(bucket) for bucket in buckets) == len(spans) + 4


def test_a_row_larger_than_a_message_still_goes():
    """One row is the least that a message holds."""
    assert len(cut_into_buckets([Piece(0, 1, "w", ((0, 3), (0, 100)))], {"w": torch.float32}, 64)) == 3


@pytest.mark.parametrize("most_peers", [0, 1, 3, 7, 63, 1023])
def test_all_messages_under_way_fit_in_a_bucket(most_peers):
    assert most_peers * IN_FLIGHT * message_bytes(most_peers) <= BUCKET_BYTES


def test_regions_are_views_of_the_storage():
    """A region inside a shard whose rows are two axes of the storage is read and written in place, across the gap."""
    storage = torch.arange(32.0).view(2, 2, 2, 4)
    shard = Shard(((8, 12), (0, 4)), storage[:, 1])
    whole = storage[:, 1].reshape(4, 4).clone()
    region = ((9, 11), (1, 3))
    found = blocks(shard, region)
    assert all(block.untyped_storage().data_ptr() == storage.untyped_storage().data_ptr() for block in found)
    assert torch.equal(torch.cat(found), whole[1:3, 1:3])
    copy_rows([torch.full((2, 2), -1.0)], found)
    whole[1:3, 1:3] = -1
    assert torch.equal(storage[:, 1].reshape(4, 4), whole)


def test_a_view_that_is_not_made_of_rows_is_refused():
    """Writing it would miss the storage."""
    with pytest.raises(ValueError, match="is not made of blocks of rows"):
        blocks(Shard(((0, 4), (0, 4)), torch.zeros(4, 2, 2)), ((0, 4), (0, 4)))
