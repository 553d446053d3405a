"""No plan that may run is below its question's bound: the planner's real questions, asked and attacked."""

from random import Random

import pytest

from benchmarks.planner.referee import judge, questions
from tests.support.cases import first

LINES = questions()
ADAPTED = [line for line in LINES if ".adapter." in line]
SMALL = [line for line in LINES if "1x8:h100" in line and not line.startswith("grpo") and line not in ADAPTED]


def test_the_small_questions_are_with_and_without_older_weights():
    assert {True, False} == {"staleness" in line for line in SMALL}


def test_a_file_of_questions_may_have_comments(tmp_path):
    file = tmp_path / "questions.txt"
    file.write_text("# prefect-rlhf plan ...\ndpo --cluster 1x8:h100   # bound 1.7\n\nppo --cluster 2x8:h100\n")
    assert questions(file) == ["dpo --cluster 1x8:h100", "ppo --cluster 2x8:h100"]


@pytest.mark.all  # tests/placement/search/test_bound.py has the bound
@pytest.mark.parametrize("line", SMALL)
def test_no_plan_of_a_small_question_is_below_its_bound(line):
    """Neither the answer, nor a preset, nor plans drawn around them and anywhere."""
    verdict = judge(line, 15, 1.0, Random(len(line)), anneal_seconds=1.0)
    assert (verdict.violations, verdict.plans > 15) == (0, True)
    assert verdict.fastest <= verdict.auto
    assert sum(verdict.gap_parts.values()) == pytest.approx(verdict.gap)


@pytest.mark.parametrize("line", first(1, sorted(line for line in ADAPTED if "1x2:h100" in line)))
def test_no_plan_of_models_with_a_base_in_common_is_below_its_bound(line):
    """Actor, reference and critic hold it once: rival plans share it too, or offload it."""
    verdict = judge(line, 15, None, Random(len(line)), evaluations=10_000)
    assert (verdict.violations, verdict.plans >= 15) == (0, True)


def test_several_questions_are_about_adapters():
    """Of one role and of several, with all of its matrices in reach of a device, and over all devices of a node."""
    assert len(ADAPTED) >= 6 and {"grpo", "ppo", "dpo", "remax"} <= {line.split()[0] for line in ADAPTED}
    assert any(line.count(".adapter.") > 1 for line in ADAPTED)
    assert sum(".base_dtype=nf4" in line for line in ADAPTED) >= 2


@pytest.mark.all
@pytest.mark.parametrize("line", [line for line in LINES if line not in SMALL])
def test_no_plan_of_any_question_is_below_its_bound(line):
    verdict = judge(line, 60, 2.0, Random(len(line)))
    assert verdict.violations == 0
