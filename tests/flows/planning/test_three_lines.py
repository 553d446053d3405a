"""The first screen of `prefect-rlhf plan`: three lines, the plan, the presets, and notes that you can act on."""

import json
import re
import shlex
from pathlib import Path

import pytest

from prefect_rlhf.flows.commands.cli import main
from prefect_rlhf.flows.commands.flags import app_of
from prefect_rlhf.flows.commands.run import run
from prefect_rlhf.flows.forms.plan_options import plan_options
from prefect_rlhf.flows.planning.answer import answer_question
from prefect_rlhf.flows.planning.notes import rows_of_a_micro_batch
from prefect_rlhf.flows.planning.plan_report import PlanAnswer
from prefect_rlhf.placement.cost.datasheets.hardware import GIB
from prefect_rlhf.placement.cost.datasheets.kinds import DATASHEETS
from prefect_rlhf.placement.plans.presets import PRESETS

GLOSSARY = (Path(__file__).parents[3] / "docs" / "glossary.md").read_text()
GRPO = {
    "algorithm": "grpo",
    "models": {"actor": "llama-7b", "reward": "llama-7b"},
    "cluster": "1x8:h100",
    "prompt_length": "512",
    "response_length": "512",
    "batch_size": 64,
    "evaluations": 3000,
    "prices": {"h100": 2.0},
}
DPO = {
    "algorithm": "dpo",
    "models": {"actor": "llama-13b"},
    "prompt_length": "256",
    "response_length": "256",
    "batch_size": 64,
    "evaluations": 2000,
}


def asked(question: dict, **changes) -> PlanAnswer:
    return answer_question(plan_options(question | changes))


@pytest.fixture(scope="module")
def grpo() -> PlanAnswer:
    return asked(GRPO)


@pytest.fixture(scope="module")
def old_cards() -> PlanAnswer:
    """On too few cards; the table has sizes that are enough."""
    return asked(DPO, cluster="1x8:v100-16", sweep=[4])


def test_the_first_three_lines_say_whether_it_fits_its_cost_and_the_command(grpo):
    fits, takes, runs = grpo.text().splitlines()[:3]
    peak, whole = grpo.planned.certificate.fullest, grpo.question.site.cluster.device_memory_bytes
    of_device = f"{peak.num_bytes / GIB:.1f} of {whole / GIB:.1f} GiB ({peak.num_bytes / whole:.1%})"
    assert fits.startswith(f"fits: {of_device} on the fullest device, {peak.device} during ")
    assert fits.endswith("; 3.2 GiB are kept as room") and whole == DATASHEETS["h100"].memory_bytes
    assert takes.startswith(f"{grpo.planned.seconds:.4g} s a step")
    dollars = [float(text) for text in re.findall(r"\$([\d.]+)", takes)]
    assert dollars == pytest.approx([16 * steps * grpo.planned.seconds / 3600 for steps in (1, 100)], rel=0.02)
    assert "; 100 steps: " in takes
    assert runs.startswith("run it: prefect-rlhf run grpo --parameters ")


def test_the_command_has_flags_of_run_and_the_job_that_was_planned(grpo):
    words = shlex.split(grpo.command)
    app_of(run).parse_args(words[2:], exit_on_error=False, print_error=False)
    assert {"algo.batch_size=64", "algo.sampling.max_new_tokens=512", "plan=plans/plan.yaml"} <= set(words)
    assert words[-2:] == ["--devices", "8"]


def test_the_command_repeats_the_parameters_of_the_question(tmp_path, capsys):
    """As they were typed; steps among them are those of the second line."""
    given = ["-p", "steps=7", "-p", "algo.beta=0.2", "--price", "h100=2"]
    words = ["--model", "actor=llama-7b", "--cluster", "1x4:h100", "--prompt-length", "64", "--response-length", "64"]
    asked = ["plan", "dpo", *words, "--batch-size", "16", "--evaluations", "1000", *given, "--output", str(tmp_path)]
    assert main(asked) == 0
    _, takes, runs = capsys.readouterr().out.splitlines()[:3]
    assert "; 7 steps: " in takes
    assert "-p steps=7 -p algo.beta=0.2 -p algo.batch_size=16" in runs and f"plan={tmp_path}/plan.yaml" in runs


def test_the_table_has_the_calls_with_a_model_and_the_rows_of_their_micro_batches(grpo):
    names = [call.name for call in grpo.question.graph if call.role is not None and call.every is None]
    assert [row["call"] for row in grpo.screen_rows] == names
    train = grpo.question.graph.call("actor_train")
    placed = grpo.planned.plan["actor_train"]
    rows = train.num_rows // placed.strategy.dp // placed.micro_batches
    (shown,) = [row["micro-batches"] for row in grpo.screen_rows if row["call"] == "actor_train"]
    assert shown == rows_of_a_micro_batch(train, placed) == f"{placed.micro_batches} of {rows} row{'s' * (rows > 1)}"


def test_what_stands_behind_the_answer_is_shown_on_request_and_always_in_the_report(grpo):
    hidden = ("above the bound", "binding constraint", "not searched: ", "holds:", "the controller adds")
    assert not any(words in grpo.text() for words in hidden)
    assert all(words in grpo.markdown() for words in hidden)
    explained = asked(GRPO, explain=True, evaluations=1000).text()
    assert all(words in explained for words in (*hidden, "runner-up: "))
    assert len(grpo.text().splitlines()) < 35


def test_a_preset_that_cannot_exist_on_the_devices_is_left_out():
    """One device has no halves; what only lacks memory stays and says so."""
    single = asked(DPO, cluster="1x1:h100", models={"actor": "qwen2.5-0.5b"})
    assert [row["plan"] for row in single.compared] == ["auto", "flattening", "real-heuristic"]
    assert "expected a mesh" not in single.markdown()


def test_equal_presets_share_a_row_and_each_preset_is_explained(grpo):
    rows = {row["plan"]: row for row in grpo.compared}
    assert "interleaving, side_by_side" in rows and rows["flattening"]["what it is"] == PRESETS["flattening"].what
    assert all(preset.what for preset in PRESETS.values())


@pytest.mark.all
def test_notes_explain_offloading_and_cache_size(grpo):
    limited = asked(GRPO, device_memory_gib=40)
    placed = limited.planned.plan
    offloaded = [name for name, each in placed.placements if each.offload != "none"]
    shown = "\n".join(limited.notes)
    for name in offloaded:
        if limited.question.graph.call(name).every is None:
            assert re.search(rf"{name}.*: .* leave the devices while others use them, and return ", shown)
    assert offloaded
    has_cache = placed["actor_generate"].cache_gib is not None
    assert ("actor_generate: a cache of " in shown) == has_cache


def test_kinds_that_a_run_refuses_are_planned_and_said_so_in_the_place_of_the_command(old_cards):
    assert old_cards.first_lines[2] == (
        "planned, but cannot run: v100-16 has compute capability 7.0; a run needs 8.0 or newer, for bfloat16"
    )


def test_cards_whose_engines_are_not_pinned_are_planned_and_said_so_in_the_place_of_the_command():
    assert asked(DPO, cluster="1x8:mi300x").first_lines[2] == (
        "planned, but cannot run yet: mi300x needs engines built for ROCm, and our pins are for CUDA"
    )


def test_a_sweep_starts_from_a_size_that_does_not_fit_and_says_how_many_devices_are_enough(old_cards):
    first, second = old_cards.sweep.sizes
    assert first.lacks_memory and re.search(r"does not fit: .* GiB on a device at best .*; at most the ", first.refused)
    assert old_cards.question.site.cluster.num_nodes == 4 == second.num_nodes
    assert "24 devices are enough, as 3x8:v100-16" in old_cards.sweep.text()


def test_a_sweep_names_the_size_that_is_cheapest_per_step():
    """By dollars with prices, else by device-hours."""
    swept = asked(DPO, cluster="1x4:h100,1x8:h100,1x8:l40s", prices={"h100": 2.0, "l40s": 1.0}).sweep
    cost = {size.cluster: size.seconds * size.dollars_per_hour / 3600 for size in swept.sizes if size.seconds}
    least = min(cost, key=cost.__getitem__)
    assert f"{least} is the cheapest per step: ${cost[least]:.3g}" in swept.text()
    assert json.loads(swept.to_json())["cheapest"] == least


def test_json_is_one_value_with_the_answer_or_with_the_reason_that_none_fits(tmp_path, capsys):
    words = ["--model", "actor=llama-7b", "--prompt-length", "64", "--response-length", "64", "--batch-size", "16"]
    flags = ["plan", "dpo", *words, "--evaluations", "1000", "--json", "--output", str(tmp_path / "plans")]
    assert main([*flags, "--cluster", "1x4:h100"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and found["seconds_a_step"] > 0 and found["plan"]["calls"]["actor_train"]
    assert len(found["lines"]) == 3 and all(Path(path).is_file() for path in found["files"].values())
    assert main([*flags, "--cluster", "1x1:l40s"]) == 2
    refused = json.loads(capsys.readouterr().out)
    assert refused["fits"] is False and "devices are enough" in refused["refused"]


TERMS = {
    "bound", "cache", "certificate", "fragments", "headroom", "room", "MFU", "micro-batch", "mini-batch", "mesh",
    "NCCL communicators", "offload", "packed weights", "prefetch", "preset", "recompute", "sequence-parallel", "share",
    "CUDA context", "CUDA graphs", "activations", "gradients", "logits", "optimizer", "rows", "weights", "working",
    "key-value cache", "processor seconds", "tokens/s", "device-hours",
}  # fmt: skip
"""Terms that the screen and the memory of a plan may have."""


def defined() -> set[str]:
    rows = (line.split("|")[1] for line in GLOSSARY.splitlines() if line.startswith("| "))
    return {term.strip() for row in rows for term in row.split(",")}


def test_every_term_of_the_screen_is_in_the_glossary(grpo):
    """Those above, the columns of the table, and every kind of bytes of a certificate."""
    assert defined() >= TERMS, TERMS - defined()
    columns = {name for row in grpo.screen_rows for name in row} - {"call", "words", "seconds"}
    plain = {name.removesuffix("es") if name.endswith("batches") else name for name in columns}
    kinds = {re.sub(r"^\d+ ", "", share.what) for peak in grpo.planned.certificate.peaks for share in peak.shares}
    assert plain | kinds <= defined(), (plain | kinds) - defined()
