"""Names and tags of runs: a list of runs says algorithm, model and plan, and keeps what a person named."""

import pytest
from prefect import flow, tags
from prefect.context import FlowRunContext
from prefect.utilities.names import generate_slug

from prefect_rlhf.blocks.dataset import Prompts
from prefect_rlhf.blocks.model import Model
from prefect_rlhf.flows.training.run_name import described, is_generated, main_model, naming, new_name, tag_run

ARGUMENTS = {"prompts": Prompts(path="data/prompts.parquet"), "actor": Model(path="models/smollm2")}


@flow(name="named")
def named(actor, chosen):
    """Tag itself as a run does: before it has a plan, and then."""
    tag_run("grpo", {"actor": actor}, "auto")
    tag_run("grpo", {"actor": actor}, "auto", chosen)
    run = FlowRunContext.get().flow_run
    return run.name, run.tags


def test_a_run_says_algorithm_model_and_plan_and_keeps_a_persons_tags(prefect):
    with tags("nightly", "team:blue"):
        name, found = named.with_options(flow_run_name=naming("grpo"))(ARGUMENTS["actor"], "auto-2")
    assert name.startswith("grpo-smollm2-") and is_generated(name.removeprefix("grpo-smollm2-"))
    assert sorted(found) == ["actor:smollm2", "algorithm:grpo", "nightly", "plan:auto->auto-2", "team:blue"]


def test_a_name_that_a_person_gave_stays(monkeypatch):
    """And that of a run which is started again, since its folder has it."""
    for given, count, kept in (("nightly-grpo", 0, True), ("tidy-fox", 1, True), (generate_slug(2), 0, False)):
        monkeypatch.setattr("prefect_rlhf.flows.training.run_name.flow_run", _Run(given, count))
        assert naming("grpo")() == (given if kept else f"grpo-smollm2-{given}")


class _Run:
    """What `prefect.runtime` says of a run."""

    def __init__(self, name: str, run_count: int) -> None:
        self.name, self.run_count, self.parameters = name, run_count, ARGUMENTS


def test_every_name_that_prefect_makes_up_is_known():
    """Else runs would have no better name than before."""
    assert all(is_generated(generate_slug(2)) for _ in range(500))
    assert not any(map(is_generated, ("nightly-grpo", "grpo-smollm2-tidy-fox", "tidy", "fox", "")))


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("models/smollm2", "smollm2"),
        ("models/SmolLM2 135M/", "SmolLM2-135M"),
        ("/hub/models--acme--judge/snapshots/0f3a", "judge"),
        ("s3://bucket/models/acme-7b", "acme-7b"),
        ("models/{x}", "x"),
        ("models/" + "x" * 200, "x" * 40),
        ("..", "unnamed"),
    ],
)
def test_a_models_name_is_a_valid_folder_name(path, name):
    assert main_model({"actor": Model(path=path)}) == ("actor", name)


def test_a_run_without_an_actor_is_named_after_its_first_model_and_without_a_model_after_its_algorithm():
    assert main_model({"reward": Model(path="models/judge"), "ref": Model(path="models/other")}) == ("reward", "judge")
    assert described("mine/{x}", {}, "tidy-fox") == "mine-x-tidy-fox"
    assert new_name("grpo", ARGUMENTS).startswith("grpo-smollm2-")
