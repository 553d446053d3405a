"""The tracker for MLflow: the store of MLFLOW_TRACKING_URI, or `mlflow.db` next to the run folder."""

import json
import logging
import os
import re
from typing import Any, final

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag

from prefect_rlhf.tasks.trackers.tracker import TrackedRun, TrackedStep, flat

DATABASE = "mlflow.db"
ARTIFACTS = "mlflow"
FOLDER_TAG = "prefect_rlhf.run_dir"
TABLES_TAG = "mlflow.loggedArtifacts"  # in this tag, MLflow's log_table lists the artifacts that its UI shows as tables
UNUSUAL = re.compile(r"[^\w/. :-]")  # characters that MLflow refuses in names
MOST_PARAMS = 100  # of a batch; MLflow's limit
MOST_CHARACTERS = 500  # of a parameter's value


@final
class MLflow:
    """A run in the experiment named after the project."""

    def __init__(self, run: TrackedRun) -> None:
        for name in ("mlflow", "alembic"):  # they log many lines for a new database
            logging.getLogger(name).setLevel(logging.WARNING)
        address = os.environ.get("MLFLOW_TRACKING_URI")
        self._client = MlflowClient(address or f"sqlite:///{run.run_dir.parent.resolve() / DATABASE}")
        experiment = self._experiment(run, None if address else (run.run_dir.parent / ARTIFACTS).resolve().as_uri())
        folder = str(run.run_dir)
        for earlier in self._client.search_runs([experiment], f"tags.`{FOLDER_TAG}` = '{folder}'"):
            self._client.delete_run(earlier.info.run_id)
        tags = {FOLDER_TAG: folder}
        self._id = self._client.create_run(experiment, tags=tags, run_name=run.name).info.run_id
        params = [
            Param(UNUSUAL.sub("_", name), value[:MOST_CHARACTERS]) for name, value in flat(run.parameters).items()
        ]
        for first in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self._id, params=params[first : first + MOST_PARAMS])
        self._tables: list[dict[str, str]] = []

    def _experiment(self, run: TrackedRun, artifacts: str | None) -> str:
        found: Any = self._client.get_experiment_by_name(run.project)
        if found is not None:
            return str(found.experiment_id)
        return str(self._client.create_experiment(run.project, artifact_location=artifacts))

    def add(self, step: TrackedStep) -> None:
        """Write a step's metrics as a batch, and each table of samples as an artifact that MLflow shows as a table."""
        time_ms = round(step.time * 1000)
        metrics = [Metric(_plain(name), value, time_ms, step.step) for name, value in step.values.items()]
        self._client.log_batch(self._id, metrics=metrics)
        for folder, table in step.samples.items():
            path = f"samples/{folder}/step-{step.step:06d}.json"
            self._client.log_dict(self._id, {"columns": table.columns, "data": table.rows}, path)
            self._tables.append({"path": path, "type": "table"})
            self._client.log_batch(self._id, tags=[RunTag(TABLES_TAG, json.dumps(self._tables))])

    def close(self, *, has_failed: bool) -> None:
        """Record how the run ended."""
        self._client.set_terminated(self._id, "FAILED" if has_failed else "FINISHED")


def _plain(name: str) -> str:
    """Return the name of a metric without characters that MLflow refuses.

    >>> _plain("evaluation_math/pass@4")
    'evaluation_math/pass_at_4'
    """
    return UNUSUAL.sub("_", name.replace("@", "_at_"))
