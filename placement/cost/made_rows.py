"""Lengths of the rows that calls make: their maximum for memory and the context limit, their expectation for times."""

from collections.abc import Mapping
from dataclasses import replace

from prefect_rlhf.placement.cost.workload import LengthDistribution, Workload
from prefect_rlhf.placement.graph import Call, DataflowGraph
from prefect_rlhf.placement.row_set import RowSet


def row_lengths(graph: DataflowGraph, of_dataset: Mapping[str, int], response: int | None = None) -> dict[str, int]:
    """Return a row's length in tokens in each dataset, and after each call that makes rows, by name.

    A generate adds as many tokens as allowed, but at most `response`; a computation makes rows as long as its limit.
    """
    found = dict(of_dataset)
    for call in graph:
        if call.kind == "generate":
            new = call.max_new_tokens if response is None else min(response, call.max_new_tokens)
            found[call.name] = new + max(found[maker] for maker in _makers(graph, call, found))
        elif call.row_limit is not None:
            read = (found[maker] for maker in _makers(graph, call, found))
            found[call.name] = call.row_limit.of(max(read, default=0))
    return found


def with_made_rows(workload: Workload, graph: DataflowGraph, longest: Mapping[str, int]) -> Workload:
    """Add to the workload the rows that computations make; `longest` is the longest row of each dataset.

    For memory every row may be as long as the longest of all. For seconds, rows have their mean length plus the tokens
    that the limit allows beyond it. Any of the computed `tokens` may be scored, so all count as responses.
    """
    if not any(call.row_limit for call in graph):
        return workload
    whole = max(workload.longest, *row_lengths(graph, longest).values())
    as_a_rule = dict.fromkeys(longest, round(workload.prompts.mean or workload.responses.mean))
    means = row_lengths(graph, as_a_rule, round(workload.responses.mean))
    made = tuple(_made(call, graph, workload, means[call.name], whole) for call in graph if call.row_limit is not None)
    return replace(workload, prompts=workload.prompts.reaching(whole - workload.responses.longest), made=made)


def _made(
    call: Call, graph: DataflowGraph, workload: Workload, mean: int, whole: int
) -> tuple[str, LengthDistribution, LengthDistribution]:
    """Return the prompts and responses of rows made of a computation's rows, together at most `whole` tokens."""
    rows = LengthDistribution.fixed(mean)
    if "prompt_tokens" not in call.outputs:
        return call.name, LengthDistribution.fixed(0), rows.reaching(whole)
    new = (other.max_new_tokens for other in graph if other.kind == "generate" and other.rows.parent == call.rows)
    responses = workload.responses.at_most(max(new, default=0))
    return call.name, rows.reaching(whole - responses.longest), responses


def _makers(graph: DataflowGraph, call: Call, known: Mapping[str, int]) -> list[str]:
    """Return the known makers of the rows with tokens that a call reads: datasets and calls."""
    calls = {other.name: other for other in graph}
    ports = [port for port in call.inputs if {"tokens", "prompt_tokens"} & set(port.keys)]
    return [_maker(calls[port.source].rows, known) if port.source in calls else port.source for port in ports]


def _maker(rows: RowSet, known: Mapping[str, int]) -> str:
    return next((made.name for made in rows.lineage if made.name in known), rows.dataset)
