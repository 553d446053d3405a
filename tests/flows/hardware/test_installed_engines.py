"""A library that an engine imports and that is not there costs a line, before anything starts."""

import ast
import re
import sys
import tomllib
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from prefect_rlhf.errors.errors import InvalidInput, RlhfError
from prefect_rlhf.flows.hardware import installed_engines
from prefect_rlhf.flows.hardware.checkup import findings
from prefect_rlhf.flows.hardware.installed_engines import (
    OF_TORCH,
    PYTHONS,
    check_engines,
    check_python,
    installed_release,
    missing_libraries,
)
from prefect_rlhf.placement.engine_traits import TRAITS
from tests.flows.hardware.test_gpus import CUDA_BUILDS, builds, driver, row  # noqa: F401  fixtures
from tests.support.cases import first

SHARED = re.compile(rb"(?<=\0)lib[\w+.-]+\.so(?:\.\d+)*(?=\0)")


def lacking(monkeypatch, *names):
    is_there = installed_engines._is_there
    monkeypatch.setattr(installed_engines, "_is_there", lambda name: name not in names and is_there(name))


def with_core(monkeypatch, version):
    """Let the package of megatron-core have a version."""
    of_others = installed_engines.installed_version
    of_any = lambda name: version if name == "megatron-core" else of_others(name)  # noqa: E731
    monkeypatch.setattr(installed_engines, "installed_version", of_any)


def test_on_gpus_vllm_requires_torchvision_which_its_warm_up_imports(driver, builds, monkeypatch):  # noqa: F811
    driver(row(0))
    builds(CUDA_BUILDS)
    lacking(monkeypatch, "torchvision")
    line = "torchvision: not installed, but vllm on cuda imports it: pip install -c constraints-cuda.txt torchvision"
    with pytest.raises(RlhfError) as caught:
        check_engines("cuda")
    assert str(caught.value) == line
    (fault,) = [found for found in findings("cuda", 1) if found.is_fault]
    assert (fault.subject, fault.text) == ("versions", line)


def test_a_run_on_cpu_requires_no_torchvision_but_the_other_libraries(monkeypatch):
    with_core(monkeypatch, "0.16.1")  # the newer one imports triton
    lacking(monkeypatch, "torchvision", "triton")
    check_engines("cpu")
    lacking(monkeypatch, "PIL", "zmq")
    with pytest.raises(RlhfError) as caught:
        check_engines("cpu")
    assert str(caught.value) == (
        "PIL, zmq: not installed, but vllm on cpu imports them: pip install -c constraints.txt pillow pyzmq"
    )


def test_the_libraries_of_an_engine_that_is_not_installed_are_not_missed(monkeypatch):
    lacking(monkeypatch, "vllm", "PIL", "torchvision")
    assert missing_libraries("vllm", "cuda") == []


def test_a_library_of_the_host_that_vllm_is_linked_with_costs_a_line_before_anything_is_built(monkeypatch):
    """An image without libnuma built vLLM's engine up to its first own kernel, which was not there."""
    traits = replace(TRAITS["vllm"], cpu_system_libraries=("libnuma_that_nobody_has.so.1",))
    monkeypatch.setattr(installed_engines, "TRAITS", {**TRAITS, "vllm": traits})
    monkeypatch.setitem(installed_engines.SYSTEM_PACKAGES, "libnuma_that_nobody_has.so.1", "libnuma1")
    line = (
        "libnuma_that_nobody_has.so.1: not found, but vllm on cpu loads it: "
        "in Debian and Ubuntu, apt-get install libnuma1"
    )
    with pytest.raises(RlhfError) as caught:
        check_engines("cpu")
    assert str(caught.value) == line
    assert line in [found.text for found in findings("cpu", 1) if found.is_fault]
    lacking(monkeypatch, "vllm")
    check_engines("cpu")  # Megatron generates


@pytest.mark.all
def test_host_libraries_match_vllms_cpu_code():
    """Every shared library that it names, but for torch's, those of any Linux, and a profiler that may be absent."""
    folder = Path(find_spec("vllm").submodule_search_locations[0])
    named = {name.decode() for file in folder.glob("_C*.so") for name in SHARED.findall(file.read_bytes())}
    of_torch = {path.name for path in Path(find_spec("torch").submodule_search_locations[0], "lib").iterdir()}
    of_any = {"libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "libpthread.so.0", "libdl.so.2"}
    assert named - of_torch - of_any - {"libittnotify.so"} == set(TRAITS["vllm"].cpu_system_libraries)


def test_a_python_without_builds_of_the_engines_costs_a_line(monkeypatch):
    with pytest.raises(InvalidInput) as caught:
        check_python((3, 14, 2))
    line = "Python: got '3.14.2', expected 3.11, 3.12 or 3.13, for which megatron-core has a build"
    assert str(caught.value) == line
    monkeypatch.setattr(sys, "version_info", (3, 14, 2, "final", 0))
    with pytest.raises(InvalidInput, match="Python: got '3.14.2'"):
        check_engines("cpu")
    assert line in [found.text for found in findings("cpu", 1) if found.is_fault]


@pytest.mark.parametrize("release", ["0.17.0", "0.19.3+3f1c", "0.20.0rc1"])
def test_a_release_of_megatron_core_that_is_not_known_costs_a_line(monkeypatch, release):
    """We call it by private names too, so another release may fail after minutes, or train differently."""
    with_core(monkeypatch, release)
    line = f"megatron-core: got '{release}', expected 0.16.1 or 0.19.2"
    with pytest.raises(InvalidInput) as caught:
        check_engines("cpu")
    assert str(caught.value) == line
    assert line in [found.text for found in findings("cpu", 1) if found.is_fault]


def test_both_releases_of_megatron_core_whose_differences_are_known_are_accepted(monkeypatch):
    """A build of a release may have a name of its own after a plus."""
    for release in TRAITS["megatron"].releases:
        for version in (release.version, f"{release.version}+3f1c"):
            with_core(monkeypatch, version)
            assert installed_release("megatron") == release


def test_a_library_that_only_the_newer_release_imports_is_missed_there(monkeypatch):
    lacking(monkeypatch, "triton")
    for version, missing in (("0.16.1", []), ("0.19.2", ["triton"])):
        with_core(monkeypatch, version)
        assert missing_libraries("megatron", "cpu") == missing


def test_the_pinned_release_of_megatron_core_is_one_that_a_run_accepts():
    """All files of pins have the first of them."""
    stated = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
    pinned = {line for extra in ("cpu", "cuda") for line in stated[extra] if line.startswith("megatron-core")}
    assert pinned == {f"megatron-core=={TRAITS['megatron'].releases[0].version}"}


def test_python_versions_match_the_package():
    stated = tomllib.loads(Path("pyproject.toml").read_text())["project"]["requires-python"]
    assert stated == f">={'.'.join(map(str, PYTHONS[0]))},<3.{PYTHONS[-1][1] + 1}"


def file_of(module):
    """The file of an installed module, found without an import of it; None for a name inside a module."""
    top, *rest = module.split(".")
    spec = find_spec(top)
    for folder in (spec.submodule_search_locations if spec else None) or ():
        place = Path(folder, *rest)
        for file in (place / "__init__.py", place.with_suffix(".py")):
            if file.is_file():
                return file
    return None


def statements(body):
    """Statements that every import of a module runs: none of a branch, of a function, or that may fail."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            yield from statements(statement.orelse)
        elif isinstance(statement, ast.ClassDef):
            yield from statements(statement.body)


def imported_by(module, file):
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for statement in statements(ast.parse(file.read_text()).body):
        if isinstance(statement, ast.Import):
            yield from (name.name for name in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - statement.level + 1] if statement.level else []
            base = ".".join([*above, *([statement.module] if statement.module else [])])
            yield from (base, *(f"{base}.{name.name}" for name in statement.names))


def libraries_of(modules):
    """Return the packages of others that the import of modules of one package requires, by reading their sources."""
    own = modules[0].partition(".")[0]
    seen, found, ahead = set(), set(), [*modules]
    while ahead:
        module = ahead.pop()
        if module.partition(".")[0] != own:
            found.add(module.partition(".")[0])
            continue
        parts = module.split(".")
        for name in (".".join(parts[:end]) for end in range(1, len(parts) + 1)):
            if name not in seen and (file := file_of(name)):
                seen.add(name)
                ahead += imported_by(name, file)
    return found - sys.stdlib_module_names


@pytest.mark.parametrize("engine", first(1, ["megatron", "vllm"]))
def test_an_engines_libraries_match_its_imports(engine):
    """Triton is required for another reason: without it vLLM falls back to a runner without our sampler."""
    traits = TRAITS[engine]
    shared = [name for name in (*traits.preloads, *traits.cpu_modules) if name.startswith(engine)]
    on_cuda = [*shared, *(name for name in traits.cuda_modules if name.startswith(engine))]
    release = installed_release(engine)
    own = {*traits.libraries, *(release.libraries if release else ())}
    assert libraries_of(shared) - {"torch"} - (set(OF_TORCH) - own) == own
    assert libraries_of(on_cuda) - libraries_of(shared) == set(traits.cuda_libraries) - {"triton"}


def test_every_module_of_a_rank_with_a_gpu_exists():
    names = [name for traits in TRAITS.values() for name in (*traits.preloads, *traits.cuda_modules)]
    assert [name for name in names if not name.startswith("prefect_rlhf") and file_of(name) is None] == []


@pytest.mark.all
def test_torchs_libraries_match_its_compilers_imports():
    assert libraries_of(["torch", "torch._inductor.compile_fx"]) - {"torchgen", "functorch"} <= set(OF_TORCH)
