"""Roles have their own tokenizers; those that give every token id the same text count as one."""

import shutil

import pytest

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.graph import Dataset
from prefect_rlhf.placement.models.model import ModelSpec, TransformerShape
from prefect_rlhf.tasks.data.role_tokenizers import have_same_text, tokenizers_of
from prefect_rlhf.tasks.tracing.calls import generate
from prefect_rlhf.tasks.tracing.trace import trace_body
from tests.placement.rows.test_token_writers import judged
from tests.tasks.small_tokenizer import save_bpe_tokenizer, save_letter_tokenizer, save_small_tokenizer

SHAPE = TransformerShape(64, 128, 2, 4, 2, 16, 100, 64, 1e4, 1e-5, True)


def of(body, **folders):
    """The tokenizers of a flow whose models have these folders."""
    models = {role: ModelSpec(role, folder, "lm", SHAPE) for role, folder in folders.items()}
    names = {name: object() for name in ("prompts", *folders)}
    return tokenizers_of(
        trace_body("some", body, names, models, {"prompts": Dataset("prompts", ("prompt_tokens",), 8)})
    )


def test_a_judge_with_other_token_ids_keeps_its_own_tokenizer(tmp_path):
    actor = save_small_tokenizer(tmp_path / "actor")
    judge = save_bpe_tokenizer(tmp_path / "judge", ["what is it"])
    found = of(judged, actor=actor, judge=judge)
    assert found.alike == {"actor": "actor", "judge": "judge"}
    assert (found.of_rows("actor_generate"), found.of_rows("verdict")) == (actor, judge)


def test_equal_tokenizers_in_two_folders_count_as_one_but_templates_differ(tmp_path):
    actor, judge = save_small_tokenizer(tmp_path / "actor"), save_small_tokenizer(tmp_path / "judge", template=None)
    found = of(judged, actor=actor, judge=judge)
    assert found.alike == {"actor": "actor", "judge": "actor"}
    assert found.folders == {"actor": actor, "judge": judge}


def test_a_role_without_a_tokenizer_uses_the_tokenizer_of_the_rows_it_reads(tmp_path):
    """As the check before a run assumes, and its warning says."""

    def two_policies(prompts, actor, judge):
        generate(actor, prompts, batch_size=4)
        generate(judge, prompts, batch_size=4)

    actor, bare = save_small_tokenizer(tmp_path / "actor"), tmp_path / "bare"
    bare.mkdir()
    found = of(two_policies, actor=actor, judge=str(bare))
    assert found.of_rows("judge_generate") == actor
    assert of(judged, actor=actor, judge=str(bare)).of_rows("verdict") == str(bare), "which nothing can decode"


def test_tokenizers_agree_if_all_shared_ids_have_the_same_text(tmp_path):
    small, copy = save_small_tokenizer(tmp_path / "small"), tmp_path / "copy"
    shutil.copytree(small, copy)
    text = (copy / "tokenizer.json").read_text()
    (copy / "tokenizer.json").write_text(text.replace('"best": 13', '"best": 13, "worst": 14'))
    assert have_same_text(small, str(copy)) and have_same_text(str(copy), small)
    (copy / "tokenizer.json").write_text(text.replace('"best": 13', '"worst": 13'))
    assert not have_same_text(small, str(copy))
    assert not have_same_text(small, save_letter_tokenizer(tmp_path / "letters"))


def test_a_tokenizer_that_cannot_be_read_is_refused_in_a_line(tmp_path):
    actor, judge = save_small_tokenizer(tmp_path / "actor"), save_small_tokenizer(tmp_path / "judge")
    (tmp_path / "judge" / "tokenizer.json").write_text("{")
    with pytest.raises(InvalidInput, match=r"judge/tokenizer.json', expected a tokenizer that can be read"):
        of(judged, actor=actor, judge=judge)
