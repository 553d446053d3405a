"""Checks that roles reading the same rows have tokenizers that agree on the text of each of their token ids."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from prefect_rlhf.errors.errors import InvalidInput, NotUsed
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.models.model import ModelSpec
from prefect_rlhf.placement.rows.token_writers import shared_rows
from prefect_rlhf.placement.rows.tokenizers import Tokenizers
from prefect_rlhf.tasks.data.tools import check_answers
from prefect_rlhf.tasks.data.vocabulary import Vocabulary, have_same_files, read_vocabulary, tokenizer_folder
from prefect_rlhf.tasks.play import Play

PADDING = 0.002
"""By which share vocabulary sizes may differ for models with the same tokens, such as Qwen2.5 1.5B and 7B."""


def check_vocabulary_sizes(graph: DataflowGraph) -> None:
    """Raise InvalidInput for models that read the same rows but have vocabulary sizes that padding cannot explain.

    This check serves models that are known by their shape only.
    """
    for rows in shared_rows(graph):
        check_sizes_alike(graph.model(rows.writer), graph.model(rows.reader), rows.source)


def check_sizes_alike(writer: ModelSpec, reader: ModelSpec, source: str) -> None:
    """Raise InvalidInput for two vocabularies with sizes that padding cannot explain."""
    seen, right = reader.shape.vocab_size, writer.shape.vocab_size
    if abs(seen - right) > PADDING * right:
        expected = f"about {right}, the vocabulary of {writer.role}: both read the rows of {source}"
        raise InvalidInput(f"{reader.role}.vocab_size", seen, expected)


def check_tokenizers(graph: DataflowGraph) -> tuple[str, ...]:
    """Return log lines about models without a tokenizer of their own.

    Raises InvalidInput if two models read the same rows and their tokenizers disagree on a token id. Ids that cannot
    occur in these rows may differ: an embedding's padding, and tokens that the writer does not have.
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
            expected = (
                f"at least {size}, the vocabulary of {writer.role}: rows of {rows.source} may contain any of its tokens"
            )
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


def check_play_templates(graph: DataflowGraph, tokenizers: Tokenizers) -> None:
    """Raise InvalidInput for a play that answers with messages if its model has no chat template."""
    for call in graph:
        if call.play is not None and call.role is not None:
            folder, template = tokenizers.folders[call.role], tokenizers.templates.get(call.role)
            check_answers([Play.model_validate_json(call.play.settings)], folder, template)


def check_model_settings(graph: DataflowGraph, speaks: str, arguments: Mapping[str, Any]) -> None:
    """Raise InvalidInput for a chat template or end of answer set for a model that neither reads nor writes a chat.

    These are models that are not the first to read a dataset (the role that `speaks` is), generate nothing, and are not
    trained.
    """
    used = {speaks, *(call.role for call in graph if call.kind == "generate")}
    for model in graph.models:
        if model.role in used or graph.trained_by(model.role):
            continue
        for name in ("chat_template", "eos_token"):
            value = getattr(arguments.get(model.role), name, None)
            if value is not None:
                reason = f"{model.role} only reads tokens of other roles"
                raise NotUsed(f"{model.role}.{name}", value, reason, f"set {speaks}.{name}")
