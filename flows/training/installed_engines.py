"""Whether the engines are installed, and in builds that fit each other: to plan takes none, to train takes them all."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from prefect_rlhf.placement.errors import RlhfError
from prefect_rlhf.placement.install_command import install_command

ENGINES = ("torch", "megatron", "vllm")
COMPANIONS = ("torchvision", "torchaudio")  # vLLM requires them, transformers imports them, nothing here needs them


def check_engines() -> None:
    """Raise RlhfError, which says what to install, where an engine is missing that every run needs."""
    for name in ("torch", "megatron"):
        if find_spec(name) is None:
            raise RlhfError(missing_engine(name))


def missing_engine(name: str) -> str:
    """Say which extras bring an engine."""
    extras = f"as README.md shows, or {install_command('cpu')}, with GPUs '.[cuda]'"
    return f"{name} is not installed, and nothing trains or generates without it: {extras}"


def check_builds() -> None:
    """Raise RlhfError if torch is a CPU build and a library that loads torch's own is not, or the reverse.

    pip installs such a pair if torch is from PyTorch's CPU index and the rest from another one. Then no model can be
    imported from transformers.
    """
    found = {name: seen for name in ("torch", *COMPANIONS) if (seen := _installed_version(name))}
    if unfit := unfit_builds(found):
        raise RlhfError(unfit)


def unfit_builds(found: Mapping[str, str]) -> str | None:
    """Say which installed versions, by name, do not fit torch's, or None. A version ends in its build: `2.13.0+cpu`.

    >>> unfit_builds({"torch": "2.13.0+cpu", "torchvision": "0.28.0"})
    'torchvision 0.28.0 is not built for torch 2.13.0+cpu: pip uninstall torchvision (nothing here needs it)'
    >>> unfit_builds({"torch": "2.13.0", "torchvision": "0.28.0"})
    """
    is_cpu = {name: seen.endswith("+cpu") for name, seen in found.items()}
    names = [name for name in COMPANIONS if name in found and is_cpu[name] != is_cpu.get("torch", is_cpu[name])]
    if not names:
        return None
    seen = f"{names[0]} {found[names[0]]} is not built for torch {found['torch']}"
    return f"{seen}: pip uninstall {' '.join(names)} (nothing here needs {'them' if names[1:] else 'it'})"


def _installed_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
