"""Trackers show what metrics.jsonl has, each step once, and never hold a run up."""

import threading
from collections import defaultdict
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.tasks.running.journal import Journal
from prefect_rlhf.tasks.trackers import follow, tracking
from prefect_rlhf.tasks.trackers.follow import followed
from prefect_rlhf.tasks.trackers.names import PEERS, tracked_values
from prefect_rlhf.tasks.trackers.tracker_thread import MOST_WAITING
from prefect_rlhf.tasks.trackers.tracking import Tracking, check_trackers
from tests.trackers_read_back import READ_BACK

LINES = [
    {"step": step, "actor_train.loss": 0.1 / (step + 1), "kl_penalised_rewards.kl": 1e-9 * step, "seconds": 3.0}
    for step in range(3)
]
PARAMETERS = {"algo": {"optimizer": {"lr": 1e-5}}, "steps": 3}


def show(run_dir, *, lines=LINES, before=(), warn=pytest.fail, **settings):
    """Tell trackers of a run's lines as its journal would."""
    run_dir.mkdir(parents=True, exist_ok=True)
    journal = Journal(run_dir)
    with followed(journal, before, Tracking(**settings), PARAMETERS, warn):
        for line in lines:
            for tell in journal._followers:
                tell(line)


def write_rollouts(run_dir, step):
    (run_dir / "rollouts").mkdir(parents=True, exist_ok=True)
    columns = {"prompt": ["what", "why"], "response": ["a film", "it"], "scores": [0.5, None], "row_id": [0, 1]}
    pq.write_table(pa.table(columns), run_dir / "rollouts" / f"step-{step:06d}.parquet")


def expected(lines, names="own"):
    return sorted((name, line["step"], value) for line in lines for name, value in tracked_values(line, names).items())


@pytest.fixture(autouse=True)
def no_accounts(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_MODE", "WANDB_API_KEY", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("tracker", READ_BACK)
def test_what_is_read_back_is_what_was_told_each_step_once_and_so_when_a_run_goes_on(tracker, tmp_path):
    pytest.importorskip(tracker)
    run_dir = tmp_path / "runs" / "amber-fox"
    write_rollouts(run_dir, 2)
    show(run_dir, report_to=[tracker], names="own", samples_every=2)
    scalars, tables = READ_BACK[tracker](run_dir)
    assert sorted(scalars) == expected(LINES)
    (heading, *rows) = tables["samples/rollouts", 2]
    assert (heading, len(rows), rows[0][:2]) == (["prompt", "response", "scores"], 2, ["what", "a film"])
    assert float(rows[0][2]) == 0.5 and not rows[1][2]

    again = {**LINES[2], "actor_train.loss": 7.0}
    show(run_dir, before=LINES[:2], lines=[again], report_to=[tracker], names="verl")
    assert sorted(READ_BACK[tracker](run_dir)[0]) == expected([*LINES[:2], again], "verl")


def test_every_name_of_a_peer_stands_for_one_metric_of_a_call_at_most():
    """Of one algorithm; PPO's and GRPO's names may be the same."""
    for trainer in (0, 1):
        found = defaultdict(set)
        for own, peers in PEERS.items():
            if peers[trainer]:
                found[peers[trainer]].add(own.rpartition(".")[0])
        assert all(len(calls) <= 2 for calls in found.values())


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

    def close(self):
        if self._at is None:
            raise OSError("no room")


@pytest.mark.parametrize(
    ("at", "says"), [(0, "lacks 3 steps (of 0 to 2)"), (2, "lacks step 2"), (None, "may lack its last step")]
)
def test_a_tracker_that_fails_is_told_of_once_and_the_run_goes_on(at, says, tmp_path, monkeypatch):
    monkeypatch.setattr(follow, "_opener", lambda name: partial(Broken, at=at))
    said = []
    show(tmp_path, warn=said.append, report_to=["tensorboard"])
    (line,) = said
    assert says in line and "no room" in line and "metrics.jsonl has every step" in line


def test_a_tracker_that_hangs_is_left_with_a_line_and_keeps_so_many_lines(tmp_path, monkeypatch):
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
        " metrics.jsonl has every step"
    ]


def test_a_tracker_that_is_not_installed_or_said_twice_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    with pytest.raises(InvalidInput, match=r"tracking.report_to: got 'wandb', .*pip install 'prefect-rlhf\[wandb\]'"):
        check_trackers(Tracking(report_to=["wandb"]))
    with pytest.raises(ValidationError, match="expected each tracker once"):
        Tracking(report_to=["wandb", "wandb"])
