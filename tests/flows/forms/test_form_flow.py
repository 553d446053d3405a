"""A flow's form: parameters are checked once, in one line, whoever passes them."""

import json

import pytest
from prefect.utilities.schema_tools.validation import is_valid

from prefect_rlhf.blocks.dataset import PreferencesBlock, Prompts
from prefect_rlhf.blocks.model import Model, ModelBlock
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.flows.algorithm.rlhf_flow import rlhf_flow
from prefect_rlhf.flows.commands.flags import read_parameters
from prefect_rlhf.flows.dpo import dpo
from prefect_rlhf.flows.plan import plan
from prefect_rlhf.tasks.rl.settings.online import GRPO
from prefect_rlhf.tasks.settings import Optimizer

pytestmark = pytest.mark.quick

SMALL = GRPO(batch_size=4, advantage="gdpo", optimizer=Optimizer(lr=1e-3, head_lr=0.5))
PARAMETERS = {
    "pairs": {"path": "pairs.parquet"},
    "held_out": {"path": "others.parquet"},
    "actor": {"saved": "big"},
    "ref": {"path": "models/small"},
}


def test_a_saved_block_is_loaded_once(monkeypatch):
    """From the server, though Prefect checks the parameters too."""
    loaded = []

    def load(name, **_):
        loaded.append(name)
        return ModelBlock(path="models/big")

    monkeypatch.setattr(ModelBlock, "load", load)
    checked = dpo.validate_parameters(PARAMETERS)
    assert loaded == ["big"]
    assert (checked["actor"].path, checked["steps"]) == ("models/big", 10)
    assert dpo.validate_parameters(checked) == checked and loaded == ["big"]


def test_a_block_itself_is_taken(monkeypatch):
    checked = dpo.validate_parameters(PARAMETERS | {"pairs": PreferencesBlock(path="p"), "actor": {"path": "m"}})
    assert (checked["pairs"].path, checked["actor"].path) == ("p", "m")


@pytest.mark.parametrize("flow", [dpo, plan])
def test_an_unknown_parameter_is_refused_with_the_known_names(flow):
    says = r"xyz: unknown key \(got 'red'\); the parameters are .*, output_dir, .*dry_run"
    with pytest.raises(InvalidInput, match=says):
        flow.validate_parameters({"xyz": "red"})


@pytest.mark.parametrize("said", ["plan={1: auto, 41: plans/long.yaml}", '{"1": "auto", "41": "plans/long.yaml"}'])
def test_plans_by_step_are_accepted_from_the_form_and_the_command_line(said):
    """A form sends JSON, whose keys are texts; the deployment's schema lets them pass."""
    plans = read_parameters(None, [said])["plan"] if said.startswith("plan=") else json.loads(said)
    schema = dpo.parameters.model_dump()
    of_plan = {"type": "object", "properties": {"plan": schema["properties"]["plan"]}}
    assert is_valid({"plan": json.loads(json.dumps(plans))}, of_plan)
    assert not is_valid({"plan": {"0": 3}}, of_plan) and not is_valid({"plan": ["auto"]}, of_plan)
    given = PARAMETERS | {"actor": {"path": "models/big"}, "plan": plans}
    assert dpo.validate_parameters(given)["plan"] == {1: "auto", 41: "plans/long.yaml"}


@rlhf_flow("small")
def small(prompts: Prompts, actor: Model, algo: GRPO = SMALL) -> None:
    """Never run."""


def test_unnamed_settings_keep_the_flows_defaults():
    """Group within group; a table of weights, and a group that is given as a value, are taken whole."""
    given = {"prompts": {"path": "p"}, "actor": {"path": "m"}}
    named = {"clip_low": 0.1, "optimizer": {"head_lr": 0.25}, "reward_weights": {"a": 2.0}}
    checked = small.validate_parameters(given | {"algo": named})["algo"]
    assert (checked.batch_size, checked.clip_low, checked.reward_weights) == (4, 0.1, {"a": 2.0})
    assert checked.optimizer == Optimizer(lr=1e-3, head_lr=0.25)
    assert small.validate_parameters(given | {"algo": GRPO()})["algo"] == GRPO()
    with pytest.raises(InvalidInput, match=r"algo\.optimizer\.rate: unknown key \(got 1\); the keys are lr, "):
        small.validate_parameters(given | {"algo": {"optimizer": {"rate": 1}}})
    with pytest.raises(InvalidInput, match="algo.reward_weights: {'a': 2.0} is not used: advantage"):
        small.validate_parameters(given | {"algo": {"advantage": "grpo", "reward_weights": {"a": 2.0}}})
