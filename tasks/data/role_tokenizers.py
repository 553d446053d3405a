"""The tokenizers of a graph's roles, and which of them agree on the text of every token id."""

from __future__ import annotations

from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.rows.token_writers import shared_rows, speaking_role, token_writers
from prefect_rlhf.placement.rows.tokenizers import Tokenizers
from prefect_rlhf.tasks.data.vocabulary import has_tokenizer, have_same_files, read_vocabulary, tokenizer_folder


def tokenizers_of(graph: DataflowGraph) -> Tokenizers:
    """Return a graph's tokenizers. Files are read only if roles in several folders write tokens.

    A role without a tokenizer uses the tokenizer of a role that reads the same rows, as the checks before a run assume.
    Raises InvalidInput for a tokenizer that cannot be read.
    """
    folders, writers = {model.role: model.path for model in graph.models}, dict(token_writers(graph))
    writing = dict.fromkeys(role for roles in writers.values() for role in roles)
    if len({folders[role] for role in writing}) > 1:
        for rows in shared_rows(graph):
            for lacking, other in ((rows.writer, rows.reader), (rows.reader, rows.writer)):
                if not has_tokenizer(tokenizer_folder(folders[lacking], f"{lacking}.path")):
                    folders[lacking] = folders[other]
    alike: dict[str, str] = {}
    for role in writing:
        earlier = (one for one in alike.values() if have_same_text(folders[one], folders[role]))
        alike[role] = next(earlier, role)
    templates = {model.role: model.chat_template for model in graph.models if model.chat_template is not None}
    return Tokenizers(speaking_role(graph), folders, writers, alike, templates)


def have_same_text(one: str, other: str) -> bool:
    """Whether two folders' tokenizers give each shared token id the same text.

    Raises InvalidInput for a tokenizer that cannot be read.
    """
    if one == other:
        return True
    first, second = places = tuple(tokenizer_folder(path, "tokenizer") for path in (one, other))
    if have_same_files(first, second, "tokenizer"):
        return True
    known = (read_vocabulary(place, "tokenizer") for place in places)
    found = sorted((one for one in known if one is not None), key=lambda vocabulary: max(vocabulary.names, default=0))
    if len(found) < 2:
        return False
    smaller, larger = found
    return smaller.first_difference(larger) is None
