"""Modules of other people: another process imports the very file that this one has."""

import subprocess
import sys

import pytest

from prefect_rlhf.files.modules import MAIN, import_from, importable

PACKAGE = "prefect_rlhf.files.modules"


@pytest.fixture(autouse=True)
def forget(monkeypatch, tmp_path):
    """Nothing that a test imports is there for the next."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def test_a_module_is_known_by_its_name_and_file():
    assert importable(__name__) == (__name__, __file__)
    assert importable(PACKAGE) == (PACKAGE, ""), "every process finds this package"
    assert importable("sys") == ("sys", "")


def test_a_module_that_is_here_is_not_loaded_again():
    assert import_from(__name__, __file__) is sys.modules[__name__]


def test_a_module_comes_from_its_file_though_no_path_leads_there(tmp_path):
    """With what it imports from beside itself."""
    (tmp_path / "lonely_helper.py").write_text("NUMBER = 7\n")
    (tmp_path / "lonely.py").write_text("from lonely_helper import NUMBER\n")
    module = import_from("lonely", str(tmp_path / "lonely.py"))
    assert (module.NUMBER, sys.modules["lonely"]) == (7, module)


def test_a_packages_module_is_imported_under_its_package(tmp_path):
    (tmp_path / "lonely" / "deep").mkdir(parents=True)
    (tmp_path / "lonely" / "deep" / "inside.py").write_text("from ..number import NUMBER\n")
    (tmp_path / "lonely" / "number.py").write_text("NUMBER = 8\n")
    assert import_from("lonely.deep.inside", str(tmp_path / "lonely" / "deep" / "inside.py")).NUMBER == 8


def test_another_file_of_the_same_name_is_not_taken_for_it(tmp_path):
    """Neither one that is imported already, nor one that the path leads to."""
    for folder, number in (("first", 1), ("second", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "twin.py").write_text(f"NUMBER = {number}\n")
    sys.path.insert(0, str(tmp_path / "first"))
    sys.path.append(str(tmp_path / "second"))
    second = import_from("twin", str(tmp_path / "second" / "twin.py"))
    first = import_from("twin", str(tmp_path / "first" / "twin.py"))
    assert (first.NUMBER, second.NUMBER) == (1, 2)
    assert import_from("twin", str(tmp_path / "second" / "twin.py")) is second


def test_a_name_that_stands_for_no_path_is_loaded_from_the_file(tmp_path):
    """As Prefect names a flow's file whose own name is taken."""
    (tmp_path / "anything.py").write_text("NUMBER = 9\n")
    assert import_from("__a_loader_0123__", str(tmp_path / "anything.py")).NUMBER == 9


def test_a_script_is_known_by_its_files_name_and_not_run_again(tmp_path):
    """What it defines is where `__main__` is, in the process that runs it."""
    script = tmp_path / "script.py"
    script.write_text(
        f"from {PACKAGE} import import_from, importable\n"
        f"place = importable({MAIN!r})\n"
        "print(place == ('script', __file__), import_from(*place).__name__)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["True", MAIN]


def test_a_file_that_fails_is_not_half_there(tmp_path):
    (tmp_path / "failing.py").write_text("1 / 0\n")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            import_from("failing_as", str(tmp_path / "failing.py"))
    assert "failing_as" not in sys.modules
