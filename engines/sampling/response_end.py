"""The end of a response: its end tokens and its maximum length, the same for every engine that generates."""

from collections.abc import Sequence

from prefect_rlhf.engines.commands import BuildCommand
from prefect_rlhf.engines.engine import SamplingSettings
from prefect_rlhf.engines.sampling.chats.answer_end import end_tokens
from prefect_rlhf.engines.sampling.stop_strings import StopStrings, stop_strings
from prefect_rlhf.errors.errors import InvalidInput


def ends_of(command: BuildCommand) -> tuple[int, ...]:
    """Return the tokens that end a response of the command's model; its folder's tokenizer finds them."""
    model, told = command.model, command.end_tokens
    return end_tokens(model.path, model.eos_token, model.chat_template) if told is None else told


def stopped_turns(
    turns: Sequence[Sequence[int]],
    at_most: Sequence[int],
    sampling: SamplingSettings,
    ends: Sequence[int],
    stops: StopStrings | None,
) -> list[bool]:
    """Return whether each turn ended with an end token or a stop string, and not at its token limit."""
    by_string = stops.ended(turns) if stops is not None and turns else [False] * len(turns)
    return [
        found or len(turn) < most or (sampling.stop_at_eos and turn[-1] in ends)
        for turn, most, found in zip(turns, at_most, by_string, strict=True)
    ]


def cut_rows(
    responses: Sequence[Sequence[int]], sampling: SamplingSettings, ends: Sequence[int], path: str
) -> list[bool]:
    """Return whether each response was cut at its token limit, before an end token or a stop string.

    `ends` are the model's end tokens, `path` its folder. If only its length can end a response, all were cut.
    """
    at_most = [sampling.max_new_tokens] * len(responses)
    ended = stopped_turns(responses, at_most, sampling, ends, stop_strings(sampling.stop, path))
    return [not each for each in ended]


def check_lengths(prompts: Sequence[Sequence[int]], sampling: SamplingSettings, max_length: int) -> None:
    """Raise InvalidInput unless each prompt has a token and leaves room for its response."""
    shortest, longest = min(map(len, prompts), default=1), max(map(len, prompts), default=0)
    if shortest == 0:
        raise InvalidInput("prompt tokens", shortest, "at least 1")
    limit = max_length - sampling.max_new_tokens
    if longest > limit:
        expected = f"at most {limit}: {max_length} less {sampling.max_new_tokens} new tokens"
        raise InvalidInput("prompt tokens", longest, expected)
