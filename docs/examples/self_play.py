"""Self-play: the policy learns to win against a copy of itself, which is renewed every few steps."""

from prefect_rlhf import Batch, Computed, Model, Optimizer, Prompts, Reward, Sampling, Settings
from prefect_rlhf import computation, compute, follow, generate, losses, rlhf_flow, score, train_step


class SelfPlay(Settings):
    """Settings of a run, under `algo`; the copy is renewed after every `copy_every` steps."""

    batch_size: int = 8
    copy_every: int = 4
    sampling: Sampling = Sampling(max_new_tokens=16)
    optimizer: Optimizer = Optimizer(lr=1e-6)


@computation("advantages")
def wins(rollout: Batch, own: Batch, theirs: Batch, settings: SelfPlay) -> Computed:
    """1 at each token of an answer that wins against the copy's, -1 of one that loses, 0 of a draw: [B, T]."""
    result_B = (own["scores"] - theirs["scores"]).sign()
    win_rate = float((result_B > 0).float().mean())
    return Computed({"advantages": result_B[:, None] * rollout.mask("logprobs")}, metrics={"win_rate": win_rate})


@rlhf_flow("self-play")
def self_play(prompts: Prompts, actor: Model, opponent: Model, reward: Reward, algo: SelfPlay = SelfPlay()) -> None:
    """One iteration: an answer of each to the same prompts, and a training step on who won."""
    rollout = generate(actor, prompts, batch_size=algo.batch_size, sampling=algo.sampling)
    against = generate(opponent, prompts, batch_size=algo.batch_size, sampling=algo.sampling)
    scores = score(reward, rollout), score(reward, against, name="scores_against")
    advantages = compute(wins, rollout, *scores, settings=algo)
    loss = losses.policy_gradient().on(rollout, advantages, temperature=algo.sampling.temperature)
    train_step(actor, loss, optimizer=algo.optimizer)
    follow(opponent, actor, every=algo.copy_every)
