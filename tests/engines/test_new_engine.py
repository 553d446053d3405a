"""A new engine takes the steps of CONTRIBUTING.md alone: it is registered, planned with and run by ranks.

The engine computes in plain torch; Transformers has the right answers.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from prefect_rlhf.engines.commands import BuildCommand, CallCommand
from prefect_rlhf.engines.engine import SamplingSettings
from prefect_rlhf.engines.files.huggingface import read_model_spec
from prefect_rlhf.engines.gang.local import LocalGang
from prefect_rlhf.engines.gang.open import FORK_ENVIRONMENT, RANK_ENVIRONMENT
from prefect_rlhf.engines.gang.processes.messages import GangSettings
from prefect_rlhf.engines.rank.rank import Rank
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement import engine_traits
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.devices.mesh import DeviceMesh
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.graph import Call, Operation, Port
from prefect_rlhf.placement.layout.layout import layout_of
from prefect_rlhf.placement.memory.certificate import certify_plan
from prefect_rlhf.placement.plan import ModelInstance
from prefect_rlhf.placement.plans.check import check_plan
from prefect_rlhf.placement.plans.plan_file import parse_plan
from prefect_rlhf.placement.row_set import RowSet
from tests.engines.plain_engine import NAME, TRAITS
from tests.support.strategies import ROLLOUT, TWO_DEVICES, ppo
from tests.support.tiny import make_model
from tests.tasks.small_tokenizer import alone

MESH = DeviceMesh(0, 1, 0, 2)
RANKS, REPLICAS = (0, 1), {0: (0, 1, 2), 1: (3, 4)}
PROMPTS = [[5, 9], [7, 8, 11], [3, 4, 6, 10], [12, 13], [20, 21, 22]]
MADE = RowSet("generate", "prompts", 1, RowSet("prompts", "prompts"))
INSTANCE = ModelInstance("actor", NAME, MESH, Strategy(dp=2))


@pytest.fixture(scope="module")
def registered():
    engine_traits.register(NAME, TRAITS)
    yield
    del engine_traits._TRAITS[NAME]


class Prompts:
    """PROMPTS as a dataset."""

    name, keys, column_kinds = "prompts", ("prompt_tokens",), {}

    def __len__(self):
        return len(PROMPTS)

    def read(self, row_ids):
        return {"prompt_tokens": [PROMPTS[row] for row in row_ids]}


class OpenRank(Rank):
    """A rank whose rows a test reads."""

    def rows(self, name, key, rows):
        return [row.tolist() for row in self.store.get(0, name, key, rows)]


def call(kind, source, keys, outputs):
    rows = len(PROMPTS)
    return Call(kind, kind, "actor", (Port("rows", source, keys),), outputs, Operation(kind), MADE, rows)


class World:
    """Two ranks, each with a replica of the model."""

    def __init__(self, folder):
        self.folder = folder
        environment = {**RANK_ENVIRONMENT, **FORK_ENVIRONMENT}
        self.gang = LocalGang(GangSettings(2, OpenRank, environment=environment, preload=("torch.distributed",)))
        spec = read_model_spec("actor", folder, "lm", dtype="float32")
        layout = layout_of(INSTANCE, spec, MESH)
        self.call(OpenRank.open_dataset, Prompts())
        self.call(OpenRank.build, BuildCommand(spec, INSTANCE, RANKS, layout, 64, 3))

    def call(self, method, *arguments):
        return self.gang.call(method, dict.fromkeys(RANKS, arguments), doing=method.__name__, deadline_seconds=120)

    def run(self, call, **settings):
        common = {"seed": 3, "run_dir": Path(), "tokenizers": alone(self.folder), "reads": 0}
        commands = {r: (CallCommand(0, call, INSTANCE, own, own, **common, **settings),) for r, own in REPLICAS.items()}
        return self.gang.call(OpenRank.run_call, commands, doing=call.kind, deadline_seconds=120)

    def rows(self, name, key):
        orders = {rank: (name, key, own) for rank, own in REPLICAS.items()}
        found = self.gang.call(OpenRank.rows, orders, doing="look", deadline_seconds=30)
        return [*found[0], *found[1]]


@pytest.fixture(scope="module")
def world(registered, tmp_path_factory):
    world = World(make_model(tmp_path_factory.mktemp("model") / "llama", heads=4, kv_heads=2))
    yield world
    world.gang.close()


def plan_with(engine):
    """PPO's plan, in which this engine generates and computes the reference's log-probabilities."""
    one = {"mesh": "n0:0-1", "dp": 2}
    calls = {
        call.name: {"mesh": "n0:0", "engine": "python"} if call.kind == "compute" else one | {"engine": "megatron"}
        for call in ppo()
    }
    calls["actor_generate"] = calls["ref_inference"] = one | {"engine": engine}
    return parse_plan({"name": "mine", "calls": calls}, TWO_DEVICES)


def test_an_unknown_engine_is_refused():
    with pytest.raises(InvalidInput, match=r"calls.actor_generate.engine: got 'plain'"):
        plan_with("plain")


def test_a_registered_engine_is_planned_with(registered):
    """A plan file may name it for the calls that it serves, and the plan is certified."""
    plan = check_plan(plan_with(NAME), ppo(), TWO_DEVICES.whole)
    assert certify_plan(plan, ppo(), Workload.fixed(16, 16), "cpu").fits
    assert [NAME in engine_traits.engines_of(kind) for kind in ("generate", "inference", "train_step")] == [1, 1, 0]


def test_the_name_of_an_engine_is_taken():
    with pytest.raises(InvalidInput, match="engine: got 'vllm', expected a name other than vllm, megatron, python"):
        engine_traits.register("vllm", TRAITS)


@pytest.mark.slow
def test_ranks_run_each_kind_of_call_of_a_registered_engine(world):
    """Its greedy responses and their log-probabilities are those of Transformers, also after an offload."""
    sampling = SamplingSettings(8, temperature=0.0, stop_at_eos=False)
    world.run(call("generate", "prompts", ("prompt_tokens",), ROLLOUT), sampling=sampling)
    assert all(report.bytes_moved for report in world.call(OpenRank.offload, INSTANCE, "all").values())
    world.call(OpenRank.reload, INSTANCE, "all")
    world.run(call("inference", "generate", ROLLOUT[:2], ("logprobs",)), output="logprobs")
    oracle = AutoModelForCausalLM.from_pretrained(world.folder)
    answers = [
        world.rows(*place) for place in (("generate", "tokens"), ("generate", "logprobs"), ("inference", "logprobs"))
    ]
    for prompt, tokens, sampled, computed in zip(PROMPTS, *answers, strict=True):
        with torch.no_grad():
            wanted = oracle.generate(torch.tensor([prompt]), max_new_tokens=8, min_new_tokens=8, do_sample=False)
            logprobs = (
                oracle(wanted).logits.log_softmax(-1)[0, :-1].gather(1, wanted[0, 1:, None])[len(prompt) - 1 :, 0]
            )
        assert tokens == wanted[0].tolist()
        torch.testing.assert_close(torch.tensor(sampled), logprobs, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(torch.tensor(computed), logprobs, atol=1e-4, rtol=1e-4)
