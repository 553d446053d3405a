"""Tokens of an environment's answer, as the chat template writes them after a turn. No text is rendered again.

An answer of messages is the text that the template adds after an assistant message's content. It begins with the end of
the model's turn, which is left out if the model sampled an end itself: the template's, or another end token, such as
Llama 3.1's `<|eom_id|>` after a tool call. The messages' text never becomes a control token; an answer that is text may
have control tokens, because it is appended unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

from prefect_rlhf.engines.sampling.chats.answer_end import answer_end, end_tokens
from prefect_rlhf.engines.sampling.chats.control_tokens import Guarded, control_tokens
from prefect_rlhf.engines.sampling.chats.template import Variables, rendered
from prefect_rlhf.engines.sampling.chats.tokenizers import tokenizer_of
from prefect_rlhf.errors.blame import described
from prefect_rlhf.errors.errors import InvalidInput

_MARKER = "the content of the assistant's turn"


class NoAnswer(Exception):  # noqa: N818  the reason of a play's failure, not an error of ours
    """An answer that cannot become tokens, with the reason in one line."""


class AnswerTokens:
    """Converts plays' text and tokens with a model folder's tokenizer.

    An answer has at most `most` tokens, without the template's. `overlong` says what to do with longer answers:
    "refuse", "keep_start", "keep_end", or "end", which ends the play. The template gets `variables`, and `eos_token` is
    the model's setting for the end of its answers. `template` replaces the folder's template.
    """

    def __init__(
        self,
        folder: str,
        most: int,
        overlong: str,
        variables: Variables | None = None,
        eos_token: str | None = None,
        template: str | None = None,
    ) -> None:
        self._tokenizer, self._most, self._overlong = tokenizer_of(folder, template=template), most, overlong
        self._control, self._variables = control_tokens(self._tokenizer), variables
        self._ends = {*end_tokens(folder, eos_token, template), answer_end(self._tokenizer, eos_token).written}

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of a turn, without special tokens."""
        decode = self._tokenizer.decode
        return str(decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def of(self, answer: str | Sequence[Mapping[str, str]], latest: int) -> list[int] | None:
        """Return the tokens of an answer after a turn that ended with token `latest`; None if it ends the play.

        Raises NoAnswer for an answer that is too long and for messages that the chat template refuses.
        """
        if self._overlong == "end" and self._length(answer) > self._most:
            return None
        if isinstance(answer, str):
            return self._cut(answer, self._most, self._encoded)[0]
        left, messages = self._most, []
        for message in answer:
            tokens, text = self._cut(message["content"], left, self._plain)
            left -= len(tokens)
            messages.append({"role": message["role"], "content": text})
        suffix = self._suffix(messages)
        first = suffix[0] if suffix else None
        is_closed = first == latest or (first in self._ends and latest in self._ends)
        return suffix[1:] if is_closed else suffix

    def opened(self, prompt: Sequence[int], opening: str) -> list[int]:
        """Return a prompt with text added to its last message, before what the chat template writes at the end.

        Raises NoAnswer for a text that is too long.
        """
        added, _ = self._cut(opening, self._most, self._plain)
        tail = self._tail
        if not tail or list(prompt[-len(tail) :]) != tail:  # the prompt did not go through the template
            return [*prompt, *added]
        return [*prompt[: -len(tail)], *added, *tail]

    @cached_property  # the same for all rows
    def _tail(self) -> list[int]:
        """The tokens that the template adds after the content of a prompt; empty without a template."""
        if not self._tokenizer.chat_template:
            return []
        return self._encoded(self._rendered(Guarded([{"role": "user", "content": _MARKER}], ())).rpartition(_MARKER)[2])

    def _length(self, answer: str | Sequence[Mapping[str, str]]) -> int:
        """Return the number of an answer's tokens, without the template's."""
        if isinstance(answer, str):
            return len(self._encoded(answer))
        return sum(len(self._plain(message["content"])) for message in answer)

    def _suffix(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the tokens that the template adds after the content of the assistant's message."""
        if not self._tokenizer.chat_template:
            raise NoAnswer("its answer is a message, and the tokenizer has no chat template; answer with text")
        asked, said = {"role": "user", "content": "?"}, {"role": "assistant", "content": _MARKER}
        try:
            guarded = self._control.guard([asked, said, *map(dict, messages)])
            text = self._rendered(guarded)
        except InvalidInput as error:
            roles = ", ".join(message["role"] for message in messages)
            cause = described(error.__cause__ or error)
            raise NoAnswer(f"the chat template refuses an answer with roles {roles}: {cause}") from error
        before, marker, after = text.partition(_MARKER)  # the first: an answer may have these words too
        if not marker or not before:
            raise NoAnswer("the chat template does not show the assistant's message; answer with text")
        return self._control.following(after, marker, guarded.mark, "its answer")

    def _rendered(self, guarded: Guarded) -> str:
        return rendered(self._tokenizer, guarded, "its answer", variables=self._variables, add_generation_prompt=True)

    def _cut(self, text: str, most: int, encode: Callable[[str], list[int]]) -> tuple[list[int], str]:
        """Return the tokens of a text, at most `most`, and the text that they are."""
        tokens = encode(text)
        if len(tokens) <= most:
            return tokens, text
        if self._overlong in ("refuse", "end"):  # an opening that is too long has no play to end
            raise NoAnswer(f"its answer has {len(tokens)} tokens, expected at most {self._most}, max_answer_tokens")
        kept = tokens[:most] if self._overlong == "keep_start" else tokens[len(tokens) - most :]
        return kept, self._tokenizer.decode(kept, clean_up_tokenization_spaces=False)

    def _plain(self, text: str) -> list[int]:
        """Return the tokens of a text that others wrote."""
        return self._control.plain(text, "its answer")

    def _encoded(self, text: str) -> list[int]:
        """Return the tokens of a text that follows another."""
        return self._control.following(text, "\n", field="its answer")
