"""Roles that read the same rows give every token id of them the same text; roles that do not may differ."""

import json

import pytest

from prefect_rlhf.engines.compute import Computed
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.flows.grpo import grpo
from prefect_rlhf.flows.ppo import ppo
from prefect_rlhf.flows.training.tokenizers import check_tokenizers
from prefect_rlhf.placement.graph import Dataset
from prefect_rlhf.placement.models.model import ModelSpec, TransformerShape
from prefect_rlhf.placement.rows.token_writers import shared_rows
from prefect_rlhf.tasks.rl.losses import nll, policy_gradient
from prefect_rlhf.tasks.settings import Settings
from prefect_rlhf.tasks.tracing.calls import compute, generate, inference, train_step
from prefect_rlhf.tasks.tracing.operations import computation
from prefect_rlhf.tasks.tracing.trace import trace_body
from tests.flows.test_algorithms import traced
from tests.tasks.small_tokenizer import WORDS, save_small_tokenizer

PLAIN = Settings()
DATASETS = {
    "prompts": Dataset("prompts", ("prompt_tokens",), 16),
    "chats": Dataset("chats", ("tokens", "prompt_length", "mask"), 16),
}


@computation("tokens", "prompt_length")
def put_to_a_judge(rollout, settings):
    return Computed({"tokens": rollout["tokens"], "prompt_length": rollout["prompt_length"]})


def learns(prompts, actor, ref):
    rollout = generate(actor, prompts, batch_size=4)
    advantages = inference(ref, rollout, output="logprobs")
    train_step(actor, policy_gradient(PLAIN).on(rollout, advantages))


def is_judged(prompts, actor, ref):
    """The reference reads rows that a computation tokenised for it, and no others."""
    rollout = generate(actor, prompts, batch_size=4)
    scores = inference(ref, compute(put_to_a_judge, rollout, max_new_tokens=0, settings=PLAIN), output="logprobs")
    train_step(actor, policy_gradient(PLAIN).on(rollout, scores))


def learns_apart(prompts, chats, actor, ref):
    """The reference learns chats, which the actor's tokenizer reads."""
    rollout = generate(actor, prompts, batch_size=4)
    train_step(actor, policy_gradient(PLAIN).on(rollout, inference(actor, rollout, output="logprobs")))
    train_step(ref, nll(PLAIN).on(chats, batch_size=4))


def graph_of(body, folders, vocab=None):
    """The graph of a body whose roles have tokenizers in these folders."""
    sizes = {"actor": 100, "ref": 100} | (vocab or {})
    models = {
        role: ModelSpec(
            role, str(folders[role]), "lm", TransformerShape(64, 128, 2, 4, 2, 16, size, 64, 1e4, 1e-5, True)
        )
        for role, size in sizes.items()
    }
    names = body.__code__.co_varnames[: body.__code__.co_argcount]
    datasets = {name: DATASETS[name] for name in names if name in DATASETS}
    return trace_body("some", body, {name: object() for name in names}, models, datasets)


@pytest.fixture
def folders(tmp_path):
    """Two folders with equal tokenizers."""
    for role in ("actor", "ref"):
        save_small_tokenizer(tmp_path / role)
    return {role: tmp_path / role for role in ("actor", "ref")}


def rewrite(folder, names):
    """Give the words of a tokenizer other ids."""
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"] = {name: token for token, name in enumerate(names)}
    file.write_text(json.dumps(content))


def swapped():
    good, bad = WORDS.index("good"), WORDS.index("bad")
    return [*WORDS[:good], "bad", *WORDS[good + 1 : bad], "good", *WORDS[bad + 1 :]]


@pytest.mark.parametrize(("body", "source"), [(learns, "actor_generate"), (learns_apart, "chats")])
def test_two_tokens_that_are_swapped_are_refused_by_the_first_of_them(folders, body, source):
    rewrite(folders["ref"], swapped())
    with pytest.raises(InvalidInput) as refused:
        check_tokenizers(graph_of(body, folders))
    assert str(refused.value) == (
        f"ref.path: token 6: got 'bad', expected 'good', as in the tokenizer of actor: both read the rows of {source}"
    )


def test_a_role_that_reads_other_rows_may_have_another_tokenizer(folders):
    rewrite(folders["ref"], swapped())
    assert check_tokenizers(graph_of(is_judged, folders)) == ()


def test_a_computations_rows_have_a_single_tokenizer_among_their_readers(folders):
    def both_judge(prompts, actor, ref):
        rollout = generate(actor, prompts, batch_size=4)
        judged = compute(put_to_a_judge, rollout, max_new_tokens=0, settings=PLAIN)
        scores = inference(ref, judged, output="logprobs")
        train_step(actor, policy_gradient(PLAIN).on(judged, scores))

    rewrite(folders["ref"], swapped())
    with pytest.raises(InvalidInput, match=r"actor.path: token 6: got 'good', .* of put_to_a_judge$"):
        check_tokenizers(graph_of(both_judge, folders))


@pytest.mark.parametrize("sizes", [{"ref": 104}, {}, {"ref": 15}, {"actor": 14}])
def test_tokens_that_no_row_can_have_may_differ(folders, sizes):
    """A larger embedding, and tokens that the reader alone has."""
    rewrite(folders["ref"], [*WORDS, "<extra>"])
    check_tokenizers(graph_of(learns, folders, {"actor": 14, "ref": 100} | sizes))


def test_a_token_that_the_reader_lacks_is_refused(folders):
    rewrite(folders["actor"], [*WORDS, "<extra>"])
    with pytest.raises(InvalidInput, match="ref.path: token 14: got 'no token', expected '<extra>'"):
        check_tokenizers(graph_of(learns, folders))


@pytest.mark.parametrize(
    ("body", "sizes", "says"),
    [
        (learns, {"ref": 96}, "ref.vocab_size: got 96, expected at least 100, the vocabulary of actor: rows of"),
        (learns_apart, {"ref": 10}, "ref.path: token 10: got 'no token', expected 'is'"),
    ],
)
def test_an_embedding_without_an_entry_that_rows_may_have_is_refused(folders, body, sizes, says):
    """A response may have any entry of the model that samples it, a dataset's row those of the tokenizer alone."""
    with pytest.raises(InvalidInput, match=says):
        check_tokenizers(graph_of(body, folders, sizes))
    check_tokenizers(graph_of(learns_apart, folders, {"ref": 96}))


@pytest.mark.parametrize("role", ["actor", "ref"])
def test_a_folder_without_a_tokenizer_is_taken_to_have_the_same_and_the_log_says_so(folders, role):
    """Reward models often come without; then sizes alone speak."""
    other = {"actor": "ref", "ref": "actor"}[role]
    (folders[role] / "tokenizer.json").unlink()
    (said,) = check_tokenizers(graph_of(learns, folders))
    assert said == (
        f"{role}: {folders[role]} has no tokenizer.json or tokenizer.model; it is assumed to have the token ids of "
        f"{other}, which reads the same rows"
    )
    with pytest.raises(InvalidInput, match="ref.vocab_size: got 200, expected about 100, the vocabulary of actor"):
        check_tokenizers(graph_of(learns, folders, {"ref": 200}))


def test_equal_folders_and_equal_files_are_not_read(folders, monkeypatch):
    monkeypatch.setattr("prefect_rlhf.flows.training.tokenizers.read_vocabulary", lambda *_: pytest.fail("read"))
    assert check_tokenizers(graph_of(learns, {"actor": "/nowhere", "ref": "/nowhere"})) == ()
    assert check_tokenizers(graph_of(learns, folders)) == ()


def test_shipped_algorithms_compare_every_role_with_the_speaking_role():
    assert {(rows.writer, rows.reader) for rows in shared_rows(traced(ppo))} == {
        ("actor", role) for role in ("ref", "critic", "reward")
    }
    assert {(rows.writer, rows.reader) for rows in shared_rows(traced(grpo))} == {
        ("actor", role) for role in ("ref", "reward")
    }
