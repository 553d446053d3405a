"""Translated files of the usual forms are parameters with which a dry run decides everything."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from prefect_rlhf.flows.algorithm.rlhf_flow import find_flow
from prefect_rlhf.flows.commands.cli import main
from prefect_rlhf.flows.forms.dictionary.answer import every_dialect
from prefect_rlhf.placement.devices.mesh import ClusterShape
from tests.support.runs import prepared, whole
from tests.support.tiny import make_model, make_pairs

TWO_DEVICES = whole(ClusterShape("desk", num_nodes=1, devices_per_node=2, device_memory_bytes=8 << 30))
REWARDS = """
def right(completions, **columns):
    return [1.0] * len(completions)

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0
"""
TRL_GRPO = """
# Model arguments
model_name_or_path: {folder}/actor
model_revision: main
torch_dtype: bfloat16
attn_implementation: flash_attention_2
# Data
dataset_name: {folder}/prompts.parquet
dataset_prompt_column: prompt
# Trainer
bf16: true
use_vllm: true
do_eval: false
beta: 0.04
gradient_accumulation_steps: 4
gradient_checkpointing: true
gradient_checkpointing_kwargs:
  use_reentrant: false
learning_rate: 2.0e-05
log_completions: true
logging_steps: 1
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs:
  min_lr_rate: 0.1
max_prompt_length: 20
max_completion_length: 10
max_steps: 12
num_generations: 4
output_dir: {folder}/runs
per_device_train_batch_size: 4
reward_funcs: [{folder}/rewards.right]
save_strategy: epoch
warmup_ratio: 0.1
push_to_hub: true
"""
TRL_SFT = """
model_name_or_path: {folder}/actor
dataset_name: {folder}/texts.parquet
dataset_text_field: words
eval_strategy: steps
eval_steps: 2
learning_rate: 2.0e-05
max_length: 32
packing: false
num_train_epochs: 1
per_device_train_batch_size: 4
gradient_accumulation_steps: 1
output_dir: {folder}/runs
logging_steps: 5
seed: 7
"""
TRL_DPO = """
model_name_or_path: {folder}/actor
dataset_name: {folder}/pairs.parquet
beta: 0.05
loss_type: sigmoid
learning_rate: 5.0e-7
max_length: 32
max_prompt_length: 16
num_train_epochs: 1
optim: adamw_torch
per_device_train_batch_size: 2
gradient_accumulation_steps: 2
warmup_steps: 1
output_dir: {folder}/runs
"""
VERL_GRPO = """
set -x
MODEL={folder}/actor
size=$((2 * 4))
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files={folder}/prompts.parquet \\
    data.val_files="{folder}/prompts.parquet" \\
    data.train_batch_size=$size \\
    data.max_prompt_length=20 \\
    data.max_response_length=10 \\
    data.filter_overlong_prompts=True \\
    actor_rollout_ref.model.path=${{MODEL}} \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.model.use_remove_padding=True \\
    actor_rollout_ref.actor.ppo_mini_batch_size=4 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_coef=0.001 \\
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \\
    actor_rollout_ref.actor.entropy_coeff=0 \\
    +actor_rollout_ref.actor.fsdp_config.param_offload=False \\
    actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \\
    actor_rollout_ref.rollout.n=4 \\
    custom_reward_function.path={folder}/rewards.py \\
    trainer.logger='["console"]' \\
    trainer.nnodes=1 \\
    trainer.test_freq=1 \\
    trainer.total_epochs=2 $@
"""
VERL_PPO = """
optim: &optim
  lr: 1.0e-06
  weight_decay: 0.0
actor_rollout_ref:
  model: {{path: {folder}/actor}}
  actor:
    optim: *optim
    ppo_mini_batch_size: 4
    ppo_epochs: 2
  rollout: {{n: 1, temperature: 0.8}}
critic:
  model: {{path: {folder}/reward}}
  optim: {{<<: *optim, lr: 1.0e-05}}
data:
  train_files: {folder}/prompts.parquet
  val_files: {folder}/prompts.parquet
  train_batch_size: 8
  max_response_length: 10
  max_prompt_length: 20
reward_model:
  enable: true
  model: {{path: {folder}/reward}}
algorithm:
  adv_estimator: gae
  use_kl_in_reward: true
  kl_ctrl: {{kl_coef: 0.01}}
trainer:
  total_training_steps: 4
  project_name: mine
  default_local_dir: {folder}/runs/${{trainer.project_name}}
"""
OPENRLHF_PPO = """
ray job submit --address="http://127.0.0.1:8265" -- python3 -m openrlhf.cli.train_ppo_ray \\
   --actor.num_gpus_per_node 8 --train.colocate_all --vllm.num_engines 4 \\
   --actor.model_name_or_path {folder}/actor --reward.model_name_or_path {folder}/reward \\
   --train.batch_size 4 --rollout.batch_size 8 --train.max_epochs 1 \\
   --data.max_len 32 --rollout.max_new_tokens 10 --actor.lr_warmup_ratio 0 --critic.lr_warmup_ratio 0 \\
   --actor.adam.lr 5e-7 --critic.adam.lr 9e-6 --algo.kl.init_coef 0.01 \\
   --data.prompt_dataset {folder}/prompts.parquet --data.input_key prompt \\
   --reward.normalize_enable --ds.packing_samples --ckpt.output_dir {folder}/runs
"""
OPENRLHF_GRPO = """
pretrain: {folder}/actor
reward_pretrain: {folder}/reward
prompt_data: {folder}/prompts.parquet
input_key: prompt
advantage_estimator: group_norm
n_samples_per_prompt: 4
rollout_batch_size: 8
train_batch_size: 16
generate_max_len: 10
use_kl_loss: true
kl_estimator: k3
init_kl_coef: 0.001
eps_clip_low_high: [0.2, 0.28]
lr_warmup_ratio: 0
actor_learning_rate: 5.0e-7
zero_stage: 3
save_path: {folder}/runs
"""
OPENRLHF_DPO = """
python3 -m openrlhf.cli.train_dpo --model.model_name_or_path {folder}/actor --data.dataset {folder}/pairs.parquet \\
   --train.batch_size 4 --adam.lr 5e-7 --lr_warmup_ratio 0 --model.label_smoothing 0.1 --data.prompt_key prompt \\
   --ckpt.output_dir {folder}/runs --train.max_epochs 1
"""
REWARD = """
model_name_or_path: {folder}/actor
dataset_name: {folder}/pairs.parquet
center_rewards_coefficient: 0.01
max_length: 32
num_train_epochs: 1
per_device_train_batch_size: 4
output_dir: {folder}/runs
"""
FILES = {
    "grpo.yaml": ("grpo", TRL_GRPO, []),
    "sft.yaml": ("sft", TRL_SFT, []),
    "dpo.yaml": ("dpo", TRL_DPO, []),
    "reward.yaml": ("reward", REWARD, []),
    "run_grpo.sh": ("grpo", VERL_GRPO, []),
    "ppo.yaml": ("ppo", VERL_PPO, []),
    "remax.yaml": ("remax", VERL_PPO.replace("gae", "remax").replace("ppo_mini_batch_size: 4", "ppo_mini_batch_size: 8")
                   .replace("ppo_epochs: 2", "ppo_epochs: 1"), []),
    "train_ppo.sh": ("ppo", OPENRLHF_PPO, []),
    "old_names.yaml": ("grpo", OPENRLHF_GRPO, []),
    "train_dpo.sh": ("dpo", OPENRLHF_DPO, []),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("theirs")
    make_model(folder / "actor")
    make_model(folder / "reward", scalar=True, layers=3)
    prompts = {"prompt": ["what is it", "a good film"] * 16, "data_source": ["films"] * 32, "ground_truth": ["it"] * 32}
    pq.write_table(pa.table(prompts), folder / "prompts.parquet")
    make_pairs(folder / "pairs.parquet", num_train=16)
    pq.write_table(pa.table({"words": ["what is it", "the best film"] * 8}), folder / "texts.parquet")
    (folder / "rewards.py").write_text(REWARDS)
    return folder


def translated(folder, name, text, *flags):
    """The parameters that the command writes."""
    (folder / name).write_text(text.format(folder=folder))
    out = folder / f"translated-{name}.yaml"
    assert main(["translate", str(folder / name), "--out", str(out), *flags]) == 0
    return yaml.safe_load(out.read_text())


@pytest.mark.parametrize("name", FILES)
def test_a_translated_file_is_one_that_a_dry_run_accepts(folder, name, capsys):
    algorithm, text, flags = FILES[name]
    parameters = translated(folder, name, text, "--rows", "32", *flags)
    assert f"next: prefect-rlhf run {algorithm} --parameters" in capsys.readouterr().out
    if name == "grpo.yaml":  # TRL names a module of Python, and the test's is in a folder
        parameters["reward"]["functions"]["right"]["function"] = f"{folder}/rewards.py:right"
    assert prepared(find_flow(algorithm), parameters, TWO_DEVICES).augmented.plan.name == "flattening"


def test_a_dump_of_every_option_of_a_trainer_is_accepted_too(folder, capsys):
    """As `GRPOConfig(...).to_json_string()` writes it, with the model and the rows that its script names filled in."""
    (dialect,) = [one for one in every_dialect() if (one.library, one.trainer) == ("trl", "grpo")]
    chosen = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 10, "max_steps": 4}
    dump = dict(dialect.defaults) | {
        "output_dir": f"{folder}/runs",
        "generation_batch_size": 8,
        "steps_per_generation": 1,
    }
    text = json.dumps(dump | chosen).replace("{", "{{").replace("}", "}}")
    parameters = translated(folder, "dump.json", text)
    said = capsys.readouterr().out
    assert "more options have the default of TRL 1.16" in said and "to fill in" in said
    assert parameters["actor"]["path"] == "MODEL" and parameters["reward"]["functions"]["reward"]["signature"] == "trl"
    parameters["actor"]["path"] = f"{folder}/actor"
    parameters["prompts"] = parameters["held_out"] = {"path": f"{folder}/prompts.parquet", "split_column": None}
    parameters["reward"] = {"path": f"{folder}/reward", "head": "scalar"}
    assert prepared(find_flow("grpo"), parameters, TWO_DEVICES).augmented.plan.name == "flattening"


def test_the_written_file_goes_through_the_command_of_a_dry_run(folder, capsys):
    translated(folder, "again.sh", VERL_GRPO)
    out = str(folder / "translated-again.sh.yaml")
    assert main(["run", "grpo", "--parameters", out, "--devices", "1", "--dry-run"]) == 0
    assert "no step was started" in capsys.readouterr().out
