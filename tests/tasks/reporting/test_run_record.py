"""What a run's folder says of the run: its parameters for `--parameters`, what ran it, and its state."""

import json
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml
from prefect.exceptions import TerminationSignal

from prefect_rlhf.errors.errors import InvalidInput, RunStopped
from prefect_rlhf.files.installed import OwnVersion
from prefect_rlhf.flows.forms.parameters_file import changed
from prefect_rlhf.tasks.reporting.run_record import (
    OWNER,
    PARAMETERS,
    RECORD,
    RunRecord,
    keep_parameters,
    new_record,
    read_parameters,
    recorded,
    state_of,
)

pytestmark = pytest.mark.quick

VERSION = OwnVersion("0.1.0", "1f3a")
GIVEN = {"algo": {"batch_size": 8, "optimizer": {"lr": 1e-5}}, "steps": 2}


def new_folder(path):
    path.mkdir()
    (path / OWNER).write_text("an id")
    return path


@pytest.fixture
def run_dir(tmp_path):
    return new_folder(tmp_path / "run")


def record(command="prefect-rlhf run grpo --parameters runs/run/parameters.yaml"):
    return new_record("grpo", command, VERSION, steps=2)


def comments_of(run_dir):
    return [line for line in (run_dir / PARAMETERS).read_text().splitlines() if line.startswith("#")]


def test_the_file_has_the_parameters_with_command_and_version(run_dir):
    keep_parameters(run_dir, record(), GIVEN, changed)
    assert read_parameters(run_dir) == GIVEN == yaml.safe_load((run_dir / PARAMETERS).read_text())
    first, about, place, command = comments_of(run_dir)
    assert first == "# all parameters of run, with the defaults that it used"
    assert about.startswith("# algorithm grpo, prefect-rlhf 0.1.0 (commit 1f3a), began on 20")
    assert place == f"# the same run again, in {Path.cwd()}:"
    assert command == "#   prefect-rlhf run grpo --parameters runs/run/parameters.yaml"


def test_a_notebooks_algorithm_has_no_command(run_dir):
    keep_parameters(run_dir, record(None), GIVEN, changed)
    assert "# the algorithm is defined in a notebook: no command starts it" in comments_of(run_dir)


def test_a_restarted_run_keeps_its_file_and_adds_changes(run_dir):
    """The same flow run, started again after a change of defaults."""
    keep_parameters(run_dir, record(), GIVEN, changed)
    before = (run_dir / PARAMETERS).read_text()
    keep_parameters(run_dir, record(), GIVEN | {"algo": {"batch_size": 8, "optimizer": {"lr": 1e-4}}}, changed)
    after = (run_dir / PARAMETERS).read_text()
    assert after.startswith(before) and read_parameters(run_dir) == GIVEN
    again, change = after.removeprefix(before).splitlines()
    assert again.startswith("# began again on 20") and again.endswith(", prefect-rlhf 0.1.0 (commit 1f3a)")
    assert change == "#   algo.optimizer.lr: 1e-05 became 0.0001"


def test_a_continued_run_names_the_earlier_run_and_the_differences(run_dir, tmp_path):
    keep_parameters(run_dir, record(), GIVEN, changed)
    other = new_folder(tmp_path / "other")
    keep_parameters(other, record(), GIVEN | {"steps": 4, "seed": 1}, changed, run_dir)
    assert comments_of(other)[-3:] == [
        f"# continues {run_dir}",
        "#   steps: 2 became 4",
        "#   seed: None became 1",
    ]
    old = new_folder(tmp_path / "of an earlier version")
    third = new_folder(tmp_path / "third")
    keep_parameters(third, record(), GIVEN, changed, old)
    assert comments_of(third)[-1] == f"# continues {old}"


@pytest.mark.parametrize(
    ("error", "state", "why"),
    [
        (None, "completed", None),
        (RunStopped("stopped after 1 of 2 steps"), "stopped", "stopped after 1 of 2 steps"),
        (TerminationSignal(signal=signal.SIGTERM), "stopped", "TerminationSignal"),
        (InvalidInput("plan", "p", "a plan"), "failed", "plan: got 'p', expected a plan"),
        (ZeroDivisionError("two\nlines"), "failed", "two lines"),
    ],
)
def test_the_record_says_how_the_run_ended_and_why(run_dir, error, state, why):
    with pytest.raises(type(error)) if error else nullcontext(), recorded(run_dir, record()):
        assert state_of(run_dir, RunRecord.read(run_dir)) == ("running", None)
        if error is not None:
            raise error
    found = RunRecord.read(run_dir)
    assert state_of(run_dir, found) == (state, why)
    assert (found.algorithm, found.version, found.commit, found.steps) == ("grpo", "0.1.0", "1f3a", 2)


HOLDS = """
import sys
from contextlib import nullcontext
from pathlib import Path
from tests.tasks.reporting.test_run_record import record, recorded
with recorded(Path(sys.argv[1]), record()):
    print(flush=True)
    sys.stdin.read()
"""


def test_a_killed_run_counts_as_failed(run_dir):
    words = [sys.executable, "-c", HOLDS, str(run_dir)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0) as process:
        process.stdout.readline()
        state = state_of(run_dir, RunRecord.read(run_dir))
        os.killpg(process.pid, signal.SIGKILL)
    assert state == ("running", None)
    state, why = state_of(run_dir, RunRecord.read(run_dir))
    assert state == "failed" and why.startswith("its process ended without a word")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"algorithm": "grpo"}', "{" * 100_000])
def test_a_damaged_record_is_refused_in_a_line(run_dir, text):
    (run_dir / RECORD).write_text(text)
    with pytest.raises(InvalidInput, match=r"run_dir: got .*run.json.*, expected the record"):
        RunRecord.read(run_dir)
    values = json.loads(json.dumps({**GIVEN, "state": 5}))
    (run_dir / RECORD).write_text(json.dumps(values))
    with pytest.raises(InvalidInput, match="expected the record"):
        RunRecord.read(run_dir)
