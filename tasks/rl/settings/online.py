"""The hyperparameters of each algorithm: the `algo` parameter of its flow, as a typed form."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from prefect_rlhf.errors.wrong_setting import not_used, wrong
from prefect_rlhf.tasks.rl.settings.policy import CLIPS, Advantage, Importance, KLTerm, MeanOver, Overlong, PolicyLoss
from prefect_rlhf.tasks.settings import (
    MOST_ROWS,
    MOST_STEPS,
    MovingReference,
    Optimizer,
    Product,
    Sampling,
    Settings,
    Update,
)


class KLControl(Settings):
    """A penalty that keeps the policy close to the reference model (Ziegler et al. 2019, section 2.2)."""

    kind: Literal["fixed", "adaptive"] = Field("adaptive", description="Whether the coefficient follows the target.")
    coefficient: float = Field(
        0.2, ge=0, le=1e6, description="Reward lost per nat of KL; the initial value if it is adaptive."
    )
    target: float = Field(
        2.5, gt=0, le=1e6, description="Target KL of a response, in nats, for the adaptive coefficient."
    )
    horizon: float = Field(500.0, gt=0, le=1e12, description="Responses over which the adaptive coefficient adapts.")
    estimator: Literal["k1", "k3"] = Field("k1", description="Per token: k1 is the log-ratio, k3 is never negative.")

    @model_validator(mode="after")
    def _fixed_has_no_aim(self) -> KLControl:
        """Refuse settings that only an adaptive coefficient has."""
        for name in ("target", "horizon"):
            if self.kind == "fixed" and getattr(self, name) != type(self).model_fields[name].default:
                raise not_used(name, "a fixed coefficient has no target", "set kind: adaptive")
        if self.coefficient == 0 and self.estimator != "k1":
            raise not_used("estimator", "a coefficient of 0 has no KL", "set coefficient above 0")
        return self

    def only_at_start(self) -> tuple[str, ...]:
        """With an adaptive coefficient, `coefficient` is only the initial value of a state."""
        return ("coefficient",) if self.kind == "adaptive" else ()


class Rollouts(Settings):
    """Settings for algorithms that learn from their own responses: how to sample them, and when to evaluate."""

    batch_size: int = Field(32, ge=1, le=MOST_ROWS, description="Prompts in each step.")
    sampling: Sampling = Field(default=Sampling(), description="How responses are drawn.")
    evaluate_every: int = Field(
        10, ge=1, le=MOST_STEPS, description="Steps between evaluations on the held-out prompts."
    )

    @property
    def temperature(self) -> float:
        """The temperature of the trained log-probabilities: the sampling temperature, or 1.0 if sampling is greedy."""
        return self.sampling.temperature or 1.0


class PolicyGradient(Rollouts):
    """Settings that all policy gradient algorithms share. Derive your own algorithm's settings from it."""

    old_logprobs: Literal["rollout", "recompute"] = Field(
        "rollout", description="The ratio divides by log-probabilities from generation, or from the training engine."
    )
    importance: Importance | None = Field(
        None, description="With recompute: correction for the difference between the engines; empty: no correction."
    )

    @model_validator(mode="after")
    def _importance_has_two_sides(self) -> PolicyGradient:
        if self.importance is not None and self.old_logprobs == "rollout":
            raise not_used("importance", "it needs recomputed log-probabilities", "set old_logprobs: recompute")
        return self


class PPO(PolicyGradient):
    """Proximal policy optimisation (Schulman et al. 2017) with a KL penalty (Ouyang et al. 2022)."""

    clip: float = Field(0.2, gt=0, lt=1, description="The policy's ratio is clipped to 1 - clip and 1 + clip.")
    value_clip: float | None = Field(
        0.2, gt=0, le=1e6, description="Values are clipped to this distance from the old values; empty: no clip."
    )
    gamma: float = Field(1.0, ge=0, le=1, description="Discount per token.")
    lam: float = Field(0.95, ge=0, le=1, description="Lambda of generalised advantage estimation.")
    whiten_advantages: bool = Field(True, description="Give a step's advantages mean 0 and variance 1.")
    kl: KLControl = Field(default=KLControl(), description="Penalty for leaving the reference model.")
    normalise_scores: bool = Field(False, description="Normalise scores by mean and deviation of all scores so far.")
    score_clip: float | None = Field(
        None, gt=0, le=1e6, description="Scores are clipped to this size after normalising."
    )
    update: Update = Field(
        default=Update(epochs=2, mini_batches=2), description="Epochs and mini-batches of a train_step."
    )
    value_weight: float = Field(
        0.1, gt=0, le=1e6, description="Weight of the value loss if actor and critic share a trunk."
    )
    actor_optimizer: Optimizer = Field(
        default=Optimizer(lr=2e-5, head_lr=1e-3), description="Optimizer of the policy, and of values on its trunk."
    )
    critic_optimizer: Optimizer = Field(
        default=Optimizer(lr=2e-5, head_lr=1e-3), description="Optimizer of the value model."
    )


class GRPO(PolicyGradient):
    """Group relative policy optimisation (Shao et al. 2024, arXiv:2402.03300): no critic. Settings select its variants.

    `loss` selects GSPO or CISPO, `advantage` how scores become advantages, such as RLOO.
    """

    samples_per_prompt: int = Field(8, ge=1, le=4096, description="Responses to each prompt, which form a group.")
    over_sampling: float = Field(
        1.0,
        ge=1,
        le=64,
        description="Prompts answered in each step, as a multiple of batch_size. Above 1, the first batch_size groups "
        "whose scores differ are trained on.",
    )
    advantage: Advantage = Field("grpo", description="How scores become advantages.")
    reward_weights: dict[str, Annotated[float, Field(ge=-1e6, le=1e6)]] = Field(
        default={}, description="With gdpo: weight of each named reward. The flow sets it from its reward functions."
    )
    loss: PolicyLoss = Field(
        "clip", description="clip: ratio of a token; gspo: ratio of a response; cispo: bounded weight, no gradient."
    )
    clip_low: float | None = Field(
        None, gt=0, lt=1, description="Ratios are clipped below 1 - this; empty: clip 0.2, gspo 0.0003, cispo no bound."
    )
    clip_high: float | None = Field(
        None, gt=0, le=1e6, description="Ratios are clipped above 1 + this; empty: clip 0.2, gspo 0.0004, cispo 4."
    )
    mean_over: MeanOver = Field(
        "rows", description="The loss is a mean over tokens, rows or groups; a number divides each row's sum of tokens."
    )
    kl: KLTerm = Field(default=KLTerm(), description="KL term that keeps the policy near the reference model.")
    overlong: Overlong = Field(default=Overlong(), description="Treatment of responses that were cut off.")
    follow: MovingReference = Field(default=MovingReference(), description="A reference that follows the policy.")
    update: Update = Field(default=Update(), description="Epochs and mini-batches of a train_step.")
    optimizer: Optimizer = Field(default=Optimizer(lr=1e-6), description="Optimizer of the policy.")

    @property
    def prompts_per_step(self) -> int:
        """How many prompts each step answers; it trains on at most `batch_size` of them.

        >>> GRPO(batch_size=8, over_sampling=1.5).prompts_per_step
        12
        """
        return Product(batch_size=self.batch_size, over_sampling=self.over_sampling)

    @property
    def ratio_bounds(self) -> tuple[float, float]:
        """The bounds to which ratios are clipped.

        >>> GRPO(clip_high=0.28).ratio_bounds
        (0.8, 1.28)
        """
        low, high = CLIPS[self.loss]
        return 1 - (low if self.clip_low is None else self.clip_low), 1 + (
            high if self.clip_high is None else self.clip_high
        )

    @model_validator(mode="after")
    def _makes_sense(self) -> GRPO:
        """Refuse a setting that has no effect because of another setting."""
        ends = self.sampling.stop_at_eos or bool(self.sampling.stop)
        limit, one_scale = self.sampling.max_new_tokens, self.advantage == "gdpo"
        if self.samples_per_prompt == 1 and self.advantage != "reinforce_plus_plus":
            raise wrong(self, "samples_per_prompt", "at least 2 for a comparison, or advantage: reinforce_plus_plus")
        if self.over_sampling > 1 and self.samples_per_prompt == 1:
            right = "1: it keeps groups whose scores differ, and the scores of a single response cannot"
            raise wrong(self, "over_sampling", right)
        if self.reward_weights and not one_scale:
            raise not_used("reward_weights", f"advantage {self.advantage} does not read it", "set advantage: gdpo")
        if not ends and (self.overlong.mask or self.overlong.buffer is not None):
            raise not_used("overlong", "without algo.sampling.stop_at_eos every response is cut off")
        if (self.overlong.buffer or 0) > limit:
            raise wrong(self, "overlong.buffer", f"at most {limit}, algo.sampling.max_new_tokens")
        if one_scale and self.kl.in_reward:
            raise wrong(self, "kl.place", "loss: with advantage gdpo it has no separate scale in the reward")
        if one_scale and self.overlong.buffer is not None:
            raise not_used(
                "overlong.buffer", "with advantage gdpo it has no separate scale", "score it as a named reward"
            )
        return self


class ReMax(PolicyGradient):
    """REINFORCE with the greedy response's score as its baseline (Li et al. 2023, arXiv:2310.10505)."""

    kl: KLControl = Field(default=KLControl(kind="fixed"), description="Penalty for leaving the reference model.")
    normalise_scores: Literal[False] = Field(False, description="Off: scores and baselines share a scale.")
    score_clip: None = Field(None, description="Off: scores and baselines share a scale.")
    max_ratio: float = Field(2.0, gt=1, le=1e6, description="With staleness or recompute: largest weight of a token.")
    optimizer: Optimizer = Field(default=Optimizer(lr=1e-6), description="Optimizer of the policy.")


class Reward(Settings):
    """A reward model from preferences (Bradley & Terry 1952; Ouyang et al. 2022, equation 1)."""

    batch_size: int = Field(16, ge=1, le=MOST_ROWS, description="Pairs in each step.")
    centering: float = Field(
        0.0, ge=0, le=1e6, description="Weight of the squared sum of a pair's scores; keeps scores near 0."
    )
    evaluate_every: int = Field(20, ge=1, le=MOST_STEPS, description="Steps between evaluations on the held-out pairs.")
    update: Update = Field(default=Update(), description="Epochs and mini-batches of a train_step.")
    optimizer: Optimizer = Field(
        default=Optimizer(lr=2e-5, head_lr=1e-3, warmup_steps=5), description="Optimizer of the reward model."
    )
