"""Losses on pairs and on rated answers: by hand, against TRL's formulas in float64, and their evaluation."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_rlhf.engines.rows import Batch
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.tasks.rl.preference_evaluation import kto_kl, label_accuracy, mismatched_answers, preference_accuracy
from prefect_rlhf.tasks.rl.preference_losses import dpo, kto
from prefect_rlhf.tasks.rl.settings.offline import DPO, KTO
from tests.tasks.rl import trl_preference_formulas as trl
from tests.tasks.rl.loss_sums import loss_sums

pytestmark = pytest.mark.quick

REF = "ref_inference.logprobs"


def made_up(seed, num_rows=6, width=5):
    """Log-probabilities of policy and reference, float64, of rows of several lengths; zeros where there is no token."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, width + 1, (num_rows,), generator=generator)
    mask = (torch.arange(width)[None] < lengths[:, None]).double()
    new, old = (-torch.rand(num_rows, width, generator=generator).double() * 3 * mask for _ in range(2))
    return new, {REF: old, "mask": mask, "label": torch.randint(0, 2, (num_rows,), generator=generator).double()}


TRLS = {
    "dpo": ("sigmoid", DPO(beta=0.3)),
    "cdpo": ("sigmoid_smoothed", DPO(loss="cdpo", label_smoothing=0.2)),
    "robust": ("robust", DPO(loss="robust", label_smoothing=0.2)),
    "ipo": ("ipo", DPO(loss="ipo", beta=0.4)),
}


@pytest.mark.parametrize("name", TRLS)
@given(seed=st.integers(0, 50))
@settings(max_examples=20)
def test_pair_losses_with_a_reference_equal_trls(name, seed):
    loss_type, algo = TRLS[name]
    new, batch = made_up(seed)
    gain, mask = ((new - batch[REF]) * batch["mask"]).sum(1), batch["mask"]
    theirs = trl.dpo_loss(
        gain[0::2], gain[1::2], mask[0::2], mask[1::2], loss_type, algo.strength, algo.label_smoothing
    )
    ours = loss_sums(dpo, new, batch, algo)
    assert float(ours.total / ours.weight) == pytest.approx(float(theirs), rel=1e-12)


@given(seed=st.integers(0, 50))
@settings(max_examples=20)
def test_simpo_equals_trls_and_reads_no_reference(seed):
    new, batch = made_up(seed)
    means = new.sum(1) / batch["mask"].sum(1)
    theirs = trl.simpo_loss(means[0::2], means[1::2], 2.0, 1.0, 0.0)
    ours = loss_sums(dpo, new, {"mask": batch["mask"]}, DPO(loss="simpo"))
    assert float(ours.total / ours.weight) == pytest.approx(float(theirs), rel=1e-12)


@given(seed=st.integers(0, 50))
@settings(max_examples=20)
def test_kto_equals_trls(seed):
    """Its point of comparison too, which is the same for all rows of a step."""
    new, batch = made_up(seed)
    other, reference = made_up(seed + 100)[0], made_up(seed + 200)[0]
    algo = KTO(beta=0.3, good_weight=1.5, bad_weight=0.7)
    masks = [row[: int(row.sum())] for row in batch["mask"]]
    found = kto_kl.function(
        Batch({"mask": masks}),
        *(Batch({"logprobs": ragged(values, batch["mask"])}) for values in (other, reference)),
        algo,
    )
    sums = [(values * batch["mask"]).sum(1) for values in (new, batch[REF], other, reference)]
    theirs = trl.kto_loss(sums[0], sums[1], batch["label"], sums[2], sums[3], 0.3, 1.5, 0.7)
    kl = found.columns["kl"].double()
    assert float(kl[0]) == pytest.approx(float((sums[2] - sums[3]).mean().clamp(min=0)), rel=1e-6)
    exact = (sums[2] - sums[3]).mean().clamp(min=0).expand(len(new))
    ours = loss_sums(kto, new, batch | {"kl": exact}, algo, mean_over="rows")
    assert float(ours.total / ours.weight) == pytest.approx(float(theirs), rel=1e-12)


def ragged(values, mask):
    return [row[: int(lengths.sum())] for row, lengths in zip(values, mask, strict=True)]


def test_a_bad_answer_that_is_as_likely_as_before_loses_half():
    """At the reference, sigmoid(0); and the loss falls as a good answer becomes likelier, a bad one less so."""
    batch = {REF: torch.zeros(2, 1), "mask": torch.ones(2, 1), "label": torch.tensor([1.0, 0.0]), "kl": torch.zeros(2)}
    new = torch.zeros(2, 1, requires_grad=True)
    sums = loss_sums(kto, new, batch, KTO(), mean_over="rows")
    assert float(sums.total) == 1.0
    sums.total.backward()
    assert new.grad.tolist() == [[pytest.approx(-0.025)], [pytest.approx(0.025)]]


def test_each_answer_follows_the_next_prompt_cut_to_the_longest_row():
    """As TRL cycles a batch's completions by one."""
    rows = Batch(
        {
            "tokens": [torch.tensor(row) for row in ([1, 2, 10], [3, 11, 12, 13, 14], [4, 5, 6, 15])],
            "prompt_length": [torch.tensor(length) for length in (2, 1, 3)],
            "mask": [torch.tensor(mask) for mask in ([1], [1, 0, 1, 1], [1])],
        }
    )
    made = mismatched_answers.function(rows, KTO()).columns
    whole = [[1, 2], [3], [4, 5, 6]], trl.kl_completions([[10], [11, 12, 13, 14], [15]])
    assert [row.tolist() for row in made["tokens"]] == [[*p, *c][:5] for p, c in zip(*whole, strict=True)]
    assert made["prompt_length"].tolist() == [2, 1, 3]
    assert [mask.tolist() for mask in made["mask"]] == [[1], [1], [1, 0]]


def test_dpo_by_hand():
    """beta 0.5. Chosen: log-ratio 0.4 + 0.2 = 0.6; rejected: -0.4. Margin 0.5 * 1.0; loss -log sigmoid(0.5)."""
    batch = {"mask": torch.tensor([[1.0, 1.0], [1.0, 0.0]]), REF: torch.tensor([[-1.0, -1.0], [-1.0, 0.0]])}
    new = torch.tensor([[-0.6, -0.8], [-1.4, 9.0]])  # 9 is padding
    terms = loss_sums(dpo, new, batch, DPO(beta=0.5))
    assert float(terms.total) == pytest.approx(math.log(1 + math.exp(-0.5)))
    assert float(terms.metrics["margin"]) == pytest.approx(0.5)
    assert float(terms.metrics["chosen_reward"]) == pytest.approx(0.3)


def test_dpo_starts_at_log_two():
    """Where the policy is the reference, no answer is preferred, and every pair is a tie."""
    _, batch = made_up(0)
    terms = loss_sums(dpo, batch[REF], batch, DPO())
    assert float(terms.total / terms.weight) == pytest.approx(math.log(2))
    assert float(terms.metrics["accuracy"] / terms.weight) == 0.5


@pytest.mark.parametrize(
    ("stated", "says"),
    [
        ({"label_smoothing": 0.1}, "label_smoothing: 0.1 is not used: loss dpo .* set loss: cdpo or robust"),
        ({"loss": "cdpo"}, "expected a share above 0, or loss: dpo, which equals cdpo without it"),
        ({"loss": "ipo", "margin": 1.0}, "margin: 1.0 is not used: loss ipo does not read it"),
    ],
)
def test_a_setting_that_another_leaves_without_effect_is_refused(stated, says):
    with pytest.raises(InvalidInput, match=says):
        DPO(**stated)


def test_held_out_pairs_that_are_right_wrong_and_tied():
    """Margins 0.1 * 2, 0.1 * -1 and 0."""
    policy = Batch({"logprobs": [torch.tensor([value]) for value in (2.0, 0.0, 0.0, 1.0, 1.0, 1.0)]})
    reference = Batch({"logprobs": [torch.zeros(1) for _ in range(6)]})
    metrics = preference_accuracy.function(policy, reference, settings=DPO()).metrics
    assert metrics == pytest.approx({"accuracy": 0.5, "margin": 0.1 / 3})


def test_held_out_answers_are_compared_good_against_bad():
    """Good ones gain 2 and 0, a bad one 0: one is ahead, one ties. Beta 0.1."""
    rows = Batch({"mask": [torch.ones(1)] * 3, "label": [torch.tensor(label) for label in (1.0, 0.0, 1.0)]})
    policy = Batch({"logprobs": [torch.tensor([value]) for value in (2.0, 0.0, 0.0)]})
    reference = Batch({"logprobs": [torch.zeros(1)] * 3})
    metrics = label_accuracy.function(rows, policy, reference, settings=KTO()).metrics
    assert metrics == pytest.approx({"accuracy": 0.75, "margin": 0.1})
