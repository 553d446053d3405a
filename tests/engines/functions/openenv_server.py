"""An OpenEnv server on a free port, which it writes to the file that is its argument."""

import socket
import sys
from pathlib import Path

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Said(Action):
    message: str


class Heard(Observation):
    message: str


class Echo(Environment):
    """Repeat two messages; a longer message has a higher reward."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.steps = 0
        return Heard(message=f" seed {seed}", done=False, reward=None)

    def step(self, action, timeout_s=None, **kwargs):
        self.steps += 1
        return Heard(message=f"you said {action.message}", done=self.steps == 2, reward=float(len(action.message)))

    @property
    def state(self):
        return State(step_count=self.steps)


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    Path(sys.argv[1]).write_text(str(port))
    uvicorn.run(create_app(Echo, Said, Heard, env_name="echo", max_concurrent_envs=8), port=port, log_level="warning")
