"""What ranks find imported, and what they are spared."""

import gc
import importlib.util
import sys

import pytest

from prefect_rlhf.engines.gang.processes.preload import never_collected, preload


@pytest.fixture
def asks_for_wandb(tmp_path, monkeypatch):
    """A module that uses a tracker if it is there, as Megatron does."""
    (tmp_path / "asks_for_wandb.py").write_text(
        "try:\n    import wandb\nexcept ImportError:\n    wandb = None\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    yield "asks_for_wandb"
    del sys.modules["asks_for_wandb"]


def test_libraries_do_not_import_a_tracker_that_no_rank_uses(asks_for_wandb):
    """A function that a rank calls can import it all the same."""
    preload([asks_for_wandb])
    assert sys.modules[asks_for_wandb].wandb is None
    assert "wandb" not in sys.modules and importlib.util.find_spec("wandb") is not None


def test_a_module_that_cannot_be_imported_is_left_to_the_rank_that_needs_it(asks_for_wandb):
    preload(["no_such_module", asks_for_wandb])
    assert asks_for_wandb in sys.modules and "no_such_module" not in sys.modules


def test_what_is_imported_is_never_scanned_for_garbage():
    with never_collected():
        assert not gc.isenabled()
        kept = [[] for _ in range(1000)]
    assert gc.isenabled() and not any(each is kept for each in gc.get_objects())
