"""The table of plays: when a round of rows that play together may begin."""

from pathlib import Path

from prefect_rlhf.engines.engine import PlayEnd, Turn
from prefect_rlhf.engines.functions.plays.pool import PlayPool
from prefect_rlhf.engines.functions.plays.table import Table
from prefect_rlhf.tasks.play import Play

FILE = Path(__file__).parent / "of_trl_environment.py"


class Characters:
    """Tokens are characters."""

    def text(self, tokens):
        return "".join(map(chr, tokens))

    def of(self, answer, latest):
        return list(map(ord, answer))

    def opened(self, prompt, opening):
        return [*prompt, *self.of(opening, 0)]


def test_a_round_waits_for_every_row_though_a_row_failed_before_its_first_turn():
    """The failed row has two orders, a turn and its end, and the third row begins late."""
    play = Play(
        function=f"{FILE}:Sometimes",
        signature="environment",
        max_tokens=64,
        retries=0,
        workers=1,
        most_failed=0.5,
        together=True,
    )
    pool = PlayPool(play.settings)
    try:
        rows = [{"prompt": prompt} for prompt in ("bad", "good", "slow")]
        table = Table(pool, rows, Characters(), 8, "a test", prompts=[[65], [66], [67]])
        orders = table.orders("all")
    finally:
        pool.close()
    assert sorted(order.row for order in orders if isinstance(order, Turn)) == [0, 1, 2]
    assert [(order.row, order.failed) for order in orders if isinstance(order, PlayEnd)] == [(0, True)]
