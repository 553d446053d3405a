"""Rows whose turns have drawn lengths, each row by itself and then all in rounds; prints the seconds of each as JSON.

Lengths are log-normal, with the deviation that the planner assumes and a mean of `response_tokens`. The model is tiny,
so that a step takes nearly as long for few rows as for many, as on a GPU. Both calls draw the same random numbers.
"""

from __future__ import annotations

import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from benchmarks.play_work import PlayWork
from benchmarks.step_work import Measured
from prefect_rlhf.engines.commands import BuildCommand
from prefect_rlhf.engines.engine import Conversed, Order, PlayTable, SamplingSettings, Turn
from prefect_rlhf.engines.functions.plays.pool import PlayPool
from prefect_rlhf.engines.functions.plays.table import Table
from prefect_rlhf.engines.sampling.answer_tokens import AnswerTokens
from prefect_rlhf.engines.vllm.engine import VllmEngine
from prefect_rlhf.flows.planning.assumptions import DEVIATION
from prefect_rlhf.placement.devices.mesh import DeviceMesh
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.layout.layout import engine_layout
from prefect_rlhf.placement.models.model import ModelSpec
from prefect_rlhf.placement.plan import ModelInstance
from prefect_rlhf.tasks.model_shape import runnable_shape
from prefect_rlhf.tasks.play import Play
from tests.tiny import make_model

TOOL_SECONDS = 0.05
ANSWER = "the film"
PROMPT_TOKENS = 16
MOST = 8192
"""Most tokens of a row."""
TOOL = f"""
import asyncio

async def answered(row, say):
    await say()
    while say.turns_left:
        await asyncio.sleep({TOOL_SECONDS})
        await say({ANSWER!r})
    return 0.0
"""


@dataclass(frozen=True)
class DrawnTable:
    """A table of plays whose turns end at drawn lengths, by row and turn."""

    table: PlayTable
    lengths: Sequence[Sequence[int]]

    def orders(self, wait: Literal["no", "any", "all"]) -> Sequence[Order]:
        """See PlayTable."""
        return [
            replace(order, at_most=self.lengths[order.row][order.number]) if isinstance(order, Turn) else order
            for order in self.table.orders(wait)
        ]

    def heard(self, row: int, tokens: Sequence[int], is_stopped: bool) -> None:
        """See PlayTable."""
        self.table.heard(row, tokens, is_stopped)


def drawn(work: PlayWork) -> list[list[int]]:
    """Return lengths of turns by row; a row has at most half of MOST."""
    draw = random.Random(work.turns)
    centre, most = math.log(work.response_tokens) - DEVIATION**2 / 2, MOST // 2 // work.turns
    return [
        [min(most, max(1, round(draw.lognormvariate(centre, DEVIATION)))) for _ in range(work.turns)]
        for _ in range(work.rows)
    ]


def built(folder: str, rows: int) -> VllmEngine:
    """Return a vLLM engine of this process with a tiny model."""
    model = ModelSpec("actor", folder, "lm", runnable_shape("actor", folder), "bfloat16")
    instance = ModelInstance("actor", "vllm", DeviceMesh(0, 1, 0, 1), Strategy())
    layout = engine_layout(model, "vllm", instance.strategy, (0,))
    return VllmEngine(BuildCommand(model, instance, (0,), layout, MOST, max_rows=rows), 0)


def played(
    engine: VllmEngine, work: PlayWork, folder: Path, lengths: Sequence[Sequence[int]], *, together: bool
) -> tuple[float, Conversed]:
    """Return the seconds of a conversation of all rows, and the rows; the worker of the tool is ready before."""
    sampling = SamplingSettings(MOST, stop_at_eos=False)
    play = Play(
        function=f"{folder / 'tool.py'}:answered",
        max_tokens=MOST - PROMPT_TOKENS,
        max_turns=work.turns,
        workers=1,
        at_once=max(work.rows, 1),
    )
    prompts = [[3 + (row + place) % 32 for place in range(PROMPT_TOKENS)] for row in range(work.rows)]
    codec = AnswerTokens(str(folder), play.max_answer_tokens, play.overlong_answers)
    with closing(PlayPool(play.settings)) as pool:
        pool.load()
        began = time.perf_counter()
        table = DrawnTable(Table(pool, [{} for _ in prompts], codec, MOST, "drawn turns"), lengths)
        said = engine.converse(prompts, sampling, range(work.rows), table, together=together)
        return time.perf_counter() - began, said


def main(work: PlayWork) -> Measured:
    """Play short turns once, then all turns in both ways. Exits with a line if turns have other lengths."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder)
        config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": MOST}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "tool.py").write_text(TOOL)
        engine = built(name, work.rows)
        played(engine, work, folder, [[1] * work.turns] * work.rows, together=False)
        lengths = drawn(work)
        by_row, said = played(engine, work, folder, lengths, together=False)
        in_rounds, _ = played(engine, work, folder, lengths, together=True)
        engine.close()
    tokens = sum(map(sum, said.mask))
    if tokens != sum(map(sum, lengths)):
        sys.exit(f"drawn_turns: {tokens} tokens of the model, expected {sum(map(sum, lengths))}")
    details = {"turns": float(work.turns), "own_tokens": tokens / work.rows}
    return Measured(by_row + in_rounds, {"by_row": by_row, "in_rounds": in_rounds}, details)


if __name__ == "__main__":
    print(json.dumps(asdict(main(PlayWork(**json.loads(sys.argv[1]))))))
