"""math-verify and reasoning-gym, the extra `rewards`, as they are installed."""

import pytest
from host_cases import row

from prefect_rlhf.engines.functions.function import HostFunction, HostSettings
from prefect_rlhf.engines.functions.scoring.pool import HostPool, check_function
from prefect_rlhf.errors.errors import InvalidInput

SETTINGS = HostSettings(workers=2, deadline_seconds=60.0, retries=0, most_failed=0.0)


def test_math_verify_scores_in_a_worker(tmp_path):
    """It sets alarms, which only a main thread may."""
    pytest.importorskip("math_verify")
    file = tmp_path / "by_math.py"
    file.write_text(
        "from math_verify import parse, verify\n\n"
        "def equal(row):\n    return verify(parse(row['ground_truth']), parse(row['response']))\n"
    )
    rows = [row(text, ground_truth="$\\frac{1}{2}$") for text in ("it is $0.5$", "it is $\\frac{2}{4}$", "$2$", "no")]
    with HostPool([HostFunction("equal", f"{file}:equal")], SETTINGS) as pool:
        assert pool.score(rows, "a test").values["equal"] == (1.0, 1.0, 0.0, 0.0)


@pytest.mark.parametrize("task", ["chain_sum", "spell_backward", "basic_arithmetic", "number_sorting"])
def test_a_task_of_reasoning_gym_is_named(task):
    """It scores as the task itself does."""
    gym = pytest.importorskip("reasoning_gym")
    dataset = gym.create_dataset(task, size=6, seed=1)
    entries = [dict(entry) for entry in dataset]
    answers = [entry["answer"] if n % 2 else "7" for n, entry in enumerate(entries)]
    rows = [row(f"so <answer>{a}</answer>", **entry) for a, entry in zip(answers, entries, strict=True)]
    with HostPool([HostFunction(task, f"reasoning_gym:{task}", signature="reasoning_gym")], SETTINGS) as pool:
        values = pool.score(rows, "a test").values[task]
    assert values == tuple(dataset.score_answer(a, e) for a, e in zip(answers, entries, strict=True))
    assert {values[1], values[3], values[5]} == {1.0}


def test_a_task_that_reasoning_gym_does_not_have_is_refused():
    pytest.importorskip("reasoning_gym")
    with pytest.raises(InvalidInput, match="reward.functions.sums: got 'reasoning_gym:chain_sums', expected"):
        check_function(HostFunction("sums", "reasoning_gym:chain_sums", signature="reasoning_gym"))
