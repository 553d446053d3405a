"""A language model's head and a scalar one on one trunk: both from one forward pass, however the model is split."""

import megatron_cases as cases
import numpy as np
import pytest
import torch
import two_heads
from megatron_cases import Case

from prefect_rlhf.placement.devices.mesh import DeviceMesh
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.models.weights import parameters
from prefect_rlhf.placement.plan import ModelInstance
from tests.support.by_device import instance_holdings
from tests.support.cases import combinations
from tests.support.layouts import megatron_layout
from tests.support.strategies import call

pytestmark = pytest.mark.slow

LAYOUTS = {
    "one": {"ranks": (0,)},
    "dp2": {"ranks": (0, 1), "dp": 2},
    "tp2": {"ranks": (0, 1), "tp": 2},
    "pp2": {"ranks": (3, 1), "pp": 2},
    "dp2 tp2": {"ranks": (3, 0, 2, 1), "dp": 2, "tp": 2},
    "dp2 pp2": {"ranks": (0, 2, 1, 3), "dp": 2, "pp": 2},
    "tp2 pp2": {"ranks": (1, 0, 3, 2), "tp": 2, "pp": 2},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        "tied": two_heads.make_two_heads(root / "tied", layers=3, hidden=64),
        "untied": two_heads.make_two_heads(root / "untied", layers=3, hidden=64, tied=False, vocab=481),
    }


@pytest.mark.parametrize(
    ("kind", "layout"),
    combinations(("tied", "untied"), LAYOUTS, briefly=[("tied", "one"), ("tied", "tp2 pp2"), ("untied", "dp2 tp2")]),
)
def test_the_joint_gradient_of_policy_and_values_matches_pytorch(world, folders, kind, layout):
    """Of ppo_clip + 0.3 * value_clip, within 1e-6 of what PyTorch finds in one process, each weight where it lies."""
    case = Case(folders[kind], head="lm+scalar", optimizer=two_heads.GRADIENT, **LAYOUTS[layout])
    found = world.run(case.ranks, two_heads.train_both, case, 2)
    assert_stepped(folders[kind], case, found, two_heads.NAMES)
    expected = megatron_layout(case.spec(), Strategy(case.dp, case.tp, case.pp), case.ranks)
    for rank, (_, weights) in zip(case.ranks, found, strict=True):
        assert {name: region for name, (region, _) in weights.items()} == expected.of_rank(rank)


@pytest.mark.parametrize("name", two_heads.NAMES)
def test_a_head_that_no_loss_asks_for_is_left_alone(world, folders, name):
    """Nothing of an earlier step's gradient is in its buffer."""
    case = Case(folders["untied"], head="lm+scalar", optimizer=two_heads.GRADIENT, **LAYOUTS["pp2"])
    found = world.run(case.ranks, two_heads.train_both, case, 1, (name,))
    whole = assert_stepped(folders["untied"], case, found, (name,))
    idle = "score.weight" if name == "ppo_clip" else "lm_head.weight"
    before = two_heads.PlainTwoHeads(folders["untied"]).parameters_by_name()[idle]
    np.testing.assert_array_equal(whole[idle], before.detach())


def assert_stepped(folder, case, found, names):
    """All ranks' weights are those after a step on the plain gradient; return them whole."""
    model = two_heads.PlainTwoHeads(folder)
    loss = two_heads.plain_loss(model, names)
    loss.backward()
    assert all(parameter.grad.abs().max() > 1e-4 for parameter in model.model.parameters())
    assert all(metrics == found[0][0] for metrics, _ in found)
    assert found[0][0]["loss"] == pytest.approx(float(loss), abs=1e-6)
    whole = cases.assemble([weights for _, weights in found], {p.name: p.shape for p in parameters(case.spec())})
    for name, parameter in model.parameters_by_name().items():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        expected = parameter.detach() - gradient / (gradient.abs() + 1)
        np.testing.assert_allclose(whole[name], expected, rtol=0, atol=1e-6, err_msg=name)
    return whole


@pytest.mark.parametrize("kind", ["tied", "untied"])
@pytest.mark.parametrize("layout", ["pp2", "dp2 pp2", "tp2 pp2"])
def test_each_stage_keeps_the_predicted_bytes(world, folders, kind, layout):
    """The last one has both heads."""
    case = Case(folders[kind], head="lm+scalar", dtype="bfloat16", optimizer=two_heads.GRADIENT, **LAYOUTS[layout])
    strategy = Strategy(case.dp, case.tp, case.pp)
    instance = ModelInstance("actor", "megatron", DeviceMesh(0, 1, 0, len(case.ranks)), strategy)
    trained = call("a_call", "train_step", "actor", {}, num_rows=8)
    expected = dict.fromkeys(instance.devices, 0)
    for holding in instance_holdings(instance, (trained,), case.spec(), 128, "cpu"):
        expected[holding.device] += holding.num_bytes
    for found, predicted in zip(world.run(case.ranks, two_heads.kept_bytes, case), expected.values(), strict=True):
        assert found <= predicted <= 1.01 * found


@pytest.mark.parametrize("layout", ["one", "tp2 pp2"])
def test_both_heads_outputs_match_transformers(world, folders, layout):
    case = Case(folders["tied"], head="lm+scalar", **LAYOUTS[layout])
    with torch.no_grad():
        model, rows = two_heads.PlainTwoHeads(folders["tied"]), cases.make_rows(8)[0]
        for output, head in (("logprobs", "lm"), ("values", "scalar"), ("entropy", "entropy")):
            found = next(f for f in world.run(case.ranks, cases.infer, case, output, 2, 0.7) if f is not None)
            expected = cases.oracle_outputs(model, rows, head, 0.7)
            np.testing.assert_allclose(found, expected, rtol=0, atol=2e-4)
