"""Runs from Python and from a terminal: what they return, what they check before they wait, and how Ctrl-C ends."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowFilter, FlowFilterName
from prefect.client.schemas.sorting import FlowRunSort

import prefect_rlhf as rl
from prefect_rlhf.blocks.lease import lease
from prefect_rlhf.files.installed import own_version
from prefect_rlhf.files.modules import IN_RANK
from prefect_rlhf.flows.commands.cli import main
from prefect_rlhf.flows.training import run as training_run
from prefect_rlhf.placement.devices.mesh import ClusterShape
from tests.support.runs import environment, leased, prepared, whole

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect", "own_home")]

ONE_CPU = ClusterShape("local", 1, 1, 8 << 30)
DEADLINE_SECONDS = 500  # a run needs some 190 s of it on a busy machine with two cores
CORES = len(os.sched_getaffinity(0))
PROJECT = Path(__file__).parents[2]
STEPS = 5  # the fewest after which a deviation from the prediction would be reported


@pytest.fixture
def given(parameters, tmp_path):
    """Of GRPO without a reference."""
    algo = {"sampling": {"max_new_tokens": 5}, "batch_size": 2, "samples_per_prompt": 2, "evaluate_every": 2}
    algo |= {"kl": {"coefficient": 0.0}}
    names = ("prompts", "held_out", "actor", "reward")
    return {name: parameters[name] for name in names} | {"algo": algo, "steps": 2, "output_dir": str(tmp_path / "runs")}


@pytest.fixture
def preparations(monkeypatch):
    """How often a run was prepared: inputs read, and a plan chosen."""
    calls, prepare = [], training_run.prepare
    monkeypatch.setattr(training_run, "prepare", lambda *a, **k: calls.append(1) or prepare(*a, **k))
    return calls


def algorithm_runs():
    """The flow runs of algorithms, the newest first."""
    ours = FlowFilter(name=FlowFilterName(any_=["rlhf"]))
    with get_client(sync_client=True) as client:
        return client.read_flow_runs(flow_filter=ours, sort=FlowRunSort.START_TIME_DESC, limit=200)


def wait_until(there, is_alive):
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not there():
        assert is_alive() and time.monotonic() < deadline
        time.sleep(0.05)


def runs(process):
    return lambda: process.poll() is None


def test_a_run_returns_models_metrics_and_rollouts_and_is_planned_once(given, preparations):
    """Inside of a flow too, where it is a subflow run. Its model is the next run's."""
    result = flow(lambda: rl.run(rl.algorithms.grpo, **given), name="rounds")()
    assert len(preparations) == 1 and algorithm_runs()[0].parent_task_run_id is not None
    assert isinstance(result, rl.RunResult) and result == rl.RunResult.read(Path(given["output_dir"]) / "latest")
    assert [step["step"] for step in result.metrics] == [1, 2]
    assert all("actor_train.loss" in step for step in result.metrics)
    assert [evaluation["step"] for evaluation in result.evaluations] == [0, 2]
    rewards = [pq.read_table(file)["reward"].to_pylist() for file in result.rollouts]
    assert [len(step) for step in rewards] == [4, 4]
    planned = rl.run(rl.algorithms.grpo, dry_run=True, **{**given, "actor": {"path": result.models["actor"]}})
    assert planned.steps == 2 and "plan flattening for grpo:" in str(planned)

    file = Path(result.run_dir) / "parameters.yaml"
    assert main(["run", "grpo", "--parameters", str(file), "--dry-run"]) == 0
    assert result.parameters["algo"]["optimizer"]["lr"] == rl.GRPO().optimizer.lr
    assert (result.version, result.commit) == (own_version().version, own_version().commit)
    stated, kept = (prepared(rl.algorithms.grpo, each, whole(ONE_CPU)) for each in (given, result.parameters))
    assert kept.request.graph == stated.request.graph and kept.chosen.plan == stated.chosen.plan
    assert kept.request.spec == stated.request.spec


def test_a_folder_without_a_result_is_refused(tmp_path):
    with pytest.raises(rl.InvalidInput, match="expected the folder of a run that reached its end"):
        rl.RunResult.read(tmp_path)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"algorithm": len}, "algorithm: got <built-in function len>, expected an @rlhf_flow function"),
        ({"algorithm": "grop"}, "algorithm: got 'grop', expected one of ppo, "),
        ({"devices": 0}, "devices: got 0, expected a whole number from 1 to 1024"),
        ({"devices": 1000}, f"devices: got 1000, expected at most {CORES}, the cores of this machine; "),
        ({"devices": 1000, "dry_run": True}, f"devices: got 1000, expected at most {CORES}, "),
        ({"devices": True}, "devices: got True, expected a whole number"),
        ({"max_restarts": -1}, "max_restarts: got -1, expected a whole number"),
        ({"stepz": 3}, "stepz: "),
        ({"actor": {"path": "/nowhere"}}, "actor.path: got '/nowhere', expected"),
        ({"dry_run": True, "actor": {"path": "/nowhere"}}, "actor.path: got '/nowhere', expected"),
        ({"tracking": {"to": ["tracker"]}}, "tracking.to"),
    ],
)
def test_a_mistake_is_one_line_and_begins_no_flow_run(given, words, says):
    before = len(algorithm_runs())
    with pytest.raises(rl.InvalidInput) as refused:
        rl.run(words.pop("algorithm", rl.algorithms.grpo), **given | words)
    assert str(refused.value).startswith(says) and "\n" not in str(refused.value)
    assert len(algorithm_runs()) == before


def test_another_device_count_than_the_lease_is_refused(given):
    with leased(2):
        assert "n0:0-1" in str(rl.run(rl.algorithms.grpo, dry_run=True, **given))
        with pytest.raises(rl.InvalidInput, match="devices: got 1, expected 2, the number of devices leased"):
            rl.run(rl.algorithms.grpo, devices=1, **given)


def test_a_file_that_ranks_import_starts_no_run_there(monkeypatch, given):
    monkeypatch.setenv(IN_RANK, "1")
    with pytest.raises(rl.GraphError, match='under `if __name__ == "__main__":`'):
        rl.run(rl.algorithms.grpo, **given)


@pytest.mark.parametrize("mistake", [{"resume_from": "/nowhere"}, {"reward": {"path": "/nowhere", "head": "scalar"}}])
def test_a_mistake_is_found_before_the_wait_for_devices(given, mistake, capsys, tmp_path):
    """While another run holds them all, from Python and at a terminal."""
    (tmp_path / "given.yaml").write_text(yaml.safe_dump(given | mistake))
    with lease(ONE_CPU, 1):
        with pytest.raises(rl.InvalidInput, match="/nowhere"):
            rl.run(rl.algorithms.grpo, **given | mistake)
        assert main(["run", "grpo", "--parameters", str(tmp_path / "given.yaml")]) == 2
    assert "waiting for" not in capsys.readouterr().err


def test_all_is_checked_again_after_a_wait(given, preparations, capsys, tmp_path):
    """What was there before the wait may be gone after it."""
    actor = shutil.copytree(given["actor"]["path"], tmp_path / "actor")
    raised = []

    def start():
        try:
            rl.run(rl.algorithms.grpo, **given | {"actor": {"path": str(actor)}})
        except rl.RlhfError as error:
            raised.append(error)

    with lease(ONE_CPU, 1):
        thread = threading.Thread(target=start)
        thread.start()
        said = []
        wait_until(lambda: said.append(capsys.readouterr().err) or "waiting for" in "".join(said), thread.is_alive)
        shutil.rmtree(actor)
    thread.join(DEADLINE_SECONDS)
    assert len(preparations) == 2 and str(raised[0]).startswith("actor.path: got ")


def started(given, folder, *words):
    """`prefect-rlhf run grpo` as a terminal starts it."""
    file = folder / "given.yaml"
    file.write_text(yaml.safe_dump(given))
    program = [Path(sys.executable).with_name("prefect-rlhf"), "run", "grpo", "--parameters", file, *words]
    log = (folder / "said").open("w")
    words = {"env": environment(HOME=str(folder)), "stdout": log, "stderr": log, "process_group": 0, "cwd": folder}
    return subprocess.Popen(program, **words)


def test_a_run_at_a_terminal_shows_few_short_lines(given, tmp_path, monkeypatch, capsys):
    """At most 30 lines before the first step, and 100 characters in the line of a step.

    Three responses before and after training follow, then the folder of the model, two commands and a page. Warnings of
    libraries, and lines of task runs, are in the log file alone.
    """
    process = started(given | {"steps": STEPS}, tmp_path)
    assert process.wait(DEADLINE_SECONDS) == 0, (tmp_path / "said").read_text()
    shown = (tmp_path / "said").read_text()
    lines = shown.splitlines()
    log = tmp_path / lines[0].removeprefix("full log: ")
    assert log.parent == tmp_path / "runs" / "logs"

    steps = [line for line in lines if line.startswith("step ")]
    assert [line.split(" · ")[0] for line in steps] == [f"step {number} of {STEPS}" for number in range(STEPS + 1)]
    assert "before training · held-out reward " in steps[0]
    assert all(len(line) <= 100 and " · reward " in line for line in steps[1:])
    assert lines.index(steps[0]) <= 30

    responses = lines.index("responses to 3 held-out prompts, before and after training:")
    assert lines.index(steps[-1]) < responses
    for number in range(3):
        prompt, before, after = lines[responses + 1 + 3 * number :][:3]
        assert prompt.strip() and before.startswith("    before: ") and after.startswith("    after:  ")

    model, chat, command, page = lines[-4:]
    assert (tmp_path / model.removeprefix("model: ") / "model.safetensors").is_file()
    assert page.startswith('read:  "Use the trained model" (docs/use_the_model.md of prefect-rlhf): ')
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(chat.removeprefix("chat:  "))[1:] + ["what is it"]) == 0
    assert capsys.readouterr().out.strip()
    words = shlex.split(command.removeprefix("train: "))
    trained = f"actor.path={tmp_path / model.removeprefix('model: ')}"
    words = [trained if word.startswith("actor.path=") else word for word in words]
    assert trained in words and main([*words[1:], "--dry-run"]) == 0

    told = log.read_text()
    assert "UserWarning" in told and "actor.generate · step 1" in told
    shown = "".join(line for line in lines if not line.startswith("warning: step "))  # what the run's metrics say
    assert not {"Warning", "warning", "Task run", "Traceback"} & set(re.findall(r"\w+(?: run)?", shown))
    assert "than predicted" not in told  # the seconds of CPUs without a profile are a guess


@pytest.mark.all  # tests/tasks/running/test_runner.py has Ctrl-C
def test_ctrl_c_while_a_run_waits_prints_one_line(given, tmp_path):
    with lease(ONE_CPU, 1):
        process = started(given, tmp_path)
        wait_until(lambda: "waiting for" in (tmp_path / "said").read_text(), runs(process))
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(DEADLINE_SECONDS) == 130
    log, waiting, stopped = (tmp_path / "said").read_text().splitlines()
    assert log.startswith("full log: runs/logs/")
    assert stopped == "prefect-rlhf: stopped while waiting for devices; no step was run"


@pytest.mark.all  # tests/tasks/running/test_runner.py stops a run, and the test above stops a command
@pytest.mark.parametrize(("by", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_run_is_cancelled_and_says_how_to_continue(given, tmp_path, by, status):
    """The command that it says is run, too, and ends the steps that were left."""
    process = started(given | {"steps": 200, "checkpoint_every": 1}, tmp_path, "-p", "seed=3")
    checkpoints = tmp_path / "runs"
    wait_until(lambda: [*checkpoints.glob("*/checkpoints/step-*[0-9]/checkpoint.json")], runs(process))
    begun = len((tmp_path / "said").read_text().splitlines())
    os.killpg(process.pid, by) if by == signal.SIGINT else process.send_signal(by)
    assert process.wait(DEADLINE_SECONDS) == status
    *log, line = (tmp_path / "said").read_text().splitlines()
    assert not [text for text in log[begun:] if "ERROR" in text or "Traceback" in text or "Cancelled" in text], log
    how_far, newest, command = line.split("; ")
    assert how_far.startswith("prefect-rlhf: stopped after ") and how_far.endswith(" of 200 steps")
    assert newest.startswith("newest checkpoint: step ")
    state = algorithm_runs()[0].state
    assert state.is_cancelled() and state.message.startswith(how_far.removeprefix("prefect-rlhf: "))
    with lease(ONE_CPU, 1, wait_seconds=0):  # the devices are free
        pass
    words = shlex.split(command.removeprefix("continue with: "))
    assert words[:2] == ["prefect-rlhf", "run"] and "seed=3" in words
    assert main([*words[1:], "--dry-run"]) == 0
