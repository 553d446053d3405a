"""What Prefect does around a run: automations on the events of runs, and a schedule, on a real server."""

import math
import time
from pathlib import Path
from uuid import uuid4

import pytest
from prefect import flow
from prefect.automations import Automation
from prefect.client.orchestration import get_client
from prefect.client.schemas.schedules import CronSchedule
from prefect.events import Event
from prefect.events.filters import EventFilter, EventNameFilter
from prefect.server.events.schemas.automations import EventTrigger
from prefect.server.events.schemas.events import ReceivedEvent

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.modules import import_from
from prefect_rlhf.flows.sft import sft
from prefect_rlhf.tasks.reporting.limits import ABOVE_LIMIT, Limits
from tests.flows.test_best_model import ONE_DEVICE, parameters  # noqa: F401  a fixture
from tests.support.runs import prepared

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "automations.py"
KL = "kl_penalised_rewards.kl"


@pytest.fixture(scope="module")
def example():
    return import_from("automations", str(EXAMPLE))


def server_trigger(automation):
    """The trigger as a server reads it."""
    return EventTrigger.model_validate(automation.trigger.model_dump(mode="json"))


def happened(name, **labels):
    """An event of a flow run of ours, as a server gets it."""
    resource = {"prefect.resource.id": f"prefect.flow-run.{uuid4()}", **labels}
    related = [{"prefect.resource.id": f"prefect.flow.{uuid4()}", "prefect.resource.role": "flow"}]
    related[0]["prefect.resource.name"] = "rlhf"
    event = Event(event=name, resource=resource, related=related)
    return ReceivedEvent.model_validate(event.model_dump(mode="json"))


def matches(trigger, event):
    return trigger.expects(event.event) and trigger.covers(event)


def test_a_crash_of_a_run_is_told_and_its_end_is_not(example):
    trigger = server_trigger(example.on_crash(uuid4()))
    assert matches(trigger, happened("prefect.flow-run.Crashed"))
    assert not matches(trigger, happened("prefect.flow-run.Completed"))


@pytest.mark.slow
@pytest.mark.usefixtures("prefect")
def test_a_server_takes_the_automations(example):
    for made in (example.on_crash(uuid4()), example.on_metric_above_limit(KL, uuid4())):
        created = made.create(_sync=True)
        read = Automation.read(id=created.id, _sync=True)
        assert (read.name, read.actions) == (made.name, made.actions)
        read.delete(_sync=True)


@pytest.mark.slow
@pytest.mark.usefixtures("prefect")
def test_a_metric_that_comes_above_its_limit_is_an_event_that_the_automation_waits_for(example):
    """Once until it was within the limit again; the event is of the flow run, which can be suspended."""

    @flow
    def looking():
        limits = Limits({KL: 2.0, "other.kl": 0.0})
        return [limits.look({"step": step, KL: kl}) for step, kl in enumerate([1.0, 3.0, 4.0, 2.0, math.nan])]

    lines = looking()
    assert [len(of_step) for of_step in lines] == [0, 1, 0, 0, 1]
    assert lines[1] == [f"{KL} is 3 in step 1, above its limit of 2"]
    trigger = server_trigger(example.on_metric_above_limit(KL, uuid4()))
    events = told()
    assert len(events) == 2
    for event in events:
        assert matches(trigger, ReceivedEvent.model_validate(event.model_dump(mode="json")))
        assert event.resource.id.startswith("prefect.flow-run.")


def test_a_limit_on_a_missing_metric_is_reported_once():
    limits = Limits({"gae.kl": 2.0, "other.kl": 0.0})
    lines = [limits.look({"step": step, "gae.value": 1.0, "gae.return": 2.0}) for step in range(2)]
    assert lines == [
        ["limits: gae.kl is not a metric of step 0, so it is not checked; gae has gae.value, gae.return"],
        [],
    ]


def test_a_limit_of_a_metric_that_is_left_out_of_a_step_without_scores_goes_on(monkeypatch):
    """The mean over no score is above no limit, and is no mistake of the limit."""
    monkeypatch.setattr("prefect_rlhf.tasks.reporting.limits._tell", lambda *_: None)
    limits = Limits({"grpo_advantages.score": 2.0})
    empty = {"grpo_advantages.unscored": 1.0, "grpo_advantages.truncated": 0.0}
    lines = [
        limits.look({"step": step, **metrics}) for step, metrics in enumerate([empty, {"grpo_advantages.score": 3}])
    ]
    assert lines == [[], ["grpo_advantages.score is 3 in step 1, above its limit of 2"]]


def told():
    """The events above a limit that the server knows, once both are there."""
    wanted = EventFilter(event=EventNameFilter(name=[ABOVE_LIMIT]))
    with get_client(sync_client=True) as client:
        for _ in range(100):
            found = client.request("POST", "/events/filter", json={"filter": wanted.model_dump(mode="json")}).json()
            if len(found["events"]) >= 2:
                break
            time.sleep(0.1)
    return [Event.model_validate(one) for one in found["events"]]


@pytest.mark.slow
@pytest.mark.usefixtures("prefect")
def test_an_algorithm_runs_by_the_clock(parameters):  # noqa: F811
    deployment = sft.to_deployment("nightly", schedule=CronSchedule(cron="0 2 * * *"), parameters=parameters)
    made = deployment.apply()
    with get_client(sync_client=True) as client:
        (found,) = client.read_deployment(made).schedules
    assert (found.schedule.cron, found.active) == ("0 2 * * *", True)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"limits": {"actor.loss": 1.0}}, r"limits: got 'actor.loss', expected a metric of a call: .*actor_train\.\*"),
        ({"role_deadlines": {"critic": 5.0}}, "role_deadlines: got 'critic', expected a role with calls: actor"),
    ],
)
def test_a_limit_on_an_unknown_call_is_refused_in_one_line(parameters, changes, says):  # noqa: F811
    with pytest.raises(InvalidInput, match=says) as error:
        prepared(sft, parameters | changes, ONE_DEVICE)
    assert "\n" not in str(error.value)
