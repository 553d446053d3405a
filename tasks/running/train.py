"""A training run on a gang: builds the models and runs the graph."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from typing import Protocol

from prefect_rlhf.engines.gang.open import open_gang
from prefect_rlhf.engines.rank.rank import Rank
from prefect_rlhf.errors.errors import RankSilent
from prefect_rlhf.placement.augmented.step_groups import PlanEnd, StepGroups
from prefect_rlhf.placement.plans.switch import PlanAt, moving_roles
from prefect_rlhf.tasks.run_log import run_log
from prefect_rlhf.tasks.running.device_memory import check_device_memory, limit_torch
from prefect_rlhf.tasks.running.dispatch import Dispatcher
from prefect_rlhf.tasks.running.journal import Journal
from prefect_rlhf.tasks.running.runner import GraphRunner
from prefect_rlhf.tasks.running.steps.learning import Findings, Learning
from prefect_rlhf.tasks.running.stop_request import StopRequest
from prefect_rlhf.tasks.running.switch.requests import Switches
from prefect_rlhf.tasks.running.switch.run_switch import Builder, switch_to
from prefect_rlhf.tasks.running.training_run import TrainingRun


class Audience(Builder, Protocol):
    """Is told about a run's progress."""

    def step_ended(self, metrics: Mapping[str, float], findings: Findings) -> None: ...


def train(
    run: TrainingRun,
    journal: Journal,
    audience: Audience,
    steps_per_group: int,
    switches: Switches | None = None,
    learning: Learning | None = None,
) -> StopRequest | None:
    """Build the models and run the whole graph, under the run's plan and then under the plans of `switches`.

    The gang is closed on return. Returns None after a full run, or the request that ended the run early, after a
    checkpoint. Raises NothingLearnt, also after a checkpoint, once `learning` finds too many empty steps.
    """
    switches, learning = switches or Switches(), learning or Learning(run.graph)
    engines = {placement.engine for _, placement in run.plan.placements} | switches.engines
    lease = run.lease
    try:
        opened = open_gang(
            lease.devices_of_nodes,
            rank_factory=Rank,
            device=lease.kind,
            engines=engines,
            through_ray=lease.cluster.through_ray,
            say=run_log().info,
            shared=run.run_dir,
            records=run.run_dir,
            node_devices=lease.node_devices,
            gpus=lease.gpus,
            longest_call_seconds=max([run.call_deadline_seconds, *run.role_deadlines.values()]),
            start_seconds=run.start_deadline_seconds,
        )
    except RankSilent as error:  # the first imports from a network's disk may take minutes
        raise RankSilent(f"{error}; start_deadline_seconds gives it more") from error
    with closing(opened) as gang:
        check_device_memory(lease, gang, run.call_deadline_seconds)
        if not switches.may_ask:  # torch cannot lift a limit, and the plans to come are unknown
            limit_torch(run, gang, switches.plans)
        dispatcher = Dispatcher(run, gang)
        dispatcher.build(audience.built)
        stop = StopRequest()
        with imports_frozen():
            on_step = partial(_step_ended, run, audience, stop, learning)
            while True:
                groups = _groups(dispatcher.run, steps_per_group, switches.planned)
                runner = GraphRunner(dispatcher.run, dispatcher, journal, groups, stop, switches)
                stopped_after = runner.run_all(on_step)
                if stopped_after is not None or not groups.switches:
                    stop.check()
                    return None if stopped_after is None else stop
                dispatcher = switch_to(switches.take(groups.end + 1), dispatcher, journal, audience, stop)


def _groups(run: TrainingRun, steps_per_group: int, switch: PlanAt | None) -> StepGroups:
    """Return the steps of the run under its plan, up to a switch if there is one."""
    ends = None if switch is None else PlanEnd(switch.step, moving_roles(run.graph, run.plan, switch.plan))
    steps = run.num_steps, steps_per_group, run.finished, run.checkpoint_every, run.exports
    is_regular = run.checkpoint_every is not None and run.finished % run.checkpoint_every == 0
    is_saved = run.switched_after is None or is_regular
    return StepGroups(run.graph, run.plan, *steps, ends=ends, is_saved=is_saved)


def _step_ended(
    run: TrainingRun, audience: Audience, stop: StopRequest, learning: Learning, metrics: Mapping[str, float]
) -> None:
    """Report a step, and end the run if it learns nothing, or its evaluations have not improved for long enough."""
    findings = learning.step_ended(metrics)
    audience.step_ended(metrics, findings)
    if findings.error is not None:
        stop.end("nothing is learnt", findings.error)
    if run.best is not None and (reason := run.best.enough(run.run_dir)):
        stop.end(reason)


@contextmanager
def imports_frozen() -> Iterator[None]:
    """Exclude imported objects from garbage collection, because scanning them repeatedly would delay task runs.

    Python scans all objects once their number has grown by a quarter. The second collection resets the base of that
    quarter to the few remaining objects; otherwise garbage could grow to a quarter of the imports.

    The objects are unfrozen at the end, because libraries report objects that are never collected as leaks. A process
    that froze its objects before keeps them so.
    """
    was_frozen = gc.get_freeze_count() > 10_000  # Python 3.12 begins with a few hundred
    gc.collect()
    gc.freeze()
    gc.collect()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()
