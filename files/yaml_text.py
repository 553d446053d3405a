"""Reads YAML and JSON that people wrote: plain values, numbers as in JSON, and no values that expand when read."""

import re
from pathlib import Path
from typing import Any

import yaml

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.foreign_file import require_regular

MOST_BYTES = 1 << 20
MOST_VALUES = 20_000  # with all that its aliases stand for
MOST_LEVELS = 50
_REMEDIES = (
    ("\\t", "indent with spaces, not with a tab"),
    ("\t", "indent with spaces, not with a tab"),
    ("\u00a0", "the line has a no-break space, copied from elsewhere: type its spaces anew"),
    ("expected ':'", "write NAME: VALUE, with a space after the colon"),
    ("block mapping start", "begin the keys of a group in the same column"),
    ("mapping values are not allowed", "begin the keys of a group in the same column, and quote text with a colon"),
    ("cannot start any token", "put the text in quotes"),
    ("alias", "put text that begins with * in quotes"),
)
"""Signs of common mistakes in the parser's text or in the line, with what to do."""


def read_yaml(field: str, path: Path) -> Any:
    """Return the content of a YAML or JSON file. Raises InvalidInput, at `field`, for an unreadable file."""
    return parse_yaml(field, str(path), read_text(field, path))


def read_text(field: str, path: Path) -> str:
    """Read the text of a file that you wrote. Raises InvalidInput, at `field`, for an unreadable file."""
    try:
        require_regular(path)
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise InvalidInput(field, str(path), f"a readable file ({why})") from error
    if len(content) > MOST_BYTES:
        raise InvalidInput(field, str(path), f"a file of at most {MOST_BYTES >> 10} KiB")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise InvalidInput(field, str(path), "a text file in UTF-8") from error


def parse_yaml(field: str, seen: str, text: str) -> Any:
    """Return the value of `text`. Raises InvalidInput, at `field` with `seen`, if it is not YAML or too large.

    >>> parse_yaml("-p", "x", "{lr: 1e-5, steps: 010, day: 2026-11-22}")
    {'lr': 1e-05, 'steps': '010', 'day': '2026-11-22'}
    """
    try:
        loader = _Loader(text)
        return loader.get_single_data()
    except yaml.reader.ReaderError as error:
        raise InvalidInput(field, seen, "text without control characters: YAML or JSON") from error
    except yaml.YAMLError as error:
        raise InvalidInput(field, seen, f"YAML or JSON ({_problem(error, text)})") from error
    except (ValueError, KeyError) as error:  # a number of thousands of digits; a tag that its value does not suit
        raise InvalidInput(field, seen, "YAML or JSON whose values fit their tags") from error


def _problem(error: yaml.YAMLError, text: str) -> str:
    """Describe an error of the parser with its line, and the remedy of a common mistake."""
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    mark = getattr(error, "problem_mark", None)
    if "expected ':'" in problem:  # the parser notices it in the next line
        mark = getattr(error, "context_mark", None) or mark
    if mark is None:
        return problem
    lines = text.splitlines()
    line = lines[mark.line].rstrip() if mark.line < len(lines) else ""
    remedy = next((remedy for sign, remedy in _REMEDIES if sign in f"{problem} {line[: mark.column + 1]}"), "")
    return f"line {mark.line + 1}: {problem}" + (f"; {remedy}" if remedy else "")


class _Loader(yaml.SafeLoader):
    """Numbers are JSON's, dates are text, and a duplicate key is an error.

    YAML 1.1 would read 1e-5 as text, 010 as 8, 1:30 as 90 and 1_000 as 1000.
    """

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] in ("bool", "null", "merge")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    yaml_constructors = {
        tag: construct
        for tag, construct in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.rpartition(":")[2] in ("bool", "null", "int", "float", "str", "seq", "map")
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._level = self._count = 0
        self._counts: dict[int, int] = {}  # of finished nodes, by identity; the document keeps its nodes alive

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Count each value as often as aliases repeat it, before anything is made of it."""
        before, self._level = self._count, self._level + 1
        if self._level > MOST_LEVELS:
            raise yaml.composer.ComposerError(problem=f"more than {MOST_LEVELS} levels")
        is_alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        if is_alias and id(node) not in self._counts:
            raise yaml.composer.ComposerError(problem="a value that contains itself")
        self._count += self._counts[id(node)] if is_alias else 1
        if self._count > MOST_VALUES:
            raise yaml.composer.ComposerError(problem=f"more than {MOST_VALUES} values")
        self._counts.setdefault(id(node), self._count - before)
        self._level -= 1
        return node


def _mapping_without_twins(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen = set()
    for key, _ in node.value:
        if key.tag == "tag:yaml.org,2002:merge":
            continue
        if not isinstance(key, yaml.ScalarNode):
            raise yaml.constructor.ConstructorError(None, None, "a key is no plain word", key.start_mark)
        if key.value in seen:
            raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} occurs twice", key.start_mark)
        seen.add(key.value)
    return loader.construct_mapping(node, deep=True)


def _text(loader: _Loader, node: yaml.ScalarNode) -> str:
    return loader.construct_yaml_str(node)


def _refuse_tag(loader: _Loader, node: yaml.Node) -> None:
    raise yaml.constructor.ConstructorError(None, None, f"plain values have no tag such as {node.tag}", node.start_mark)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping_without_twins)
_Loader.add_constructor("tag:yaml.org,2002:merge", _text)  # `<<` as a plain value
_Loader.add_constructor(None, _refuse_tag)
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?(0|[1-9][0-9]*)$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"""[-+]?(0|[1-9][0-9]*)?\.[0-9]+([eE][-+]?[0-9]+)?$
        |[-+]?(0|[1-9][0-9]*)(\.|\.?[eE][-+]?[0-9]+)$
        |[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$""",
        re.VERBOSE,
    ),
    list("-+.0123456789"),
)


class _Dumper(yaml.SafeDumper):
    """Writes values so that `parse_yaml` reads the same: it takes 1e-5 for a number, and YAML 1.1 for a text."""


def _write_text(dumper: _Dumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=_style(text))


def _style(text: str) -> str | None:
    """Return the style that keeps a text: a block for readable lines, quotes for what could be read as a number."""
    *lines, last = text.split("\n")
    if any(sign in text for sign in _BREAKS):
        return '"'
    if lines and text[0] not in " \n" and last.isprintable() and all(line.isprintable() for line in lines):
        return "|"
    return "'" if text[:1] in _NUMBERS else None


_BREAKS = "\r\x85\u2028\u2029"
"""Further ends of a line, which YAML folds."""
_NUMBERS = (*"-+.0123456789",)
_Dumper.add_representer(str, _write_text)


def to_yaml(value: Any) -> str:
    """Return plain groups, lists, texts and numbers as YAML that `parse_yaml` reads back as the same value.

    >>> print(to_yaml({"lr": 1e-5, "stop": ["1e-5", "yes"], "path": "models/smollm2"}), end="")
    lr: 1.0e-05
    stop:
    - '1e-5'
    - 'yes'
    path: models/smollm2
    """
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10_000))
