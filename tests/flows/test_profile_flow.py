"""The flow `rlhf/profile`, with a real server and engines on one device, and what the next run makes of it."""

from pathlib import Path

import pytest

from prefect_rlhf.engines.files.huggingface import read_model_spec
from prefect_rlhf.flows.commands.cli import main
from prefect_rlhf.flows.hardware import profiles
from prefect_rlhf.flows.profile import profile
from prefect_rlhf.placement.cost.times.profile import Profile
from prefect_rlhf.placement.devices.lease import ENVIRONMENT_VARIABLE
from prefect_rlhf.placement.devices.mesh import ClusterShape
from tests.support.runs import whole
from tests.support.tiny import make_model

HELD = whole(ClusterShape("desk", 1, 1, 8 << 30))


@pytest.fixture(autouse=True)
def leased(tmp_path, monkeypatch):
    """One device, and a folder of profiles of its own."""
    monkeypatch.setattr(profiles, "PROFILES", tmp_path / "profiles")
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, HELD.to_json())


@pytest.mark.all
@pytest.mark.usefixtures("prefect")
def test_a_flow_run_leaves_a_profile_that_the_next_run_uses(tmp_path):
    model = make_model(tmp_path / "model")
    state = profile(model, most_rows=1, longest=16, return_state=True)
    refused = profile("no-such-model", return_state=True)
    made = Profile.read(Path(state.result()))
    assert profiles.measured_sources([read_model_spec("actor", model, "lm")], HELD).profiles == (made,)
    assert refused.is_failed()
    assert refused.message.startswith("InvalidInput: models.model: got 'no-such-model'")


def test_a_dry_run_makes_no_measurement(tmp_path, capsys):
    model = make_model(tmp_path / "model")
    assert main(["profile", model, "--rows", "2", "--longest", "16", "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith(f"12 measurements of {model}, to be stored in {tmp_path}")
    assert not (tmp_path / "profiles").exists()
