"""The parameter `plan` is read once, as a value that says of what kind it is."""

from pathlib import Path

import pytest

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.flows.training.spec.plan_choice import (
    Auto,
    Measure,
    PlanContent,
    PlanFile,
    PlansByStep,
    PresetPlan,
    read_plan_choice,
)


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("auto", Auto()),
        ("measure(3)", Measure(3)),
        ("flattening", PresetPlan("flattening")),
        ("flatening", PresetPlan("flatening")),  # its completion names the presets
        ("measurement", PresetPlan("measurement")),
        ("measured.yaml", PlanFile(Path("measured.yaml"))),
        ("plans/measure(2).yaml", PlanFile(Path("plans/measure(2).yaml"))),
    ],
)
def test_each_kind_of_plan_has_its_own_value(text, choice):
    assert read_plan_choice(text) == choice
    assert str(choice) == text


@pytest.mark.parametrize(
    "text",
    [
        "measure(0)",
        "measure(11)",
        "measure()",
        "measure",
        "measure(two)",
        "measure(-1)",
        "measure(2.5)",
        "measure 2",
        "measure(2",
        "measure(2) ",
    ],
)
def test_a_number_of_plans_that_cannot_be_measured_is_refused(text):
    with pytest.raises(InvalidInput) as error:
        read_plan_choice(text)
    assert str(error.value) == f"plan: got {text!r}, expected measure(k), which runs k plans, from 1 to 10"


def test_plans_by_step_are_read_alike_from_the_form_and_from_a_file(tmp_path):
    file = tmp_path / "plans.yaml"
    file.write_text("1: auto\n41: plans/long.yaml\n")
    stated, written = read_plan_choice({1: "auto", 41: "plans/long.yaml"}), read_plan_choice(str(file))
    assert stated.plans == written.plans == ((1, Auto()), (41, PlanFile(Path("plans/long.yaml"))))
    assert (str(stated), str(written)) == ("auto, long from 41", str(file))
    assert str(read_plan_choice({})) == ""


def test_a_file_of_plans_by_step_may_have_their_content(tmp_path):
    (tmp_path / "plans.yaml").write_text("1:\n  calls: {}\n3: split\n")
    choice = read_plan_choice(str(tmp_path / "plans.yaml"))
    assert choice.plans == ((1, PlanContent({"calls": {}})), (3, PresetPlan("split")))
    assert choice.until(2) == PlansByStep(choice.plans[:1], choice.file) and choice.until(0) is None


def test_the_file_of_a_single_plan_is_not_read_yet(tmp_path):
    (tmp_path / "plan.yaml").write_text("calls: {}\n")
    assert read_plan_choice(str(tmp_path / "plan.yaml")) == PlanFile(tmp_path / "plan.yaml")


@pytest.mark.parametrize("entry", ["measure(2)", "plans.yaml"])
def test_an_entry_of_plans_by_step_is_a_single_plan(tmp_path, monkeypatch, entry):
    monkeypatch.chdir(tmp_path)
    Path("plans.yaml").write_text("1: auto\n")
    with pytest.raises(InvalidInput) as error:
        read_plan_choice({1: "auto", 6: entry})
    assert str(error.value) == f"plan.6: got '{entry}', expected auto, a preset's name or the file of a single plan"
