"""A row of a play as messages, cut out of its tokens. Nothing is rendered again, so special tokens stay visible."""

from collections.abc import Callable, Sequence
from itertools import groupby
from operator import itemgetter

PROMPT, ASSISTANT, ENVIRONMENT, FAILED = "prompt", "assistant", "environment", "failed"

Message = dict[str, str]


def messages(
    tokens: Sequence[int], prompt_length: int, mask: Sequence[int], turn: Sequence[int], text: Callable[..., str]
) -> list[Message]:
    """Return a row's messages: its prompt, then turns of the model (`assistant`) and answers (`environment`).

    `mask` and `turn` are per response token. A row whose play failed has mask 0 at every token; its response is a
    single message with the role `failed`.

    >>> messages([5, 1, 2, 9, 3], 1, [1, 1, 0, 1], [0, 0, 0, 1], lambda ids, **_: str(ids))[1:3]
    [{'role': 'assistant', 'content': '[1, 2]'}, {'role': 'environment', 'content': '[9]'}]
    """
    told = [(PROMPT, list(tokens[:prompt_length]))]
    speakers = [(ASSISTANT if own else ENVIRONMENT, number) for own, number in zip(mask, turn, strict=True)]
    if not any(mask):
        speakers = [(FAILED, 0)] * len(speakers)
    spoken = zip(speakers, tokens[prompt_length:], strict=True)
    for (role, _), part in groupby(spoken, key=itemgetter(0)):
        told.append((role, [token for _, token in part]))
    return [{"role": role, "content": text(part, skip_special_tokens=False)} for role, part in told]
