"""What leaves device memory leaves the process too: storage bytes and the system's own count fall by the same.

A bfloat16 model of 7.5 million weights, alone in a rank process, trained once so that its moments exist.
"""

from dataclasses import replace

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from prefect_rlhf.engines.commands import BuildCommand, CallCommand, PassCommand
from prefect_rlhf.engines.cpu_products import has_bfloat16
from prefect_rlhf.engines.engine import SamplingSettings, TrainSettings
from prefect_rlhf.engines.files.huggingface import read_model_spec
from prefect_rlhf.engines.gang.local import LocalGang
from prefect_rlhf.engines.gang.open import FORK_ENVIRONMENT, RANK_ENVIRONMENT
from prefect_rlhf.engines.gang.processes.messages import GangSettings
from prefect_rlhf.engines.losses.protocol import LossTerm, LossValues
from prefect_rlhf.engines.rank.rank import Rank
from prefect_rlhf.placement.devices.mesh import DeviceMesh
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.graph import Call, Operation, Port
from prefect_rlhf.placement.layout.layout import layout_of
from prefect_rlhf.placement.models.model import OptimizerSpec
from prefect_rlhf.placement.plan import ModelInstance
from prefect_rlhf.placement.row_set import RowSet
from tests.support.device import DEVICE, on_hardware
from tests.tasks.small_tokenizer import alone

pytestmark = [pytest.mark.slow, pytest.mark.all]  # test_megatron_ranks.py and test_vllm_engine.py offload, too

ONE = DeviceMesh(0, 1, 0, 1)
TRAINED = ModelInstance("actor", "megatron", ONE, Strategy())
SAMPLER = ModelInstance("actor", "vllm", ONE, Strategy())
ELEMENTS = 4096 * 384 + 4 * (4 * 384 * 384 + 3 * 384 * 768 + 2 * 384) + 384  # embedding, layers, norm
WITNESS = 6 << 20  # what else a process may take or give back meanwhile
ROWS = tuple(range(4))


class Pairs:
    """Rows that need no generation."""

    name, keys = "pairs", ("tokens", "prompt_length")

    def __len__(self):
        return 10

    column_kinds = {}

    def read(self, row_ids):
        return {"tokens": [[5 + i, 6, 7, 8] for i in row_ids], "prompt_length": [2 for _ in row_ids]}


class Prompts:
    name, keys = "prompts", ("prompt_tokens",)

    def __len__(self):
        return 10

    column_kinds = {}

    def read(self, row_ids):
        return {"prompt_tokens": [[5 + i, 6, 7] for i in row_ids]}


def likelier(output, batch):
    return LossValues(-output)


class World:
    """One rank and what the controller asks of it."""

    def __init__(self, folder):
        self.folder = folder
        self.gang = LocalGang(GangSettings(1, Rank, DEVICE, environment={**RANK_ENVIRONMENT, **FORK_ENVIRONMENT}))
        self.ask(Rank.open_dataset, Pairs())
        self.ask(Rank.open_dataset, Prompts())

    def ask(self, method, *arguments, resource="compute"):
        found = self.gang.call(method, {0: arguments}, doing=method.__name__, deadline_seconds=60, resource=resource)
        return found[0]

    def build(self, instance, optimizer=None):
        spec = read_model_spec("actor", self.folder, "lm", dtype="bfloat16", optimizer=optimizer)
        return self.ask(Rank.build, BuildCommand(spec, instance, (0,), layout_of(instance, spec, ONE), 64, len(ROWS)))

    def command(self, kind, instance, keys, source, outputs=(), **more):
        call = Call(
            kind,
            kind,
            "actor",
            (Port("rows", source, keys),),
            outputs,
            Operation("x"),
            RowSet(source, source),
            len(ROWS),
        )
        common = {"rows": ROWS, "row_ids": ROWS, "seed": 1, "run_dir": None, "tokenizers": alone(self.folder)}
        return CallCommand(0, call, instance, **common, **more)

    def train(self, version):
        more = {"train": TrainSettings(), "reads": version, "writes": version + 1}
        command = self.command("train_step", TRAINED, ("tokens", "prompt_length"), "pairs", **more)
        one = PassCommand(command.call, (LossTerm(likelier, ("logprobs",)),), ROWS, ROWS)
        return self.ask(Rank.train_step, replace(command, passes=(one,)))

    def infer(self, version):
        command = self.command("inference", TRAINED, ("tokens", "prompt_length"), "pairs", ("logprobs",), reads=version)
        return self.ask(Rank.inference, command)

    def generate(self):
        keys, outputs = ("prompt_tokens",), ("tokens", "prompt_length", "logprobs")
        more = {"sampling": SamplingSettings(8), "reads": 0}
        return self.ask(Rank.generate, self.command("generate", SAMPLER, keys, "prompts", outputs, **more))

    def move(self, method, instance, part):
        return self.ask(method, instance, part, resource="host_link")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        hidden_size=384, intermediate_size=768, num_hidden_layers=4, num_attention_heads=12, num_key_value_heads=12,
        head_dim=32, vocab_size=4096, max_position_embeddings=128, tie_word_embeddings=True, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    world = World(str(folder))
    yield world
    world.gang.close()


@pytest.fixture(scope="module")
def trained(world):
    """The rank after a train_step: weights, gradients, main weights and two moments are on the device."""
    world.build(TRAINED, OptimizerSpec(lr=1e-3))
    world.train(0)
    world.infer(1)  # what a call takes once and keeps is taken
    return world


PARTS = {"optimizer": 4 + 4 + 8, "all": 2 + 4 + 4 + 8}  # bytes a weight: compute, gradient, main weight, moments


@pytest.mark.gpu
@on_hardware
@pytest.mark.parametrize("part", PARTS)
def test_a_part_leaves_the_device_and_the_process_and_comes_back(trained, part):
    """Gradients are not kept, yet leave and come back; buffers such as rotary tables are small beside the rest."""
    expected = PARTS[part] * ELEMENTS
    trained.move(Rank.offload, TRAINED, part)  # the system gets back what products left free in the process, too
    settled = trained.move(Rank.reload, TRAINED, part)
    away = trained.move(Rank.offload, TRAINED, part)
    fallen = settled.device_bytes - away.device_bytes
    assert fallen == pytest.approx(expected, rel=0.01)
    assert away.bytes_moved == pytest.approx(fallen - 4 * ELEMENTS, rel=0.01)
    if DEVICE == "cpu":  # a GPU's memory is not resident in the process
        assert settled.resident_bytes - away.resident_bytes == pytest.approx(fallen, abs=WITNESS)
    back = trained.move(Rank.reload, TRAINED, part)
    assert (back.device_bytes, back.bytes_moved) == (settled.device_bytes, away.bytes_moved)
    if DEVICE == "cpu":
        assert back.resident_bytes - away.resident_bytes == pytest.approx(fallen, abs=WITNESS)


@pytest.mark.gpu
@on_hardware
def test_without_its_optimizer_a_model_infers_the_same_and_then_trains_on(trained):
    """That it then trains as if nothing had left is shown in test_megatron_ranks, under several layouts."""
    trained.train(1)
    trained.move(Rank.offload, TRAINED, "optimizer")
    trained.infer(2)
    trained.move(Rank.reload, TRAINED, "optimizer")
    assert trained.train(2).digest


def test_generation_leaves_with_its_cache(world):
    """Weights, packed copies of them where a processor needs any, and the key-value cache."""
    world.build(SAMPLER)
    world.generate()
    settled = world.move(Rank.reload, SAMPLER, "all")
    away = world.move(Rank.offload, SAMPLER, "all")
    fallen = settled.device_bytes - away.device_bytes
    assert fallen > (1 + has_bfloat16()) * 2 * ELEMENTS
    assert away.bytes_moved == pytest.approx(2 * ELEMENTS, rel=0.05)
    assert settled.resident_bytes - away.resident_bytes > 0.5 * fallen
    assert world.move(Rank.reload, SAMPLER, "all").device_bytes == settled.device_bytes
