"""Run folders of a remote output_dir: what of them is brought to this machine, and when what is sent there.

A run writes into the folder's mirror. The store says what there is: what it does not have is forgotten here, too.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from prefect_rlhf.engines.storage.live import is_live
from prefect_rlhf.engines.storage.live import writing_to as writing_to
from prefect_rlhf.engines.storage.mirror import fetch
from prefect_rlhf.engines.storage.publish import check_writable as check_writable
from prefect_rlhf.engines.storage.publish import names_at_store, withdraw
from prefect_rlhf.engines.storage.publish import publish as publish
from prefect_rlhf.placement.remote_path import remote_path

MANIFEST = "checkpoint.json"
CHECKPOINTS = "checkpoints"
LARGE = (".safetensors", ".parquet")


def recall_owners(output_dir: Path, name: str, files: tuple[str, ...]) -> None:
    """Bring the named files of those run folders whose names begin with `name`."""
    _recall(output_dir, lambda found: found.startswith(name) and found.partition("/")[2] in files, "output_dir")


def recall_manifests(output_dir: Path) -> None:
    """Bring what says which runs have finished which checkpoints."""
    _recall(output_dir, lambda name: name.endswith(f"/{MANIFEST}"), "output_dir")
    for run in output_dir.glob("*"):
        _forget_others(run)


def recall_folder(folder: Path, field: str) -> None:
    """Bring the folder of a run or of a checkpoint, without what is large in it."""
    _recall(folder, lambda name: not name.endswith(LARGE), field)
    _forget_others(folder)


def recall_checkpoint(folder: Path, field: str) -> None:
    """Bring all of a checkpoint, and what its run wrote down step by step."""
    own, run = f"{CHECKPOINTS}/{folder.name}/", folder.parent.parent

    def wanted(name: str) -> bool:
        return name.startswith(own) or name.count("/") < 2 and name.endswith((".jsonl", ".parquet"))

    _recall(run, wanted, field)


def publish_record(run_dir: Path) -> None:
    """Send the files that lie in a run's folder itself: what it wrote down so far."""
    if remote_path(run_dir) is not None:
        for file in sorted(path for path in run_dir.iterdir() if path.is_file() and path.suffix != ".part"):
            publish(file)


def publish_checkpoint(folder: Path) -> None:
    """Make a finished checkpoint, whose shards were sent by those who wrote them, one at the store: its manifest."""
    if remote_path(folder) is not None:
        publish_record(folder.parent.parent)
        publish(folder / MANIFEST)


def withdraw_checkpoint(folder: Path) -> None:
    """Delete a checkpoint at the store; from the first moment on it is none there."""
    withdraw(folder, first=MANIFEST)


def withdraw_unfinished(run_dir: Path) -> None:
    """Delete what the store has of checkpoints that were never finished."""
    found = names_at_store(run_dir / CHECKPOINTS)
    steps = {name.partition("/")[0] for name in found}
    for step in sorted(step for step in steps if f"{step}/{MANIFEST}" not in found):
        withdraw(run_dir / CHECKPOINTS / step)


def _recall(folder: Path, wanted: Callable[[str], bool], field: str) -> None:
    url = remote_path(folder)
    if url is not None:
        fetch(url, field, wanted, may_be_absent=True)


def _forget_others(run_dir: Path) -> None:
    """Remove checkpoints of the mirror that the store does not have; not of a run that a live process writes."""
    if remote_path(run_dir) is None or is_live(run_dir):
        return
    for folder in (run_dir / CHECKPOINTS).glob("step-*[0-9]"):
        if not (folder / MANIFEST).is_file():
            shutil.rmtree(folder)
