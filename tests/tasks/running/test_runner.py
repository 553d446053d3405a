"""Real Prefect, no ranks: what a run's nodes become as task runs, in what order they run, and how a run ends."""

import io
import logging
import os
import signal
import threading
from types import SimpleNamespace

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterParentFlowRunId
from prefect.context import FlowRunContext
from prefect.task_engine import run_task_sync

from prefect_rlhf.errors.errors import OutputFailed, RankFailed, RankLost, StaleWeights
from prefect_rlhf.placement.augmented.step_groups import StepGroups
from prefect_rlhf.placement.planner.preset_plan import preset
from prefect_rlhf.tasks.running import task_runner
from prefect_rlhf.tasks.running.journal import STEPS_KEPT, Journal, read_spans
from prefect_rlhf.tasks.running.outcome import NodeOutcome
from prefect_rlhf.tasks.running.runner import GraphRunner
from prefect_rlhf.tasks.running.stop_request import STOP_POLL_SECONDS, StopRequest
from prefect_rlhf.tasks.server.failures import TASK_RUN_LOGGER
from tests.support.cases import combinations, first
from tests.support.strategies import TWO_DEVICES, ppo
from tests.tasks import row_world

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect")]


class Dispatcher:
    """Does nothing at each node but to note it, and that nothing runs beside it that shares what it occupies.

    At the node `failing` it raises `error`; at the node `calling` it calls `do`.
    """

    def __init__(self, failing="", error=None, calling="", do=None):
        self.failing, self.begun, self.finished = failing, [], []
        self.error, self.calling, self.do = error or StaleWeights("actor holds v0, expected v1"), calling, do
        self._now, self._lock = [], threading.Lock()
        self.gang = SimpleNamespace(close=lambda: None)

    def execute(self, node):
        with self._lock:
            assert all(node.occupies.isdisjoint(other.occupies) for other in self._now)
            self._now.append(node)
            self.begun.append(node.id)
        if node.id == self.failing:
            raise self.error
        if node.id == self.calling:
            self.do()
        with self._lock:
            self._now.remove(node)
        return NodeOutcome(seconds=0.0, device_bytes={}, resident_bytes={}, store_bytes={})

    def finish_step(self, step, oldest):
        self.finished.append((step, oldest))


def run(folder, dispatcher, num_steps, steps_per_group=2, journal=None, checkpoint_every=None, body=None):
    """Run PPO under `split`, or what `body` does with the runner.

    The runner, the flow run's state, and the steps that ended.
    """
    plan = preset("split", ppo(), TWO_DEVICES, TWO_DEVICES.whole)
    training = row_world.training_run(row_world.with_operations(ppo()), plan, num_steps, folder)
    groups = StepGroups(training.graph, plan, num_steps, steps_per_group, checkpoint_every=checkpoint_every)
    runner = GraphRunner(training, dispatcher, journal or Journal(folder), groups, StopRequest())
    steps = []
    run_all = body or (lambda runner: runner.run_all(lambda metrics: steps.append(metrics["step"])))
    return runner, flow(lambda: run_all(runner), name="test")(return_state=True), steps


def task_runs(state):
    """Task runs of the subflows by their names."""
    parent = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[state.state_details.flow_run_id]))
    with get_client(sync_client=True) as client:
        return {task_run.name: task_run for task_run in client.read_task_runs(flow_run_filter=parent, limit=200)}


def groups_below(flow_run_id):
    """States of the subflows by their names."""
    parent = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[flow_run_id]))
    with get_client(sync_client=True) as client:
        return {group.name: group.state_name for group in client.read_flow_runs(flow_run_filter=parent)}


def settled(parent, number):
    """Task runs of the run that ended in the state `parent`, once the server has taken in all of them.

    It writes a task run first and its state a moment later.
    """
    for _ in range(100):
        runs = task_runs(parent)
        states = [task_run.state for task_run in runs.values()]
        if len(states) >= number and all(state is not None and state.is_final() for state in states):
            return runs
        threading.Event().wait(0.2)
    raise AssertionError(f"{len(runs)} of {number} task runs: {[(n, r.state_name) for n, r in runs.items()]}")


def test_each_node_is_a_task_run_with_its_dependencies_as_inputs(tmp_path):
    """The inputs are what Prefect's UI draws as edges, across groups too."""
    dispatcher = Dispatcher()
    runner, state, steps = run(tmp_path, dispatcher, 3)
    augmented = row_world.whole_graph(runner.run)
    assert state.is_completed() and sorted(steps) == [1, 2, 3]
    places = {name: place for place, name in enumerate(dispatcher.begun)}
    assert all(places[before] < places[node.id] for node in augmented for before in node.depends_on)
    assert {span.node for span in read_spans(tmp_path)} == {node.id for node in augmented}
    runs = settled(state, len(augmented))
    for node in augmented:
        inputs = {task_input.id for task_input in runs[node.title].task_inputs["node"]}
        assert inputs == {runs[augmented.node(before).title].id for before in node.depends_on}


def test_the_first_failure_ends_the_run_and_no_node_begins_after_it(tmp_path):
    """The run ends with the node's own error; what had not begun leaves no task run behind."""
    dispatcher = Dispatcher(failing="actor_train_step@1")
    runner, state, _ = run(tmp_path, dispatcher, 3)
    augmented = row_world.whole_graph(runner.run)
    error = state.result(raise_on_failure=False)
    assert isinstance(error, StaleWeights) and str(error) == "actor holds v0, expected v1"
    assert not any("@2" in name for name in dispatcher.begun)
    runs = settled(state, len(dispatcher.begun))
    assert {name for name, task_run in runs.items() if not task_run.state.is_completed()} == {
        augmented.node("actor_train_step@1").title
    }
    assert len(runs) == len(dispatcher.begun) < len(augmented)


@pytest.mark.parametrize("end", first(1, ["failed", "stopped"]))
def test_a_group_of_steps_that_never_began_says_so(tmp_path, end):
    """The UI shows a group once it is handed out, which is before its first node can begin."""
    handed_out = threading.Event()
    runners = []

    def until_the_next_group_waits():
        assert handed_out.wait(60)
        if end == "failed":
            raise StaleWeights("actor holds v0, expected v1")
        runners[0]._stop.end("asked for")
        threading.Event().wait(2 * STOP_POLL_SECONDS)  # until it is noticed

    def body(runner):
        runners.append(runner)
        submit = runner._submit

        def announced(group):
            if group.name == "step 2":
                threading.Timer(STOP_POLL_SECONDS, handed_out.set).start()  # by then its nodes are submitted
            return submit(group)

        runner._submit = announced
        return runner.run_all(lambda metrics: None)

    dispatcher = Dispatcher(calling="actor_train_step@1", do=until_the_next_group_waits)
    _, state, _ = run(tmp_path, dispatcher, 6, steps_per_group=1, body=body)
    begun = {f"step {name.rpartition('@')[2]}" for name in dispatcher.begun}
    groups = groups_below(state.state_details.flow_run_id)
    assert groups["step 1"] == ("Failed" if end == "failed" else "Completed")
    assert state.is_failed() == (end == "failed")
    never = {name for name, its in groups.items() if its == "Never began"}
    assert never == groups.keys() - begun and "step 2" in never, groups


def test_a_long_run_forgets_ended_steps(tmp_path):
    """Of what it keeps by step or by node as it goes."""
    dispatcher = Dispatcher()
    runner, state, steps = run(tmp_path, dispatcher, 12, steps_per_group=12)
    last = row_world.whole_graph(runner.run).last_step
    assert state.is_completed() and len(steps) == last == 12
    assert not runner._ledger._left and not runner._locks._waiting and not runner._locks._running
    assert len(runner.journal._by_step) == STEPS_KEPT < last
    assert sorted(step for step, _ in dispatcher.finished) == list(range(1, last + 1))
    assert max(oldest for _, oldest in dispatcher.finished) == last + 1


def test_nodes_work_does_not_wait_for_their_task_runs(tmp_path, monkeypatch):
    """Prefect is late with every task run here: none begins until the step trains."""
    trains = threading.Event()

    def late(*arguments, **named):
        assert trains.wait(60), "the work waits for task runs"
        return run_task_sync(*arguments, **named)

    monkeypatch.setattr(task_runner, "run_task_sync", late)
    runner, state, _ = run(tmp_path, Dispatcher(calling="actor_train_step@1", do=trains.set), 1)
    assert state.is_completed() and not runner._task_runner._begun


class SlowDisk(Dispatcher):
    """Writes the checkpoint of step 3 until a later step trains."""

    def __init__(self):
        super().__init__()
        self.trained_on = threading.Event()

    def execute(self, node):
        if node.id == "actor_train_step@5":
            self.trained_on.set()
        if node.id == "commit@3":
            assert self.trained_on.wait(60), "the steps wait for the disk"
        return super().execute(node)


def test_only_the_runs_end_and_the_next_copy_wait_for_a_checkpoint(tmp_path):
    """A group is a step long here, so groups that are over are left behind with their commit."""
    dispatcher = SlowDisk()
    _, state, steps = run(tmp_path, dispatcher, 6, steps_per_group=1, checkpoint_every=3)
    assert state.is_completed() and steps == list(range(1, 7))
    places = {name: place for place, name in enumerate(dispatcher.begun)}
    assert places["actor_train_step@5"] < places["commit@3"] < places["checkpoint.actor@6"] < places["commit@6"]


class HardExit(BaseException):
    """What is no Exception: a thread that is told to leave, an interpreter that ends."""


@pytest.mark.parametrize(
    ("node", "kind"),
    combinations(
        ("actor_generate@1", "actor_train_step@3"),  # with more to come, and in the last group
        (HardExit, MemoryError),
        briefly=[("actor_generate@1", HardExit)],
    ),
)
def test_a_node_that_exits_in_any_way_ends_the_run_with_its_own_message(tmp_path, node, kind):
    error = kind("told to leave")
    _, state, _ = run(tmp_path, Dispatcher(failing=node, error=error), 3)
    assert not state.is_completed() and str(error) in state.message


@pytest.fixture
def logged():
    """What task runs log, as their terminal shows it."""
    text = io.StringIO()
    handler, logger = logging.StreamHandler(text), logging.getLogger(TASK_RUN_LOGGER)
    logger.addHandler(handler)
    yield text.getvalue
    logger.removeHandler(handler)


def test_a_users_traceback_is_logged_once(tmp_path, logged):
    """With the task run in which it arose; the state's message is one line."""
    error = RankFailed(
        "rank 1 failed in score · step 1: IndexError: list index out of range (/home/me/mine.py:3 in score)"
    )
    error.traceback = (
        'Traceback (most recent call last):\n  File "/home/me/mine.py", line 3, in score\nIndexError: list ...'
    )
    _, state, _ = run(tmp_path, Dispatcher(failing="advantages@1", error=error), 2)
    assert state.message.count("/home/me/mine.py:3 in score") == 1 and "\n" not in state.message
    assert logged().count('File "/home/me/mine.py", line 3, in score') == 1
    assert "NoneType: None" not in logged()


class FullJournal(Journal):
    """Whose disk is full from a step on."""

    def __init__(self, run_dir, step, method):
        super().__init__(run_dir)
        self.step, self.method = step, method

    def record(self, span):
        if self.method == "record" and span.step == self.step:
            raise OutputFailed(f"{self.run_dir}/task_runs.jsonl cannot be written: No space left on device")
        super().record(span)

    def finish_step(self, step):
        if self.method == "finish_step" and step == self.step:
            raise OutputFailed(f"{self.run_dir}/metrics.jsonl cannot be written: No space left on device")
        return super().finish_step(step)


@pytest.mark.parametrize(
    ("method", "step"),
    combinations(
        ("record", "finish_step"),
        (1, 3),  # with more to come, and in the last group
        briefly=[("record", 1)],
    ),
)
def test_an_unwritable_journal_fails_the_run(tmp_path, step, method):
    """Also in the last group, after whose nodes nobody waits for anything."""
    _, state, _ = run(tmp_path, Dispatcher(), 3, journal=FullJournal(tmp_path, step, method))
    assert state.is_failed() and "No space left on device" in state.message


@pytest.mark.parametrize("checkpoint_every", first(1, [None, 1]))
def test_sigterm_ends_the_step_in_flight_and_writes_a_checkpoint(tmp_path, checkpoint_every):
    """Nothing of later steps begins, though they were handed out; a second SIGTERM would end it at once.

    Also where the checkpoint was due, and so handed out, anyway: every step that was done has its metrics.
    """

    def notice_of_the_end():
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(2 * STOP_POLL_SECONDS)  # such short steps would all be over before anyone looks

    notice = Dispatcher(calling="actor_generate@2", do=notice_of_the_end)
    runner, state, steps = run(tmp_path, notice, 6, steps_per_group=4, checkpoint_every=checkpoint_every)
    last = max(int(name.rpartition("@")[2]) for name in notice.begun)
    assert state.is_completed() and state.result() == last < 6 and steps == list(range(1, last + 1))
    assert {f"checkpoint.actor@{last}", f"checkpoint.critic@{last}", f"commit@{last}"} <= set(notice.begun)
    assert not any(name.startswith("export") for name in notice.begun) and not runner._locks._waiting
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_stops_checkpoint_waits_for_a_step_that_is_being_submitted(tmp_path):
    """The checkpoint is of the next group. After a switch no earlier step could be the last."""
    dispatcher = Dispatcher()

    def body(runner):
        runner._groups = StepGroups(runner.run.graph, runner.run.plan, 6, 2, 2, is_saved=False)
        submit = runner._submit

        def submit_late(group):
            if not runner._stop:
                runner._stop.end("asked for")
                threading.Event().wait(2 * STOP_POLL_SECONDS)  # until it is noticed
            return submit(group)

        runner._submit = submit_late
        return runner.run_all(lambda metrics: None)

    _, state, _ = run(tmp_path, dispatcher, 6, body=body)
    assert state.is_completed() and state.result() == 3
    for role in ("actor", "critic"):
        trained = dispatcher.begun.index(f"{role}_train_step@3")
        assert trained < dispatcher.begun.index(f"checkpoint.{role}@3") < dispatcher.begun.index("commit@3")


def test_ctrl_c_ends_the_run_at_once_without_failures(tmp_path, logged):
    """Calls in flight lose their ranks: their task runs are cancelled. No group begins after it.

    The group that was handed out by then says in the UI that it never began, as in a run that ends early in any way.
    """
    closed = threading.Event()

    def interrupted_call():
        os.kill(os.getpid(), signal.SIGINT)
        assert closed.wait(60)
        raise RankLost("rank 0 was ended in generating: the gang was closed")

    dispatcher = Dispatcher(calling="actor_generate@2", do=interrupted_call)
    dispatcher.gang = SimpleNamespace(close=closed.set)
    parents = []

    def body(runner):
        parents.append(FlowRunContext.get().flow_run.id)
        with pytest.raises(KeyboardInterrupt):
            runner.run_all(lambda metrics: None)

    runner, _, _ = run(tmp_path, dispatcher, 9, steps_per_group=1, body=body)
    assert not runner._in_flight and not any(name.endswith("@9") for name in dispatcher.begun)
    with get_client(sync_client=True) as client:
        parent = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=parents))
        states = [task_run.state_name for task_run in client.read_task_runs(flow_run_filter=parent, limit=200)]
    groups = groups_below(parents[0])
    begun = {f"step {name.rpartition('@')[2]}" for name in dispatcher.begun}
    assert "Failed" not in states and "Crashed" not in states
    assert {groups[name] for name in begun} == {"Completed", "Cancelled"} and len(groups) <= 3, groups
    assert {state for name, state in groups.items() if name not in begun} <= {"Never began"}, groups
    assert "Traceback" not in logged() and "RankLost" not in logged() and "Cancelled" not in logged()
