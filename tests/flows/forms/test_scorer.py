"""Settings that need a play, or that no play has, are refused in a line that names them."""

import pytest

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.flows.forms.reward import check_scorer
from prefect_rlhf.tasks.host_rewards import HostRewards
from prefect_rlhf.tasks.play import Play
from prefect_rlhf.tasks.rl.settings.online import GRPO

pytestmark = pytest.mark.quick

REWARD = HostRewards(functions={"exact": {"function": "a:b"}})
PLAY = Play(function="a:b", max_tokens=8)


@pytest.mark.parametrize(
    ("reward", "play", "algo", "says"),
    [
        (REWARD, None, GRPO(advantage="turns"), "algo.advantage: 'turns' is not used: without a play, a response is"),
        (None, PLAY, GRPO(advantage="gdpo"), "algo.advantage: 'gdpo' is not used: a play returns a single score"),
        (REWARD, PLAY, GRPO(), "reward: 'functions' is not used: play scores its own rows"),
        (None, None, GRPO(), "reward: missing; expected a reward model or functions, or a play"),
    ],
)
def test_a_play_refuses_missing_and_superfluous_settings(reward, play, algo, says):
    with pytest.raises(InvalidInput) as refused:
        check_scorer(reward, play, algo)
    assert str(refused.value).startswith(says)


def test_turns_with_a_play_are_fine():
    check_scorer(None, PLAY, GRPO(advantage="turns"))
