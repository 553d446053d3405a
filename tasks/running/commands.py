"""Builds the commands of a call node to its ranks, from the graph and the rows of its step."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Any

from prefect_rlhf.engines.commands import CallCommand, PassCommand
from prefect_rlhf.engines.engine import SamplingSettings, TrainSettings
from prefect_rlhf.engines.losses.protocol import LossTerm
from prefect_rlhf.placement.augmented.node import Node
from prefect_rlhf.placement.augmented.row_uses import RowKey
from prefect_rlhf.placement.augmented.work import Compute, ModelCall
from prefect_rlhf.placement.graph import Call, DataflowGraph
from prefect_rlhf.placement.plan import Placement
from prefect_rlhf.placement.rows.shares import Need, PlacedCall
from prefect_rlhf.placement.words.table import stated
from prefect_rlhf.tasks.data.host_score import HostScore
from prefect_rlhf.tasks.play import Play
from prefect_rlhf.tasks.running.steps.step_rows import StepRows
from prefect_rlhf.tasks.running.training_run import TrainingRun
from prefect_rlhf.tasks.settings import Sampling
from prefect_rlhf.tasks.tracing.operations import Bound


def call_commands(
    run: TrainingRun, node: Node, work: ModelCall | Compute, step_rows: StepRows
) -> dict[int, CallCommand]:
    """Return the command for each rank of a call: the same call, with its replica's rows and its stage's keys."""
    call, placement = work.call, run.plan[work.call.name]
    generated, frees = run.graph.generated_by(call), step_rows.take_frees(node)
    shared = {
        "step": node.step,
        "call": call,
        "instance": work.instance if isinstance(work, ModelCall) else None,
        "seed": run.seed,
        "run_dir": run.run_dir,
        "tokenizers": run.tokenizers,
        "micro_batches": placement.micro_batches,
        "reads": node.reads,
        "writes": node.writes,
        "versions": step_rows.versions(node),
        "generated_by": generated.role if generated else None,
        **operation_fields(call, placement),
        **host_fields(run.graph, call),
    }
    placed = step_rows.by_row_set[call.name]
    passes = [_passes(run, each, node, step_rows) for each in placed]

    @cache  # ranks of the same replica and stage share a command, and a shared object is pickled once
    def command(needs: tuple[Need, ...], frees: tuple[RowKey, ...]) -> CallCommand:
        own, *_ = of_parts = tuple(of_need[need] for of_need, need in zip(passes, needs, strict=True))
        return CallCommand(
            **shared,
            rows=own.rows,
            row_ids=own.row_ids,
            keys=own.keys,
            lengths=own.lengths,
            frees=frees,
            passes=of_parts if call.kind == "train_step" else (),
        )

    needs = [each.needs() for each in placed]
    by_rank = {run.rank(device): tuple(of_device[device] for of_device in needs) for device in needs[0]}
    return {rank: command(own, frees.get(rank, ())) for rank, own in by_rank.items()}


def _passes(run: TrainingRun, placed: PlacedCall, node: Node, step_rows: StepRows) -> dict[Need, PassCommand]:
    """Return the rows of a call's row set, of the node's part of them, for each need of its ranks."""
    call, step, needs = placed.call, node.step, set(placed.needs().values())
    row_ids = step_rows.row_ids(call, step)
    row_lengths, told = step_rows.lengths_for(call, step), step_rows.told(step)
    shares = {need.share for need in needs} if call.kind == "train_step" else ()
    sizes_of = {share: share.mini_batch_sizes(call.mini_batches, told) for share in shares}
    some_without_rows = any(0 in sizes for sizes in sizes_of.values())
    terms = loss_terms(call, len(run.graph.call(call.name).terms) == 1)
    passes: dict[Need, PassCommand] = {}
    for need in needs:
        rows = need.share.rows(told, node.part)
        passes[need] = PassCommand(
            call=call,
            terms=terms,
            rows=rows,
            row_ids=tuple(row_ids[row] for row in rows),
            keys=need.keys,
            lengths=() if row_lengths is None else tuple(row_lengths[row] for row in rows),
            mini_batch_rows=sizes_of.get(need.share, ()),
            some_without_rows=some_without_rows,
        )
    return passes


@lru_cache(maxsize=64)  # the same in every step
def operation_fields(call: Call, placement: Placement | None = None) -> Mapping[str, Any]:
    """Return the CallCommand fields that define a call's work, from its operation and its placement's words."""
    if call.kind == "generate":
        sampling = SamplingSettings(**Sampling.model_validate_json(call.operation.settings).model_dump())
        play = None if call.play is None else Play.model_validate_json(call.play.settings).settings
        return {"sampling": sampling, "play": play}
    if call.kind == "inference":
        return {"output": call.operation.name, "temperature": call.temperature}
    if call.kind == "compute":
        return {} if call.on_hosts else {"function": Bound(call.operation, call.row_limit)}
    return {"train": TrainSettings(call.mini_batches, epochs=call.epochs, **engine_settings(placement))}


def engine_settings(placement: Placement | None) -> dict[str, Any]:
    """Return the TrainSettings fields that a placement's words set; empty without a placement."""
    if placement is None:
        return {}
    found: dict[str, Any] = {"registered": placement.registered}
    for word in stated(placement):
        found |= word.setting(placement)
    return found


def host_fields(graph: DataflowGraph, call: Call) -> Mapping[str, Any]:
    """Return the field with a host call's function; empty for other calls."""
    if not call.on_hosts:
        return {}
    made = graph.makes_prompts_of(call.rows)
    return {"function": HostScore(call.operation.settings, made, call.name, "answer" in call.outputs)}


@lru_cache(maxsize=64)  # the same in every step
def loss_terms(call: Call, is_only: bool) -> tuple[LossTerm, ...]:
    """Return a train_step's losses on a row set, in the engines' form. A single loss adds no name to its metrics."""
    return tuple(
        LossTerm(
            loss=Bound(term.operation),
            outputs=term.outputs,
            name="" if is_only else term.name,
            weight=term.weight,
            mean_over=term.mean_over,
            temperature=term.temperature,
            inputs=term.inputs,
        )
        for term in call.terms
    )
