"""No engine reads anything made of weights that a write does not refresh: every engine, family and number format."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import family_cases
import pytest
import torch
from megatron_cases import OPTIMIZER, Case
from processors import amx, bytes_with_packed, no_bfloat16

from prefect_rlhf.engines.commands import BuildCommand
from prefect_rlhf.engines.engine import Generated, SamplingSettings
from prefect_rlhf.engines.files.huggingface import read_model_spec
from prefect_rlhf.engines.megatron.engine import MegatronEngine
from prefect_rlhf.engines.vllm.cpu import kernels
from prefect_rlhf.engines.vllm.engine import VllmEngine
from prefect_rlhf.engines.weights.fingerprint import digest
from prefect_rlhf.errors.errors import EngineFailed
from prefect_rlhf.placement.devices.mesh import DeviceMesh
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.plan import ModelInstance
from tests.support.by_device import instance_holdings
from tests.support.layouts import vllm_layout
from tests.support.strategies import call

pytestmark = pytest.mark.slow
KV_HEADS = 3
MAX_LENGTH = 64
SEEDS = range(6)
PROMPTS = [[(7 * row + 3 * place) % 400 + 1 for place in range(6 + 8 * row)] for row in SEEDS]  # some fill a block
SAMPLED = SamplingSettings(8, stop_at_eos=False)


def vllm(folder: str, dtype: str) -> VllmEngine:
    spec, strategy = read_model_spec("actor", folder, "lm", dtype=dtype), Strategy()
    instance = ModelInstance("actor", "vllm", DeviceMesh(0, 1, 0, 1), strategy)
    layout = vllm_layout(spec, strategy, (0,))
    return VllmEngine(BuildCommand(spec, instance, (0,), layout, MAX_LENGTH, max_rows=8), 0)


def megatron(folder: str, dtype: str) -> MegatronEngine:
    """One that trains, so that it has main weights beside its compute weights."""
    return Case(folder, dtype=dtype, optimizer=OPTIMIZER).build(0)


BUILD: Mapping[str, Callable[[str, str], Any]] = MappingProxyType(
    {"vllm": vllm, "vllm with AMX": vllm, "vllm without bfloat16": vllm, "megatron": megatron}
)
PROCESSORS: Mapping[str, Callable[[], AbstractContextManager[list[tuple[int, int]]]]] = MappingProxyType(
    {"vllm with AMX": amx, "vllm without bfloat16": no_bfloat16}
)
CASES = [
    (engine, family, dtype)
    for engine in BUILD
    for family in family_cases.OPTIONS
    for dtype in ("float32", "bfloat16")
    if engine not in PROCESSORS or dtype == "bfloat16"
]
BRIEFLY = [
    ("vllm", "llama", "float32"),
    ("vllm", "gemma3_text", "bfloat16"),
    ("vllm with AMX", "qwen2", "bfloat16"),
    ("vllm without bfloat16", "qwen2", "bfloat16"),
    ("megatron", "llama", "float32"),
    ("megatron", "qwen3", "bfloat16"),
]
assert set(BRIEFLY) <= set(CASES)


def marked(cases: Sequence[tuple[str, str, str]]) -> list[Any]:
    """A case is a single value here."""
    return [pytest.param(case, marks=() if case in BRIEFLY else pytest.mark.all) for case in cases]


@dataclass(frozen=True)
class Pair:
    """An engine that has generated with weights of its own, and a fresh engine of other weights."""

    label: str
    folder: str
    dtype: str
    engine: Any
    fresh: Any
    before: Generated
    packed_by_amx: list[tuple[int, int]]

    def write(self) -> None:
        """Write the other engine's weights, as a move of weights does."""
        others = self.fresh.weights()
        for name, shard in self.engine.weights().items():
            shard.view.copy_(others[name].view)
        self.engine.weights_written()


@pytest.fixture(scope="module", params=marked(CASES), ids=" ".join)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    torch.set_num_threads(1)
    name, family, dtype = request.param
    root: Path = tmp_path_factory.mktemp("models")
    folders = [family_cases.make_family(root / f"{seed}", family, KV_HEADS, seed=seed) for seed in (0, 10)]
    with PROCESSORS.get(name, lambda: nullcontext([]))() as packed:
        engine, fresh = (BUILD[name](folder, dtype) for folder in folders)
        yield Pair(name, folders[0], dtype, engine, fresh, answers(engine), packed)
        engine.close()
        fresh.close()


def answers(engine: Any) -> Generated:
    """Tokens and log-probabilities."""
    made: Generated = engine.generate(PROMPTS, SAMPLED, SEEDS)
    return made


def test_an_engine_answers_with_the_weights_that_were_written_last_as_a_fresh_engine_does(pair):
    """Also after an offload, and written into memory that came back without them."""
    pair.write()
    wanted = answers(pair.fresh)
    assert answers(pair.engine) == wanted
    assert wanted.tokens != pair.before.tokens
    pair.engine.offload()
    pair.engine.reload()
    assert answers(pair.engine) == wanted
    pair.engine.offload(copies=False)
    pair.engine.reload(copies=False)
    pair.write()
    assert answers(pair.engine) == wanted


def test_a_change_of_any_parameter_shows_in_the_fingerprint_and_in_the_answers(pair):
    """So what is fingerprinted is what the kernels read."""
    pair.write()
    sampling, engine = replace(SAMPLED, max_new_tokens=1), pair.engine
    wanted, fingerprint = engine.generate(PROMPTS, sampling, SEEDS), digest(engine.weights())
    for name, shard in engine.weights().items():
        kept = shard.view.clone()
        shard.view.add_(torch.linspace(-1, 1, kept.numel()).view(kept.shape).to(kept))
        engine.weights_written()
        assert digest(engine.weights())[name] != fingerprint[name]
        assert engine.generate(PROMPTS, sampling, SEEDS).logprobs != wanted.logprobs, name
        shard.view.copy_(kept)
        engine.weights_written()
    assert engine.generate(PROMPTS, sampling, SEEDS) == wanted


@pytest.mark.parametrize(
    "pair", marked([case for case in CASES if case[0].startswith("vllm")]), ids=" ".join, indirect=True
)
def test_vllm_holds_the_bytes_that_are_certified(pair):
    """Whatever its kernels pack or convert."""
    spec, generate = (
        read_model_spec("actor", pair.folder, "lm", dtype=pair.dtype),
        call("a_call", "generate", "actor", {}),
    )
    holdings = instance_holdings(pair.engine.instance, (replace(generate, num_rows=8),), spec, MAX_LENGTH, "cpu")
    counted, held = sum(holding.num_bytes for holding in holdings), bytes_with_packed(pair.engine)
    assert held <= counted <= 1.001 * held


def test_amx_is_claimed_for_every_small_matrix(pair):
    """Otherwise these tests would show nothing about such CPUs."""
    is_claimed = bool(pair.packed_by_amx)
    if is_claimed:
        layers = pair.engine._cpu._layers
        assert {(layer.weight.shape[0], layer.weight.shape[1]) for layer in layers} <= set(pair.packed_by_amx)
    assert is_claimed == (pair.label == "vllm with AMX")


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return vllm(family_cases.make_family(tmp_path_factory.mktemp("model"), "qwen2", KV_HEADS), "bfloat16")


def test_a_bias_that_vllm_replaces_by_a_copy_is_an_error(engine, monkeypatch):
    """As vLLM does on CPUs with AMX, if it is left to itself."""
    monkeypatch.setattr(kernels, "_pack", lambda layer: kernels.dispatch_cpu_unquantized_gemm(layer, False))
    engine.weights_written()
    own = [layer.bias.data for layer in engine._cpu._layers if getattr(layer, "bias", None) is not None]
    with amx(), pytest.raises(EngineFailed, match=r"computes from model.layers.0.self_attn.qkv_proj.bias, a copy of"):
        answers(engine)
    monkeypatch.undo()
    layers = [layer for layer in engine._cpu._layers if getattr(layer, "bias", None) is not None]
    for layer, bias in zip(layers, own, strict=True):
        layer.bias.data = bias
    engine.weights_written()
    answers(engine)


@pytest.mark.parametrize(
    ("module", "name"), [("mlp.down_proj", "packed"), ("self_attn.attn", "sinks"), ("mlp.act_fn", "table")]
)
@pytest.mark.parametrize("keep", [setattr, torch.nn.Module.register_buffer], ids=["attribute", "buffer"])
def test_an_extra_vllm_tensor_is_an_error(engine, module, name, keep):
    """It may be made of them: packed, converted or cached."""
    owner = engine.layers[1].get_submodule(module)
    keep(owner, name, torch.zeros(2))
    with pytest.raises(EngineFailed, match=f"computes from model.layers.1.{module}.{name}, a copy of its own"):
        answers(engine)
    delattr(owner, name)
    answers(engine)
