"""Real Prefect, no ranks: what a run's nodes become as task runs, in what order they run, and how a run ends."""

import threading
from types import SimpleNamespace

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterParentFlowRunId
from prefect.events.worker import EventsWorker
from prefect.testing.utilities import prefect_test_harness

from prefect_rlhf.placement.errors import StaleWeights
from prefect_rlhf.placement.planner.preset_plan import preset
from prefect_rlhf.tasks.running.journal import STEPS_KEPT, Journal, read_spans
from prefect_rlhf.tasks.running.outcome import NodeOutcome
from prefect_rlhf.tasks.running.runner import GraphRunner
from tests.strategies import TWO_DEVICES, ppo
from tests.tasks import row_world

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def prefect():
    with prefect_test_harness(server_startup_timeout=120):
        EventsWorker.drain_all()  # that of an earlier file's server would go on sending task runs there
        yield


class Dispatcher:
    """Does nothing at each node but to note it, and that nothing runs beside it that shares what it occupies."""

    def __init__(self, failing=""):
        self.failing, self.begun, self.finished = failing, [], []
        self._now, self._lock = [], threading.Lock()
        self.gang = SimpleNamespace(close=lambda: None)

    def execute(self, node):
        with self._lock:
            assert all(node.occupies.isdisjoint(other.occupies) for other in self._now)
            self._now.append(node)
            self.begun.append(node.id)
        if node.id == self.failing:
            raise StaleWeights("actor holds v0, expected v1")
        with self._lock:
            self._now.remove(node)
        return NodeOutcome(seconds=0.0, device_bytes={}, resident_bytes={}, store_bytes={})

    def finish_step(self, step, oldest):
        self.finished.append((step, oldest))


def run(folder, dispatcher, num_steps, steps_per_group=2):
    """Run PPO under `split`; the runner, the flow run's state, and the steps that ended."""
    plan = preset("split", ppo(), TWO_DEVICES, TWO_DEVICES.whole)
    training = row_world.training_run(row_world.with_operations(ppo()), plan, num_steps, folder)
    runner = GraphRunner(training, dispatcher, Journal(folder), steps_per_group)
    steps = []
    body = flow(lambda: runner.run_all(lambda metrics: steps.append(metrics["step"])), name="test")
    return runner, body(return_state=True), steps


def task_runs(state):
    """Task runs of the subflows by their names."""
    parent = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[state.state_details.flow_run_id]))
    with get_client(sync_client=True) as client:
        return {task_run.name: task_run for task_run in client.read_task_runs(flow_run_filter=parent, limit=200)}


def settled(state, number):
    """Task runs, once the server has taken in all of them."""
    for _ in range(100):
        runs = task_runs(state)
        if len(runs) >= number and all(task_run.state.is_final() for task_run in runs.values()):
            return runs
        threading.Event().wait(0.2)
    raise AssertionError(f"{len(runs)} of {number} task runs: {[(n, r.state_name) for n, r in runs.items()]}")


def test_each_node_is_a_task_run_whose_inputs_are_those_of_the_nodes_it_depends_on(tmp_path):
    """The inputs are what Prefect's UI draws as edges, across groups too."""
    dispatcher = Dispatcher()
    runner, state, steps = run(tmp_path, dispatcher, 3)
    augmented = runner.run.augmented
    assert state.is_completed() and sorted(steps) == [0, 1, 2, 3]
    places = {name: place for place, name in enumerate(dispatcher.begun)}
    assert all(places[before] < places[node.id] for node in augmented for before in node.depends_on)
    assert {span.node for span in read_spans(tmp_path)} == {node.id for node in augmented}
    runs = settled(state, len(augmented))
    for node in augmented:
        inputs = {task_input.id for task_input in runs[node.title].task_inputs["node"]}
        assert inputs == {runs[augmented.node(before).title].id for before in node.depends_on}


def test_the_first_failure_ends_the_run_and_nothing_begins_after_it(tmp_path):
    """The run ends with the node's own error; what had not begun leaves no task run behind."""
    dispatcher = Dispatcher(failing="actor_train_step@0")
    runner, state, _ = run(tmp_path, dispatcher, 3)
    augmented = runner.run.augmented
    error = state.result(raise_on_failure=False)
    assert isinstance(error, StaleWeights) and str(error) == "actor holds v0, expected v1"
    assert not any("@1" in name for name in dispatcher.begun)
    runs = settled(state, len(dispatcher.begun))
    assert {name for name, task_run in runs.items() if not task_run.state.is_completed()} == {
        augmented.node("actor_train_step@0").title
    }
    assert len(runs) == len(dispatcher.begun) < len(augmented)


def test_a_long_run_keeps_nothing_of_steps_that_ended(tmp_path):
    """Of what it keeps by step or by node as it goes."""
    dispatcher = Dispatcher()
    runner, state, steps = run(tmp_path, dispatcher, 12, steps_per_group=12)
    last = runner.run.augmented.last_step
    assert state.is_completed() and len(steps) == last + 1
    assert not runner._left and not runner._locks._waiting and not runner._locks._running
    assert len(runner.journal._by_step) == STEPS_KEPT < last
    assert sorted(step for step, _ in dispatcher.finished) == list(range(last + 1))
    assert max(oldest for _, oldest in dispatcher.finished) == last + 1
