"""What is compiled, and how often: each function for a single signature, and all of them before the budget begins."""

from __future__ import annotations

import json
import os
import pkgutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import import_module

import numpy as np
import pytest
from numba.core.dispatcher import Dispatcher

from prefect_rlhf.placement import search as folder
from prefect_rlhf.placement.search.alternatives import alternatives, timed_together
from prefect_rlhf.placement.search.compiled import Ints
from prefect_rlhf.placement.search.driver import search
from prefect_rlhf.placement.search.record import Record
from tests.placement.search.random_problems import random_problem

PROGRAM = """
import json
from prefect_rlhf.placement.search.driver import warm_up
from tests.placement.search.test_compiled import METHODS, functions, searches
for method in METHODS:
    warm_up(method)
before = {name: len(each.signatures) for name, each in functions().items()}
searches()
after = {name: len(each.signatures) for name, each in functions().items()}
print(json.dumps([before, after]))
"""
METHODS = ("exact", "metropolis-hastings")
BY_ALTERNATIVES = {"alternatives.fill_makespans", "alternatives.fill_together"}
"""Ranked after the search, so not in its budget."""


def functions() -> dict[str, Dispatcher]:
    """All compiled functions of the search, by name."""
    modules = [import_module(found.name) for found in pkgutil.walk_packages(folder.__path__, f"{folder.__name__}.")
               if not found.name.endswith("__main__")]  # fmt: skip
    return {
        f"{module.__name__.rpartition('.')[2]}.{name}": value
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, Dispatcher) and value.py_func.__module__ == module.__name__
    }


def searches():
    """Short searches by both methods under both rules, with moves, shared copies and unequal devices among them."""
    rules = ("ready_first", "graph_order")
    for problem in (random_problem(seed, rule) for seed in range(6) for rule in rules):
        for method in METHODS:
            plan = search(problem, 60, method, max_evaluations=20_000).plan
            if plan is not None:
                alternatives(problem, plan)
                timed_together(problem, plan, list(plan), [list(plan.values())])


@pytest.fixture(scope="module", params=["kept", pytest.param("fresh", marks=pytest.mark.all)])
def numbers(request, tmp_path_factory):
    """The number of signatures of each function after `warm_up`, and after searches, in a process of its own.

    A fresh process compiles all functions, which takes half a minute. With the kept code it loads the functions that
    Python calls, and compiles only what is missing.
    """
    fresh = {"NUMBA_CACHE_DIR": str(tmp_path_factory.mktemp("numba"))} if request.param == "fresh" else {}
    command, environment = [sys.executable, "-c", PROGRAM], {**os.environ, **fresh}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=900)
    before, after = json.loads(ended.stdout.splitlines()[-1])
    assert len(after) > 80
    assert request.param != "fresh" or 0 not in after.values()
    return before, after


def test_every_function_is_compiled_for_a_single_signature(numbers):
    """Each further signature would cost every user seconds of compilation."""
    assert {name: number for name, number in numbers[1].items() if number > 1} == {}


def test_a_search_compiles_nothing_within_its_budget(numbers):
    """So the answer is the same on a machine that has compiled nothing before."""
    before, after = numbers
    assert {name for name, number in after.items() if number > before[name]} <= BY_ALTERNATIVES


@dataclass(frozen=True, slots=True, eq=False)
class Pair(Record):
    first: int
    second: Ints


@pytest.mark.parametrize(
    "array", [np.zeros(3, np.int32), np.zeros(6, np.int64)[::2], np.zeros((2, 3), np.int64).T, np.zeros(3)]
)
def test_an_array_that_would_compile_everything_again_is_refused(array):
    with pytest.raises(TypeError, match="Pair.second: not a contiguous array of int64"):
        Pair(1, array)
