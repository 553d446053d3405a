"""Settings cross to the ranks and back, and a misspelt or impossible one is refused."""

import pytest

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.tasks.rl.losses import ppo_clip
from prefect_rlhf.tasks.rl.settings.offline import DPO, KTO, SFT
from prefect_rlhf.tasks.rl.settings.online import GRPO, PPO, ReMax, Reward
from prefect_rlhf.tasks.settings import Optimizer

pytestmark = pytest.mark.quick

ALGORITHMS = [PPO, GRPO, ReMax, SFT, DPO, KTO, Reward]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_settings_survive_json(algorithm):
    assert algorithm.model_validate_json(algorithm().model_dump_json()) == algorithm()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_each_field_says_what_it_is(algorithm):
    """The form in the UI has nothing else to say."""
    assert [name for name, field in algorithm.model_fields.items() if not field.description] == []


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"clipp": 0.2}, "clipp"),
        ({"clip": 1.5}, "less than 1"),
        ({"gamma": 1.1}, "at most 1"),
        ({"old_logprobs": "both"}, "'rollout' or 'recompute'"),
        ({"kl": {"targett": 3}}, "kl.targett"),
        ({"batch_size": 0}, "at least 1"),
    ],
)
def test_bad_settings_are_refused(settings, says):
    with pytest.raises(InvalidInput, match=says):
        PPO(**settings)


def test_a_bound_loss_brings_its_settings_back():
    bound = ppo_clip(PPO(clip=0.1))
    assert bound.settings == PPO(clip=0.1)
    assert bound.operator is ppo_clip


def test_greedy_responses_are_trained_at_temperature_one():
    assert PPO(sampling={"temperature": 0.0}).temperature == 1.0
    assert PPO(sampling={"temperature": 0.7}).temperature == 0.7


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"decay_steps": 5}, "decay_steps: 5 is not used: a constant rate .* set schedule: linear or cosine"),
        ({"min_lr_ratio": 0.1}, "min_lr_ratio: 0.1 is not used: a constant rate does not fall"),
        ({"schedule": "linear", "warmup_steps": 5, "decay_steps": 5}, "decay_steps: got 5, expected more than the 5"),
        ({"schedule": "inverse_sqrt"}, "'constant', 'linear' or 'cosine'"),
    ],
)
def test_a_contradictory_schedule_is_refused(settings, says):
    with pytest.raises(InvalidInput, match=says):
        Optimizer(**settings)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"samples_per_prompt": 1}, "samples_per_prompt: got 1, expected at least 2 for a comparison"),
        (
            {"kl": {"estimator": "k1"}},
            "estimator: got 'k1', expected k2, k3, or place: reward: k1 in a loss has a gradient of zero on average",
        ),
        ({"importance": {}}, "importance: .* is not used: .* set old_logprobs: recompute"),
        ({"reward_weights": {"exact": 1.0}}, "reward_weights: .* is not used: advantage grpo does not read it"),
        ({"overlong": {"buffer": 25}}, "overlong.buffer: got 25, expected at most 24, algo.sampling.max_new_tokens"),
        (
            {"kl": {"coefficient": 0, "estimator": "k2"}},
            "estimator: 'k2' is not used: a coefficient of 0 has no KL",
        ),
        ({"kl": {"coefficient": 0, "place": "reward"}}, "place: 'reward' is not used: a coefficient of 0"),
        ({"overlong": {"penalty": 2.0}}, "penalty: 2.0 is not used: .*set buffer"),
        ({"overlong": {"mask": True}, "sampling": {"stop_at_eos": False}}, "every response is cut off"),
        ({"overlong": {"buffer": 2}, "sampling": {"stop_at_eos": False}}, "every response is cut off"),
        (
            {"advantage": "gdpo", "kl": {"place": "reward"}},
            "kl.place: got 'reward', expected loss: with advantage gdpo it has no separate scale",
        ),
        (
            {"advantage": "gdpo", "overlong": {"buffer": 2}},
            "overlong.buffer: 2 is not used: with advantage gdpo it has no separate scale",
        ),
        ({"mean_over": "row"}, "mean_over"),
        ({"mean_over": 0}, "mean_over: got 0"),
        ({"mean_over": True}, "mean_over"),
        ({"clip_low": 1.0}, "less than 1"),
        ({"clip": 0.2}, "clip"),
        ({"kl_coefficient": 0.1}, "kl_coefficient"),
    ],
)
def test_contradictory_grpo_settings_are_refused(settings, says):
    with pytest.raises(InvalidInput, match=says):
        GRPO(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"advantage": "reinforce_plus_plus", "samples_per_prompt": 1, "kl": {"estimator": "k1", "place": "reward"}},
        {"advantage": "gdpo", "reward_weights": {"exact": 1.0, "short": 0.5}},
        {"old_logprobs": "recompute", "importance": {"level": "sequence", "beyond": "mask"}, "mean_over": 512},
        {"overlong": {"mask": True, "buffer": 24, "penalty": 0.5}, "clip_high": 0.28, "mean_over": "tokens"},
        {"kl": {"coefficient": 0.0}, "loss": "cispo", "clip_low": 0.5},
    ],
)
def test_settings_of_the_family_survive_json(settings):
    assert GRPO.model_validate_json(GRPO(**settings).model_dump_json()) == GRPO(**settings)


def test_each_loss_has_bounds_of_its_own():
    assert [GRPO(loss=loss).ratio_bounds for loss in ("clip", "gspo", "cispo")] == [
        (0.8, 1.2),
        (1 - 3e-4, 1 + 4e-4),
        (0.0, 5.0),
    ]
    assert GRPO(loss="cispo", clip_low=0.5).ratio_bounds == (0.5, 5.0)
