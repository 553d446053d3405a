"""Trackers show what metrics.jsonl has, each step once, and never hold a run up."""

import os
import re
import subprocess
import sys
import threading
from collections import defaultdict
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.flows.commands.cli import main
from prefect_rlhf.tasks.running.journal import Journal
from prefect_rlhf.tasks.trackers import follow, tracking
from prefect_rlhf.tasks.trackers.follow import followed
from prefect_rlhf.tasks.trackers.names import PEERS, tracked_name, tracked_values
from prefect_rlhf.tasks.trackers.tracker_thread import MOST_WAITING
from prefect_rlhf.tasks.trackers.tracking import Tracking, check_trackers
from tests.support.tiny import ppo_parameters
from tests.support.trackers_read_back import READ_BACK, kept, of_mlflow

LINES = [
    {"step": step, "actor_train.loss": 0.1 / step, "kl_penalised_rewards.kl": 1e-9 * step, "seconds": 3.0}
    for step in (1, 2, 3)
]
PARAMETERS = {"algo": {"optimizer": {"lr": 1e-5}}, "steps": 3}


def show(run_dir, *, lines=LINES, before=(), warn=pytest.fail, ends=lambda: None, **settings):
    """Tell trackers of a run's lines as its journal would, then have it end."""
    run_dir.mkdir(parents=True, exist_ok=True)
    journal = Journal(run_dir)
    with followed(journal, before, Tracking(**settings), PARAMETERS, warn):
        for line in lines:
            for tell in journal._followers:
                tell(line)
        ends()


def write_rollouts(run_dir, step, folder="rollouts"):
    (run_dir / folder).mkdir(parents=True, exist_ok=True)
    columns = {"prompt": ["what", "why"], "response": ["a film", "it"], "scores": [0.5, None], "row_id": [0, 1]}
    pq.write_table(pa.table(columns), run_dir / folder / f"step-{step:06d}.parquet")


def expected(tracker, lines, names="own"):
    values = [(line["step"], tracked_values(line, names)) for line in lines]
    return sorted((name, step, kept(tracker, value)) for step, named in values for name, value in named.items())


@pytest.fixture(autouse=True)
def no_accounts(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_MODE", "WANDB_API_KEY", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("tracker", READ_BACK)
def test_a_tracker_has_every_step_once_even_in_a_resumed_run(tracker, tmp_path):
    pytest.importorskip(tracker)
    run_dir = tmp_path / "runs" / "amber-fox"
    write_rollouts(run_dir, 3)
    show(run_dir, report_to=[tracker], names="own", samples_every=2)
    scalars, tables = READ_BACK[tracker](run_dir)
    assert sorted(scalars) == expected(tracker, LINES)
    (heading, *rows) = tables["samples/rollouts", 3]
    assert (heading, len(rows), rows[0][:2]) == (["prompt", "response", "scores"], 2, ["what", "a film"])
    assert float(rows[0][2]) == 0.5 and not rows[1][2]

    again = {**LINES[2], "actor_train.loss": 7.0}
    show(run_dir, before=LINES[:2], lines=[again], report_to=[tracker], names="verl")
    assert sorted(READ_BACK[tracker](run_dir)[0]) == expected(tracker, [*LINES[:2], again], "verl")


PROCESS_OF_WANDB = """
import os
import sys
from contextlib import suppress
from pathlib import Path
from prefect_rlhf.tasks.trackers.tracker import TrackedRun
from prefect_rlhf.tasks.trackers.wandb import WandB

tracker = WandB(TrackedRun(Path(sys.argv[1]), "fox", "p"))
has_secret = {}  # by name of a child that stays; another, such as git, may end at any moment
while "wandb-core" not in has_secret:  # the test ends the wait
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            if path.read_text().rpartition(")")[2].split()[1] == str(os.getpid()):
                name = path.with_name("comm").read_text().strip()
                has_secret[name] = b"canary" in path.with_name("environ").read_bytes()
print(has_secret["wandb-core"], tracker._run.settings.api_key)
tracker.close(has_failed=False)
"""


def test_wandbs_process_starts_without_credentials(tmp_path):
    """Tools of plays can read the variables that it starts with. The key reaches it through its settings."""
    pytest.importorskip("wandb")
    secrets = {"WANDB_API_KEY": "canary" * 7, "HF_TOKEN": "canary", "WANDB_MODE": "offline"}
    command = [sys.executable, "-c", PROCESS_OF_WANDB, str(tmp_path)]
    fresh = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}  # an earlier test's process
    done = subprocess.run(command, env=fresh | secrets, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == f"False {'canary' * 7}"


def test_every_evaluation_has_samples_and_rollouts_when_due(tmp_path):
    pytest.importorskip("tensorboard")
    for step in (1, 2, 3):
        write_rollouts(tmp_path, step)
        write_rollouts(tmp_path, step, "evaluation")
    show(tmp_path, report_to=["tensorboard"], samples_every=2)
    _, tables = READ_BACK["tensorboard"](tmp_path)
    shown = {key for key in tables if key[0].startswith("samples/")}
    assert shown == {("samples/rollouts", 1), ("samples/rollouts", 3), *(("samples/evaluation", n) for n in (1, 2, 3))}
    assert tables["parameters", 0][1:] == [["algo.optimizer.lr", "1e-05"], ["steps", "3"]]


def test_a_failed_run_is_shown_as_failed_with_its_steps(tmp_path):
    """And its error is that of the run."""
    pytest.importorskip("mlflow")

    def fail():
        raise ZeroDivisionError

    follow_seconds = patch.object(follow, "SECONDS_AFTER_ERROR", 60.0)  # the time is not what is tested
    with follow_seconds, pytest.raises(ZeroDivisionError):
        show(tmp_path / "amber-fox", ends=fail, report_to=["mlflow"])
    scalars, _ = of_mlflow(tmp_path / "amber-fox", status="FAILED")
    assert sorted(scalars) == expected("mlflow", LINES, "verl")


def test_a_peers_name_stands_for_at_most_one_metric_of_a_call():
    """Of one algorithm; PPO's and GRPO's names may be the same."""
    for trainer in (0, 1):
        found = defaultdict(set)
        for own, peers in PEERS.items():
            if peers[trainer]:
                found[peers[trainer]].add(own.rpartition(".")[0])
        assert all(len(calls) <= 2 for calls in found.values())


def test_each_of_several_rewards_has_trls_name():
    assert tracked_values({"grpo_advantages.score_exact": 0.5}, "trl") == {"rewards/exact/mean": 0.5}


def test_metrics_that_would_share_a_name_keep_their_own():
    shown = tracked_values({"kl_penalised_rewards.score": 1.0, "grpo_advantages.score": 2.0, "seconds": 3.0}, "verl")
    assert shown == {"kl_penalised_rewards/score": 1.0, "grpo_advantages/score": 2.0, "timing_s/step": 3.0}


def test_the_page_lists_every_name_from_another_trainer():
    table = (Path(__file__).parents[3] / "docs" / "trackers.md").read_text().partition("| ours |")[2]
    rows = re.findall(r"^\| `([\w.]+)` \| `?([^`|]+?)`? \| `?([^`|]+?)`? \|$", table, re.MULTILINE)
    said = {name: peers for name, *peers in rows}
    assert said.keys() == PEERS.keys() | {"grpo_advantages.score_NAME"}
    for name, peers in said.items():
        for trainer, peer in zip(("verl", "trl"), peers, strict=True):
            assert tracked_name(name, trainer) == (tracked_name(name, "own") if peer == "-" else peer)


@given(st.dictionaries(st.sampled_from([*PEERS, "a.b", "a.b.c", "critic_train.x"]), st.floats(allow_nan=False)))
def test_no_value_is_lost_under_any_names(values):
    for names in ("verl", "trl", "own"):
        assert sorted(tracked_values({"step": 1, **values}, names).values()) == sorted(values.values())


class Broken:
    def __init__(self, run, at):
        self._at = at

    def add(self, step):
        if step.step == self._at:
            raise OSError("no room")

    def close(self, *, has_failed):
        if self._at is None:
            raise OSError("no room")


@pytest.mark.parametrize(("at", "says"), [(1, "lacks "), (3, "lacks step 3"), (None, "may lack its last step")])
def test_a_failing_tracker_is_reported_once_and_the_run_continues(at, says, tmp_path, monkeypatch):
    monkeypatch.setattr(follow, "_opener", lambda name: partial(Broken, at=at))
    said = []
    show(tmp_path, warn=said.append, report_to=["tensorboard"])
    (line,) = said
    assert says in line and "no room" in line and "metrics.jsonl has every step" in line


def test_a_failing_tracker_is_reported_at_the_next_step_only(tmp_path, monkeypatch):
    monkeypatch.setattr(follow, "_opener", lambda name: partial(Broken, at=2))
    said, journal = [], Journal(tmp_path)
    with followed(journal, LINES[:2], Tracking(report_to=["tensorboard"]), PARAMETERS, said.append):
        for thread in [one for one in threading.enumerate() if one.name == "tracker tensorboard"]:
            thread.join(60)
        for tell in journal._followers:
            tell(LINES[2])
        assert len(said) == 1
    (line,) = said
    assert line.startswith("tensorboard lacks step 2 and later steps: OSError: no room")


def test_a_hanging_tracker_is_abandoned_with_a_line_and_a_bounded_queue(tmp_path, monkeypatch):
    """While it hangs the run tells it more than it keeps; none of that waits."""
    opened, release = threading.Event(), threading.Event()

    def hang(run):
        opened.set()
        release.wait()

    monkeypatch.setattr(follow, "_opener", lambda name: hang)
    monkeypatch.setattr(follow, "SECONDS_AT_END", 0.2)
    said = []
    show(tmp_path, lines=[{"step": n} for n in range(MOST_WAITING + 5)], warn=said.append, report_to=["tensorboard"])
    release.set()
    assert opened.is_set()
    assert said == [
        f"tensorboard lacks {MOST_WAITING + 5} steps (of 0 to {MOST_WAITING + 4}): it is slower than the run;"
        " the run is not affected, metrics.jsonl has every step"
    ]


def test_a_folder_with_a_trackers_name_is_not_the_tracker(monkeypatch, tmp_path):
    """`python -m` has the working folder on its path, where W&B leaves one."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(tracking, "find_spec", lambda name: PathFinder.find_spec(name, [str(tmp_path)]))
    with pytest.raises(InvalidInput, match=r"pip install '.\[wandb\]'"):
        check_trackers(Tracking(report_to=["wandb"]))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("tracking.report_to=[wandb]", "tracking.report_to: got 'wandb'"),
        ("tracking.report_to=[tensorbord]", "tracking.report_to.0: got 'tensorbord', expected"),
        ("tracking.report_to=[wandb,wandb]", "each tracker once"),
        ("tracking.names=openrlhf", "tracking.names: got 'openrlhf', expected"),
        ("tracking.sample=3", "tracking.sample: unknown key (got 3); closest: samples"),
        ("tracking.samples=-1", "tracking.samples: got -1, expected"),
    ],
)
def test_a_wrong_option_or_missing_tracker_is_refused_in_a_line(given, says, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    (tmp_path / "parameters.yaml").write_text(yaml.safe_dump(ppo_parameters(tmp_path)))
    capsys.readouterr()
    assert main(["ppo", "--parameters", str(tmp_path / "parameters.yaml"), "--dry-run", "-p", given]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_a_missing_or_repeated_tracker_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    with pytest.raises(InvalidInput, match=r"tracking.report_to: got 'wandb', .*pip install '\.\[wandb\]'"):
        check_trackers(Tracking(report_to=["wandb"]))
    with pytest.raises(InvalidInput, match="expected each tracker once"):
        Tracking(report_to=["wandb", "wandb"])
