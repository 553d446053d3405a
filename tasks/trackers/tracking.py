"""The parameter for a run's trackers: which trackers, the names of metrics, and the number of samples."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.errors.install_command import install_command
from prefect_rlhf.errors.wrong_setting import not_used
from prefect_rlhf.files.path_text import printable
from prefect_rlhf.tasks.settings import MOST_STEPS, Settings
from prefect_rlhf.tasks.trackers.names import Names

TrackerName = Literal["tensorboard", "mlflow", "wandb"]


class Tracking(Settings):
    """Trackers that show a run's metrics in addition to Prefect; by default no tracker."""

    report_to: list[TrackerName] = Field([], max_length=8, description="Trackers, each once, such as [tensorboard].")
    names: Names = Field(
        "verl", description="Whose names metrics have: verl's, trl's, or our own; a metric that they lack keeps ours."
    )
    project: Annotated[str, AfterValidator(printable)] = Field(
        "prefect-rlhf", min_length=1, max_length=200, description="Project that groups runs for comparison."
    )
    samples: int = Field(
        4, ge=0, le=100, description="How many rows per step to show with prompt, response and reward."
    )
    samples_every: int = Field(
        10, ge=1, le=MOST_STEPS, description="Show rollouts every so many steps; evaluations are always shown."
    )

    @field_validator("report_to")
    @classmethod
    def _each_once(cls, report_to: list[TrackerName]) -> list[TrackerName]:
        if len(set(report_to)) < len(report_to):
            raise InvalidInput("tracking.report_to", report_to, "each tracker once")
        return report_to

    @model_validator(mode="after")
    def _is_used(self) -> Tracking:
        given = self.model_dump(exclude_defaults=True)
        if given and not self.report_to:
            raise not_used(next(iter(given)), "report_to names no tracker", "set report_to, such as [tensorboard]")
        return self


def check_trackers(tracking: Tracking) -> None:
    """Raise InvalidInput for a tracker that is not installed; its extra has the same name.

    A folder of that name in the working folder, such as W&B's own, does not count as a package.
    """
    for name in tracking.report_to:
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            raise InvalidInput("tracking.report_to", name, f"an installed tracker: {install_command(name)}")
