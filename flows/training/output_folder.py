"""The folder that a run writes to: whether it can be written, and has room for what the run will leave there."""

from __future__ import annotations

import shutil
from math import ceil
from pathlib import Path
from tempfile import TemporaryFile

from prefect_rlhf.flows.forms.options import RunOptions
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.memory.bytes import byte_size
from prefect_rlhf.placement.path_text import checked_path
from prefect_rlhf.placement.remote_path import is_remote, writable_path
from prefect_rlhf.tasks.checkpoints.elsewhere import check_writable

FIELD = "output_dir"
CHECKPOINT_BYTES = 12  # of a parameter: its main weight and two moments, in float32


def check_output_folder(options: RunOptions, graph: DataflowGraph, kept: Path | None = None) -> None:
    """Raise InvalidInput unless `output_dir` can be written and has room for checkpoints and trained models.

    `kept` is the folder of a checkpoint where this very run goes on: those beside it have their room already.
    """
    folder = output_folder(options)
    if is_remote(options.output_dir):
        check_writable(options.output_dir)
    there = _writable_part(folder)
    written = len(list(kept.parent.glob("step-*[0-9]"))) if kept else 0
    needed = needed_bytes(graph, options, written)
    free = shutil.disk_usage(there).free
    if free < needed:
        expected = f"{byte_size(needed)}, which its checkpoints (keep_checkpoints) and trained models take"
        raise InvalidInput(FIELD, f"{byte_size(free)} free in {there}", expected)


def output_folder(options: RunOptions) -> Path:
    """Return the folder that a run's own is made in; of a remote one its mirror."""
    if is_remote(options.output_dir):
        return writable_path(options.output_dir, FIELD)
    return checked_path(FIELD, options.output_dir).expanduser().resolve()


def needed_bytes(graph: DataflowGraph, options: RunOptions, written: int = 0) -> int:
    """Return the most bytes that a run has on disk at once, of its checkpoints and exports.

    One checkpoint more than are kept is there while the newest is being written; `written` ones are there already.
    """
    trained = [model for model in graph.models if graph.trained_by(model.role)] if options.steps else []
    sizes = [ModelSizes.of(model) for model in trained]
    checkpoints = 0
    if options.checkpoint_every is not None:
        checkpoints = min(options.keep_checkpoints + 1, ceil(options.steps / options.checkpoint_every))
    per_checkpoint = CHECKPOINT_BYTES * sum(size.num_parameters for size in sizes)
    exports = sum(size.num_parameters * size.item for size in sizes)
    return max(0, checkpoints - written) * per_checkpoint + exports


def _writable_part(folder: Path) -> Path:
    """Return the folder, or that above it in which it will be made. Raises InvalidInput unless it can be written."""
    try:
        there = next(path for path in (folder, *folder.parents) if path.exists() or path.is_symlink())
        if not there.is_dir():
            raise InvalidInput(FIELD, str(folder), f"a folder; {there} is none")
        with TemporaryFile(dir=there):
            return there
    except OSError as error:
        raise InvalidInput(FIELD, str(folder), f"a folder that can be written ({error.strerror})") from error
