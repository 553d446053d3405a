"""The tracker that writes event files for TensorBoard, into `tensorboard` of the run's folder.

Scalars are 64-bit tensors, as precise as `metrics.jsonl`; samples are tensors of text, shown as tables.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import final

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.plugins.scalar import metadata as scalar
from tensorboard.plugins.text import metadata as text
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.util.tensor_util import make_tensor_proto

from prefect_rlhf.tasks.trackers.tracker import TrackedRun, TrackedStep

FOLDER = "tensorboard"


@final
class TensorBoard:
    """Event files of one run, on disk after each step."""

    def __init__(self, run: TrackedRun) -> None:
        folder = run.run_dir / FOLDER
        if folder.exists():
            shutil.rmtree(folder)
        self._writer = EventFileWriter(str(folder))

    def add(self, step: TrackedStep) -> None:
        """Write a step's scalars and samples as one event."""
        values = [scalar_value(name, value) for name, value in step.values.items()]
        tables = [text_value(f"samples/{folder}", table.texts()) for folder, table in step.samples.items()]
        self._writer.add_event(Event(wall_time=step.time, step=step.step, summary=Summary(value=[*values, *tables])))
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def scalar_value(name: str, value: float) -> Summary.Value:
    """Return a number under a name, in 64 bits."""
    metadata = scalar.create_summary_metadata(name, "")
    return _value(name, metadata, make_tensor_proto(np.float64(value)))


def text_value(name: str, table: Sequence[Sequence[str]]) -> Summary.Value:
    """Return a table of text, its heading as the first row."""
    metadata = text.create_summary_metadata(name, "")
    return _value(name, metadata, make_tensor_proto(np.array(table, dtype=np.object_)))


def _value(name: str, metadata: SummaryMetadata, tensor: TensorProto) -> Summary.Value:
    return Summary.Value(tag=name, metadata=metadata, tensor=tensor)
