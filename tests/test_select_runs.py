"""Whole runs that keep some rows: a step that keeps none, and a run that is killed."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from prefect_rlhf.flows.grpo import grpo
from prefect_rlhf.tasks.running.dispatch import Dispatcher
from tests.flows.test_plan_switches import children
from tests.flows.test_resume import descendants
from tests.support.plan_matrix import CASES
from tests.support.runs import environment
from tests.test_plan_invariance import assert_equal

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect")]


@pytest.mark.all
def test_a_step_that_keeps_nothing_trains_nothing_and_a_run_of_them_ends(tmp_path):
    """A step is skipped and counted; the bound on such steps names the call that kept nothing."""
    pairs = CASES["pairs"]
    given = pairs.parameters(tmp_path)
    nothing = given | {"reward": {"functions": {"nothing": {"function": f"{tmp_path / 'some_rewards.py'}:nothing"}}}}
    result = pairs.run(nothing, "alone")
    before = load_file(f"{given['actor']['path']}/model.safetensors")
    kept = [step for step in result.metrics if "best_and_worst.kept_rows" in step]
    assert [step["actor_train.skipped_updates"] for step in kept] == [2.0, 2.0]
    assert all(step["best_and_worst.kept_rows"] == 0 for step in kept)
    weights = result.weights["actor"]
    assert all((weights[name] == values).all() for name, values in before.items() if name in weights)
    state = pairs.end(nothing | {"steps": 12}, "alone")
    assert state.is_failed()
    assert "10 steps in a row without a gradient (best_and_worst kept no row)" in state.message
    assert "\n" not in state.message


@pytest.mark.all
def test_killed_and_resumed_it_keeps_the_same_rows(tmp_path):
    """Killed after its first checkpoint, the run goes on to the bits of one that was not."""
    grpo = CASES["grpo"]
    longer = grpo.parameters(tmp_path) | {"steps": 4, "checkpoint_every": 1}
    whole = grpo.run(longer, "replicas")
    given = longer | {"output_dir": str(tmp_path / "killed")}
    ends = "CASES['grpo'].end(json.loads(sys.argv[1]), 'replicas')"
    line = f"import json, sys; from tests.support.plan_matrix import CASES; {ends}"
    words = [sys.executable, "-c", line, json.dumps(given)]
    process = subprocess.Popen(words, env=environment(), cwd=Path(__file__).parents[1])
    deadline = time.monotonic() + 240
    while not (found := list((tmp_path / "killed").glob("*/checkpoints/step-000002"))):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    for pid in [process.pid, *descendants(process.pid)]:
        os.kill(pid, signal.SIGKILL)
    process.wait()
    resumed = grpo.run(given | {"resume_from": str(found[0].parents[1])}, "replicas")
    assert (resumed.row_ids, resumed.tokens) == (whole.row_ids, whole.tokens)
    assert all((resumed.weights["actor"][name] == values).all() for name, values in whole.weights["actor"].items())


@pytest.fixture(scope="module")
def streamed(tmp_path_factory):
    """Three steps of groups of which some are chosen, in 3 and 6 parts, and the same on one device without parts."""
    case = CASES["streamed groups"]
    given = case.parameters(tmp_path_factory.mktemp("streamed")) | {"steps": 3, "checkpoint_every": 1}
    return given, case.run(given, "alone")


@pytest.mark.all
@pytest.mark.parametrize(
    ("node", "victim"),
    [("actor_generate.2of3@2", min), ("reward_inference.4of6@2", max), ("actor_evaluation.5of8@2", min)],
)
def test_killed_in_the_middle_of_a_part_it_generates_and_keeps_the_same_rows(
    streamed, monkeypatch, tmp_path, record_property, node, victim
):
    """The rank of the part dies while it works. The same flow run begins the step again, with all parts."""
    given, whole = streamed
    execute, killed = Dispatcher.execute, []

    def harmed(self, begun):
        if begun.id == node and not killed:
            killed.append(victim(children(self.gang.process_group)))
            threading.Timer(0.01, os.kill, (killed[0], signal.SIGKILL)).start()
        return execute(self, begun)

    monkeypatch.setattr(Dispatcher, "execute", harmed)
    monkeypatch.setattr(grpo, "retries", 1)
    retried = CASES["streamed groups"].run(given | {"output_dir": str(tmp_path)}, "streamed")
    assert len(killed) == 1
    nodes = [span["node"] for span in retried.spans]
    assert node in nodes and len(set(nodes)) == len(nodes)
    assert_equal(whole, retried, record_property)
