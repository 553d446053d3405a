"""Guesses the meaning of an unknown flag or word: habits from other trainers and from other shells."""

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

_FLAGS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "--parameters": ("c", "config", "config_file", "config_path", "config_name", "cfg", "yaml", "f", "file"),
        "--devices": (
            "gpus",
            "n_gpus",
            "ngpus",
            "num_gpus",
            "num_processes",
            "nproc_per_node",
            "n_gpus_per_node",
            "gpu",
        ),
        "--dry-run": ("dryrun", "check", "validate"),
        "--verbose": ("v", "debug", "log_level"),
        "-p resume_from=latest": ("resume", "resume_from_checkpoint", "continue"),
        "-p output_dir=FOLDER": ("out", "output", "output_folder", "save_dir"),
    }
)
"""Our flags, and what others call them."""
_WORDS: Mapping[str, str] = MappingProxyType(
    {
        "help": "prefect-rlhf --help",
        "version": "prefect-rlhf --version",
        "train": "prefect-rlhf run ALGORITHM",
        "deploy": "prefect deploy --all, in a folder of prefect-rlhf init",
        "worker": "prefect worker start --pool POOL",
        "server": "prefect server start",
    }
)
_FILE = re.compile(r"[^=]+\.(ya?ml|json)")
_ASSIGNMENT = re.compile(r"[A-Za-z_][\w.]*=.*", re.DOTALL)
_DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212"  # hyphens and dashes that a text editor makes of two hyphens


def meant_flag(word: str, names: Collection[str]) -> str:
    """Return a hint at the flag or parameter that an unknown flag means, among the flags `names`; empty without a
    guess.

    >>> meant_flag("--config", ["--parameters"]), meant_flag("--algo.clip", ["-p"]), meant_flag("--qqq", ["-p"])
    ('; here: --parameters', '; here: -p algo.clip=VALUE', '')
    """
    bare = word.lstrip("-")
    for ours, theirs in _FLAGS.items():
        if ours.partition(" ")[0] in names and bare.replace("-", "_").lower() in theirs:
            return f"; here: {ours}"
    if "-p" in names and re.fullmatch(r"[A-Za-z_]\w*(\.\w+)+", bare):
        return f"; here: -p {bare}=VALUE"
    return ""


def meant_argument(rest: Sequence[str], words: Sequence[str], names: Collection[str]) -> str:
    """Return a hint at how to write `rest`, the superfluous arguments among a command's `words`.

    >>> flags = ["--parameters", "--param", "-p"]
    >>> meant_argument(["mine.yaml"], [], flags), meant_argument(["steps=3"], [], flags)
    ('; here: --parameters mine.yaml', '; here: -p steps=3')
    >>> meant_argument(["is", "2?"], ["runs/latest/actor", "What", "is", "2?"], ["--message"])
    "; a message needs quotes: 'What is 2?'"
    >>> meant_argument(["3"], ["-p", "steps", "3"], flags)
    '; here: -p steps=3'
    """
    first = rest[0] if rest else ""
    if first and first[0] in _DASHES:
        return f"; here: --{first.lstrip(_DASHES)}, with two hyphens"
    if "--message" in names and first:
        has_flags = any(word.startswith("-") for word in words)
        message = "'MESSAGE'" if has_flags else shlex.quote(" ".join(words[1:]))  # words[0] is the model
        return f"; a message needs quotes: {message}"
    if "-p" not in names or not first:
        return ""
    if (before := _name_before(first, words)) is not None:
        value = " ".join(word for word in rest[:2] if word != "=")
        return f"; here: -p {before.rstrip('=')}={value.lstrip('=')}"
    if _FILE.fullmatch(first):
        return f"; here: --parameters {shlex.quote(first)}"
    if all(_ASSIGNMENT.fullmatch(word) for word in rest):
        return f"; here: {' '.join(f'-p {shlex.quote(word)}' for word in rest)}"
    return ""


def _name_before(first: str, words: Sequence[str]) -> str | None:
    """Return the word after -p that stands directly before `first` without a value; None if there is no such word."""
    for flag, name, value in zip(words, words[1:], words[2:], strict=False):
        if flag in ("-p", "--param") and value == first and ("=" not in name or name.endswith("=")):
            return name
    return None


def meant_pair(flag: str, text: str) -> str:
    """Return how to write an assignment that lacks `=`; empty without a guess.

    >>> meant_pair("--param", "steps:3"), meant_pair("--param", "mine.yaml"), meant_pair("--param", "steps")
    ('NAME=VALUE: steps=3', 'NAME=VALUE, or --parameters mine.yaml', '')
    """
    if flag == "--param" and _FILE.fullmatch(text):
        return f"NAME=VALUE, or --parameters {shlex.quote(text)}"
    match = re.fullmatch(r"\s*([\w.]+)\s*:\s*([^:]+)", text)
    return f"NAME=VALUE: {match[1]}={match[2]}" if match else ""


def meant_word(word: str) -> str:
    """Return a hint at the command that a word means; empty for any other word.

    >>> meant_word("help"), meant_word("mine.yaml"), meant_word("grop")
    ('; here: prefect-rlhf --help', '; here: prefect-rlhf run ALGORITHM --parameters mine.yaml', '')
    """
    if _FILE.fullmatch(word):
        return f"; here: prefect-rlhf run ALGORITHM --parameters {shlex.quote(word)}"
    return f"; here: {_WORDS[word.lower()]}" if word.lower() in _WORDS else ""
