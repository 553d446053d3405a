"""An algorithm's name: shipped, a module's function or a file's, from wherever; a wrong one is said in one line."""

import sys

import pytest

from prefect_rlhf.errors.errors import GraphError, InvalidInput
from prefect_rlhf.files.modules import IN_RANK
from prefect_rlhf.flows.algorithm.places import ALGORITHMS
from prefect_rlhf.flows.algorithm.rlhf_flow import find_flow

pytestmark = pytest.mark.quick

FLOW = """
from prefect_rlhf.blocks.model import Model
from prefect_rlhf.flows.algorithm.rlhf_flow import rlhf_flow
from helper_of_{name} import NUMBER

@rlhf_flow("{name}")
def run(actor: Model) -> None:
    pass
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder, which is on no path; what is imported from it is forgotten again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def write_flow(folder, name):
    """A flow's file, which imports another that lies beside it."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(FLOW.format(name=name))
    (folder / f"helper_of_{name}.py").write_text("NUMBER = 1\n")


@pytest.mark.parametrize("name", ["mine:run", "mine.py:run", "./mine.py:run", "{folder}/mine.py:run"])
def test_a_flow_is_found_in_its_own_folder(folder, name):
    write_flow(folder, "mine")
    assert find_flow(name.format(folder=folder)).algorithm.name == "mine"


def test_a_flow_in_another_folder_can_import_its_neighbours(folder):
    write_flow(folder / "else", "far")
    assert find_flow("else/far.py:run").algorithm.name == "far"


def test_a_flow_is_found_in_a_package(folder):
    write_flow(folder / "package", "packed")
    (folder / "package" / "packed.py").write_text(FLOW.format(name="packed").replace("helper", "package.helper"))
    assert find_flow("package.packed:run").algorithm.name == "packed"


def test_a_file_that_starts_its_flow_when_ranks_import_it_is_refused(monkeypatch):
    """It would start another run, whose ranks would start another."""
    monkeypatch.setenv(IN_RANK, "1")
    with pytest.raises(
        GraphError, match='^importing the file of ppo starts a run; put the call under `if __name__ == "__main__":`$'
    ):
        find_flow("ppo")(steps=1)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("nobody", "", f"one of {', '.join(ALGORITHMS)}, module:function or file.py:function"),
        ("nowhere:run", "", "an existing module: nowhere is neither in {folder} nor installed"),
        ("nowhere.py:run", "", "an existing file; {folder}/nowhere.py does not exist"),
        ("...:run", "", "module:function, such as mine.rloo:rloo, or file.py:function"),
        ("bad:other", FLOW, "an @rlhf_flow function of bad: run ('other' does not exist)"),
        ("bad:NUMBER", FLOW, "an @rlhf_flow function of bad: run ('NUMBER' is a int)"),
        ("bad:run", "x = 1\nx[0]\n", "it raised TypeError: 'int' object is not subscriptable ({folder}/bad.py:2 in"),
        ("bad.py:run", "import nowhere\n", "it raised ModuleNotFoundError: No module named 'nowhere' ({folder}/"),
        ("bad:run", "x = = 1\n", "it raised SyntaxError: invalid syntax (bad.py, line 1) ({folder}/bad.py:1)"),
        ("bad:run", "raise SystemExit(3)\n", "it raised SystemExit: 3 ({folder}/bad.py:1 in"),
    ],
)
def test_a_name_without_a_flow_is_refused_with_the_reason(folder, name, text, says):
    """Nothing of that name, nothing in it, or an error of the file's own, with its line."""
    write_flow(folder, "bad")
    (folder / "bad.py").write_text(text.format(name="bad"))
    with pytest.raises(InvalidInput) as refused:
        find_flow(name)
    assert str(refused.value).startswith(f"algorithm: got {name!r}, expected ")
    assert says.format(folder=folder) in str(refused.value)
    assert "\n" not in str(refused.value)
