"""docs/coming_from.md: each name of ours is a parameter, and the tables say what messages and `translate` say."""

import inspect
import re
from pathlib import Path

import pytest
import yaml
from test_docs import BLOCK

from prefect_rlhf.flows.algorithm.places import ALGORITHMS
from prefect_rlhf.flows.algorithm.rlhf_flow import find_flow
from prefect_rlhf.flows.commands.cli import main
from prefect_rlhf.flows.forms.dictionary.answer import answer, every_dialect
from prefect_rlhf.flows.forms.dictionary.rule import computed
from prefect_rlhf.flows.forms.unknown_key import has_parameter
from tests import foreign_tables

PAGE = foreign_tables.PAGE.read_text()
NO_PARAMETERS = {"micro_batches", "recompute", "engine", "tp", "actor_train.learning_rate", "metrics.jsonl"}
"""Words of plans, and what a run writes."""
CELLS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| ")]
ROWS = [row for row in CELLS if len(row) == 5 and row[4] != "ours" and not row[0].startswith("`")]
NAMES = sorted({name for row in ROWS for name in re.findall(r"`([^`]+)`", row[4])} - NO_PARAMETERS)
FLOWS = [find_flow(name) for name in ALGORITHMS]
SECTIONS = {
    name: PAGE.split(f"\n## {name}\n")[1].split("\n## ")[0] for name in ("Options without effect", "Refused options")
}


def names_of_ours(cell):
    """The names in a cell, and those that other algorithms have in their place."""
    named = set(options_in(cell)) - {"actor_train.learning_rate", "metrics.jsonl", "tracking.names"}
    for name in list(named):
        named |= {name.replace("algo.optimizer", f"algo.{role}_optimizer") for role in ("actor", "critic")}
        named |= {name.replace("prompts.", f"{rows}.") for rows in ("pairs", "chats", "answers")}
    return named


def options_in(text):
    return re.findall(r"`([^`]+)`", text)


def test_there_are_names_to_look_at():
    assert len(ROWS) > 90 and len(NAMES) > 60


@pytest.mark.parametrize("name", NAMES)
def test_each_name_of_ours_is_a_parameter(name):
    assert any(has_parameter(flow_signature(flow))(name) for flow in FLOWS)


def flow_signature(flow):
    return inspect.signature(flow.fn)


def test_where_ppo_has_another_name_than_grpo_each_has_its_own():
    pairs = [
        row
        for row in CELLS
        if len(row) == 2 and row[0].startswith("`algo.") and not row[0].startswith("`algo.kl.target")
    ]
    has = {name: has_parameter(flow_signature(find_flow(name))) for name in ("grpo", "ppo")}
    assert len(pairs) >= 4
    for grpos, ppos in pairs:
        for own, other, cell in (("grpo", "ppo", grpos), ("ppo", "grpo", ppos)):
            assert all(has[own](name) and not has[other](name) for name in options_in(cell)), cell


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}-{row[4]}")
def test_each_option_of_the_page_is_answered_with_the_names_beside_it(row):
    ours = names_of_ours(row[4])
    for cell in row[1:4] if ours else []:
        for option in options_in(cell):
            said = answer(option)
            assert row[0] in ("placement", "the rate as a metric") or any(name in said for name in ours), (option, said)


@pytest.mark.parametrize("library", ["trl", "verl", "openrlhf"])
def test_each_option_that_has_a_parameter_here_is_on_the_page(library):
    there = {option for row in CELLS for option in options_in(" ".join(row))}
    ends = {name for option in there for name in (option, f"actor.{option}", f"critic.{option}")}
    replaced = {option for rule, option in foreign_tables.replaced(library) if rule.where != "check"}
    assert replaced - ends == set()


@pytest.mark.parametrize("table", foreign_tables.tables())
def test_a_generated_table_matches_the_code(table):
    """`python -m tests.foreign_tables` writes it anew."""
    assert foreign_tables.between(table, PAGE)[1] == foreign_tables.tables()[table]


@pytest.mark.parametrize(
    "row", [row for row in CELLS if f"| {row[0]} |" in SECTIONS["Options without effect"]], ids=lambda row: row[1]
)
def test_an_option_without_a_counterpart_is_answered_with_its_reason(row):
    assert {answer(option) for option in options_in(row[0])} <= {f"leave it out: {row[1]}"}


@pytest.mark.parametrize(
    "row", [row for row in CELLS if f"| {row[0]} |" in SECTIONS["Refused options"]], ids=lambda row: row[1][:20]
)
def test_a_refused_option_has_no_parameter_and_is_answered(row):
    for option in options_in(row[0]):
        assert answer(option).startswith("here: ") and " = " not in answer(option), option
        assert not any(rule.ours and option in rule.stands_for for one in every_dialect() for rule in one.rules), option


def test_adapters_are_answered_by_all_their_names():
    names = ("lora_rank", "--lora_r", "use_peft", "actor_rollout_ref.model.lora_rank", "ds.lora.rank")
    assert all(answer(name).startswith("here: actor.adapter.rank") for name in names)
    assert answer("lora_alpha").startswith("here: actor.adapter.alpha")
    assert answer("lora_target_modules").startswith("here: actor.adapter.target_modules")
    assert answer("model.lora_adapter_path") == "here: actor.adapter.path"
    assert answer("critic.model.lora_rank") == "here: critic.adapter.rank"
    of_plain = "here: only plain adapters are trained: adapter.rank, adapter.alpha, adapter.target_modules and "
    assert {answer(name) for name in ("lora", "peft_config", "use_dora")} == {f"{of_plain}adapter.rslora"}
    assert answer("lora_dropout") == "here: an adapter has no dropout here"
    assert answer("load_in_4bit").startswith("here: actor.base_dtype")
    assert "base_dtype nf4" in answer("load_in_8bit")


TRL = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "steps_per_generation": 32, "devices": 4,
    "num_generations": 8, "generation_batch_size": 256, "max_steps": 800, "eval_steps": 40, "save_steps": 80,
    "warmup_steps": 0.1, "warmup_ratio": 0.1, "max_tool_calling_iterations": 3,
}  # fmt: skip
VERL = {
    "data.train_batch_size": 32, "data.gen_batch_size": 96, "rollout.n": 8, "actor.ppo_mini_batch_size": 8, "dp": 4,
    "actor.ppo_micro_batch_size_per_gpu": 2, "actor.optim.lr_decay_steps": 100, "actor.optim.lr_warmup_steps": 10,
    "actor.optim.lr_warmup_steps_ratio": 0.1, "rollout.multi_turn.max_tool_response_length": 256,
    "rollout.agent.num_workers": 8, "replicas": 2, "algorithm.kl_ctrl.target_kl": 0.05, "response_tokens": 100,
}  # fmt: skip
OPENRLHF = {
    "rollout.batch_size": 32, "rollout.n_samples_per_prompt": 8, "train.batch_size": 64, "train.micro_batch_size": 2,
    "rollout.micro_batch_size": 4, "dp": 4, "actor.lr_warmup_ratio": 0.1, "lr_warmup_ratio": 0.1,
    "algo.kl.target": 0.05, "response_tokens": 100,
}  # fmt: skip
HERE = {"steps": 100, "algo.update.mini_batches": 4, "algo.update.epochs": 2}
"""One job, as each of the four states it: 32 prompts with 8 responses, in 4 optimizer steps, twice; 100 steps."""
RIGHT = {
    "algo.batch_size": {32}, "algo.update.mini_batches": {4}, "algo.evaluate_every": {5}, "steps": {100},
    "checkpoint_every": {10}, "play.max_turns": {4}, "algo.optimizer.warmup_steps": {80}, "micro_batches": {8, 16},
    "algo.optimizer.decay_steps": {800}, "play.max_answer_tokens": {64}, "play.workers": {4}, "algo.kl.target": {5},
    "algo.over_sampling": {3},
}  # fmt: skip


@pytest.mark.parametrize(("library", "numbers"), [("trl", TRL), ("verl", VERL), ("openrlhf", OPENRLHF)])
def test_the_arithmetic_turns_a_job_of_each_library_into_the_same_job_here(library, numbers):
    known, found = numbers | HERE, 0
    for rule in {
        rule
        for rule, _ in foreign_tables.replaced(library)
        if rule.is_arithmetic and set(rule.options) <= numbers.keys()
    }:
        if rule.ours == "algo.batch_size" and "num_generations" not in rule.formula:
            assert computed(rule.formula, known.__getitem__) == 64, "chats or pairs of an optimizer step"
        else:
            ours = re.sub("(actor|critic)_optimizer", "optimizer", rule.ours)
            assert computed(rule.formula, known.__getitem__) in RIGHT[ours], rule.arithmetic
        found += 1
    assert found >= 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The files that the pages say to save."""
    folder = tmp_path_factory.mktemp("page")
    for page in sorted(foreign_tables.PAGE.parent.glob("*.md")):
        for _, _, attributes, text in BLOCK.findall(page.read_text()):
            if attributes.strip().startswith("file="):
                (folder / attributes.strip().removeprefix("file=")).write_text(text)
    return folder


def test_the_pages_example_prints_what_stands_there_and_makes_parameters_that_a_run_takes(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert main(["translate", "trl_grpo.yaml", "--out", "translated.yaml"]) == 0
    (shown,) = re.findall(r"```text output=trl_grpo.yaml\n(.*?)```", PAGE, re.DOTALL)
    assert capsys.readouterr().out == shown
    checked = find_flow("grpo").validate_parameters(yaml.safe_load(Path("translated.yaml").read_text()))
    assert checked["algo"].batch_size == 4 and checked["steps"] == 10
