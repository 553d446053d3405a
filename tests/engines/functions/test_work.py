"""What becomes of calls that fail, whatever the order in which processes are lost: values only, no process."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_rlhf.engines.functions.function import HostFunction
from prefect_rlhf.engines.functions.scores import Verdict
from prefect_rlhf.engines.functions.scoring.work import Work

pytestmark = pytest.mark.quick

ROW, BATCH = HostFunction("one", "m:one"), HostFunction("many", "m:many", signature="trl")


@given(st.data())
def test_a_row_fails_if_it_fails_alone_more_often_than_it_is_retried(data):
    """And only then: not by what the rows beside it do, whatever is lost, for any number of workers."""
    retries, workers = data.draw(st.integers(0, 2)), data.draw(st.integers(1, 4))
    asynchronous = data.draw(st.tuples(st.booleans(), st.booleans()))
    times = [data.draw(st.lists(st.integers(0, 3), min_size=20, max_size=20)) for _ in range(2)]
    left = [list(of_function) for of_function in times]
    work = Work([ROW, BATCH], 20, retries)
    while not work.done:
        calls = work.take(workers, asynchronous)
        while calls:
            begun = calls[: data.draw(st.integers(1, len(calls)))] if asynchronous[calls[0].function] else calls[:1]
            bad = [call for call in begun if any(left[call.function][row] for row in call.rows)]
            if bad and data.draw(st.booleans()):  # the process is lost
                if len(begun) == 1 and len(begun[0].rows) == 1:
                    left[begun[0].function][begun[0].rows[0]] -= 1
                work.lose(begun, calls[len(begun) :], "lost")
                break
            for call in begun:
                verdicts = [Verdict(failed="bad") if left[call.function][row] else Verdict(1.0) for row in call.rows]
                if len(call.rows) == 1 and verdicts[0].failed:
                    left[call.function][call.rows[0]] -= 1
                work.settle(call, verdicts)
            calls = calls[len(begun) :]
    expected = [
        (row, name) for name, of in zip(("one", "many"), times, strict=True) for row in range(20) if of[row] > retries
    ]
    assert [(failure.row, failure.function) for failure in work.failures()] == expected
    assert work.failed_rows == {row for row, _ in expected}
    assert work.values(-1.0) == {
        name: tuple(-1.0 if (row, name) in expected else 1.0 for row in range(20)) for name in ("one", "many")
    }


def test_calls_of_a_batched_function_are_the_same_for_any_number_of_workers():
    def calls_for(workers):
        work, taken = Work([BATCH], 50, 0), []
        while work.waiting:
            taken += work.take(workers, [False])
        return taken

    assert calls_for(1) == calls_for(7)
    assert [len(call.rows) for call in calls_for(1)] == [16, 16, 16, 2]


def test_a_call_that_others_held_up_is_made_again_alone():
    work = Work([ROW], 2, 0)
    first, second = work.take(1, [True]) + work.take(1, [True])
    work.settle(second, [Verdict(1.0)])
    work.settle(first, [Verdict(failed="late", held_up=True)])
    (again,) = work.take(1, [True])
    assert again.alone
    work.settle(again, [Verdict(failed="late", held_up=True)])
    assert [failure.reason for failure in work.failures()] == ["late"]
