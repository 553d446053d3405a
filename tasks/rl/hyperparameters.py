"""The hyperparameters of each algorithm: the `algo` parameter of its flow, as one typed form."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from prefect_rlhf.tasks.settings import MOST_ROWS, MOST_STEPS, Optimizer, Sampling, Settings, Update


class KLControl(Settings):
    """The penalty for leaving the reference model (Ziegler et al. 2019, section 2.2)."""

    kind: Literal["fixed", "adaptive"] = Field("adaptive", description="Whether the coefficient follows the target.")
    coefficient: float = Field(
        0.2, ge=0, le=1e6, description="Reward lost per nat of KL; where the adaptive one starts."
    )
    target: float = Field(
        2.5, gt=0, le=1e6, description="KL of a response, in nats, that the adaptive coefficient steers to."
    )
    horizon: float = Field(500.0, gt=0, le=1e12, description="Responses over which the adaptive coefficient moves.")
    estimator: Literal["k1", "k3"] = Field("k1", description="Per token: k1 is the log-ratio, k3 is never negative.")


class Rollouts(Settings):
    """Settings of an algorithm that learns from its own responses: how it gets them, and when it is evaluated."""

    batch_size: int = Field(32, ge=1, le=MOST_ROWS, description="Prompts in each step.")
    sampling: Sampling = Field(default=Sampling(), description="How responses are drawn.")
    evaluate_every: int = Field(
        10, ge=1, le=MOST_STEPS, description="Steps between evaluations on the held-out prompts."
    )

    @property
    def temperature(self) -> float:
        """The temperature of the log-probabilities that are trained: those of the distribution sampled from."""
        return self.sampling.temperature or 1.0


class PPO(Rollouts):
    """Proximal policy optimisation (Schulman et al. 2017) with a KL penalty (Ouyang et al. 2022)."""

    old_logprobs: Literal["rollout", "recompute"] = Field(
        "rollout", description="Whose log-probabilities the ratio divides by: generation's, or the training engine's."
    )
    clip: float = Field(0.2, gt=0, lt=1, description="The policy's ratio counts within 1 - clip and 1 + clip.")
    value_clip: float | None = Field(
        0.2, gt=0, le=1e6, description="A value counts within this of its old one; empty: always."
    )
    gamma: float = Field(1.0, ge=0, le=1, description="Discount per token.")
    lam: float = Field(0.95, ge=0, le=1, description="Lambda of generalised advantage estimation.")
    whiten_advantages: bool = Field(True, description="Give a step's advantages mean 0 and variance 1.")
    kl: KLControl = Field(default=KLControl(), description="Penalty for leaving the reference model.")
    normalise_scores: bool = Field(False, description="Scale scores by the mean and deviation of all so far.")
    score_clip: float | None = Field(None, gt=0, le=1e6, description="Scores count up to this size, after scaling.")
    update: Update = Field(default=Update(epochs=2, mini_batches=2), description="How a train_step walks the rows.")
    actor_optimizer: Optimizer = Field(default=Optimizer(lr=2e-5), description="Optimizer of the policy.")
    critic_optimizer: Optimizer = Field(
        default=Optimizer(lr=2e-5, head_lr=1e-3), description="Optimizer of the value model."
    )


class GRPO(Rollouts):
    """Group relative policy optimisation (Shao et al. 2024, arXiv:2402.03300)."""

    samples_per_prompt: int = Field(8, ge=2, le=4096, description="Responses to each prompt: a group.")
    scale_by_deviation: bool = Field(True, description="Divide a group's advantages by their standard deviation.")
    clip: float = Field(0.2, gt=0, lt=1, description="The policy's ratio counts within 1 - clip and 1 + clip.")
    kl_coefficient: float = Field(0.04, ge=0, le=1e6, description="Weight of the KL term in the loss.")
    update: Update = Field(default=Update(), description="How a train_step walks the rows.")
    optimizer: Optimizer = Field(default=Optimizer(lr=1e-6), description="Optimizer of the policy.")


class ReMax(Rollouts):
    """REINFORCE with the greedy response's score as baseline (Li et al. 2023, arXiv:2310.10505)."""

    kl: KLControl = Field(default=KLControl(kind="fixed"), description="Penalty for leaving the reference model.")
    normalise_scores: Literal[False] = Field(False, description="Off: scores and baselines share one scale.")
    score_clip: None = Field(None, description="Off: scores and baselines share one scale.")
    max_ratio: float = Field(2.0, gt=1, le=1e6, description="With staleness, a token's weight is at most this.")
    optimizer: Optimizer = Field(default=Optimizer(lr=1e-6), description="Optimizer of the policy.")


class DPO(Settings):
    """Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290)."""

    batch_size: int = Field(16, ge=1, le=MOST_ROWS, description="Pairs in each step.")
    beta: float = Field(0.1, gt=0, le=1e6, description="How strongly the policy is held to the reference model.")
    label_smoothing: float = Field(0.0, ge=0, lt=0.5, description="Share of labels taken to be wrong.")
    update: Update = Field(default=Update(), description="How a train_step walks the rows.")
    optimizer: Optimizer = Field(default=Optimizer(lr=1e-6), description="Optimizer of the policy.")


class Reward(Settings):
    """A reward model from preferences (Bradley & Terry 1952; Ouyang et al. 2022, equation 1)."""

    batch_size: int = Field(16, ge=1, le=MOST_ROWS, description="Pairs in each step.")
    centering: float = Field(
        0.0, ge=0, le=1e6, description="Weight of the squared sum of a pair's scores; holds them near 0."
    )
    evaluate_every: int = Field(20, ge=1, le=MOST_STEPS, description="Steps between evaluations on the held-out pairs.")
    update: Update = Field(default=Update(), description="How a train_step walks the rows.")
    optimizer: Optimizer = Field(
        default=Optimizer(lr=2e-5, head_lr=1e-3, warmup_steps=5), description="Optimizer of the reward model."
    )
