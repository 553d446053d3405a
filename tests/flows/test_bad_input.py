"""Mistakes of users: each gets one line with field, value and what would be right, before any device."""

import json
import os
import re
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from prefect_rlhf.errors.errors import InvalidInput, PlanDoesNotFit, RlhfError
from prefect_rlhf.flows.commands.flags import read_parameters
from prefect_rlhf.flows.ppo import ppo
from prefect_rlhf.flows.reward import reward
from prefect_rlhf.placement.devices.mesh import ClusterShape
from tests.support.finished_steps import write_checkpoint
from tests.support.runs import prepared, whole
from tests.support.tiny import make_model, make_pairs, ppo_parameters

pytestmark = pytest.mark.quick

TWO_DEVICES = whole(ClusterShape("desk", num_nodes=1, devices_per_node=2, device_memory_bytes=8 << 30))

PLAN = """
name: mine
calls:
  actor_generate:       {mesh: "n0:0-1", engine: vllm, dp: 2}
  reward_inference:     {mesh: "n0:0-1", engine: megatron, dp: 2}
  ref_inference:        {mesh: "n0:0-1", engine: megatron, dp: 2}
  critic_inference:     {mesh: "n0:0-1", engine: megatron, dp: 2}
  actor_train:          {mesh: "n0:0-1", engine: megatron, dp: 2}
  critic_train:         {mesh: "n0:0-1", engine: megatron, dp: 2}
  kl_penalised_rewards: {mesh: "n0:0", engine: python}
  gae:                  {mesh: "n0:0", engine: python}
  record_rollouts:      {mesh: "n0:0", engine: python}
  actor_evaluation:     {mesh: "n0:0-1", engine: vllm, dp: 2}
  reward_evaluation:    {mesh: "n0:0-1", engine: megatron, dp: 2}
  record_evaluation:    {mesh: "n0:0", engine: python}
"""


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Parameters that run."""
    folder = tmp_path_factory.mktemp("good")
    return {"folder": folder, **ppo_parameters(folder)}


def check(parameters, flow=ppo, lease=TWO_DEVICES):
    """What a run does before it uses a device."""
    return prepared(flow, {key: value for key, value in parameters.items() if key != "folder"}, lease)


def at(parameters, path, value):
    """A deep copy of `parameters` with the value at a dotted path replaced."""
    copy = json.loads(json.dumps({k: v for k, v in parameters.items() if k != "folder"}))
    *groups, last = path.split(".")
    place = copy
    for group in groups:
        place = place.setdefault(group, {})
    place[last] = value
    return copy


def other_tokenizer(folder):
    """The folder, in which a token has another text."""
    file = Path(folder) / "tokenizer.json"
    file.write_text(file.read_text().replace('"good"', '"fine"'))
    return folder


def plan(good, **changes):
    """Parameters with a plan file in which some calls differ (None: left out)."""
    content = yaml.safe_load(PLAN)
    for call, change in changes.items():
        content["calls"][call] = None if change is None else content["calls"].get(call, {}) | change
    content["calls"] = {call: entry for call, entry in content["calls"].items() if entry is not None}
    file = good["folder"] / f"plan-{abs(hash(str(changes)))}.yaml"
    file.write_text(yaml.safe_dump(content))
    return at(good, "plan", str(file))


def prompts(good, name, table, damage=None, **more):
    """Parameters with another prompts file, or with bytes of it changed."""
    file = good["folder"] / f"{name}.parquet"
    pq.write_table(pa.table(table), file, compression="none", use_dictionary=False)
    if damage:
        file.write_bytes(damage(file.read_bytes()))
    return at(good, "prompts", {"path": str(file), **more})


def rewarded(good, name, body, **function):
    """Parameters with a reward function of this body, instead of the reward model."""
    file = good["folder"] / f"{name}.py"
    file.write_text(f"def {name}(row):\n    {body}\n")
    return at(good, "reward", {"functions": {"exact": {"function": f"{file}:{name}", **function}}})


def chat(good, name, *turns, **more):
    """Parameters with prompts that are one chat, eight times."""
    messages = [{"role": role, "content": content} for role, content in turns]
    return prompts(good, name, {"prompt": [messages] * 8, "split": ["train"] * 8}, **more)


def prompts_file(good, name, content):
    """Parameters with another prompts file, of these bytes."""
    file = good["folder"] / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(content)
    return at(good, "prompts.path", str(file))


def text_file(good, name, content):
    """The path of a file with this text."""
    (good["folder"] / name).write_text(content)
    return str(good["folder"] / name)


def crowded_folder(good):
    """Parameters with a folder of prompts in which something else lies too."""
    folder = Path(prompts(good, "part", SOME)["prompts"]["path"]).rename(good["folder"] / "lone.parquet").parent
    (folder / "many").mkdir()
    (folder / "lone.parquet").rename(folder / "many" / "part.parquet")
    (folder / "many" / "notes.txt").write_text("what it is")
    return at(good, "prompts.path", str(folder / "many"))


def plan_text(good, text):
    """Parameters with a plan file of that text."""
    file = good["folder"] / f"plan-{abs(hash(text))}.yaml"
    file.write_text(text)
    return at(good, "plan", str(file))


def pipe(good, name):
    """The path of a pipe that nobody writes to."""
    os.mkfifo(good["folder"] / name)
    return str(good["folder"] / name)


def endless(good, name):
    """The path of a link to a device without end."""
    (good["folder"] / name).symlink_to("/dev/zero")
    return str(good["folder"] / name)


def output(good, name, content=None):
    """Parameters with an output folder below a file."""
    file = good["folder"] / "a file"
    file.write_text("")
    return at(good, "output_dir", str(file / name))


def broken_model(
    good, name, role="actor", config=None, drop=None, truncate=False, text=None, tensor=None, template=None
):
    """Parameters with a copy of the actor's folder that has something wrong."""
    folder = good["folder"] / name
    make_model(folder)
    if config or text:
        file = folder / "config.json"
        file.write_text(text or json.dumps(json.loads(file.read_text()) | config))
    if tensor:
        save_file(load_file(folder / "model.safetensors") | tensor, folder / "model.safetensors", {"format": "pt"})
    if template:
        (folder / "chat_template.jinja").write_text(template)
    if drop:
        (folder / drop).unlink()
    if truncate:
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:2000])
    return at(good, f"{role}.path", str(folder))


BOMB = "\n".join(
    ["a: &a [x, x]", *(f"{b}: &{b} [{', '.join(f'*{a}' for _ in range(9))}]" for a, b in pairwise("abcdefghij"))]
)
DEEP = "[" * 100_000
SOME = {"prompt": ["what is it"] * 8, "split": ["train"] * 8}

CASES = {
    "a plan for a call that the flow does not make": (lambda g: plan(g, actor_dance={"mesh": "n0:0", "engine": "vllm"}), "actor_dance"),
    "a plan without one of the calls": (lambda g: plan(g, gae=None), "gae"),
    "a mesh outside the cluster": (lambda g: plan(g, actor_train={"mesh": "n0:2-3"}), "n0:2-3"),
    "a node outside the cluster": (lambda g: plan(g, actor_train={"mesh": "n1:0-1"}), "n1:0-1"),
    "a mesh in digits of another script": (lambda g: plan(g, actor_train={"mesh": "n\u0660:\u0660"}), "a mesh such as n0:0-1"),
    "a preset by step with an empty share": (lambda g: at(g, "plan", {"1": "flattening", "2": "separation:"}), "plan.2: got 'separation:'"),
    "a play's deadline that no answer meets": (lambda g: at(g, "play", {"function": "a:b", "max_tokens": 8, "deadline_seconds": 1e-320}), "play.deadline_seconds: got 1e-320"),
    "a variable for plays said twice": (lambda g: at(g, "play", {"function": "a:b", "max_tokens": 8, "environment_variables": ["PATH", "PATH"]}), "play.environment_variables: got ['PATH', 'PATH'], expected each variable once"),
    "a project of a tracker with a line end": (lambda g: at(g, "tracking", {"report_to": ["tensorboard"], "project": "a\nb"}), "tracking.project: got 'a\\nb', expected a name without control characters"),
    "a mesh that is no mesh": (lambda g: plan(g, actor_train={"mesh": "gpu0"}), "gpu0"),
    "a tp that does not divide the heads": (lambda g: plan(g, ref_inference={"dp": 1, "tp": 3}), "ref_inference"),
    "more devices than the mesh has": (lambda g: plan(g, ref_inference={"dp": 4}), "ref_inference"),
    "vLLM with pipeline parallelism": (lambda g: plan(g, actor_generate={"dp": 1, "pp": 2}), "actor_generate"),
    "an engine that cannot do the call": (lambda g: plan(g, actor_train={"engine": "vllm"}), "engine"),
    "an engine that does not exist": (lambda g: plan(g, actor_train={"engine": "deepspeed"}), "engine"),
    "a misspelt key of a plan": (lambda g: plan(g, actor_train={"micro_batch": 2}), "micro_batch"),
    "more micro-batches than rows": (lambda g: plan(g, actor_train={"micro_batches": 99}), "actor_train.micro_batches"),
    "no micro-batch": (lambda g: plan(g, actor_train={"micro_batches": 0}), "micro_batches"),
    "a plan that is neither preset nor file": (lambda g: at(g, "plan", "flatening"), "flatening"),
    "a batch larger than the dataset": (lambda g: at(g, "algo.batch_size", 17), "algo.batch_size"),
    "more mini-batches than rows": (lambda g: at(g, "algo.update.mini_batches", 99), "actor_train"),
    "a misspelt hyperparameter": (lambda g: at(g, "algo.clipp", 0.2), "clipp"),
    "a clip out of range": (lambda g: at(g, "algo.clip", 2.0), "clip"),
    "the name of another algorithm's optimizer": (lambda g: at(g, "algo.optimizer", {"lr": 1e-5}), "algo.optimizer: unknown key (got {'lr': 1e-05}); closest: actor_optimizer, critic_optimizer"),
    "an option of TRL": (lambda g: at(g, "algo.learning_rate", 1e-5), "algo.learning_rate: unknown key (got 1e-05); here: algo.actor_optimizer.lr, algo.critic_optimizer.lr"),
    "an option of verl": (lambda g: at(g, "algo.kl_loss_coef", 0.1), "algo.kl_loss_coef: unknown key (got 0.1); here: algo.kl.coefficient"),
    "an option of OpenRLHF": (lambda g: at(g, "rollout_batch_size", 8), "rollout_batch_size: unknown key (got 8); here: algo.batch_size"),
    "a coefficient by the name that verl and TRL give it": (lambda g: at(g, "algo.kl_coef", 0.1), "algo.kl_coef: unknown key (got 0.1); here: algo.kl.coefficient"),
    "an option of verl at its place": (lambda g: at(g, "algorithm.kl_ctrl.kl_coef", 0.1), "algorithm: unknown key (got {'kl_ctrl': {'kl_coef': 0.1}}); here: algo.kl.coefficient"),
    "an option of verl under the prefix of a role": (lambda g: at(g, "actor_rollout_ref.actor.optim.lr", 1e-5), "actor_rollout_ref: unknown key (got {'actor': {'optim': {'lr': 1e-05}}}); here: algo.actor_optimizer.lr"),
    "options of TRL, all of them at once": (lambda g: at(g, "algo", g["algo"] | {"epsilon": 0.1, "beta": 0.1}), "2 mistakes: (1) algo.epsilon: unknown key (got 0.1); here: algo.clip (2) algo.beta: unknown key (got 0.1); here: algo.kl.coefficient"),
    "a file of another trainer": (lambda g: g | {"learning_rate": 1e-5, "beta": 0.1, "use_vllm": True}, "(prefect-rlhf translate FILE translates a whole file of TRL, verl or OpenRLHF)"),
    "options of verl in their groups": (lambda g: g | {"trainer": {"nnodes": 1, "total_epochs": 2}}, "2 mistakes: (1) trainer.nnodes: unknown key (got 1); leave it out: --devices of a run states them (2) trainer.total_epochs: unknown key (got 2); here: epochs"),
    "an option that needs nothing": (lambda g: at(g, "logging_steps", 1), "logging_steps: unknown key (got 1); leave it out: every step is logged"),
    "an option of another algorithm": (lambda g: at(g, "num_generations", 8), "num_generations: unknown key (got 8); this algorithm has no such parameter; of others it is algo.samples_per_prompt"),
    "another trainer's word": (lambda g: at(g, "algo.kl.estimator", "low_var_kl"), "algo.kl.estimator: got 'low_var_kl', expected 'k1' or 'k3'; here: k3"),
    "a misspelt group whose key another trainer has": (lambda g: at(g, "aglo.temperature", 1.0), "aglo: unknown key (got {'temperature': 1.0}); closest: algo"),
    "a misspelt key of a reward model": (lambda g: at(g, "reward.pth", "x"), "reward.pth: unknown key (got 'x'); closest: path"),
    "a misspelt key of a reward function": (lambda g: at(g, "reward", {"functions": {"exact": {"function": "m:f", "wait": 1}}}), "reward.functions.exact.wait: unknown key (got 1); closest: weight"),
    "a reward that reads a key that no row has": (lambda g: rewarded(g, "misspelt", "return float(row['answr'])"), "row 0 of prompts: KeyError: 'answr' ("),
    "a reward that reads a name that does not exist": (lambda g: rewarded(g, "unnamed", "return reponse"), "unnamed.py:2 in unnamed)"),
    "a reward that imports a package that is not there": (lambda g: rewarded(g, "unpacked", "import no_such_package"), "ModuleNotFoundError: No module named 'no_such_package' ("),
    "a misspelt setting of the trial of a reward": (lambda g: rewarded(g, "right", "return 1.0", try_frst=False), "reward.functions.exact.try_frst: unknown key (got False); closest: try_first"),
    "a reward that is a model and functions": (lambda g: at(g, "reward.functions", {"exact": {"function": "m:f"}}), "is not used: reward.functions score the responses; remove it, or remove functions"),
    "mini-batches beyond the rows, under a preset": (lambda g: at(at(g, "algo.update.mini_batches", 64), "plan", "real-heuristic"), "algo.update.mini_batches: got 64, expected at most 8, since actor_train trains on 8 rows a step"),
    "mini-batches beyond the rows, under a searched plan": (lambda g: at(at(g, "algo.update.mini_batches", 64), "plan", "auto"), "algo.update.mini_batches: got 64, expected at most 8"),
    "an actor whose only head is scalar": (lambda g: at(g, "actor.head", "scalar"), "a model that generates needs head: lm"),
    "a plan with mistakes in several calls": (
        lambda g: plan(g, gae=None, critic_train=None, actor_train={"dp": 4}, ref_inference={"micro_batches": 99}, actor_dance={"mesh": "n0:0", "engine": "vllm"}),
        "4 mistakes: (1) plan.calls: got 'actor_dance', ",
    ),
    "a plan with several unknown keys": (lambda g: plan(g, actor_train={"micro_batch": 2}, gae={"msh": "n0:0"}), "2 mistakes: (1) plan.calls.actor_train.micro_batch: unknown key (got 2); "),
    "a plan with several meshes outside the cluster": (lambda g: plan(g, actor_train={"mesh": "n1:0"}, gae={"mesh": "n0:7"}), "2 mistakes: (1) plan.calls.actor_train.mesh: "),
    "adapters of the actor": (lambda g: at(g, "actor.lora_rank", 8), "actor.lora_rank: unknown key (got 8); here: actor.adapter.rank"),
    "a setting that another leaves without effect": (lambda g: at(g, "algo.actor_optimizer.min_lr_ratio", 0.1), "algo.actor_optimizer.min_lr_ratio: 0.1 is not used: a constant rate does not fall; remove it, or set schedule: linear or cosine"),
    "an aim of a fixed coefficient": (lambda g: at(g, "algo.kl", {"kind": "fixed", "horizon": 100.0}), "algo.kl.horizon: 100.0 is not used: a fixed coefficient has no target; remove it, or set kind: adaptive"),
    "a way with long prompts of no length": (lambda g: at(g, "held_out.overlong_prompts", "drop"), "held_out.overlong_prompts: 'drop' is not used: no prompt is overlong without max_prompt_length"),
    "what no tracker would show": (
        lambda g: at(g, "tracking", {"project": "mine"}),
        "tracking.project: 'mine' is not used: report_to names no tracker; remove it, or set report_to, such as [tensorboard]",
    ),
    "the best of no metric": (lambda g: at(g, "best_is", "lowest"), "best_is: 'lowest' is not used: best_metric is not set; remove it, or set best_metric"),
    "checkpoints to keep of none": (lambda g: at(g, "keep_checkpoints", 5), "keep_checkpoints: 5 is not used: without checkpoint_every a run writes no checkpoints; remove it, or set"),
    "a fall after a warm-up that does not end": (lambda g: at(at(g, "algo.actor_optimizer.schedule", "cosine"), "algo.actor_optimizer.warmup_steps", 50), "algo.actor_optimizer.warmup_steps: got 50"),
    "a temperature below zero": (lambda g: at(g, "algo.sampling.temperature", -1.0), "temperature"),
    "a learning rate of zero": (lambda g: at(g, "algo.actor_optimizer.lr", 0.0), "lr"),
    "an unknown word of replan": (lambda g: at(g, "replan", "do"), "replan: got 'do', expected 'off', 'say' or 'switch'"),
    "a run that switches from a pinned plan": (lambda g: plan(g) | {"replan": "switch"}, "replan: got 'switch', expected say or off with a plan file or plans by step, which pin the plan"),
    "a run that switches and is pinned by step": (lambda g: at(g, "plan", {1: "flattening"}) | {"replan": "switch"}, "replan: got 'switch', expected say or off"),
    "a switch that no checkpoint can cut": (lambda g: g | {"replan": "switch", "staleness": 1}, "checkpoint_every: got None, expected a number of steps: with staleness"),
    "steps between checks of none": (lambda g: g | {"replan_every": 30}, "replan_every: 30 is not used: replan is say; remove it, or set replan: switch"),
    "a gain that nobody looks for": (lambda g: g | {"replan": "off", "replan_gain": 0.2}, "replan_gain: 0.2 is not used: replan is off"),
    "responses longer than allowed": (lambda g: g | {"expected_response_length": "9999"}, "expected_response_length: got 9999, expected at most"),
    "responses of no length": (lambda g: g | {"expected_response_length": "long"}, "expected_response_length: got 'long', expected tokens such as 1024"),
    "plans that begin late": (lambda g: at(g, "plan", {2: "flattening"}), "plan: got 'steps 2', expected steps that begin at 1"),
    "plans by no step": (lambda g: at(g, "plan", {}), "plan: got 'no step'"),
    "plans in no order": (lambda g: at(g | {"steps": 9}, "plan", {1: "flattening", 5: "split", 2: "split"}), "plan: got 'steps 1, 5, 2', expected steps in increasing order"),
    "plans beyond the run": (lambda g: at(g, "plan", {1: "flattening", 3: "split"}), "plan: got 'steps 1, 3', expected steps up to 2"),
    "a step in two texts": (lambda g: at(g, "plan", {"1": "flattening", "01": "split"}), "plan: got"),
    "a step with a sign": (lambda g: at(g, "plan", {"1": "flattening", "+2": "split"}), "plan: got"),
    "plans by step before the first": (lambda g: at(g, "plan", {0: "flattening"}), "plan.0: got 0, expected"),
    "a later plan that is measured": (lambda g: at(g, "plan", {1: "flattening", 2: "measure(2)"}), "plan.2: got 'measure(2)', expected auto, a preset's name or the file of a single plan"),
    "a later plan that is not there": (lambda g: at(g, "plan", {1: "flattening", 2: "nowhere.yaml"}), "plan.2: got 'nowhere.yaml'"),
    "a later plan for another cluster": (lambda g: at(g, "plan", {1: "flattening", 2: plan(g, gae={"mesh": "n1:0"})["plan"]}), "a plan for this run (plan.calls.gae.mesh: "),
    "a later plan for another graph": (lambda g: at(g, "plan", {1: "flattening", 2: plan(g, gae=None)["plan"]}), "a plan for this run (plan.calls: "),
    "a later plan for another model": (lambda g: at(g, "plan", {1: "flattening", 2: plan(g, actor_train={"dp": 1, "pp": 8})["plan"]}), "plan.calls.actor_train.pp: got 8, expected at most 2, the layers of actor)"),
    "a switch of rows that are ahead": (lambda g: at(g, "plan", {1: "flattening", 2: "split"}) | {"staleness": 1}, "plan.2: got 'a switch before step 2', expected with staleness, no switch without checkpoint_every"),
    "a switch between two checkpoints": (
        lambda g: at(g, "plan", {1: "flattening", 2: "split"}) | {"staleness": 1, "checkpoint_every": 2, "steps": 4},
        "plan.2: got 'a switch before step 2', expected with staleness, a switch after a checkpoint, at 1 + a multiple of 2 (checkpoint_every)",
    ),
    "an unknown choice": (lambda g: at(g, "algo.old_logprobs", "vllm"), "old_logprobs"),
    "steps below zero": (lambda g: at(g, "steps", -1), "steps"),
    "a model folder that is not there": (lambda g: at(g, "actor.path", "/nowhere/model"), "or a model's name on the Hub"),
    "a model without a path": (lambda g: at(g, "actor.path", ""), "path"),
    "a misspelt key of a model": (lambda g: at(g, "actor.pth", "x"), "pth"),
    "a number format that is none": (lambda g: at(g, "actor.dtype", "float64"), "dtype"),
    "a checkpoint of another architecture": (lambda g: broken_model(g, "gpt2", config={"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}), "model_type: got 'gpt2', expected a family that runs"),
    "a model folder without config": (lambda g: broken_model(g, "bare", drop="config.json"), "config.json"),
    "a model folder without weights": (lambda g: broken_model(g, "empty", drop="model.safetensors"), "safetensors"),
    "a checkpoint that was cut off": (lambda g: broken_model(g, "cut", truncate=True), "safetensors"),
    "a config of 100,000 brackets": (lambda g: broken_model(g, "deep", text=DEEP), "actor.config.json"),
    "a config that is no object": (lambda g: broken_model(g, "list", text="[1]"), "actor.config.json"),
    "a context that is null": (lambda g: broken_model(g, "null", config={"max_position_embeddings": None}), "max_position_embeddings"),
    "a billion layers": (lambda g: broken_model(g, "tower", config={"num_hidden_layers": 10**9}), "num_hidden_layers"),
    "layers that are true": (lambda g: broken_model(g, "true", config={"num_hidden_layers": True}), "num_hidden_layers"),
    "an epsilon that is no number": (lambda g: broken_model(g, "nan", config={"rms_norm_eps": float("nan")}), "rms_norm_eps"),
    "an epsilon in words": (lambda g: broken_model(g, "words", config={"rms_norm_eps": "small"}), "rms_norm_eps"),
    "an epsilon of one": (lambda g: broken_model(g, "one", config={"rms_norm_eps": 1}), "actor.config.json.rms_norm_eps: got 1, expected 1.0"),
    "a key that transformers alone dislikes": (lambda g: broken_model(g, "range", config={"initializer_range": 1}), "range/config.json.initializer_range: got 1, expected a config that transformers accepts (TypeError: Field 'initializer_range' expected float"),
    "key-value heads that do not divide": (lambda g: broken_model(g, "heads", config={"num_key_value_heads": 3}), "num_key_value_heads"),
    "weights that are quantised": (lambda g: broken_model(g, "gptq", config={"quantization_config": {"quant_method": "gptq"}}), "quantization_config"),
    "a mixture of experts": (lambda g: broken_model(g, "experts", config={"model_type": "qwen3_moe", "num_experts": 8}), "config.json.num_experts: got 8, expected a dense model"),
    "a mixture of experts with the numbers of its family": (lambda g: broken_model(g, "mixtral", config={"model_type": "mixtral"}), "config.json.model_type: got 'mixtral', expected a family that runs"),
    "a model with code of its own": (lambda g: broken_model(g, "code", config={"auto_map": {"AutoModelForCausalLM": "mine.Mine"}}), "auto_map"),
    "an architecture that is no list": (lambda g: broken_model(g, "bare-name", config={"architectures": "LlamaForCausalLM"}), "architectures"),
    "rotary embeddings in words": (lambda g: broken_model(g, "rope", config={"rope_parameters": "default"}), "rope_parameters"),
    "a tensor that no Llama has": (lambda g: broken_model(g, "bias", tensor={"model.layers.0.mlp.up_proj.bias": torch.zeros(128)}), "up_proj.bias"),
    "weights of whole numbers": (lambda g: broken_model(g, "whole", tensor={"model.norm.weight": torch.zeros(64, dtype=torch.int32)}), "I32"),
    "an output folder that is a file": (lambda g: output(g, ""), "output_dir"),
    "an output folder below a file": (lambda g: output(g, "runs"), "output_dir"),
    "an output folder of the kernel": (lambda g: at(g, "output_dir", "/proc/runs"), "output_dir"),
    "an output folder below a device": (lambda g: at(g, "output_dir", "/dev/null/runs"), "output_dir"),
    "an output folder too small for its checkpoints": (lambda g: g | {"checkpoint_every": 1, "keep_checkpoints": 10**6, "steps": 10**6}, "keep_checkpoints"),
    "an output folder of nobody's": (lambda g: at(g, "output_dir", "~nosuch/runs"), "output_dir"),
    "an output folder with a NUL": (lambda g: at(g, "output_dir", "runs\0"), "output_dir"),
    "an output folder without a name": (lambda g: at(g, "output_dir", ""), "output_dir"),
    "an output folder of 400 letters": (lambda g: at(g, "output_dir", "x" * 400), "output_dir"),
    "an output folder on a web server": (lambda g: at(g, "output_dir", "http://host/runs"), "output_dir: got 'http://host/runs', expected a folder, or s3:// or gs://: http:// is read-only"),
    "an output folder in an archive": (lambda g: at(g, "output_dir", "zip://runs::/tmp/nowhere.zip"), "zip:// is read-only"),
    "an output folder in memory": (lambda g: at(g, "output_dir", "memory://runs"), "memory:// ends with its process"),
    "an output folder at a hub that has no such place": (lambda g: at(g, "output_dir", "hf://runs"), "output_dir: got 'hf://runs'"),
    "a checkpoint of nobody's": (lambda g: at(g, "resume_from", "~nosuch/x"), "resume_from"),
    "a checkpoint with a NUL": (lambda g: at(g, "resume_from", "x\0"), "resume_from"),
    "a checkpoint of 400 letters": (lambda g: at(g, "resume_from", "x" * 400), "resume_from"),
    "a checkpoint of 5,000 letters": (lambda g: at(g, "resume_from", "x/" * 2500), "resume_from"),
    "a plan with a NUL": (lambda g: at(g, "plan", "x\0"), "plan"),
    "prompts that are a pipe": (lambda g: at(g, "prompts.path", pipe(g, "pipe.jsonl")), "it is a pipe or a device"),
    "prompts without end": (lambda g: at(g, "prompts.path", endless(g, "endless.jsonl")), "it is a pipe or a device"),
    "a plan that is a pipe": (lambda g: at(g, "plan", pipe(g, "pipe.yaml")), "plan: got"),
    "a plan of nobody's": (lambda g: at(g, "plan", "~nosuch/x.yaml"), "plan"),
    "a plan of 400 letters": (lambda g: at(g, "plan", "x" * 400 + ".yaml"), "plan"),
    "a model of nobody's": (lambda g: at(g, "actor.path", "~nosuch/x"), "actor"),
    "prompts of nobody's": (lambda g: at(g, "prompts.path", "~nosuch/x"), "prompts"),
    "prompts of 400 letters": (lambda g: at(g, "prompts.path", "x" * 400), "prompts"),
    "a preset that is none": (lambda g: at(g, "plan", "dp3"), "flattening"),
    "a checkpoint that is not there": (lambda g: at(g, "resume_from", "/nowhere"), "resume_from"),
    "a plan that is a folder": (lambda g: at(g, "plan", str(g["folder"])), "directory"),
    "a plan that grows as it is read": (lambda g: plan_text(g, BOMB), "values"),
    "a plan of 100,000 brackets": (lambda g: plan_text(g, DEEP), "levels"),
    "a plan with a Python object": (lambda g: plan_text(g, "!!python/object/apply:os.system [ls]"), "tag"),
    "a reward model without a scalar head": (lambda g: at(g, "reward.path", g["actor"]["path"]), "score"),
    "a language model as critic": (lambda g: at(g, "critic", {"path": g["actor"]["path"]}), "head"),
    "no critic, and an actor that gives no values": (lambda g: {key: value for key, value in g.items() if key != "critic"}, "actor.head: lm+scalar"),
    "a critic beside an actor that gives values": (lambda g: at(at(g, "actor.head", "lm+scalar"), "actor.new_head", True), "so the actor computes the values"),
    "a reward model that gives words": (lambda g: at(g, "reward.head", "lm+scalar"), "reward.head is lm+scalar"),
    "a new head for values that nobody asked for": (lambda g: at({key: value for key, value in g.items() if key != "critic"}, "actor.head", "lm+scalar"), "new_head: true"),
    "an actor that gives no words": (lambda g: at(at(g, "actor.head", "scalar"), "actor.new_head", True), "actor.head: got 'scalar', expected lm, or lm+scalar: the actor generates"),
    "an adapter on a role that nothing trains": (lambda g: at(g, "ref.adapter", {"rank": 4}), "ref.adapter: got 'rank 4', expected no adapter, or adapter.path"),
    "an adapter of a rank above the matrix": (lambda g: at(g, "actor.adapter", {"rank": 65}), "actor.adapter.rank: got 65, expected at most 64: q_proj is 64 x 64"),
    "an adapter on a matrix that the family lacks": (lambda g: at(g, "actor.adapter", {"target_modules": ["c_attn"]}), "actor.adapter.target_modules: got 'c_attn', expected all-linear, or some of q_proj, k_proj"),
    "an adapter with DoRA": (lambda g: at(g, "actor.adapter", {"use_dora": True}), "actor.adapter.use_dora: got True, expected no value: DoRA is not offered"),
    "an adapter's folder that is none": (lambda g: at(g, "actor.adapter", {"path": "/nowhere"}), "actor.adapter.path: got '/nowhere', expected a folder that peft wrote, with adapter_config.json"),
    "merged models without an adapter": (lambda g: at(g, "export_merged", True), "export_merged: got True, expected false: no trained model has an adapter"),
    "four bits of weights that are trained": (lambda g: at(g, "actor.base_dtype", "nf4"), "actor.base_dtype: got 'nf4', expected no value without an adapter"),
    "another format of a base": (lambda g: at(at(g, "actor.adapter", {"rank": 4}), "actor.base_dtype", "int8"), "actor.base_dtype: got 'int8', expected"),
    "four bits of another base": (lambda g: at(g, "ref.base_dtype", "nf4"), "ref.base_dtype: got 'nf4', expected no value without an adapter"),
    "an adapter of no rank": (lambda g: at(g, "actor.adapter", {"rank": 0}), "actor.adapter.rank: got 0, expected at least 1"),
    "a run of no steps": (lambda g: at(g, "steps", 0), "steps: got 0, expected"),
    "a reward model whose head is not trained": (lambda g: at(at(g, "reward.path", g["actor"]["path"]), "reward.new_head", True), "reward.new_head: got True, expected false"),
    "a reference that lacks tokens of the actor": (lambda g: at(g, "ref.path", make_model(g["folder"] / "vocab", vocab=48)), "ref.vocab_size: got 48, expected at least 64"),
    "a reward model with another tokenizer": (lambda g: at(g, "reward.path", other_tokenizer(make_model(g["folder"] / "others", scalar=True))), "reward.path: token 6: got 'fine', expected 'good', as in the tokenizer of actor"),
    "a dataset that is not there": (lambda g: at(g, "prompts.path", "/nowhere/prompts.parquet"), "/nowhere"),
    "a dataset without the column": (lambda g: at(g, "prompts.prompt_column", "question"), "prompts.prompt_column: got 'question', expected a column of "),
    "a dataset whose rows are damaged": (lambda g: prompts(g, "page", SOME, damage=lambda b: b[:4] + bytes(60) + b[64:]), "prompts.path"),
    "a dataset of text that is no UTF-8": (lambda g: prompts(g, "latin1", SOME | {"prompt": pa.array([b"caf\xe9"] * 8, pa.binary()).view(pa.string())}), "UTF"),
    "a dataset with two columns of one name": (lambda g: prompts(g, "twins", pa.Table.from_arrays([pa.array(["a"] * 8), pa.array(["b"] * 8), pa.array(["train"] * 8)], names=["prompt", "prompt", "split"])), "occurs twice"),
    "a folder of prompts with other files": (crowded_folder, "notes.txt"),
    "a path in quotation marks of a web page": (lambda g: at(g, "actor.path", "\u201cmodels/m0\u201d"), "actor.path: got '\u201cmodels/m0\u201d', expected a path without quotation marks: models/m0"),
    "prompts as comma-separated values of unequal length": (lambda g: prompts_file(g, "prompts.csv", b"prompt\na,b\n"), "prompts.csv', expected rows of the same number of fields, with names in the first line"),
    "a line that is no JSON": (lambda g: prompts_file(g, "prompts.jsonl", b'{"prompt": "a", "split": "train"}\n{"prompt": '), "prompts.jsonl line 2"),
    "a pattern that no file matches": (lambda g: at(g, "prompts.path", str(g["folder"] / "shard-*.jsonl")), "a pattern that matches a file"),
    "a name for a column that is not there": (lambda g: at(g, "prompts.columns", {"truth": "reward_model.truth"}), "prompts.columns.truth"),
    "a column named as what calls make": (lambda g: at(g, "prompts.columns", {"mask": "prompt"}), "prompts.columns: got 'mask'"),
    "a dataset that is no Parquet": (lambda g: prompts_file(g, "noise.parquet", bytes(range(256))), "noise.parquet"),
    "an empty file of prompts": (lambda g: prompts_file(g, "nothing.parquet", b""), "nothing.parquet"),
    "prompts of words that nobody knows": (lambda g: prompts(g, "unknown", SOME | {"prompt": ["what"] * 7 + ["qux quux"]}), "row 7"),
    "a tokenizer of more words than the models know": (lambda g: {key: value | {"path": make_model(g["folder"] / f"few-{key}", vocab=8, **({"scalar": True} if "head" in value else {}))} if isinstance(value, dict) and key in ("actor", "ref", "critic", "reward") else value for key, value in g.items()}, "vocab_size"),
    "a chat that ends with the answer": (lambda g: chat(g, "answered", ("user", "what is it"), ("assistant", "a film")), "set last_answer to strip"),
    "a chat without a role": (lambda g: chat(g, "roleless", (None, "what is it"), ("user", "what")), "have a role"),
    "a chat that the template refuses": (lambda g: broken_model(g, "picky", template="{{ raise_exception('users first') }}") | {"prompts": chat(g, "picky", ("user", "what"))["prompts"]}, "users first"),
    "a chat template that is broken": (lambda g: broken_model(g, "jinja", template="{% for %}") | {"prompts": chat(g, "jinja", ("user", "what"))["prompts"]}, "chat_template"),
    "a chat template that is no file": (lambda g: at(g, "actor.chat_template", "tools.jinja"), "actor.chat_template: got 'tools.jinja', expected a file with a chat template in Jinja, such as tools.jinja, which prefect-rlhf init writes"),
    "a chat template of the prompts": (lambda g: at(g, "prompts.chat_template", "tools.jinja"), "prompts.chat_template: got 'tools.jinja', expected true or false; a model names the file of a template, as in actor.chat_template"),
    "a chat template with a mistake": (lambda g: at(g, "actor.chat_template", text_file(g, "odd.jinja", "{% for m in messages %}")), "Unexpected end of template"),
    "a chat template of a model that reads the actor's tokens": (lambda g: at(g, "ref.chat_template", text_file(g, "good.jinja", "{{ messages[0].content }}")), "ref.chat_template: "),
    "a chat template in a bucket": (lambda g: at(g, "actor.chat_template", "s3://bucket/tools.jinja"), "expected a path of this machine"),
    "an unknown split": (lambda g: at(g, "prompts.split", "valid"), "valid"),
    "an empty dataset": (lambda g: prompts(g, "none", {"prompt": pa.array([], pa.string()), "split": pa.array([], pa.string())}), "prompts"),
    "a prompt that is null": (lambda g: prompts(g, "null", SOME | {"prompt": ["what", None] + ["a"] * 6}), "row 1"),
    "a prompt that is empty": (lambda g: prompts(g, "blank", SOME | {"prompt": ["what", "a", " "] + ["a"] * 5}), "row 2"),
    "prompts that are numbers": (lambda g: prompts(g, "numbers", SOME | {"prompt": list(range(8))}), "prompt"),
    "a prompt longer than the context": (lambda g: prompts(g, "long", SOME | {"prompt": ["what"] * 7 + ["it " * 80]}), "and overlong_prompts: drop"),
    "responses that leave the context": (lambda g: at(g, "algo.sampling.max_new_tokens", 64), "max_new_tokens"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_mistake_is_refused_in_one_line_that_names_it(good, case):
    broken, names = CASES[case]
    with pytest.raises(RlhfError) as refused:
        check(broken(good))
    assert names in str(refused.value)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 1000


def test_the_parameters_that_the_cases_break_are_right(good):
    """Else every case above could be refused for another reason."""
    assert len(check(good).augmented) > 20
    assert len(check(plan(good)).augmented) > 20


def test_a_plan_that_does_not_fit_reports_its_memory_use(good):
    small = whole(ClusterShape("phone", num_nodes=1, devices_per_node=2, device_memory_bytes=1 << 20))
    says = r"^plan mine: memory of n0:0: got '.* MiB at .*', expected at most .*$"
    with pytest.raises(PlanDoesNotFit, match=says) as e:
        check(plan(good), lease=small)
    assert re.search(r"n0:0 at .* holds:\n *[\d.]+ MiB  \S.*: [a-z ]+\n", e.value.report)


def test_a_pair_of_equal_answers_is_named_with_its_row(good):
    file = Path(make_pairs(good["folder"] / "pairs.parquet"))
    table = pq.read_table(file).to_pydict()
    table["chosen"][3] = table["rejected"][3]
    pq.write_table(pa.table(table), file)
    parameters = {"pairs": {"path": str(file)}, "held_out": {"path": str(file), "split": "held_out"}}
    with pytest.raises(RlhfError, match="row 3"):
        check(parameters | {"reward": good["reward"], "algo": {"batch_size": 4}}, flow=reward)


def test_words_of_a_dictionary_are_read_like_others(good):
    """As pandas writes categories."""
    words = pa.array(SOME["prompt"]).dictionary_encode()
    file = good["folder"] / "categories.parquet"
    pq.write_table(pa.table({"prompt": words, "split": pa.array(SOME["split"]).dictionary_encode()}), file)
    assert check(at(good, "prompts.path", str(file))).request.inputs.sources["prompts"].num_items == 8


@pytest.mark.parametrize("change", [{"chat_template": True}, {"prompt_column": "again"}, {"split_column": None}])
def test_a_run_goes_on_with_rows_that_are_read_as_before(good, tmp_path, change):
    table = SOME | {"again": SOME["prompt"]}
    given = prompts(good, "read_as", table)
    folder = tmp_path / "stopped"
    write_checkpoint(check(given).augmented, folder, 1)
    going_on = given | {"resume_from": str(folder)}
    assert check(going_on).request.checkpoint is not None
    (name, value), *_ = change.items()
    with pytest.raises(InvalidInput, match=f"a checkpoint with datasets.prompts.*expected .*{name}={value}"):
        check(at(going_on, f"prompts.{name}", value))


def test_an_adapter_in_the_folder_of_a_whole_model_is_refused(good):
    """transformers adds it to its base without a word."""
    parameters = broken_model(good, "both")
    (good["folder"] / "both" / "adapter_config.json").write_text("{}")
    with pytest.raises(
        InvalidInput, match="beside the model in .*both', expected a whole model alone: move the adapter"
    ):
        check(parameters)


def test_a_parameter_without_a_value_is_refused():
    with pytest.raises(RlhfError, match="NAME=VALUE"):
        read_parameters(None, ["steps"])
