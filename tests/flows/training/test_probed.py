"""Which runs probe their devices, and which speeds a run uses."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from prefect_rlhf.flows.forms.options import RunOptions
from prefect_rlhf.flows.hardware import probes, profiles
from prefect_rlhf.flows.ppo import ppo
from prefect_rlhf.flows.training import probed
from prefect_rlhf.flows.training.probed import SPEEDS, awaits_probe, contradicted_profiles, with_speeds
from prefect_rlhf.flows.training.request import RunRequest
from prefect_rlhf.flows.training.spec.run_spec import read_spec
from prefect_rlhf.placement.cost.datasheets.hardware import Links
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.speeds import KnownSpeeds
from prefect_rlhf.placement.cost.times.profile import Measurement, Profile
from prefect_rlhf.placement.cost.times.roofline import DatasheetTimes
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.models.known_models import KNOWN_SHAPES
from tests.flows.hardware.test_probes import DESK, HELD
from tests.flows.hardware.test_probes import SPEEDS as QUIET
from tests.flows.test_algorithms import traced

pytestmark = pytest.mark.quick

SHAPE = KNOWN_SHAPES["llama-7b"]


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    monkeypatch.setattr(probes, "PROBES", tmp_path / "probes")
    monkeypatch.setattr(profiles, "PROFILES", tmp_path / "profiles")
    monkeypatch.setattr(probes, "_probe", lambda leased, dtype: replace(QUIET, dtype=dtype))


@pytest.fixture
def logged(monkeypatch):
    lines = []
    monkeypatch.setattr(probed, "log_info", lines.append)
    return lines


def request(lease=HELD, checkpoint=None, **options):
    """A request for PPO, without its inputs."""
    return RunRequest(
        read_spec(RunOptions(**options)), lease, SimpleNamespace(), traced(ppo), Workload.fixed(8, 8), checkpoint
    )


@pytest.mark.parametrize("plan", ["auto", "measure(2)"])
def test_a_search_probes_unmeasured_devices(plan):
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


def test_a_dry_run_uses_an_existing_probe():
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


def test_speeds_that_were_cut_off_are_reported_and_the_resumed_run_continues(tmp_path, logged):
    asked = resumed(tmp_path, KnownSpeeds(probes.machine_key(HELD), (QUIET,)), plan="auto")
    file = tmp_path / SPEEDS
    file.write_text(file.read_text()[:40])
    assert with_speeds(asked).speeds.by_dtype == (QUIET,)
    assert logged[0].startswith(f"the speeds of the resumed run are not known ({file}: got ")


def profiled(**seconds):
    """A profile of two ranks with these times of a layer and a link of 1 GB/s."""
    return Profile(
        SHAPE, "bfloat16", "cpu", (), tuple(Measurement(piece, 1, 8, 64, time) for piece, time in seconds.items()),
        Links(8e9, 1e9, 0.0, 5e9), 1e-9, num_devices=2,
    )  # fmt: skip


@pytest.mark.parametrize(("factor", "number"), [(1.0, 0), (10.0, 1)])
def test_a_line_states_that_profile_and_probe_contradict_each_other(factor, number):
    speeds = KnownSpeeds("key", (replace(QUIET, link_bytes_per_second=1e9),))
    asked = replace(request(plan="auto"), speeds=speeds)
    times = DatasheetTimes.of(ModelSizes.of_shape(SHAPE), asked.cost_sources.nodes[0])
    passes = {"forward": times.forward(8, 64, 1).total, "backward": times.backward(8, 64, 1).total}
    profile = profiled(**{piece: factor * seconds for piece, seconds in passes.items()})
    asked.__dict__["cost_sources"] = replace(asked.cost_sources, profiles=(profile,))
    lines = list(contradicted_profiles(asked))
    assert len(lines) == number
    assert all(line.startswith("profile and probe of these devices contradict each other: a layer's") for line in lines)
    assert not any("\n" in line for line in lines)


def test_a_run_resumed_on_another_machine_uses_the_speeds_of_that_machine(tmp_path):
    elsewhere = KnownSpeeds("cpu-8-other", (replace(QUIET, product_flops=1e11),))
    assert with_speeds(resumed(tmp_path, elsewhere, plan="auto")).speeds.by_dtype == (QUIET,)
