"""The folder of a flow run: the same folder whenever that flow run is started again, by a person or automatically."""

from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from prefect_rlhf.placement.atomic_file import writing
from prefect_rlhf.placement.foreign_file import read_json_object
from prefect_rlhf.placement.remote_path import remote_path
from prefect_rlhf.tasks.checkpoints.elsewhere import publish, recall_folder, recall_owners

OWNER = "flow_run_id"  # this file names the flow run that owns the folder
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
    """Return the result of the run in a folder, or None if it has not reached its end. Raises InvalidInput."""
    file = folder / RESULT
    return read_json_object("output_dir", file, "the result that the run wrote") if file.is_file() else None


def _taken(output_dir: Path, name: str) -> Iterator[Path]:
    for number in count(1):
        folder = _named(output_dir, name, number)
        if not (folder / OWNER if remote_path(folder) else folder).exists():
            return
        yield folder


def _named(output_dir: Path, name: str, number: int) -> Path:
    return output_dir / (name if number == 1 else f"{name}-{number}")
