"""Plays on a rank: their text has the tokenizer of the role that plays, and a mean over no answers is no metric."""

import pytest

from prefect_rlhf.engines.commands import CallCommand, RankReport
from prefect_rlhf.engines.engine import Conversed, PlayEnd
from prefect_rlhf.engines.rank.playing import answer_tokens, means_over_rows, plain_rows
from prefect_rlhf.placement.graph import Call, Operation, Port
from prefect_rlhf.placement.row_set import RowSet
from prefect_rlhf.placement.rows.tokenizers import Tokenizers
from prefect_rlhf.tasks.data.tokenizer import load_tokenizer
from prefect_rlhf.tasks.play import Play
from prefect_rlhf.tasks.running.outcome import mean_metrics
from tests.tasks.small_tokenizer import save_bpe_tokenizer, save_small_tokenizer

pytestmark = pytest.mark.quick


def means(*ends):
    row = [[1]] * len(ends)
    return means_over_rows(Conversed(prompts=row, tokens=row, logprobs=row, mask=row, turns=row, ends=ends))


def test_without_answers_the_seconds_of_an_answer_are_unknown():
    found = means(PlayEnd(0, 1.0, (0.0,)), PlayEnd(1, 1.0, (0.0,)))
    assert found["turns"] == (1.0, 2)
    assert "answer_seconds" not in found


def test_the_seconds_of_an_answer_are_a_mean_over_answers():
    ends = PlayEnd(0, 1.0, (0.0,) * 2, answers=1, answer_seconds=0.5), PlayEnd(1, 1.0, (0.0,) * 4, answers=3)
    assert means(*ends)["answer_seconds"] == (0.125, 4)


def test_the_kept_mass_of_replicas_is_a_mean_over_the_models_own_tokens():
    """An environment's long answers, in one replica's rows alone, give that replica no more weight."""
    of_replicas = []
    for mass, observed in ((1.0, 96), (0.5, 0)):
        row = [[1] * (4 + observed)]
        mask, end = [[1] * 4 + [0] * observed], (PlayEnd(0, 1.0, (0.0,)),)
        said = Conversed(prompts=row, tokens=row, logprobs=row, mask=mask, turns=row, ends=end, kept_mass=mass)
        found = means_over_rows(said)
        of_replicas.append(
            RankReport(
                seconds=1.0,
                num_tokens=len(row[0]),
                metrics={name: mean for name, (mean, _) in found.items()},
                metric_rows={name: number for name, (_, number) in found.items()},
                **dict.fromkeys(("fingerprint_seconds", "device_bytes", "resident_bytes", "store_bytes"), 0),
            )
        )
    assert mean_metrics(of_replicas)["kept_mass"] == 0.75


def test_a_call_has_a_limited_number_of_names_and_says_how_many_it_leaves_out():
    """Names may differ by row. Those that are kept do not depend on the order of the rows."""
    ends = [PlayEnd(row, 1.0, (0.0,), numbers={f"room {row:03}": 1.0}) for row in range(300)]
    found = means(*ends)
    assert found == means(*reversed(ends))
    kept = [name for name in found if name.startswith("play/room")]
    assert kept == [f"play/room {row:03}" for row in range(256)]
    assert found["play/names_left_out"] == (44.0, 300)
    assert "play/names_left_out" not in means(*ends[:256])


class Questions:
    """A dataset with a column of prompts."""

    column_kinds = {"prompt": "text"}

    def read_column(self, name, row_ids):
        return ["of the dataset"] * len(row_ids)


def played_by(role, source, folders):
    rows = RowSet("made", "prompts", 1, RowSet("prompts", "prompts"))
    ports = (Port("prompts", source, ("prompt_tokens",)),)
    call = Call(f"{role}_generate", "generate", role, ports, ("tokens",), Operation("sample"), rows, 1)
    play = Play(function="my_play.py:solve", max_tokens=8).settings
    return CallCommand(0, call, None, (0,), (0,), 7, None, Tokenizers("actor", folders), play=play)


def test_a_play_uses_its_roles_tokenizer(tmp_path):
    """A judge with a tokenizer of its own: its prompt, which an earlier call made, is text in that tokenizer."""
    own = save_bpe_tokenizer(tmp_path / "judge", ["what is it"])
    command = played_by("judge", "case", {"actor": save_small_tokenizer(tmp_path / "actor"), "judge": own})
    prompt = load_tokenizer(own).encode("is it good")
    codec = answer_tokens(command, None)
    (row,) = plain_rows(command, [prompt], [7], {"prompts": Questions()}, codec)
    assert row["prompt"] == codec.text(prompt) == "is it good"
    (row,) = plain_rows(played_by("judge", "prompts", {"judge": own}), [prompt], [7], {"prompts": Questions()}, codec)
    assert row["prompt"] == "of the dataset"
