"""A group of settings that Python code makes wrongly is refused in a line: the field, the value, and what is right."""

import copy
import pickle
import traceback

import pytest

from prefect_rlhf.blocks.dataset import Prompts
from prefect_rlhf.blocks.model import Model
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.tasks.rl.settings.online import GRPO
from prefect_rlhf.tasks.settings import Optimizer, Sampling, Settings

pytestmark = pytest.mark.quick


class Own(Settings):
    """A group of a person, with a group inside."""

    size: int
    optimizer: Optimizer = Optimizer()


def assigned():
    GRPO().batch_size = 3


WRONG = {
    "a value without a name": (lambda: Model("m0"), "Model: got 'm0', expected values by name: Model(path='m0')"),
    "a misspelt key": (lambda: Model(pth="m0"), "Model.pth: unknown key (got 'm0'); closest: path"),
    "a key of a group inside": (lambda: GRPO(lr=1e-5), "GRPO.lr: unknown key (got 1e-05); closest: optimizer.lr"),
    "a misspelt key of a group inside": (
        lambda: GRPO(sampling={"temprature": 1}),
        "GRPO.sampling.temprature: unknown key (got 1); closest: temperature",
    ),
    "a key that is like none": (
        lambda: Own(size=1, qqq=2),
        "Own.qqq: unknown key (got 2); the fields are size, optimizer",
    ),
    "another type": (
        lambda: GRPO(batch_size="8"),
        "GRPO.batch_size: got '8', expected a whole number, without quotes: 8",
    ),
    "beyond a bound": (lambda: Optimizer(lr=0), "Optimizer.lr: got 0, expected more than 0"),
    "a value that is missing": (lambda: Own(), "Own.size: missing; expected a value, since it has no default"),
    "no path": (lambda: Prompts(), "Prompts.path: got '', expected a path, or the name of a block in `saved`"),
    "without effect": (
        lambda: Sampling(temperature=0.0, top_p=0.5),
        "Sampling.top_p: 0.5 is not used: temperature 0 always takes the likeliest token; remove it, or set "
        "temperature: above 0",
    ),
    "a change": (
        assigned,
        "GRPO.batch_size: got 3, expected a new group, since groups do not change: GRPO(batch_size=3, ...)",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_settings_in_python_are_refused_in_one_line(case):
    make, line = WRONG[case]
    with pytest.raises(InvalidInput) as refused:
        make()
    assert str(refused.value) == line
    assert str(pickle.loads(pickle.dumps(refused.value))) == line
    assert "validation error" not in "".join(traceback.format_exception(refused.value))


def test_an_attribute_that_a_group_lacks_names_the_field_that_may_be_meant():
    with pytest.raises(AttributeError, match="^GRPO has no field 'batchsize'; closest: batch_size$"):
        GRPO().batchsize  # noqa: B018
    with pytest.raises(AttributeError, match="^GRPO has no field 'lr'; closest: optimizer.lr$"):
        GRPO().lr  # noqa: B018
    assert not hasattr(GRPO(), "train")


def test_a_group_is_copied_and_sent_as_before():
    algo = GRPO(batch_size=4)
    assert pickle.loads(pickle.dumps(algo)) == copy.deepcopy(algo) == GRPO.model_validate_json(algo.model_dump_json())
    assert algo.model_copy(update={"batch_size": 2}).batch_size == 2
