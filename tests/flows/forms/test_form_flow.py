"""A flow's form: parameters are checked once, in one line, whoever passes them."""

import pytest

from prefect_rlhf.blocks.dataset import PreferencesBlock
from prefect_rlhf.blocks.model import ModelBlock
from prefect_rlhf.flows.dpo import dpo
from prefect_rlhf.flows.plan import plan
from prefect_rlhf.placement.errors import InvalidInput

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
def test_a_parameter_that_a_flow_has_not_is_refused_with_those_that_it_has(flow):
    with pytest.raises(
        InvalidInput, match="colour: got 'red', expected one of the parameters .*, output_dir, .*dry_run"
    ):
        flow.validate_parameters({"colour": "red"})
