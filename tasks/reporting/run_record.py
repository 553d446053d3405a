"""A run's record in its folder: its parameters, version, start time and state.

`parameters.yaml` is for `--parameters`; `run.json` has the rest. While a run trains it locks the file that names its
owner, so a killed run can be told from a living run.
"""

import fcntl
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from prefect.exceptions import Pause, TerminationSignal

from prefect_rlhf.errors.errors import InvalidInput, RlhfError
from prefect_rlhf.errors.in_short import in_short, one_line
from prefect_rlhf.files.atomic_file import write_atomically
from prefect_rlhf.files.foreign_file import read_json_object
from prefect_rlhf.files.installed import OwnVersion
from prefect_rlhf.files.storage.publish import publish
from prefect_rlhf.files.yaml_text import read_yaml, to_yaml

PARAMETERS = "parameters.yaml"
RECORD = "run.json"
OWNER = "flow_run_id"  # this file names the flow run that owns the folder
LOCK_SECONDS = 2.0  # to wait for a reader of the lock

State = Literal["running", "completed", "stopped", "failed"]
Changes = Callable[[Mapping[str, Any], Mapping[str, Any]], Iterator[tuple[str, Any, Any]]]


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run's record."""

    algorithm: str
    command: str | None
    """Starts it again with `parameters.yaml`; None for an algorithm defined in a notebook."""
    version: str
    commit: str | None
    steps: int
    began: str
    """A time in UTC."""
    state: State = "running"
    why: str | None = None
    """The reason for a failure or a stop, in one line."""

    @classmethod
    def read(cls, run_dir: Path) -> "RunRecord":
        """Read the record in a run's folder. Raises InvalidInput if it is missing or damaged."""
        expected = "the record that a run writes into its folder"
        values = read_json_object("run_dir", run_dir / RECORD, expected)
        try:
            found = cls(**values)
        except TypeError as error:
            raise InvalidInput("run_dir", str(run_dir / RECORD), expected) from error
        texts = (found.algorithm, found.version, found.began, found.state)
        if not all(isinstance(each, str) for each in texts) or not isinstance(found.steps, int):
            raise InvalidInput("run_dir", str(run_dir / RECORD), expected)
        return found

    def write(self, run_dir: Path) -> None:
        """Write the record into the run's folder."""
        text = json.dumps(asdict(self), indent=1) + "\n"
        publish(write_atomically(run_dir / RECORD, lambda part: part.write_text(text, encoding="utf-8")))


def new_record(algorithm: str, command: str | None, version: OwnVersion, steps: int) -> RunRecord:
    """Return the record of a run that begins now."""
    return RunRecord(algorithm, command, version.version, version.commit, steps, _now())


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def keep_parameters(
    run_dir: Path, record: RunRecord, parameters: Mapping[str, Any], changed: Changes, resumed: Path | None = None
) -> None:
    """Write `parameters.yaml`, with comment lines that name version and command. A file of the same run is kept.

    In that case a line says that the run was restarted, and a line names each parameter that has changed. `resumed` is
    the folder of another run that this run continues; parameters that differ from it are comment lines.
    """
    file, of = run_dir / PARAMETERS, f"prefect-rlhf {OwnVersion(record.version, record.commit)}"
    if file.is_file():
        again = f"began again on {_now()}, {of}"
        text = file.read_text(encoding="utf-8") + comments([again, *_changes(run_dir, parameters, changed)])
    else:
        came = [] if resumed is None else [f"continues {resumed}", *_changes(resumed, parameters, changed)]
        start = (
            [f"the same run again, in {Path.cwd()}:", f"  {record.command}"]
            if record.command
            else ["the algorithm is defined in a notebook: no command starts it"]
        )
        about = f"algorithm {record.algorithm}, {of}, began on {record.began}"
        text = comments([f"all parameters of {run_dir.name}, with the defaults that it used", about, *start, *came])
        text += to_yaml(dict(parameters))
    write_atomically(file, lambda part: part.write_text(text, encoding="utf-8"))


def _changes(earlier: Path, parameters: Mapping[str, Any], changed: Changes) -> Sequence[str]:
    try:
        before = read_parameters(earlier)
    except InvalidInput:  # it was removed
        return ()
    return [f"  {name}: {in_short(one)} became {in_short(other)}" for name, one, other in changed(before, parameters)]


def comments(lines: Sequence[str]) -> str:
    r"""Return lines as YAML comments, without characters that would end a comment.

    >>> comments(["one", "two\nthree"])
    '# one\n# two three\n'
    """
    return "".join(f"# {one_line(line)}\n" for line in lines)


def read_parameters(run_dir: Path) -> dict[str, Any]:
    """Return the parameters in a run's folder, nested as in the file. Raises InvalidInput if they cannot be read."""
    found = read_yaml("run_dir", run_dir / PARAMETERS)
    if not isinstance(found, dict):
        raise InvalidInput("run_dir", str(run_dir / PARAMETERS), "the parameters that a run writes into its folder")
    return found


@contextmanager
def recorded(run_dir: Path, record: RunRecord) -> Iterator[None]:
    """Record in the run folder that the run is running while the body runs, and afterwards how it ended."""
    with _alive(run_dir / OWNER):
        record.write(run_dir)
        try:
            yield
        except BaseException as error:  # also a cancellation
            is_stop = isinstance(error, KeyboardInterrupt | TerminationSignal | Pause)
            why = one_line(str(error) or type(error).__name__)
            with suppress(RlhfError):  # the error that ended the run matters more
                replace(record, state="stopped" if is_stop else "failed", why=why).write(run_dir)
            raise
        replace(record, state="completed").write(run_dir)


@contextmanager
def _alive(owner: Path) -> Iterator[None]:
    """Hold the lock of a run's folder while the body runs; without it on a file system that has no locks."""
    with owner.open("r+b") as file:
        until = time.monotonic() + LOCK_SECONDS
        with suppress(OSError):
            while not _locked(file.fileno(), fcntl.LOCK_EX) and time.monotonic() < until:
                time.sleep(0.05)
        yield


def is_alive(run_dir: Path) -> bool:
    """Whether a process is training the run in a folder now."""
    try:
        with (run_dir / OWNER).open("rb") as file:
            return not _locked(file.fileno(), fcntl.LOCK_SH)
    except OSError:  # no such file, or no locks
        return False


def _locked(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def state_of(run_dir: Path, record: RunRecord) -> tuple[State, str | None]:
    """Return a run's state and, if it was stopped or failed, the reason. Its process may have been killed."""
    if record.state == "running" and not is_alive(run_dir):
        return "failed", "its process ended without a word: it was killed, or its machine stopped"
    return record.state, record.why
