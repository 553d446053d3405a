"""Optimizer steps without any gradient are counted, and no other step is."""

import megatron_cases as cases
import pytest
import torch
from megatron_cases import OPTIMIZER, Case

WALK = cases.Walk("logprobs", mini_batches=2, epochs=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return cases.make_folder(tmp_path_factory.mktemp("models") / "tied")


def train(folder, scale, walk=WALK, **optimizer):
    """Train on advantages times `scale`, a number or [24]; return the metrics and whether any weight moved."""
    engine = Case(folder, optimizer=OPTIMIZER).with_optimizer(**optimizer).build(0)
    before = {name: shard.view.clone() for name, shard in engine.weights().items()}
    rows, batch = cases.make_rows(24)
    scaled = batch | {"advantages": batch["advantages"] * scale}
    found = cases.train_on(engine, rows, scaled, cases.loss, walk)
    return found, any(not torch.equal(shard.view, before[name]) for name, shard in engine.weights().items())


@pytest.mark.gpu
def test_an_update_whose_gradient_is_0_everywhere_is_counted(folder):
    found, moved = train(folder, 0.0, weight_decay=0.0)
    assert found["empty_updates"] == 4 and found["grad_norm"] == 0
    assert "skipped_updates" not in found and not moved


@pytest.mark.gpu
def test_a_gradient_whose_square_underflows_is_not_0(folder):
    """Its square is 0 in float32; its norm is right nevertheless."""
    found, _ = train(folder, 1e-30, cases.Walk("logprobs"))
    whole, _ = train(folder, 1.0, cases.Walk("logprobs"))
    assert "empty_updates" not in found
    assert found["grad_norm"] == pytest.approx(1e-30 * whole["grad_norm"], rel=1e-3, abs=0)


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", [{}, {"warmup_steps": 1000}, {"lr": 1e-12}], ids=["learns", "warm-up", "rate"])
def test_an_update_with_a_gradient_is_not_counted(folder, optimizer):
    found, _ = train(folder, 1.0, **optimizer)
    assert not {"empty_updates", "skipped_updates"} & set(found) and found["grad_norm"] > 0


@pytest.mark.gpu
def test_a_mini_batch_without_a_gradient_beside_one_with_a_gradient_counts_once_an_epoch(folder):
    scale = torch.ones(24, 1)
    scale[:12] = 0
    found, moved = train(folder, scale)
    assert found["empty_updates"] == 2 and found["grad_norm"] > 0 and moved
