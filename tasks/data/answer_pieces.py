"""Cuts chats at the start and end of each answer, as the chat template renders them, and makes masked tokens.

The template renders all messages before the first answer at once, then one more message at a time; neighbours with the
same role, such as the answers of several tools, are added together. Each rendering must begin with the previous
rendering, and the rest is the message's own text. Pieces are tokenized separately, as a prompt and its response are.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from prefect_rlhf.engines.sampling.chats.answer_end import AnswerEnd, answer_end
from prefect_rlhf.engines.sampling.chats.control_tokens import control_tokens
from prefect_rlhf.engines.sampling.chats.template import Tools, Variables, rendered, written
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.tasks.data.tokenizer import ChatMessage

ASSISTANT, SYSTEM, TOOL = "assistant", "system", "tool"
THOUGHTS = "<think>"


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of text; every token of an answer is trained on. `mark`: see ControlTokens."""

    text: str
    is_answer: bool
    mark: str = ""


@dataclass(frozen=True, slots=True)
class MaskedTokens:
    """A row's tokens: the first `prompt_length` are context, and `mask` is 1 at each later token that is trained on."""

    tokens: list[int]
    prompt_length: int
    mask: list[int]


def chat_pieces(
    tokenizer: Any,
    messages: Sequence[ChatMessage],
    where: str,
    first: int = 0,
    tools: Tools = (),
    variables: Variables | None = None,
    unlearnt: Collection[int] = (),
) -> list[Piece]:
    """Cut a chat into pieces. The assistant's messages from number `first` on are answers, without their heading.

    The messages numbered in `unlearnt` don't count as answers. All messages before the first answer become one piece,
    and what follows the last answer is left out.

    The heading is the text that the template adds before an answer (its generation prompt), without thoughts that it
    begins only for an answer to be sampled. Raises InvalidInput, at `where`, for a template that removes or changes
    earlier text, and for messages that the template refuses.
    """
    whole = control_tokens(tokenizer).guard(messages, tools, where)

    def written(number: int, prompts: bool = False) -> str:
        some = replace(whole, messages=messages[:number], marked_messages=whole.marked_messages[:number])
        return rendered(tokenizer, some, where, variables=variables, add_generation_prompt=prompts)

    pieces: list[Piece] = []
    before = ""
    opening = next((number for number, turn in enumerate(messages) if turn["role"] != SYSTEM), len(messages) - 1)
    roles = [*(turn["role"] for turn in messages), None]
    answers = [n for n in range(max(opening, first), len(messages)) if roles[n] == ASSISTANT and n not in unlearnt]
    # the template may still change earlier messages, which are only context: Qwen 3 drops the thoughts of old answers
    for number in range(answers[0], answers[-1] + 1) if answers else range(opening, len(messages)):
        if roles[number] == roles[number + 1] != ASSISTANT:  # some templates write answers of tools as one message
            continue
        after = written(number + 1)
        _check_prefix(before, after, f"{where} message {number}", "when this message follows")
        if number in answers:
            prompt = written(number, prompts=True)
            _check_prefix(before, prompt, f"{where} message {number}", "when it prompts for an answer")
            heading = _heading(before, prompt, after)
            _check_prefix(heading, after, f"{where} message {number}", "when the answer follows")
            pieces.append(Piece(heading[len(before) :], False, whole.mark))
            pieces.append(Piece(after[len(heading) :], True, whole.mark))
        else:
            pieces.append(Piece(after[len(before) :], False, whole.mark))
        before = after
    return pieces


def unwritten_thoughts(tokenizer: Any, variables: Variables | None = None) -> str:
    """Return how the template opens thoughts when it prompts for an answer, if it leaves that out of finished answers.

    Most templates don't do this, and get an empty text. DeepSeek R1's prompts with `<think>`, then drops all thoughts.
    """
    asked = [{"role": "user", "content": "?"}]
    try:
        prompt = written(tokenizer, asked, add_generation_prompt=True, variables=variables)
        after = written(tokenizer, [*asked, {"role": ASSISTANT, "content": "!"}], variables=variables)
    except Exception:  # noqa: BLE001  it refuses this chat; the dataset's own chats were rendered before
        return ""
    return prompt.removeprefix(_heading("", prompt, after))


def _heading(before: str, prompt: str, after: str) -> str:
    """Return the generation prompt. If it opens thoughts that the chat `after` it leaves out, so does the result."""
    known, opened, _ = prompt[len(before) :].rpartition(THOUGHTS)
    is_unwritten = bool(known and opened) and not after.startswith(prompt) and after.startswith(before + known)
    return before + known if is_unwritten else prompt


def _check_prefix(before: str, after: str, where: str, when: str) -> None:
    """Raise InvalidInput unless `after` begins with `before`."""
    if after.startswith(before):
        return
    same = next(place for place in range(len(before) + 1) if before[: place + 1] != after[: place + 1])
    seen = f"{after[max(0, same - 20) : same + 40]!s} after {before[max(0, same - 20) : same + 40]!s}"
    expected = f"a chat template that keeps its earlier text {when}; fix it in the tokenizer's folder, or drop the row"
    raise InvalidInput(where, seen, expected)


def masked_tokens(tokenizer: Any, pieces: Sequence[Piece], eos_token: str | None = None) -> MaskedTokens:
    """Return the tokens of pieces, without the text after the last answer.

    An answer stops after its end marker (see `answer_end`), if it has a marker, because a model never samples what
    follows. `eos_token` replaces the template's end.
    """
    tokens: list[int] = []
    trained: list[bool] = []
    control, end, before = control_tokens(tokenizer), answer_end(tokenizer, eos_token), ""
    for is_answer, run in groupby(pieces, key=lambda piece: piece.is_answer):
        parts = list(run)
        text = "".join(part.text for part in parts)
        new, length = control.following(text, before, parts[0].mark), 0
        before = text
        if is_answer:
            new, length = _ended(new, end, tokenizer.eos_token_id)
        tokens += new
        trained += [place < length for place in range(len(new))]
    return masked(tokens, trained)


def _ended(tokens: list[int], end: AnswerEnd, eos: int | None) -> tuple[list[int], int]:
    """Return the tokens of an answer, and the number of those up to its end."""
    if (length := _up_to_last(tokens, end.token)) or end.token is None:
        return tokens, length or len(tokens)
    if not end.is_set:
        return tokens, _up_to_last(tokens, eos) or len(tokens)
    if length := _up_to_last(tokens, end.written):
        return [*tokens[: length - 1], end.token, *tokens[length:]], length
    return [*tokens, end.token], len(tokens) + 1


def _up_to_last(tokens: Sequence[int], token: int | None) -> int:
    """Return the number of tokens up to the last such token; 0 if there is none."""
    return max((place + 1 for place, each in enumerate(tokens) if each == token), default=0)


def masked(tokens: Sequence[int], trained: Sequence[bool]) -> MaskedTokens:
    """Return the tokens up to the last trained token, and a mask from the first to the last trained token.

    The first token follows no other token, so no model predicts it and it is not trained on.

    >>> masked([5, 6, 7, 8, 9], [False, False, True, False, False])
    MaskedTokens(tokens=[5, 6, 7], prompt_length=2, mask=[1])
    """
    places = [place for place, is_trained in enumerate(trained) if is_trained and place]
    begin, end = (places[0], places[-1] + 1) if places else (len(tokens), len(tokens))
    return MaskedTokens(list(tokens[:end]), begin, [int(is_trained) for is_trained in trained[begin:end]])
