"""`benchmarks.learn --rank`: the same task with an adapter, at ten times the learning rate."""

import pytest

from benchmarks.learn import offline
from benchmarks.learn.__main__ import ALGORITHMS, adapted, parameters
from prefect_rlhf.blocks.model import Model


@pytest.mark.parametrize("name", [*ALGORITHMS, *offline.STEPS])
def test_a_rank_changes_the_actor_and_its_rate_alone(tmp_path, name):
    given = (parameters if name in ALGORITHMS else offline.parameters)(tmp_path, name, 1, 5)
    changed, printed = adapted(given, 8)
    assert Model.model_validate(changed["actor"]).adapter.rank == 8
    assert {**changed["actor"], "adapter": None} == {**given["actor"], "adapter": None}
    ((optimizer, before),) = ((key, value) for key, value in given["algo"].items() if key.endswith("optimizer"))
    after = changed["algo"][optimizer]
    assert after == {**before, "lr": after["lr"]}
    assert printed == {"rank": 8, "lr": pytest.approx(10 * before["lr"])}
    others = given.keys() - {"actor", "algo"}
    assert {key: changed[key] for key in others} == {key: given[key] for key in others}


def test_a_learning_rate_that_is_given_is_the_adapters(tmp_path):
    changed, printed = adapted(parameters(tmp_path, "grpo", 1, 5), 8, 3e-5)
    assert changed["algo"]["optimizer"]["lr"] == printed["lr"] == 3e-5
