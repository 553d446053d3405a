"""Mirrors the run folders of a remote output_dir: which files are downloaded, and when files are uploaded.

A run writes into a mirror on this machine. The store has the last word: checkpoints that it lacks are deleted from the
mirror too.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

from prefect_rlhf.files.remote_path import remote_path
from prefect_rlhf.files.storage.live import is_live
from prefect_rlhf.files.storage.live import writing_to as writing_to
from prefect_rlhf.files.storage.mirror import fetch
from prefect_rlhf.files.storage.publish import check_writable as check_writable
from prefect_rlhf.files.storage.publish import names_at_store, withdraw
from prefect_rlhf.files.storage.publish import publish as publish

MANIFEST = "checkpoint.json"
CHECKPOINTS = "checkpoints"
LARGE = (".safetensors", ".parquet")


def recall_owners(output_dir: Path, name: str, files: tuple[str, ...]) -> None:
    """Download the named files of all run folders that begin with `name`."""
    _recall(output_dir, lambda found: found.startswith(name) and found.partition("/")[2] in files, "output_dir")


def recall_manifests(output_dir: Path) -> None:
    """Download the manifests of all finished checkpoints of all runs."""
    _recall(output_dir, lambda name: name.endswith(f"/{MANIFEST}"), "output_dir")
    for run in output_dir.glob("*"):
        _forget_others(run)


def recall_records(output_dir: Path) -> None:
    """Download the records of all runs: parameters, state and metrics."""
    _recall(output_dir, lambda name: name.count("/") < 2 and not name.endswith((*LARGE, ".svg")), "folder")


def recall_folder(folder: Path, field: str) -> None:
    """Download a run's or checkpoint's folder without its large files."""
    _recall(folder, lambda name: not name.endswith(LARGE), field)
    _forget_others(folder)


def recall_checkpoint(folder: Path, field: str) -> None:
    """Download a whole checkpoint, and its run's step-by-step records."""
    own, run = f"{CHECKPOINTS}/{folder.name}/", folder.parent.parent

    def wanted(name: str) -> bool:
        return name.startswith(own) or name.count("/") < 2 and name.endswith((".jsonl", ".parquet"))

    _recall(run, wanted, field)


def publish_record(run_dir: Path) -> None:
    """Upload the files directly in a run's folder, which are its records so far."""
    if remote_path(run_dir) is not None:
        for file in sorted(path for path in run_dir.iterdir() if path.is_file() and path.suffix != ".part"):
            publish(file)


def publish_checkpoint(folder: Path) -> None:
    """Finish a checkpoint in the store by uploading its manifest. The ranks have already uploaded the shards."""
    if remote_path(folder) is not None:
        publish_record(folder.parent.parent)
        publish(folder / MANIFEST)


def withdraw_checkpoint(folder: Path) -> None:
    """Delete a checkpoint from the store, manifest first, so that the rest never counts as a checkpoint."""
    withdraw(folder, first=MANIFEST)


def withdraw_unfinished(run_dir: Path) -> None:
    """Delete the files of unfinished checkpoints from the store."""
    found = names_at_store(run_dir / CHECKPOINTS)
    steps = {name.partition("/")[0] for name in found}
    for step in sorted(step for step in steps if f"{step}/{MANIFEST}" not in found):
        withdraw(run_dir / CHECKPOINTS / step)


def _recall(folder: Path, wanted: Callable[[str], bool], field: str) -> None:
    url = remote_path(folder)
    if url is not None:
        fetch(url, field, wanted, may_be_absent=True)


def _forget_others(run_dir: Path) -> None:
    """Delete checkpoints in the mirror that the store lacks, unless a live process writes the run."""
    if remote_path(run_dir) is None or is_live(run_dir):
        return
    for folder in (run_dir / CHECKPOINTS).glob("step-*[0-9]"):
        if not (folder / MANIFEST).is_file():
            shutil.rmtree(folder)
