"""One training run on a gang: build the models, run the graph, write the trained models."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Protocol

from prefect_rlhf.engines.open_gang import open_gang
from prefect_rlhf.placement.instances import trained_instance
from prefect_rlhf.placement.plan import ModelInstance
from prefect_rlhf.tasks.dispatch import Dispatcher, Outcome
from prefect_rlhf.tasks.journal import Journal
from prefect_rlhf.tasks.runner import GraphRunner
from prefect_rlhf.tasks.training_run import TrainingRun


class Audience(Protocol):
    """Who is told how the run goes."""

    def built(self, instance: ModelInstance, outcome: Outcome) -> None: ...

    def step_ended(self, metrics: Mapping[str, float]) -> None: ...

    def exported(self, role: str, path: Path) -> None: ...


def train(run: TrainingRun, journal: Journal, audience: Audience, steps_per_group: int) -> Mapping[str, Path]:
    """Run the whole graph; returns the folder of each trained role's model. The gang is gone when this returns."""
    with closing(open_gang(len(run.lease.devices), device=run.lease.kind)) as gang:
        dispatcher = Dispatcher(run, gang)
        dispatcher.build(audience.built)
        GraphRunner(run, dispatcher, journal, steps_per_group).run_all(audience.step_ended)
        return _export(run, dispatcher, audience)


def _export(run: TrainingRun, dispatcher: Dispatcher, audience: Audience) -> dict[str, Path]:
    graph, plan = run.augmented.graph, run.augmented.plan
    written: dict[str, Path] = {}
    for model in graph.models:
        instance = trained_instance(graph, plan, model.role)
        if instance is None:
            continue
        written[model.role] = run.run_dir / model.role
        dispatcher.export(instance, written[model.role], model.path)
        audience.exported(model.role, written[model.role])
    return written
