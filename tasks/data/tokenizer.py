"""Conversion between text and tokens by the tokenizer of a Hugging Face folder, plain or through its chat template."""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from prefect_rlhf.errors.errors import InvalidInput, refusing
from prefect_rlhf.files.foreign_file import read_json_object
from prefect_rlhf.files.storage.mirror import readable

ChatMessage = Mapping[str, str]  # role and content
Prompt = str | Sequence[ChatMessage]
Tools = Sequence[Mapping[str, Any]]  # JSON schemas


@lru_cache(maxsize=4)  # loading takes longer than all tokenization of a step
def load_tokenizer(folder: str) -> Any:
    """Return the tokenizer of a folder, which may be remote. Raises InvalidInput if the folder has no tokenizer."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoTokenizer  # takes seconds to import; the controller first checks much else

    local = readable(folder, "tokenizer")
    files = [local / name for name in ("tokenizer.json", "tokenizer.model")]
    if not any(file.is_file() for file in files):
        raise InvalidInput("tokenizer", folder, "a folder with tokenizer.json or tokenizer.model")
    try:
        return AutoTokenizer.from_pretrained(local, local_files_only=True, trust_remote_code=False)
    except StrictDataclassError as error:  # it reads config.json too
        raise refused_config(local, f"{folder}/config.json", error) from error
    except Exception as error:  # noqa: BLE001  for any error, the user must change the file
        raise InvalidInput("tokenizer", folder, f"a tokenizer that transformers can load ({error!s:.120})") from error


def refused_config(folder: Path, name: str, error: Exception) -> InvalidInput:
    """Return the error for a config.json that transformers refuses: the key and its value, if the cause names a key."""
    config = read_json_object(name, folder / "config.json")
    named = re.search(r"[Ff]ield '(\w+)'", str(error))
    field, seen = (f"{name}.{named[1]}", config.get(named[1])) if named else (name, config)
    return InvalidInput(field, seen, f"a config that transformers accepts ({str(error).splitlines()[-1].strip():.200})")


def prompts_tokens(
    tokenizer: Any, prompts: Sequence[Prompt], chat_template: bool, system_prompt: str | None = None, tools: Tools = ()
) -> list[list[int]]:
    """Return the tokens of prompts: text as it is or as a user's turn, messages through the template.

    A `system_prompt` precedes the messages; the template shows the schemas of `tools`. Raises InvalidInput for messages
    that the template refuses, and for a broken template.
    """
    system, texts, begins = system_turn(system_prompt), [], []
    for prompt in prompts:
        is_chat = _is_chat(prompt, chat_template)
        if is_chat:
            asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            prompt = rendered(tokenizer, [*system, *asked], "chat_template", add_generation_prompt=True, tools=tools)
        texts.append(str(prompt))
        begins.append(bool(prompt) and not is_chat)  # a template writes what begins a row, and no text has no tokens
    return encoded(tokenizer, texts, begins)


def encoded(tokenizer: Any, texts: Sequence[str], begins: Sequence[bool]) -> list[list[int]]:
    """Return the tokens of texts; one that `begins` a row has the special tokens that the tokenizer adds to a text.

    A fast tokenizer works on many texts with all cores.
    """
    tokens: dict[int, list[int]] = {}
    for special in (True, False):
        rows = [row for row, begin in enumerate(begins) if begin is special]
        if rows:
            found = tokenizer([texts[row] for row in rows], add_special_tokens=special, return_attention_mask=False)
            tokens.update(zip(rows, found["input_ids"], strict=True))
    return [tokens[row] for row in range(len(texts))]


def system_turn(system_prompt: str | None) -> list[ChatMessage]:
    """Return the message of a system prompt, if any."""
    return [] if system_prompt is None else [{"role": "system", "content": system_prompt}]


def template_remark(name: str, tokenizer: Any, system_prompt: str | None = None, tools: Tools = ()) -> str:
    """Return a line that shows the chat template's rendering of a prompt and of the system prompt."""
    chat = [*system_turn(system_prompt), {"role": "user", "content": "{prompt}"}]
    try:
        text = rendered(tokenizer, chat, "chat_template", add_generation_prompt=True, tools=tools)
    except InvalidInput:  # it refuses this chat; the dataset's own chats were rendered before
        return f"{name}: chats go through the template of {tokenizer.name_or_path}"
    return f"{name}: the chat template of {tokenizer.name_or_path} renders a prompt as {text!r:.600}"


def rendered(
    tokenizer: Any,
    messages: Sequence[ChatMessage],
    where: str,
    *,
    add_generation_prompt: bool = False,
    tools: Tools = (),
) -> str:
    """Return messages as the tokenizer's chat template writes them, with the schemas of tools if it shows them.

    Raises InvalidInput, at `where`, for messages that the template refuses, and for a broken template.
    """
    turns = [dict(turn) for turn in messages]
    expected = f"messages that the chat template of {tokenizer.name_or_path} accepts"
    with refusing(Exception, where, turns, expected, most=200):  # a template is a program of the model's author
        shown = {"tools": list(tools)} if tools else {}
        added = add_generation_prompt
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=added, **shown))


def answered_rows(
    tokenizer: Any, rows: Sequence[tuple[Prompt, str]], chat_template: bool, end: bool
) -> list[tuple[list[int], int]]:
    """Return the tokens of each prompt with its answer, and the number of the prompt's tokens.

    That number is at least 1, because no model predicts the first token. With `end`, or in a chat, the end-of-sequence
    token closes the answer.
    """
    before = prompts_tokens(tokenizer, [prompt for prompt, _ in rows], chat_template)
    after = encoded(tokenizer, [answer for _, answer in rows], [not prompt for prompt in before])
    closed = [[tokenizer.eos_token_id] if end or _is_chat(prompt, chat_template) else [] for prompt, _ in rows]
    parts = zip(before, after, closed, strict=True)
    return [([*prompt, *answer, *close], max(len(prompt), 1)) for prompt, answer, close in parts]


def _is_chat(prompt: Prompt, chat_template: bool) -> bool:
    return chat_template or not isinstance(prompt, str)
