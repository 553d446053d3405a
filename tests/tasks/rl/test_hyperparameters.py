"""Settings cross to the ranks and back, and a misspelt or impossible one is refused."""

import pytest
from pydantic import ValidationError

from prefect_rlhf.tasks.rl.hyperparameters import DPO, GRPO, PPO, ReMax, Reward
from prefect_rlhf.tasks.rl.losses import ppo_clip

ALGORITHMS = [PPO, GRPO, ReMax, DPO, Reward]


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
        ({"gamma": 1.1}, "less than or equal to 1"),
        ({"old_logprobs": "both"}, "'rollout' or 'recompute'"),
        ({"kl": {"targett": 3}}, "kl.targett"),
        ({"batch_size": 0}, "greater than or equal to 1"),
    ],
)
def test_bad_settings_are_refused(settings, says):
    with pytest.raises(ValidationError, match=says):
        PPO(**settings)


def test_a_bound_loss_brings_its_settings_back():
    bound = ppo_clip(PPO(clip=0.1))
    assert bound.settings == PPO(clip=0.1)
    assert bound.operator is ppo_clip


def test_greedy_responses_are_trained_at_temperature_one():
    assert PPO(sampling={"temperature": 0.0}).temperature == 1.0
    assert PPO(sampling={"temperature": 0.7}).temperature == 0.7
