"""A run that is not as predicted says so after three steps, with the node that makes the difference."""

import pytest

from prefect_rlhf.tasks.reporting.deviation import deviation
from tests.tasks.reporting.test_comparison import PREDICTED, span


def steps(*trained: float, inference: float = 2.0):
    """Predicted are 2 s of inference and 3 s of training; each step trains for so long."""
    made, now = [], 1000.0
    for step, seconds in enumerate(trained, start=1):
        for call, kind, worked in (
            ("ref_inference", "inference", inference),
            ("actor_train_step", "train_step", seconds),
        ):
            made.append(span(call, kind, step, now, now + worked, worked))
            now += worked
    return made


@pytest.mark.parametrize(
    "spans",
    [
        [],
        steps(9.0, 3.0, 3.0, 3.0),  # the first builds and compiles
        steps(9.0, 4.0, 4.0),  # two steps are not three
        steps(9.0, 4.0, 3.0, 4.0),  # the one between was as predicted
        steps(9.0, 4.0, 2.0, 4.0),  # neither longer nor shorter
        steps(9.0, 3.4, 3.4, 3.4),  # 8%
    ],
)
def test_a_run_as_predicted_has_no_deviation(spans):
    assert deviation(PREDICTED, spans) is None


def test_the_node_that_takes_longer_is_named():
    assert str(deviation(PREDICTED, steps(9.0, 5.0, 5.0, 6.0, inference=1.9))) == (
        "steps take 6.9 s, 38% more than predicted, most of it in actor_train_step"
    )


def test_the_node_that_takes_less_is_named():
    found = deviation(PREDICTED, steps(9.0, 3.2, 3.2, 3.2, inference=0.5))
    assert str(found) == "steps take 3.7 s, 26% less than predicted, most of it in ref_inference"
