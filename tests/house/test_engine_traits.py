"""Code asks for the traits of an engine: the source has no comparison with the name of an engine."""

import ast
import re
from pathlib import Path
from typing import get_args

import pytest

from prefect_rlhf.placement.engine_traits import TRAITS
from prefect_rlhf.placement.graph import CallKind
from prefect_rlhf.placement.plan import EngineKind
from tests.house import files

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
NAMES = frozenset(get_args(EngineKind))
OWN_PLACES = ("placement/engine_traits.py", *(f"engines/{name}/" for name in NAMES))
NO_ENGINE = {"blocks/worker/configuration.py: word == 'python'"}
"""Comparisons with a word that is not an engine: here the first word of a command line."""
MOST_STEPS = 4


def is_name(node):
    """Whether an expression is an engine's name, a constant called after an engine, or a collection with such a member.

    `VLLM` and `Engine.VLLM` count as constants; arguments of calls do not count.
    """
    match node:
        case ast.Constant():
            return node.value in NAMES
        case ast.Name(id=word) | ast.Attribute(attr=word):
            return word.isupper() and word.lower() in NAMES
        case ast.Tuple() | ast.List() | ast.Set():
            return any(map(is_name, node.elts))
    return False


def comparisons(tree):
    """Every `==`, `!=`, `is`, `in` and `case` of a tree with an engine's name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and any(map(is_name, (node.left, *node.comparators))):
            yield ast.unparse(node)
        elif isinstance(node, ast.MatchValue) and is_name(node.value):
            yield f"case {ast.unparse(node)}"


def others():
    """(path from the root, tree) of every file of the rooms outside the traits and the engines' own folders."""
    for path in files().values():
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith(OWN_PLACES):
            yield name, ast.parse(path.read_text())


def test_no_code_compares_an_engine_with_a_name():
    found = {f"{name}: {comparison}" for name, tree in others() for comparison in comparisons(tree)}
    assert found == NO_ENGINE


def test_no_other_table_has_a_row_per_engine():
    """A new engine would have to change it."""
    found = {
        name
        for name, tree in others()
        for node in ast.walk(tree)
        if isinstance(node, ast.Dict) and any(map(is_name, node.keys))
    }
    assert found == set()


@pytest.mark.parametrize(
    "source",
    [
        "engine == 'vllm'",
        "'megatron' != placement.engine",
        "engine in ('vllm', 'megatron')",
        "'vllm' in engines",
        "engine is Engine.VLLM",
        "match engine:\n    case 'vllm' | 'megatron':\n        pass",
        "match engine:\n    case Engine.VLLM:\n        pass",
    ],
)
def test_each_form_of_a_comparison_is_found(source):
    assert list(comparisons(ast.parse(source)))


def test_every_engine_has_traits_and_every_kind_of_call_an_engine():
    assert set(TRAITS) == NAMES
    assert {kind for traits in TRAITS.values() for kind in traits.serves} == set(get_args(CallKind))


def test_a_new_engine_takes_at_most_four_steps():
    steps = (ROOT / "CONTRIBUTING.md").read_text().partition("**An engine**")[2].partition("\n**")[0]
    assert 1 <= len(re.findall(r"^\d+\. ", steps, re.MULTILINE)) <= MOST_STEPS
