"""What of a run's parameters is on the Hub is found before a device is used: names first, weights last."""

import pytest

from prefect_rlhf.blocks.dataset import Prompts
from prefect_rlhf.blocks.model import Model
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.flows.training.inputs import at_commits
from tests.support.hub_stand_in import in_this_process, stand_in
from tests.support.tiny import make_model


@pytest.fixture
def hub(tmp_path):
    make_model(tmp_path / "model")
    with stand_in() as hub, in_this_process(hub, tmp_path / "hf"):
        yield hub


def test_each_model_and_dataset_has_its_commit_and_the_rest_is_unchanged(hub, tmp_path):
    commit, rows = hub.add("acme/tiny", tmp_path / "model"), hub.add("datasets/acme/rows", {"a.jsonl": b"{}"})
    given = {
        "actor": Model(path="acme/tiny"),
        "critic": Model(path=str(tmp_path / "model"), head="scalar"),
        "prompts": Prompts(path="hf://datasets/acme/rows/a.jsonl"),
        "algo": object(),
    }
    found, commits = at_commits(given, {})
    assert found["actor"] == Model(path=f"hf://acme/tiny@{commit}")
    assert found["prompts"].path == f"hf://datasets/acme/rows@{rows}/a.jsonl"
    assert [found[name] is given[name] for name in ("critic", "algo")] == [True, True]
    assert commits == {"hf://acme/tiny@main": commit, "hf://datasets/acme/rows@main": rows}


@pytest.mark.parametrize("wrong", ["acme/none", "acme/tiny@none", "acme/gated"])
def test_a_model_that_cannot_be_read_costs_no_download_of_the_weights_of_another(hub, tmp_path, wrong):
    hub.add("acme/tiny", tmp_path / "model")
    hub.add("acme/gated", tmp_path / "model", gated=True)
    with pytest.raises(InvalidInput, match=f"critic.path: got '{wrong}'"):
        at_commits({"actor": Model(path="acme/tiny"), "critic": Model(path=wrong)}, {})
    assert hub.asked_for("GET", "safetensors") == []
