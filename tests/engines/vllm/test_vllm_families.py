"""Every family that runs, in vLLM: log-probabilities of what it generates are transformers', its weights as placed."""

from dataclasses import replace
from pathlib import Path

import family_cases
import pytest
import vllm_cases
from vllm_cases import MAX_LENGTH, make_prompts
from vllm_world import run_world

from prefect_rlhf.engines.commands import BuildCommand
from prefect_rlhf.engines.engine import Generated, SamplingSettings
from prefect_rlhf.engines.files.huggingface import read_model_spec
from prefect_rlhf.engines.vllm.engine import VllmEngine
from prefect_rlhf.placement.devices.mesh import DeviceMesh
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.plan import ModelInstance
from tests.support.by_device import instance_holdings
from tests.support.layouts import vllm_layout
from tests.support.strategies import call

pytestmark = pytest.mark.slow
PROMPTS = [[token % family_cases.VOCAB for token in prompt] for prompt in make_prompts(4, longest=24)]
SAMPLED = SamplingSettings(8, temperature=0.8, stop_at_eos=False)
CLOSE = 1e-4
BRIEFLY = ("qwen3",)  # in every test


def generate(rank: int, folders: dict[str, str]) -> dict[str, Generated]:
    """What an engine over both ranks makes of each folder; building it checks that weights lie as in the layout."""
    return {
        name: _engine(folder, (0, 1), rank).generate(PROMPTS, SAMPLED, range(4)) for name, folder in folders.items()
    }


def _engine(folder: str, ranks: tuple[int, ...], rank: int) -> VllmEngine:
    spec = read_model_spec("actor", folder, "lm", dtype="float32")
    strategy = Strategy(tp=len(ranks))
    instance = ModelInstance("actor", "vllm", DeviceMesh(0, 1, 0, len(ranks)), strategy)
    command = BuildCommand(spec, instance, ranks, vllm_layout(spec, strategy, ranks), MAX_LENGTH // 2, max_rows=8)
    return VllmEngine(command, rank)


def largest_difference(folder: str, made: Generated) -> float:
    oracle = vllm_cases.Oracle(folder)
    return max(
        abs(found - wanted)
        for prompt, response, logprobs in zip(PROMPTS, made.tokens, made.logprobs, strict=True)
        for found, wanted in zip(logprobs, oracle.logprobs(prompt, response, 0.8), strict=True)
    )


@pytest.mark.all
@pytest.mark.parametrize("kv_heads", [6, 1])
def test_two_ranks_logprobs_match_transformers(tmp_path, record_property, kv_heads):
    folders = {name: family_cases.make_family(tmp_path / name, name, kv_heads) for name in family_cases.OPTIONS}
    for made in run_world(2, generate, folders):
        found = {name: largest_difference(Path(folders[name]).as_posix(), made[name]) for name in folders}
        for name, value in found.items():
            family_cases.record(record_property, name, "log-probabilities, tp 2", value)
        assert max(found.values()) < CLOSE, found


@pytest.mark.parametrize(
    "kv_heads", [3, pytest.param(6, marks=pytest.mark.all), pytest.param(1, marks=pytest.mark.all)]
)
@pytest.mark.parametrize(
    "name", [name if name in BRIEFLY else pytest.param(name, marks=pytest.mark.all) for name in family_cases.OPTIONS]
)
def test_a_single_ranks_logprobs_and_bytes_are_as_expected(tmp_path, name, kv_heads, record_property):
    folder = family_cases.make_family(tmp_path, name, kv_heads)
    engine = _engine(folder, (0,), 0)
    found = largest_difference(folder, engine.generate(PROMPTS, SAMPLED, range(4)))
    family_cases.record(record_property, name, "log-probabilities, tp 1", found)
    assert found < CLOSE
    spec, generate = read_model_spec("actor", folder, "lm", dtype="float32"), call("a_call", "generate", "actor", {})
    holdings = instance_holdings(engine.instance, (replace(generate, num_rows=8),), spec, MAX_LENGTH // 2, "cpu")
    counted = sum(holding.num_bytes for holding in holdings)
    assert engine.device_bytes() <= counted <= 1.001 * engine.device_bytes()
