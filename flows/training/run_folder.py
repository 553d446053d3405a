"""A flow run's folder: it stays the same whenever the flow run is restarted, by a person or automatically.

Before a run, the output folder is checked: it must be writable and have room for checkpoints and models.
"""

import shutil
from collections.abc import Iterator, Mapping
from itertools import count
from math import ceil
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.atomic_file import writing
from prefect_rlhf.files.foreign_file import read_json_object
from prefect_rlhf.files.remote_path import remote_path
from prefect_rlhf.flows.training.spec.place import FIELD
from prefect_rlhf.flows.training.spec.run_spec import RunSpec
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.memory.bytes import byte_size
from prefect_rlhf.placement.models.engine_constants import MAIN_WEIGHT_BYTES
from prefect_rlhf.tasks.checkpoints.elsewhere import check_writable, publish, recall_folder, recall_owners
from prefect_rlhf.tasks.reporting.run_record import OWNER

LATEST = "latest"  # a link to the folder of the run that ended last
COMMITS = "hub_commits.json"  # the commit of each repository on the Hub that the run reads, by repository and branch
RESULT = "result.json"  # the result of the flow run; written last


def earlier_folder(output_dir: Path, name: str, flow_run_id: str) -> Path | None:
    """Return the folder of an earlier attempt at this flow run, or None at the first attempt."""
    recall_owners(output_dir, name, (OWNER, RESULT))
    owners = ((folder, folder / OWNER) for folder in _taken(output_dir, name))
    folder = next((folder for folder, owner in owners if owner.is_file() and owner.read_text() == flow_run_id), None)
    if folder is not None:
        recall_folder(folder, "output_dir")
    return folder


def new_folder(output_dir: Path, name: str, flow_run_id: str) -> Path:
    """Make `output_dir/name`, with a number after it if another flow run has used that name.

    Raises OutputFailed if the folder cannot be made.
    """
    folder = _named(output_dir, name, 1 + sum(1 for _ in _taken(output_dir, name)))
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=remote_path(folder) is not None)
        (folder / OWNER).write_text(flow_run_id)
    publish(folder / OWNER)
    return folder


def read_result(folder: Path) -> Mapping[str, Any] | None:
    """Return the result of the run in a folder; None if it has not reached its end. Raises InvalidInput."""
    file = folder / RESULT
    return read_json_object("output_dir", file, "the result that the run wrote") if file.is_file() else None


def read_commits(folder: Path) -> Mapping[str, str]:
    """Return the commits on the Hub that an earlier attempt read, by repository and branch; empty without any."""
    file = folder / COMMITS
    return read_json_object(FIELD, file, "the commits that the run wrote") if file.is_file() else {}


def _taken(output_dir: Path, name: str) -> Iterator[Path]:
    for number in count(1):
        folder = _named(output_dir, name, number)
        if not (folder / OWNER if remote_path(folder) else folder).exists():
            return
        yield folder


def _named(output_dir: Path, name: str, number: int) -> Path:
    return output_dir / (name if number == 1 else f"{name}-{number}")


CHECKPOINT_BYTES = 12  # per parameter: its main weight and two moments, in float32


def check_output_folder(spec: RunSpec, graph: DataflowGraph, kept: Path | None = None) -> None:
    """Raise InvalidInput unless the run's place is writable and has room for checkpoints and trained models.

    `kept` is the checkpoint's folder if the same run continues from it; the checkpoints next to it need no new room.
    """
    folder = spec.place.folder
    if spec.place.url is not None:
        check_writable(spec.place.url)
    there = _writable_part(folder)
    check_latest(folder)
    written = len(list(kept.parent.glob("step-*[0-9]"))) if kept else 0
    needed = needed_bytes(graph, spec, written)
    free = shutil.disk_usage(there).free
    if free < needed:
        expected = f"{byte_size(needed)} for checkpoints (keep_checkpoints) and trained models"
        raise InvalidInput(FIELD, f"{byte_size(free)} free in {there}", expected)


def check_latest(folder: Path) -> None:
    """Raise InvalidInput if `latest` is a file or folder, because a finished run makes it a link to its own folder."""
    latest = folder / LATEST
    if latest.exists() and not latest.is_symlink():
        kind = "folder" if latest.is_dir() else "file"
        right = f"a folder without a {kind} of that name: a run makes {LATEST} a link to its own folder"
        raise InvalidInput(FIELD, str(latest), right)


def needed_bytes(graph: DataflowGraph, spec: RunSpec, written: int = 0) -> int:
    """Return the peak disk use that a run adds, in bytes, for checkpoints and exports.

    `keep_checkpoints + 1` checkpoints exist while the newest is being written; `written` of them exist already.
    """
    trained = [model for model in graph.models if graph.trained_by(model.role)] if spec.steps else []
    sizes = [ModelSizes.of(model) for model in trained]
    checkpoints = 0
    if spec.checkpoint_every is not None:
        checkpoints = min(spec.keep_checkpoints + 1, ceil(spec.steps / spec.checkpoint_every))
    per_checkpoint = CHECKPOINT_BYTES * sum(size.num_trained for size in sizes)
    if spec.steps:
        followers = [ModelSizes.of(model) for model in graph.models if model.follows]
        per_checkpoint += MAIN_WEIGHT_BYTES * sum(size.num_trained for size in followers)
    exports = sum((size.num_trained if size.adapter else size.num_parameters) * size.item for size in sizes)
    if spec.export_merged:
        exports += sum(size.base.num_parameters * size.item for size in sizes if size.adapter)
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
