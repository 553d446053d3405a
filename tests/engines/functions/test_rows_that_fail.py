"""Whatever a function does to its process, its row fails with a reason, and the other rows have their values."""

import math
from dataclasses import replace

import pytest
from host_cases import QUICK, function, line_of, row
from of_a_person import BEHAVIOURS, NONSENSE

from prefect_rlhf.engines.functions.function import HostSettings
from prefect_rlhf.engines.functions.scoring.pool import HostFunctionFailed, HostPool
from tests.support.cases import first

HERE = line_of("behave")
REASONS = {
    "raise": f"ValueError: no digits ({line_of('_raise', below=1)})",
    "unwritable": f"_Unwritable ({HERE})",
    "hang": f"no value after 1 s ({HERE})",
    "hang in C": f"no value after 1 s ({HERE})",
    "sleep": f"no value after 1 s ({HERE})",
    "stop": f"no value after 1 s ({HERE})",
    "SIGKILL": f"its process died by SIGKILL ({HERE})",
    "crash": f"its process died by SIGSEGV ({HERE})",
    "sys.exit": "SystemExit: 3",
    "os._exit": f"its process ended with status 4 ({HERE})",
    "interrupt": "KeyboardInterrupt",
    "NaN": f"returned nan, not a finite number ({HERE})",
    "inf": f"returned inf, not a finite number ({HERE})",
    "beyond the bound": f"returned -1e+39, not a number from -1e+09 to 1e+09 ({HERE})",
    "beyond floats": f"returned inf, not a finite number ({HERE})",
    "text": f"returned '1.0' of type str, not a number ({HERE})",
    "list": f"returned [1.0] of type list, not a number ({HERE})",
    "no pickle": "of type function, not a number",
    "print and die": f"its process died by SIGABRT ({HERE}); its last output: 'no memory left at all Fatal Python",
}


@pytest.fixture(scope="module")
def scores():
    """One score with every behaviour, good ones between them."""
    rows = [row(response) for behaviour in BEHAVIOURS for response in (behaviour, "good")]
    with HostPool([function("behave")], QUICK) as pool:
        return pool.score(rows, "a test")


@pytest.mark.parametrize("behaviour", REASONS)
def test_a_row_fails_with_its_reason(scores, behaviour):
    number = 2 * list(BEHAVIOURS).index(behaviour)
    (failure,) = [failure for failure in scores.failures if failure.row == number]
    assert math.isnan(scores.values["behave"][number])
    assert REASONS[behaviour] in failure.reason
    assert "\n" not in failure.reason


def test_the_other_rows_have_their_values(scores):
    failed = {failure.row for failure in scores.failures}
    assert failed == {2 * number for number, name in enumerate(BEHAVIOURS) if name in REASONS}
    assert {value for number, value in enumerate(scores.values["behave"]) if number not in failed} == {1.0, 1e9}


def test_a_row_may_print_megabytes():
    with HostPool([function("prints")], replace(QUICK, deadline_seconds=60.0, retries=0)) as pool:
        assert pool.score([row("good")], "a test").values["prints"] == (1.0,)


@pytest.mark.parametrize("name", first(2, NONSENSE))
def test_a_function_that_writes_to_the_socket_of_its_results_fails_its_row_alone(name):
    with HostPool([function("writes_nonsense")], QUICK) as pool:
        scores = pool.score([row("good"), row(name), row("good")], "a test")
    assert [failure.row for failure in scores.failures] == [1]
    assert scores.failures[0].reason.startswith(
        "its process wrote a line that is not a message to the socket of its results: "
    )
    assert "\n" not in scores.failures[0].reason and len(scores.failures[0].reason) < 600


@pytest.mark.parametrize("name", ["writes_without_end", "replaces_json"])
def test_a_function_whose_process_writes_nonsense_for_ever_fails_its_row_alone(name):
    with HostPool([function(name)], QUICK) as pool:
        scores = pool.score([row("good"), row("bad"), row("good")], "a test")
    assert [failure.row for failure in scores.failures] == [1]


def test_failed_value_replaces_a_failed_score():
    settings = HostSettings(1, 10.0, 0, failed_value=-1.0, most_failed=1.0)
    with HostPool([function("behave")], settings) as pool:
        scores = pool.score([row("raise"), row("good")], "a test")
    assert scores.values == {"behave": (-1.0, 1.0)}
    assert [failure.row for failure in scores.failures] == [0]


@pytest.mark.parametrize("how", ["raise", "kill"])
def test_a_row_that_fails_once_is_tried_again(tmp_path, how):
    with HostPool([function("fails_once")], HostSettings(1, 10.0, retries=1, most_failed=0.0)) as pool:
        scores = pool.score([row(how, file=str(tmp_path / str(n))) for n in range(3)], "a test")
    assert scores.values == {"fails_once": (1.0, 1.0, 1.0)}


def test_too_many_failed_rows_end_it_with_one_line():
    """It names the function, where it is, how many rows, and the first reason; as many as may fail do not."""
    with HostPool([function("behave")], HostSettings(2, 10.0, 0, most_failed=0.25)) as pool:
        assert len(pool.score([row("text"), *[row("good")] * 3], "score of step 3").failures) == 1
        with pytest.raises(HostFunctionFailed) as caught:
            pool.score([row("text"), row("text"), *[row("good")] * 3], "score of step 3")
        assert pool.score([row("good")], "score of step 4").values == {"behave": (1.0,)}
    message = str(caught.value)
    assert message.startswith("score of step 3: behave (")
    assert "of_a_person.py:behave) failed on 2 of 5 rows, at most 25% may; row 0: returned '1.0' of type" in message
    assert message.endswith(f"({HERE})")
    assert "\n" not in message


@pytest.mark.all  # test_ends.py has deadlines
def test_an_async_call_past_its_deadline_fails_alone():
    """Whether it waits, blocks the others, or blocks them for so long that their time is over as well."""
    responses = ["good", "wait", "good", "block", "good", "block a little", "raise", "sys.exit", *["good"] * 6]
    settings = HostSettings(workers=1, deadline_seconds=0.6, retries=0, most_failed=1.0)
    with HostPool([function("waits")], settings) as pool:
        scores = pool.score([row(response) for response in responses], "a test")
    assert [failure.row for failure in scores.failures if responses[failure.row] != "block a little"] == [1, 3, 6, 7]
    reasons = {responses[failure.row]: failure.reason for failure in scores.failures}
    assert reasons["wait"] == reasons["block"] == f"no value after 0.6 s ({line_of('waits')})"
    assert reasons["raise"].startswith("ValueError: no reply (")
    assert all(scores.values["waits"][n] == 1.0 for n, response in enumerate(responses) if response == "good")


@pytest.mark.parametrize(
    "name", first(2, ["hangs_on_bad", "drops_bad", "raises_on_bad", "nan_for_bad", "asynchronous"])
)
def test_a_failed_row_does_not_lose_its_batch(name):
    responses = ["good", "bad", *["good"] * 20]
    with HostPool([function(name, "trl")], QUICK) as pool:
        scores = pool.score([row(response) for response in responses], "a test")
    assert [failure.row for failure in scores.failures] == [1]
    assert line_of(name, "of_trl.py").partition(":")[0] in scores.failures[0].reason
    assert all(value > 0 for n, value in enumerate(scores.values[name]) if n != 1)


def test_a_batch_that_returns_no_list_fails():
    with HostPool([function("one_number", "trl")], QUICK) as pool:
        (failure,) = pool.score([row("good")], "a test").failures
    assert failure.reason.startswith("returned 1.0 of type float, not a list of 1 numbers (")
