"""The cost model beside published measurements: the goals it is held to, and what a malformed file says."""

import json
import statistics
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import pytest

from benchmarks.papers.published import estimate_calls, estimate_end_to_end, read_published
from prefect_rlhf.errors.errors import InvalidInput

PROJECT = Path(__file__).parents[2]
FILE = PROJECT / "tests" / "placement" / "data" / "real_ppo_7b_7b.json"


def run(path):
    """The benchmark as a user runs it."""
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.papers.estimate_calls", str(path)],
        cwd=PROJECT,
        capture_output=True,
        text=True,
    )


@pytest.fixture
def changed(tmp_path):
    """A copy of the file with one change."""

    def write(change):
        table = deepcopy(json.loads(FILE.read_text()))
        change(table)
        path = tmp_path / "changed.json"
        path.write_text(json.dumps(table))
        return path

    return write


def ends(published):
    return {plan: estimate_end_to_end(published, plan, estimate_calls(published, plan)) for plan in published.plans}


def test_every_call_is_within_a_quarter_of_what_real_measured_and_half_of_them_within_a_tenth():
    published = read_published(FILE)
    errors = [abs(call.ratio - 1) for plan in published.plans for call in estimate_calls(published, plan)]
    assert len(errors) == 12
    assert max(errors) <= 0.25
    assert statistics.median(errors) <= 0.10


def test_plans_end_to_end_are_within_a_tenth_and_in_the_measured_order():
    found = ends(read_published(FILE))
    assert all(abs(end.ratio - 1) <= 0.10 for end in found.values())
    assert found["searched"].predicted_seconds < found["heuristic"].predicted_seconds


def test_generation_without_cuda_graphs_is_within_a_quarter():
    """The file has these times apart from its plans."""
    published = read_published(FILE)
    for plan, measured in published.without_cuda_graph.items():
        generation = estimate_calls(published, plan, cuda_graphs=False)[0]
        assert generation.predicted_seconds == pytest.approx(measured["actor_generate"], rel=0.25)


def test_the_last_line_is_json_of_all_calls_in_the_files_order():
    table = json.loads(FILE.read_text())
    result = json.loads(run(FILE).stdout.splitlines()[-1])
    expected = [(plan, f"{call['role']}_{call['kind']}") for plan, t in table["plans"].items() for call in t["calls"]]
    assert [(call["plan"], call["name"]) for call in result["calls"]] == expected
    assert [end["plan"] for end in result["end_to_end"]] == list(table["plans"])
    for entry in (*result["calls"], *result["end_to_end"]):
        assert entry["ratio"] == pytest.approx(entry["predicted_seconds"] / entry["measured_seconds"])


def test_predictions_do_not_need_the_measured_times(changed):
    """Without them ratios are null, and nothing else changes."""

    def strip(table):
        for plan in table["plans"].values():
            del plan["measured_end_to_end_seconds"]
            for call in plan["calls"]:
                del call["measured_seconds"]

    known, unknown = (json.loads(run(path).stdout.splitlines()[-1]) for path in (FILE, changed(strip)))
    for part in ("calls", "end_to_end"):
        assert [e["predicted_seconds"] for e in known[part]] == [e["predicted_seconds"] for e in unknown[part]]
        assert all(entry["ratio"] is None and entry["measured_seconds"] is None for entry in unknown[part])


def _first(table):
    return table["plans"]["searched"]["calls"][0]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda t: t.pop("cluster"), "cluster: got 'Field required'"),
        (lambda t: t["cluster"].update(device="abacus"), "cluster.device: got 'abacus', expected one of h100"),
        (lambda t: t["cluster"].update(inter_node="string"), "cluster.inter_node: got 'string'"),
        (lambda t: t["workload"].update(global_batch_size=0), "workload.global_batch_size: got"),
        (lambda t: t["workload"].update(dtype="int3"), "workload.dtype: got"),
        (lambda t: _first(t).update(model="gpt"), "plans.searched.calls.0.model: got 'gpt', expected one of llama3-7b"),
        (
            lambda t: _first(t).update(dp=3),
            "plans.searched.calls.0: got 'dp 3 x tp 2 x pp 2', expected a product of 16",
        ),
        (lambda t: _first(t)["mesh"].update(num_nodes=3), "plans.searched.calls.0.mesh: got 'n0-2:0-7'"),
        (lambda t: _first(t).update(kind="dance"), "plans.searched.calls.0.kind: got"),
        (lambda t: t.update(plans={}), "plans: got"),
    ],
)
def test_a_malformed_file_is_one_line(changed, change, complaint):
    path = changed(change)
    with pytest.raises(InvalidInput) as error:
        published = read_published(path)
        ends(published)
    assert complaint in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", ["", "[]", "{", "null"])
def test_another_file_gives_one_line_on_standard_error(tmp_path, content):
    path = tmp_path / "file.json"
    path.write_text(content)
    for refused in (run(path), run(tmp_path / "absent.json")):
        assert refused.returncode == 2
        assert refused.stdout == ""
        assert len(refused.stderr.splitlines()) == 1
