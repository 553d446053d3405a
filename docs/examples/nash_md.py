"""Nash-EMA-PG (Munos et al. 2023, arXiv:2312.00886, section 7.2): an opponent that averages earlier policies."""

from prefect_rlhf import Batch, Computed, Model, Optimizer, Prompts, Reward, Sampling, Settings
from prefect_rlhf import computation, compute, follow, generate, inference, losses, rlhf_flow, score, train_step


class NashMD(Settings):
    """Settings of a run, under `algo`; `share` is the policy's in its opponent's next version."""

    batch_size: int = 8
    share: float = 0.05
    kl_coefficient: float = 0.01
    sampling: Sampling = Sampling(max_new_tokens=16)
    optimizer: Optimizer = Optimizer(lr=1e-6)


@computation("advantages")
def preferred(rollout: Batch, ref: Batch, own: Batch, theirs: Batch, settings: NashMD) -> Computed:
    """The preference for the policy's answer, from -0.5 to 0.5, less the KL to the reference: [B, T]."""
    preference_B = (own["scores"] - theirs["scores"]).sigmoid()
    kl_BT = rollout["logprobs"] - ref["logprobs"]
    advantages_BT = (preference_B[:, None] - 0.5 - settings.kl_coefficient * kl_BT) * rollout.mask("logprobs")
    return Computed({"advantages": advantages_BT}, metrics={"preference": float(preference_B.mean())})


@rlhf_flow("nash-md")
def nash_md(
    prompts: Prompts, actor: Model, opponent: Model, ref: Model, reward: Reward, algo: NashMD = NashMD()
) -> None:
    """One iteration: an answer of each, the preference between them, a training step, a step of the opponent."""
    rollout = generate(actor, prompts, batch_size=algo.batch_size, sampling=algo.sampling)
    against = generate(opponent, prompts, batch_size=algo.batch_size, sampling=algo.sampling)
    reference = inference(ref, rollout, output="logprobs", temperature=algo.sampling.temperature)
    scores = score(reward, rollout), score(reward, against, name="scores_against")
    advantages = compute(preferred, rollout, reference, *scores, settings=algo)
    loss = losses.policy_gradient().on(rollout, advantages, temperature=algo.sampling.temperature)
    train_step(actor, loss, optimizer=algo.optimizer)
    follow(opponent, actor, share=algo.share)
