"""The roles with tokenizers that write token ids: for each dataset and call, and for rows that two roles read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from prefect_rlhf.placement.graph import Call, DataflowGraph, Port

TOKEN_KEYS = frozenset({"tokens", "prompt_tokens"})
"""The keys with token ids as values."""


@dataclass(frozen=True, slots=True)
class SharedRows:
    """Rows of a dataset or a call with the writer's token ids, which the reader also reads."""

    writer: str
    reader: str
    source: str
    is_sampled: bool  # they may contain any id below the writer's vocab_size


def speaking_role(graph: DataflowGraph) -> str:
    """Return the role whose tokenizer reads datasets: the first that generates, else the first that is trained."""
    kinds = {
        kind: call.role for kind in ("train_step", "generate") for call in reversed(graph.calls) if call.kind == kind
    }
    return kinds.get("generate") or kinds.get("train_step") or graph.models[0].role


@lru_cache(maxsize=16)
def token_writers(graph: DataflowGraph) -> Mapping[str, tuple[str, ...]]:
    """Return, for each dataset and call with token ids, the roles with a tokenizer that may have written them.

    A dataset is read by the tokenizer of the role that speaks, and a generate writes with its role's. A computation
    writes for the first role that reads its rows; a judge, for example, may read rows tokenised only for it. If only
    other computations read its rows, its tokenizer is unknown: it may be the tokenizer of its inputs, or of the rows
    made from its rows.
    """
    speaks = speaking_role(graph)
    writers = {data.name: (speaks,) for data in graph.datasets}
    writers |= {call.name: (call.role,) for call in graph if call.kind == "generate" and call.role}
    for call in graph:
        for source in _token_sources(call) if call.role else ():
            assert call.role is not None  # a model's call has a role
            writers.setdefault(source, (call.role,))
    stated = frozenset(writers)
    between = [(call.name, source) for call in graph if _makes_tokens(call) for source in _read_tokens(call)]
    for name, source in [*between, *((source, name) for name, source in reversed(between))]:
        if name not in stated:
            writers[name] = tuple(dict.fromkeys((*writers.get(name, ()), *writers.get(source, ()))))
    unknown = {call.name: (speaks,) for call in graph if _makes_tokens(call) and call.name not in writers}
    return MappingProxyType(writers | unknown)


def shared_rows(graph: DataflowGraph) -> tuple[SharedRows, ...]:
    """Return each pair of roles that read the same rows once."""
    writers, calls = token_writers(graph), {call.name: call for call in graph}
    pairs: dict[tuple[str, str], SharedRows] = {}
    for call in graph:
        for source in _token_sources(call) if call.role else ():
            assert call.role is not None  # a model's call has a role
            (writer,) = writers[source]
            is_sampled = source in calls and calls[source].kind == "generate"
            known = pairs.get((writer, call.role))
            if writer != call.role and (known is None or is_sampled and not known.is_sampled):
                pairs[writer, call.role] = SharedRows(writer, call.role, source, is_sampled)
    return tuple(pairs.values())


def _makes_tokens(call: Call) -> bool:
    return call.kind == "compute" and not TOKEN_KEYS.isdisjoint(call.outputs)


def _read_tokens(call: Call) -> Iterator[str]:
    """Yield the datasets and calls whose token ids a computation reads."""
    yield from (port.source for port in call.inputs if not TOKEN_KEYS.isdisjoint(port.keys))


def _token_sources(call: Call) -> Iterator[str]:
    """Yield the datasets and calls whose token ids a model reads in a call; the first of several inputs counts."""
    key = "prompt_tokens" if call.kind == "generate" else "tokens"
    inputs: list[tuple[Port, ...]] = [term.inputs for term in call.terms] or [call.inputs]
    for ports in inputs:
        yield from [port.source for port in ports if key in port.keys][:1]
