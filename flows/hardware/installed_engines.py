"""Checks that the engines are installed, with their libraries and in compatible builds; planning needs no engine."""

import ctypes
import sys
from collections.abc import Collection, Mapping
from importlib.util import find_spec
from typing import cast

from prefect_rlhf.errors.errors import InvalidInput, RlhfError
from prefect_rlhf.errors.install_command import install_command
from prefect_rlhf.files.engine_builds import check_kind
from prefect_rlhf.files.installed import installed_version
from prefect_rlhf.placement.devices.mesh import Backend
from prefect_rlhf.placement.engine_traits import TRAITS, Release
from prefect_rlhf.placement.plan import EngineKind

ENGINES = ("torch", "megatron", "vllm")
COMPANIONS = ("torchvision", "torchaudio")  # transformers imports them if they are there; a run on CPU needs neither
PYTHONS = ((3, 11), (3, 12), (3, 13))
"""Versions of Python for which every pinned engine has a wheel; of 3.14, megatron-core 0.16.1 has none."""
OF_TORCH = ("filelock", "fsspec", "mpmath", "networkx", "numpy", "sympy", "typing_extensions")
DISTRIBUTIONS = {
    "PIL": "pillow",
    "cpuinfo": "py-cpuinfo",
    "openai_harmony": "oss-harmony",
    "yaml": "pyyaml",
    "zmq": "pyzmq",
}
"""Names for pip that differ from the name of the package by more than a dash."""
SYSTEM_PACKAGES = {"libnuma.so.1": "libnuma1"}
"""Packages of Debian and Ubuntu, by the shared library that they have. Small images lack them."""


def check_engines(kind: Backend = "cpu") -> None:
    """Raise RlhfError if a run's engine or a library of it is missing, InvalidInput if a build is for another `kind`.

    Nothing is imported. vLLM may be missing, since Megatron generates too. Raises InvalidInput, too, for a Python
    without builds of the engines, and for a release of an engine that it was not written for.
    """
    check_python(sys.version_info[:3])
    for name in ("torch", "megatron"):
        if find_spec(name) is None:
            raise RlhfError(missing_engine(name))
    check_kind(kind)
    for engine in ("torch", *TRAITS):
        if missing := missing_libraries(engine, kind):
            raise RlhfError(without_libraries(engine, missing, kind))
        if kind == "cpu" and _is_there(engine):
            check_system_libraries(engine)


def check_system_libraries(engine: str) -> None:
    """Raise RlhfError for a shared library that the engine's code for CPU loads and that the host does not have.

    Without it vLLM leaves out its own kernels with a warning, and its build fails at the first of them.
    """
    traits = TRAITS.get(engine)  # type: ignore[call-overload]  # torch has none
    for name in traits.cpu_system_libraries if traits else ():
        try:
            ctypes.CDLL(name)
        except OSError as error:
            command = f"in Debian and Ubuntu, apt-get install {SYSTEM_PACKAGES.get(name, name)}"
            raise RlhfError(f"{name}: not found, but {engine} on cpu loads it: {command}") from error


def check_python(version: tuple[int, int, int]) -> None:
    """Raise InvalidInput for a version of Python without builds of the engines.

    >>> check_python((3, 13, 0))
    """
    if version[:2] not in PYTHONS:
        right = "3.11, 3.12 or 3.13, for which megatron-core has a build"
        raise InvalidInput("Python", ".".join(map(str, version)), right)


def installed_release(engine: EngineKind) -> Release | None:
    """Return the installed release of an engine; None if it is not installed, or if a run accepts every release.

    Raises InvalidInput for a release that we have not compared: we call engines by private names too, so another
    release may fail after minutes, or train differently.
    """
    traits = TRAITS[engine]
    found = installed_version(traits.package) if traits.releases else None
    if found is None:
        return None
    for release in traits.releases:
        if release.version == found.partition("+")[0]:
            return release
    raise InvalidInput(traits.package, found, " or ".join(release.version for release in traits.releases))


def missing_libraries(engine: str, kind: Backend) -> list[str]:
    """Return the packages that an installed engine imports on `kind` and that are missing.

    Raises InvalidInput for a release of the engine that a run does not accept.

    >>> missing_libraries("torch", "cpu"), missing_libraries("no-such-engine", "cuda")
    ([], [])
    """
    if not _is_there(engine):
        return []
    needed: tuple[str, ...] = OF_TORCH if engine == "torch" else ()
    if engine in TRAITS:
        known = cast(EngineKind, engine)
        traits, release = TRAITS[known], installed_release(known)
        needed = (*traits.libraries, *(release.libraries if release else ()))
        needed += traits.cuda_libraries if kind == "cuda" else ()
    return [name for name in needed if not _is_there(name)]


def _is_there(name: str) -> bool:
    return name in sys.modules or find_spec(name) is not None


def without_libraries(engine: str, missing: Collection[str], kind: Backend) -> str:
    """Return the error text for missing libraries of an engine.

    >>> without_libraries("vllm", ["torchvision"], "cuda")
    'torchvision: not installed, but vllm on cuda imports it: pip install -c constraints-cuda.txt torchvision'
    """
    pins = "constraints-cuda.txt" if kind == "cuda" else "constraints.txt"
    names = " ".join(DISTRIBUTIONS.get(name, name.replace("_", "-")) for name in missing)
    them = "them" if len(missing) > 1 else "it"
    return f"{', '.join(missing)}: not installed, but {engine} on {kind} imports {them}: pip install -c {pins} {names}"


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
    'torchvision 0.28.0 is not built for torch 2.13.0+cpu: pip uninstall torchvision (a run on CPU does not need it)'
    >>> unfit_builds({"torch": "2.13.0", "torchvision": "0.28.0+cpu"})
    'torchvision 0.28.0+cpu is not built for torch 2.13.0: pip install --force-reinstall torchvision==0.28.0'
    >>> unfit_builds({"torch": "2.13.0", "torchvision": "0.28.0"})
    """
    is_cpu = {name: seen.endswith("+cpu") for name, seen in found.items()}
    names = [name for name in COMPANIONS if name in found and is_cpu[name] != is_cpu.get("torch", is_cpu[name])]
    if not names:
        return None
    seen = f"{names[0]} {found[names[0]]} is not built for torch {found['torch']}"
    if not is_cpu["torch"]:
        releases = (f"{name}=={found[name].partition('+')[0]}" for name in names)
        return f"{seen}: pip install --force-reinstall {' '.join(releases)}"
    return f"{seen}: pip uninstall {' '.join(names)} (a run on CPU does not need {'them' if names[1:] else 'it'})"
