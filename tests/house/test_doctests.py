"""Every example in a docstring does what it shows."""

import doctest
import re
from importlib import import_module

import pytest

from tests.house import PACKAGE, files

WITH_EXAMPLES = [name for name, path in files().items() if re.search(r">>> (?!.*\+SKIP)", path.read_text())]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_the_examples_of_a_file_run(name):
    """In the docstrings of what the file itself defines."""
    result = doctest.testmod(import_module(f"{PACKAGE}.{name}"))
    assert result.attempted > 0
    assert result.failed == 0
