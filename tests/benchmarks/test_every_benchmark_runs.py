"""Every benchmark runs at its smallest size, as a file and as a module, and its last line is JSON with its keys."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.beside_trl import grpo_step, ppo_step
from benchmarks.beside_trl.grpo_work import GRPOWork
from benchmarks.beside_trl.lora_work import LoraWork
from benchmarks.beside_trl.play_work import PlayWork
from benchmarks.beside_trl.ppo_work import PPOWork
from benchmarks.beside_trl.step_sides import python_path, trl_folder
from benchmarks.planner import referee, regret
from tests.support.tiny import make_model, make_pairs, make_prompts

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "placement" / "data"
TINY = "--model {home}/models/smollm2 --prompts {home}/data/prompts.parquet"
MEASURED = "details seconds_per_call seconds_per_step"

SMALLEST = {
    "planner.ablation": (
        "--only 17 --evaluations 4000 --parts presets,divisions",
        "evaluations parts processor_seconds questions",
    ),
    "parts.certify_memory": (
        "--plans 0 --families 1",
        "beyond_tolerance max_ratio min_ratio never_under num_plans num_ranks",
    ),
    "parts.check_rows": (
        "--rows 200 --model {home}/models/smollm2",
        "chat_ratio chat_rows_per_second rows text_ratio text_rows_per_second",
    ),
    "parts.checkpoint_step": (
        "--steps 4 --every 2 --ranks 1 --batch-size 4 --tokens 8 --layers 1 --hidden 192 --vocabulary 64",
        "checkpoint_seconds commit_seconds extra_seconds_per_checkpoint mean_seconds_with mean_seconds_without "
        "megabytes ranks ratio_after_checkpoint seconds_after_checkpoint seconds_without",
    ),
    "faults.chaos": (
        "--moments 1 --steps 2 --victims controller",
        "identical lost_steps_max moments orphans recovered seconds_to_recover_median",
    ),
    "planner.demo_step": (
        f"--plans auto split --rounds 1 --steps 1 {TINY}",
        "algorithm auto_over_best plans predicted_over_measured",
    ),
    "parts.evaluate": (
        "--model {home}/models/smollm2 --prompts 2 --samples 2 --tokens 4 --dtype float32",
        "ours_seconds ratio vllm_seconds",
    ),
    "parts.families": ("--family qwen3 --engine megatron", "differences largest"),
    "first_step": (f"--rounds 1 --out {{home}}/first_step {TINY}", "record seconds"),
    "first_gpu_morning": (
        "--one --pretend --step choice_of_tokens --out {home}/morning",
        "constants differs failed pretend steps",
    ),
    "papers.estimate_calls": (f"{DATA}/real_ppo_7b_7b.json", "calls end_to_end"),
    "faults.growth": ("{growth}", "calls ratio rss_mib seconds threads"),
    "beside_trl.grpo_step": (
        f"--only ours --steps 1 --batch-size 2 --samples 4 --response-tokens 4 {TINY}",
        "fingerprint_share orchestration_share ours_seconds ours_seconds_per_call",
    ),
    "planner.heterogeneous": ("--model llama-7b --batch-sizes 16 --evaluations 20000", "gains paper rows"),
    "learn.ppo": ("--steps 1 --reward-steps 1 --home {home}", "goals means runs"),
    "parts.many_nodes": ('{{"nodes":[],"ranks":32}}', "by_nodes controller"),
    "one_gpu": (
        "--pretend --half ours --half profile --steps 2 --out {home}/one_gpu",
        "ours ratio record size trl",
    ),
    "beside_trl.lora_step": (
        f"--only ours --rank 4 --steps 1 --batch-size 2 --samples 4 --response-tokens 4 {TINY}",
        "adapter_bytes certified_bytes certified_over_measured device_bytes device_bytes_share fingerprint_share "
        "orchestration_share ours_seconds ours_seconds_per_call reallocation_bytes",
    ),
    "beside_trl.our_grpo": ("{grpo_work}", MEASURED),
    "beside_trl.our_lora": ("{lora_work}", MEASURED),
    "beside_trl.our_ppo": ("{ppo_work}", MEASURED),
    "beside_trl.play_step": (
        "--only ours --batch-size 1 --samples 2 --turns 2 --response-tokens 2 --model {home}/models/smollm2",
        "ours",
    ),
    "beside_trl.our_play": ("{play_work}", MEASURED),
    "papers": ("--only app", "expected holds name values"),
    "learn": (
        "ppo-shared --steps 1 --home {home}",
        "after algorithm before by_step goal kl metric minutes processor_minutes resident_bytes seed",
    ),
    "learn sft": (
        "sft --steps 1 --home {home}",
        "after algorithm before by_step goal metric minutes processor_minutes seed",
    ),
    "learn dpo": (
        "dpo --steps 1 --home {home}",
        "after algorithm before by_step goal margin_by_step metric minutes processor_minutes seed",
    ),
    "learn safe-rlhf": (
        "safe-rlhf --steps 1 --home {home}",
        "after algorithm before by_step cost_after cost_before greedy_costs limit metric minutes multipliers "
        "overstatements_after overstatements_before processor_minutes seed",
    ),
    "learn calculator": (
        "calculator --steps 1 --home {home}",
        "after algorithm before by_step goal metric minutes processor_minutes seed without_tool",
    ),
    "learn guess": (
        "guess --steps 1 --home {home}",
        "after algorithm before by_step goal metric minutes processor_minutes seed",
    ),
    "parts.plan_invariance": (
        "--plans 1 --four-ranks",
        "max_loss_difference max_weight_difference near_ties num_plans tokens_equal",
    ),
    "beside_trl.ppo_step": (
        f"--only ours --steps 1 {TINY}",
        "fingerprint_share orchestration_share ours_seconds ours_seconds_per_call",
    ),
    "planner.predict_plans": (
        f"--steps 2 --batch-size 4 --plans split {TINY}",
        "auto_vs_best_preset max_error median_error num_plans pairs_in_order plans rank_correlation ranks",
    ),
    "public_runs": (
        "--only prime_rl_06b_8k prime_rl_06b_16k",
        "fitted in_order not_fitted our_runtime ranges real_calls",
    ),
    "planner.referee": (
        "--only 17 --plans 3 --budget 0.5",
        "beaten beaten_by_at_most fastest_beaten_by_at_most median_gap questions violations worst_gap",
    ),
    "parts.reallocation": ("--rounds 1 --pairs 2", "pairs parameters"),
    "planner.regret": (
        "--only 17 --evaluations 2000 --search-evaluations 1000 --factors 2",
        "above_10_percent above_5_percent changes constants median_worst questions seconds_lost worst "
        "worst_of_steadiest",
    ),
    "solve_problem": (
        f"{DATA}/grpo_7b_1x8.json --budget-seconds 1",
        "cpu_seconds evaluations gap lower_bound_seconds makespan_seconds plan",
    ),
    "parts.train_step": (
        "--rows 2 --steps 1 --model {home}/models/smollm2",
        "copy digest first_copy least products rest step",
    ),
    "beside_trl.trl_grpo": ("{grpo_work}", MEASURED),
    "beside_trl.trl_lora": ("{lora_work}", MEASURED),
    "beside_trl.trl_play": ("{play_work}", MEASURED),
    "beside_trl.trl_ppo": ("{ppo_work}", MEASURED),
}
"""Arguments and keys of the last line, by module of `benchmarks` and what tells its cases apart.

`{home}` is a small demo, the works are small steps."""

TRL_VERSIONS = {
    "beside_trl.trl_grpo": grpo_step.TRL_VERSION,
    "beside_trl.trl_lora": grpo_step.TRL_VERSION,
    "beside_trl.trl_play": grpo_step.TRL_VERSION,
    "beside_trl.trl_ppo": ppo_step.TRL_VERSION,
}

JUDGE = """
class SentimentIntensityAnalyzer:
    def polarity_scores(self, text):
        return {"compound": text.count("good") - text.count("bad")}
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The demo's folder, with a tiny model, a few prompts and pairs, and a judge that counts two words."""
    folder = tmp_path_factory.mktemp("home")
    for name in ("models", "data", "judge"):
        (folder / name).mkdir()
    make_model(folder / "models" / "smollm2")
    config = folder / "models" / "smollm2" / "config.json"
    longer = json.loads(config.read_text()) | {"max_position_embeddings": 128}  # a profile has rows of 64 new tokens
    config.write_text(json.dumps(longer))
    make_prompts(folder / "data" / "prompts.parquet", num_train=64)
    for rows in ("preferences", "costs", "answers"):  # of the last nothing is read
        make_pairs(folder / "data" / f"{rows}.parquet", num_train=64)
    (folder / "judge" / "vaderSentiment.py").write_text(JUDGE)
    for name in ("vader_lexicon.txt", "emoji_utf8_lexicon.txt"):
        (folder / "judge" / name).touch()
    return folder


def scripts() -> set[str]:
    """Return the modules that people start. Scripts of the top folder start those for GPUs."""
    folder = ROOT / "benchmarks"
    paths = {path for path in folder.rglob("*.py") if '__name__ == "__main__"' in path.read_text()}
    paths = {path.relative_to(folder) for path in paths if path.parent.name not in ("gpu", "one_card", "demo")}
    return {".".join(path.with_suffix("").parts).removesuffix(".__main__") for path in paths}


def test_every_benchmark_has_a_smallest_size():
    assert {name.split()[0] for name in SMALLEST} == scripts()


def test_the_sums_over_questions_have_the_keys_of_the_last_line():
    verdict = referee.Verdict("dpo", 1.0, 1.0, 1.0, {}, None, None, None, plans=1, violations=0, took=1.0)
    change = regret.Change("link", 2.0, 1.0, 1.0)
    assert sorted(referee.summary([verdict])) == SMALLEST["planner.referee"][1].split()
    assert (
        sorted(regret.summary([regret.Regrets("dpo", 1.0, 1.0, 1, (change,), 0.0)]))
        == SMALLEST["planner.regret"][1].split()
    )


@pytest.mark.all
@pytest.mark.parametrize("name", SMALLEST)
def test_a_benchmark_ends_with_one_line_of_json(name, home):
    version = TRL_VERSIONS.get(name)
    if version and not (ROOT / trl_folder(version)).is_dir():
        pytest.skip(f"TRL is not installed in {trl_folder(version)}: the benchmark that compares with it puts it there")
    arguments, keys = SMALLEST[name]
    files = {"model": str(home / "models" / "smollm2"), "prompts": str(home / "data" / "prompts.parquet")}
    works = {
        "ppo_work": PPOWork(**files, batch_size=8, response_tokens=4, steps=1),
        "grpo_work": GRPOWork(**files, batch_size=2, samples=4, response_tokens=4, steps=1, mini_batches=2),
        "lora_work": LoraWork(**files, batch_size=2, samples=4, response_tokens=4, steps=1, rank=4),
        "play_work": PlayWork(**files, batch_size=1, samples=2, turns=2, response_tokens=2),
    }
    texts = {key: json.dumps(asdict(work), separators=(",", ":")) for key, work in works.items()}
    values = {"home": home, **texts, "growth": '{"calls":12}'}
    script = name.split()[0]
    environment = {**os.environ, "HOME": str(home), "HF_HUB_OFFLINE": "1"}
    environment["PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"] = "120"  # its first start makes a database
    if version:
        environment |= {"PYTHONPATH": python_path(version), "TRL_EXPERIMENTAL_SILENCE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{script}", *(word.format_map(values) for word in arguments.split())],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    for part in result if isinstance(result, list) else [result]:
        assert sorted(part) == keys.split()
