"""What is compiled, and how often: each function once for a rule, and all of them before the budget begins."""

from __future__ import annotations

import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module

import numpy as np
import pytest
from numba.core.dispatcher import Dispatcher

from prefect_rlhf.placement import search as folder
from prefect_rlhf.placement.search.alternatives import alternatives, timed_together
from prefect_rlhf.placement.search.compiled import Ints, compiled, inner
from prefect_rlhf.placement.search.driver import search
from prefect_rlhf.placement.search.record import Record
from prefect_rlhf.placement.search.rules.ready_first import ReadyFirst
from prefect_rlhf.placement.search.rules.run_order import RunOrder
from prefect_rlhf.placement.search.tables.rule import Rule
from tests.placement.search.random_problems import random_problem

PROGRAM = """
import json, sys
from prefect_rlhf.placement.search.driver import warm_up
from tests.placement.search.test_compiled import METHODS, RULES, functions, searches
rule = RULES[sys.argv[1]]
for method in METHODS:
    warm_up(method, rule)
before = {name: len(each.signatures) for name, each in functions().items()}
searches(rule)
after = {name: len(each.signatures) for name, each in functions().items()}
print(json.dumps([before, after]))
"""
A_RUN = """
import sys
from prefect_rlhf.placement.planner import best_plan
from prefect_rlhf.placement.search.alternatives import alternatives
from prefect_rlhf.placement.search.driver import SMALLEST, prove, search
alternatives(SMALLEST, search(SMALLEST, 60.0).plan)
prove(SMALLEST, 1.0)
print(*sys.modules)
"""
METHODS = ("exact", "metropolis-hastings")
RULES = {"run_order": RunOrder, "ready_first": ReadyFirst}
OF_A_RULE = {"run_order": {"run_order", "period"}, "ready_first": {"ready_first", "precedence", "cycles"}}
"""The files of each rule."""
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


def searches(rule: type[Rule]):
    """Short searches by both methods, with moves, shared copies and unequal devices among them."""
    for problem in (random_problem(seed, rule) for seed in range(6)):
        for method in METHODS:
            plan = search(problem, 60, method, max_evaluations=20_000, rule=rule).plan
            if plan is not None and rule is RunOrder:
                alternatives(problem, plan)
                timed_together(problem, plan, list(plan), [list(plan.values())])


def printed(program: str, *arguments: str, **environment: str) -> str:
    command, around = [sys.executable, "-c", program, *arguments], {**os.environ, **environment}
    ended = subprocess.run(command, env=around, capture_output=True, text=True, check=True, timeout=900)
    return ended.stdout.splitlines()[-1]


def of_others(rule: str, names: Iterable[str]) -> set[str]:
    """The functions in the files of another rule."""
    files = set().union(*(own for name, own in OF_A_RULE.items() if name != rule))
    return {name for name in names if name.partition(".")[0] in files}


@pytest.fixture(scope="module", params=["kept", pytest.param("fresh", marks=pytest.mark.all)])
def environment(request, tmp_path_factory):
    """A fresh process compiles all functions, which takes half a minute.

    With the kept code it loads the functions that Python calls, and compiles only what is missing.
    """
    return {"NUMBA_CACHE_DIR": str(tmp_path_factory.mktemp("numba"))} if request.param == "fresh" else {}


@pytest.fixture(scope="module", params=RULES)
def numbers(request, environment):
    """The number of signatures of each function after `warm_up`, and after searches, in a process for a rule alone."""
    before, after = json.loads(printed(PROGRAM, request.param, **environment))
    assert len(after) > 80
    unused = {name for name, number in after.items() if number == 0} - of_others("run_order", after)
    assert not environment or request.param != "run_order" or unused == set()
    return request.param, before, after


def test_every_function_is_compiled_for_a_single_signature(numbers):
    """Each further signature would cost every user seconds of compilation."""
    _, _, after = numbers
    assert {name: number for name, number in after.items() if number > 1} == {}


def test_compilation_does_not_count_in_a_searchs_budget(numbers):
    """So the answer is the same on a machine that has compiled nothing before."""
    _, before, after = numbers
    assert {name for name, number in after.items() if number > before[name]} <= BY_ALTERNATIVES


def test_a_search_compiles_no_rule_that_it_was_not_given(numbers):
    """The rule is a value: compiled code is specific to it, and does not ask which it is."""
    rule, _, after = numbers
    assert {name for name in of_others(rule, after) if after[name]} == set()


def test_a_run_reaches_neither_reals_rule_nor_its_random_walk():
    """They are for closed problems, and for the flag that asks for the walk."""
    reached = {name.removeprefix(f"{folder.__name__}.") for name in printed(A_RUN).split()}
    assert {"rules.run_order", "exact.deepening", "sampling.annealing"} <= reached
    assert reached.isdisjoint({"rules.ready_first", "rules.precedence", "rules.cycles", "sampling.metropolis"})


@dataclass(frozen=True, slots=True, eq=False)
class Pair(Record):
    first: int
    second: Ints


@inner
def sum_of(pair: Pair, more: int) -> int:
    return pair.first + len(pair.second) + more


@inner
def product_of(pair: Pair, more: int) -> int:
    return pair.first * len(pair.second) * more


@dataclass(frozen=True, slots=True, eq=False)
class Summed(Pair):
    both = staticmethod(sum_of)


@dataclass(frozen=True, slots=True, eq=False)
class Multiplied(Pair):
    both = staticmethod(product_of)


@compiled
def both_of(pair: Summed | Multiplied, more: int) -> int:
    return pair.both(pair, more)


def test_compiled_code_calls_the_static_method_of_the_record_that_it_gets():
    """The code is specific to the record's type, so nothing is asked while it runs."""
    fields = 5, np.zeros(3, np.int64)
    assert (both_of(Summed(*fields), 7), both_of(Multiplied(*fields), 7)) == (15, 105)


@dataclass(frozen=True, slots=True, eq=False)
class Holder(Record):
    pair: Pair


def test_records_that_hold_records_of_other_types_have_other_names():
    """By these names the linker tells apart what is compiled for each rule."""
    fields = 5, np.zeros(3, np.int64)
    summed, multiplied = (Holder(kind(*fields))._kind for kind in (Summed, Multiplied))
    assert summed.name != multiplied.name and summed != multiplied
    assert summed.name == Holder(Summed(*fields))._kind.name


@pytest.mark.parametrize(
    "array", [np.zeros(3, np.int32), np.zeros(6, np.int64)[::2], np.zeros((2, 3), np.int64).T, np.zeros(3)]
)
def test_an_array_that_would_compile_everything_again_is_refused(array):
    with pytest.raises(TypeError, match="Pair.second: not a contiguous array of int64"):
        Pair(1, array)
