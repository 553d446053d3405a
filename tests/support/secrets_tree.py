"""The processes of a deployed run with a play that looks for credentials in all of them.

    python -m tests.support.secrets_tree FOLDER

It stands for the worker: it starts the run's process under its keeper, which opens a gang of two ranks, and each rank
calls a reward and a play. The play writes down each process whose variables or command line had a secret in them. The
last line of output is JSON: what the plays found, and what the ranks saw.
"""

import asyncio
import json
import os
import sys
from contextlib import closing
from pathlib import Path

import torch

from prefect_rlhf.engines.functions.function import HostFunction, HostSettings
from prefect_rlhf.engines.functions.plays.pool import PlayPool
from prefect_rlhf.engines.functions.scoring.pool import HostPool
from prefect_rlhf.engines.gang.local import LocalGang
from prefect_rlhf.engines.gang.processes.messages import GangSettings
from prefect_rlhf.engines.weights.rank_transfers import RankTransfers, WeightMessage
from prefect_rlhf.engines.weights.read_peer_memory import read_peer_memory
from prefect_rlhf.files.processes.environment import hide
from prefect_rlhf.tasks.play import Play
from tests.support import secrets_functions
from tests.support.secrets_functions import NAMES

RUN = "5ec7e7a1-0000-0000-0000-000000000000"
SECONDS = 120.0


class Rank:
    """A rank that calls a reward and a play, and reads the other rank's weights."""

    def __init__(self, rank, size):
        self.rank = rank

    def play(self, folder):
        """Return the scores of the reward, whose worker stays beside the play, and what the play said first."""
        reward = HostFunction("reward", f"{secrets_functions.__file__}:has_secrets")
        with HostPool([reward], HostSettings(workers=1)) as rewards:
            row = {"prompt": "", "secret": os.environ[NAMES[0]], "out": f"{folder}/found-{self.rank}.json"}
            scores = rewards.score([row | {"response": ""}], "a test").values["reward"]
            settings = Play(function=f"{secrets_functions.__file__}:looks_for_secrets", max_tokens=64).settings
            with closing(PlayPool(settings)) as plays:
                plays.open([row])
                while not (said := plays.events(5.0)):
                    pass
        return scores, type(said[0]).__name__

    def read(self):
        """Return the messages that are left after reading memory, and whether the other rank's weights arrived."""
        own, others = torch.full((4096,), float(self.rank)), torch.empty(4096)
        sent, received = (WeightMessage(([tensor],), tensor.numel()) for tensor in (own, others))
        other = 1 - self.rank
        left = read_peer_memory(RankTransfers((), {other: [sent]}, {other: [received]}, 1 << 20))
        return len(left.outgoing[other]) + len(left.incoming[other]), bool((others == other).all())


def control(folder: str) -> None:
    """Do what the run's process does: start a server and a gang."""
    from prefect_rlhf.flows.training.server import started_beside  # not above: ranks import this module, too

    server = started_beside([sys.executable, "-m", "http.server", "0", "--bind", "127.0.0.1"], env=os.environ)
    try:
        gang = LocalGang(GangSettings(2, Rank, environment={"OMP_NUM_THREADS": "1"}, preload=("torch.distributed",)))
        with closing(gang):
            played = gang.call(Rank.play, dict.fromkeys(range(2), (folder,)), doing="a test", deadline_seconds=SECONDS)
            read = gang.call(Rank.read, dict.fromkeys(range(2), ()), doing="a test", deadline_seconds=SECONDS)
    finally:
        server.kill()
        server.wait()
    Path(folder, "seen.json").write_text(json.dumps({"played": played, "read": read}))


async def work(folder: str) -> int:
    """Do what a worker does: hide its own variables, and start the run's process."""
    from prefect_rlhf.blocks.worker.flow_process import FlowProcess  # as above

    hide()
    variables = os.environ | {"PREFECT__FLOW_RUN_ID": RUN}
    command = [sys.executable, "-m", "tests.support.secrets_tree", folder, "control"]
    process = await FlowProcess.start(
        RUN, command, environment=variables, working_dir=str(Path(__file__).parents[2]), grace_seconds=1.0
    )
    await process.ended(SECONDS)
    await process.stop()
    return process.status


if __name__ == "__main__":
    if sys.argv[2:] == ["control"]:
        from tests.support import secrets_tree  # not this module's classes: ranks have another main module

        secrets_tree.control(sys.argv[1])
    else:
        sys.exit(asyncio.run(work(sys.argv[1])))
