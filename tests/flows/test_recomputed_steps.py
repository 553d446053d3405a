"""A step of GRPO computed again, by transformers, numpy and torch, from the rollouts that the run wrote.

Public reports of other systems say what goes wrong silently (docs/internals/public_reports.md): means over
micro-batches or replicas, log-probabilities at another temperature, answers that count as cut, the sign of KL. Each
would give other advantages, another gradient norm or other weights than these.
"""

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from prefect_rlhf import GRPO
from prefect_rlhf.flows.grpo import grpo
from tests.flows import rewards
from tests.support.cases import first
from tests.support.runs import completed, leased, read_lines
from tests.support.tiny import make_model, make_prompts
from tests.tasks.small_tokenizer import WORDS

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect", "own_home")]
END, LIMIT = WORDS.index("</s>"), 3
OPTIMIZER = {"lr": 0.01, "eps": 1e-3, "max_grad_norm": 0.05}  # a large eps: no step of random sign
CUT_BY_STRING = {"max_new_tokens": LIMIT, "temperature": 0.7, "top_k": 9, "stop": ["film"]}
CASES = {  # the devices, and settings beside those below
    "masked": (2, {"overlong": {"mask": True}, "mean_over": "tokens", "update": {"mini_batches": 2, "epochs": 2}}),
    "groups": (1, {"mean_over": "groups", "overlong": {"buffer": 2}, "update": {"mini_batches": 3}}),
    "rows": (2, {"kl": {"coefficient": 0.1, "estimator": "k2"}, "update": {"mini_batches": 2}}),
    "sums": (
        1,
        {"advantage": "rloo", "mean_over": 1, "kl": {"coefficient": 0.2, "estimator": "k1", "place": "reward"}},
    ),
    "gspo": (1, {"loss": "gspo", "kl": {"coefficient": 0.0}, "update": {"mini_batches": 2}}),
    "cispo": (1, {"loss": "cispo", "advantage": "dr_grpo", "mean_over": "tokens", "update": {"mini_batches": 2}}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Models of few tokens, so that answers of any length end, also at the limit."""
    folder = tmp_path_factory.mktemp("few")
    actor, ref = (make_model(folder / name, vocab=16, layers=layers) for name, layers in (("actor", 2), ("ref", 3)))
    return {"actor": actor, "ref": ref, "prompts": make_prompts(folder / "prompts.parquet")}


@pytest.mark.parametrize("case", first(1, CASES))
def test_the_weights_after_a_step_follow_from_the_written_rows(folders, tmp_path, case):
    devices, more = CASES[case]
    algo = {"batch_size": 8, "samples_per_prompt": 6, "sampling": CUT_BY_STRING, "optimizer": OPTIMIZER, **more}
    roles = {role: {"path": folders[role], "dtype": "float32"} for role in ("actor", "ref")}
    if GRPO(**algo).kl.coefficient == 0:
        roles.pop("ref")
    prompts = {"path": folders["prompts"]}
    given = {"prompts": prompts, "held_out": prompts | {"split": "held_out"}, "algo": algo, **roles}
    functions = {"spread": {"function": f"{rewards.__file__}:spread"}}
    with leased(devices):
        run_dir = completed(
            grpo, given | {"reward": {"functions": functions}, "steps": 1, "output_dir": str(tmp_path / "runs")}
        )
    step = Step(pq.read_table(run_dir / "rollouts" / "step-000001.parquet").to_pydict(), GRPO(**algo), folders)
    metrics = read_lines(run_dir / "metrics.jsonl")[0]
    assert step.ended_at_limit > 0
    assert step.cut_share == pytest.approx(metrics["actor_generate.truncated"])
    assert step.cut_share == pytest.approx(metrics["grpo_advantages.truncated"])
    for found, expected in zip(step.rows["logprobs"], step.old, strict=True):
        assert found == pytest.approx(expected.tolist(), abs=1e-4)
    for found, expected in zip(step.rows["advantages"], step.advantages * step.weights, strict=True):
        assert found == pytest.approx([expected] * len(found), abs=1e-4)
    norms = step.train()
    assert metrics["actor_train.grad_norm"] == pytest.approx(np.mean(norms), rel=1e-4)
    trained = AutoModelForCausalLM.from_pretrained(run_dir / "actor", dtype=torch.float32)
    for found, expected in zip(trained.parameters(), step.model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


class Step:
    """What a step's rows say, and the same step by plain formulas, row after row."""

    def __init__(self, rows, algo, folders):
        self.rows, self.algo = rows, algo
        self.model, reference = (
            AutoModelForCausalLM.from_pretrained(folders[role], dtype=torch.float32) for role in ("actor", "ref")
        )
        self.model.get_input_embeddings().padding_idx = None  # transformers leaves that token's input untrained
        self.lengths = [len(row) for row in rows["logprobs"]]
        with torch.no_grad():
            self.old, self.reference = (
                [self.logprobs(model, row) for row in range(len(self.lengths))] for model in (self.model, reference)
            )
        ended = [row[-1] in (END, WORDS.index("film")) for row in rows["tokens"]]
        self.ended_at_limit = sum(end and length == LIMIT for end, length in zip(ended, self.lengths, strict=True))
        self.cut_share = 1 - np.mean(ended)
        self.weights = np.where(ended, 1.0, 0.0 if algo.overlong.mask else 1.0)
        self.advantages = self.relative_scores()

    def logprobs(self, model, row):
        """Of the response's tokens, at the sampling temperature, over the whole vocabulary."""
        tokens = self.rows["tokens"][row]
        logits = model(torch.tensor([tokens])).logits[0] / self.algo.sampling.temperature
        first = len(tokens) - self.lengths[row]
        places = torch.arange(first, len(tokens))
        return logits.log_softmax(-1)[places - 1, torch.tensor(tokens[first:])]

    def relative_scores(self):
        """GRPO's, Dr. GRPO's or RLOO's advantage of each row."""
        scores = np.array(
            [rewards.spread({"response_ids": self.rows["tokens"][i][-n:]}) for i, n in enumerate(self.lengths)]
        )
        assert self.rows["reward"] == pytest.approx(scores, abs=1e-5)
        if self.algo.overlong.buffer:  # equation 13 of DAPO
            free = LIMIT - self.algo.overlong.buffer
            scores = scores - np.clip((np.array(self.lengths) - free) / self.algo.overlong.buffer, 0, 1)
        if self.algo.kl.in_reward:
            kl = [float((old - ref).sum()) for old, ref in zip(self.old, self.reference, strict=True)]
            scores = scores - self.algo.kl.coefficient * np.array(kl)
        made = np.zeros(len(scores))
        for group in set(self.rows["row_id"]):
            of_group = np.array(self.rows["row_id"]) == group
            own = scores[of_group]
            centred, size = own - own.mean(), len(own)
            scale = {"grpo": 1 / (own.std(ddof=1) + 1e-4), "dr_grpo": 1.0, "rloo": size / (size - 1)}
            made[of_group] = centred * scale[self.algo.advantage]
        return made

    def train(self):
        """Take the optimizer steps; return the gradient norms."""
        algo, norms = self.algo, []
        settings = {
            "lr": algo.optimizer.lr,
            "betas": algo.optimizer.betas,
            "eps": algo.optimizer.eps,
            "weight_decay": 0,
        }
        adam = torch.optim.AdamW(self.model.parameters(), **settings)
        for rows in np.array_split(np.arange(len(self.lengths)), algo.update.mini_batches) * algo.update.epochs:
            adam.zero_grad()
            self.loss([row for row in rows if self.weights[row] > 0]).backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), algo.optimizer.max_grad_norm)))
            adam.step()
        return norms

    def loss(self, rows):
        """The mean over the mini-batch, as `mean_over` says."""
        total, divisor = 0.0, 0.0
        for row in rows:
            values, over = self.token_losses(row), self.algo.mean_over
            of_group = [
                i
                for i, group in enumerate(self.rows["row_id"])
                if group == self.rows["row_id"][row] and self.weights[i]
            ]
            tokens_of_group = sum(self.lengths[i] for i in of_group)
            share, weight = {
                "tokens": (1.0, self.lengths[row]),
                "rows": (1 / self.lengths[row], 1.0),
                "groups": (1 / tokens_of_group, 1 / len(of_group)),
            }.get(over, (1.0, 1.0))
            total, divisor = total + values.sum() * share, divisor + weight
        return total / divisor

    def token_losses(self, row):
        """The clipped surrogate, GSPO's or CISPO's, and KL where it is in the loss."""
        algo, (low, high) = self.algo, self.algo.ratio_bounds
        logprobs, advantage = self.logprobs(self.model, row), float(self.advantages[row])
        gone = logprobs - self.old[row]
        ratio = gone.exp()
        if algo.loss == "gspo":
            ratio = (gone.mean().detach() + logprobs - logprobs.detach()).exp()
        losses = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
        if algo.loss == "cispo":
            losses = -ratio.clamp(low, high).detach() * advantage * logprobs
        if algo.kl.in_loss:
            behind = self.reference[row] - logprobs
            kl = {"k2": behind**2 / 2, "k3": behind.exp() - 1 - behind}[algo.kl.estimator]
            losses = losses + algo.kl.coefficient * kl
        return losses
