"""Checks that the engines are installed in compatible builds: planning needs no engine, training needs all of them."""

from collections.abc import Mapping
from importlib.util import find_spec

from prefect_rlhf.errors.errors import RlhfError
from prefect_rlhf.errors.install_command import install_command
from prefect_rlhf.files.engine_builds import check_kind
from prefect_rlhf.files.installed import installed_version
from prefect_rlhf.placement.devices.mesh import Backend

ENGINES = ("torch", "megatron", "vllm")
COMPANIONS = ("torchvision", "torchaudio")  # vLLM requires them and transformers imports them; prefect-rlhf does not


def check_engines(kind: Backend = "cpu") -> None:
    """Raise RlhfError if an engine that every run needs is missing, InvalidInput if a build is for another `kind`."""
    for name in ("torch", "megatron"):
        if find_spec(name) is None:
            raise RlhfError(missing_engine(name))
    check_kind(kind)


def missing_engine(name: str) -> str:
    """Return the error text for a missing engine: the extras that install it."""
    extras = f"see README.md, or run {install_command('cpu')} (with GPUs: '.[cuda]')"
    return f"{name} is not installed, but training and generation need it: {extras}"


def check_builds() -> None:
    """Raise RlhfError if torch is a CPU build and a library that loads torch's own libraries is not, or the reverse.

    pip installs such a pair if torch is from PyTorch's CPU index and the rest from another index. Then no model can be
    imported from transformers.
    """
    found = {name: seen for name in ("torch", *COMPANIONS) if (seen := installed_version(name))}
    if unfit := unfit_builds(found):
        raise RlhfError(unfit)


def unfit_builds(found: Mapping[str, str]) -> str | None:
    """Return an error text for installed versions, by name, that do not fit torch's, or None if all fit.

    The end of a version is its build: `2.13.0+cpu`.

    >>> unfit_builds({"torch": "2.13.0+cpu", "torchvision": "0.28.0"})
    'torchvision 0.28.0 is not built for torch 2.13.0+cpu: pip uninstall torchvision (prefect-rlhf does not need it)'
    >>> unfit_builds({"torch": "2.13.0", "torchvision": "0.28.0"})
    """
    is_cpu = {name: seen.endswith("+cpu") for name, seen in found.items()}
    names = [name for name in COMPANIONS if name in found and is_cpu[name] != is_cpu.get("torch", is_cpu[name])]
    if not names:
        return None
    seen = f"{names[0]} {found[names[0]]} is not built for torch {found['torch']}"
    return f"{seen}: pip uninstall {' '.join(names)} (prefect-rlhf does not need {'them' if names[1:] else 'it'})"
