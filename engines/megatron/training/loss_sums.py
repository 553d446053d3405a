"""A train_step's losses on a replica's rows: micro-batches of each optimizer step, their sums, and the means.

Weights are summed over replicas before any pass runs, so that each micro-batch adds its part of the gradient of the
weighted sum of means. Shapes: B rows of the replica, b rows of a micro-batch.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from prefect_rlhf.engines.engine import TrainingRows, TrainSettings
from prefect_rlhf.engines.losses.mean_over import UNITS, RowParts, row_parts
from prefect_rlhf.engines.losses.protocol import LossTerm
from prefect_rlhf.engines.megatron.packing import to_device
from prefect_rlhf.engines.megatron.training.batches import MicroBatch, micro_batch_rows, mini_batch_rows
from prefect_rlhf.placement.models.outputs import head_of

SumKey = tuple[int, int, str]
"""The term's number, the unit of its values (a place in UNITS), and the name: `loss`, or that of a metric."""
Sums = Mapping[SumKey, float]
Wanted = tuple[str, float]
"""A forward pass's output by name, and the temperature that logits are divided by."""
LOSS = "loss"


@dataclass(frozen=True, slots=True)
class TermRows:
    """A loss with its columns for the replica's rows; `parts` is None if no loss is computed, and without rows."""

    number: int  # among the step's terms
    term: LossTerm
    columns: Mapping[str, Tensor]
    parts: RowParts | None

    def weights(self, rows: slice, device: torch.device) -> Tensor:
        """Return [3], float64: how much these rows add to the weights of their mini-batch."""
        if self.parts is None or rows.start == rows.stop:
            return torch.zeros(len(UNITS), dtype=torch.double, device=device)
        return self.parts.of(rows).weights()

    def sums(self, outputs: Sequence[Tensor], rows: Tensor) -> tuple[int, dict[SumKey, Tensor]]:
        """Return the unit of the loss's values, and the sums of loss and metrics over a micro-batch's rows."""
        assert self.parts is not None  # the last stage has the columns of all its rows
        parts = self.parts.of(rows)
        columns = {key: column[rows] for key, column in self.columns.items()}
        found = self.term.loss(*map(parts.counted, outputs), columns)
        unit, total = parts.loss_sum(found.values)
        sums = {(self.number, unit, LOSS): total}
        for name, values in found.metrics.items():
            of, summed = parts.metric_sum(name, values)
            sums[self.number, of, name] = summed
        return unit, sums


@dataclass(frozen=True, slots=True)
class PassRows:
    """A replica's rows of a row set, and the losses computed from a single forward pass over them.

    The losses' columns are on the device. Token rows are on the host, which cuts them into micro-batches.
    """

    rows: TrainingRows
    terms: tuple[TermRows, ...]
    mini_batches: tuple[Tensor, ...]  # consecutive positions among the replica's rows

    @property
    def wanted(self) -> tuple[Wanted, ...]:
        """The distinct outputs that its losses need."""
        return tuple(dict.fromkeys(wanted for term in self.terms for wanted in wanted_by(term.term)))

    def span(self, mini_batch: int) -> slice:
        """Return the positions of a mini-batch's rows."""
        rows = self.mini_batches[mini_batch]
        return slice(int(rows[0]), int(rows[-1]) + 1) if len(rows) else slice(0, 0)

    def micro_rows(self, mini_batch: int, count: int) -> list[Tensor]:
        """Cut a mini-batch into at most `count` micro-batches."""
        rows = self.mini_batches[mini_batch]
        return micro_batch_rows(self.rows.sequences, rows, count, self.rows.rows_per_item)

    def loss(
        self, outputs: Mapping[Wanted, Tensor], micro: MicroBatch, weights: Tensor
    ) -> tuple[Tensor, dict[SumKey, Tensor]]:
        """Return a micro-batch's part of the step's loss, and its sums; `weights` are the mini-batch's, by term."""
        total: Tensor | None = None
        sums: dict[SumKey, Tensor] = {}
        for term in self.terms:
            unit, made = term.sums([outputs[wanted] for wanted in wanted_by(term.term)], micro.rows)
            weight = float(weights[term.number, unit])
            share = made[term.number, unit, LOSS] * (term.term.weight / weight if weight else 0.0)
            total = share if total is None else total + share
            sums |= {key: value.detach() for key, value in made.items()}
        assert total is not None  # a step has at least a term
        return total, sums


def wanted_by(term: LossTerm) -> tuple[Wanted, ...]:
    """Return a loss's outputs in order; only outputs of the vocabulary have a temperature."""
    return tuple((output, term.temperature if head_of(output) == "lm" else 1.0) for output in term.outputs)


def pass_rows(rows: Sequence[TrainingRows], settings: TrainSettings, device: torch.device) -> list[PassRows]:
    """Copy the losses' columns to the device, and divide rows into mini-batches."""
    passes, number = [], 0
    for one in rows:
        terms = []
        for term, seen in zip(one.terms, one.columns, strict=True):
            columns = dict(zip(seen, to_device(list(seen.values()), device), strict=True))
            parts = row_parts(term.mean_over, columns, one.rows_per_item) if "mask" in columns else None
            terms.append(TermRows(number, term, columns, parts))
            number += 1
        cuts = mini_batch_rows(len(one.sequences), settings.mini_batches, one.mini_batch_rows)
        passes.append(PassRows(one, tuple(terms), tuple(cuts)))
    return passes


def mini_batch_weights(
    passes: Sequence[PassRows], mini_batches: int, replicas: dist.ProcessGroup, device: torch.device
) -> Tensor:
    """Return [mini-batches, terms, 3], float64: the divisors of sums over all replicas' rows. Collective."""
    weights = [
        torch.stack([term.weights(each.span(m), device) for each in passes for term in each.terms])
        for m in range(mini_batches)
    ]
    summed = torch.stack(weights)
    dist.all_reduce(summed, group=replicas)
    return summed.cpu()


def sum_over_replicas(
    stored: Sequence[Mapping[SumKey, Tensor]], keys: Sequence[SumKey], replicas: dist.ProcessGroup, device: torch.device
) -> dict[SumKey, float]:
    """Add up sums over micro-batches and replicas. Collective."""
    zero = torch.zeros((), dtype=torch.double, device=device)
    vector = torch.stack([sum((of[key].double() for of in stored if key in of), zero) for key in keys] or [zero])
    dist.all_reduce(vector, group=replicas)
    return dict(zip(keys, vector.tolist(), strict=False))


def known_keys(
    stored: Sequence[Mapping[SumKey, Tensor]], some_without_rows: bool, replicas: dist.ProcessGroup
) -> list[SumKey]:
    """Return the keys of all replicas' sums; a replica without rows gets them from the others. Collective."""
    own = sorted({key for of in stored for key in of})
    if not some_without_rows:
        return own
    of_replicas: list[list[SumKey]] = [[] for _ in range(replicas.size())]
    dist.all_gather_object(of_replicas, own, group=replicas)
    return sorted({key for keys in of_replicas for key in keys})


def means(
    steps: Iterable[tuple[Sums, Sequence[Sequence[float]]]], terms: Sequence[LossTerm], say: Callable[[str], str] = str
) -> dict[str, float]:
    """Divide the sums of several optimizer steps by the sums of their weights, [terms, 3] each.

    >>> term = LossTerm(abs, ("logprobs",))
    >>> means([({(0, 0, "loss"): 2.0}, [[1.0, 1, 1]]), ({(0, 0, "loss"): 6.0}, [[3.0, 1, 1]])], [term])
    {'loss': 2.0}
    """
    totals: dict[SumKey, float] = {}
    weights: dict[SumKey, float] = {}
    for sums, of_step in steps:
        for key, value in sums.items():
            totals[key] = totals.get(key, 0.0) + value
            weights[key] = weights.get(key, 0.0) + of_step[key[0]][key[1]]
    mean = {key: totals[key] / (weights[key] or 1.0) for key in totals}
    whole = sum(terms[number].weight * value for (number, _, name), value in mean.items() if name == LOSS)
    named = {f"{terms[n].name}.{name}" if terms[n].name else name: value for (n, _, name), value in mean.items()}
    return {say(name): value for name, value in (named | {LOSS: whole}).items()}
