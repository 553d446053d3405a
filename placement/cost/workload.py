"""A call's work under any plan: rows, token lengths, optimizer steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.devices.hashed_once import HashedOnce, hashed_once
from prefect_rlhf.placement.graph import Call, PlayBounds
from prefect_rlhf.placement.models.engine_constants import EXPERT_IMBALANCE
from prefect_rlhf.placement.models.outputs import head_of
from prefect_rlhf.placement.row_set import RowSet

ModelCallKind = Literal["generate", "inference", "train_step"]


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """A distribution of row lengths in tokens: pairs of a length and its share of rows, shortest first.

    >>> LengthDistribution.fixed(1024).mean, LengthDistribution.of({256: 0.5, 1024: 0.5}).mean
    (1024.0, 640.0)
    """

    shares: tuple[tuple[int, float], ...]

    @classmethod
    def fixed(cls, length: int) -> LengthDistribution:
        """Return the distribution with `length` tokens in every row."""
        return cls.of({length: 1.0})

    @classmethod
    def of(cls, shares: dict[int, float]) -> LengthDistribution:
        """Normalise shares to a distribution. Raises InvalidInput for no shares, or for negative shares."""
        whole = sum(shares.values())
        if whole <= 0 or min(shares) < 0 or min(shares.values()) < 0:
            raise InvalidInput("lengths", shares, "lengths of 0 or more with shares of 0 or more, not all 0")
        return cls(tuple((length, shares[length] / whole) for length in sorted(shares)))

    def __hash__(self) -> int:
        """Leave out most shares: a tail has many, and costs ask for this at every number of micro-batches."""
        return hash((len(self.shares), self.shares[0], self.shares[-1]))

    @property
    def mean(self) -> float:
        return _mean(self)

    @property
    def longest(self) -> int:
        return self.shares[-1][0]

    def reaching(self, longest: int) -> LengthDistribution:
        """Return the same lengths, but with rows of up to `longest` tokens for the memory certificate."""
        return self if self.longest >= longest else LengthDistribution((*self.shares, (longest, 0.0)))

    def at_most(self, longest: int) -> LengthDistribution:
        """Return the lengths of rows that are cut after `longest` tokens.

        >>> LengthDistribution.of({2: 1, 5: 2, 8: 1}).at_most(4)
        LengthDistribution(shares=((2, 0.25), (4, 0.75)))
        """
        shares: dict[int, float] = {}
        for length, share in self.shares:
            shares[min(length, longest)] = shares.get(min(length, longest), 0.0) + share
        return LengthDistribution(tuple(shares.items()))

    def still_running(self) -> Iterator[tuple[int, int, float]]:
        """Yield (first step, end, share of rows still being generated): the work of continuous batching.

        >>> list(LengthDistribution.of({2: 1, 8: 3}).still_running())
        [(0, 2, 1.0), (2, 8, 0.75)]
        """
        first, running = 0, 1.0
        for length, share in self.shares:
            if length > first and running > 1e-12:
                yield first, length, running
                first = length
            running -= share


@hashed_once
@dataclass(frozen=True, slots=True)
class Workload(HashedOnce):
    """Token lengths of a run's rows, and whether generation may use CUDA graphs. Calls state the number of rows."""

    prompts: LengthDistribution
    responses: LengthDistribution
    cuda_graphs: bool = True
    made: tuple[tuple[str, LengthDistribution, LengthDistribution], ...] = ()
    """Prompts and responses of rows that a computation makes, and of rows made from these, under the computation's
    name."""
    has_checkpoints: bool = False
    """Whether trained states are copied to the hosts and written from there."""
    expert_imbalance: float = EXPERT_IMBALANCE
    """The fullest device's tokens over the mean, if devices divide experts."""

    @classmethod
    def fixed(cls, prompt_tokens: int, response_tokens: int, cuda_graphs: bool = True) -> Workload:
        """Return the workload with prompts of one length, and responses of one length."""
        return cls(LengthDistribution.fixed(prompt_tokens), LengthDistribution.fixed(response_tokens), cuda_graphs)

    def of(self, rows: RowSet) -> Workload:
        """Return the workload for calls on a row set."""
        made = {name: (prompts, responses) for name, prompts, responses in self.made}
        names = (each.name for each in rows.lineage) if made else ()
        prompts, responses = next((made[name] for name in names if name in made), (self.prompts, self.responses))
        return replace(self, prompts=prompts, responses=responses) if made else self

    @property
    def mean_length(self) -> float:
        """Mean tokens of a row, prompt and response."""
        return self.prompts.mean + self.responses.mean

    @property
    def longest(self) -> int:
        return self.prompts.longest + self.responses.longest


@hashed_once
@dataclass(frozen=True, slots=True)
class CallWork(HashedOnce):
    """A call's work. A train_step takes `epochs` * `mini_batches` optimizer steps.

    Rows need not divide evenly: the fullest replica and the largest mini-batch count.
    """

    kind: ModelCallKind
    rows: int
    """Of the whole batch."""
    workload: Workload
    mini_batches: int = 1
    epochs: int = 1
    rows_per_item: int = 1
    """Rows that stay together."""
    vocabulary_passes: int = 1
    """Passes over the logits of all tokens after a forward pass; a scalar head's outputs need none."""
    others: tuple[CallWork, ...] = ()
    """A train_step's work on further row sets, in the same optimizer steps."""
    play: PlayBounds | None = None
    """With it, a generate makes its rows in turns."""
    new_weights: bool = True
    """Whether it is the first call that uses its weights, which may cost time."""

    @classmethod
    def of(cls, call: Call, workload: Workload) -> CallWork:
        """Return the maximum work of a graph's call, for memory.

        Raises InvalidInput for a compute call, whose work is unknown here.
        """
        if call.kind == "compute":
            raise InvalidInput(f"calls.{call.name}.kind", call.kind, "a call with a model")
        first, *others = (
            cls(
                call.kind,
                part.num_rows,
                workload.of(part.rows),
                call.mini_batches,
                call.epochs,
                part.rows_per_item,
                _vocabulary_passes(part),
                play=part.play,
            )
            for part in call.by_row_set
        )
        return replace(first, others=tuple(others)) if others else first

    @classmethod
    def expected(cls, call: Call, workload: Workload) -> CallWork:
        """Return the expected work of a graph's call, for times; of rows that a select keeps, the expected number."""
        most = cls.of(call, workload)
        counts = [part.row_count.expected for part in call.by_row_set]
        others = tuple(replace(other, rows=rows) for other, rows in zip(most.others, counts[1:], strict=True))
        return replace(most, rows=counts[0], others=others)

    @property
    def by_row_set(self) -> tuple[CallWork, ...]:
        """The work on each row set, first the call's own."""
        every = (replace(self, others=()), *self.others)
        return tuple(replace(part, others=every[:i] + every[i + 1 :]) for i, part in enumerate(every))

    def replica_rows(self, dp: int) -> int:
        """Return how many rows the fullest of `dp` replicas has.

        >>> CallWork("train_step", 14, Workload.fixed(1, 1), mini_batches=2, rows_per_item=2).replica_rows(2)
        8
        """
        return -(-self.rows // (dp * self.rows_per_item)) * self.rows_per_item

    def mini_batch_rows(self, dp: int) -> int:
        """Return the rows in the largest mini-batch of the fullest of `dp` replicas.

        >>> CallWork("train_step", 14, Workload.fixed(1, 1), mini_batches=2, rows_per_item=2).mini_batch_rows(2)
        4
        """
        return self.replica_rows(dp * self.mini_batches)


def _vocabulary_passes(part: Call) -> int:
    """Count the passes over all logits of a forward pass that a call requests: another temperature is another pass."""
    if part.kind == "inference":
        return sum(head_of(output) == "lm" for output in part.outputs)
    asked = {(output, term.temperature) for term in part.terms for output in term.outputs}
    return sum(head_of(output) == "lm" for output, _ in asked) if asked else 1


@lru_cache(maxsize=256)
def _mean(lengths: LengthDistribution) -> float:
    return sum(length * share for length, share in lengths.shares)
