"""Leaves values out of a parameter file: secrets, and values that YAML cannot hold.

A text stands in their place, which `--parameters` refuses with the field and the reason. So no run takes a default, or
the text itself, for the value.
"""

import os
import re
from collections.abc import Mapping
from typing import Any

from prefect_rlhf.errors.errors import Missing

LEFT_OUT = "<left out of this file: "
SECRET = "a secret"
NAMES_OF_OTHERS = ("columns", "chat_template_kwargs", "functions", "limits", "placement", "role_deadlines")
"""Groups with keys that you choose: names of columns, variables, rewards, metrics, calls and roles."""
OF_SECRETS = ("env", "headers")
"""Groups of an MCP server that hold its credentials."""
LEAST_CHARACTERS = 8  # of a variable's value that is looked for in texts

_NAME = re.compile(
    r"(^|[_-])(api[_-]?key|access[_-]?key|private[_-]?key|key|secret|pass(word|wd|phrase)?|pwd|credentials?|auth"
    r"|authorization|cookie|(?<!eos_)(?<!bos_)(?<!pad_)(?<!unk_)(?<!sep_)(?<!cls_)(?<!mask_)token)$",
    re.IGNORECASE,
)
_IN_ADDRESS = re.compile(
    r"://[^/@\s]+@|[?&][\w.-]*(key|token|secret|sig|signature|password|credential|auth)[\w.-]*=[^&]|\bbearer\s+\S",
    re.IGNORECASE,
)
_FLAG = re.compile(r"--?([\w-]+)(=.*)?", re.DOTALL)
_VARIABLE = re.compile("KEY|TOKEN|SECRET|PASS|CREDENTIAL")


def left_out(why: str) -> str:
    """Return the text in place of a value.

    >>> left_out("a secret")
    '<left out of this file: a secret>'
    """
    return f"{LEFT_OUT}{why}>"


def without_secrets(value: Any) -> Any:
    """Return plain parameters with `left_out` in place of each value that looks like a secret.

    Such values are: all below `env` and `headers`; those whose names, or whose flags in a list, are those of secrets;
    addresses with credentials; and texts with the value of an environment variable whose name is that of a secret. A
    secret in another text is not found.

    >>> without_secrets({"url": "https://me:word@host/mcp", "eos_token": "</s>", "args": ["--key", "k"]})
    {'url': '<left out of this file: a secret>', 'eos_token': '</s>', 'args': ['--key', '<left out of this file: a \
secret>']}
    """
    known = [text for name, text in os.environ.items() if _VARIABLE.search(name) and len(text) >= LEAST_CHARACTERS]
    return _without(value, tuple(known))


def _without(value: Any, known: tuple[str, ...]) -> Any:
    if isinstance(value, Mapping):
        return {key: _of_key(str(key), one, known) for key, one in value.items()}
    if isinstance(value, list | tuple):
        before = [None, *value]
        return [
            left_out(SECRET) if _is_flag(flag) else _without(one, known)
            for flag, one in zip(before, value, strict=False)
        ]
    return left_out(SECRET) if isinstance(value, str) and _is_secret(value, known) else value


def _of_key(key: str, value: Any, known: tuple[str, ...]) -> Any:
    if key in OF_SECRETS and isinstance(value, Mapping):
        return {name: left_out(SECRET) for name in value}
    if key in NAMES_OF_OTHERS and isinstance(value, Mapping):
        return {name: _without(one, known) for name, one in value.items()}
    is_one = isinstance(value, str | int) and not isinstance(value, bool) and value != ""
    return left_out(SECRET) if is_one and _NAME.search(key) else _without(value, known)


def _is_flag(before: object) -> bool:
    """Whether a value of a list is a flag that the next value, its secret, follows."""
    found = _FLAG.fullmatch(before) if isinstance(before, str) else None
    return found is not None and found[2] is None and _NAME.search(found[1]) is not None


def _is_secret(text: str, known: tuple[str, ...]) -> bool:
    flag = _FLAG.fullmatch(text)
    is_flag_with_value = flag is not None and flag[2] is not None and _NAME.search(flag[1]) is not None
    return is_flag_with_value or _IN_ADDRESS.search(text) is not None or any(one in text for one in known)


def refuse_left_out(field: str, value: Any) -> None:
    """Raise Missing, naming the field, for a value that a parameter file left out."""
    if isinstance(value, str) and value.startswith(LEFT_OUT):
        why = value.removeprefix(LEFT_OUT).removesuffix(">")
        raise Missing(field, f"its value, which the file left out: {why}; -p {field}=VALUE")
    if isinstance(value, Mapping):
        for key, one in value.items():
            refuse_left_out(f"{field}.{key}", one)
    if isinstance(value, list | tuple):
        for number, one in enumerate(value):
            refuse_left_out(f"{field}.{number}", one)
