"""Strings that end a response, searched in the text of its newest tokens, in the same way for every engine."""

from collections.abc import Sequence

from prefect_rlhf.engines.sampling.chats.tokenizers import tokenizer_of

MARGIN = 8  # further tokens: the first may hold a part of a character, or lose the space before a word


class StopStrings:
    """Finds strings with a model folder's tokenizer; special tokens are spelled out.

    A response ends with the token that completes a string. The token stays, with any text beyond the string, so that
    tokens and log-probabilities remain as they were drawn.
    """

    def __init__(self, strings: Sequence[str], folder: str) -> None:
        self._strings, self._tokenizer = tuple(strings), tokenizer_of(folder, "sampling.stop", "strings")
        self.window = max(len(string.encode()) for string in self._strings) + MARGIN

    def ended(self, responses: Sequence[Sequence[int]]) -> list[bool]:
        """Return whether each response has a string in its latest `window` tokens; a token is at least a byte."""
        latest = [list(response[-self.window :]) for response in responses]
        texts = self._tokenizer.batch_decode(latest, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return [any(string in text for string in self._strings) for text in texts]


def stop_strings(strings: Sequence[str], folder: str) -> StopStrings | None:
    """Return a finder of the strings, or None without strings. Raises InvalidInput for a folder without a tokenizer."""
    return StopStrings(strings, folder) if strings else None
