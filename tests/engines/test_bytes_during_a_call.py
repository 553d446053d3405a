"""A rank may report while a call runs: of a commit, a reload or a function on the host. Only what stays counts."""

from contextlib import contextmanager
from types import SimpleNamespace

import megatron_cases as cases
import pytest
from generation_cases import PROMPTS, SAMPLED, SEEDS
from megatron_cases import OPTIMIZER, Case
from torch.utils._python_dispatch import TorchDispatchMode
from vllm_cases import build_command, make_folder

from tests.support.cases import first

DTYPES = ["float32", "bfloat16"]
SHORT = [prompt for prompt in PROMPTS if len(prompt) <= 64]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("models") / "a", 1, tied=True)


class _Asks(TorchDispatchMode):
    """Asks an engine for its bytes at every fifth operation of torch, in any phase of a call and of its layers."""

    def __init__(self, engine):
        super().__init__()
        self.engine, self.answers, self.count = engine, [], 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        made = function(*arguments, **(options or {}))
        self.count += 1
        if self.count % 5 == 0:
            self.answers.append(self.engine.device_bytes())
        return made


@contextmanager
def asked_all_the_time(engine):
    """Hold that the engine never says more than it says when the call has ended."""
    seen = SimpleNamespace()
    with _Asks(engine) as asks:
        yield seen
    seen.num_answers, seen.most = len(asks.answers), max(asks.answers)
    assert seen.most == engine.device_bytes()


@pytest.mark.parametrize("dtype", first(1, DTYPES))
def test_megatron_counts_what_stays_at_every_moment_of_every_kind_of_call(folder, dtype):
    engine = Case(folder, dtype=dtype, optimizer=OPTIMIZER).build(0)
    sequences, batch = cases.make_rows(8)
    calls = [
        lambda: cases.train_on(engine, sequences, batch, cases.loss, cases.Walk("logprobs", micro_batches=2)),
        lambda: engine.infer(sequences, "logprobs", 2, 1.0),
        lambda: engine.generate(SHORT, SAMPLED, SEEDS[: len(SHORT)], 2),
    ]
    calls[0]()  # the moments are made in the first step
    for call in calls:
        with asked_all_the_time(engine) as seen:
            call()
        assert seen.num_answers > 100


@pytest.mark.slow
@pytest.mark.parametrize("dtype", first(1, DTYPES))
def test_vllm_counts_what_stays_at_every_moment_of_a_generate(folder, dtype):
    from prefect_rlhf.engines.vllm.engine import VllmEngine

    engine = VllmEngine(build_command(folder, dtype=dtype), 0)
    engine.generate(SHORT, SAMPLED, SEEDS[: len(SHORT)])  # the first packs the weights
    with asked_all_the_time(engine) as seen:
        engine.generate(SHORT, SAMPLED, SEEDS[: len(SHORT)])
    assert seen.num_answers > 100
