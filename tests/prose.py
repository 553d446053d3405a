"""Odd idioms in the texts that a person reads: `python -m tests.prose [FILE ...]` lists them with suggestions.

The patterns are crude ("one node" counts as "one" does), so no text reaches 0: projects written by native speakers have
2.5 to 7.5 per 1,000 words.
"""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.house import ROOMS, ROOT

PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/*.md", "docs/adr/*.md")
FEWEST_WORDS = 4  # of a string literal that counts as a text

SUGGESTIONS = {
    r"\bso (many|much)\b": "name the number: `num_rows` rows",
    r"\bof (which|whom|whose)\b": "start a new sentence",
    r"\b(in|at|by|from|to|on|over|through|after|within) which\b": "start a new sentence",
    r"\b(who|whoever|whatever|whichever)\b": "name the person or the thing",
    r"\b(those (that|of|which|who)|that of|those at)\b": "repeat the noun",
    r"\bwhat (is|it|they|a|an|the|was|were|each|its|of|runs|fills|holds|takes|comes|goes)\b": "use a noun: memory use",
    r"\bwhat (may|has|no|nobody|others|else)\b": "use a noun: existing files",
    r"\b(none|nothing|nobody|no one)\b": "say `no` with a noun",
    r"\b(is|are|was|were) there\b": "exists, is present",
    r"\bas far as\b": "up to, if",
    r"\bshall\b": "must, will",
    r"\b[Ww]here\b": "if; `where` is for places and for the symbols of a formula",
    r"\bones?\b": "repeat the noun, or `a`",
    r"\b(besides?|by itself|in vain|in turn)\b": "next to, concurrently with, alone, one after another",
}
PATTERNS = {re.compile(pattern): suggestion for pattern, suggestion in SUGGESTIONS.items()}


@dataclass(frozen=True, slots=True)
class Text:
    """A text with its file and its first line."""

    path: Path
    line: int
    words: str

    def idioms(self) -> Iterator[tuple[str, str]]:
        """Yield each idiom with a suggestion."""
        for pattern, suggestion in PATTERNS.items():
            for match in pattern.finditer(self.words):
                yield match.group(), suggestion

    def complaints(self) -> Iterator[str]:
        """Yield a line for each idiom: file, line, idiom and suggestion."""
        for idiom, suggestion in self.idioms():
            yield f"{self.path.relative_to(ROOT)}:{self.line}: {idiom!r} ({suggestion})"


def per_thousand(texts: list[Text]) -> float:
    """Return the idioms per 1,000 words of some texts."""
    idioms = sum(1 for text in texts for _ in text.idioms())
    return 1000 * idioms / max(1, sum(len(text.words.split()) for text in texts))


def docstrings(path: Path) -> Iterator[Text]:
    """Yield the docstrings of a Python file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            words = ast.get_docstring(node)
            if words:
                yield Text(path, node.body[0].lineno, words)


def messages(path: Path) -> Iterator[Text]:
    """Yield the other texts of a Python file: help, descriptions of forms, errors and log lines."""
    tree = ast.parse(path.read_text())
    parts = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    statements = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        words = _literal(node)
        if words and node not in parts | statements and len(words.split()) >= FEWEST_WORDS:
            yield Text(path, node.lineno, words)


def _literal(node: ast.AST) -> str:
    """Return the text of a string literal; values of an f-string are left out."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_literal(part) for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def comments(path: Path) -> Iterator[Text]:
    """Yield the comments of a Python file, a line each."""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if match := re.search(r"(?:^|\s)# (?!noqa|type:)(.*)", line):
            yield Text(path, number, match.group(1))


def page(path: Path) -> Text:
    """Return the prose of a page, without code."""
    return Text(path, 1, re.sub(r"`[^`]*`", "", re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)))


def pages() -> list[Text]:
    """Return the prose of every page of the documentation."""
    return [page(path) for pattern in PAGES for path in sorted(ROOT.glob(pattern))]


def room(name: str) -> list[Path]:
    """Return the Python files of a room."""
    return sorted((ROOT / name).rglob("*.py"))


def main(names: list[str]) -> None:
    """Print the idioms of files, or the figures of every room and page."""
    for path in (Path(name).resolve() for name in names):
        texts = [page(path)] if path.suffix == ".md" else [*docstrings(path), *messages(path), *comments(path)]
        print(*(line for text in texts for line in text.complaints()), sep="\n")
    if names:
        return
    for kind in (docstrings, messages, comments):
        rates = {name: per_thousand([text for path in room(name) for text in kind(path)]) for name in ROOMS}
        print(f"{kind.__name__}:", ", ".join(f"{name} {rate:.1f}" for name, rate in rates.items()))
    print(f"pages: {per_thousand(pages()):.1f}")
    for text in sorted(pages(), key=lambda text: -per_thousand([text])):
        print(f"  {per_thousand([text]):5.1f} {text.path.relative_to(ROOT)}")


if __name__ == "__main__":
    main(sys.argv[1:])
