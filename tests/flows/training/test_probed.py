"""Which runs probe their devices, and which speeds a run uses."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from prefect_rlhf.flows.forms.options import RunOptions
from prefect_rlhf.flows.hardware import probes, profiles
from prefect_rlhf.flows.ppo import ppo
from prefect_rlhf.flows.training.probed import SPEEDS, awaits_probe, with_speeds
from prefect_rlhf.flows.training.request import RunRequest
from prefect_rlhf.placement.cost.speeds import KnownSpeeds
from prefect_rlhf.placement.cost.workload import Workload
from tests.flows.hardware.test_probes import DESK, HELD
from tests.flows.hardware.test_probes import SPEEDS as QUIET
from tests.flows.test_algorithms import traced

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    monkeypatch.setattr(probes, "PROBES", tmp_path / "probes")
    monkeypatch.setattr(profiles, "PROFILES", tmp_path / "profiles")
    monkeypatch.setattr(probes, "_probe", lambda leased, dtype: replace(QUIET, dtype=dtype))


def request(lease=HELD, checkpoint=None, **options):
    """A request for PPO, without its inputs."""
    return RunRequest(RunOptions(**options), lease, SimpleNamespace(), traced(ppo), Workload.fixed(8, 8), checkpoint)


@pytest.mark.parametrize("plan", ["auto", "measure(2)"])
def test_a_search_probes_devices_that_nothing_has_measured(plan):
    asked = request(plan=plan)
    assert awaits_probe(asked)
    answered = with_speeds(asked)
    assert answered.speeds.by_dtype == (QUIET,)
    assert answered.cost_sources.nodes[0] == answered.speeds.on(asked.cost_sources.nodes[0])
    assert not awaits_probe(request(plan=plan))


@pytest.mark.parametrize(
    "asked",
    [
        request(plan="flattening"),
        request(plan="auto", dry_run=True),
        request(replace(HELD, devices=()), plan="auto"),
        request(replace(HELD, cluster=replace(DESK, node_speeds=(0.5,))), plan="auto"),
    ],
    ids=["preset", "dry run", "no devices", "nodes of stated speeds"],
)
def test_other_runs_do_not_probe(asked):
    assert not awaits_probe(asked)
    assert with_speeds(asked).speeds is None


def test_a_dry_run_uses_a_probe_that_is_there():
    """So its plan is the plan of the run."""
    known = with_speeds(request(plan="auto")).speeds
    assert with_speeds(request(replace(HELD, devices=()), plan="auto", dry_run=True)).speeds == known


def resumed(folder, speeds, **options):
    (folder / SPEEDS).write_text(speeds.to_json())
    return request(checkpoint=SimpleNamespace(folder=Path(folder, "checkpoints", "3")), **options)


def test_a_resumed_run_keeps_the_speeds_that_its_plan_was_chosen_by(tmp_path):
    with_speeds(request(plan="auto"))
    before = KnownSpeeds(probes.machine_key(HELD), (replace(QUIET, product_flops=1e11),))
    assert with_speeds(resumed(tmp_path, before, plan="auto")).speeds == before


def test_a_run_resumed_on_another_machine_uses_the_speeds_of_that_machine(tmp_path):
    elsewhere = KnownSpeeds("cpu-8-other", (replace(QUIET, product_flops=1e11),))
    assert with_speeds(resumed(tmp_path, elsewhere, plan="auto")).speeds.by_dtype == (QUIET,)
