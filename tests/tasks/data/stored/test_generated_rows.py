"""Tasks of reasoning-gym as datasets, and what is said of those that are none."""

import importlib.util
import sys

import pytest

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.tasks.data.datasets import PromptDataset
from prefect_rlhf.tasks.data.stored.stored_rows import StoredRows

HAS_PACKAGE = importlib.util.find_spec("reasoning_gym") is not None
needs_package = pytest.mark.skipif(not HAS_PACKAGE, reason="reasoning-gym is an extra")
SUMS = "reasoning_gym:chain_sum?size=20&seed=42&min_terms=2&max_terms=3"


@needs_package
def test_a_task_gives_questions_answers_and_its_scorers_entry():
    """The package itself says that each answer is right, and nothing is not."""
    import reasoning_gym

    source = PromptDataset("prompts", SUMS, "")
    assert (len(source), source.columns) == (20, ("prompt", "question", "answer", "metadata", "entry"))
    task = reasoning_gym.create_dataset("chain_sum", size=20, seed=42, min_terms=2, max_terms=3)
    assert source.read_column("entry", range(20)) == list(task)
    assert source.read_column("prompt", [3]) == source.read_column("question", [3]) == [task[3]["question"]]
    entry, answer = source.read_column("entry", [5])[0], source.read_column("answer", [5])[0]
    assert (task.score_answer(answer, entry), task.score_answer(None, entry)) == (1.0, 0.0)


@needs_package
def test_a_path_gives_the_same_rows_each_time():
    """Without a seed too; with another, others."""
    first, again = (StoredRows("d", "reasoning_gym: chain_sum?size=5").read("answer") for _ in range(2))
    assert first == again != StoredRows("d", "reasoning_gym:chain_sum?size=5&seed=1").read("answer")
    assert len(StoredRows("d", "reasoning_gym:chain_sum")) == 500


BAD = {
    "reasoning_gym:chain_sums": r"^d.path: .* tasks, such as chain_sum",
    "reasoning_gym:chain_sum?min_term=2": r"^d.path: .*options of chain_sum: min_terms, .*; not min_term$",
    "reasoning_gym:chain_sum?min_terms=-2": r"^d.path: .*options that chain_sum takes \(min_terms must be positive\)",
    "reasoning_gym:chain_sum?min_terms=two": r"^d.path: .*options that chain_sum takes",
}


@needs_package
@pytest.mark.parametrize("path", BAD)
def test_an_unknown_task_is_refused_in_one_line(path):
    with pytest.raises(InvalidInput, match=BAD[path]) as refused:
        StoredRows("d", path).read("prompt")
    assert "\n" not in str(refused.value)


@needs_package
def test_generated_rows_have_no_splits():
    """Else held-out prompts would be those that are trained on."""
    with pytest.raises(InvalidInput, match=r"^d.split: got 'test', expected train; another seed"):
        StoredRows("d", SUMS, "split", "test").read("prompt")
    with pytest.raises(InvalidInput, match=r"^d.split_column: 'part' is not used"):
        StoredRows("d", SUMS, "part").read("prompt")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("size=0", "a size that is a whole number from 1 to 1000000"),
        ("size=1e3", "a size that is a whole number"),
        ("size=1000000000", "a size that is a whole number"),
        ("seed=-1", "a seed that is a whole number from 0"),
        ("seed=", "a seed that is a whole number"),
        ("size=true", "a size that is a whole number"),
        ("size", "TASK[?]NAME=VALUE"),
        ("size=2&size=3", "each option once; size occurs twice"),
    ],
)
def test_options_that_cannot_be_read_are_refused_in_one_line(options, says):
    """Whether the package is there or not."""
    with pytest.raises(InvalidInput, match=f"^d.path: got 'reasoning_gym:chain_sum.*expected .*{says}"):
        StoredRows("d", f"reasoning_gym:chain_sum?{options}").read("prompt")


def test_a_missing_package_is_named_with_its_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(InvalidInput, match=r"^d.path: .*pip install '\.\[rewards\]'"):
        StoredRows("d", SUMS).read("prompt")
