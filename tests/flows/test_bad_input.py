"""Mistakes of users: each gets one line with field, value and what would be right, before any device."""

import json
import os
import re
from copy import deepcopy
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
    copy = deepcopy({k: v for k, v in parameters.items() if k != "folder"})
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

MISTAKES = yaml.safe_load((Path(__file__).parent / "mistakes.yaml").read_text())
"""Of parameters alone; each is a name and `set`, `without`, `calls` or `config`, and `says`."""


def mistaken(good, name, wrong):
    """Parameters with a mistake of the file."""
    parameters = broken_model(good, name.replace(" ", "-"), config=wrong["config"]) if "config" in wrong else good
    parameters = plan(parameters, **wrong["calls"]) if "calls" in wrong else parameters
    for path, value in wrong.get("set", {}).items():
        parameters = at(parameters, path, value)
    return {key: value for key, value in parameters.items() if key not in wrong.get("without", [])}


FILES = {
    "a reward that reads a key that no row has": (lambda g: rewarded(g, "misspelt", "return float(row['answr'])"), "row 0 of prompts: KeyError: 'answr' ("),
    "a reward that reads a name that does not exist": (lambda g: rewarded(g, "unnamed", "return reponse"), "unnamed.py:2 in unnamed)"),
    "a reward that imports a package that is not there": (lambda g: rewarded(g, "unpacked", "import no_such_package"), "ModuleNotFoundError: No module named 'no_such_package' ("),
    "a misspelt setting of the trial of a reward": (lambda g: rewarded(g, "right", "return 1.0", try_frst=False), "reward.functions.exact.try_frst: unknown key (got False); closest: try_first"),
    "a later plan for another cluster": (lambda g: at(g, "plan", {1: "flattening", 2: plan(g, gae={"mesh": "n1:0"})["plan"]}), "a plan for this run (plan.calls.gae.mesh: "),
    "a later plan for another graph": (lambda g: at(g, "plan", {1: "flattening", 2: plan(g, gae=None)["plan"]}), "a plan for this run (plan.calls: "),
    "a later plan for another model": (lambda g: at(g, "plan", {1: "flattening", 2: plan(g, actor_train={"dp": 1, "pp": 8})["plan"]}), "plan.calls.actor_train.pp: got 8, expected at most 2, the layers of actor)"),
    "a model folder without config": (lambda g: broken_model(g, "bare", drop="config.json"), "config.json"),
    "a model folder without weights": (lambda g: broken_model(g, "empty", drop="model.safetensors"), "safetensors"),
    "a checkpoint that was cut off": (lambda g: broken_model(g, "cut", truncate=True), "safetensors"),
    "a config of 100,000 brackets": (lambda g: broken_model(g, "deep", text=DEEP), "actor.config.json"),
    "a config that is no object": (lambda g: broken_model(g, "list", text="[1]"), "actor.config.json"),
    "a billion layers": (lambda g: broken_model(g, "tower", config={"num_hidden_layers": 10**9}), "num_hidden_layers"),
    "an epsilon that is no number": (lambda g: broken_model(g, "nan", config={"rms_norm_eps": float("nan")}), "rms_norm_eps"),
    "a tensor that no Llama has": (lambda g: broken_model(g, "bias", tensor={"model.layers.0.mlp.up_proj.bias": torch.zeros(128)}), "up_proj.bias"),
    "weights of whole numbers": (lambda g: broken_model(g, "whole", tensor={"model.norm.weight": torch.zeros(64, dtype=torch.int32)}), "I32"),
    "an output folder that is a file": (lambda g: output(g, ""), "output_dir"),
    "an output folder below a file": (lambda g: output(g, "runs"), "output_dir"),
    "an output folder too small for its checkpoints": (lambda g: g | {"checkpoint_every": 1, "keep_checkpoints": 10**6, "steps": 10**6}, "keep_checkpoints"),
    "an output folder of 400 letters": (lambda g: at(g, "output_dir", "x" * 400), "output_dir"),
    "a checkpoint of 400 letters": (lambda g: at(g, "resume_from", "x" * 400), "resume_from"),
    "a checkpoint of 5,000 letters": (lambda g: at(g, "resume_from", "x/" * 2500), "resume_from"),
    "prompts that are a pipe": (lambda g: at(g, "prompts.path", pipe(g, "pipe.jsonl")), "it is a pipe or a device"),
    "prompts without end": (lambda g: at(g, "prompts.path", endless(g, "endless.jsonl")), "it is a pipe or a device"),
    "a plan that is a pipe": (lambda g: at(g, "plan", pipe(g, "pipe.yaml")), "plan: got"),
    "a plan of 400 letters": (lambda g: at(g, "plan", "x" * 400 + ".yaml"), "plan"),
    "prompts of 400 letters": (lambda g: at(g, "prompts.path", "x" * 400), "prompts"),
    "a plan that is a folder": (lambda g: at(g, "plan", str(g["folder"])), "directory"),
    "a plan that grows as it is read": (lambda g: plan_text(g, BOMB), "values"),
    "a plan of 100,000 brackets": (lambda g: plan_text(g, DEEP), "levels"),
    "a plan with a Python object": (lambda g: plan_text(g, "!!python/object/apply:os.system [ls]"), "tag"),
    "a reward model without a scalar head": (lambda g: at(g, "reward.path", g["actor"]["path"]), "score"),
    "a language model as critic": (lambda g: at(g, "critic", {"path": g["actor"]["path"]}), "head"),
    "a reward model whose head is not trained": (lambda g: at(at(g, "reward.path", g["actor"]["path"]), "reward.new_head", True), "reward.new_head: got True, expected false"),
    "a reference that lacks tokens of the actor": (lambda g: at(g, "ref.path", make_model(g["folder"] / "vocab", vocab=48)), "ref.vocab_size: got 48, expected at least 64"),
    "a reward model with another tokenizer": (lambda g: at(g, "reward.path", other_tokenizer(make_model(g["folder"] / "others", scalar=True))), "reward.path: token 6: got 'fine', expected 'good', as in the tokenizer of actor"),
    "a dataset whose rows are damaged": (lambda g: prompts(g, "page", SOME, damage=lambda b: b[:4] + bytes(60) + b[64:]), "prompts.path"),
    "a dataset of text that is no UTF-8": (lambda g: prompts(g, "latin1", SOME | {"prompt": pa.array([b"caf\xe9"] * 8, pa.binary()).view(pa.string())}), "UTF"),
    "a dataset with two columns of one name": (lambda g: prompts(g, "twins", pa.Table.from_arrays([pa.array(["a"] * 8), pa.array(["b"] * 8), pa.array(["train"] * 8)], names=["prompt", "prompt", "split"])), "occurs twice"),
    "a folder of prompts with other files": (crowded_folder, "notes.txt"),
    "prompts as comma-separated values of unequal length": (lambda g: prompts_file(g, "prompts.csv", b"prompt\na,b\n"), "prompts.csv', expected rows of the same number of fields, with names in the first line"),
    "a line that is no JSON": (lambda g: prompts_file(g, "prompts.jsonl", b'{"prompt": "a", "split": "train"}\n{"prompt": '), "prompts.jsonl line 2"),
    "a pattern that no file matches": (lambda g: at(g, "prompts.path", str(g["folder"] / "shard-*.jsonl")), "a pattern that matches a file"),
    "a dataset that is no Parquet": (lambda g: prompts_file(g, "noise.parquet", bytes(range(256))), "noise.parquet"),
    "an empty file of prompts": (lambda g: prompts_file(g, "nothing.parquet", b""), "nothing.parquet"),
    "prompts of words that nobody knows": (lambda g: prompts(g, "unknown", SOME | {"prompt": ["what"] * 7 + ["qux quux"]}), "row 7"),
    "a tokenizer of more words than the models know": (lambda g: {key: value | {"path": make_model(g["folder"] / f"few-{key}", vocab=8, **({"scalar": True} if "head" in value else {}))} if isinstance(value, dict) and key in ("actor", "ref", "critic", "reward") else value for key, value in g.items()}, "vocab_size"),
    "a chat that ends with the answer": (lambda g: chat(g, "answered", ("user", "what is it"), ("assistant", "a film")), "set last_answer to strip"),
    "a chat without a role": (lambda g: chat(g, "roleless", (None, "what is it"), ("user", "what")), "have a role"),
    "a chat that the template refuses": (lambda g: broken_model(g, "picky", template="{{ raise_exception('users first') }}") | {"prompts": chat(g, "picky", ("user", "what"))["prompts"]}, "users first"),
    "a chat template that is broken": (lambda g: broken_model(g, "jinja", template="{% for %}") | {"prompts": chat(g, "jinja", ("user", "what"))["prompts"]}, "jinja', expected valid Jinja (line 1: Expected an expression"),
    "a chat template with a mistake": (lambda g: at(g, "actor.chat_template", text_file(g, "odd.jinja", "{% for m in messages %}")), "Unexpected end of template"),
    "a chat template of a model that reads the actor's tokens": (lambda g: at(g, "ref.chat_template", text_file(g, "good.jinja", "{{ messages[0].content }}")), "ref.chat_template: "),
    "an empty dataset": (lambda g: prompts(g, "none", {"prompt": pa.array([], pa.string()), "split": pa.array([], pa.string())}), "prompts"),
    "a prompt that is null": (lambda g: prompts(g, "null", SOME | {"prompt": ["what", None] + ["a"] * 6}), "row 1"),
    "a prompt that is empty": (lambda g: prompts(g, "blank", SOME | {"prompt": ["what", "a", " "] + ["a"] * 5}), "row 2"),
    "prompts that are numbers": (lambda g: prompts(g, "numbers", SOME | {"prompt": list(range(8))}), "prompt"),
    "a prompt longer than the context": (lambda g: prompts(g, "long", SOME | {"prompt": ["what"] * 7 + ["it " * 80]}), "and overlong_prompts: drop"),
}  # fmt: skip


@pytest.mark.parametrize("case", [*MISTAKES, *FILES])
def test_a_mistake_is_refused_in_one_line_that_names_it(good, case):
    if case in MISTAKES:
        broken, says = mistaken(good, case, MISTAKES[case]), MISTAKES[case]["says"]
    else:
        break_it, says = FILES[case]
        broken = break_it(good)
    with pytest.raises(RlhfError) as refused:
        check(broken)
    assert says in str(refused.value)
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
