"""The sampler for vLLM's runner on CUDA, on a CPU: against the sampler of its runner for CPU."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import MinPLogitsProcessor
from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.worker.gpu import model_runner

from prefect_rlhf.engines.engine import SamplingSettings
from prefect_rlhf.engines.sampling.sampler import choose, row_stream
from prefect_rlhf.engines.vllm import stream_sampler
from prefect_rlhf.engines.vllm.sampler import RowSampler
from prefect_rlhf.engines.vllm.settings import sampling_parameters
from prefect_rlhf.engines.vllm.stream_sampler import StreamSampler
from prefect_rlhf.errors.errors import EngineFailed
from tests.support.device import DEVICE
from tests.support.rounding import KERNEL, within

pytestmark = pytest.mark.slow
VOCABULARY, MAX_LENGTH, NUM_TOKENS = 300, 64, 6
PROMPTS = {"a": 3, "b": 1, "c": 9, "d": 20}  # their lengths
SEEDS = {"a": 7, "b": 8, "c": -1, "d": 2**64 - 1}
SETTINGS = {
    "plain": SamplingSettings(NUM_TOKENS, stop_at_eos=False),
    "greedy": SamplingSettings(NUM_TOKENS, temperature=0.0),
    "warm": SamplingSettings(NUM_TOKENS, temperature=0.5),
    "nucleus": SamplingSettings(NUM_TOKENS, top_p=0.75),
    "all": SamplingSettings(NUM_TOKENS, temperature=2.0, top_p=0.75, top_k=100, min_p=1 / 64),
}
LOGITS = {
    name: torch.randn(NUM_TOKENS, VOCABULARY, generator=torch.Generator().manual_seed(length)) * 3
    for name, length in PROMPTS.items()
}


def parameters(name: str, sampling: SamplingSettings) -> SamplingParams:
    return sampling_parameters(sampling, SEEDS[name], ())


class Runner:
    """vLLM's runner for CUDA, as far as the sampler sees it: rows in places, and lengths on the host."""

    def __init__(self) -> None:
        self.states = SimpleNamespace(
            max_num_reqs=8, max_model_len=MAX_LENGTH, prompt_len=SimpleNamespace(np=np.zeros(8, dtype=np.int32))
        )
        self.sampler = StreamSampler(vllm_config=None, vocab_size=VOCABULARY, req_states=self.states)
        self.places: dict[str, int] = {}
        self.prefill: dict[str, int] = {}
        self.made: dict[str, list[tuple[int, tuple[float, ...]]]] = {name: [] for name in PROMPTS}

    def add(self, name: str, place: int, sampling: SamplingSettings) -> None:
        """Begin a row, or resume it with the tokens that it has."""
        self.places[name], self.prefill[name] = place, PROMPTS[name] + len(self.made[name])
        self.states.prompt_len.np[place] = PROMPTS[name]
        self.sampler.add_request(place, parameters(name, sampling))

    def step(self, **computed: int) -> None:
        """Compute rows up to a number of tokens, each from half of it on."""
        names, totals = list(computed), np.array(list(computed.values()))
        logits = torch.stack([LOGITS[n][min(max(t - PROMPTS[n], 0), NUM_TOKENS - 1)] for n, t in computed.items()])
        batch = SimpleNamespace(
            idx_mapping_np=np.array([self.places[name] for name in names]),
            num_computed_tokens_np=totals // 2,
            num_scheduled_tokens=totals - totals // 2,
            prefill_len_np=np.array([self.prefill[name] for name in names]),
        )
        out = self.sampler(logits.to(DEVICE), batch)
        for i, name in enumerate(names):
            if out.num_sampled[i]:
                token, logprobs = int(out.sampled_token_ids[i, 0]), tuple(out.logprobs_tensors.logprobs[i].tolist())
                self.made[name].append((token, logprobs))

    def decode(self, *names: str) -> None:
        self.step(**{name: PROMPTS[name] + len(self.made[name]) for name in names})


def expected(sampling: SamplingSettings) -> dict[str, list[tuple[int, tuple[float, ...]]]]:
    """What RowSampler makes of the same logits, a token after the other, all rows in a batch."""
    min_p = MinPLogitsProcessor.__new__(MinPLogitsProcessor)
    min_p.min_p, min_p.min_p_count = torch.full((len(PROMPTS), 1), sampling.min_p), int(sampling.min_p > 0)
    rows = len(PROMPTS)
    metadata = SimpleNamespace(
        all_greedy=sampling.temperature == 0,
        temperature=torch.full((rows,), sampling.temperature),
        top_p=torch.full((rows,), sampling.top_p),
        top_k=torch.full((rows,), sampling.top_k),
        generators={i: row_stream(seed) for i, seed in enumerate(SEEDS.values())},
        max_num_logprobs=int(sampling.is_filtered),
        logitsprocs=SimpleNamespace(argmax_invariant=[min_p]),
    )
    made = {name: [] for name in PROMPTS}
    for step in range(NUM_TOKENS):
        out = RowSampler().forward(torch.stack([LOGITS[name][step] for name in PROMPTS]), metadata)
        for i, name in enumerate(PROMPTS):
            made[name].append((int(out.sampled_token_ids[i, 0]), tuple(out.logprobs_tensors.logprobs[i].tolist())))
    return made


@pytest.mark.gpu
@pytest.mark.parametrize("at_once", [1, 2, 4])
@pytest.mark.parametrize("name", SETTINGS)
def test_rows_get_the_tokens_logprobs_and_kept_mass_of_the_runner_for_cpu(name, at_once, monkeypatch):
    """Also a row that begins later, a row alone, and a row that loses its place and computes its tokens again."""
    monkeypatch.setattr(stream_sampler, "FILTERED_AT_ONCE", at_once * VOCABULARY)
    sampling, runner = SETTINGS[name], Runner()
    for place, row in enumerate(("a", "b", "c")):
        runner.add(row, place, sampling)
    runner.decode("c", "a", "b")
    runner.decode("b", "a", "c")
    runner.add("d", 3, sampling)
    runner.step(a=PROMPTS["a"] + 2, d=10)  # half of the prompt of d
    assert not runner.made["d"]
    runner.add("b", 6, sampling)  # it was preempted and resumes elsewhere, with the two tokens that it has
    runner.step(b=PROMPTS["b"] + 1)
    assert len(runner.made["b"]) == 2
    while unfinished := [row for row in PROMPTS if len(runner.made[row]) < NUM_TOKENS]:
        runner.decode(*unfinished)
    for row, pairs in expected(sampling).items():
        assert [token for token, _ in runner.made[row]] == [token for token, _ in pairs]
        for (_, logprobs), (_, others) in zip(runner.made[row], pairs, strict=True):
            assert logprobs == within(KERNEL, others)
            assert len(logprobs) == 1 + sampling.is_filtered


def test_the_sampler_for_cpu_needs_no_library_of_gpus(monkeypatch):
    """vLLM's own imports flashinfer where it sees a GPU, for its choice among the likeliest tokens."""
    monkeypatch.setattr(topk_topp_sampler, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert RowSampler().logprobs_mode == "raw_logprobs"


def test_rows_that_vllm_measures_with_are_sampled_before_any_row_was_added():
    runner = Runner()
    runner.places, runner.prefill = {"a": 0, "b": 1}, {"a": 0, "b": 0}
    runner.step(a=1, b=1)
    assert [len(made) for made in runner.made.values()] == [1, 1, 0, 0]


def test_rows_with_different_settings_in_a_step_are_an_error():
    runner = Runner()
    runner.add("a", 0, SETTINGS["plain"])
    runner.add("b", 1, SETTINGS["nucleus"])
    with pytest.raises(EngineFailed, match="2 different settings"):
        runner.decode("a", "b")


class NoWaits(TorchDispatchMode):
    """Refuses the operations that read a number of a tensor: on a GPU, each waits for all work before it."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        assert operation.overloadpacket not in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero)
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", SETTINGS)
def test_plain_sampling_does_not_wait_for_the_device(name):
    sampling, uniforms = SETTINGS[name], torch.rand(NUM_TOKENS, dtype=torch.float64)
    filters = sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p
    with NoWaits():
        choose(LOGITS["a"], uniforms if sampling.temperature else None, *filters)
    with pytest.raises(AssertionError), NoWaits():
        choose(LOGITS["a"], uniforms, torch.ones(NUM_TOKENS, 1))


def test_the_sampler_has_everything_the_cuda_runner_uses():
    """The runner makes it by the name that an engine replaces, and with speculative decoding off uses no more of it."""
    text = Path(model_runner.__file__).read_text()
    assert "self.sampler = Sampler(**sampler_kwargs)" in text
    used = set(re.findall(r"self\.sampler\.(\w+)", text))
    assert used >= {"add_request", "apply_staged_writes", "penalties_state"}
    assert used - {"sampling_states", "get_logprobs_dims"} <= set(dir(StreamSampler))
