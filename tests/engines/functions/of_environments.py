"""Environments in the forms of other libraries, each imported only where its library is."""

import gymnasium
from gymnasium.spaces import Discrete, Text


class Guess(gymnasium.Env):
    """Guess a number below 8; each guess gets "higher" or "lower"."""

    action_space = Text(32)
    observation_space = Text(32)

    def __init__(self, most=8):
        self.most = most

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.secret = int(self.np_random.integers(self.most))
        return f"below {self.most}", {}

    def step(self, action):
        if not action.strip().isdigit():
            raise ValueError(f"no number: {action}")
        number = int(action)
        return (
            "higher" if number < self.secret else "lower",
            float(number == self.secret),
            number == self.secret,
            False,
            {},
        )


class Numbers(Guess):
    action_space = Discrete(3)


def make(most=8):
    return Guess(most)


def make_nothing(most=8):
    Guess(most)


gymnasium.register("Guess-v0", entry_point=Guess)
