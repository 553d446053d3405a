"""The seeds of rows: each generate of a body draws for itself, unless the body says that two draw alike."""

from pathlib import Path

import pytest
import torch

from prefect_rlhf.engines.commands import CallCommand
from prefect_rlhf.engines.sampling.sampler import draw, uniforms
from prefect_rlhf.engines.sampling.seeds import row_seeds
from prefect_rlhf.placement.graph import Dataset
from prefect_rlhf.placement.models.model import ModelSpec, TransformerShape
from prefect_rlhf.tasks.tracing.calls import generate
from prefect_rlhf.tasks.tracing.trace import trace_body
from tests.tasks.small_tokenizer import alone

pytestmark = pytest.mark.quick

SHAPE = TransformerShape(64, 128, 2, 4, 2, 16, 100, 64, 1e4, 1e-5, True)
ROWS = 4000
PROBABILITIES = torch.tensor([0.5, 0.25, 0.125, 0.125])


class Parameter:
    """An argument of a body: it is known by its identity."""


def calls_of(**calls):
    """The generates of a body by name, each with these arguments, on the same prompts."""

    def body(actor, prompts):
        for name, arguments in calls.items():
            generate(actor, prompts, name=name, **arguments)

    models = {"actor": ModelSpec("actor", "a", "lm", SHAPE)}
    datasets = {"prompts": Dataset("prompts", ("prompt_tokens",), ROWS)}
    arguments = {"actor": Parameter(), "prompts": Parameter()}
    return {call.name: call for call in trace_body("some", body, arguments, models, datasets)}


def seeds(call, seed=1, num_rows=ROWS):
    rows = tuple(range(num_rows))
    return row_seeds(CallCommand(1, call, None, rows, rows, seed, Path(), alone()))


def tokens(call, seed=1):
    """The first token of each row, where every row has the same probabilities."""
    return draw(PROBABILITIES.expand(ROWS, -1), uniforms(seeds(call, seed), 1)[:, 0])


def test_two_calls_agree_no_more_than_two_run_seeds_do():
    """By chance: in a share of the rows that is the sum of the squared probabilities, within five of its deviations."""
    calls = calls_of(first={}, second={})
    by_chance = float((PROBABILITIES**2).sum())
    for other in (tokens(calls["second"]), tokens(calls["first"], seed=2)):
        agree = float((tokens(calls["first"]) == other).float().mean())
        assert abs(agree - by_chance) < 5 * (by_chance * (1 - by_chance) / ROWS) ** 0.5
    assert not set(seeds(calls["first"])) & set(seeds(calls["second"]))


def test_a_renamed_call_changes_only_its_own_draws():
    before, after = calls_of(first={}, second={}), calls_of(first={}, renamed={})
    assert seeds(before["first"]) == seeds(after["first"])
    assert not set(seeds(before["second"])) & set(seeds(after["renamed"]))


def test_calls_that_share_a_stream_draw_alike():
    """Two that state a name, and one that states another call's; sample by sample, however many there are."""
    stated = {"draws": "pair"}
    calls = calls_of(first=stated, second=stated, third={"draws": "fourth"}, fourth={}, fifth=stated | {"samples": 2})
    assert seeds(calls["first"]) == seeds(calls["second"])
    assert seeds(calls["third"]) == seeds(calls["fourth"]) != seeds(calls["first"])
    rows = {"rows": tuple(range(8)), "row_ids": (0, 0, 1, 1, 2, 2, 3, 3)}
    of_two = row_seeds(CallCommand(1, calls["fifth"], None, **rows, seed=1, run_dir=Path(), tokenizers=alone()))
    assert of_two[::2] == seeds(calls["first"], num_rows=4)
