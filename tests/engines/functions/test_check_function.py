"""A function that cannot be called is refused before anything runs: one line that says what would be right."""

import pytest
from host_cases import FOLDER, function, line_of

from prefect_rlhf.engines.functions.function import HostFunction
from prefect_rlhf.engines.functions.scoring.pool import check_function
from prefect_rlhf.errors.errors import InvalidInput

PERSON = FOLDER / "of_a_person.py"


@pytest.mark.parametrize(
    ("written", "signature", "expected"),
    [
        ("no_such_module:f", "row", "a module that can be imported: ModuleNotFoundError: No module named 'no_such_mod"),
        ("no/such/file.py:f", "row", "an existing file; "),
        (f"{PERSON}:lenght", "row", f"a function in {PERSON}; it has length"),
        (f"{PERSON}:A_NUMBER", "row", "a function, not a value of type int"),
        (f"{PERSON}:Judge", "row", "a function, not a class"),
        (
            f"{PERSON}:two",
            "row",
            f"a function that takes (row): missing a required argument: 'other' ({line_of('two')})",
        ),
        (
            f"{FOLDER / 'of_trl.py'}:named_only",
            "row",
            "a function that takes (row): missing a required argument: 'completions' ("
            f"{line_of('named_only', 'of_trl.py')}); set signature: trl",
        ),
        (f"{FOLDER / 'of_verl.py'}:compute_score", "trl", "it takes no completions ("),
        (f"{FOLDER / 'of_verl.py'}:compute_score", "trl", "; set signature: verl"),
        (f"{FOLDER / 'of_reasoning_gym.py'}:score_answer", "row", "; set signature: reasoning_gym"),
        (f"{PERSON}:length", "verl", "a function that takes (data_source, solution_str, ground_truth, extra_info): "),
        (f"{PERSON}:length", "reasoning_gym", "a function that takes (answer, entry): too many positional"),
        (f"{PERSON}:length", "trl", "a function that takes (completions, **columns): it takes no completions"),
        (f"{FOLDER / 'of_trl.py'}:wants_trainer", "trl", "it needs trainer_state, an object of TRL's trainer"),
        (f"{FOLDER / 'of_trl.py'}:no_completions", "trl", "it takes no completions"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused(written, signature, expected):
    with pytest.raises(InvalidInput) as caught:
        check_function(HostFunction("mine", written, signature=signature))
    message = str(caught.value)
    assert message.startswith("reward.functions.mine: got '")
    assert expected in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import math\nmath.sqrt(-1)", "ValueError: math domain error ({file}:2 in <module>)"),
        ("def f(row):\nreturn 1", "({file}:2)"),
        ("import sys\nsys.exit(3)", "SystemExit: 3 ({file}:2 in <module>)"),
        (
            "import os\nprint('no licence')\nos._exit(3)",
            "its process ended with status 3; its last output: 'no licence'",
        ),
        ("import os\nos.kill(os.getpid(), 9)", "its process died by SIGKILL"),
        ("while True: pass", "no message from its process for 2 s; reward.start_seconds gives it more"),
        ("def __getattr__(name): raise LookupError('no licence')", "LookupError: no licence ({file}:1 in __getattr__)"),
    ],
    ids=["raises", "syntax", "sys.exit", "os._exit", "SIGKILL", "hangs", "names raise"],
)
def test_a_module_that_cannot_be_imported_is_refused(tmp_path, source, expected):
    file = tmp_path / "mine.py"
    file.write_text(source)
    with pytest.raises(InvalidInput) as caught:
        check_function(HostFunction("mine", f"{file}:f"), seconds=2.0)
    assert "expected a module that can be imported: " in str(caught.value)
    assert expected.format(file=file) in str(caught.value)


def test_a_column_that_the_dataset_lacks_is_refused():
    check_function(function("named_only", "trl"), columns=["ground_truth"])
    with pytest.raises(InvalidInput, match=r"got \['label'\], expected a dataset with a column ground_truth"):
        check_function(function("named_only", "trl"), columns=["label"])


def test_a_missing_column_is_answered_with_how_another_column_takes_its_place():
    """verl's functions need two, and most files call them otherwise."""
    with pytest.raises(InvalidInput) as refused:
        check_function(function("compute_score", "verl"), columns=["question", "answer"])
    remedy = "a column of another name is given by prompts.columns: {data_source: COLUMN, ground_truth: COLUMN}"
    assert str(refused.value).endswith(remedy)


def test_modules_next_to_a_function_are_importable(tmp_path):
    """A file that is named is imported with its folder on the path, a module from where the process runs."""
    (tmp_path / "beside.py").write_text("def helped(row):\n    return 1\n")
    (tmp_path / "mine.py").write_text("from beside import helped\n")
    check_function(HostFunction("mine", f"{tmp_path / 'mine.py'}:helped"))


def test_a_module_is_found_where_the_process_runs(tmp_path, monkeypatch):
    (tmp_path / "rewards_here.py").write_text("def exact(row):\n    return 1\n")
    monkeypatch.chdir(tmp_path)
    check_function(HostFunction("mine", "rewards_here:exact"))
    check_function(HostFunction("mine", "rewards_here.py:exact"))


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"function": "no_colon"}, "reward.functions.mine"),
        ({"function": "mine:"}, "reward.functions.mine"),
    ],
)
def test_a_function_that_is_written_wrongly_is_refused(wrong, field):
    with pytest.raises(InvalidInput, match=f"^{field}: got "):
        HostFunction(**({"name": "mine", "function": "m:f"} | wrong))
