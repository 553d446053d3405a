"""Whether the engines are installed, which the extras bring: to plan takes none, to train takes them all."""

from __future__ import annotations

from importlib.util import find_spec

from prefect_rlhf.placement.errors import RlhfError

ENGINES = ("torch", "megatron", "vllm")


def check_engines() -> None:
    """Raise RlhfError, which says what to install, where an engine is missing that every run needs."""
    for name in ("torch", "megatron"):
        if find_spec(name) is None:
            raise RlhfError(missing_engine(name))


def missing_engine(name: str) -> str:
    """Say which extras bring an engine."""
    extras = "pip install 'prefect-rlhf[cpu]', or with GPUs 'prefect-rlhf[cuda]'"
    return f"{name} is not installed, without which nothing trains or generates: {extras}"
