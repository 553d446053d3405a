"""Plan files: what is written is read back, and what is wrong is named."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.devices.mesh import ClusterShape, DeviceMesh
from prefect_rlhf.placement.plans.plan_file import plan_json, plan_yaml, read_plan
from tests.support.cases import examples
from tests.support.strategies import GIB, plans, ppo

pytestmark = pytest.mark.quick

CLUSTER = ClusterShape("desk", 2, 4, 8 * GIB)
GOOD = {"name": "mine", "calls": {"actor_generate": {"mesh": "n0:0-1", "engine": "vllm", "dp": 2}}}


@settings(max_examples=examples(30))
@given(data=st.data())
def test_a_written_plan_reads_back_equal(tmp_path, data):
    plan = data.draw(plans(ppo(), CLUSTER))
    (tmp_path / "plan.yaml").write_text(plan_yaml(plan))
    assert read_plan(tmp_path / "plan.yaml", CLUSTER) == plan


@settings(max_examples=examples(30))
@given(data=st.data())
def test_a_plan_file_counts_from_the_first_leased_device(tmp_path, data):
    """Its text is the same for every lease of that shape, and its plan lies in the lease at the same place."""
    plan = data.draw(plans(ppo(), CLUSTER))
    leased = DeviceMesh(data.draw(st.integers(0, 3)), 2, 0, 4)
    site = ClusterShape("site", 5, 4, 8 * GIB, leased=leased)
    (tmp_path / "plan.yaml").write_text(plan_yaml(plan))
    there = read_plan(tmp_path / "plan.yaml", site)
    assert plan_yaml(there) == plan_yaml(plan)
    for (name, here), (other, moved) in zip(plan.placements, there.placements, strict=True):
        mesh = replace(here.mesh, first_node=here.mesh.first_node + leased.first_node)
        assert (other, moved) == (name, replace(here, mesh=mesh))


def test_json_is_read_too(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(GOOD))
    plan = read_plan(path, CLUSTER)
    assert plan["actor_generate"].name == "n0:0-1 dp2"
    assert (plan.name, plan["actor_generate"].micro_batches, plan["actor_generate"].offload) == ("mine", 1, "none")


def test_an_answers_figures_are_written_with_the_plan_and_skipped_when_read(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(GOOD))
    plan = read_plan(path, CLUSTER)
    path.write_text(plan_json(plan, {"seconds": 2.5}))
    assert json.loads(path.read_text())["figures"] == {"seconds": 2.5}
    assert read_plan(path, CLUSTER) == plan


def test_speeds_of_nodes_are_part_of_a_plan(tmp_path):
    """One for each node of the cluster, above 0; written and read."""
    content = GOOD | {"node_speeds": [1.0, 0.5]}
    (tmp_path / "plan.json").write_text(json.dumps(content))
    plan = read_plan(tmp_path / "plan.json", CLUSTER)
    assert plan.cluster.node_speeds == (1.0, 0.5)
    (tmp_path / "again.yaml").write_text(plan_yaml(plan))
    assert read_plan(tmp_path / "again.yaml", CLUSTER) == plan
    site = ClusterShape("site", 4, 4, 8 * GIB, leased=DeviceMesh(1, 2, 0, 4))
    assert read_plan(tmp_path / "plan.json", site).cluster.node_speeds == (1.0, 1.0, 0.5, 1.0)
    assert plan_yaml(read_plan(tmp_path / "plan.json", site)) == plan_yaml(plan)
    for speeds, says in (([1.0], "a speed for each of the 2 nodes of desk"), ([1.0, 0.0], "numbers above 0")):
        (tmp_path / "plan.json").write_text(json.dumps(content | {"node_speeds": speeds}))
        with pytest.raises(InvalidInput, match=rf"plan.node_speeds: got \[.*\], expected {says}"):
            read_plan(tmp_path / "plan.json", CLUSTER)


def test_a_file_has_one_line_per_call(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(GOOD))
    assert plan_yaml(read_plan(path, CLUSTER)) == (
        "name: mine\ncalls:\n  actor_generate: {mesh: 'n0:0-1', engine: vllm, dp: 2, tp: 1, pp: 1, offload: none}\n"
    )


def entry(**changes):
    return json.dumps({"name": "mine", "calls": {"actor_generate": GOOD["calls"]["actor_generate"] | changes}})


BAD = {
    "misspelt key of a call": (entry(tpp=2), "plan.calls.actor_generate.tpp: unknown key (got 2); the keys are"),
    "misspelt key of the file": ('{"name": "x", "call": {}}', "plan.call: unknown key (got {})"),
    "misspelt key in place of a needed one": (
        '{"name": "x", "calls": {"a": {"mehs": "n0:0", "engine": "vllm"}}}',
        "plan.calls.a.mehs: unknown key (got 'n0:0'); the keys are mesh, engine",
    ),
    "a number in quotes": (entry(dp="2"), "actor_generate.dp: got '2', expected a whole number, without quotes"),
    "a number too large": (entry(dp=10**50), "expected at most 1048576"),
    "a call by number": (
        "name: x\ncalls:\n  1: {mesh: 'n0:0', engine: vllm}",
        "plan.calls: got 1, expected the name of a call",
    ),
    "a setting by number": ("name: x\ncalls:\n  a: {1: 'n0:0', engine: vllm}", "plan.calls.a: got"),
    "a mesh by number": (entry(mesh=0), 'actor_generate.mesh: got 0, expected a mesh such as "n0:0-1"'),
    "a name that is a number": (
        "name: 3\ncalls: {a: {mesh: 'n0:0', engine: vllm}}",
        "plan.name: got 3, expected words, in quotes",
    ),
    "a merge with a word": ("name: x\ncalls: {a: {<<: 3, engine: vllm}}", "expected YAML or JSON (line 2: "),
    "a tag": ("!!python/object/apply:os.system [ls]", "plain values have no tag such as tag:yaml.org,2002:python"),
    "aliases of aliases": (
        "\n".join(["a0: &a0 [x]", *(f"a{n}: &a{n} [{f'*a{n - 1},' * 9}]" for n in range(1, 12))]),
        "YAML or JSON (more than 20000 values)",
    ),
    "a value that contains itself": ("a: &a [*a]", "YAML or JSON (a value that contains itself)"),
    "a binary file": ("\x7fELF\x02\x01\0", "text without control characters"),
    "extra key of the file": (
        '{"name": "x", "cals": {}, "calls": {"a": {"mesh": "n0:0", "engine": "vllm"}}}',
        "plan.cals: unknown key (got {}); the keys are name, node_speeds, calls",
    ),
    "degree as text": (entry(tp="two"), "plan.calls.actor_generate.tp: got 'two', expected a whole number"),
    "degree of zero": (entry(tp=0), "plan.calls.actor_generate.tp: got 0, expected 1 or more"),
    "degree as a fraction": (entry(dp=1.5), "plan.calls.actor_generate.dp: got 1.5"),
    "truth as text": (entry(offload="yes please"), "plan.calls.actor_generate.offload: got 'yes please'"),
    "order of names": (entry(order=["n0:0"]), "plan.calls.actor_generate.order.0: got 'n0:0', expected a whole number"),
    "order as a number": (entry(order=1), "plan.calls.actor_generate.order: got 1, expected a list such as"),
    "parts by a word": (entry(parts="four"), "plan.calls.actor_generate.parts: got 'four', expected a whole number"),
    "no part": (entry(parts=0), "plan.calls.actor_generate.parts: got 0, expected 1 or more"),
    "recomputation by a word": (
        entry(recompute="half"),
        "actor_generate.recompute: got 'half', expected all, or the number of layers of each pipeline stage",
    ),
    "recomputation by a truth": (entry(recompute=True), "actor_generate.recompute: got True, expected all, or the"),
    "unknown engine": (entry(engine="sglang"), "plan.calls.actor_generate.engine: got 'sglang', expected 'megatron'"),
    "no mesh name": (entry(mesh="gpu0"), "plan.calls.actor_generate.mesh: got 'gpu0', expected a mesh such as n0:0-1"),
    "mesh that ends before it begins": (entry(mesh="n0:3-1"), "actor_generate.mesh: got 'n0:3-1', expected ranges"),
    "mesh outside the cluster": (entry(mesh="n7:0"), "actor_generate.mesh: got 'n7:0', expected nodes 0 to 1"),
    "no mesh": ('{"name": "x", "calls": {"a": {"engine": "vllm"}}}', "plan.calls.a.mesh: missing"),
    "no name": ('{"calls": {"a": {"mesh": "n0:0", "engine": "vllm"}}}', "plan.name: missing"),
    "no calls": ('{"name": "x", "calls": {}}', "plan.calls: got {}, expected names of calls"),
    "calls as a list": ('{"name": "x", "calls": []}', "plan.calls: got [], expected a mapping: names of calls"),
    "a call without settings": ("name: x\ncalls:\n  a:\n", "plan.calls.a: got None, expected a mapping such as {mesh:"),
    "empty file": ("", "plan: got None, expected a mapping"),
    "a list": ("- a\n- b\n", "plan: got ['a', 'b'], expected a mapping"),
    "not YAML": ("name: [", "expected YAML or JSON (line 1"),
    "a tab": (
        "name: x\ncalls:\n\ta: 1\n",
        "line 3: found character '\\t' that cannot start any token; indent with spaces, not with a tab",
    ),
    "a colon without a space": ("name: x\ncalls:x\n", "write NAME: VALUE, with a space after the colon"),
    "keys of a group out of line": ("name: x\n calls: {}\n", "begin the keys of a group in the same column"),
    "text that begins with a sign": ("name: @x\n", "put the text in quotes"),
    "one call twice": (
        "name: x\ncalls:\n  a: {mesh: 'n0:0', engine: vllm}\n  a: {mesh: 'n0:1', engine: vllm}\n",
        "expected YAML or JSON (line 4: key 'a' occurs twice)",
    ),
}


def test_a_call_may_take_over_what_another_says(tmp_path):
    """With YAML's merge key; what it says itself goes first."""
    path = tmp_path / "plan.yaml"
    path.write_text("name: x\ncalls:\n  a: &a {mesh: 'n0:0-1', engine: vllm, dp: 2}\n  b: {<<: *a, engine: megatron}\n")
    plan = read_plan(path, CLUSTER)
    assert plan["b"] == replace(plan["a"], engine="megatron")


@pytest.mark.parametrize(("text", "says"), BAD.values(), ids=list(BAD))
def test_a_bad_file_is_refused_in_one_line(text, says, tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(InvalidInput) as error:
        read_plan(path, CLUSTER)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match="expected a readable file"):
        read_plan(tmp_path / "none.yaml", CLUSTER)


def test_a_file_that_is_not_text_is_refused(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidInput, match="UTF-8"):
        read_plan(path, CLUSTER)
