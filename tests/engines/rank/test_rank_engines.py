"""Two ranks with Megatron-core and vLLM on a tiny model: weights trained split by tp, sampled from as whole copies."""

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from prefect_rlhf.engines.commands import (
    BuildCommand,
    CallCommand,
    MoveWeightsCommand,
    PassCommand,
    RowTransfer,
    TransferCommand,
)
from prefect_rlhf.engines.engine import SamplingSettings, TrainSettings
from prefect_rlhf.engines.files.huggingface import read_model_spec
from prefect_rlhf.engines.gang.local import LocalGang
from prefect_rlhf.engines.gang.open import FORK_ENVIRONMENT, RANK_ENVIRONMENT
from prefect_rlhf.engines.gang.processes.messages import GangSettings
from prefect_rlhf.engines.losses.protocol import LossTerm, LossValues
from prefect_rlhf.engines.rank.rank import Rank
from prefect_rlhf.engines.weights.versions import Fingerprints
from prefect_rlhf.errors.errors import InvalidInput, StaleWeights
from prefect_rlhf.placement.devices.mesh import DeviceMesh
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.graph import Call, Operation, Port
from prefect_rlhf.placement.layout.layout import layout_of
from prefect_rlhf.placement.models.model import OptimizerSpec
from prefect_rlhf.placement.models.weights import weights_of
from prefect_rlhf.placement.plan import ModelInstance
from prefect_rlhf.placement.row_set import RowSet
from tests.engines.vllm_cases import make_folder
from tests.tasks.small_tokenizer import alone

pytestmark = pytest.mark.slow

MESH = DeviceMesh(0, 1, 0, 2)
RANKS = (0, 1)
TRAINED = ModelInstance("actor", "megatron", MESH, Strategy(tp=2))
SAMPLER = ModelInstance("actor", "vllm", MESH, Strategy(dp=2))
REPLICAS = {0: (0, 1, 2), 1: (3, 4, 5)}
ALL = tuple(range(6))
ROLLOUT = ("tokens", "prompt_length", "logprobs", "truncated")


class TamperedRank(Rank):
    """A rank whose weights a test may overwrite behind its back."""

    def rows(self, step, name, key, rows):
        return [row.tolist() for row in self.store.get(step, name, key, rows)]

    def scale(self, instance, parameter, factor):
        """Write a weight as a bug would: without telling anyone."""
        self.models[instance].engine.weights()[parameter].view.mul_(factor)

    def digest(self, instance):
        return self.models[instance].digest()

    def device_bytes(self, instance):
        return self.models[instance].engine.device_bytes()


class Prompts:
    """Row i's prompt: i + 2 tokens."""

    name, keys = "prompts", ("prompt_tokens",)

    def __len__(self):
        return 100

    column_kinds = {}

    def read(self, row_ids):
        return {"prompt_tokens": [[20 + i + j for j in range(i + 2)] for i in row_ids]}


def push_up(output, batch):
    """Make what was sampled likelier."""
    assert batch["rollout.logprobs"].shape == output.shape
    return LossValues(-output)


def port(argument, source, keys):
    return Port(argument, source, keys)


MADE = RowSet("generate", "prompts", 1, RowSet("prompts", "prompts"))
GENERATE = Call(
    "generate",
    "generate",
    "actor",
    (port("prompts", "prompts", ("prompt_tokens",)),),
    ROLLOUT,
    Operation("sample"),
    MADE,
    6,
)
INFER = Call(
    "infer",
    "inference",
    "actor",
    (port("rollout", "generate", ROLLOUT[:2]),),
    ("logprobs",),
    Operation("logprobs"),
    MADE,
    6,
)
TRAIN = Call("train", "train_step", "actor", (port("rollout", "generate", ROLLOUT),), (), Operation("push_up"), MADE, 6)


class World:
    """A gang with both instances built, and the controller's side of each command."""

    def __init__(self, folder):
        environment = {**RANK_ENVIRONMENT, **FORK_ENVIRONMENT}
        self.gang = LocalGang(GangSettings(2, TamperedRank, environment=environment))
        self.folder, self.known = folder, Fingerprints()
        optimizer = OptimizerSpec(lr=1e-3, eps=1e-3)
        self.spec = read_model_spec("actor", folder, "lm", dtype="float32", optimizer=optimizer)
        self.weights = weights_of(self.spec, trained=True)
        self.call(TamperedRank.open_dataset, Prompts())
        for instance in (TRAINED, SAMPLER):
            command = BuildCommand(self.spec, instance, RANKS, self.layout(instance), 128, 8)
            self.settle(instance, 0, self.call(TamperedRank.build, command))

    def layout(self, instance):
        return layout_of(instance, self.spec, MESH)

    def call(self, method, *arguments):
        return self.gang.call(method, dict.fromkeys(RANKS, arguments), doing=method.__name__, deadline_seconds=60)

    def settle(self, instance, version, reports):
        digests = {rank: report.digest for rank, report in reports.items()}
        self.known.settle(instance, self.weights, version, digests, self.layout(instance))

    def command(self, call, instance, step, rows, **more):
        common = {"seed": 3, "run_dir": Path(), "tokenizers": alone(self.folder), "row_ids": rows}
        return CallCommand(step, call, instance, rows, **common, **more)

    def generate(self, step, version):
        sampling = SamplingSettings(12, stop_at_eos=False)
        commands = {
            rank: (self.command(GENERATE, SAMPLER, step, rows, reads=version, sampling=sampling),)
            for rank, rows in REPLICAS.items()
        }
        self.gang.call(TamperedRank.generate, commands, doing="generate", deadline_seconds=60)
        swapped = (
            RowTransfer(0, 1, "generate", ROLLOUT, REPLICAS[0]),
            RowTransfer(1, 0, "generate", ROLLOUT, REPLICAS[1]),
        )
        self.call(TamperedRank.transfer, TransferCommand(step, swapped))

    def infer(self, step, version):
        self.call(TamperedRank.inference, self.command(INFER, TRAINED, step, ALL, reads=version))
        return self.rows(step, "infer")

    def train(self, step, version):
        settings = TrainSettings(mini_batches=2)
        one = PassCommand(TRAIN, (LossTerm(push_up, ("logprobs",)),), ALL, ALL)
        versions = {"reads": version, "writes": version + 1}
        command = self.command(TRAIN, TRAINED, step, ALL, **versions, passes=(one,), train=settings)
        reports = self.call(TamperedRank.train_step, command)
        self.settle(TRAINED, version + 1, reports)
        return reports

    def reallocate(self, version):
        command = MoveWeightsCommand(TRAINED, SAMPLER, version, self.layout(TRAINED), self.layout(SAMPLER))
        reports = self.call(TamperedRank.reallocate, command)
        self.settle(SAMPLER, version, reports)
        return reports

    def rows(self, step, name, key="logprobs"):
        return self.gang.call(TamperedRank.rows, {0: (step, name, key, ALL)}, doing="look", deadline_seconds=10)[0]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    world = World(make_folder(tmp_path_factory.mktemp("model"), 0, tied=True))
    yield world
    world.gang.close()


def test_a_step_of_both_engines(world, tmp_path):
    """Split and whole copies have one fingerprint; both engines agree on log-probabilities, trained or not."""
    for version in (0, 1):
        world.generate(step=version, version=version)
        sampled, computed = world.rows(version, "generate"), world.infer(version, version)
        worst = max(
            abs(a - b) for left, right in zip(sampled, computed, strict=True) for a, b in zip(left, right, strict=True)
        )
        assert worst < 1e-4
        reports = world.train(version, version)
        assert math.isfinite(reports[0].metrics["loss"])
        assert reports[0].metrics == reports[1].metrics
        with pytest.raises(
            StaleWeights,
            match=rf"generate · step 5: actor.vllm n0:0-1 dp2 holds weights v{version}, its edge names v{version + 1}",
        ):
            world.generate(step=5, version=version + 1)
        moved = world.reallocate(version + 1)
        assert all(report.bytes_moved > 0 and report.digest for report in moved.values())
    check_export(world, tmp_path / "exported")
    check_offload(world)
    check_tampering(world)


def check_export(world, path):
    """A folder written from either layout is what transformers loads, and the weights are those of the version."""
    states = []
    for instance in (TRAINED, SAMPLER):
        world.call(TamperedRank.export, instance, path, Path(world.folder), world.layout(instance))
        states.append(AutoModelForCausalLM.from_pretrained(path).state_dict())
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    first = AutoModelForCausalLM.from_pretrained(world.folder).state_dict()
    assert any(not torch.equal(states[0][name], first[name]) for name in first)


def check_offload(world):
    """Offloaded weights come back as the version they were; device bytes fall meanwhile."""
    before = {instance: world.call(TamperedRank.device_bytes, instance)[0] for instance in (TRAINED, SAMPLER)}
    for instance in before:
        world.call(TamperedRank.offload, instance)
    for instance in before:
        assert world.call(TamperedRank.device_bytes, instance)[0] < before[instance] / 10
        world.settle(instance, 2, world.call(TamperedRank.reload, instance))
    world.generate(step=9, version=2)
    sampled, computed = world.rows(9, "generate"), world.infer(9, 2)
    assert torch.allclose(torch.tensor(sampled), torch.tensor(computed), atol=1e-4)


def check_tampering(world):
    """A weight overwritten on one rank stops the next call, and the whole digests say where."""
    world.gang.call(
        TamperedRank.scale,
        {1: (SAMPLER, "model.layers.2.mlp.up_proj.weight", 1.5)},
        doing="tamper",
        deadline_seconds=10,
    )
    with pytest.raises(
        StaleWeights, match=r"rank 1: generate · step 10: actor.vllm n0:0-1 dp2 is labelled v2, but model.layers.2"
    ):
        world.generate(step=10, version=2)
    with pytest.raises(StaleWeights, match=r"ranks 0 and 1 hold different copies of model.layers.2.mlp.up_proj.weight"):
        digests = world.call(TamperedRank.digest, SAMPLER)
        world.known.settle(SAMPLER, world.weights, 2, digests, world.layout(SAMPLER))
    world.reallocate(2)


def test_a_prompt_that_is_too_long_is_the_users_error(world):
    """An engine's own complaint comes back as InvalidInput, though another process found it."""
    sampling = SamplingSettings(500)
    commands = {r: (world.command(GENERATE, SAMPLER, 20, rows, sampling=sampling),) for r, rows in REPLICAS.items()}
    with pytest.raises(InvalidInput, match="prompt tokens: got 4, expected at most"):
        world.gang.call(TamperedRank.generate, commands, doing="generate", deadline_seconds=30)
