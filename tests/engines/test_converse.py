"""Plays in both engines: a loop over transformers as the oracle, and a generate without a play."""

import pytest
import torch
from generation_cases import PROMPTS, SEEDS, build
from play_cases import SAMPLING, build_vllm, converse, converse_on_rank, environment, settings
from vllm_cases import END_TOKENS, Oracle, make_folder

from prefect_rlhf.engines.sampling.sampler import choose, uniforms
from prefect_rlhf.engines.sampling.seeds import play_seed

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("models") / "a", 1, tied=True)


@pytest.fixture(scope="module", params=["megatron", "vllm"])
def engine(folder, request):
    return build(folder) if request.param == "megatron" else build_vllm(folder)


@pytest.fixture(scope="module")
def expected(folder):
    """Tokens, masks and turns of the three turns of `talks`, by a whole forward pass for each token."""
    oracle = Oracle(folder)

    def turn(tokens, seed):
        said = []
        for uniform_1 in uniforms([seed], SAMPLING.max_new_tokens).T:
            logits_1V = oracle.logits([*tokens, *said])[-1:]
            said.append(int(choose(logits_1V, uniform_1, SAMPLING.temperature).tokens_B))
            if said[-1] in END_TOKENS:
                break
        return said

    rows = []
    for number, (prompt, seed) in enumerate(zip(PROMPTS, SEEDS, strict=True)):
        tokens, mask, turns = [], [], []
        for k in range(3):
            answer = [20 + k - 1, 100 + number] if k else []
            said = turn([*prompt, *tokens, *answer], play_seed(seed, k))
            tokens += answer + said
            mask += [0] * len(answer) + [1] * len(said)
            turns += [k - 1] * len(answer) + [k] * len(said)
        rows.append((tokens, mask, turns, oracle.logprobs(prompt, tokens, SAMPLING.temperature)))
    return rows


def check(found, expected):
    """Tokens, masks and turns are equal; log-probabilities of the model's own tokens are near, the others' 0."""
    assert found.tokens == [row[0] for row in expected]
    assert found.mask == [row[1] for row in expected]
    assert found.turns == [row[2] for row in expected]
    for (_, mask, _, of_all), logprobs in zip(expected, found.logprobs, strict=True):
        own = [logprob * is_own for logprob, is_own in zip(of_all, mask, strict=True)]
        assert own == pytest.approx(logprobs, abs=1e-4)


def test_three_turns_match_a_loop_over_transformers(engine, expected):
    check(converse(engine, settings("talks")), expected)


@pytest.mark.parametrize(("delay", "workers"), [(0.02, 1), (0.01, 3)])
def test_tokens_do_not_depend_on_delays_and_workers(engine, expected, delay, workers):
    check(converse(engine, settings("talks", workers=workers), delay=delay), expected)


@pytest.mark.parametrize(("together", "failed"), [(False, []), (True, [0])])
def test_a_waiting_tool_does_not_delay_other_rows(folder, together, failed):
    """In rounds the other rows would wait for it, so it would miss its deadline."""
    limits = {"retries": 0, "deadline_seconds": 3.0 if together else 300.0}
    play = settings("waits_for_the_others", workers=1, most_failed=1.0, together=together, **limits)
    ends = converse(build_vllm(folder), play).ends
    assert [row for row, end in enumerate(ends) if end.failed] == failed


def test_the_batches_of_rows_that_play_together_do_not_depend_on_delays(folder, expected, monkeypatch):
    """Then rounding does not either. Without `together`, the batches differ."""
    engine, batches = build_vllm(folder), []
    core = engine._llm.engine_core
    step = core.get_output

    def recorded():
        outputs = step()
        batches[-1].append(len(outputs.outputs))
        return outputs

    monkeypatch.setattr(core, "get_output", recorded)
    for together, delay in ((True, 0.0), (True, 0.1), (False, 0.1)):
        batches.append([])
        check(converse(engine, settings("talks", together=together), delay=delay), expected)
    assert batches[0] == batches[1] != batches[2]


@pytest.mark.all  # the test before has float32
def test_rows_that_play_together_are_equal_in_bfloat16(folder):
    """Bit for bit, whatever the delays of their tools and the number of workers."""
    engine = build_vllm(folder, dtype="bfloat16")
    assert {weight.dtype for weight in engine._runner.get_model().parameters()} == {torch.bfloat16}
    runs = [
        converse(engine, settings("talks", together=True, workers=workers), delay=delay)
        for delay, workers in ((0.0, 2), (0.1, 1), (0.03, 3))
    ]
    for run in runs[1:]:
        assert (run.tokens, run.logprobs, run.mask) == (runs[0].tokens, runs[0].logprobs, runs[0].mask)


def test_a_play_of_a_turn_is_a_generate_without_a_play(engine):
    made, played = engine.generate(PROMPTS, SAMPLING, SEEDS), converse(engine, settings("single_turn"))
    assert (played.tokens, played.logprobs) == (made.tokens, made.logprobs)
    assert [end.score for end in played.ends] == [len(tokens) for tokens in made.tokens]
    assert all(all(row) for row in played.mask)


@pytest.mark.all  # tests/engines/functions/test_environments.py opens plays
def test_an_environment_adds_a_text_to_the_prompt(engine):
    """The tokens are those of a generate from the longer prompts; the text counts towards the row's most tokens."""
    opening = [40, 41, 42]
    longer = [[*prompt, *opening] for prompt in PROMPTS]
    made = engine.generate(longer, SAMPLING, SEEDS)
    played = converse(engine, environment("Opens", max_tokens=11))
    assert (list(map(list, played.prompts)), played.tokens) == (longer, made.tokens)
    assert {end.failed for end in played.ends} == {False}
    cut = converse(engine, environment("Opens", max_tokens=6))
    assert [row[:3] for row in made.tokens] == cut.tokens
    failed = converse(engine, environment("Opens", max_tokens=3, most_failed=1.0))
    assert [(end.failed, len(row)) for end, row in zip(failed.ends, failed.tokens, strict=True)] == [(True, 1)] * len(
        SEEDS
    )


def test_a_row_has_at_most_its_tokens(engine):
    found = converse(engine, settings("talks", max_tokens=13))
    assert max(map(len, found.tokens)) <= 13
    assert any(end.truncated for end in found.ends)
    whole = converse(engine, settings("talks"))
    assert all(row == other[: len(row)] for row, other in zip(found.tokens, whole.tokens, strict=True))


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("megatron", {"ranks": (1, 0), "dp": 2}),
        ("megatron", {"ranks": (1, 0), "tp": 2}),
        ("megatron", {"ranks": (2, 3), "pp": 2}),
        pytest.param("vllm", {"ranks": (1, 0), "tp": 2}, marks=pytest.mark.all),
    ],
)
def test_tokens_are_the_same_under_every_layout(world, folder, expected, name, where):
    found = world.run(where["ranks"], converse_on_rank, folder, name, where, settings("talks"))
    by_replica = dict(sorted(found, key=lambda each: each[0]))
    part = len(PROMPTS) // where.get("dp", 1)
    for replica, rows in by_replica.items():
        check(rows, expected[replica * part : (replica + 1) * part])
