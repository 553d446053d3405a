"""The page on adapters shows what `plan` prints."""

import re
import shlex
from pathlib import Path

import pytest

from benchmarks.planner.read_flags import read_flags
from prefect_rlhf.errors.errors import TooLittleMemory
from prefect_rlhf.flows.algorithm.rlhf_flow import find_flow
from prefect_rlhf.flows.commands import plan as plan_command
from prefect_rlhf.flows.planning.answer import answer_question
from prefect_rlhf.flows.planning.what_if import read_question
from prefect_rlhf.placement.planner.space.plan_problem import PlanSpace
from tests.support.cases import first

PAGE = (Path(__file__).parents[3] / "docs" / "adapters.md").read_text()
SHOWN = re.findall(r"```console\n\$ prefect-rlhf plan ([^\n]*)\n```\n\n```text\n(.*?)```", PAGE, re.DOTALL)


def test_the_page_shows_7b_on_one_device_and_on_24_gb_also_in_four_bits_and_70b_on_eight():
    commands = [command for command, _ in SHOWN]
    assert [command.partition("actor=")[2].split()[0] for command in commands] == [
        "llama-7b",
        "llama-70b",
        "mistral-7b",
        "mistral-7b",
    ]
    assert [re.findall(r"--cluster (\S+)", command)[0] for command in commands] == [
        "1x1:h100",
        "1x8:h100",
        "1x1:rtx4090",
        "1x1:rtx4090",
    ]
    assert ["base_dtype=nf4" in command for command in commands] == [False, False, False, True]


@pytest.mark.parametrize(("command", "answer"), first(1, SHOWN))
def test_the_page_shows_the_first_lines_of_each_answer(command, answer):
    """Whether it fits, the seconds of a step, the command that runs it, and the plan."""
    flags = read_flags(plan_command.plan, shlex.split(command))
    words = plan_command.parameter_words(flags)
    printed = answer_question(plan_command.read_options(flags), None, words).text().splitlines()
    printed = [line.rstrip() for line in printed]
    shown = answer.splitlines()
    assert printed[: len(shown)] == shown
    assert shown[0].startswith("fits: ") and len(shown) >= 5


@pytest.mark.parametrize("command", [command for command, _ in SHOWN])
def test_without_its_adapter_no_plan_fits(command):
    whole = command.replace("-p actor.adapter.rank=32 ", "").replace("-p actor.base_dtype=nf4 ", "")
    options = plan_command.read_options(read_flags(plan_command.plan, shlex.split(whole)))
    assert "adapter" in command and "adapter" not in whole
    with pytest.raises(TooLittleMemory, match=r"calls\.actor_train"):
        PlanSpace.of(read_question(find_flow(options.algorithm), options))
