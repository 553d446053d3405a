"""The tracker for TensorBoard: it writes event files into `tensorboard` in the run folder.

Scalars are simple 32-bit values, which scripts read as `EventAccumulator.Scalars`. Tables are text tensors.
"""

import shutil
import time
from collections.abc import Sequence
from typing import final

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text import metadata as text
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.util.tensor_util import make_tensor_proto

from prefect_rlhf.tasks.trackers.tracker import TrackedRun, TrackedStep, flat

FOLDER = "tensorboard"


@final
class TensorBoard:
    """Event files of a run, on disk after each step."""

    def __init__(self, run: TrackedRun) -> None:
        folder = run.run_dir / FOLDER
        if folder.exists():
            shutil.rmtree(folder)
        self._writer = EventFileWriter(str(folder))
        parameters = [["parameter", "value"], *map(list, flat(run.parameters).items())]
        self._write(0, time.time(), [text_value("parameters", parameters)])

    def add(self, step: TrackedStep) -> None:
        """Write a step's scalars and samples as an event."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in step.values.items()]
        tables = [text_value(f"samples/{folder}", table.texts()) for folder, table in step.samples.items()]
        self._write(step.step, step.time, [*values, *tables])

    def close(self, *, has_failed: bool) -> None:
        """Close the file."""
        self._writer.close()

    def _write(self, step: int, at: float, values: Sequence[Summary.Value]) -> None:
        self._writer.add_event(Event(wall_time=at, step=step, summary=Summary(value=values)))
        self._writer.flush()


def text_value(name: str, table: Sequence[Sequence[str]]) -> Summary.Value:
    """Return a table as a text value, with its heading as the first row."""
    metadata = text.create_summary_metadata(name, "")
    return Summary.Value(tag=name, metadata=metadata, tensor=make_tensor_proto(np.array(table, dtype=np.object_)))
