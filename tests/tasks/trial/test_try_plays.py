"""A dry run plays two rows twice: a play that differs from itself is a warning, in a line with row and turn."""

import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prefect_rlhf.placement.graph import Dataset
from prefect_rlhf.placement.models.model import ModelSpec, TransformerShape
from prefect_rlhf.placement.rows.tokenizers import Tokenizers
from prefect_rlhf.tasks.data.datasets import PromptDataset
from prefect_rlhf.tasks.data.tokenizer import load_tokenizer
from prefect_rlhf.tasks.play import Play
from prefect_rlhf.tasks.tracing.calls import generate
from prefect_rlhf.tasks.tracing.trace import trace_body
from prefect_rlhf.tasks.trial.try_plays import in_tokens_of, try_plays
from tests.tasks.small_tokenizer import alone, ids, save_bpe_tokenizer, save_small_tokenizer

FILE = Path(__file__).parent / "plays_twice.py"
SHAPE = TransformerShape(64, 128, 2, 4, 2, 16, 100, 64, 1e4, 1e-5, True)


@pytest.fixture(scope="module")
def tried(tmp_path_factory):
    """Try a play of plays_twice.py on prompts of three words."""
    folder = tmp_path_factory.mktemp("trial")
    tokenizer = save_small_tokenizer(folder / "tokenizer")
    pq.write_table(pa.table({"prompt": ["the best film", "a bad film", "what is it"]}), folder / "prompts.parquet")
    prompts = PromptDataset("prompts", str(folder / "prompts.parquet"), tokenizer, split_column=None)

    def try_play(name, **changed):
        play = Play(**{"function": f"{FILE}:{name}", "max_tokens": 60} | changed)

        def body(prompts, actor):
            generate(actor, prompts, batch_size=2, play=play)

        stands = {name: type("Stand", (), {})() for name in ("prompts", "actor")}
        datasets = {"prompts": Dataset("prompts", ("prompt_tokens",), 3)}
        graph = trace_body("some", body, stands, {"actor": ModelSpec("actor", "actor", "lm", SHAPE)}, datasets)
        return try_plays(graph, {"prompts": prompts}, alone(tokenizer))

    return try_play


def test_a_role_plays_in_its_own_tokens(tmp_path):
    """The words of the dataset reach a judge's play, whatever their ids are."""
    spoken, own = save_small_tokenizer(tmp_path / "actor"), save_bpe_tokenizer(tmp_path / "judge", ["what is it"])
    folders = {"actor": spoken, "judge": own}
    tokenizers = Tokenizers("actor", folders, {}, {"actor": "actor", "judge": "judge"})
    prompts = [ids("the best film"), ids("<s> a bad film")]
    asked = in_tokens_of("judge", prompts, tokenizers)
    assert [load_tokenizer(own).decode(prompt) for prompt in asked] == ["the best film", "a bad film"]
    assert in_tokens_of("actor", prompts, tokenizers) == prompts


def test_a_play_that_repeats_itself_passes_silently(tried):
    assert tried("same") == []


@pytest.mark.parametrize(
    ("name", "changed", "says"),
    [
        ("other_answer", {}, r"row 1, turn 1: 'a bad film' follows, and the second time 'the best film'"),
        ("other_end", {}, r"row 0, turn 0: its end follows, and the second time 'the film'"),
        ("other_last_turn", {}, r"row 0, turn 3: score [\d.]+, .* and the second time score"),
        ("other_after_empty_answers", {}, r"row 0, turn 2: 'a bad film' follows, and the second time 'the best film'"),
        ("more_empty_answers", {}, r"row 0, turn 0: '' follows, and the second time its end"),
        ("other_score", {}, r"row 0, turn 0: score [\d.]+, rewards of turns \[[\d.]+\], .* and the second time score"),
        (
            "Opens",
            {"signature": "environment", "max_answer_tokens": 1000, "max_tokens": 2000},
            r"row 0, before its first turn: the environment opens with other text",
        ),
    ],
)
def test_a_play_that_differs_from_itself_is_named_with_row_and_turn(tried, name, changed, says):
    (line,) = tried(name, **changed)
    assert "\n" not in line
    assert line.startswith(f"play {FILE}:{name} differs from itself, so a resumed run would be another run: ")
    assert re.search(says, line), line


def test_a_play_that_fails_on_made_up_turns_may_work_on_real_turns(tried):
    (line,) = tried("fails")
    assert line.startswith(f"play {FILE}:fails failed on made-up turns, and may fail on real turns; row 0: ZeroDivisi")
    assert "plays_twice.py:" in line


def test_an_environment_with_failing_steps_is_named_even_if_the_model_reads_errors(tried):
    (line,) = tried("NeverSteps", signature="openenv", arguments={"base_url": "http://127.0.0.1"})
    assert line.startswith(f"play {FILE}:NeverSteps failed on made-up turns, and may fail on real turns; row 0: Name")
    assert "plays_twice.py:" in line
