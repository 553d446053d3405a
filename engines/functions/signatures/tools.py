"""Signature `tools`: the model calls Python functions until a turn has no call; your function scores the row.

A bad call gets an answer, so that the model can correct it. So does a tool's error, unless `tool_errors` is `fail`.
"""

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from prefect_rlhf.engines.functions.load import at, imported, place_of
from prefect_rlhf.engines.functions.signatures.called import called
from prefect_rlhf.engines.functions.signatures.error_texts import error_answer, for_the_model, written
from prefect_rlhf.engines.functions.signatures.loaded import MOST_CHARACTERS, LoadedPlay, Model, PlayFailed
from prefect_rlhf.engines.functions.signatures.play_function import Named, PlayFunction, ToolFormat
from prefect_rlhf.engines.functions.signatures.schemas import misfit, schema_of
from prefect_rlhf.engines.functions.signatures.tool_calls import BadCall, ToolCall, calls_in
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.errors.in_short import in_short

MOST_CALLS = 64
"""How many calls of a turn run, each in a thread. The model may write more."""
Kind = Literal["result", "bad call", "error"]


@dataclass(frozen=True, slots=True)
class NamedTool:
    """A function that the model may call: its schema from `get_json_schema`, and its file and line.

    `tell` writes an error for the model; with None an error fails the play. Errors of the types in `refusals` are
    always answers, because the tool refused the call.
    """

    call: Callable[..., Any]
    schema: Mapping[str, Any]
    place: str
    tell: Callable[[BaseException], str] | None = None
    refusals: tuple[type[Exception], ...] = ()

    @property
    def name(self) -> str:
        """The name that the model calls it by."""
        return str(self.schema["function"]["name"])


@dataclass(slots=True)
class Conversation:
    """A conversation with tools: messages after the prompt, and counts of tool calls, bad calls and errors."""

    messages: list[dict[str, str]] = field(default_factory=list)
    calls: int = 0
    bad_calls: int = 0
    tool_errors: int = 0


async def load_tools(function: PlayFunction) -> LoadedPlay:
    """Import tools and the scoring function. Raises InvalidInput for a function that cannot be used."""
    score, place = scoring(function)
    tell = for_the_model(function)
    tools = by_name(
        replace(named_tool(imported(Named(name)), "play.tools", name), tell=tell) for name in function.tools
    )

    async def play(row: Mapping[str, Any], say: Model) -> object:
        said = await converse(say, tools, function.tool_format)
        return await scored(score, place, row, said)

    return LoadedPlay(play, place, [tool.schema for tool in tools.values()])


def scoring(function: PlayFunction) -> tuple[Callable[..., Any], str]:
    """Import the function that scores conversations; return it with its place. Raises InvalidInput."""
    found = imported(function)
    if not callable(found):
        raise InvalidInput(function.field, function.function, "a function of a row that returns a score")
    return found, place_of(found)


def named_tool(found: object, where: str, name: str) -> NamedTool:
    """Return a tool. Raises InvalidInput, at field `where`, for a value that is not a function with a schema."""
    if not callable(found) or isinstance(found, type):
        raise InvalidInput(where, name, "a function that the model may call")
    place = place_of(found)
    return NamedTool(found, schema_of(found, where, name, place), place)


def by_name(tools: Iterable[NamedTool]) -> Mapping[str, NamedTool]:
    """Return tools by name. Raises InvalidInput for two tools with the same name."""
    named: dict[str, NamedTool] = {}
    for tool in tools:
        if tool.name in named:
            raise InvalidInput("play.tools", tool.name, at("tools with names that differ", tool.place))
        named[tool.name] = tool
    return named


async def converse(
    say: Model, tools: Mapping[str, NamedTool], written_as: ToolFormat, opening: str | None = None
) -> Conversation:
    """Let the model speak until a turn has no call or is cut. A turn's calls run concurrently.

    An `opening` is added to the end of the prompt.
    """
    so_far = Conversation()
    answer: list[dict[str, str]] = []
    while True:
        said = await say(answer or opening)
        if said.end == "budget" and not said.text:  # the answer is not in the row either
            return so_far
        so_far.messages += answer
        so_far.messages.append({"role": "assistant", "content": said.text})
        calls = calls_in(said.text, written_as) if said.end == "stop" else ()
        if not calls:
            return so_far
        answers = await asyncio.gather(*(answered(call, tools) for call in calls[:MOST_CALLS]))
        left = max(0, len(calls) - MOST_CALLS)
        so_far.calls += len(calls)
        so_far.bad_calls += left + sum(kind == "bad call" for _, kind in answers)
        so_far.tool_errors += sum(kind == "error" for _, kind in answers)
        texts = [text for text, _ in answers]
        if left:
            texts.append(error_answer(f"{left} more calls of this turn did not run; {MOST_CALLS} may"))
        answer = [{"role": "tool", "content": text} for text in texts]


async def answered(call: ToolCall | BadCall, tools: Mapping[str, NamedTool]) -> tuple[str, Kind]:
    """Return the answer to a call, and its kind. Raises PlayFailed for an error that must not be shown to the model."""
    if isinstance(call, BadCall):
        return error_answer(call.why), "bad call"
    tool = tools.get(call.name)
    if tool is None:
        return error_answer(f"there is no tool {in_short(call.name)}; there is {', '.join(tools)}"), "bad call"
    if why := misfit(call.arguments, tool.schema["function"].get("parameters") or {}):
        return error_answer(f"{tool.name}: {why}"), "bad call"
    try:
        return as_text(await called(tool.call, tool.place, **call.arguments), tool.name, tool.place), "result"
    except PlayFailed as failed:
        error = failed.__cause__
        if isinstance(error, tool.refusals):
            return error_answer(str(error)), "bad call"
        if error is None or tool.tell is None:
            raise
        return error_answer(tool.tell(error)), "error"


class BadResult(Exception):  # noqa: N818  an answer for the model, not an error of ours
    """A tool's result cannot be used as an answer."""


def as_text(value: object, name: str, place: str) -> str:
    """Return a tool's result as text: text unchanged, other values as JSON. Raises PlayFailed for any other result."""
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        seen = f"{in_short(value)} of type {type(value).__name__}"
        why = f"tool {name} returned {seen}, not text or a JSON value"
    else:
        if len(text) <= MOST_CHARACTERS:
            return written(text)
        why = f"tool {name} returned {len(text)} characters, more than {MOST_CHARACTERS}"
    raise PlayFailed(at(why, place)) from BadResult(why)


async def scored(score: Callable[..., Any], place: str, row: Mapping[str, Any], said: Conversation) -> object:
    """Return a conversation's score, with the counts of its calls.

    The function's row has all columns, `messages` (prompt and conversation), and `response`, the text of the last turn.
    If the prompt ended with an answer, the model did not read it, so `messages` lacks it too.
    """
    prompt = row["prompt"]
    asked: list[Any] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    while asked and asked[-1]["role"] == "assistant":
        asked.pop()
    spoken = [each["content"] for each in said.messages if each["role"] == "assistant"]
    whole = {**row, "messages": [*asked, *said.messages], "response": spoken[-1] if spoken else ""}
    returned = await called(score, place, whole)
    return with_counts(returned, said)


def with_counts(returned: object, said: Conversation) -> object:
    """Add the counts of calls to a score, which is a number or a mapping."""
    numbers = {
        "tool_calls": float(said.calls),
        "bad_calls": float(said.bad_calls),
        "tool_errors": float(said.tool_errors),
    }
    return numbers | (dict(returned) if isinstance(returned, Mapping) else {"score": returned})
