"""Plan files count devices from the first device of the lease: a plan runs on whichever devices a run was given."""

import pytest

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.flows.sft import sft
from prefect_rlhf.placement.devices.lease import ENVIRONMENT_VARIABLE, Lease
from prefect_rlhf.placement.devices.mesh import ClusterShape, DeviceMesh
from tests.support.runs import completed, plan_file, prepared
from tests.support.tiny import make_model
from tests.tasks.data.stored import json_lines

SITE = ClusterShape("site", 4, 2, 8 << 30)
DESK = ClusterShape("desk", 1, 2, 8 << 30)  # runs without Ray
PARTS = {"n0:0": DeviceMesh(0, 1, 0, 1), "n0:1": DeviceMesh(0, 1, 1, 1), "n3:1": DeviceMesh(3, 1, 1, 1)}


def lease_of(mesh, cluster=SITE):
    return Lease("pool", "abc", cluster, mesh, mesh.devices())


@pytest.fixture(scope="module")
def parameters(tmp_path_factory):
    folder = tmp_path_factory.mktemp("leased")
    chat = {"messages": [{"role": "user", "content": "what is it"}, {"role": "assistant", "content": "the best film"}]}
    chats = {"path": json_lines(folder / "chats.jsonl", *[chat] * 4), "split_column": None}
    given = {"chats": chats, "held_out": chats, "algo": {"batch_size": 4}}
    given |= {"actor": {"path": make_model(folder / "actor")}, "steps": 2, "output_dir": str(folder / "runs")}
    files = {name: folder / f"{name}.json" for name in ("one", "cut", "wide")}
    of_calls = {
        "one": "0 engine=megatron",
        "cut": "0 engine=megatron micro_batches=2",
        "wide": "0-3 engine=megatron dp4",
    }
    for name, words in of_calls.items():
        evaluation = words.removesuffix(" micro_batches=2")
        plan_file({"actor_train": words, "actor_evaluation": evaluation}, files[name], ("token_loss",), per_node=2)
    return given | {"plans": {name: str(file) for name, file in files.items()}}


def decided(parameters, plan, mesh, **changes):
    given = {key: value for key, value in parameters.items() if key != "plans"}
    return prepared(sft, given | {"plan": plan} | changes, lease_of(mesh))


@pytest.mark.parametrize("name", PARTS)
def test_a_single_device_plan_runs_on_any_leased_device(parameters, name):
    """Also the plans of a list by step, and a dry run, which has the mesh that it would get."""
    plans = parameters["plans"]
    chosen = decided(parameters, plans["one"], PARTS[name]).chosen
    assert {placement.mesh.name for _, placement in chosen.plan.placements} == {name}
    by_step = decided(parameters, {1: plans["one"], 2: plans["cut"]}, PARTS[name]).plans
    assert [each.chosen.plan["actor_train"].mesh.name for each in by_step] == [name, name]
    dry = decided(parameters, plans["one"], PARTS[name], dry_run=True).chosen
    assert dry.plan == chosen.plan


def test_a_two_node_plan_runs_on_any_two_leased_nodes(parameters):
    """A plan for more devices than a smaller lease has is refused; the line says how devices are counted."""
    wide = parameters["plans"]["wide"]
    chosen = decided(parameters, wide, DeviceMesh(2, 2, 0, 2)).chosen
    assert chosen.plan["actor_train"].mesh.name == "n2-3:0-1"
    says = r"mesh: got 'n0-1:0-1', expected devices of the lease n3:0-1, counted from its first: n0:0-1"
    with pytest.raises(InvalidInput, match=says):
        decided(parameters, wide, DeviceMesh(3, 1, 0, 2))


@pytest.mark.slow
@pytest.mark.usefixtures("prefect", "own_home")
def test_a_run_goes_on_with_its_own_plan_file_on_another_device(parameters, monkeypatch, caplog):
    """What a run writes counts from its lease too: `plan.yaml` and the plan of a checkpoint are the same on another."""
    given = {key: value for key, value in parameters.items() if key != "plans"} | {"checkpoint_every": 1}
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, lease_of(PARTS["n0:1"], DESK).to_json())
    first = completed(sft, given | {"plan": parameters["plans"]["one"]})
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, lease_of(PARTS["n0:0"], DESK).to_json())
    again = completed(sft, given | {"plan": str(first / "plan.yaml"), "resume_from": str(first), "steps": 3})
    assert "the run goes on at step 3, under the same plan" in caplog.text
    assert (first / "plan.yaml").read_text() == (again / "plan.yaml").read_text()
