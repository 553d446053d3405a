"""Closed problem files: what the command prints is a valid plan of the file, and bad files are refused in one line."""

import copy
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.planner.closed_problem import load_closed_problem, read_closed_problem
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.search.driver import search
from prefect_rlhf.placement.search.rules.ready_first import ReadyFirst
from tests.placement.search.clusters import closed_file, greedy_safe_ppo, safe_ppo
from tests.placement.search.plain_closed import Closed, read
from tests.support.cases import combinations

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "placement" / "data"
BEST_KNOWN_SECONDS = {
    "ppo_7b_7b_1x8.json": 153.85917,
    "grpo_7b_1x8.json": 111.14,
    "ppo_70b_7b_16x8.json.gz": 191.15246,
    "remax_70b_16x8.json.gz": 203.93594,
    "safe_rlhf_2x8.json.gz": 216.16745,
}
ENOUGH_EVALUATIONS = {"safe_rlhf_2x8.json.gz": 900_000}  # it needs 686,000
SMALL = read(DATA / "grpo_7b_1x8.json")


def solve(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "solve_problem.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("name", combinations(BEST_KNOWN_SECONDS, briefly=[("remax_70b_16x8.json.gz",)]))
def test_the_best_plans_known_are_proved_optimal(name):
    """ReaL's problems and two other graphs; the last line's plan takes as long, read from the file by other code."""
    done = solve(str(DATA / name), "--evaluations", str(ENOUGH_EVALUATIONS.get(name, 20_000)))
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert {"plan", "makespan_seconds", "lower_bound_seconds", "gap", "evaluations", "cpu_seconds"} == last.keys()
    closed = Closed(read(DATA / name), last["plan"])
    assert closed.fits()
    assert closed.makespan_us() == pytest.approx(last["makespan_seconds"] * 1e6, abs=0.5)
    assert BEST_KNOWN_SECONDS[name] == pytest.approx(last["makespan_seconds"], abs=1e-5)
    assert last["gap"] == 0


def test_a_plan_of_the_baseline_is_valid_too():
    """Metropolis-Hastings may find a worse plan, with an honest gap, never an impossible one."""
    closed = load_closed_problem(DATA / "ppo_7b_7b_1x8.json")
    result = search(closed.problem, 60, method="metropolis-hastings", max_evaluations=20_000, rule=ReadyFirst)
    plain = Closed(read(DATA / "ppo_7b_7b_1x8.json"), closed.plan_in_file(result.plan))
    assert plain.fits()
    assert plain.makespan_us() == pytest.approx(result.seconds * 1e6, abs=0.5)
    assert result.lower_bound_seconds <= BEST_KNOWN_SECONDS["ppo_7b_7b_1x8.json"] <= result.seconds


def changed(path: str, value: object) -> dict:
    """The small file with the value at a dotted path replaced; None removes it."""
    data = copy.deepcopy(SMALL)
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    place = data
    for part in parents:
        place = place[part]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return data


BAD = [
    ("calls", None, "calls"),
    ("calls", [], "calls"),
    ("meshes", None, "meshes"),
    ("meshes", [], "meshes"),
    ("meshes.1.id", 0, "meshes"),
    ("meshes.0.n_gpus", 3, "meshes[0].n_gpus"),
    ("meshes.0.first_node", 7, "mesh"),
    ("strategies.actor_gen", None, "strategies.actor_gen"),
    ("strategies.actor_gen", [], "strategies.actor_gen"),
    ("strategies.actor_gen.0.time_us", 0, "strategies.actor_gen[0].time_us"),
    ("strategies.actor_gen.0.time_us", "1", "strategies.actor_gen[0].time_us"),
    ("strategies.actor_gen.0.tp", 3, "strategies.actor_gen[0].n_gpus"),
    ("strategies.actor_gen.0.static_bytes", -1, "strategies.actor_gen[0].static_bytes"),
    ("calls.1.deps", ["nobody"], "calls[1].deps"),
    ("calls.1.deps", ["actor_train"], "calls[1].deps"),
    ("calls.1.deps", [["actor_gen"]], "calls[1].deps"),
    ("calls.1.name", "actor_gen", "calls[1].name"),
    ("cross_iteration_deps", [["actor_train"]], "cross_iteration_deps[0]"),
    ("cross_iteration_deps", [["actor_train", "nobody"]], "cross_iteration_deps[0]"),
    ("realloc.hooks.0.other", "nobody", "realloc.hooks[0].other"),
    ("realloc.hooks.0.other", "actor_train", "realloc.hooks[0].other"),
    ("realloc.table_us", {"7,1": 1}, "realloc.table_us"),
    ("realloc.table_us", [1], "realloc.table_us"),
    ("realloc.table_us", {"7,1,1,1,1,1,1": -1}, "realloc.table_us"),
    ("realloc", 3, "realloc"),
    ("device_mem_bytes", 0, "device_mem_bytes"),
    ("iterations", 0, "iterations"),
    ("iterations", True, "iterations"),
    ("offload", {"7": 1}, "offload"),
    ("realloc.table_us", {"7,1,1,1,1,1,1": float("nan")}, "realloc.table_us"),
    ("realloc.table_us", {"7,1,1,1,1,1,1": True}, "realloc.table_us"),
    ("realloc.table_us", {"7,1,1,1,1,1,1": 1e300}, "realloc.table_us"),
]


@pytest.mark.parametrize(("path", "value", "field"), BAD, ids=[f"{path}={value}"[:50] for path, value, _ in BAD])
def test_a_malformed_problem_file_is_refused_by_field(path, value, field):
    """One line that names the field, what it holds and what would be right."""
    with pytest.raises(InvalidInput) as caught:
        read_closed_problem(changed(path, value))
    assert str(caught.value).startswith(field)
    assert "\n" not in str(caught.value)


def test_a_call_may_have_no_hook_and_a_file_no_reallocation():
    """Then nothing moves, and the plan is no slower."""
    problem = read_closed_problem(changed("realloc", None)).problem
    assert len(SMALL["calls"]) == len(problem.nodes)
    assert search(problem, 60, rule=ReadyFirst).seconds <= BEST_KNOWN_SECONDS["grpo_7b_1x8.json"]


def test_keys_without_effect_are_named():
    """A misspelt key is not passed over in silence."""
    assert read_closed_problem(SMALL | {"iteration": 3}).not_read == ("iteration",)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\x1f\x8b nonsense", b"\xff\xfe\x00", b"3"])
def test_a_file_without_a_json_object_is_refused(tmp_path, content):
    path = tmp_path / "problem.json"
    path.write_bytes(content)
    with pytest.raises(InvalidInput):
        load_closed_problem(path)


@pytest.mark.parametrize(
    "arguments",
    [["missing.json"], [str(DATA / "grpo_7b_1x8.json"), "--budget-seconds", "0"],
     [str(DATA / "grpo_7b_1x8.json"), "--budget-seconds", "-1"],
     [str(DATA / "grpo_7b_1x8.json"), "--budget-seconds", "nan"], [str(DATA)],
     [str(Path(__file__))]],
)  # fmt: skip
def test_the_command_answers_bad_input_with_one_line(arguments):
    done = solve(*arguments)
    assert (done.returncode, len(done.stderr.splitlines()), done.stdout) == (2, 1, "")


def test_the_command_reports_that_no_plan_fits(tmp_path):
    """Impossible is an answer, not an error in the program."""
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(changed("device_mem_bytes", 1)))
    done = solve(str(path))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("no plan of grpo_1x8 found")
    assert "INFEASIBLE" in done.stdout


def test_ctrl_c_prints_the_best_plan_so_far(tmp_path):
    """With its honest gap, as the last line, and exit status 0."""
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(closed_file(greedy_safe_ppo(34, 13), num_nodes=16, batch=512)))
    command = [sys.executable, str(ROOT / "benchmarks" / "solve_problem.py"), str(path), "--budget-seconds", "500"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert any("best plan so far" in line for line in running.stderr)  # waits for the first plan
        running.send_signal(signal.SIGINT)
        stdout, _ = running.communicate(timeout=60)
    last = json.loads(stdout.splitlines()[-1])
    assert running.returncode == 0
    assert last["gap"] == pytest.approx(last["makespan_seconds"] / last["lower_bound_seconds"] - 1)
    assert last["gap"] > 0


@pytest.mark.all  # the next test proves smaller ones
@pytest.mark.parametrize(
    ("graph", "num_nodes", "max_gap"),
    [(safe_ppo(7, 7), 2, 0.0), (safe_ppo(34, 7), 4, 0.0), (safe_ppo(70, 7), 16, 0.02)],
    ids=["nine calls, 2 nodes", "nine calls, 4 nodes", "nine calls, 16 nodes"],
)
def test_larger_graphs_come_within_a_small_gap(graph, num_nodes, max_gap):
    """In an amount of work that takes a few seconds; the plan is as long as other code reads from the file."""
    data = closed_file(graph, num_nodes, batch=512 if num_nodes == 16 else 256, slices=(1, 2, 4))
    closed = read_closed_problem(data)
    result = search(closed.problem, 600, max_gap=max_gap, max_evaluations=2_000_000, rule=ReadyFirst)
    assert result.gap <= max_gap
    plain = Closed(data, closed.plan_in_file(result.plan))
    assert plain.fits()
    assert plain.makespan_us() == pytest.approx(result.seconds * 1e6, abs=0.5)


@pytest.mark.parametrize(
    ("graph", "num_nodes", "batch", "seconds", "enough"),
    [
        (safe_ppo(34, 7), 4, 64, 48.184, 12_000),  # it needs 8,901
        (safe_ppo(7, 7), 2, 256, 73.898, 33_000),  # 25,411
        (safe_ppo(13, 7), 1, 64, 64.99032, 107_000),  # 82,371
        (safe_ppo(7, 7), 4, 512, 74.798, 198_000),  # 151,880
    ],
)
def test_nine_calls_are_proved_with_few_evaluations(graph, num_nodes, batch, seconds, enough):
    """With 30% more evaluations than the proof needed on 2026-11-26."""
    data = closed_file(graph, num_nodes, batch)
    closed = read_closed_problem(data)
    result = search(closed.problem, 600, max_evaluations=enough, rule=ReadyFirst)
    assert (result.proved_optimal, result.seconds) == (True, pytest.approx(seconds))
    assert Closed(data, closed.plan_in_file(result.plan)).makespan_us() == pytest.approx(seconds * 1e6, abs=0.5)
