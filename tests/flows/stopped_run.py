"""A run as a process of its own that hangs where a test says, and is killed there.

    python -m tests.flows.stopped_run ALGORITHM PARAMETERS NUM_DEVICES [NODE FILE]

When node NODE begins, a pipe that nobody reads takes the place of FILE in the run's folder: who opens it to write
hangs. The switch `switch@STEP` hangs itself, until somebody opens that pipe to write. Without NODE, the play hangs.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from prefect_rlhf.flows.algorithm.rlhf_flow import find_flow
from prefect_rlhf.tasks.running.dispatch import Dispatcher
from tests.support.runs import end, environment, leased, wait_for


def killed_run(
    algorithm: str,
    given: Mapping[str, Any],
    num_devices: int,
    folder: Path,
    node: str,
    file: str,
    reached: Callable[[Path], bool],
    victims: str = "all",
) -> tuple[Path, str]:
    """Return the folder of a run that was killed without `file`, and what it said.

    It is killed when `reached` says so of its folder: all of it, or with other `victims` its last rank.
    """
    parameters = folder / "parameters.json"
    parameters.write_text(json.dumps({**given, "output_dir": str(folder / "runs")}))
    arguments = [algorithm, str(parameters), str(num_devices), node, file]
    line = [sys.executable, "-m", "tests.flows.stopped_run", *arguments]
    output: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(line, env=environment(), cwd=Path(__file__).parents[2], **output)
    try:
        pipe = wait_for(lambda: next((folder / "runs").glob(f"*/{file}"), None), process)
        run_dir = Path(str(pipe).removesuffix(file))
        wait_for(lambda: reached(run_dir), process)
        ranks = descendants(process.pid)
        for pid in [process.pid, *ranks] if victims == "all" else ranks[-1:]:
            os.kill(pid, signal.SIGKILL)
        said, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    return run_dir, said


def descendants(pid: int) -> list[int]:
    """Return all processes under one; the ranks are the last."""
    children = [int(c) for task in Path(f"/proc/{pid}/task").glob("*/children") for c in task.read_text().split()]
    return [*children, *(below for child in sorted(children) for below in descendants(child))]


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
