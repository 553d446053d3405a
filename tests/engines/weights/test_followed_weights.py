"""Averages of a follower: their values, and what a checkpoint has of them."""

import pytest
import torch

from prefect_rlhf.engines.engine import Shard
from prefect_rlhf.engines.weights.followed_weights import FollowedWeights, groups_of_weights
from prefect_rlhf.placement.layout.layout import Layout
from prefect_rlhf.placement.models.engine_constants import FOLLOWED_ELEMENTS

pytestmark = pytest.mark.quick


class Weighing:
    """An engine with two weights, of which one is a view that is not contiguous, and a frozen one."""

    def __init__(self, dtype):
        self.fused = torch.randn(3, 4, 10, generator=torch.Generator().manual_seed(1)).to(dtype)
        self.own = torch.linspace(-1, 1, 7).to(dtype)
        self.frozen = torch.ones(2).to(dtype)
        self.written = 0

    def weights(self):
        region = ((0, 3), (0, 4), (0, 5))
        return {
            "fused": Shard(region, self.fused[:, :, :5]),
            "own": Shard(((0, 7),), self.own),
            "frozen": Shard(((0, 2),), self.frozen),
        }

    def weights_written(self):
        self.written += 1


def leaders(number, dtype):
    draw = torch.Generator().manual_seed(number)
    shapes = {"fused": (3, 4, 5), "own": (7,)}
    return {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize("share", [0.01, 0.6, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("theirs", [torch.float32, torch.bfloat16])
def test_an_average_is_that_of_a_plain_loop_bit_for_bit(dtype, theirs, share):
    """After five versions. In bfloat16 it is the rounded average of float32 weights, so that small shares count."""
    engine = Weighing(dtype)
    followed = FollowedWeights(engine, {"frozen"}, keeps_main=share < 1 and dtype != torch.float32)
    expected = {name: engine.weights()[name].view.float().clone() for name in ("fused", "own")}
    for number in range(5):
        arrived = leaders(number, theirs)
        for name, values in arrived.items():
            expected[name] = values.float() if share == 1 else expected[name] * (1 - share) + values.float() * share
        followed.average({name: values.clone() for name, values in arrived.items()}, share)
        followed.averaged()
    for name, values in expected.items():
        assert torch.equal(engine.weights()[name].view, values.to(dtype)), name
    stored = {part.parameter: part.values for part in followed.state_parts()}
    assert stored.keys() == expected.keys(), "frozen weights are in no checkpoint"
    if share < 1:
        assert all(torch.equal(stored[name].float(), values) for name, values in expected.items())
    assert engine.written == 5 and torch.equal(engine.frozen, torch.ones(2).to(dtype))


def test_main_weights_come_back_from_host_memory():
    engine = Weighing(torch.bfloat16)
    followed = FollowedWeights(engine, {"frozen"}, keeps_main=True)
    followed.average(leaders(0, torch.float32), 0.3)
    before = {part.parameter: part.values.clone() for part in followed.state_parts()}
    num_bytes = followed.device_bytes()
    assert num_bytes == 4 * (60 + 7) == followed.offload(copies=True) and followed.device_bytes() == 0
    assert followed.reload() == num_bytes
    assert all(torch.equal(part.values, before[part.parameter]) for part in followed.state_parts())


def test_weights_arrive_in_groups_of_few_elements():
    """A larger weight arrives alone; every weight once, in order."""
    half, whole = (FOLLOWED_ELEMENTS // 2,), (FOLLOWED_ELEMENTS + 1,)
    shapes = {"a": half, "b": half, "c": half, "d": whole, "e": half}
    assert list(groups_of_weights(Layout(shapes, {}))) == [("a", "b"), ("c",), ("d",), ("e",)]
