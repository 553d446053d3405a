"""A client in the form of OpenEnv that needs no server."""

from types import SimpleNamespace


class Echo:
    """Repeat the seed, then a message."""

    def __init__(self, base_url, patience=1.0):
        self.base_url = base_url

    def reset(self, seed):
        return SimpleNamespace(observation={"message": f"seed {seed}"})

    def step(self, action):
        return SimpleNamespace(observation={"message": action["message"]}, reward=1.0, done=True)

    def close(self):
        pass


class Brittle(Echo):
    """A server that refuses moves, or is lost."""

    def step(self, action):
        if action["message"] == "break":
            raise RuntimeError("Server error: no such move")
        if action["message"] == "lose":
            raise ConnectionResetError("lost")
        return super().step(action)
