"""Before devices are used, rewards are called on rows of the user: what no response can cure is refused in a line."""

import re
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from prefect_rlhf.engines.rows import Batch
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.graph import Dataset
from prefect_rlhf.placement.models.model import ModelSpec, TransformerShape
from prefect_rlhf.tasks.data.datasets import PreferenceDataset, PromptDataset
from prefect_rlhf.tasks.data.host_score import plain_rows
from prefect_rlhf.tasks.host_rewards import HostRewards
from prefect_rlhf.tasks.settings import Sampling
from prefect_rlhf.tasks.tracing.calls import generate, score
from prefect_rlhf.tasks.tracing.trace import trace_body
from prefect_rlhf.tasks.trial.try_rewards import made_up_rows, try_rewards
from tests.support.tiny import make_pairs
from tests.tasks.small_tokenizer import save_small_tokenizer

FILE = Path(__file__).parent / "rewards_tried.py"
SHAPE = TransformerShape(64, 128, 2, 4, 2, 16, 100, 64, 1e4, 1e-5, True)
MODEL = {"actor": ModelSpec("actor", "actor", "lm", SHAPE)}


def dataset(folder, name, tokenizer, rows=6, **more):
    """Rows with their number, and the columns of each signature."""
    columns = {
        "prompt": ["the best film"] * rows,
        "number": list(range(rows)),
        "hint": [f"hint {row}" for row in range(rows)],
        "data_source": ["films"] * rows,
        "ground_truth": ["a film"] * rows,
        "extra_info": [{"index": row} for row in range(rows)],
        "entry": [{"question": "what", "answer": "a film"}] * rows,
        "file": [str(folder / "called.txt")] * rows,
    }
    pq.write_table(pa.table(columns | more), folder / f"{name}.parquet")
    return PromptDataset(name, str(folder / f"{name}.parquet"), tokenizer, split_column=None)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return save_small_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def warnings_of(sources, name, signature="row", seed=0, calls=True, try_first=True, **settings):
    """Try a function of rewards_tried.py on rows of each source; returns the warnings."""
    function = {"function": f"{FILE}:{name}", "signature": signature, "try_first": try_first}
    rewards = HostRewards.model_validate({"functions": {"mine": function}} | settings)

    def body(prompts, held_out, actor):
        score(rewards, generate(actor, prompts, batch_size=2))
        greedy = generate(actor, held_out, sampling=Sampling(temperature=0.0), every=2, name="evaluation")
        score(rewards, greedy, every=2, name="reward_evaluation")

    stands = {name: type("Stand", (), {})() for name in (*sources, "actor")}
    datasets = {name: Dataset(name, ("prompt_tokens",), len(source)) for name, source in sources.items()}
    return try_rewards(trace_body("some", body, stands, MODEL, datasets), sources, seed, calls=calls)


@pytest.fixture
def tried(tmp_path, tokenizer):
    """Try a function on six training rows and two held-out rows."""
    training = dataset(tmp_path, "prompts", tokenizer, number_in_training=["1"] * 6)
    sources = {"prompts": training, "held_out": dataset(tmp_path, "held_out", tokenizer, 2)}
    return partial(warnings_of, sources)


@pytest.mark.parametrize(
    ("name", "signature"),
    [
        ("right", "row"),
        ("right_of_trl", "trl"),
        ("right_of_verl", "verl"),
        ("right_of_reasoning_gym", "reasoning_gym"),
        ("right_and_async", "row"),
    ],
)
def test_a_correct_reward_passes_silently(tried, name, signature):
    assert tried(name, signature) == []


@pytest.mark.parametrize(
    ("name", "signature", "says"),
    [
        ("misspelt", "row", "row 0 of prompts: KeyError: 'answr' ({file}:LINE in misspelt); a row has prompt, "),
        ("misspelt_in_trl", "trl", "row 0 of prompts: KeyError: 'answr' ({file}:LINE in misspelt_in_trl); a row has "),
        (
            "misspelt_in_verl",
            "verl",
            "row 0 of prompts: KeyError: 'indx' ({file}:LINE in misspelt_in_verl); a row has ",
        ),
        ("of_training_rows_only", "row", "row 0 of held_out: KeyError: 'number_in_training' ({file}:LINE in "),
        ("wrong_name_in_the_last_row", "row", "row 5 of prompts: NameError: name 'nothing_of_this_name' is not defin"),
    ],
)
def test_an_error_that_no_response_can_cure_is_refused_with_row_file_and_line(tried, name, signature, says):
    """Of the held-out rows too, which may have other columns."""
    with pytest.raises(InvalidInput) as refused:
        tried(name, signature)
    said = str(refused.value)
    assert said.startswith(f"reward.functions.mine: got '{FILE}:{name}', expected a function that can score ")
    assert says.format(file=FILE) in re.sub(r"py:\d+ in", "py:LINE in", said)
    assert "\n" not in said


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("no_number", {}, r"row 0: ValueError: could not convert string to float: '.*' \({file}:\d+ in no_number\)$"),
        ("not_a_number", {}, r"row 0: returned nan, not a finite number \({file}:\d+ in not_a_number\)$"),
        ("beyond_the_bound", {}, r"row 0: returned 1e\+20, not a number from -1e\+09 to 1e\+09 \({file}:\d+ in "),
        ("hangs", {"deadline_seconds": 0.3}, r"row 0: no value after 0.3 s \({file}:\d+ in hangs\)$"),
        ("dies", {}, r"row 0: its process ended with status 3 \({file}:\d+ in dies\)"),
    ],
)
def test_an_error_that_a_real_response_may_cure_is_a_warning(tried, name, settings, says):
    """Once, though the held-out rows fail in the same way."""
    (warning,) = tried(name, **settings)
    failed = "failed on 4 of 4 rows of prompts with a made-up response, and may fail on real responses; "
    assert warning.startswith(f"reward mine ({FILE}:{name}) {failed}")
    assert re.search(says.replace("{file}", re.escape(str(FILE))), warning), warning
    assert "\n" not in warning


def test_a_trl_function_called_with_rows_is_refused_with_its_signature(tried):
    """A row can be its only argument, so that the import does not see it."""
    (warning,) = tried("misspelt_in_trl")
    assert warning.endswith(" in misspelt_in_trl); set signature: trl")
    with pytest.raises(InvalidInput, match=r" of type list, not a number \(.* in one_of_trl\); set signature: trl"):
        tried("one_of_trl")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gives_text", "returned '1.0' of type str, not a number"),
        ("gives_a_dict", "returned a dict without score: {'points': 1.0}"),
        ("gives_a_pair", "returned (1.0, 'right') of type tuple, not a number"),
        ("yields", "of type generator, not a number"),
        ("makes_a_reward", "of type function, not a number"),
    ],
)
def test_a_reward_that_returns_no_number_for_any_row_is_refused(tried, name, says):
    """A value of another type has nothing to do with the response."""
    with pytest.raises(InvalidInput, match=re.escape(says)) as refused:
        tried(name)
    assert f" in {name})" in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "signature", "says"),
    [
        ("names_a_number_with_two_lines", "row", r"returned a number named 'words\nin all', expected a name of"),
        ("logs_two_lines", "trl", r"log_metric got a number named 'words\nin all', expected a name of"),
        ("names_too_many_numbers", "row", "returned 70 numbers besides the score, with 'word 69', expected at most 64"),
    ],
)
def test_a_reward_whose_numbers_have_wrong_names_is_refused_with_the_name(tried, name, signature, says):
    """The function chose the name, so no response is to blame."""
    with pytest.raises(InvalidInput, match=re.escape(says)) as refused:
        tried(name, signature)
    assert refused.value.seen == f"{FILE}:{name}" and "\n" not in str(refused.value)


def test_a_reward_that_returns_no_number_for_some_rows_is_a_warning(tried):
    (warning,) = tried("gives_text_at_times")
    assert "failed on " in warning and "returned 'none' of type str, not a number" in warning


def test_a_reward_that_applies_to_no_row_is_a_warning(tried):
    (warning,) = tried("never_applies")
    assert warning.startswith(f"reward mine ({FILE}:never_applies) returned None for a made-up response to each of 4 r")
    assert re.search(r"rewards_tried\.py:\d+ in never_applies\)$", warning)


class Facts:
    """Rows whose dicts differ in their keys; a column of a file has the same keys in each row."""

    name, column_kinds, num_items = "prompts", {"facts": "other"}, 3

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def __len__(self):
        return 3

    def read(self, row_ids):
        return {"prompt_tokens": [[5, 6] for _ in row_ids]}

    def read_column(self, name, row_ids):
        return [{"name": "a film"} | ({"year": row} if row else {}) for row in row_ids]


def test_a_key_that_only_some_rows_lack_is_a_warning(tokenizer):
    """These rows fail, as the share most_failed of a step's rows may."""
    (warning,) = warnings_of(dict.fromkeys(("prompts", "held_out"), Facts(tokenizer)), "in_some_rows")
    assert "failed on 1 of 3 rows of prompts" in warning
    assert "; row 0: KeyError: 'year' (" in warning


@pytest.mark.parametrize("how", [{"try_first": False}, {"calls": False}])
def test_a_reward_that_must_not_be_tried_is_only_imported(tried, tmp_path, how):
    """Calls may cost money; a run that starts again has tried its rewards."""
    assert tried("notes", **how) == []
    assert not (tmp_path / "called.txt").exists()
    with pytest.raises(InvalidInput, match="a function in .*rewards_tried.py; it has notes"):
        tried("note", **how)


def test_the_rows_are_the_first_the_last_and_some_between_by_the_seed(tried, tmp_path):
    called = set()
    for seed in range(6):
        tried("notes", seed=seed)
        numbers = [int(number) for number in (tmp_path / "called.txt").read_text().split()]
        (tmp_path / "called.txt").unlink()
        assert len(numbers) == 4 + 2, "four of six training rows, and both held-out rows"
        assert numbers[:2] == [0, 5] and numbers[4:] == [0, 1]
        called |= set(numbers)
    assert called == set(range(6))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_few_rows_are_tried_once_each(tmp_path, tokenizer, size):
    assert sorted(made_up_rows(dataset(tmp_path, "few", tokenizer, size), 0)) == list(range(size))


def test_rows_that_have_an_answer_keep_it(tmp_path, tokenizer):
    """The chosen and the rejected answer of a pair are rows of their own."""
    pairs = PreferenceDataset("pairs", make_pairs(tmp_path / "pairs.parquet", 2), tokenizer)
    rows = made_up_rows(pairs, 0)
    assert {row: values["response"] for row, values in sorted(rows.items())} == {
        0: "the best film",
        1: "a bad film",
        2: "the best film",
        3: "a bad film",
    }


def test_a_made_up_row_has_a_real_rows_columns_and_types(tmp_path, tokenizer):
    source = dataset(tmp_path, "prompts", tokenizer)
    tried = made_up_rows(source, 0)[0]
    (prompt,) = source.read([0])["prompt_tokens"]

    class Columns:
        kinds = source.column_kinds

        def read(self, name):
            return source.read_column(name, [0])

    rollout = {
        "tokens": [torch.tensor([*prompt, *tried["response_ids"]])],
        "prompt_length": [torch.tensor(len(prompt))],
    }
    (scored,) = plain_rows(Batch(rollout, torch.tensor([0]), Columns(), tokenizer), own_prompts=False)
    assert tried == scored
