"""Checks an author's operators before any model is built: each is imported in a fresh process, then run.

The process is started like a rank, with the controller's path and environment, and sees two items of each dataset.
Errors that do not depend on values are refused: a wrong name, type or signature, a loss without a gradient. Any other
error of a computation or a loss may come from the made-up rows, so it is only a warning.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

from prefect_rlhf.engines.commands import CallCommand, PassCommand, RankReport, RowSource
from prefect_rlhf.engines.gang.local import LocalGang
from prefect_rlhf.engines.gang.open import FORK_ENVIRONMENT, NO_GPU, RANK_ENVIRONMENT
from prefect_rlhf.engines.gang.processes.messages import GangSettings
from prefect_rlhf.engines.rank.trial.mistake import DependsOnOtherRows, Mistake
from prefect_rlhf.engines.rank.trial.trial_rank import TrialRank
from prefect_rlhf.errors.errors import GraphError, InvalidInput, RankFailed, RankLost, RankSilent
from prefect_rlhf.placement.graph import Call, DataflowGraph
from prefect_rlhf.placement.models.outputs import head_of
from prefect_rlhf.placement.rows.tokenizers import Tokenizers
from prefect_rlhf.tasks.running.commands import host_fields, loss_terms, operation_fields
from prefect_rlhf.tasks.settings import Sampling
from prefect_rlhf.tasks.tracing.operations import Bound

ITEMS = 2  # of each dataset
IMPORT_SECONDS = 300.0  # on a busy machine
CALL_SECONDS = 120.0
ENVIRONMENT = {**RANK_ENVIRONMENT, **FORK_ENVIRONMENT, **NO_GPU}
GANG = GangSettings(1, TrialRank, environment=ENVIRONMENT, start_seconds=IMPORT_SECONDS, preload=())


@dataclass(frozen=True, slots=True)
class Tried:
    """A trial's result: warnings, a line each, and the metric names of each computation that ran, by call."""

    warnings: tuple[str, ...]
    metrics: Mapping[str, tuple[str, ...]]


def try_operators(
    graph: DataflowGraph, sources: Mapping[str, RowSource], tokenizers: Tokenizers, start_seconds: float | None = None
) -> Tried:
    """Import and run every computation and loss of `graph`, in a separate process.

    Its start, and its imports of the operators, may each take IMPORT_SECONDS, or `start_seconds` if that is longer.
    Reward functions are not called here, but by `try_rewards`; their scores are made up. Raises InvalidInput for an
    operator that cannot be imported, reads a key that its inputs lack, or returns other keys or another number of rows
    than it declares, and for a loss without a gradient. Raises GraphError for an operator that fails for a reason that
    does not depend on values.
    """
    seconds = max(IMPORT_SECONDS, start_seconds or 0.0)
    with (
        closing(LocalGang(replace(GANG, start_seconds=seconds))) as gang,
        TemporaryDirectory(prefix="rlhf-trial-") as folder,
    ):
        load(gang, graph, seconds)
        for source in sources.values():
            gang.call(TrialRank.open_dataset, {0: (source,)}, doing=f"open {source.name}", deadline_seconds=seconds)
        trial = Trial(graph, gang, Path(folder), tokenizers)
        return Tried((*trial.run(), *other_temperatures(graph)), trial.metrics)


def other_temperatures(graph: DataflowGraph) -> Iterator[str]:
    """Yield a warning for each generate at another temperature than 1 whose rows get log-probabilities at 1."""
    readers: dict[Call, list[str]] = {}
    for call in graph:
        for part in filter(_reads_logits_at_one, call.by_row_set):
            if (made := graph.generated_by(part)) is not None and call.name not in readers.setdefault(made, []):
                readers[made].append(call.name)
    for made, names in readers.items():
        sampled = cast(Sampling, Bound(made.operation).settings).temperature
        if sampled not in (0, 1):
            read = f"log-probabilities of {' and '.join(names)} are at 1"
            mend = f"pass temperature={sampled:g} there to have those of the policy that sampled"
            yield f"{made.name} samples at temperature {sampled:g}, {read}: {mend}"


def _reads_logits_at_one(part: Call) -> bool:
    """Whether a call on a single row set computes log-probabilities or entropies at temperature 1."""
    if part.kind == "inference":
        return part.temperature == 1 and head_of(part.outputs[0]) == "lm"
    return any(term.temperature == 1 and "lm" in map(head_of, term.outputs) for term in part.terms)


def evaluation_of(graph: DataflowGraph) -> DataflowGraph:
    """Return the evaluation calls of a graph, with the calls that they need."""
    needed = {call.name for call in graph if call.every is not None}
    for call in reversed(graph.calls):
        if call.name in needed:
            needed.update(graph.reads_of(call.name))
    return replace(graph, calls=tuple(call for call in graph if call.name in needed))


def load(gang: LocalGang[TrialRank], graph: DataflowGraph, seconds: float) -> None:
    """Import every operator and its settings. Raises InvalidInput for the first operator that cannot be imported."""
    own = {call.name: call.operation for call in graph if call.kind == "compute" and not call.on_hosts}
    own |= {f"{call.name}, loss {term.name}": term.operation for call in graph for term in call.terms}
    functions = {name: Bound(operation) for name, operation in own.items()}
    began = time.monotonic()
    try:
        loading = gang.call(TrialRank.load, {0: (functions,)}, doing="importing operators", deadline_seconds=seconds)
        failures = loading[0]
    except (RankLost, RankSilent) as error:
        failures = {name: f"{error} after {time.monotonic() - began:.0f} s" for name in list(functions)[:1]}
    for name, failure in failures.items():
        operation = own[name]
        place = operation.file or operation.module
        expected = (
            f"an operator that a fresh process can import, as ranks do; there: {failure}; {advice(operation.module)}"
        )
        raise InvalidInput(f"operator of {name}", f"{operation.name} of {place}", expected)


def advice(module: str) -> str:
    """Return a remedy for a module that cannot be imported."""
    if module == "__main__":
        return "put it into a file, because other processes cannot import from a notebook or prompt"
    return "fix that file, install its imports, or add its folder to the PYTHONPATH of the run"


@dataclass(slots=True)
class Trial:
    """An iteration on made-up rows. Calls that depend on a failed computation are skipped."""

    graph: DataflowGraph
    gang: LocalGang[TrialRank]
    run_dir: Path
    tokenizers: Tokenizers
    metrics: dict[str, tuple[str, ...]] = field(default_factory=dict)  # of computations that ran, by call

    def run(self) -> Iterator[str]:
        """Run the calls in order; yield warnings. Raises InvalidInput or GraphError, as `try_operators` does."""
        unknown: set[str] = set()
        for call in self.graph:
            if unknown & {port.source for port in call.inputs}:
                unknown.add(call.name)
                continue
            method = TrialRank.score if call.on_hosts else TrialRank.run_call
            try:
                told = self.gang.call(
                    method, {0: (self.command(call),)}, doing=call.name, deadline_seconds=CALL_SECONDS
                )
            except DependsOnOtherRows as error:
                seen = f"a row's loss depends on other rows, or on chance: {error.seen}"
                yield f"{seen}; micro_batches and dp change it: compute in a @computation what it needs of other rows"
            except InvalidInput as error:
                raise InvalidInput(f"{call.name}: {error.field}", error.seen, error.expected) from error
            except Mistake as error:
                said = f"{named(call)} failed on made-up rows, and would fail on any rows"
                raise GraphError(f"{call.name}: {said}: {error}") from error
            except RankFailed as error:
                unknown.add(call.name)
                yield f"{named(call)} failed on made-up rows, and may fail on real rows: {error}"
            except (RankLost, RankSilent) as error:
                yield f"{named(call)} and later calls were not tried: {error}"
                return
            else:
                yield from self._take(call, told[0])

    def _take(self, call: Call, report: RankReport) -> Iterator[str]:
        """Keep the names of a computation's metrics; yield a warning for a state that no checkpoint can hold."""
        if call.kind == "compute" and not call.on_hosts:
            self.metrics[call.name] = tuple(report.metrics)
            if isinstance(report.state, InvalidInput):
                yield f"{report.state}; the first checkpoint would end the run"

    def command(self, call: Call) -> CallCommand:
        """Return the rank's command for the call, on the first items of its dataset."""
        row_ids = made_of(call)
        rows = tuple(range(len(row_ids)))
        generated = self.graph.generated_by(call)
        return CallCommand(
            step=1,
            call=call,
            instance=None,
            rows=rows,
            row_ids=row_ids,
            seed=0,
            run_dir=self.run_dir,
            tokenizers=self.tokenizers,
            versions={model.role: 0 for model in self.graph.models},
            generated_by=generated.role if generated else None,
            passes=tuple(map(tried_pass, call.by_row_set)) if call.kind == "train_step" else (),
            **operation_fields(call),
            **host_fields(self.graph, call),
        )


def made_of(call: Call) -> tuple[int, ...]:
    """Return which rows of the dataset the rows of a trial call come from."""
    return call.rows.dataset_rows(range(min(ITEMS, call.span // call.rows.rows_per_item)))


def tried_pass(part: Call) -> PassCommand:
    """Return a train_step's losses on one row set, with the trial's rows."""
    row_ids = made_of(part)
    return PassCommand(part, loss_terms(part, is_only=False), tuple(range(len(row_ids))), row_ids)


def named(call: Call) -> str:
    """Return the names of the operations in a call."""
    return ", ".join(term.operation.name for term in call.terms) or call.operation.name
