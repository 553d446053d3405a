"""Generation on Megatron's own weights: vLLM, transformers and the engine's own inference as independent oracles."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from generation_cases import GREEDY, PROMPTS, SAMPLED, SEEDS, STOPPED, STRINGS, build, generate
from torch.utils._python_dispatch import TorchDispatchMode
from vllm_cases import END_TOKENS, Oracle, build_command, check_sampling, make_folder, make_prompts, stopped

from prefect_rlhf.engines.engine import Generated, SamplingSettings, Sequences
from prefect_rlhf.engines.weights.memory import storage_bytes
from prefect_rlhf.errors.errors import InvalidInput
from tests.support.cases import first
from tests.support.rounding import MODEL, within

pytestmark = pytest.mark.slow

LAYOUTS = {
    "dp2": {"ranks": (1, 0), "dp": 2},
    "tp2": {"ranks": (1, 0), "tp": 2},
    "pp2": {"ranks": (2, 3), "pp": 2},
    "uneven pp3": {"ranks": (3, 0, 2), "pp": 3},
    "tp2 pp2": {"ranks": (1, 0, 3, 2), "tp": 2, "pp": 2},
    "dp2 pp2": {"ranks": (0, 2, 1, 3), "dp": 2, "pp": 2},
}
CALLS = [(GREEDY, 1), (SAMPLED, 1), (STOPPED, 1), (SAMPLED, 2), (STOPPED, 3), (STRINGS, 2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("models") / "a", 1, tied=True)


@pytest.fixture(scope="module")
def engine(folder):
    return build(folder)


@pytest.fixture(scope="module")
def oracle(folder):
    return Oracle(folder)


@pytest.fixture(scope="module")
def vllm(folder):
    from prefect_rlhf.engines.vllm.engine import VllmEngine

    return VllmEngine(build_command(folder), 0)


@pytest.mark.gpu
def test_greedy_tokens_are_those_of_transformers(engine, oracle):
    assert [oracle.greedy(prompt, 12) for prompt in PROMPTS] == engine.generate(PROMPTS, GREEDY, SEEDS).tokens


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        SAMPLED,
        STOPPED,
        STRINGS,
        SamplingSettings(16, 0.7, 0.9),
        SamplingSettings(16, 1.3, 0.6, stop_at_eos=False),
        SamplingSettings(16, 1.3, top_k=5, stop_at_eos=False),
        SamplingSettings(16, 1.3, 0.8, top_k=20, min_p=0.02, stop_at_eos=False),
    ],
)
def test_tokens_and_logprobs_match_vllm(engine, vllm, sampling):
    """In float32, with the same seeds: short and long prompts, greedy and sampled, stopped and not."""
    ours, theirs = (one.generate(PROMPTS, sampling, SEEDS) for one in (engine, vllm))
    assert ours.tokens == theirs.tokens
    for found, expected in zip(ours.logprobs, theirs.logprobs, strict=True):
        assert found == pytest.approx(expected, abs=1e-4)


def test_a_response_ends_with_the_word_that_completes_a_string(engine, vllm):
    """In both engines it is the unstopped one up to there, whoever has ended before."""
    whole = engine.generate(PROMPTS, replace(STRINGS, stop=()), SEEDS).tokens
    expected = stopped(whole, STRINGS.stop)
    assert len({len(row) for row in expected}) > 4
    for one in (engine, vllm):
        made = one.generate(PROMPTS, STRINGS, SEEDS)
        assert made.tokens == expected
        assert [len(row) for row in made.logprobs] == [len(row) for row in expected]


def test_kept_mass_is_the_same_in_both_engines(engine, vllm):
    sampling = SamplingSettings(8, 1.3, 0.9, top_k=20, min_p=0.02, stop_at_eos=False)
    ours, theirs = (one.generate(PROMPTS, sampling, SEEDS).kept_mass for one in (engine, vllm))
    assert 0 < ours < 0.99
    assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (1.3, 0.6)])
def test_tokens_are_of_the_nucleus_and_logprobs_of_the_whole_vocabulary(engine, oracle, temperature, top_p):
    made = engine.generate(PROMPTS, SamplingSettings(8, temperature, top_p, stop_at_eos=False), SEEDS)
    check_sampling(oracle, made, PROMPTS, temperature, top_p)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "units"), [("float32", MODEL), ("bfloat16", 6)])
@pytest.mark.parametrize("sampling", [STOPPED, SamplingSettings(16, 0.9, top_p=0.8)], ids=["all tokens", "top_p"])
def test_generated_logprobs_match_inference(folder, dtype, units, sampling):
    """A token at a time from the cache, or all at once: the same model. So a first mini-batch's ratio is 1.

    To within the rounding of its logits, whose size is 8, and on average to within a quarter of that.
    """
    engine = build(folder, dtype=dtype)
    made = engine.generate(PROMPTS, sampling, SEEDS)
    rows = [torch.tensor([*p, *r]) for p, r in zip(PROMPTS, made.tokens, strict=True)]
    lengths = torch.tensor([len(row) for row in rows])
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    sequences = Sequences(padded, torch.tensor([len(p) for p in PROMPTS]), lengths)
    found = engine.infer(sequences, "logprobs", 1, sampling.temperature)
    rounding, apart = getattr(torch, dtype), []
    for row, logprobs in zip(found.tolist(), made.logprobs, strict=True):
        assert row[: len(logprobs)] == within(units, logprobs, rounding, size=8)
        apart += [abs(one - other) for one, other in zip(row, logprobs, strict=False)]
    assert sum(apart) / len(apart) == within(units / 4, 0.0, rounding, size=8)


@pytest.mark.gpu
def test_a_response_ends_with_the_first_end_token(engine):
    """A stopped response is the unstopped one up to and including its first end token, whoever has ended before."""
    whole = engine.generate(PROMPTS, SamplingSettings(24, 2.0, stop_at_eos=False), SEEDS).tokens
    stopped = engine.generate(PROMPTS, STOPPED, SEEDS)
    ends = [next((i + 1 for i, token in enumerate(row) if token in END_TOKENS), 24) for row in whole]
    assert [row[:end] for row, end in zip(whole, ends, strict=True)] == stopped.tokens
    assert [len(row) for row in stopped.logprobs] == ends
    assert len(set(ends)) > 4


def test_a_row_depends_on_its_seed_alone(engine):
    """Alone, in a batch and in a reversed batch a row gets the same tokens; another seed gives others."""
    batch = engine.generate(PROMPTS, SAMPLED, SEEDS)
    backwards = engine.generate(PROMPTS[::-1], SAMPLED, SEEDS[::-1])
    alone = [engine.generate([prompt], SAMPLED, [seed]).tokens[0] for prompt, seed in zip(PROMPTS, SEEDS, strict=True)]
    assert batch.tokens == backwards.tokens[::-1] == alone
    others = engine.generate(PROMPTS, SAMPLED, range(10)).tokens
    assert all(a != b for a, b in zip(batch.tokens, others, strict=True))


class Rows(TorchDispatchMode):
    """The number of rows that attention was computed for, call by call."""

    def __init__(self):
        super().__init__()
        self.counts = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if "scaled_dot_product" in str(function):
            self.counts.append(arguments[0].shape[0])
        return function(*arguments, **(options or {}))


def test_finished_rows_are_not_computed(engine):
    """Each decoding step attends for the rows that go on, in each of the four layers."""
    with Rows() as seen:
        made = engine.generate(PROMPTS, STOPPED, SEEDS)
    lengths = [len(row) for row in made.tokens]
    prefill, steps = seen.counts[:4], seen.counts[4:]
    assert prefill == [10] * 4
    assert steps == [sum(n > step for n in lengths) for step in range(1, max(lengths)) for _ in range(4)]


@pytest.mark.gpu
def test_the_cache_is_the_calls_own(engine, monkeypatch):
    """While it runs it has the keys and values of all rows at their longest, which no report counts, and then ends."""
    from prefect_rlhf.engines.megatron.sampling import row_group

    before, made, sizes = engine.device_bytes(), [], []

    class Watched(row_group.KeyValueCache):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(weakref.ref(self.tensor))
            sizes.append((storage_bytes([self.tensor]), engine.device_bytes()))

    monkeypatch.setattr(row_group, "KeyValueCache", Watched)
    weights = storage_bytes(shard.view for shard in engine.weights().values())
    engine.generate(PROMPTS, SAMPLED, SEEDS)
    assert sizes == [(4 * 2 * len(PROMPTS) * 2 * (max(map(len, PROMPTS)) + 16) * 32 * 4, before)]
    gc.collect()
    assert [cache() for cache in made] == [None]
    assert engine.device_bytes() == before
    assert storage_bytes(shard.view for shard in engine.weights().values()) == weights


def test_few_rows_at_a_time_are_prefilled(engine, monkeypatch):
    """What bounds the activations of long prompts changes no token."""
    from prefect_rlhf.engines.megatron.sampling import row_group

    expected = engine.generate(PROMPTS, SAMPLED, SEEDS).tokens
    monkeypatch.setattr(row_group, "PASS_TOKENS", 600)
    with Rows() as seen:
        assert engine.generate(PROMPTS, SAMPLED, SEEDS).tokens == expected
    assert seen.counts[:16] == [3] * 12 + [1] * 4


@pytest.mark.parametrize("layout", first(1, reversed(LAYOUTS)))
def test_tokens_do_not_depend_on_the_layout(world, engine, folder, layout):
    """Whatever the split and the number of groups that take turns; every rank of a replica knows the answer."""
    where = LAYOUTS[layout]
    expected = [engine.generate(PROMPTS, sampling, SEEDS) for sampling, _ in CALLS]
    part = len(PROMPTS) // where.get("dp", 1)
    for replica, answers in world.run(where["ranks"], generate, folder, where, CALLS):
        rows = slice(replica * part, (replica + 1) * part)
        assert [answer.tokens for answer in answers] == [one.tokens[rows] for one in expected]
        for answer, one in zip(answers, expected, strict=True):
            for found, known in zip(answer.logprobs, one.logprobs[rows], strict=True):
                assert found == pytest.approx(known, abs=1e-4)


@pytest.mark.parametrize(("prompt", "line"), [([20] * 245, "at most 244"), ([], "at least 1")])
def test_a_prompt_of_the_wrong_length_is_refused(engine, prompt, line):
    with pytest.raises(InvalidInput, match=line):
        engine.generate([[20], prompt], GREEDY, [0, 1])


def test_many_rows_in_many_lengths_end_in_any_order(engine, vllm):
    """Slots fall free and are filled again all the time."""
    prompts, seeds = make_prompts(48), range(48)
    assert engine.generate(prompts, STOPPED, seeds).tokens == vllm.generate(prompts, STOPPED, seeds).tokens


@pytest.mark.gpu
def test_no_rows_get_no_responses(engine):
    assert engine.generate([], SAMPLED, []) == Generated([], [])
