"""Environments as TRL's `environment_factory` takes them (TRL 1.16: reset, public methods, get_reward)."""

import time


class Counter:
    """Count up to a target."""

    def __init__(self, start=0):
        self.start = start

    def reset(self, **kwargs):
        self.value, self.target = self.start, int(kwargs["answer"])
        return f" Count to {self.target}."

    def increment(self, by: int = 1) -> str:
        """Add to the counter.

        Args:
            by: The number to add.
        """
        if by < 0:
            raise ValueError("by is negative")
        self.value += by
        return f"the counter is {self.value}"

    def break_down(self) -> str:
        """Break."""
        raise LookupError("the counter is gone")

    def get_reward(self) -> float:
        return float(self.value == self.target)


class WithoutReward:
    def reset(self):
        return None


class WithoutTools:
    def reset(self):
        return None

    def get_reward(self):
        return 1.0


class Silent(Counter):
    def reset(self, answer):
        self.value, self.target = self.start, int(answer)


class Odd(Counter):
    def reset(self, **kwargs):
        return 3


class Opens(Counter):
    """Add three words of the engines' tests to each prompt."""

    def reset(self):
        self.value = self.target = 0
        return "w40 w41 w42"


class Brittle(Counter):
    @property
    def speed(self):
        raise LookupError("no speed")


class Sometimes(Counter):
    """Some rows fail at their start, others begin late."""

    def reset(self, prompt):
        if prompt == "bad":
            raise LookupError("no such level")
        if prompt == "slow":
            time.sleep(1.0)
        return "level 1"


def make_nothing():
    """Forget the return."""
