"""Users of one machine share a lease folder: whoever came first, under whatever umask, all get and free devices."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from prefect_rlhf.blocks.lease_book import Busy, Holder, LeaseBook, LeasedMesh
from prefect_rlhf.blocks.lease_files import FileLock
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.devices.mesh import ClusterShape

pytestmark = pytest.mark.quick

DESK = ClusterShape("desk", 1, 2, 1 << 30)
ALICE, BOB, ROOT = 60001, 60002, 0

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")


@pytest.fixture
def shared():
    """A folder that every user may enter, unlike pytest's own."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    yield folder / "leases"
    shutil.rmtree(folder)


def _as_user(user: int, action: Callable[[], object], umask: int = 0o077) -> str:
    """Run `action` in a child of that user; returns what it returned, as text."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        os.umask(umask)
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
        try:
            said = str(action())
        except (OSError, ValueError) as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writable, said.encode())
        os._exit(0)
    os.close(writable)
    os.waitpid(child, 0)
    with os.fdopen(readable) as pipe:
        return pipe.read()


def _lease(folder: Path, wanted: str | int = 2) -> LeasedMesh | Busy:
    return LeaseBook(folder, DESK).acquire(wanted, Holder.now("id", f"user-{os.getuid()}"))


def _mesh(folder: Path) -> str:
    answer = _lease(folder)
    return str(answer) if isinstance(answer, Busy) else answer.mesh.name


@needs_root
@pytest.mark.parametrize(("first", "second"), [(ALICE, BOB), (ROOT, ALICE), (ALICE, ROOT)])
def test_another_user_gets_freed_devices(shared, first, second):
    """Also root's files stay in nobody's way."""
    assert _as_user(first, lambda: _mesh(shared)) == "n0:0-1"
    assert _as_user(second, lambda: _mesh(shared)) == "n0:0-1"
    assert _as_user(first, lambda: _mesh(shared)) == "n0:0-1"


@needs_root
def test_another_user_waits_for_the_holder(shared):
    assert _as_user(ALICE, lambda: _mesh(shared)) == "n0:0-1"  # the files are Alice's
    held = _lease(shared, "n0:1")
    assert _as_user(BOB, lambda: _mesh(shared)).startswith(
        f"waiting for 2 devices of cluster desk: held by user-0 (pid {os.getpid()}) since "
    )
    held.release()
    assert _as_user(BOB, lambda: _mesh(shared)) == "n0:0-1"


@needs_root
def test_users_cannot_remove_each_others_leases(shared):
    _as_user(ALICE, lambda: _mesh(shared))
    assert _as_user(BOB, (shared / "desk" / "n0-0.lease").unlink).startswith("PermissionError")


@needs_root
def test_an_unwritable_lock_file_gives_one_line(shared):
    """As a copy made by root leaves it; root itself mends it."""
    _as_user(ALICE, lambda: _mesh(shared))
    file = shared / "desk" / "n0-0.lease"
    os.chown(file, 0, 0)
    file.chmod(0o644)
    said = _as_user(BOB, lambda: _mesh(shared))
    assert said.startswith(f"InvalidInput: lease_directory: got '{file} (-rw-r--r--, owner root)', expected a plain")
    assert _as_user(ROOT, lambda: _mesh(shared)) == _as_user(BOB, lambda: _mesh(shared)) == "n0:0-1"


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_link_laid_by_another_is_not_followed(shared, tmp_path, link):
    """Else who may lay one could have a file of the next user's overwritten."""
    precious = shared.parent / "precious"
    precious.write_text("precious")
    (shared / "desk").mkdir(parents=True)
    link(precious, shared / "desk" / "n0-0.lease")
    with pytest.raises(InvalidInput, match="n0-0.lease"):
        _lease(shared)
    assert precious.read_text() == "precious" and precious.stat().st_mode & 0o777 != 0o666


def test_a_file_lock_is_held_once_and_leaves_no_file(tmp_path):
    """Also when its holder removes it while another opens it."""
    path = tmp_path / "runs" / "one.lock"
    lock = FileLock.take(path)
    assert FileLock.take(path) is None
    lock.release()
    lock.release()
    assert list(path.parent.iterdir()) == []
    again = FileLock.take(path)
    assert again is not None and path.exists()
    again.release()
