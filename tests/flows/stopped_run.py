"""A run as a process of its own that hangs where a test says, so that the test can kill it there.

    python -m tests.flows.stopped_run ALGORITHM PARAMETERS NUM_DEVICES [NODE FILE]

When node NODE begins, a pipe that nobody reads takes the place of FILE in the run's folder: who opens it to write
hangs. The switch `switch@STEP` hangs itself, until somebody opens that pipe to write. Without NODE, the play hangs.
"""

import json
import os
import sys
from pathlib import Path

from prefect_rlhf.flows.algorithm.rlhf_flow import find_flow
from prefect_rlhf.tasks.running.dispatch import Dispatcher
from tests.runs import end, leased


def main(algorithm: str, parameters: str, num_devices: str, node_id: str = "", file: str = "") -> None:
    execute, switch_from = Dispatcher.execute, Dispatcher.switch_from

    def put_pipe(run):
        place = run.run_dir / file
        place.parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(place)
        return place

    def hang(self, node):
        if node.id == node_id:
            put_pipe(self.run)
        return execute(self, node)

    def hang_switch(self, *arguments):
        if f"switch@{self.run.finished + 1}" == node_id:
            put_pipe(self.run).read_bytes()
        return switch_from(self, *arguments)

    Dispatcher.execute, Dispatcher.switch_from = hang, hang_switch
    with leased(int(num_devices)):
        state = end(find_flow(algorithm), json.loads(Path(parameters).read_text()))
    print(state.message)  # noqa: T201  the test reads it


if __name__ == "__main__":
    main(*sys.argv[1:])
