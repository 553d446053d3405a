"""Imports that a run's garbage collections need not scan."""

import gc

import pytest

from prefect_rlhf.tasks.running.train import imports_frozen


@pytest.fixture
def thawed():
    """A process that froze nothing, as a run's is. The tests froze theirs."""
    gc.unfreeze()
    yield
    gc.freeze()


def test_a_run_scans_no_imports_and_leaves_them_as_they_were(thawed):
    with imports_frozen():
        assert gc.get_freeze_count() > 100_000
    assert gc.get_freeze_count() == 0


def test_what_a_process_froze_before_its_run_stays_frozen():
    gc.freeze()
    with imports_frozen():
        pass
    assert gc.get_freeze_count() > 100_000
