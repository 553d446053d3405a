"""A run in a process of somebody else is quiet, and leaves everything there as it was."""

import io
import logging
import os
import subprocess
import sys
import threading
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from prefect.logging.handlers import PrefectConsoleHandler

from prefect_rlhf.flows.algorithm.quiet_process import quiet_process
from prefect_rlhf.tasks.run_log import RUN_LOG

pytestmark = pytest.mark.quick

run_log = logging.getLogger(RUN_LOG)


class OutStream(io.StringIO):
    """A stream of a notebook: it has no standard descriptor."""

    def fileno(self):
        raise io.UnsupportedOperation("fileno")


@contextmanager
def notebook():
    """Let the streams of a notebook stand in place of the standard streams; yield them by name."""
    streams = {"stdout": OutStream(), "stderr": OutStream()}
    with redirect_stdout(streams["stdout"]), redirect_stderr(streams["stderr"]):
        yield streams


@pytest.fixture
def handler_on():
    """Add a handler to a logger until the test ends."""
    added = []

    def add(name, handler):
        logging.getLogger(name).addHandler(handler)
        added.append((name, handler))
        return handler

    yield add
    for name, handler in added:
        logging.getLogger(name).removeHandler(handler)


def told_by(stream):
    return stream.getvalue().splitlines()


def test_a_cell_shows_the_lines_of_the_run_and_the_log_has_all_else(tmp_path, handler_on, monkeypatch):
    """Prints, warnings, library handlers that were there before, and what a child process writes."""
    monkeypatch.setattr(logging.getLogger("vllm"), "disabled", False)  # an engine of another test may have silenced it
    logging.getLogger("vllm").setLevel(logging.INFO)
    log = tmp_path / "logs" / "run.log"
    with notebook() as cell:
        library = handler_on("vllm", logging.StreamHandler(sys.stdout))
        prefect = handler_on("prefect", PrefectConsoleHandler(sys.stderr))
        make_noise(log)
    assert told_by(cell["stderr"]) == [f"full log: {log}", "warning: step 1 of 2", "waiting"]
    assert told_by(cell["stdout"]) == []
    told = log.read_text()
    for text in ("printed", "warned", "noise of vllm", "noise of prefect", "child\n", "child of error", "waiting"):
        assert text in told
    assert library.stream is cell["stdout"]
    assert prefect.stream is prefect.console.file is cell["stderr"]


def make_noise(log):
    """A run, and all that its process writes meanwhile."""
    with quiet_process(log) as terminal:
        run_log.warning("step 1 of 2")
        sys.stdout.write("printed\n")
        sys.stderr.write("warned\n")
        logging.getLogger("vllm").warning("noise of vllm")
        logging.getLogger("prefect").warning("noise of prefect")
        subprocess.run(["sh", "-c", "echo child; echo child of error >&2"], check=True)
        terminal.say("waiting")


def test_handlers_of_a_person_write_where_they_did(tmp_path, handler_on):
    """In a notebook to the cell, also those of the root logger; a file stays a file."""
    file = handler_on("mine", logging.FileHandler(tmp_path / "mine.log"))
    with notebook() as cell:
        handler_on("", logging.StreamHandler(sys.stdout))
        with quiet_process(tmp_path / "log"):
            logging.getLogger("mine").warning("of mine")
            logging.getLogger("httpx").warning("of a library")
    file.close()
    assert told_by(cell["stdout"]) == ["of mine"]
    assert (tmp_path / "mine.log").read_text() == "of mine\n"


def test_a_library_that_keeps_the_stream_of_a_run_writes_to_the_cell_afterwards(tmp_path):
    """As a logger does that is configured when vLLM is first imported."""
    with notebook() as cell:
        with quiet_process(tmp_path / "log"):
            run_log.warning("line")
            kept = logging.StreamHandler(sys.stdout)
        kept.emit(logging.makeLogRecord({"msg": "after the run"}))
    assert told_by(cell["stdout"]) == ["after the run"]


def state():
    """What a run must not change."""
    root = logging.getLogger()
    descriptors = [(os.fstat(number).st_dev, os.fstat(number).st_ino) for number in (1, 2)]
    return [
        sys.excepthook,
        list(root.handlers),
        root.level,
        sys.stdout,
        sys.stderr,
        descriptors,
        list(run_log.handlers),
        sorted(path.name for path in Path("/proc/self/fd").iterdir()),
    ]


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_afterwards_everything_is_as_it_was(tmp_path, error):
    """A library may configure the root logger meanwhile: the person's handlers are there again, and its own gone."""
    root, before = logging.getLogger(), state()
    with pytest.raises(error) if error else nullcontext(), quiet_process(tmp_path / "log"):
        run_log.warning("line")
        root.handlers[:] = [PrefectConsoleHandler(), logging.StreamHandler(), logging.lastResort]
        sys.excepthook = print
        root.setLevel(logging.DEBUG)
        if error:
            raise error
    assert state() == before


def test_a_handler_that_the_person_adds_meanwhile_stays(tmp_path, handler_on):
    with quiet_process(tmp_path / "log"):
        mine = handler_on("", logging.NullHandler())
    assert mine in logging.getLogger().handlers


def test_the_log_of_a_mistake_is_deleted(tmp_path):
    with pytest.raises(ValueError, match="a mistake"), quiet_process(tmp_path / "log"):
        sys.stdout.write("noise\n")
        raise ValueError("a mistake")
    assert list(tmp_path.iterdir()) == []


def test_runs_at_once_share_the_terminal_and_the_last_restores_it(tmp_path):
    begun, may_end = threading.Event(), threading.Event()

    def first():
        with quiet_process(tmp_path / "first"):
            begun.set()
            may_end.wait(60)

    with notebook() as cell:
        before, thread = state(), threading.Thread(target=first)
        thread.start()
        begun.wait(60)
        with quiet_process(tmp_path / "second"):
            run_log.warning("of the second")
            may_end.set()
            thread.join(60)
            sys.stdout.write("noise of the second\n")
            run_log.warning("still shown")
        assert state() == before
    assert told_by(cell["stderr"])[1:] == ["warning: of the second", "warning: still shown"]
    assert "noise of the second" in (tmp_path / "first").read_text() and not (tmp_path / "second").exists()


IMPORT = """
import logging, sys

root = logging.getLogger()
if len(sys.argv) > 1:
    root.addHandler(logging.FileHandler(sys.argv[1], mode="w"))
before = root.handlers[:], root.level
import prefect_rlhf as rl

rl.run, rl.runs, rl.GRPO
assert (root.handlers[:], root.level) == before
logging.basicConfig(format="mine %(message)s")
root.warning("still there")
logging.getLogger("prefect").warning("of Prefect")
"""


def test_the_import_of_the_package_leaves_the_log_of_a_program_alone(tmp_path):
    """Prefect, which is imported with it, would close the file, and take the handler from the root logger."""
    subprocess.run([sys.executable, "-c", IMPORT, str(tmp_path / "log")], timeout=120, check=True)
    assert (tmp_path / "log").read_text().splitlines()[0] == "still there"


def test_a_program_without_handlers_can_configure_its_log_after_the_import():
    """Prefect's own lines are still shown."""
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, timeout=120, check=True)
    assert "mine still there" in done.stderr.splitlines() and " | prefect - of Prefect" in done.stderr


SCRIPT = """
import logging
logging.basicConfig(level=logging.INFO, format="root %(message)s")

import subprocess, sys
from pathlib import Path
from prefect_rlhf.flows.algorithm.quiet_process import quiet_process
from prefect_rlhf.tasks.run_log import RUN_LOG

mine = logging.getLogger("mine")
mine.propagate = False
mine.addHandler(logging.StreamHandler(sys.stdout))
logging.getLogger("vllm").addHandler(logging.StreamHandler(sys.stdout))
logging.getLogger("vllm").propagate = False
logging.getLogger("httpx").setLevel("INFO")
with quiet_process(Path(sys.argv[1])):
    logging.getLogger(RUN_LOG).warning("of the run")
    logging.getLogger("app").info("of the app")
    logging.getLogger("httpx").info("request")
    mine.warning("of mine")
    logging.getLogger("vllm").warning("noise")
    print("printed")
    subprocess.run(["sh", "-c", "echo child; echo child >&2"], check=True)
print("after")
logging.getLogger("vllm").warning("after")
"""


def test_a_script_keeps_its_own_lines_where_they_were(tmp_path):
    words = [sys.executable, "-c", SCRIPT, str(tmp_path / "log")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr.splitlines()[-3:] == [f"full log: {tmp_path}/log", "warning: of the run", "root of the app"]
    assert done.stdout.splitlines() == ["of mine", "after", "after"]
    assert (tmp_path / "log").read_text().splitlines()[-5:] == ["root request", "noise", "printed", "child", "child"]


NO_STREAMS = """
import logging, sys
from pathlib import Path
from prefect_rlhf.flows.algorithm.quiet_process import quiet_process
from prefect_rlhf.tasks.run_log import RUN_LOG

assert sys.stdout is sys.stderr is None
with quiet_process(Path(sys.argv[1])) as terminal:
    logging.getLogger(RUN_LOG).warning("of the run")
    terminal.say("waiting")
    print("printed")
assert sys.stdout is sys.stderr is None
"""


def test_without_standard_streams_a_run_is_possible(tmp_path):
    """As in a daemon, whose output would be nowhere."""
    words = ["sh", "-c", '"$@" >&- 2>&-', "sh", sys.executable, "-c", NO_STREAMS, str(tmp_path / "log")]
    subprocess.run(words, timeout=120, check=True)
    assert {"waiting", "printed"} <= set((tmp_path / "log").read_text().splitlines())
