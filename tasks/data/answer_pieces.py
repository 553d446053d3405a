"""Chats cut at the start and end of each answer as the chat template renders them, and their tokens with a mask.

The template is rendered on the first messages, then on one more message at a time. Each rendering must begin with the
previous rendering; the text after that prefix is the message's own. Pieces become tokens separately, as a prompt and
its response do during sampling.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.tasks.data.tokenizer import ChatMessage, encoded, rendered

ASSISTANT, SYSTEM = "assistant", "system"


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a text; every token of an answer is trained on."""

    text: str
    is_answer: bool


@dataclass(frozen=True, slots=True)
class MaskedTokens:
    """Tokens of a row; the first `prompt_length` are context, and `mask` is 1 at each later trained token."""

    tokens: list[int]
    prompt_length: int
    mask: list[int]


def chat_pieces(tokenizer: Any, messages: Sequence[ChatMessage], where: str, first: int = 0) -> list[Piece]:
    """Cut a chat into pieces; the assistant's messages from number `first` on are answers, without their heading.

    The heading is the text that the template adds before an answer (its generation prompt). Raises InvalidInput, at
    `where`, for a template that removes or changes earlier text, and for messages that the template refuses.
    """
    pieces: list[Piece] = []
    before = ""
    opening = next((number for number, turn in enumerate(messages) if turn["role"] != SYSTEM), len(messages) - 1)
    for number in range(opening, len(messages)):
        after = rendered(tokenizer, messages[: number + 1], where)
        _check_prefix(before, after, f"{where} message {number}", "when this message follows")
        if messages[number]["role"] == ASSISTANT and number >= first:
            heading = rendered(tokenizer, messages[:number], where, add_generation_prompt=True)
            _check_prefix(before, heading, f"{where} message {number}", "when it prompts for an answer")
            _check_prefix(heading, after, f"{where} message {number}", "when the answer follows")
            pieces += [Piece(heading[len(before) :], False), Piece(after[len(heading) :], True)]
        else:
            pieces.append(Piece(after[len(before) :], False))
        before = after
    return pieces


def _check_prefix(before: str, after: str, where: str, when: str) -> None:
    """Raise InvalidInput unless `after` begins with `before`."""
    if after.startswith(before):
        return
    same = next(place for place in range(len(before) + 1) if before[: place + 1] != after[: place + 1])
    seen = f"{after[max(0, same - 20) : same + 40]!s} after {before[max(0, same - 20) : same + 40]!s}"
    expected = f"a chat template that keeps its earlier text {when}; fix it in the tokenizer's folder, or drop the row"
    raise InvalidInput(where, seen, expected)


def masked_rows(tokenizer: Any, rows: Sequence[Sequence[Piece]]) -> list[MaskedTokens]:
    """Return the tokens of each row's pieces, without the text after the last answer.

    An answer ends with its end-of-sequence token, if it has such a token: a model never samples the text after it.
    """
    runs = [(row, *run) for row, pieces in enumerate(rows) for run in _runs(pieces)]
    found = encoded(tokenizer, [text for *_, text in runs], [False] * len(runs))
    tokens: list[list[int]] = [[] for _ in rows]
    trained: list[list[bool]] = [[] for _ in rows]
    for (row, is_answer, _), new in zip(runs, found, strict=True):
        ends = [place for place, token in enumerate(new) if token == tokenizer.eos_token_id]
        length = ends[-1] + 1 if ends else len(new)
        tokens[row] += new
        trained[row] += [is_answer and place < length for place in range(len(new))]
    return [masked(*row) for row in zip(tokens, trained, strict=True)]


def _runs(pieces: Sequence[Piece]) -> Iterator[tuple[bool, str]]:
    """Yield the text of neighbouring pieces that are all answers, or all not."""
    for is_answer, run in groupby(pieces, key=lambda piece: piece.is_answer):
        yield is_answer, "".join(piece.text for piece in run)


def masked(tokens: Sequence[int], trained: Sequence[bool]) -> MaskedTokens:
    """Return the tokens up to the last trained token, and a mask from the first to the last trained token.

    The first token follows no other token, so no model predicts it and it is not trained on.

    >>> masked([5, 6, 7, 8, 9], [False, False, True, False, False])
    MaskedTokens(tokens=[5, 6, 7], prompt_length=2, mask=[1])
    """
    places = [place for place, is_trained in enumerate(trained) if is_trained and place]
    begin, end = (places[0], places[-1] + 1) if places else (len(tokens), len(tokens))
    return MaskedTokens(list(tokens[:end]), begin, [int(is_trained) for is_trained in trained[begin:end]])
