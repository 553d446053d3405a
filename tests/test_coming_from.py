"""Our side of the tables of docs/coming_from.md: each name is a parameter that there is."""

import re
from pathlib import Path
from typing import get_args

import pytest
from prefect_rlhf.flows.forms.foreign_options import OURS, REFUSED, answer
from prefect_rlhf.flows.forms.foreign_units import UNITS
from pydantic import BaseModel

from prefect_rlhf.blocks.dataset import Prompts
from prefect_rlhf.blocks.model import Model
from prefect_rlhf.flows.algorithm.places import ALGORITHMS
from prefect_rlhf.flows.algorithm.rlhf_flow import find_flow
from prefect_rlhf.flows.forms.options import RunOptions
from prefect_rlhf.tasks.host_rewards import HostRewards
from prefect_rlhf.tasks.play import Play
from prefect_rlhf.tasks.rl.settings.offline import DPO
from prefect_rlhf.tasks.rl.settings.online import GRPO, PPO
from prefect_rlhf.tasks.trackers.tracking import Tracking

GROUPS = {
    "algo": (GRPO, PPO, DPO),
    "prompts": (Prompts,),
    "held_out": (Prompts,),
    "actor": (Model,),
    "tracking": (Tracking,),
    "reward": (HostRewards,),
    "play": (Play,),
}
NO_PARAMETERS = {"micro_batches=4", "recompute=all", "engine=vllm", "tp2", "actor_train.learning_rate", "metrics.jsonl"}
"""Words of plans, and what a run writes."""
LINES = (Path(__file__).parents[1] / "docs" / "coming_from.md").read_text().splitlines()
CELLS = [[cell.strip() for cell in line.strip("|").split("|")] for line in LINES if line.startswith("| ")]
ROWS = [row for row in CELLS if len(row) == 5 and row[4] != "ours"]
NAMES = sorted({name for row in ROWS for name in re.findall(r"`([^`]+)`", row[4])} - NO_PARAMETERS)


def has(kind, path):
    """Whether a group of settings has the field at a dotted path, through groups that may be left out."""
    name, _, rest = path.partition(".")
    field = kind.model_fields.get(name)
    if field is None or not rest:
        return field is not None
    kinds = [one for one in (field.annotation, *get_args(field.annotation)) if isinstance(one, type)]
    return any(has(one, rest) for one in kinds if issubclass(one, BaseModel))


def test_there_are_names_to_look_at():
    assert len(ROWS) > 50 and len(NAMES) > 50


@pytest.mark.parametrize("name", NAMES)
def test_each_name_of_ours_is_a_parameter(name):
    group, _, path = name.partition(".")
    if group in GROUPS:
        assert any(has(kind, path) for kind in GROUPS[group])
    else:
        of_flows = {key for algorithm in ALGORITHMS for key in find_flow(algorithm).parameters.properties}
        assert name in RunOptions.model_fields or name in of_flows


def test_where_ppo_has_another_name_than_grpo_each_has_its_own():
    pairs = [row for row in CELLS if len(row) == 2 and row[0].startswith("`algo.")]
    assert len(pairs) >= 3
    for grpos, ppos in pairs:
        for kind, other, cell in ((GRPO, PPO, grpos), (PPO, GRPO, ppos)):
            names = [name.removeprefix("algo.") for name in re.findall(r"`([^`]+)`", cell)]
            assert all(has(kind, name) and not has(other, name) for name in names), cell


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_each_option_of_the_page_is_answered_with_the_names_beside_it(row):
    written = {"actor_train.learning_rate", "metrics.jsonl"}
    ours = set(re.findall(r"`([^`]+)`", row[4])) - written
    for cell in row[1:4] if ours else []:
        for option in re.findall(r"`([^`]+)`", cell):
            refused = any(option in names for names in REFUSED.values())
            assert refused or all(name in answer(f"--{option.lstrip('.')}") for name in ours), option


def test_each_option_that_is_answered_is_on_the_page():
    there = set(re.findall(r"`\.?([^`]+)`", "\n".join(LINES)))
    assert {name for names in (*OURS.values(), *REFUSED.values()) for name in names} <= there


def test_adapters_are_refused_by_all_their_names():
    assert {answer(name) for name in ("lora_rank", "--lora_r", "use_peft")} == {
        "adapters are not supported yet; all weights are trained"
    }


OF_OURS = {
    "algo.optimizer.decay_steps": "optimizer steps",
    "algo.optimizer.warmup_steps": "optimizer steps",
    "algo.update.mini_batches": "optimizer steps of a pass",
    "algo.update.epochs": "passes over a step's rows",
    "micro_batches=4": "micro-batches of a replica and mini-batch",
    "algo.sampling.max_new_tokens": "tokens",
    "algo.sampling.top_k": "tokens, 0 for all",
    "algo.samples_per_prompt": "responses",
    "play.max_turns": "turns of the model",
    "play.max_answer_tokens": "tokens",
    "play.workers": "processes of a replica",
    "staleness": "steps",
    "algo.batch_size": "prompts, chats or pairs",
    "epochs": "passes over the data",
    "prompts.max_prompt_length": "tokens",
    "algo.kl.target": "nats of a response",
    "algo.kl.horizon": "responses",
    "algo.over_sampling": "prompts answered, as a multiple of those trained on",
    "steps": "steps",
    "algo.evaluate_every": "steps",
    "checkpoint_every": "steps",
    "keep_checkpoints": "checkpoints",
    "call_deadline_seconds": "seconds",
    "tracking.samples": "rows",
}
"""The unit of each of our parameters that counts or measures something; all others are names, truths and factors."""
OF_THEIRS = {
    "optim.total_training_steps optim.lr_decay_steps optim.lr_warmup_steps": "steps",
    "max_steps eval_steps save_steps": "optimizer steps",
    "warmup_steps": "optimizer steps, or a share",
    "steps_per_generation": "micro-batches of a generation",
    "gradient_accumulation_steps": "micro-batches of an optimizer step",
    "per_device_train_batch_size": "rows of a device",
    "ppo_micro_batch_size_per_gpu micro_train_batch_size micro_rollout_batch_size": "rows of a device",
    "ppo_mini_batch_size": "prompts of an optimizer step",
    "train_batch_size": "responses of an optimizer step",
    "num_iterations ppo_epochs max_epochs": "passes over a step's rows",
    "max_completion_length data.max_response_length generate_max_len": "tokens",
    "data.max_prompt_length prompt_max_len": "tokens",
    "top_k": "tokens, 0 for all",
    "rollout.top_k": "tokens, -1 for all",
    "num_generations rollout.n n_samples_per_prompt": "responses",
    "max_tool_calling_iterations": "rounds of calls",
    "multi_turn.max_assistant_turns": "turns of the model",
    "multi_turn.max_tool_response_length": "characters",
    "agent.num_workers": "processes",
    "trainer.v1.separate_async async_train algorithm.filter_groups dynamic_filtering": "truth",
    "generation_batch_size": "responses",
    "data.train_batch_size rollout_batch_size": "prompts, chats or pairs",
    "num_train_epochs trainer.total_epochs num_episodes": "passes over the data",
    "target_kl kl_target": "nats of a token",
    "horizon kl_horizon": "responses",
    "trainer.total_training_steps trainer.test_freq trainer.save_freq": "steps",
    "save_total_limit trainer.max_actor_ckpt_to_keep max_ckpt_num": "checkpoints",
    "vllm_server_timeout": "seconds",
    "trainer.log_val_generations": "rows",
}
"""The unit of each option that counts or measures something."""
NOT_MEASURED = {
    *("min_p", "eval_strategy", "algorithm.kl_ctrl.type", "log_completions", "prompt_data"),
    *("multi_turn.tool_response_truncate_side",),
}
"""Options in the same rows that are names, truths or probabilities."""
THEIRS = {option: unit for options, unit in OF_THEIRS.items() for option in options.split()}
MEASURED = [
    (option, {OF_OURS[name] for name in ours if name in OF_OURS})
    for ours, theirs in OURS.items()
    for option in theirs
    if any(name in OF_OURS for name in ours) and option not in NOT_MEASURED
]


@pytest.mark.parametrize(("option", "units"), MEASURED)
def test_an_option_of_another_unit_has_the_arithmetic_and_no_other_has(option, units):
    """On the page, and in the message that refuses the option."""
    if THEIRS[option] in units and option not in SEVERAL:
        assert option not in UNITS
        return
    assert f"| `{option}` | {UNITS[option]} |" in LINES
    assert UNITS[option] in answer(option)


SEVERAL = {"max_steps"}
"""Options that two parameters replace, one of them in the same unit."""


@pytest.mark.parametrize("option", sorted(UNITS))
def test_each_arithmetic_is_on_the_page_and_of_an_option_there(option):
    there = {name for names in (*OURS.values(), *REFUSED.values()) for name in names}
    assert option in there and f"| `{option}` | {UNITS[option]} |" in LINES


TRL = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "steps_per_generation": 32, "devices": 4,
    "num_generations": 8, "generation_batch_size": 256, "max_steps": 800, "eval_steps": 40, "save_steps": 80,
    "warmup_steps": 0.1, "warmup_ratio": 0.1, "max_tool_calling_iterations": 3,
}  # fmt: skip
VERL = {
    "data.train_batch_size": 32, "data.gen_batch_size": 96, "rollout.n": 8, "ppo_mini_batch_size": 8, "dp": 4,
    "ppo_micro_batch_size_per_gpu": 2, "optim.total_training_steps": 100, "optim.lr_decay_steps": 100,
    "optim.lr_warmup_steps": 10, "lr_warmup_steps_ratio": 0.1, "multi_turn.max_tool_response_length": 256,
    "agent.num_workers": 8, "replicas": 2, "target_kl": 0.05, "response_tokens": 100,
}  # fmt: skip
OPENRLHF = {
    "rollout_batch_size": 32, "n_samples_per_prompt": 8, "train_batch_size": 64, "micro_train_batch_size": 2,
    "micro_rollout_batch_size": 4, "dp": 4, "lr_warmup_ratio": 0.1, "kl_target": 0.05, "response_tokens": 100,
}  # fmt: skip
HERE = {"steps": 100, "algo.update.mini_batches": 4, "algo.update.epochs": 2}
"""One job, as each of the four states it: 32 prompts with 8 responses, in 4 optimizer steps, twice; 100 steps."""
RIGHT = {
    "algo.batch_size": {32}, "algo.update.mini_batches": {4}, "algo.evaluate_every": {5}, "steps": {100},
    "checkpoint_every": {10}, "play.max_turns": {4}, "algo.optimizer.warmup_steps": {80}, "micro_batches": {8, 16},
    "algo.optimizer.decay_steps": {800}, "play.max_answer_tokens": {64}, "play.workers": {4}, "algo.kl.target": {5},
    "algo.over_sampling": {3},
}  # fmt: skip


@pytest.mark.parametrize("numbers", [TRL, VERL, OPENRLHF], ids=["TRL", "verl", "OpenRLHF"])
def test_the_arithmetic_turns_a_job_of_each_library_into_the_same_job_here(numbers):
    known, found = numbers | HERE, 0
    for option in numbers.keys() & UNITS.keys():
        for part in UNITS[option].replace("of SFT and DPO", ";").split(";"):
            for name, right in re.findall(r"([\w.]+) = ([^:,;]+)", part):
                names = re.findall(r"[a-z_][\w.]*", right)
                if "gradient_accumulation_steps * devices" in right:
                    assert eval(_as_python(right), {}, _plain(known, names)) == 64, (
                        "chats or pairs of an optimizer step"
                    )
                else:
                    assert eval(_as_python(right), {}, _plain(known, names)) in RIGHT[name], option
                found += 1
    assert found >= 5


def _as_python(text):
    return re.sub(r"(?<=[a-z])\.(?=[a-z])", "_", text)


def _plain(known, names):
    return {_as_python(name): known[name] for name in names}
