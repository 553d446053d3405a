"""One training run on a gang: build the models, run the graph."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from contextlib import closing
from typing import Protocol

from prefect_rlhf.engines.gang.open import open_gang
from prefect_rlhf.placement.plan import ModelInstance
from prefect_rlhf.tasks.running.dispatch import Dispatcher
from prefect_rlhf.tasks.running.journal import Journal
from prefect_rlhf.tasks.running.outcome import NodeOutcome
from prefect_rlhf.tasks.running.runner import GraphRunner
from prefect_rlhf.tasks.running.training_run import TrainingRun


class Audience(Protocol):
    """Who is told how the run goes."""

    def built(self, instance: ModelInstance, outcome: NodeOutcome) -> None: ...

    def step_ended(self, metrics: Mapping[str, float]) -> None: ...


def train(run: TrainingRun, journal: Journal, audience: Audience, steps_per_group: int) -> None:
    """Build the models and run the whole graph. The gang is gone when this returns."""
    engines = {placement.engine for _, placement in run.augmented.plan.placements}
    with closing(open_gang(len(run.lease.devices), device=run.lease.kind, engines=engines)) as gang:
        dispatcher = Dispatcher(run, gang)
        dispatcher.build(audience.built)
        gc.freeze()  # what is imported stays; looking through it again and again would hold up task runs
        GraphRunner(run, dispatcher, journal, steps_per_group).run_all(audience.step_ended)
