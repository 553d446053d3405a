"""Documented modules that moved: an import by the old name says the new name."""

import re
from importlib import import_module

import pytest

from prefect_rlhf.moved_modules import MOVED


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_an_import_of_a_module_that_moved_names_its_new_place(old, new):
    """The message is a line, and the new place exists."""
    with pytest.raises(ImportError, match=rf"^{re.escape(old)} is now {re.escape(new)}$"):
        import_module(old)
    assert import_module(new).__name__ == new
