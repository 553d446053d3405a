"""The benchmark of one GPU: findings survive a kill, halves of unlike cards have no ratio, rates are as stated."""

import json
import os
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import psutil
import pytest

from benchmarks import one_gpu
from benchmarks.one_card import card, kernels, memory, ours, parts, rates
from benchmarks.one_card.child import relayed
from benchmarks.one_card.record import Record, findings, newest
from benchmarks.one_card.work import Work
from prefect_rlhf.tasks.running.journal import TaskRunSpan

ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 240


def work(folder, **changes):
    return Work(size="1.5b", out=str(folder), models=str(folder), **changes)


def span(node, start, end, *, kind="compute", seconds=None, predicted=None):
    step = int(node.partition("@")[2])
    memory_of = {"device_bytes": {}, "resident_bytes": {}, "store_bytes": {}}
    times = {"start": start, "end": end, "seconds": end - start if seconds is None else seconds}
    call = node.partition("@")[0]
    return TaskRunSpan(node, node, kind, call, step, "", "", (), predicted_seconds=predicted, **times, **memory_of)


def test_a_record_that_was_cut_in_a_line_keeps_the_others_and_goes_on(tmp_path):
    file = tmp_path / "record.jsonl"
    Record(file, "ours").add("step", step=1)
    with file.open("a") as lines:
        lines.write('{"half": "ours", "finding": "st')
    Record(file, "trl").add("step", step=2)
    assert [(each["half"], each["step"]) for each in findings(file)] == [("ours", 1), ("trl", 2)]
    assert newest(file, "ours", "step")["step"] == 1 and newest(file, "ours", "memory") is None


def test_a_ratio_needs_both_halves_on_the_same_card_with_the_same_work(tmp_path):
    file, mine = tmp_path / "record.jsonl", work(tmp_path)
    assert one_gpu.compared(file, mine)["ratio"] is None

    def half(name, seconds, uuid, of):
        record = Record(file, name)
        record.add("begun", work=of.shared, device={"card": "H100", "uuid": uuid})
        record.add("step seconds", seconds=seconds)

    half("ours", 4.0, "a", mine)
    half("trl", 6.0, "b", mine)
    line = one_gpu.compared(file, mine)
    assert (line["ours"], line["trl"], line["ratio"]) == (4.0, 6.0, None) and "device.uuid" in line["why_no_ratio"]
    half("trl", 6.0, "a", work(tmp_path, response_tokens=256))
    assert "work" in one_gpu.compared(file, mine)["why_no_ratio"]
    half("trl", 6.0, "a", mine)
    assert one_gpu.compared(file, mine)["ratio"] == 1.5


def test_a_half_that_failed_after_an_earlier_success_has_no_seconds(tmp_path):
    """Its earlier seconds are of another start, perhaps with another version."""
    file, mine = tmp_path / "record.jsonl", work(tmp_path)
    record = Record(file, "ours")
    record.add("begun", work=mine.shared, device={})
    record.add("step seconds", seconds=4.0)
    record.add("begun", work=mine.shared, device={})
    assert one_gpu.compared(file, mine)["ours"] is None


def test_utilisation_is_the_stated_formula(tmp_path):
    """Parameters times tokens, six times for a train_step; attention counts pairs of a causal mask."""
    mine, parameters = work(tmp_path), 1_543_714_304
    tokens = 256 * 640
    assert rates.train_flops(mine, parameters, attention=False) == 6 * parameters * tokens
    pairs = 256 * 640**2 / 2
    attention = rates.train_flops(mine, parameters, attention=True) - 6 * parameters * tokens
    assert attention == pytest.approx(3 * 4 * 28 * 1536 * pairs)
    found = rates.utilisation(mine, parameters, step_seconds=5.0, train_seconds=3.0)
    assert found["train_mfu"] == pytest.approx(6 * parameters * tokens / 3 / 989e12, rel=0.01)
    assert found["tokens_per_second"] == tokens / 5 and found["step_mfu"] < found["step_mfu_with_attention"]


def test_seconds_of_calls_are_medians_after_the_first_step():
    spans = [
        span(f"actor_train@{step}", 10 * step, 10 * step + seconds, kind="train_step", predicted=2.0)
        for step, seconds in ((1, 9.0), (2, 3.0), (3, 4.0), (4, 8.0))
    ]
    calls = ours.call_seconds(spans)
    assert calls == {"actor_train": {"measured": 4.0, "with_orchestration": 4.0, "predicted": 2.0}}


def test_step_time_runs_between_optimizer_steps():
    """So it has the gap between steps, and not the evaluation after the last."""
    spans = [span(f"actor_train@{step}", 5 * step, 5 * step + 1, kind="train_step") for step in (1, 2, 3)]
    spans.append(span("actor_evaluation@3", 16, 40, kind="generate"))
    assert ours.step_seconds(spans) == [5, 5]


def test_memory_is_measured_for_each_certificate_term():
    gib = 1 << 30
    shares = [("device", "context", 1), ("actor.vllm n0:0 dp1", "weights", 3), ("actor_train@1", "logits", 2)]
    proof = {
        "peaks": [
            {
                "node": "actor_train@1",
                "num_bytes": 6 * gib,
                "device_bytes": 78 * gib,
                "shares": [{"owner": owner, "what": what, "num_bytes": n * gib} for owner, what, n in shares],
            }
        ]
    }
    device = {"measured_bytes": 5 * gib, "certified_bytes": 6 * gib, "at": "x", "gpu": {"used_bytes": 5 * gib}}
    found = memory.memory_finding([device], proof)
    assert found["terms_gib"] == {"context": 1, "actor.vllm weights": 3, "actor_train@1 logits": 2}
    assert (found["measured_gib"], found["peak_gib"], found["gpu_gib"]) == (5, 6, {"used": 5})


def test_the_parts_of_a_first_step_add_up_to_all_of_it():
    """Of a log of a run, with a name of a run that has hyphens, and of its record; past midnight too."""
    began = datetime(2026, 11, 27, 23, 59, 50).timestamp()
    log = """23:59:53.000 | INFO    | prefect - Starting temporary server on http://127.0.0.1:8389
23:59:58.000 | INFO    | Flow run 'grpo-tiny-toad' - Beginning flow run 'grpo-tiny-toad' for flow 'rlhf'
00:00:00.000 | INFO    | prefect.flow_runs.rlhf - files of this run: /tmp/runs/grpo-tiny-toad
(Worker) INFO 11-28 00:00:04 [monitor.py:20] torch.compile took 2.50 s in total
00:00:10.000 | INFO    | prefect.flow_runs.rlhf - built actor.vllm n0:0 dp1 in 7.0 s; its devices hold up to 0.00 GiB
00:00:12.000 | INFO    | prefect.flow_runs.rlhf - built actor.megatron n0:0 dp1 in 1.5 s; its devices hold 0.01 GiB
"""
    spans = [
        span("actor_generate@1", began + 23, began + 25, kind="generate"),
        span("actor_train@1", began + 26, began + 30, kind="train_step"),
    ]
    found = parts.parts_of(log, spans, began)
    named = {
        "imports and checks": 3,
        "server": 5,
        "preparation": 2,
        "ranks": 3.5,
        "build actor.vllm": 7,
        "build actor.megatron": 1.5,
        "begin of steps": 1,
        "first generate": 2,
        "rewards and advantages": 1,
        "first train_step": 4,
    }
    assert found["parts"] == {**named, "all": 30} and sum(named.values()) == 30
    assert found["inside the build of vllm"] == {"compile": [2.5]}
    assert "all" not in parts.parts_of(log, spans[:1], began)["parts"]


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("nvjet_tst_256x128_64x4_2x1_v_bz_coopA_NNT", "matmul"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma", "attention"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float>", "norm"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::silu_kernel>", "elementwise"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("void at::native::elementwise_kernel<direct_copy_kernel_cuda>", "copies"),
        ("void at::native::reduce_kernel<512, 1, sum_functor>", "reductions"),
    ],
)
def test_each_kernel_has_a_group(name, group):
    assert kernels.group_of(name) == group


def test_gaps_are_the_wall_without_kernels():
    found = kernels.grouped([kernels.Kernel("gemm", 0.6, 3), kernels.Kernel("Memset", 0.1, 1)], wall=1.0)
    assert found["gaps"] == {"seconds": pytest.approx(0.3), "launches": 0, "share": pytest.approx(0.3)}
    assert list(found) == ["matmul", "gaps", "copies"]


def test_a_child_that_fails_or_never_ends_is_a_finding(tmp_path):
    """With the last line that it said."""
    record, log = Record(tmp_path / "record.jsonl", "trl"), tmp_path / "log"
    (tmp_path / "fails.py").write_text("import sys\nprint('{\"finding\": \"a\"}')\nsys.exit('no such thing')\n")
    (tmp_path / "stays.py").write_text("import time\ntime.sleep(60)\n")
    variables = {"PYTHONPATH": str(tmp_path)}
    assert relayed("fails", "", record, log, 30, variables) == 1
    assert relayed("stays", "", record, log, 0.5, variables) != 0
    found = [each for each in findings(tmp_path / "record.jsonl") if each["finding"] == "failed"]
    assert [each["why"] for each in found] == ["no such thing", "no end within 0 s"]
    assert newest(tmp_path / "record.jsonl", "trl", "a") is not None


def test_a_machine_without_the_drivers_tool_says_so(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert card.others_on_card("cuda") == ["nvidia-smi: FileNotFoundError"]
    assert card.others_on_card("cpu") == []


def test_a_single_step_is_refused_because_the_first_is_not_counted(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["one_gpu", "--steps", "1"])
    with pytest.raises(SystemExit):
        one_gpu.main()
    assert "--steps: got 1, expected at least 2" in capsys.readouterr().err


@pytest.mark.all
def test_a_kill_in_the_middle_leaves_the_steps_so_far_and_no_process(tmp_path):
    """The run of our half ends with the benchmark, and the record is readable."""
    command = [sys.executable, "-m", "benchmarks.one_gpu", "--pretend", "--half", "ours", "--steps", "400"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen([*command, "--out", str(tmp_path)], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    file, until = tmp_path / "record-tiny.jsonl", time.monotonic() + LIMIT_SECONDS
    while newest(file, "ours", "step") is None and time.monotonic() < until and process.poll() is None:
        time.sleep(0.2)
    below = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert newest(file, "ours", "step")["step"] >= 1 and newest(file, "ours", "plan")["micro_batches"] == 1
    _, alive = psutil.wait_procs(below, timeout=30)
    for each in alive:
        each.kill()
    assert len(below) >= 2 and not alive
    json.loads(file.read_text().splitlines()[0])
