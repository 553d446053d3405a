"""One vLLM engine in this process, against transformers and against itself under other circumstances."""

import gc
import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from vllm.model_executor.models import registry
from vllm_cases import (
    END_TOKENS,
    MAX_LENGTH,
    Oracle,
    build_command,
    check_sampling,
    make_folder,
    make_prompts,
    write_weights,
)

from prefect_rlhf.engines.engine import Generated, SamplingSettings
from prefect_rlhf.engines.rank.profiling.layer_clock import clocked, clocked_method
from prefect_rlhf.engines.vllm.engine import VllmEngine
from prefect_rlhf.engines.vllm.environment import inspect_here, survive_scan
from prefect_rlhf.errors.errors import EngineFailed, InvalidInput
from prefect_rlhf.placement.cost.paged_cache import whole_cache_bytes
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.models.engine_constants import CACHE_BLOCK
from prefect_rlhf.placement.models.families.known import RUN

pytestmark = pytest.mark.slow
PROMPTS = make_prompts(12)
SEEDS = list(range(100, 112))
GREEDY = SamplingSettings(12, temperature=0.0, stop_at_eos=False)
SAMPLED = SamplingSettings(16, stop_at_eos=False)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return make_folder(root / "a", 1, tied=True), make_folder(root / "b", 2, tied=True)


@pytest.fixture(scope="module")
def engine(folders):
    return VllmEngine(build_command(folders[0]), 0)


@pytest.fixture(scope="module")
def oracle(folders):
    return Oracle(folders[0])


def test_what_other_libraries_keep_in_the_process_does_not_stop_vllm(monkeypatch):
    """The search of plans loads numba, and a proxy as Flask's refuses every question."""
    import numba  # noqa: F401  what counts is that it is loaded
    from vllm.triton_utils.dispatcher import _rebind_kernels

    class Refusing:
        def __getattribute__(self, name):
            raise RuntimeError("outside of a request")

    monkeypatch.setattr(sys.modules[__name__], "PROXY", Refusing(), raising=False)
    survive_scan()
    _rebind_kernels([])


@pytest.fixture
def first_build(tmp_path, monkeypatch):
    """VLLM knows its models by name only, has kept nothing of them, and cannot look at them in another process."""

    def refuse(look):
        raise OSError("started another Python")

    names = [family.architecture("lm") for family in RUN]
    modules = {name: registry._VLLM_MODELS[name] for name in names}
    by_name = {
        name: registry._LazyRegisteredModel(f"vllm.model_executor.models.{module}", of_class)
        for name, (module, of_class) in modules.items()
    }
    # Not by the variable of the folder, which vLLM reads once: before this, if the process has built an engine.
    monkeypatch.setattr(registry._LazyRegisteredModel, "_get_cache_dir", staticmethod(lambda: tmp_path))
    monkeypatch.setattr(registry, "_run_in_subprocess", refuse)
    monkeypatch.setattr(registry.ModelRegistry, "models", by_name)
    return by_name


@pytest.mark.parametrize("family", RUN, ids=[family.name for family in RUN])
def test_vllm_looks_at_the_class_of_each_family_without_another_process(first_build, family):
    name = family.architecture("lm")
    with pytest.raises(OSError, match="started another Python"):
        first_build[name].inspect_model_cls()
    inspect_here(name)
    assert first_build[name].inspect_model_cls().is_text_generation_model
    inspect_here("NoModelOfVllm")
    assert "NoModelOfVllm" not in first_build


def test_the_first_build_on_a_machine_starts_no_other_python(first_build, folders):
    assert VllmEngine(build_command(folders[0]), 0).weights()


def test_a_clock_around_the_forward_sees_each_pass_of_a_generation(engine):
    """A probe on GPUs times replayed CUDA graphs with it, since these call no layer."""
    with clocked_method(*engine.forward_method) as whole, clocked(engine.layers) as layers:
        engine.generate(PROMPTS, GREEDY, SEEDS)
    assert len(whole.forwards) == len(layers.forwards) >= GREEDY.max_new_tokens
    for outer, inner in zip(whole.forwards, layers.forwards, strict=True):
        assert outer[0] <= inner[0] < inner[1] <= outer[1]
    engine.generate(PROMPTS, GREEDY, SEEDS)
    assert len(whole.forwards) == len(layers.forwards)  # both clocks have stopped


def test_greedy_tokens_are_those_of_transformers(engine, oracle):
    made = engine.generate(PROMPTS, GREEDY, SEEDS)
    assert [oracle.greedy(prompt, 12) for prompt in PROMPTS] == made.tokens


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (1.3, 0.6)])
def test_tokens_are_of_the_nucleus_and_logprobs_of_the_whole_vocabulary(engine, oracle, temperature, top_p):
    made = engine.generate(PROMPTS, SamplingSettings(16, temperature, top_p, stop_at_eos=False), SEEDS)
    check_sampling(oracle, made, PROMPTS, temperature, top_p)


def test_sampling_follows_the_model(engine, oracle):
    """First tokens of 4000 draws have the model's frequencies (chi-square over the likely tokens)."""
    prompt = PROMPTS[3]
    probs = oracle.logits(prompt)[-1].softmax(-1)
    counts = torch.zeros(512)
    made = engine.generate([prompt] * 4000, SamplingSettings(1, stop_at_eos=False), range(4000))
    for (token,) in made.tokens:
        counts[token] += 1
    likely = probs * 4000 > 10
    chi = ((counts - probs * 4000)[likely] ** 2 / (probs * 4000)[likely]).sum() / likely.sum()
    assert likely.sum() > 20
    assert chi < 1.6


def test_a_row_depends_on_its_seed_alone(engine):
    """Alone, in a batch and in a reversed batch a row gets the same tokens; another seed gives others."""
    batch = engine.generate(PROMPTS, SAMPLED, SEEDS)
    backwards = engine.generate(PROMPTS[::-1], SAMPLED, SEEDS[::-1])
    alone = [engine.generate([prompt], SAMPLED, [seed]).tokens[0] for prompt, seed in zip(PROMPTS, SEEDS, strict=True)]
    assert batch.tokens == backwards.tokens[::-1] == alone
    assert all(a != b for a, b in zip(batch.tokens, engine.generate(PROMPTS, SAMPLED, range(12)).tokens, strict=True))


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_no_rows_get_no_responses(engine, top_p):
    assert engine.generate([], SamplingSettings(4, top_p=top_p), []) == Generated([], [])


def test_rows_of_a_group_share_their_prompts_prefill_with_each_other_and_with_no_earlier_call(engine):
    """Of a group's prompts of 72 tokens one is computed, and of the others what is beyond its two whole blocks."""
    prompts = [prompt for prompt in make_prompts(2, 72, 72) for _ in range(4)]
    num_tokens, seeds = [], list(range(8))
    hook = engine.layers[0].register_forward_pre_hook(lambda _, inputs: num_tokens.append(inputs[0].shape[-1]))
    try:
        made = [engine.generate(prompts, SAMPLED, seeds) for _ in range(2)]
    finally:
        hook.remove()
    prefill = 2 * (72 + 3 * (72 - 2 * CACHE_BLOCK))
    assert num_tokens == 2 * [prefill, *[8] * 15]
    alone = [engine.generate([prompt], SAMPLED, [seed]) for prompt, seed in zip(prompts, seeds, strict=True)]
    assert made[0].tokens == made[1].tokens == [answer.tokens[0] for answer in alone]


@pytest.mark.parametrize("sampling", [SamplingSettings(60, stop_at_eos=False), SamplingSettings(60, 2.0)])
def test_a_small_cache_gives_the_same_tokens(folders, engine, sampling):
    """Rows wait for others, and lose their place and compute their keys and values again, at any length."""
    command = build_command(folders[0])
    cache_bytes = whole_cache_bytes(1, MAX_LENGTH, ModelSizes.of(command.model), 1)
    small = VllmEngine(replace(command, cache_bytes=cache_bytes), 0)
    num_tokens = {name: [] for name in ("small", "large")}
    made = {}
    for name, built in (("small", small), ("large", engine)):
        seen = num_tokens[name]
        hook = built.layers[0].register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(inputs[0].shape[-1]))
        try:
            made[name] = built.generate(PROMPTS, sampling, SEEDS)
        finally:
            hook.remove()
    assert made["small"].tokens == made["large"].tokens
    for row, other in zip(made["small"].logprobs, made["large"].logprobs, strict=True):
        assert row == pytest.approx(other, abs=1e-4)
    assert sum(num_tokens["small"]) > sum(num_tokens["large"])  # some were computed again
    assert len(num_tokens["small"]) > len(num_tokens["large"])


def test_a_cache_smaller_than_a_row_is_refused_in_one_line(folders):
    command = replace(build_command(folders[0]), cache_bytes=1 << 16)
    with pytest.raises(InvalidInput, match=r"cache_gib: got 6.1.*e-05, expected at least .*, for a row of 256 tokens"):
        VllmEngine(command, 0)


def test_seeds_are_any_whole_numbers(engine):
    made = engine.generate(PROMPTS[:4], SAMPLED, [-1, 0, 2**63, 2**64 - 1])
    again = engine.generate(PROMPTS[:4], SAMPLED, [-1, 0, 2**63, 2**64 - 1])
    assert made.tokens == again.tokens


def test_a_response_ends_with_the_first_end_token(engine):
    """With stop_at_eos a response is the unstopped one up to and including the first end token."""
    prompts, seeds = make_prompts(48), range(48)
    whole = engine.generate(prompts, SamplingSettings(16, 2.0, stop_at_eos=False), seeds).tokens
    stopped = engine.generate(prompts, SamplingSettings(16, 2.0), seeds)
    ends = [next((i + 1 for i, token in enumerate(row) if token in END_TOKENS), 16) for row in whole]
    assert [row[:end] for row, end in zip(whole, ends, strict=True)] == stopped.tokens
    assert 1 in ends
    assert [len(row) for row in stopped.tokens] == [len(row) for row in stopped.logprobs]


def test_weights_are_the_checkpoint(engine, oracle):
    state = {name: w for name, w in oracle.model.state_dict().items() if name != "lm_head.weight"}
    shards = engine.weights()
    assert set(state) == set(shards)
    for name, weight in state.items():
        assert tuple(weight.shape) == shards[name].shape
        assert torch.equal(weight, shards[name].view.reshape(weight.shape))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_written_in_place_answer_like_a_fresh_engine(folders, dtype):
    """Also with prompts longer than a cache block, whose old keys and values would show."""
    prompts = [*make_prompts(4, 150, 200), *make_prompts(4)]
    fresh = VllmEngine(build_command(folders[1], dtype=dtype), 0)
    written = VllmEngine(build_command(folders[0], dtype=dtype), 0)
    before = written.generate(prompts, SAMPLED, range(8))
    write_weights(written.weights(), folders[1])
    written.weights_written()
    assert fresh.generate(prompts, SAMPLED, range(8)) == written.generate(prompts, SAMPLED, range(8))
    assert before.tokens != written.generate(prompts, SAMPLED, range(8)).tokens


def test_offload_empties_the_device_and_reload_restores_the_answers(engine):
    """The weights alone are copied, and only once: the second time the host has them."""
    before, held = engine.generate(PROMPTS, SAMPLED, SEEDS), engine.device_bytes()
    copied = engine.offload()
    assert 0 < copied < held / 2
    assert (engine.offload(), engine.device_bytes()) == (0, 0)
    assert (copied, 0, held) == (engine.reload(), engine.reload(), engine.device_bytes())
    assert before == engine.generate(PROMPTS, SAMPLED, SEEDS)
    assert (engine.offload(copies=False), engine.device_bytes()) == (0, 0)
    assert (copied, held) == (engine.reload(), engine.device_bytes())
    assert before == engine.generate(PROMPTS, SAMPLED, SEEDS)


def test_weights_that_are_overwritten_need_no_copy(engine):
    """A copy made earlier is out of date once other weights were written, so that it cannot come back."""
    before = engine.generate(PROMPTS, SAMPLED, SEEDS)
    weights = {name: shard.view.clone() for name, shard in engine.weights().items()}
    engine.offload()
    engine.reload()
    engine.weights_written()
    engine.offload(copies=False)
    with pytest.raises(EngineFailed, match="found no copy in host memory"):
        engine.reload()
    assert engine.device_bytes() == 0
    assert engine.reload(copies=False) < sum(view.nbytes for view in weights.values()) / 10  # rotary tables
    for name, shard in engine.weights().items():
        shard.view.copy_(weights[name])
    engine.weights_written()
    assert before == engine.generate(PROMPTS, SAMPLED, SEEDS)


def test_offloading_does_not_disturb_an_engine_of_the_same_shape(folders, engine):
    """vLLM would share a table of positions among all engines of a process."""
    other = VllmEngine(build_command(folders[0]), 0)
    before = other.generate(PROMPTS, SAMPLED, SEEDS)
    engine.offload()
    assert other.generate(PROMPTS, SAMPLED, SEEDS) == before
    engine.reload()


def test_kept_keys_and_values_of_an_earlier_call_are_an_error(engine, monkeypatch):
    """They are of old weights, if weights were written since."""
    monkeypatch.setattr(engine._llm, "reset_prefix_cache", lambda: False)
    with pytest.raises(EngineFailed, match="vLLM kept keys and values of an earlier call"):
        engine.generate(PROMPTS[:1], SAMPLED, SEEDS[:1])


def test_more_rows_than_tokens_of_a_pass_build_an_engine(folders):
    """vLLM refuses more rows at once than tokens of a forward pass."""
    command = build_command(folders[0])
    cache_bytes = whole_cache_bytes(4, MAX_LENGTH, ModelSizes.of(command.model), 1)
    many = VllmEngine(replace(command, max_rows=10_000, cache_bytes=cache_bytes), 0)
    assert len(many.generate(PROMPTS, SAMPLED, SEEDS).tokens) == len(PROMPTS)


def test_device_bytes_count_weights_and_cache(engine, oracle):
    """At least the weights, their packed copies, and the keys and values of 64 rows of 256 tokens."""
    weights = sum(w.nbytes for w in oracle.model.parameters())
    linear = sum(w.nbytes for w in oracle.model.parameters() if w.dim() == 2)
    cache = 64 * MAX_LENGTH * 2 * 4 * 2 * 32 * 4
    assert weights + linear + cache <= engine.device_bytes() < 1.1 * (weights + linear + cache)


def test_an_engine_leaves_the_process_as_it_was(folders):
    """Random numbers, thread count and torch's world survive the making, use and end of an engine."""
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    engine = VllmEngine(build_command(folders[0]), 0)
    engine.generate(PROMPTS[:2], SAMPLED, SEEDS[:2])
    del engine
    gc.collect()
    assert torch.equal(expected, torch.rand(3))
    torch.set_num_threads(2)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    assert dist.is_initialized()


@pytest.mark.parametrize("wrong", [{"head": "scalar"}, {"pp": 2, "ranks": (0, 1)}])
def test_what_vllm_cannot_generate_with_is_refused(folders, wrong):
    with pytest.raises(InvalidInput, match="vllm"):
        VllmEngine(build_command(folders[0], **wrong), 0)


def test_a_prompt_that_leaves_no_room_is_refused(engine):
    with pytest.raises(InvalidInput, match="at most 244"):
        engine.generate([[20] * 245], GREEDY, [0])
