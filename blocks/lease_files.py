"""Lock files for all users of a machine, whatever the files' owners and the umask."""

import contextlib
import fcntl
import os
import pwd
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.foreign_file import parse_json

ANYONE_WRITES = 0o666
STICKY_FOLDER = 0o1777  # every user may add a file, but not remove another user's
MOST_BYTES = 4096  # of a file that any user may have written
MADE_SECONDS = 0.2  # a file becomes writable for all users microseconds after its creation


def make_shared_folder(folder: Path) -> None:
    """Create `folder`, writable by all users, and its missing parents. An existing folder is not changed.

    Raises InvalidInput if that is impossible.
    """
    if folder.is_dir():
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
        folder.chmod(STICKY_FOLDER)
    except FileExistsError:
        if not folder.is_dir():
            raise _refused(folder) from None
    except OSError as error:
        raise _refused(folder) from error


def open_shared(path: Path) -> int:
    """Open a file for reading and writing; create it if it is missing.

    Raises InvalidInput for a file that this user may not write, and for anything but a plain file, because a link from
    another user would be followed with this user's rights.
    """
    deadline = time.monotonic() + MADE_SECONDS
    while True:
        try:
            return _checked(os.open(path, os.O_RDWR | os.O_NOFOLLOW), path)  # O_CREAT on another's file may be refused
        except FileNotFoundError:
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, ANYONE_WRITES)
            except FileExistsError:
                continue
            except OSError as error:
                raise _refused(path.parent) from error
            os.fchmod(descriptor, ANYONE_WRITES)
            return descriptor
        except PermissionError:
            if time.monotonic() > deadline:
                raise _refused(path) from None
            time.sleep(0.01)
        except OSError as error:
            raise _refused(path) from error


def try_lock(descriptor: int) -> bool:
    """Lock an open file for this descriptor and its copies; return False if it is locked elsewhere."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def read_json(descriptor: int) -> object:
    """Return the JSON in an open file, which any user may have written; None for other content or a long file."""
    try:
        text = os.pread(descriptor, MOST_BYTES + 1, 0)
        return parse_json(text) if len(text) <= MOST_BYTES else None
    except (OSError, ValueError):
        return None


def overwrite(descriptor: int, text: str) -> None:
    """Replace the content of an open file."""
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, text.encode(), 0)


@dataclass(slots=True)
class FileLock:
    """A locked file. The lock is freed once every process with its descriptor has ended or closed it."""

    path: Path
    descriptor: int

    @classmethod
    def take(cls, path: Path) -> Self | None:
        """Lock the file at `path`; None if another process holds the lock."""
        # The holder removes the file before it closes it, so this process may lock a file that has no name any more.
        # Such a lock excludes no other process: the next process would create and lock a new file. Only a lock on the
        # file that is at `path` afterwards counts.
        while True:
            make_shared_folder(path.parent)
            descriptor = open_shared(path)
            if not try_lock(descriptor):
                os.close(descriptor)
                return None
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                return cls(path, descriptor)
            os.close(descriptor)

    def release(self) -> None:
        """Remove the file and close this process's copy. Idempotent."""
        if self.descriptor >= 0:
            remove_locked(self.descriptor)
            self.descriptor = -1


def remove_locked(descriptor: int) -> None:
    """Remove the file that this process has open and locked, if this user may remove it, and close it."""
    with contextlib.suppress(OSError):  # another user's file in a sticky folder; an unlocked file does no harm
        Path(f"/proc/self/fd/{descriptor}").readlink().unlink()
    os.close(descriptor)


def _checked(descriptor: int, path: Path) -> int:
    """Return `descriptor` if it is a plain file with one hard link, and make this user's own file writable by all.

    Closes the descriptor and raises InvalidInput for another file.
    """
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(descriptor)
        raise _refused(path)
    if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) != ANYONE_WRITES:
        os.fchmod(descriptor, ANYONE_WRITES)  # it was copied, or its mode was changed
    return descriptor


def _refused(path: Path) -> InvalidInput:
    """Return the error that names a file or folder, its owner, and the required access."""
    try:
        status = path.stat(follow_symlinks=False)
        seen = f"{path} ({stat.filemode(status.st_mode)}, owner {_user(status.st_uid)})"
    except OSError:
        seen = str(path)
    return InvalidInput("lease_directory", seen, f"a plain file or folder that {_user(os.geteuid())} may write")


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"
