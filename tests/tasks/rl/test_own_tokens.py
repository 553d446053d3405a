"""Rows with tokens of an environment among the model's own: each computation equals that of the rows without them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_rlhf.engines.rows import Batch
from prefect_rlhf.tasks.rl.evaluation.held_out import token_loss
from prefect_rlhf.tasks.rl.gae import gae, remax_advantages
from prefect_rlhf.tasks.rl.group_advantages import grpo_advantages
from prefect_rlhf.tasks.rl.importance import importance_weights
from prefect_rlhf.tasks.rl.preference_evaluation import preference_accuracy
from prefect_rlhf.tasks.rl.rewards import compare_logprobs, kl_penalised_rewards
from prefect_rlhf.tasks.rl.safety import kl_penalised_costs, lagrange_advantages
from prefect_rlhf.tasks.rl.settings.offline import DPO
from prefect_rlhf.tasks.rl.settings.online import GRPO, PPO, KLTerm, ReMax
from prefect_rlhf.tasks.rl.settings.policy import Importance
from prefect_rlhf.tasks.rl.settings.safety import SafeRLHF
from tests.support.cases import examples

pytestmark = pytest.mark.quick

masks = st.lists(st.lists(st.booleans(), min_size=1, max_size=8).filter(any), min_size=2, max_size=4).filter(
    lambda rows: len(rows) % 2 == 0
)
ALGO = PPO(kl={"coefficient": 0.3}, gamma=0.9, lam=0.7)


class Rows:
    """Rows of random columns, each whole or with the model's own tokens alone."""

    def __init__(self, masks, seed, cut):
        self.masks = [torch.tensor(mask, dtype=torch.float32) for mask in masks]
        self.random, self.cut = torch.Generator().manual_seed(seed), cut

    def tokens(self, key):
        """A batch with random numbers at its own tokens. At the others they are so large that exp() is infinite."""
        columns = [torch.randn(len(mask), generator=self.random) * (1000 - 999 * mask) for mask in self.masks]
        if self.cut:
            columns = [column[mask > 0] for column, mask in zip(columns, self.masks, strict=True)]
        return Batch({key: columns}, torch.arange(len(self.masks)) // 2)

    def masked(self, key):
        batch = self.tokens(key)
        if not self.cut:
            batch.columns["mask"] = self.masks
        return batch

    def numbers(self, key):
        return Batch({key: list(torch.rand(len(self.masks), generator=self.random))})

    def rollout(self):
        return Batch({} if self.cut else {"mask": self.masks})


def safe(rows):
    settings = SafeRLHF()
    advantages = [rows.tokens("advantages") for _ in range(2)]
    return lagrange_advantages.function(*advantages, rows.numbers("multiplier"), rows.rollout(), settings=settings)


COMPUTATIONS = {
    "gae": lambda rows: gae.function(rows.tokens("rewards"), rows.tokens("values"), rows.rollout(), settings=ALGO),
    "remax_advantages": lambda rows: remax_advantages.function(
        rows.tokens("rewards"), rows.numbers("scores"), rows.rollout(), settings=ReMax()
    ),
    "kl_penalised_rewards": lambda rows: kl_penalised_rewards.function(
        rows.masked("logprobs"), rows.tokens("logprobs"), rows.numbers("scores"), settings=ALGO
    ),
    "kl_penalised_rewards of recomputed log-probabilities": lambda rows: kl_penalised_rewards.function(
        rows.tokens("logprobs"), rows.tokens("logprobs"), rows.numbers("scores"), rows.rollout(), settings=ALGO
    ),
    "kl_penalised_rewards with k3": lambda rows: kl_penalised_rewards.function(
        rows.masked("logprobs"), rows.tokens("logprobs"), rows.numbers("scores"), settings=PPO(kl={"estimator": "k3"})
    ),
    "kl_penalised_costs": lambda rows: kl_penalised_costs.function(
        rows.masked("logprobs"), rows.tokens("logprobs"), rows.numbers("scores"), settings=SafeRLHF()
    ),
    "lagrange_advantages": safe,
    "compare_logprobs": lambda rows: compare_logprobs.function(
        rows.masked("logprobs"), rows.tokens("logprobs"), settings=PPO()
    ),
    "importance_weights": lambda rows: importance_weights.function(
        rows.masked("logprobs"), rows.tokens("logprobs"), settings=Importance(level="sequence")
    ),
    "grpo_advantages": lambda rows: grpo_advantages.function(
        rows.masked("logprobs"),
        rows.numbers("scores"),
        rows.tokens("logprobs"),
        settings=GRPO(kl=KLTerm(coefficient=0.5, place="reward"), advantage="reinforce_plus_plus"),
    ),
    "grpo_advantages with k3": lambda rows: grpo_advantages.function(
        rows.masked("logprobs"),
        rows.numbers("scores"),
        rows.tokens("logprobs"),
        settings=GRPO(kl=KLTerm(coefficient=0.5, place="reward")),
    ),
    "token_loss": lambda rows: token_loss.function(rows.masked("logprobs"), rows.tokens("logprobs"), settings=PPO()),
    "preference_accuracy": lambda rows: preference_accuracy.function(
        rows.masked("logprobs"), rows.tokens("logprobs"), settings=DPO()
    ),
}


@pytest.mark.parametrize("name", COMPUTATIONS)
@settings(max_examples=examples(25))
@given(masks=masks, seed=st.integers(0, 2**20))
def test_a_computation_skips_tokens_that_are_not_the_models(name, masks, seed):
    whole, cut = (COMPUTATIONS[name](Rows(masks, seed, is_cut)) for is_cut in (False, True))
    for metric in cut.metrics.keys() - {"truncated", "response_tokens"}:
        assert whole.metrics[metric] == pytest.approx(cut.metrics[metric], rel=1e-4, abs=1e-5), metric
    for key, expected in cut.columns.items():
        column = whole.columns[key]
        if column.dim() < 2:
            assert column.tolist() == pytest.approx(expected.tolist(), rel=1e-4, abs=1e-5), key
            continue
        for row, mask in enumerate(masks):
            own = torch.tensor(mask)
            there = column[row, : len(mask)]
            assert there[~own].eq(0).all(), key
            assert there[own].tolist() == pytest.approx(expected[row, : int(own.sum())].tolist(), rel=1e-3, abs=1e-4), (
                key
            )


def test_after_a_turn_the_next_value_is_the_models_next_tokens():
    """gamma 1, lambda 0: A is r + V' - V. The environment's token, with value 9 and reward 5, counts nowhere."""
    made = gae.function(
        Batch({"rewards": [torch.tensor([0.0, 5.0, 1.0])], "mask": [torch.tensor([1, 0, 1])]}),
        Batch({"values": [torch.tensor([0.5, 9.0, 0.25])]}),
        settings=PPO(gamma=1.0, lam=0.0, whiten_advantages=False),
    )
    assert made.columns["advantages"].tolist() == [[-0.25, 0.0, 0.75]]
