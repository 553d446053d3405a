"""The seconds of a plan under wrong constants, and the constant that they depend on most."""

import pytest

from prefect_rlhf.placement.cost.datasheets.correction import CONSTANTS, Correction
from prefect_rlhf.placement.cost.datasheets.hardware import Hardware
from prefect_rlhf.placement.cost.datasheets.kinds import DATASHEETS
from prefect_rlhf.placement.cost.sources import CostSources
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.devices.mesh import ClusterShape
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.plan import Placement
from prefect_rlhf.placement.planner.fitted_constants import corrected
from prefect_rlhf.placement.planner.question import Question, Site
from prefect_rlhf.placement.schedule.changed_constants import WORK_OF, changed_seconds, strongest_dependence
from tests.support.strategies import ppo

NODE = ClusterShape("node", 1, 4, 80 << 30)
HARDWARE = Hardware(DATASHEETS["h100"], 4)


def asked(hardware=HARDWARE):
    return Question(ppo(), Site(NODE, NODE.whole, CostSources.equal_nodes(hardware, 1)), Workload.fixed(256, 256))


def plan(question):
    calls = [call for call in question.graph if call.kind != "compute"]
    return question.plan("mine", {call.name: Placement(NODE.whole, Strategy(dp=2, tp=2), "megatron") for call in calls})


def test_every_constant_has_words():
    assert WORK_OF.keys() == set(CONSTANTS)


def test_seconds_match_an_estimate_with_changed_constants():
    question = asked()
    changes = [Correction(), *(Correction(**{name: factor}) for name in CONSTANTS for factor in (0.5, 2.0))]
    mine = plan(question)
    found = changed_seconds(question.graph, mine, question.workload, question.site.sources, changes)
    assert found == pytest.approx([corrected(question, change).estimate(mine).seconds for change in changes], rel=1e-6)


@pytest.mark.parametrize("constant", ["compute", "link", "eager_launch", "call"])
def test_the_constant_that_takes_nearly_all_the_time_is_named(constant):
    """Twice as slow, it takes twice the time."""
    question = asked(Correction(**{constant: 1e8}).on(HARDWARE))
    found = strongest_dependence(question.graph, plan(question), question.workload, question.site.sources)
    assert found.constant == constant
    assert found.share == pytest.approx(1, abs=0.1)


def test_a_constant_that_no_node_uses_has_no_effect():
    question = asked()
    changes = [Correction(), Correction(network=2.0)]
    now, slower = changed_seconds(question.graph, plan(question), question.workload, question.site.sources, changes)
    assert now == slower
