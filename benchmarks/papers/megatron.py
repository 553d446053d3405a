"""Megatron-LM (Narayanan et al. 2021, arXiv:2104.04473), table 1: training of GPT on A100, which set no constant here.

Its engine of 2021 is counted as the paper and its code have it: element-wise kernels are fused, so a layer passes over
[tokens, hidden] less often; attention is not, so it multiplies all pairs of tokens, masked ones too, and its scores go
through memory, which tensor parallelism divides; see also MegatronLmExecution. The interleaved schedule is counted as a
plain one, since the paper does not say into how many chunks it cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median

from benchmarks.papers.engines import MegatronLmExecution
from prefect_rlhf.placement.cost.call import call_cost
from prefect_rlhf.placement.cost.datasheets.hardware import Hardware, Network
from prefect_rlhf.placement.cost.datasheets.kinds import DATASHEETS
from prefect_rlhf.placement.cost.seconds import Seconds
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.times.roofline import DatasheetTimes
from prefect_rlhf.placement.cost.workload import CallWork, Workload
from prefect_rlhf.placement.devices.strategy import Strategy

VOCABULARY, TOKENS = 51200, 2048
SELENE = Hardware(DATASHEETS["a100-80"], 8, Network("hdr", 200e9, "8 x 200 Gbit/s a node"))
MICRO_BATCH_ROWS = (1, 2, 4, 8)
"""The paper takes the best size of a micro-batch (its section 3.4) and does not say which that is, so this does."""

WHOLE_PASSES = 11.0
"""Of a layer's forward over [tokens, hidden], undivided: two fused norms (2 each), and twice bias, dropout and residual
in one kernel (3.5 each: two read, one written, a mask of a byte)."""
SPLIT_PASSES = 10.0
"""Divided by tp: bias and GeLU in one kernel over four times the width (8), and attention's result put in order (2)."""
SCORE_PASSES = 4.5
"""Over the scores [heads, tokens, context], divided by tp: scale, mask and softmax in one kernel (2), dropout (2.5)."""


@dataclass(frozen=True, slots=True)
class Training:
    """A row of the table; `teraflops` were reached by each device."""

    heads: int
    hidden: int
    layers: int
    tp: int
    pp: int
    devices: int
    batch: int
    teraflops: int

    @property
    def sizes(self) -> ModelSizes:
        """GPT's sizes. Its feed-forward layer has two matrices of 4 h: as many weights as three of 8/3 h."""
        inner, head_dim = 8 * self.hidden // 3, self.hidden // self.heads
        widths = self.hidden, inner, self.layers, self.heads, self.heads, head_dim
        return ModelSizes(*widths, VOCABULARY, True, "lm", "bfloat16")

    @property
    def measured_seconds(self) -> float:
        """Seconds of an iteration, by the paper's count of its operations (equation 3)."""
        h, ends = self.hidden, VOCABULARY / 16 / self.layers / self.hidden
        flops = 96 * self.batch * TOKENS * self.layers * h**2 * (1 + TOKENS / 6 / h + ends)
        return flops / (self.teraflops * 1e12 * self.devices)

    @property
    def times(self) -> DatasheetTimes:
        """What a layer takes in that engine; ReaL's constant for a call is none of it."""
        split = SPLIT_PASSES + SCORE_PASSES * self.heads * TOKENS / self.hidden
        passes = WHOLE_PASSES + split / self.tp
        return replace(DatasheetTimes.of(self.sizes, SELENE), passes=passes, attended=1.0, call_seconds=0.0)

    def predicted(self) -> Seconds:
        """Return the estimate of one iteration, with the best size of a micro-batch."""
        strategy = Strategy(self.devices // self.tp // self.pp, self.tp, self.pp)
        rows, work = self.batch // strategy.dp, CallWork("train_step", self.batch, Workload.fixed(0, TOKENS))
        costs = (
            call_cost(
                work, MegatronLmExecution(strategy, self.devices // 8, 8, rows // size, recompute="all"), self.times
            )
            for size in MICRO_BATCH_ROWS
            if rows % size == 0
        )
        return min(costs, key=lambda cost: cost.total)


TABLE = (
    Training(24, 2304, 24, 1, 1, 32, 512, 137),
    Training(32, 3072, 30, 2, 1, 64, 512, 138),
    Training(32, 4096, 36, 4, 1, 128, 512, 142),
    Training(48, 6144, 40, 8, 1, 256, 1024, 135),
    Training(64, 8192, 48, 8, 2, 512, 1536, 138),
    Training(80, 10240, 60, 8, 4, 1024, 1792, 140),
    Training(96, 12288, 80, 8, 8, 1536, 2304, 148),
    Training(128, 16384, 96, 8, 16, 1920, 2160, 155),
    Training(128, 20480, 105, 8, 35, 2520, 2520, 163),
    Training(160, 25600, 128, 8, 64, 3072, 3072, 163),
)


def ratios() -> Iterator[float]:
    """Yield predicted over measured seconds of each row."""
    yield from (row.predicted().total / row.measured_seconds for row in TABLE)


def errors() -> tuple[float, float]:
    """Return the median and the largest relative error."""
    found = [abs(ratio - 1) for ratio in ratios()]
    return median(found), max(found)
