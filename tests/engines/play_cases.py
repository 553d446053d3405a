"""Plays with engines: a codec of words, and a conversation of a rank with its table."""

from dataclasses import replace
from pathlib import Path

from generation_cases import PROMPTS, SEEDS
from generation_cases import build as build_megatron
from vllm_cases import WORDS, build_command

from prefect_rlhf.engines.engine import Conversed, PlaySettings, SamplingSettings
from prefect_rlhf.engines.functions.plays.pool import PlayPool
from prefect_rlhf.engines.functions.plays.table import Table
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.tasks.play import Play

FILE = Path(__file__).parent / "functions" / "of_plays.py"
SAMPLING = SamplingSettings(8, temperature=2.0)
"""Hot enough that some turns meet an end token."""


class WordCodec:
    """Tokens are words with numbers."""

    def text(self, tokens):
        return " ".join(WORDS[token] for token in tokens)

    def of(self, answer, latest):
        return [int(word[1:]) for word in answer.split()]

    def opened(self, prompt, opening):
        return [*prompt, *self.of(opening, 0)]


def settings(name: str, **changed) -> PlaySettings:
    return Play(function=f"{FILE}:{name}", **{"max_tokens": 40} | changed).settings


def environment(name: str, **changed) -> PlaySettings:
    return Play(function=f"{FILE.parent / 'of_trl_environment.py'}:{name}", signature="environment", **changed).settings


def converse(engine, play: PlaySettings, sampling=SAMPLING, delay=0.0, rows=slice(None), micro_batches=1) -> Conversed:
    """Play rows of PROMPTS with an engine; on the ranks that do not lead, without a table."""
    prompts, seeds = PROMPTS[rows], SEEDS[rows]
    table = None
    if engine.leads:
        numbers = range(len(PROMPTS))[rows]
        plain = [{"number": number, "rows": len(numbers), "delay": delay} for number in numbers]
        table = Table(PlayPool(play), plain, WordCodec(), sampling.max_new_tokens, "a test", prompts=prompts)
    return engine.converse(prompts, sampling, seeds, table, micro_batches, together=play.together)


def converse_on_rank(
    rank: int, folder: str, engine_name: str, where: dict, play: PlaySettings
) -> tuple[int, Conversed]:
    """The replica of this rank, and its rows."""
    engine = build_megatron(folder, rank, **where) if engine_name == "megatron" else build_vllm(folder, rank, **where)
    strategy = Strategy(where.get("dp", 1), where.get("tp", 1), where.get("pp", 1))
    replica, part = strategy.coordinates()[where["ranks"].index(rank)].dp, len(PROMPTS) // strategy.dp
    return replica, converse(engine, play, rows=slice(replica * part, (replica + 1) * part))


def build_vllm(folder: str, rank: int = 0, **where):
    from prefect_rlhf.engines.vllm.engine import VllmEngine

    command = build_command(folder, **where)
    return VllmEngine(replace(command, max_rows=64), rank)
