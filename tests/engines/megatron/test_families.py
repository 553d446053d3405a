"""Every family that runs, in Megatron, against transformers: logits, gradients and their norm under every split."""

from collections import Counter

import family_cases
import megatron_cases as cases
import numpy as np
import pytest
import torch
from megatron_cases import Case
from megatron_world import World

from prefect_rlhf.placement.devices.mesh import DeviceMesh
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.models.weights import parameters
from prefect_rlhf.placement.plan import ModelInstance
from tests.support.by_device import instance_holdings
from tests.support.layouts import megatron_layout
from tests.support.strategies import call

pytestmark = pytest.mark.slow
LOGITS, GRADIENTS = 2e-4, 1e-4
ALL = [(kv, tp, pp) for kv in (6, 3, 1) for tp in (1, 2, 3) for pp in (1, 2) if kv % tp == 0 or tp % kv == 0]
IN_EVERY_TEST = [(6, 2, 2)]


@pytest.fixture(scope="module")
def six(tmp_path_factory):
    world = World(6, str(tmp_path_factory.mktemp("six")))
    yield world
    world.close()


def differences(world: World, folder: str, tp: int, pp: int) -> tuple[float, float]:
    """The largest of logits and of gradients, after everything else is found as it should be."""
    case = Case(folder, ranks=tuple(range(tp * pp)), tp=tp, pp=pp)
    found = world.run(case.ranks, family_cases.learn, case)
    logits, gradients, norm = family_cases.expected(folder)
    layout = megatron_layout(case.spec(), Strategy(1, tp, pp), case.ranks)
    for rank, (_, before, *_) in zip(case.ranks, found, strict=True):
        assert {name: region for name, (region, _) in before.items()} == layout.of_rank(rank)
    assert [one[2] for one in found] == pytest.approx([norm] * len(found), rel=1e-4)
    instance = ModelInstance("actor", "megatron", DeviceMesh(0, 1, 0, tp * pp), Strategy(1, tp, pp))
    held = Counter()
    for holding in instance_holdings(instance, (call("a_call", "train_step", "actor", {}),), case.spec(), 128, "cpu"):
        held[holding.device.index] += holding.num_bytes
    on_ranks = [(one[4], held[rank]) for rank, one in zip(case.ranks, found, strict=True)]
    assert all(real <= counted <= 1.001 * real for real, counted in on_ranks), on_ranks
    shapes = {p.name: p.shape for p in parameters(case.spec())}
    assert shapes.keys() == gradients.keys()
    before, after = (cases.assemble([one[i] for one in found], shapes) for i in (1, 3))
    sequences = cases.make_rows(8)[0]
    real = torch.arange(sequences.tokens_BS.shape[1])[None] < sequences.lengths_B[:, None]
    made = np.concatenate([one[0] for one in found if one[0] is not None], axis=-1)[..., : family_cases.VOCAB]
    assert real.any() and all(float(value.abs().max()) > 1e-3 for value in gradients.values())
    of_gradients = (
        np.abs(family_cases.gradients(before[name], after[name]) - gradients[name].numpy()).max() for name in shapes
    )
    return float(np.abs(made[real] - logits[real].numpy()).max()), float(max(of_gradients))


def check(world, tmp_path, record_property, name, split):
    kv_heads, tp, pp = split
    found = differences(world, family_cases.make_family(tmp_path, name, kv_heads), tp, pp)
    for what, value in zip(("logits", "gradients"), found, strict=True):
        family_cases.record(record_property, name, f"{what}, tp {tp} pp {pp}", value)
    assert found[0] < LOGITS and found[1] < GRADIENTS, found


@pytest.mark.parametrize("split", IN_EVERY_TEST, ids=str)
@pytest.mark.parametrize("name", family_cases.OPTIONS)
def test_logits_and_gradients_match_transformers(world, tmp_path, record_property, name, split):
    """Of key-value heads, tp and pp."""
    check(world, tmp_path, record_property, name, split)


@pytest.mark.all
@pytest.mark.parametrize("split", ALL, ids=str)
@pytest.mark.parametrize("name", family_cases.OPTIONS)
def test_so_they_are_under_every_split(six, tmp_path, record_property, name, split):
    """Three layers over two stages; tp beyond the key-value heads."""
    check(six, tmp_path, record_property, name, split)
