"""A run's checkpoints as the controller sees them: it finds, checks, finishes and deletes them, but never loads them.

    <run>/checkpoints/step-000004/checkpoint.json              the manifest; written last
    <run>/checkpoints/step-000004/actor.trunk/shard-00000.*    written by the ranks
    <run>/checkpoints/step-000006.part/                        not finished: never read

A step's folder is named after the number of finished steps, and the folders in it after the trained sets of weights.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from prefect_rlhf.engines.files.checkpoint_files import (
    WHOLE,
    check_coverage,
    read_index,
    shard_indexes,
    write_json,
)
from prefect_rlhf.engines.files.saved_state import SavedState
from prefect_rlhf.engines.weights.versions import Fingerprint
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.atomic_file import flush_to_disk, remove_unfinished
from prefect_rlhf.files.foreign_file import read_json
from prefect_rlhf.files.path_text import resolved
from prefect_rlhf.files.remote_path import shown
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.models.weights import Weights
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.plans.plan_file import plan_yaml
from prefect_rlhf.tasks.checkpoints.elsewhere import (
    MANIFEST,
    publish_checkpoint,
    recall_checkpoint,
    recall_folder,
    recall_manifests,
    withdraw_checkpoint,
    withdraw_unfinished,
)
from prefect_rlhf.tasks.checkpoints.lineage import Lineage
from prefect_rlhf.tasks.checkpoints.run_identity import first_difference, with_defaults

LATEST = "latest"
UNFINISHED = ".part"
PARAMETER = "resume_from"  # as errors name it
FORMAT = 5
"""The format of manifests. Format 1 stored module paths for operations, 2 did not store a train_step's losses by name,
3's records count steps from 0, and 4 had a folder for each role."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything in a checkpoint except its shards."""

    step: int
    """So many steps are finished; all trained weights have this version."""
    plan: str
    identity: dict[str, Any]
    """The run's."""
    fingerprints: dict[str, dict[str, int]]
    """Of every weight set by name, including frozen sets."""
    states: dict[str, SavedState]
    shards: dict[str, dict[str, str]]
    """The checksum of each index file, by weight set and file name."""
    lineage: Lineage = field(default_factory=Lineage)
    """The run's parameters, and which of them changed on the way."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A finished checkpoint on disk."""

    folder: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step

    def shards(self, weights: str) -> tuple[Path, ...]:
        """Return the index files of a weight set's shards."""
        return tuple(self.folder / weights / name for name in self.manifest.shards[weights])

    def unfinished(self) -> tuple[str, ...]:
        """Return the names of folders next to it that were not finished; no code reads them."""
        return tuple(sorted(path.name for path in self.folder.parent.glob(f"*{UNFINISHED}")))


def folder_of(run_dir: Path, step: int) -> Path:
    """Return the folder of a run's checkpoint after `step` steps.

    >>> str(folder_of(Path("runs/mine"), 4))
    'runs/mine/checkpoints/step-000004'
    """
    return run_dir / "checkpoints" / f"step-{step:06d}"


def beside(folder: Path) -> Path:
    """Return the folder to use while a checkpoint is written or deleted: its final name always means a whole
    checkpoint.
    """
    return folder.with_name(folder.name + UNFINISHED)


def finish(
    graph: DataflowGraph,
    plan: ExecutionPlan,
    run_dir: Path,
    step: int,
    identity: dict[str, Any],
    fingerprints: Mapping[str, Fingerprint],
    states: Mapping[str, SavedState],
    lineage: Lineage | None = None,
) -> Path:
    """Add the manifest to the ranks' shards and rename the folder, which makes it the newest checkpoint.

    Raises InvalidInput, without renaming, unless the shards hold every element of all trained weights exactly once.
    """
    folder = folder_of(run_dir, step)
    part = beside(folder)
    trained = [own for own in graph.all_weights() if own.trained]
    shards = {own.name: shard_indexes(part / own.name) for own in trained}
    for own in trained:
        _check_shards(own, shards[own.name])
    manifest = Manifest(
        step=step,
        plan=plan_yaml(plan),
        identity=identity,
        fingerprints={name: dict(fingerprint) for name, fingerprint in fingerprints.items()},
        states=dict(states),
        shards={name: {i.name: _checksum(i.read_bytes()) for i in indexes} for name, indexes in shards.items()},
        lineage=lineage or Lineage(),
    )
    content = asdict(manifest)
    header = {"format": FORMAT, "written_by": f"prefect-rlhf {version('prefect-rlhf')}"}
    write_json(part / MANIFEST, header | {"manifest": content, "checksum": _checksum(_canonical(content))})
    for path in (*(part / name for name in shards), part):
        flush_to_disk(path)
    part.rename(folder)
    flush_to_disk(folder.parent)
    publish_checkpoint(folder)
    return folder


def keep_newest(run_dir: Path, number: int, spared: Path | None = None) -> None:
    """Delete all finished checkpoints of a run except the newest `number` and `spared`.

    Each folder is renamed first, so a crash leaves no partial checkpoint under a final name.
    """
    for folder in (folder for folder in _finished(run_dir)[:-number] if folder != spared):
        folder.rename(beside(folder))
        shutil.rmtree(beside(folder))
        withdraw_checkpoint(folder)


def clear_unfinished(run_dir: Path) -> None:
    """Delete a run's unfinished checkpoints, exports and other files. Only the run itself may do this, after all its
    ranks have ended.
    """
    for part in (run_dir / "checkpoints").glob(f"*{UNFINISHED}"):
        shutil.rmtree(part, ignore_errors=True)
    remove_unfinished(run_dir)
    withdraw_unfinished(run_dir)


def newest_finished(run_dir: Path) -> Path | None:
    """Return the folder of a run's newest finished checkpoint, or None."""
    return next(reversed(_finished(run_dir)), None)


def newest_checkpoint(place: Path) -> Checkpoint:
    """Return the checkpoint that a run in this folder finished last. Raises InvalidInput as `checkpoint_in`."""
    recall_manifests(place)
    runs = (run for run in place.glob("*") if not run.is_symlink())
    newest = [folder for run in runs if (folder := newest_finished(run))]
    if not newest:
        raise InvalidInput(PARAMETER, LATEST, f"a run in {shown(place)} that finished a checkpoint")
    return _read(max(newest, key=lambda folder: (folder / MANIFEST).stat().st_mtime).resolve())


def checkpoint_in(place: Path) -> Checkpoint:
    """Return the checkpoint in a folder, or the newest in a run's folder.

    Raises InvalidInput if the checkpoint is missing, was changed, or has an older format.
    """
    path, seen = resolved(place), shown(place)
    recall_folder(path, PARAMETER)
    if not path.is_dir():
        raise InvalidInput(PARAMETER, seen, f"the folder of a run or of a checkpoint, or {LATEST!r}")
    if path.suffix == UNFINISHED:
        raise InvalidInput(PARAMETER, seen, "a finished checkpoint; the writing of this folder was interrupted")
    folder = path if (path / MANIFEST).is_file() else newest_finished(path)
    if folder is None:
        raise InvalidInput(PARAMETER, seen, "a folder with a finished checkpoint")
    return _read(folder)


def _read(folder: Path) -> Checkpoint:
    recall_checkpoint(folder, PARAMETER)
    return read_checkpoint(folder)


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read a finished checkpoint's manifest; check that its shards exist and have their original length."""
    try:
        stored = read_json(folder / MANIFEST)
        is_whole = stored["checksum"] == _checksum(_canonical(stored["manifest"]))
        _check_format(folder, stored)
        manifest = TypeAdapter(Manifest).validate_python(stored["manifest"])
    except InvalidInput:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ValidationError) as error:
        raise InvalidInput(PARAMETER, f"an unreadable {folder / MANIFEST}", WHOLE) from error
    if not is_whole:
        raise InvalidInput(PARAMETER, f"other content of {folder / MANIFEST}", WHOLE)
    for weights, shards in manifest.shards.items():
        for name, checksum in shards.items():
            read_index(folder / weights / name, weights)
            if _checksum((folder / weights / name).read_bytes()) != checksum:
                raise InvalidInput(f"checkpoint.{weights}", f"other content of {folder / weights / name}", WHOLE)
    return Checkpoint(folder, manifest)


def check_resumable(
    checkpoint: Checkpoint,
    graph: DataflowGraph,
    identity: Mapping[str, Any],
    num_steps: int,
    has_ended: bool,
) -> None:
    """Raise InvalidInput unless a run of `graph` with this `identity` can resume from the checkpoint up to `num_steps`.

    Work must be left: steps or, unless the run `has_ended`, the work after its last step.
    """
    difference = first_difference(with_defaults(checkpoint.manifest.identity, graph), identity)
    if difference is not None:
        path, saved, now = difference
        raise InvalidInput(PARAMETER, f"a checkpoint with {path} {saved!r}", f"{now!r}, as in this run")
    if num_steps < checkpoint.step + has_ended:
        bound = "more than" if has_ended else "at least"
        expected = f"{bound} {checkpoint.step}, the steps that {checkpoint.folder.name} has finished"
        raise InvalidInput("steps", num_steps, expected)
    for own in graph.all_weights():
        if own.trained:
            _check_shards(own, checkpoint.shards(own.name))


def _check_format(folder: Path, stored: Mapping[str, Any]) -> None:
    if stored.get("format") != FORMAT:
        author = stored.get("written_by", "prefect-rlhf 0.1.0 without a format number")
        raise InvalidInput(
            PARAMETER,
            f"{folder / MANIFEST}, written by {author}",
            f"a checkpoint of format {FORMAT}; finish the run with that version, or start a new run from the Hugging "
            "Face folders that it exports after its last step",
        )


def _check_shards(weights: Weights, indexes: Sequence[Path]) -> None:
    shapes = {parameter.name: parameter.shape for parameter in weights.parameters}
    check_coverage(weights.name, [read_index(index, weights.name) for index in indexes], shapes)


def _finished(run_dir: Path) -> list[Path]:
    """Return the finished checkpoints of a run, oldest first."""
    return sorted(path.parent for path in (run_dir / "checkpoints").glob(f"step-*[0-9]/{MANIFEST}"))


def _canonical(content: object) -> bytes:
    return json.dumps(content, sort_keys=True).encode()


def _checksum(content: bytes) -> str:
    return blake2b(content, digest_size=8).hexdigest()
