"""A step of PPO computed again from the rollouts that the run wrote, by transformers' models and plain formulas.

The answers of an environment lie between the model's turns: they have no advantage, no reward and no part in a mean,
and a turn's last token is followed by the next turn's first.
"""

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from prefect_rlhf import PPO
from prefect_rlhf.flows.ppo import ppo
from tests.flows import plays
from tests.support.cases import first
from tests.support.runs import completed, leased, read_lines
from tests.support.tiny import make_model, ppo_parameters

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect", "own_home")]
SCORED_BY = ("play", "reward")
ROLES = {"actor", "ref", "critic", "reward"}
OPTIMIZER = {"lr": 0.01, "head_lr": 0.02, "eps": 1e-3, "max_grad_norm": 0.05}  # a large eps: no step of random sign
ALGO = {
    "batch_size": 8,
    "sampling": {"max_new_tokens": 4, "temperature": 0.7},
    "gamma": 0.9,
    "actor_optimizer": OPTIMIZER,
    "critic_optimizer": OPTIMIZER,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Parameters of PPO whose reference is another model."""
    folder = tmp_path_factory.mktemp("ppo")
    given = ppo_parameters(folder)
    given["ref"] = {"path": make_model(folder / "ref", layers=3)}
    exact = {role: given[role] | {"dtype": "float32"} for role in ROLES}
    return given | exact | {"algo": ALGO, "steps": 1}


@pytest.mark.parametrize("scored_by", first(1, SCORED_BY))
def test_the_weights_after_a_step_follow_from_the_written_rows(folders, tmp_path, scored_by):
    given = folders | {"output_dir": str(tmp_path / "runs")}
    if scored_by == "play":
        given["play"] = {"function": f"{plays.__file__}:asks_twice", "max_tokens": 24}
        given.pop("reward")
    with leased(2):
        run_dir = completed(ppo, given)
    rows = pq.read_table(run_dir / "rollouts" / "step-000001.parquet").to_pydict()
    step = Step(rows, PPO(**ALGO), {role: given[role]["path"] for role in given.keys() & ROLES})
    assert (min(map(min, step.masks)) == 0) == (scored_by == "play")
    for found, expected in zip(rows["advantages"], step.advantages, strict=True):
        assert found == pytest.approx(expected, abs=2e-4)
    metrics = read_lines(run_dir / "metrics.jsonl")[0]
    for role, model, norms in (("actor", step.actor, step.train_actor()), ("critic", step.critic, step.train_critic())):
        assert metrics[f"{role}_train.grad_norm"] == pytest.approx(np.mean(norms), rel=1e-3)
        trained = type(model).from_pretrained(run_dir / role, dtype=torch.float32)
        for found, expected in zip(trained.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(found, expected, atol=5e-5, rtol=0)


class Step:
    """What a step's rows say, and the same step by plain formulas, row after row."""

    def __init__(self, rows, algo, folders):
        self.rows, self.algo = rows, algo
        self.lengths = [len(row) for row in rows["logprobs"]]
        self.masks = rows.get("mask", [[1] * length for length in self.lengths])
        self.own = [np.flatnonzero(mask) for mask in self.masks]
        self.actor = trainable(AutoModelForCausalLM, folders["actor"])
        self.critic = trainable(AutoModelForSequenceClassification, folders["critic"])
        reference, count = trainable(AutoModelForCausalLM, folders["ref"]), range(len(self.lengths))
        with torch.no_grad():
            self.old = [self.logprobs(self.actor, row) for row in count]
            self.values = [self.values_of(row) for row in count]
            log_ratios = [(self.old[row] - self.logprobs(reference, row)).numpy() for row in count]
            scores = [self.scores(row, folders) for row in count]
        penalty = algo.kl.coefficient  # its first value
        self.raw = [self.gae(row, scores[row] - penalty * log_ratios[row]) for row in count]
        flat = np.concatenate(self.raw)
        self.white = [(raw - flat.mean()) / np.sqrt(flat.var(ddof=1) + 1e-8) for raw in self.raw]
        self.advantages = [np.zeros(length) for length in self.lengths]
        for row in count:
            self.advantages[row][self.own[row]] = self.white[row]
        self.returns = [raw + values.numpy() for raw, values in zip(self.raw, self.values, strict=True)]

    def places(self, row):
        """Of the model's own tokens in the row."""
        return torch.tensor(self.own[row] + len(self.rows["tokens"][row]) - self.lengths[row])

    def logprobs(self, model, row):
        tokens = torch.tensor(self.rows["tokens"][row])
        logits = model(tokens[None]).logits[0] / self.algo.sampling.temperature
        return logits.log_softmax(-1)[self.places(row) - 1, tokens[self.places(row)]]

    def values_of(self, row):
        hidden = self.critic.model(torch.tensor([self.rows["tokens"][row]])).last_hidden_state[0]
        return self.critic.score(hidden)[self.places(row) - 1, 0]

    def scores(self, row, folders):
        """The score at the last token, or a play's rewards, each at the last token of its turn."""
        made = np.zeros(len(self.own[row]))
        if "reward" in folders:
            scorer = trainable(AutoModelForSequenceClassification, folders["reward"])
            hidden = scorer.model(torch.tensor([self.rows["tokens"][row]])).last_hidden_state[0]
            made[-1] = float(scorer.score(hidden[-1])[0])
            assert self.rows["reward"][row] == pytest.approx(made[-1], abs=1e-4)
            return made
        turns = np.array(self.rows["turn"][row])[self.own[row]]
        for turn, reward in enumerate(self.rows["turn_rewards"][row]):
            made[np.flatnonzero(turns == turn)[-1]] += reward
        assert self.rows["reward"][row] == pytest.approx(made.sum(), abs=1e-5)
        return made

    def gae(self, row, rewards):
        """Equation 16 of Schulman et al. 2015, on the own tokens alone."""
        values, gained, advantages = [*self.values[row].tolist(), 0.0], 0.0, []
        for t in reversed(range(len(rewards))):
            gained = rewards[t] + self.algo.gamma * values[t + 1] - values[t] + self.algo.gamma * self.algo.lam * gained
            advantages.append(gained)
        return np.array(advantages[::-1])

    def train_actor(self):
        return self.train(self.actor, self.algo.actor_optimizer, self.policy_losses)

    def train_critic(self):
        return self.train(self.critic, self.algo.critic_optimizer, self.value_losses)

    def train(self, model, optimizer, losses_of):
        """Take the optimizer steps, each on the mean over the tokens of its mini-batch; return the gradient norms."""
        head = [p for name, p in model.named_parameters() if name == "score.weight"]
        trunk = [p for name, p in model.named_parameters() if name != "score.weight"]
        groups = [{"params": trunk, "lr": optimizer.lr}, {"params": head, "lr": optimizer.head_lr}]
        adam = torch.optim.AdamW(groups, betas=optimizer.betas, eps=optimizer.eps, weight_decay=0)
        norms = []
        for rows in (
            np.array_split(np.arange(len(self.lengths)), self.algo.update.mini_batches) * self.algo.update.epochs
        ):
            adam.zero_grad()
            torch.cat([losses_of(row) for row in rows]).mean().backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), optimizer.max_grad_norm)))
            adam.step()
        return norms

    def policy_losses(self, row):
        ratio = (self.logprobs(self.actor, row) - self.old[row]).exp()
        advantages = torch.tensor(self.white[row], dtype=torch.float32)
        near = ratio.clamp(1 - self.algo.clip, 1 + self.algo.clip)
        return -torch.minimum(ratio * advantages, near * advantages)

    def value_losses(self, row):
        values, old = self.values_of(row), self.values[row]
        returns = torch.tensor(self.returns[row], dtype=torch.float32)
        near = old + (values - old).clamp(-self.algo.value_clip, self.algo.value_clip)
        return 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2)


def trainable(kind, folder):
    """A model whose padding token has a gradient like any other: transformers leaves that token's input untrained."""
    model = kind.from_pretrained(folder, dtype=torch.float32)
    model.get_input_embeddings().padding_idx = None
    return model
