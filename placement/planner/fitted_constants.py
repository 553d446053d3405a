"""Fits a datasheet's constants to measured node times, all constants together.

The fit is least squares in logarithms. Each node is weighted by its precision, and a prior keeps each factor near 1. A
constant that no measured node depends on keeps a factor of 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import hypot, log
from statistics import median, stdev

import numpy as np
from scipy.optimize import least_squares

from prefect_rlhf.placement.augmented.augment import augment
from prefect_rlhf.placement.augmented.node import Node, subject_of
from prefect_rlhf.placement.augmented.work import HostCopy, ModelCall, Reallocate
from prefect_rlhf.placement.cost.datasheets.correction import CONSTANTS, Correction
from prefect_rlhf.placement.cost.node import NodeCosts
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.question import Question
from prefect_rlhf.placement.schedule.estimate import estimate_with, without_evaluation

MODEL_ERROR = 0.1
"""Standard deviation of the logarithm of measured over predicted seconds, with the right constants."""
PRIOR: Mapping[str, float] = dict.fromkeys(CONSTANTS, 1.5) | {"memory": 0.2}
"""Standard deviation of the logarithm of each factor, before any measurement. On CPUs the guess of compute was wrong by
6.7 times, and those of links and launches by 2.7 and 3.8 times; the bandwidth of memory was right within 10%."""
MOST_UNCERTAIN = log(2)
"""Logarithm of the largest factor by which a fitted constant may be uncertain."""
OVERHEAD_SECONDS = 0.02
"""Seconds of a node that the cost model leaves out, so nodes that take no longer hardly count."""
CONFIRMED = 1.5
"""Up to this root mean square of the deviations, in standard deviations, measured seconds confirm the constants."""
EXPLAINED = 2.0
"""Up to this root mean square the corrected constants explain the measured seconds."""
MOST_TIMES = 2.0
"""If corrected constants price a step at more than this many times its seconds, or at less than the inverse, they
explain nothing: calls on selected rows are part of the step, but not of the fit."""
STEPS = 4  # unrolled: enough that every kind of node occurs
STEP = 0.02  # of a logarithm, for differences

Numbers = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Measured:
    """A node's measured time in seconds: the median over several steps, and the standard deviation of the
    logarithms.
    """

    seconds: float
    spread: float = 0.0

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Measured:
        """Summarise a node's seconds in several steps, each above 0."""
        return cls(median(seconds), stdev(map(log, seconds)) if len(seconds) > 1 else 0.0)


@dataclass(frozen=True, slots=True)
class FittedConstants:
    """How to correct a question's constants, and how well that explains the measured times."""

    correction: Correction
    """If measured seconds confirm the constants, no factor differs from 1."""
    before: float
    """Root mean square of the nodes' deviations without the correction, in standard deviations."""
    after: float
    """The same with the correction."""
    likely: tuple[Correction, ...] = ()
    """Corrections that the measured seconds do not rule out: at a standard deviation from the fit, two in each
    principal direction."""
    of_step: float = 1.0
    """The corrected step time over the step time with measured node times."""

    @property
    def confirms(self) -> bool:
        """Whether the measured seconds agree with the uncorrected constants."""
        return self.before <= CONFIRMED

    @property
    def explains(self) -> bool:
        """Whether the measured seconds agree with the corrected constants."""
        return self.after <= EXPLAINED and 1 / MOST_TIMES <= self.of_step <= MOST_TIMES


def corrected(question: Question, correction: Correction) -> Question:
    """Return the question with corrected datasheets."""
    sources = question.site.sources
    sources = replace(sources, nodes=tuple(map(correction.on, sources.nodes)))
    return replace(question, site=replace(question.site, sources=sources))


def fit_constants(question: Question, plan: ExecutionPlan, measured: Mapping[str, Measured]) -> FittedConstants | None:
    """Fit the constants of a question without profiles to nodes that ran under `plan`; `measured` is by subject.

    Returns None if no measured node's seconds depend on the constants.
    """
    graph, alone = without_evaluation(question.graph, plan)
    nodes = {subject_of(node.id): node for node in augment(graph, alone, STEPS)}
    nodes = {name: node for name, node in nodes.items() if name in measured and _depends_on_constants(node)}
    if not nodes:
        return None
    seen = [measured[subject] for subject in nodes]
    seconds = [each.seconds for each in seen]
    errors: Numbers = np.array([hypot(MODEL_ERROR, each.spread, OVERHEAD_SECONDS / each.seconds) for each in seen])

    def deviations(logs: Numbers) -> Numbers:
        sources = corrected(question, Correction.of_logs(logs)).site.sources
        costs = NodeCosts(graph, alone, question.workload, sources)
        predicted = [costs.cost(node).worked for node in nodes.values()]
        found: Numbers = np.log(np.divide(predicted, seconds)) / errors
        return found

    fitted = _fitted(deviations)
    costs = NodeCosts(graph, alone, question.workload, corrected(question, fitted.correction).site.sources)
    return replace(fitted, of_step=_price_over_measured(costs, measured))


def _price_over_measured(costs: NodeCosts, measured: Mapping[str, Measured]) -> float:
    """Return the price of a step over the seconds of a step whose measured nodes take as long as they did.

    Computations have their price in both, since no constant is about them.
    """

    def seconds(node: Node) -> float:
        cost, worked, found = costs.cost(node), costs.worked_seconds(node), measured.get(subject_of(node.id))
        return cost.total if found is None or worked is None else cost.total - worked + found.seconds

    priced, taken = (estimate_with(costs.graph, costs.plan, each).seconds for each in (costs.seconds, seconds))
    return priced / taken


def _depends_on_constants(node: Node) -> bool:
    """Whether it is a call with a model, or a move of weights.

    The rows of a call on chosen rows are only expected, so it does not count. Nor do moves of rows, which are mostly
    overhead, copies of checkpoints, and offloads that drop weights.
    """
    if isinstance(node.work, ModelCall):
        return not node.work.call.waits_for_choices
    return isinstance(node.work, Reallocate) or (isinstance(node.work, HostCopy) and node.work.copies)


def _fitted(deviations: Callable[[Numbers], Numbers]) -> FittedConstants:
    """Minimise the squares of deviations and prior over the logarithms of the factors."""
    number, widths = len(CONSTANTS), np.array([PRIOR[name] for name in CONSTANTS])
    before = _root_mean_square(deviations(np.zeros(number)))
    if before <= CONFIRMED:
        return FittedConstants(Correction(), before, before)

    def residuals(logs: Numbers) -> Numbers:
        return np.concatenate([deviations(logs), logs / widths])

    def slopes(logs: Numbers) -> Numbers:
        here = residuals(logs)
        return np.column_stack([(residuals(logs + STEP * unit) - here) / STEP for unit in np.eye(number)])

    found = least_squares(residuals, np.zeros(number), jac=slopes, method="lm")
    precisions, directions = np.linalg.eigh(found.jac.T @ found.jac)
    steps = directions / np.sqrt(precisions)
    steps /= np.maximum(1, np.abs(steps).max(axis=0) / MOST_UNCERTAIN)
    likely = tuple(Correction.of_logs(found.x + sign * step) for step in steps.T for sign in (-1, 1))
    return FittedConstants(Correction.of_logs(found.x), before, _root_mean_square(deviations(found.x)), likely)


def _root_mean_square(values: Numbers) -> float:
    return float(np.sqrt(np.mean(np.square(values))))
