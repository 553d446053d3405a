"""The script of the first morning on GPUs, on the pretend GPU: steps run, fail or stop alone, and are reported."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import first_gpu_morning
from benchmarks.gpu.all_steps import ALL_GPUS, ONE_GPU
from benchmarks.gpu.report import report
from benchmarks.gpu.run import run_step
from benchmarks.gpu.step import Constant, Expected, Machine, Step
from prefect_rlhf.placement.memory import bytes as memory_bytes
from prefect_rlhf.placement.memory import overhead

PROJECT = Path(__file__).parents[2]
LIMIT_SECONDS = 900


def morning(*words):
    """Run the script; return its lines and the JSON of the last. It forks, and this process has threads."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.first_gpu_morning", *words]
    ended = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=True)
    lines = ended.stdout.splitlines()
    return lines, json.loads(lines[-1])


REFUSED = {
    "attention_kernels",
    "unusable_bytes_fixed",
    "unusable_bytes_expandable",
    "context_bytes",
    "pinned_bytes",
    "gang_of_one",
    "sleep_and_wake",
    "graph_bytes",
    "ppo_one_device",
    "ppo_taking_turns",
}
"""They ask the driver, torch's allocator, kernels of CUDA, or a pool of GPUs."""


@pytest.mark.all
def test_every_single_gpu_step_runs_or_names_its_requirement(tmp_path):
    """Doctor and a run by the command line too. Nothing fails, and each finding of the pretend GPU is as expected."""
    lines, last = morning("--one", "--pretend", "--out", str(tmp_path))
    assert last["failed"] == last["differs"] == {} and sum(last["steps"].values()) == len(ONE_GPU)
    assert last["steps"] == {"done": len(ONE_GPU) - len(REFUSED), "needs a GPU": len(REFUSED)}
    assert any("not measured; expected" in line for line in lines)


def test_the_pretend_gpu_refuses_unsupported_work_with_a_reason(tmp_path):
    machine = Machine(tmp_path, pretend=True)
    needy = [step for step in ONE_GPU if "hardware" in step.needs]
    assert {step.name for step in needy} == REFUSED
    assert {run_step(step, machine).reason for step in needy} == {"the pretend GPU cannot run it"}


@pytest.mark.all
def test_timings_and_bytes_run_at_a_tiny_shape(tmp_path):
    """What only a GPU can measure is said not to be measured; each finding is in a file with its card and time."""
    names = ("throughput", "bytes_of_calls", "worlds_on_one_gpu")
    lines, last = morning(
        "--one", "--pretend", "--out", str(tmp_path), *(w for name in names for w in ("--step", name))
    )
    assert last["steps"] == {"done": 3} and last["differs"] == last["failed"] == {}
    found = [json.loads(line) for line in (tmp_path / "throughput" / "findings.jsonl").read_text().splitlines()]
    assert all(set(each) == {"step", "name", "value", "card", "at"} for each in found)
    assert {"call_seconds", "eager_layer_seconds", "counted_elsewhere_ms"} <= {each["name"] for each in found}
    assert (
        sum("7B dp8: GiB certified after the second step" in line for line in lines) >= 2
    )  # as it came, and in the end


@pytest.mark.all
def test_a_few_steps_run_and_the_others_need_a_gpu(tmp_path):
    """A report names the range of each finding, and each constant, which the pretend GPU does not replace."""
    names = ("host_waits", "choice_of_tokens", "context_bytes")
    given = [word for name in names for word in ("--step", name)]
    lines, last = morning("--one", "--pretend", "--out", str(tmp_path), *given)
    assert last["steps"] == {"done": 2, "needs a GPU": 1} and last["differs"] == last["failed"] == {}
    assert any(
        line.strip().startswith("inference_waits = ") and "expected 0 to 2 (seen on an H100" in line for line in lines
    )
    assert "  CONTEXT_BYTES (placement/memory/bytes.py): 1.77209e+09 -> not measured" in lines
    written = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert {each["step"]: each["status"] for each in written}["context_bytes"] == "needs a GPU"


def test_each_constant_of_the_memory_of_gpus_has_a_step_that_replaces_it():
    """Those of the two files whose numbers no GPU has confirmed."""
    named = {
        (name, f"placement/memory/{module.__name__.rpartition('.')[2]}.py")
        for module in (memory_bytes, overhead)
        for name, value in vars(module).items()
        if name.isupper() and isinstance(value, (int, float)) and name not in ("MIB", "GIB")
    }
    named = {each for each in named if each != ("CONTEXT_BYTES", "placement/memory/overhead.py")}  # imported there
    named |= {("FRAGMENT_SHARE[cuda]", "placement/memory/bytes.py")}
    replaced = {(each.name, each.file) for step in (*ONE_GPU, *ALL_GPUS) for each in step.constants}
    assert named == {each for each in replaced if each[1].startswith("placement/memory/")}


def test_a_step_that_fails_or_never_ends_leaves_the_others_alone(tmp_path):
    def fails(_):
        raise ValueError("no such kernel\nand more")

    steps = [
        Step("fails", 1, 30, fails, {"found": Expected(1)}, findings="A1"),
        Step("never ends", 1, 1, lambda _: time.sleep(60), findings="A2"),
        Step(
            "is found",
            1,
            30,
            lambda _: {"found": 3.0},
            {"found": Expected(high=2)},
            constants=(Constant("PAIR", "placement/memory/overhead.py", 2, "found"),),
        ),
    ]
    machine = Machine(tmp_path, pretend=True)
    outcomes = [run_step(step, machine) for step in steps]
    assert [each.status for each in outcomes] == ["failed", "too slow", "done"]
    assert outcomes[0].reason == "ValueError: no such kernel"
    lines = list(report(steps, outcomes, pretend=False))
    assert "    DIFFERS found = 3; expected at most 2 (by reading)" in lines
    assert "  PAIR (placement/memory/overhead.py): 2 -> 3" in lines


def test_an_interrupted_step_keeps_its_findings(tmp_path):
    """Whether its limit ended it, or somebody killed it."""

    def slow(machine):
        machine.found["first"] = 1
        time.sleep(60)

    def killed(machine):
        machine.found["first"] = 1
        os.kill(os.getpid(), signal.SIGKILL)

    machine = Machine(tmp_path, pretend=True)
    for step, status in ((Step("slow", 1, 2, slow), "too slow"), (Step("killed", 1, 30, killed), "failed")):
        outcome = run_step(step, machine)
        assert (outcome.status, outcome.found) == (status, {"first": 1})


def test_the_nine_commands_fit_their_ten_minutes():
    """And the names of steps are unique."""
    for command in first_gpu_morning.COMMANDS:
        assert 0 < sum(step.limit_seconds for step in ONE_GPU if step.command == command) <= 600, command
    for steps in (ONE_GPU, ALL_GPUS):
        names = [step.name for step in steps]
        assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--command", "2"), "--command: got a number without --one"),
        (("--one", "--pretend", "--step", "nonsense"), "--step: got nonsense, expected one of environment"),
    ],
)
def test_mistakes_are_one_line(monkeypatch, words, said):
    monkeypatch.setattr(sys, "argv", ["first_gpu_morning", *words])
    with pytest.raises(SystemExit, match=said):
        first_gpu_morning.main()
