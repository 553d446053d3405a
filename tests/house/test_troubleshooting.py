"""Each message that docs/troubleshooting.md quotes is in a string of the sources that is not a docstring."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.house import files

ROOT = Path(__file__).parents[2]
QUOTED = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)


@cache
def strings():
    """The strings of the sources, parts of f-strings too, without docstrings: a docstring may quote an old message."""
    found = []
    for file in files().values():
        nodes = list(ast.walk(ast.parse(file.read_text())))
        alone = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        constants = (node for node in nodes if isinstance(node, ast.Constant) and id(node) not in alone)
        found += [node.value for node in constants if isinstance(node.value, str)]
    return found


@pytest.mark.parametrize("message", QUOTED)
def test_a_quoted_message_is_in_the_sources(message):
    assert any(message in text for text in strings())
