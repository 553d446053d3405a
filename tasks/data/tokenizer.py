"""Converts between text and tokens with a Hugging Face tokenizer, directly or through its chat template."""

import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from prefect_rlhf.engines.sampling.chats.answer_end import answer_end, check_eos_token, end_tokens
from prefect_rlhf.engines.sampling.chats.control_tokens import control_tokens
from prefect_rlhf.engines.sampling.chats.spoken import spoken
from prefect_rlhf.engines.sampling.chats.template import ASKED, Variables, rendered, written
from prefect_rlhf.engines.sampling.chats.template import Tools as Tools
from prefect_rlhf.engines.sampling.chats.tokenizers import loaded, template_name
from prefect_rlhf.errors.errors import InvalidInput, refusing
from prefect_rlhf.files.foreign_file import read_content, read_json_object, refuse_pointer
from prefect_rlhf.files.remote_path import require_local
from prefect_rlhf.files.storage.inputs import model_folder
from prefect_rlhf.tasks.data.formats.row import ChatMessage as ChatMessage
from prefect_rlhf.tasks.data.formats.row import Prompt as Prompt

MOST_OF_A_TEMPLATE = 1 << 20  # bytes


@lru_cache(maxsize=4)  # loading takes longer than all tokenization of a step
def load_tokenizer(folder: str, template: str | None = None) -> Any:
    """Load a folder's tokenizer; the folder may be remote. `template` replaces its chat template.

    Raises InvalidInput if the folder has no tokenizer.
    """
    from huggingface_hub.errors import StrictDataclassError

    local = model_folder(folder, "tokenizer", "tokenizer")
    files = [local / name for name in ("tokenizer.json", "tokenizer.model")]
    if not any(file.is_file() for file in files):
        raise InvalidInput("tokenizer", folder, "a folder with tokenizer.json or tokenizer.model")
    for file in files:
        refuse_pointer("tokenizer", file)
    try:
        return loaded(str(local), template)
    except StrictDataclassError as error:  # it reads config.json too
        raise refused_config(local, f"{folder}/config.json", error) from error
    except Exception as error:  # noqa: BLE001  for any error, the user must change the file
        raise InvalidInput("tokenizer", folder, f"a tokenizer that transformers can load ({error!s:.120})") from error


def check_end(folder: str, eos_token: str | None, field: str) -> None:
    """Raise InvalidInput, at `field`, if the folder's tokenizer lacks this token."""
    if eos_token is not None:
        check_eos_token(load_tokenizer(folder), eos_token, field)


def read_template(file: str, folder: str, field: str) -> str:
    """Read a chat template for a folder's tokenizer from a file.

    Raises InvalidInput, at `field`, for a file that is not a template.
    """
    from jinja2 import TemplateSyntaxError  # only here: most runs have no such file

    expected = "a file with a chat template in Jinja, such as tools.jinja, which prefect-rlhf init writes"
    with refusing((OSError, UnicodeDecodeError), field, file, expected):
        text = read_content(require_local(file, field).expanduser(), MOST_OF_A_TEMPLATE).decode()
    if not text.strip():
        raise InvalidInput(field, file, f"{expected} (it is empty)")
    try:
        written(load_tokenizer(folder, text), [ASKED])
    except TemplateSyntaxError as error:
        raise InvalidInput(field, file, f"{expected} (line {error.lineno}: {error.message})") from error
    except Exception as error:  # noqa: BLE001  a template may refuse this chat; the rows' own are rendered later
        if isinstance(error, InvalidInput):  # of the folder
            raise
    return text


def end_remark(folder: str, eos_token: str | None = None, template: str | None = None) -> str:
    """Return a line that names the token that ends an answer, and the other tokens that end a response."""
    tokenizer = load_tokenizer(folder, template)
    end = answer_end(tokenizer, eos_token)
    others = [token for token in response_ends(folder, eos_token, template) if token != end.token]
    also = ", ".join(f"{tokenizer.convert_ids_to_tokens(token)} ({token})" for token in others)
    return f"{end}; a response also ends with {also}" if also else str(end)


def response_ends(folder: str, eos_token: str | None = None, template: str | None = None) -> tuple[int, ...]:
    """Return the tokens that end a response of a folder's model; the folder may be remote. Raises as `end_tokens`."""
    return end_tokens(str(model_folder(folder, "tokenizer", "tokenizer")), eos_token, template)


def refused_config(folder: Path, name: str, error: Exception) -> InvalidInput:
    """Return the error for a config.json that transformers refuses: the key and its value, if known."""
    config = read_json_object(name, folder / "config.json")
    named = re.search(r"[Ff]ield '(\w+)'", str(error))
    field, seen = (f"{name}.{named[1]}", config.get(named[1])) if named else (name, config)
    return InvalidInput(field, seen, f"a config that transformers accepts ({str(error).splitlines()[-1].strip():.200})")


class RowReader:
    """Turns rows' tokens into text that people read, with the tokenizer that wrote them."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._spoken = tokenizer, spoken(tokenizer)

    def text(self, tokens: Sequence[int]) -> str:
        """Return the tokens' text with special tokens."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))

    def words(self, tokens: Sequence[int], *, has_headings: bool) -> str:
        """Return the text without special tokens and, if it has headings, without role names."""
        return self._spoken.words(tokens, has_headings=has_headings)

    def asked(self, tokens: Sequence[int]) -> str:
        """Return a prompt's last user message, or a whole prompt that is not a chat, without special tokens."""
        asked = self._spoken.last_user(tokens)
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True)) if asked is None else asked


def reader_of(folder: str) -> RowReader:
    """Return a reader for rows written by a folder's tokenizer. Raises as `load_tokenizer`."""
    return RowReader(load_tokenizer(folder))


def prompt_tokens(
    tokenizer: Any,
    prompt: Prompt,
    chat_template: bool,
    system_prompt: str | None = None,
    tools: Tools = (),
    variables: Variables | None = None,
) -> list[int]:
    """Return a prompt's tokens: text as it is or as a user's turn, messages through the template.

    A `system_prompt` precedes the messages; the template gets the schemas of `tools`, and `variables`. No text of a
    message becomes a control token. Raises InvalidInput for messages that the template refuses, and for a broken
    template.
    """
    (tokens,) = prompts_tokens(tokenizer, [(prompt, tools)], chat_template, system_prompt, variables)
    return tokens


def prompts_tokens(
    tokenizer: Any,
    prompts: Sequence[tuple[Prompt, Tools]],
    chat_template: bool,
    system_prompt: str | None = None,
    variables: Variables | None = None,
) -> list[list[int]]:
    """Like `prompt_tokens`, for many prompts with their tools; the tokenizer then uses all cores."""
    control, system = control_tokens(tokenizer), system_turn(system_prompt)
    tokens: dict[int, list[int]] = {}
    texts: dict[bool, dict[int, str]] = {True: {}, False: {}}  # by whether the text begins as the tokenizer begins one
    for row, (prompt, tools) in enumerate(prompts):
        if not _is_chat(prompt, chat_template):
            texts[bool(prompt)][row] = str(prompt)
            continue
        guarded = control.guard([*system, *asked(prompt)], tools, "chat_template")
        text = rendered(tokenizer, guarded, "chat_template", variables=variables, add_generation_prompt=True)
        if guarded.mark:
            tokens[row] = control.tokens(text, guarded.mark, "chat_template")
        else:
            texts[False][row] = text
    for begins, rows in texts.items():
        if rows:
            found = tokenizer(list(rows.values()), add_special_tokens=begins, return_attention_mask=False)
            tokens.update(zip(rows, map(list, found["input_ids"]), strict=True))
    return [tokens[row] for row in range(len(prompts))]


def asked(prompt: Prompt) -> Sequence[ChatMessage]:
    """Return a prompt as messages."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def system_turn(system_prompt: str | None) -> list[ChatMessage]:
    """Return the system prompt as a message, if it is set."""
    return [] if system_prompt is None else [{"role": "system", "content": system_prompt}]


def template_remark(
    name: str,
    tokenizer: Any,
    system_prompt: str | None = None,
    tools: Tools = (),
    variables: Variables | None = None,
) -> str:
    """Return a line that shows what the chat template renders for a prompt, with the system prompt."""
    chat = [*system_turn(system_prompt), {"role": "user", "content": "{prompt}"}]
    try:
        text = written(tokenizer, chat, add_generation_prompt=True, tools=tools, variables=variables)
    except Exception:  # noqa: BLE001  it refuses this chat; the dataset's own chats were rendered before
        return f"{name}: chats go through {template_name(tokenizer)}"
    return f"{name}: {template_name(tokenizer)} renders a prompt as {text!r:.600}"


def answered_tokens(
    tokenizer: Any, prompt: str, answer: str, end: bool, eos_token: str | None = None
) -> tuple[list[int], int]:
    """Return the tokens of two plain texts, a prompt and its answer, and how many of them are the prompt's.

    That number is at least 1, because no model predicts the first token. With `end`, the answer ends with the
    tokenizer's end-of-sequence token or `eos_token`, once.
    """
    before = prompt_tokens(tokenizer, prompt, False)
    after = control_tokens(tokenizer).following(answer, prompt) if before else list(tokenizer(answer)["input_ids"])
    last = answer_end(tokenizer, eos_token).token if eos_token else tokenizer.eos_token_id
    is_ended = bool(after) and after[-1] == last  # a text that its author rendered
    return before + after + ([last] if end and not is_ended else []), max(len(before), 1)


def _is_chat(prompt: Prompt, chat_template: bool) -> bool:
    return chat_template or not isinstance(prompt, str)
