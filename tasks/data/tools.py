"""Checks that the tokenizer has a chat template, and that it renders tools in the requested call format."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from prefect_rlhf.engines.functions.plays.pool import check_play
from prefect_rlhf.engines.functions.signatures.play_function import FORMATS, ToolFormat
from prefect_rlhf.engines.functions.signatures.tool_calls import ToolCall, calls_in
from prefect_rlhf.engines.sampling.chats.template import ASKED, ignores_tools
from prefect_rlhf.engines.sampling.chats.tokenizers import lacks_template, template_name
from prefect_rlhf.errors.errors import InvalidInput, refusing
from prefect_rlhf.tasks.data.template_checks import ANOTHER_TEMPLATE
from prefect_rlhf.tasks.data.tokenizer import Tools, load_tokenizer
from prefect_rlhf.tasks.play import Play

_CALL = ToolCall("a_tool", {"an_argument": 1})


@dataclass(frozen=True)
class ShownTools:
    """Tool schemas, as a JSON list of what `get_json_schema` returns, and the format in which the model calls the
    tools.
    """

    schemas_json: str
    written_as: ToolFormat

    @property
    def schemas(self) -> Tools:
        """The schemas as dicts."""
        schemas: Tools = json.loads(self.schemas_json)
        return schemas

    def check(self, name: str, tokenizer: Any, goes_through_template: bool) -> None:
        """Raise InvalidInput if a dataset's prompts do not show the tools, or if their calls have another format."""
        if not goes_through_template:
            right = "true, or prompts that are chats: the chat template shows the tools of play"
            raise InvalidInput(f"{name}.chat_template", False, right)
        with refusing(Exception, "play.tools", ASKED, "a chat template that accepts this message", most=200):
            is_ignored = ignores_tools(tokenizer, self.schemas)
        if is_ignored:
            names = ", ".join(str(schema["function"]["name"]) for schema in self.schemas)
            right = f"a chat template that shows tools; {template_name(tokenizer)} ignores them: {ANOTHER_TEMPLATE}"
            raise InvalidInput("play.tools", names, f"{right}, or use signature play")
        found = _formats_of(tokenizer, self.schemas)
        if found and self.written_as not in found:
            right = f"{' or '.join(found)}, the format of the chat template"
            raise InvalidInput("play.tool_format", self.written_as, right)


def shown_by(plays: Iterable[Play]) -> ShownTools | None:
    """Return the tools of a flow's plays; None without plays. The code is imported in a separate process.

    Raises InvalidInput for tools that cannot be used, and for plays with different tools.
    """
    by_settings = {play.model_dump_json(): play for play in map(Play.absolute, plays)}
    shown = {ShownTools(json.dumps(check_play(each.settings)), each.tool_format) for each in by_settings.values()}
    if len(shown) > 1:
        raise InvalidInput(
            "play.tools", f"{len(shown)} plays", "the same tools in all plays, because the flow's prompts show them"
        )
    return next(iter(shown), None)


def check_answers(plays: Iterable[Play], tokenizer: str, template: str | None = None) -> None:
    """Raise InvalidInput for a play that answers with messages if its model has no chat template."""
    for play in plays:
        if play.answers_messages and (lack := lacks_template(load_tokenizer(tokenizer, template))) is not None:
            right = f"play: its answers are messages, and the tokenizer of {tokenizer} has no chat template{lack}; or"
            raise InvalidInput("play.signature", play.signature, f"{right} {ANOTHER_TEMPLATE}")


def _formats_of(tokenizer: Any, schemas: Tools) -> list[ToolFormat]:
    """Return the formats in which a template writes an assistant's calls; empty if it writes none that is known."""
    function = {"name": _CALL.name, "arguments": dict(_CALL.arguments)}
    calls = [{"type": "function", "id": "123456789", "function": function}]
    chat = [ASKED, {"role": "assistant", "content": "", "tool_calls": calls}]
    try:
        shown: dict[str, Any] = {"tools": list(schemas), "tokenize": False}
        before = str(tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, **shown))
        whole = str(tokenizer.apply_chat_template(chat, **shown))
    except Exception:  # noqa: BLE001  a template is a program of the model's author; it may write no calls
        return []
    turn = _without_special(tokenizer, whole.removeprefix(before))
    return [each for each in FORMATS if list(calls_in(turn, each)) == [_CALL]]


def _without_special(tokenizer: Any, text: str) -> str:
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    return str(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))
