"""Checks that roles reading the same rows have tokenizers that give every token id of those rows the same text."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.graph import Call, DataflowGraph, Port
from prefect_rlhf.placement.models.model import ModelSpec
from prefect_rlhf.tasks.data.vocabulary import Vocabulary, have_same_files, read_vocabulary, tokenizer_folder

PADDING = 0.002
"""Share of a vocabulary by which models with the same tokens may differ, as Qwen2.5 1.5B and 7B do."""


@dataclass(frozen=True, slots=True)
class SharedRows:
    """Rows of a dataset or a call with the writer's token ids, which the reader also reads."""

    writer: str
    reader: str
    source: str
    is_sampled: bool  # they may contain any id below the writer's vocab_size


def speaking_role(graph: DataflowGraph) -> str:
    """Return the role whose tokenizer reads prompts and writes responses: the first that generates, else is trained."""
    kinds = {
        kind: call.role for kind in ("train_step", "generate") for call in reversed(graph.calls) if call.kind == kind
    }
    return kinds.get("generate") or kinds.get("train_step") or graph.models[0].role


def shared_rows(graph: DataflowGraph) -> tuple[SharedRows, ...]:
    """Return each pair of roles that read the same rows, once.

    Datasets are read by the tokenizer of the role that speaks. The writer of token ids made by a computation is
    unknown, so the first role that reads them counts as their writer: a judge may read rows tokenised for it alone.
    """
    speaks, writers = speaking_role(graph), {call.name: call.role for call in graph if call.kind == "generate"}
    pairs: dict[tuple[str, str], SharedRows] = {}
    for call in graph:
        for source in _token_sources(call) if call.role else ():
            is_dataset = any(source == data.name for data in graph.datasets)
            writer = speaks if is_dataset else writers.setdefault(source, call.role)
            assert writer is not None and call.role is not None  # calls on models have roles
            is_sampled = not is_dataset and graph.call(source).kind == "generate"
            known = pairs.get((writer, call.role))
            if writer != call.role and (known is None or is_sampled and not known.is_sampled):
                pairs[writer, call.role] = SharedRows(writer, call.role, source, is_sampled)
    return tuple(pairs.values())


def _token_sources(call: Call) -> Iterator[str]:
    """Yield the datasets and calls whose token ids a model reads in a call; the first of several inputs counts."""
    key = "prompt_tokens" if call.kind == "generate" else "tokens"
    inputs: list[tuple[Port, ...]] = [term.inputs for term in call.terms] or [call.inputs]
    for ports in inputs:
        yield from [port.source for port in ports if key in port.keys][:1]


def check_vocabulary_sizes(graph: DataflowGraph) -> None:
    """Raise InvalidInput for models that read the same rows and whose vocabularies differ by more than padding.

    This check serves models whose shape alone is known.
    """
    for rows in shared_rows(graph):
        check_sizes_alike(graph.model(rows.writer), graph.model(rows.reader), rows.source)


def check_sizes_alike(writer: ModelSpec, reader: ModelSpec, source: str) -> None:
    """Raise InvalidInput for two vocabularies whose sizes differ by more than padding."""
    seen, right = reader.shape.vocab_size, writer.shape.vocab_size
    if abs(seen - right) > PADDING * right:
        expected = f"about {right}, the vocabulary of {writer.role}: both read the rows of {source}"
        raise InvalidInput(f"{reader.role}.vocab_size", seen, expected)


def check_tokenizers(graph: DataflowGraph) -> tuple[str, ...]:
    """Return lines for the log about models without a tokenizer of their own.

    Raises InvalidInput for two models that read the same rows and whose tokenizers give a token id of these rows
    different texts. Entries that no such row can have may differ: the padding of an embedding, and tokens beyond the
    writer's.
    """
    folder, vocabulary, remarks = cache(tokenizer_folder), cache(read_vocabulary), []
    for rows in shared_rows(graph):
        both = writer, reader = graph.model(rows.writer), graph.model(rows.reader)
        if writer.path == reader.path:
            continue
        places = [(folder(model.path, f"{model.role}.path"), f"{model.role}.path") for model in both]
        is_smaller = reader.shape.vocab_size < writer.shape.vocab_size
        (writers, _), (readers, field) = places
        if is_smaller or not have_same_files(writers, readers, field):
            written, read = (vocabulary(*place) for place in places)
            if written is None or read is None:
                check_sizes_alike(writer, reader, rows.source)
                lacking, other = both if written is None else reversed(both)
                remarks.append(
                    f"{lacking.role}: {lacking.path} has no tokenizer.json or tokenizer.model; it is assumed to "
                    f"have the token ids of {other.role}, which reads the same rows"
                )
            else:
                _check_texts(writer, reader, written, read, rows.source)
        if is_smaller and (rows.is_sampled or written is None or read is None):
            size = writer.shape.vocab_size
            expected = f"at least {size}, the vocabulary of {writer.role}: the rows of {rows.source} may have them all"
            raise InvalidInput(f"{reader.role}.vocab_size", reader.shape.vocab_size, expected)
    return tuple(dict.fromkeys(remarks))


def _check_texts(writer: ModelSpec, reader: ModelSpec, written: Vocabulary, read: Vocabulary, source: str) -> None:
    """Raise InvalidInput for the writer's first token id whose text differs in the reader's tokenizer."""
    read = read.under(reader.shape.vocab_size)
    token = written.under(writer.shape.vocab_size).first_difference(read)
    if token is None:
        return
    seen, right = read.text(token), written.text(token) or b""
    shown = "no token" if seen is None else seen.decode(errors="replace")
    expected = f"{right.decode(errors='replace')!r}, as in the tokenizer of {writer.role}: both read the rows of "
    raise InvalidInput(f"{reader.role}.path: token {token}", shown, f"{expected}{source}")
