"""Rows of plays as messages, cut out of their tokens. Nothing is rendered again, so special tokens stay visible."""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from prefect_rlhf.engines.rows import Batch
from prefect_rlhf.tasks.data.tokenizer import load_tokenizer

PROMPT, ASSISTANT, ENVIRONMENT, FAILED = "prompt", "assistant", "environment", "failed"

Message = dict[str, str]


def play_columns(rollout: Batch, tokenizer: str) -> dict[str, list[Any]]:
    """Return `messages`, `turns` (their number) and `turn_rewards` of each row; no column for rows without a play.

    `tokenizer` is the folder of a tokenizer, `context.tokenizer` in a computation.
    """
    if "turn_rewards" not in rollout.columns:
        return {}
    decode = load_tokenizer(tokenizer).decode
    tokens, masks, turns = ([row.tolist() for row in rollout.columns[key]] for key in ("tokens", "mask", "turn"))
    lengths = [int(length) for length in rollout.columns["prompt_length"]]
    rows = zip(tokens, lengths, masks, turns, strict=True)
    rewards = [row.tolist() for row in rollout.columns["turn_rewards"]]
    return {
        "messages": [messages(row, length, mask, turn, decode) for row, length, mask, turn in rows],
        "turns": [len(row) for row in rewards],
        "turn_rewards": rewards,
    }


def messages(
    tokens: Sequence[int], prompt_length: int, mask: Sequence[int], turn: Sequence[int], text: Callable[..., str]
) -> list[Message]:
    """Return a row's messages: its prompt, then turns of the model (`assistant`) and answers (`environment`).

    `mask` and `turn` are per response token. A row whose play failed has mask 0 at every token; its response is a
    single message with the role `failed`.

    >>> messages([5, 1, 2, 9, 3], 1, [1, 1, 0, 1], [0, 0, 0, 1], lambda ids, **_: str(ids))[1:3]
    [{'role': 'assistant', 'content': '[1, 2]'}, {'role': 'environment', 'content': '[9]'}]
    """
    response = tokens[prompt_length:]
    if not any(mask):
        turn = [0] * len(response)
    spoke = {1: ASSISTANT, 0: ENVIRONMENT if any(mask) else FAILED}
    told = [(PROMPT, list(tokens[:prompt_length]))]
    for (own, _), places in groupby(range(len(response)), key=lambda place: (mask[place], turn[place])):
        told.append((spoke[own], [response[place] for place in places]))
    return [{"role": role, "content": text(part, skip_special_tokens=False)} for role, part in told]
