"""Checks that the output folder is writable and has room for the run's checkpoints and models."""

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
CHECKPOINT_BYTES = 12  # per parameter: its main weight and two moments, in float32


def check_output_folder(options: RunOptions, graph: DataflowGraph, kept: Path | None = None) -> None:
    """Raise InvalidInput unless `output_dir` is writable and has room for checkpoints and trained models.

    `kept` is the folder of a checkpoint if this same run continues from it. The existing checkpoints next to it need no
    new room.
    """
    folder = output_folder(options)
    if is_remote(options.output_dir):
        check_writable(options.output_dir)
    there = _writable_part(folder)
    written = len(list(kept.parent.glob("step-*[0-9]"))) if kept else 0
    needed = needed_bytes(graph, options, written)
    free = shutil.disk_usage(there).free
    if free < needed:
        expected = f"{byte_size(needed)} for checkpoints (keep_checkpoints) and trained models"
        raise InvalidInput(FIELD, f"{byte_size(free)} free in {there}", expected)


def output_folder(options: RunOptions) -> Path:
    """Return the folder that contains the run's folder; for a remote folder, its local mirror."""
    if is_remote(options.output_dir):
        return writable_path(options.output_dir, FIELD)
    return checked_path(FIELD, options.output_dir).expanduser().resolve()


def needed_bytes(graph: DataflowGraph, options: RunOptions, written: int = 0) -> int:
    """Return the most bytes of checkpoints and exports that a run adds to the disk at any time.

    `keep_checkpoints + 1` checkpoints exist while the newest is being written; `written` of them exist already.
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
    """Return the folder, or its nearest existing parent. Raises InvalidInput unless that is a writable folder."""
    try:
        there = next(path for path in (folder, *folder.parents) if path.exists() or path.is_symlink())
        if not there.is_dir():
            raise InvalidInput(FIELD, str(folder), f"a folder; {there} is not a folder")
        with TemporaryFile(dir=there):
            return there
    except OSError as error:
        raise InvalidInput(FIELD, str(folder), f"a writable folder ({error.strerror})") from error
