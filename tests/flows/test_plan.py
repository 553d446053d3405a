"""Plans made by search: before a run, for the leased mesh, and remembered."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prefect_rlhf.flows import auto_plan as auto
from prefect_rlhf.flows.run import choose_plan
from prefect_rlhf.placement.check import check_plan
from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.placement.fit import certify_plan, longest_rows
from prefect_rlhf.placement.lease import Lease
from prefect_rlhf.placement.presets import PRESETS
from tests.strategies import GIB, TWO_DEVICES, dpo, remax

HELD = Lease("pool", "abc", TWO_DEVICES, TWO_DEVICES.whole, TWO_DEVICES.whole.devices())
LONGEST = 256


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    """Plans that earlier runs left are not this test's."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(auto, "BUDGET_SECONDS", 0.5)
    return tmp_path


def test_auto_gives_a_legal_plan_that_its_certificate_passes():
    plan = choose_plan("auto", remax(), HELD, LONGEST)
    assert check_plan(plan, remax(), HELD.mesh)
    assert certify_plan(plan, remax(), longest_rows(remax(), LONGEST), "cpu").fits


def test_what_is_known_of_the_plan_is_said():
    """Estimate, bound, what binds, how the search ended, and every preset."""
    said: list[str] = []
    auto.auto_plan(remax(), HELD, LONGEST, said.append)
    for words in ("s an iteration by the estimate", "above the bound", "what binds: ", "search: ", *PRESETS):
        assert words in said[-1]


def test_a_plan_found_once_is_not_searched_again(monkeypatch):
    first = auto.auto_plan(remax(), HELD, LONGEST, print)
    monkeypatch.setattr(auto, "plan_graph", lambda *_, **__: pytest.fail("searched again"))
    said: list[str] = []
    assert auto.auto_plan(remax(), HELD, LONGEST, said.append) == first
    assert "found before" in said[0] and "what binds" in said[0]


@pytest.mark.parametrize(
    ("graph", "held", "longest"),
    [
        (dpo(), HELD, LONGEST),
        (remax(), replace(HELD, cluster=replace(TWO_DEVICES, device_memory_bytes=4 * GIB)), LONGEST),
        (remax(), HELD, 2 * LONGEST),
    ],
    ids=["graph", "memory", "length"],
)
def test_another_question_is_searched_anew(home, graph, held, longest):
    auto.auto_plan(remax(), HELD, LONGEST, print)
    auto.auto_plan(graph, held, longest, print)
    assert len(list((home / ".prefect-rlhf/plans").glob("*.yaml"))) == 2


def test_a_remembered_plan_that_somebody_broke_is_named_and_made_anew(home):
    first = auto.auto_plan(remax(), HELD, LONGEST, print)
    (file,) = (home / ".prefect-rlhf/plans").glob("*.yaml")
    file.write_text("name: auto\ncalls: {}\n")
    said: list[str] = []
    assert auto.auto_plan(remax(), HELD, LONGEST, said.append) == first
    assert str(file) in said[0] and "searched anew" in said[0]


def test_a_gpu_that_nobody_can_name_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InvalidInput, match="kind: got 'cuda', expected a machine with nvidia-smi"):
        choose_plan("auto", remax(), replace(HELD, kind="cuda"), LONGEST)


def test_a_gpu_is_counted_by_its_datasheet(monkeypatch, tmp_path):
    """The name is what the driver's tool prints."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho NVIDIA H200\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    (node,) = auto.cost_sources(replace(HELD, kind="cuda")).nodes
    assert (node.device.name, node.devices_per_node) == ("h200", 2)
