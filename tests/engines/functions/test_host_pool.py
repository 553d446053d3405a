"""The pool: one value for each row, in the order of the rows, whichever process it came from."""

import subprocess
import sys
from dataclasses import replace

import pytest
from host_cases import function, row

from prefect_rlhf.engines.functions.function import HostSettings
from prefect_rlhf.engines.functions.scoring.pool import HostPool
from prefect_rlhf.errors.errors import InvalidInput

PATIENT = HostSettings(workers=2, deadline_seconds=60.0, retries=0, most_failed=0.0)


def test_rows_keep_their_order():
    with HostPool([function("number"), function("length")], PATIENT) as pool:
        scores = pool.score([row("x" * (n % 7), number=n) for n in range(200)], "a test")
    assert scores.values["number"] == tuple(float(n) for n in range(200))
    assert scores.values["length"] == tuple(float(n % 7) for n in range(200))
    assert scores.failures == ()
    assert scores.seconds > 0


def test_values_do_not_depend_on_the_number_of_workers():
    """Nor on what else a worker was given: what a function draws is its row's own."""
    rows = [row(f"answer {n}") for n in range(60)]
    drawn = []
    for workers in (1, 2, 3):
        with HostPool([function("drawn")], HostSettings(workers, 60.0, most_failed=0.0)) as pool:
            drawn += [pool.score(rows, "a test").values["drawn"], pool.score(rows, "a test").values["drawn"]]
    assert len(set(drawn)) == 1
    assert len(set(drawn[0])) == 60


def test_an_inapplicable_result_is_none():
    with HostPool([function("right_if_asked")], PATIENT) as pool:
        scores = pool.score([row("a", ground_truth="a"), row("a"), row("b", ground_truth="a")], "a test")
    assert scores.values["right_if_asked"] == (1.0, None, 0.0)
    assert scores.failures == ()


def test_async_calls_of_a_worker_wait_together():
    """Each of four returns only once all four have begun."""
    with HostPool([function("together")], HostSettings(1, 60.0, 0, most_failed=0.0)) as pool:
        rows = [row("x" * n) for n in range(8)]
        assert pool.score(rows, "a test").values["together"] == tuple(float(n) for n in range(8))


@pytest.mark.parametrize("name", ["judge", "judge.method"])
def test_an_object_that_can_be_called_and_its_method_are_functions(name):
    named = function(name.replace(".", "_"))
    named = replace(named, function=named.function.replace("judge_", "judge."))
    with HostPool([named], PATIENT) as pool:
        (values,) = pool.score([row("abc")], "a test").values.values()
    assert values == (3.0 if name == "judge" else -3.0,)


def test_rows_of_megabytes_arrive():
    with HostPool([function("length")], PATIENT) as pool:
        scores = pool.score([row("x" * 3_000_000) for _ in range(4)], "a test")
    assert scores.values["length"] == (3e6,) * 4


def test_no_rows_need_no_process():
    with HostPool([function("no_such_function")], PATIENT) as pool:
        assert pool.score([], "a test").values == {"no_such_function": ()}


def test_a_worker_has_no_torch():
    """Nor does importing what the pool is made of."""
    with HostPool([function("with_torch")], PATIENT) as pool:
        assert pool.score([row("")], "a test").values["with_torch"] == (0.0,)
    modules = "prefect_rlhf.engines.functions.scoring.pool, prefect_rlhf.engines.functions.scoring.worker"
    program = f"import sys, {modules}\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"


def test_rows_that_cannot_be_sent_are_refused():
    with HostPool([function("length")], PATIENT) as pool, pytest.raises(InvalidInput, match="plain Python values"):
        pool.score([row("a", judge=lambda: 1.0)], "a test")


def test_rows_without_a_column_that_is_needed_are_refused():
    with HostPool([function("compute_score", "verl")], PATIENT) as pool, pytest.raises(InvalidInput) as caught:
        pool.score([row("a", data_source="x"), {"prompt": "p", "response": "a", "data_source": "x"}], "a test")
    assert "reward.functions.compute_score: row 1: got ['data_source', 'prompt', 'response'], expected a column" in str(
        caught.value
    )
