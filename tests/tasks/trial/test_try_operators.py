"""An author's mistakes are found on two made-up rows, each in one line that names function, file and line."""

import os
import re
import sys
from contextlib import closing
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from prefect.utilities.importtools import import_object

from prefect_rlhf.engines.gang.local import LocalGang
from prefect_rlhf.engines.rank.trial.trial_rank import TrialRank
from prefect_rlhf.errors.errors import GraphError, InvalidInput
from prefect_rlhf.placement.graph import Dataset
from prefect_rlhf.placement.models.model import ModelSpec, TransformerShape
from prefect_rlhf.tasks.checkpoints.best import BestModel
from prefect_rlhf.tasks.data.datasets import PromptDataset
from prefect_rlhf.tasks.data.role_tokenizers import tokenizers_of
from prefect_rlhf.tasks.tracing.trace import trace_body
from prefect_rlhf.tasks.trial.try_operators import GANG, Trial, evaluation_of, other_temperatures, try_operators
from tests.support.cases import first
from tests.support.tiny import make_prompts
from tests.tasks.small_tokenizer import alone, save_bpe_tokenizer, save_small_tokenizer
from tests.tasks.trial import author

SHAPE = TransformerShape(64, 128, 2, 4, 2, 16, 100, 64, 1e4, 1e-5, True)
MODELS = {role: ModelSpec(role, role, head, SHAPE) for role, head in (("teacher", "scalar"), ("student", "lm"))}
DATASETS = {"prompts": Dataset("prompts", ("prompt_tokens",), 16)}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return save_small_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory, tokenizer):
    return PromptDataset("prompts", make_prompts(tmp_path_factory.mktemp("data") / "prompts.parquet"), tokenizer)


def graph_of(body):
    arguments = {name: type("Stand", (), {})() for name in (*MODELS, *DATASETS)}
    return trace_body("some", body, arguments, MODELS, DATASETS)


@pytest.fixture(scope="module")
def gang(prompts):
    """A process that tries one flow's operators after another's, where nothing depends on its being fresh."""
    with closing(LocalGang(GANG)) as gang:
        gang.call(TrialRank.open_dataset, {0: (prompts,)}, doing="open", deadline_seconds=60)
        yield gang


@pytest.fixture
def tried(gang, tmp_path, tokenizer):
    """Run a flow's operators; returns the warnings."""

    def run(body):
        graph = graph_of(body)
        return list(Trial(graph, gang, tmp_path, alone(tokenizer, graph)).run())

    return run


@pytest.fixture
def tried_afresh(prompts, tokenizer):
    """The same in a process of its own, as before a run."""

    def run(body):
        graph = graph_of(body)
        return try_operators(graph, {"prompts": prompts}, alone(tokenizer, graph)).warnings

    return run


def test_a_correct_operator_passes_silently_and_writes_no_files(tried_afresh, tmp_path):
    """What a computation writes into the run's folder goes into one that is gone afterwards."""
    settings = author.Told(told=str(tmp_path / "told.txt"))
    assert tried_afresh(author.body(author.writes_a_file, settings=settings)) == ()
    folder = Path((tmp_path / "told.txt").read_text())
    assert folder.name.startswith("rlhf-trial-")
    assert not folder.exists()


def test_one_tokenizer_for_two_tokenizers_rows_is_refused_naming_both_calls(gang, tmp_path, tokenizer):
    """The judge has a tokenizer of its own, so a computation of both roles' rows has none."""
    folders = {"student": tokenizer, "judge": save_bpe_tokenizer(tmp_path / "judge", ["what is it"])}
    models = {role: ModelSpec(role, folder, "lm", SHAPE) for role, folder in folders.items()}
    arguments = {name: type("Stand", (), {})() for name in (*models, *DATASETS)}

    def refused(operator):
        graph = trace_body("some", author.judged_by(operator), arguments, models, DATASETS)
        with pytest.raises(InvalidInput) as error:
            list(Trial(graph, gang, tmp_path, tokenizers_of(graph)).run())
        return str(error.value)

    assert refused(author.decodes_both_with_one) == (
        "decodes_both_with_one: context.tokenizer: got 'the tokenizers of student (rows of student_generate) and judge "
        "(rows of verdict)', expected context.tokenizers['student'] or context.tokenizers['judge']; "
        "text_columns(rows) decodes each input with its own tokenizer"
    )
    assert re.search(r"text_columns: got '.*', expected .*/judge, which wrote", refused(author.decodes_with_the_others))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (author.body(author.reads_a_typo), "key that reads_a_typo reads: got 'logprobz', .*: scores"),
        (author.body(author.masks_a_typo), "key that masks_a_typo reads: got 'scores', .*: tokens, .*logprobs"),
        (
            author.body(author.names_another_key),
            "keys that names_another_key returns: got 'advantage', .*: advantages ",
        ),
        (author.body(author.names_one_key_more), "keys that names_one_key_more returns: got 'advantages, returns', "),
        (author.body(author.drops_rows), "rows of 'advantages' that drops_rows returns: got 1, expected 4, "),
        (author.body(author.returns_a_tensor), "result of returns_a_tensor: got 'Tensor', expected Computed "),
        (author.body(author.right, author.reads_returns), "key that reads_returns reads: got 'returns', .*mask"),
        (author.body(author.right, author.returns_a_number), "result of returns_a_number: got 'Tensor'"),
        (
            author.second_turn(max_new_tokens=1),
            r"tokens of a row that adds_two_tokens makes: got \d+, expected at most \d+, the \d+ of the longest row of "
            r"its inputs and max_new_tokens=1 \(",
        ),
        (
            author.second_turn(longest=3),
            r"tokens of a row that adds_two_tokens makes: got \d+, expected at most 3, as ",
        ),
        (
            author.body(author.right, author.is_detached),
            "student_train: gradient of is_detached: got 'none', expected values that depend on logprobs ",
        ),
        (author.body(author.right, author.ignores_the_model), "gradient of ignores_the_model: got 'none', "),
        (author.body(author.returns_an_array), "column 'advantages' that returns_an_array returns: got 'ndarray', "),
        (author.body(author.returns_plain_numbers), "column 'advantages' .*: got 'list of float', expected a tensor"),
        (author.body(author.returns_one_number), "column 'advantages' .*: got 'a tensor of 0 dimensions', expected"),
        (
            author.body(author.names_no_key),
            r"columns that names_no_key returns: got 'Tensor', .*\({'advantages': ...}\)",
        ),
        (
            author.body(author.measures_each_row),
            "metric 'score' that measures_each_row returns: got 'Tensor', expected a",
        ),
        (author.body(author.changes_its_rows), "rows that it changes: got 'student_generate.logprobs', .* a copy"),
        (
            author.body(author.right, author.returns_an_array_of_values),
            "values that returns_an_array_of_values returns: got 'ndarray', expected a tensor",
        ),
        (
            author.body(author.right, author.measures_with_a_plain_number),
            "metric 'share' that measures_with_a_plain_number returns: got 'float', expected a tensor",
        ),
        (author.body(author.right, author.averages_itself), r"averages_itself: shape of a loss's values: got \[\]"),
        (author.without_advantages, "student_train: key that policy_gradient reads: got 'advantages', .*mask"),
    ],
)
def test_a_mistake_is_one_line_with_function_file_and_line(tried, body, says):
    with pytest.raises(InvalidInput, match=says) as refused:
        tried(body)
    assert re.search(r"\((/.*/author|/.*/losses)\.py:\d+", str(refused.value))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("limit", [{"max_new_tokens": 2}, {"longest": 40}])
def test_computed_rows_as_long_as_stated_pass_silently(tried, limit):
    assert tried(author.second_turn(**limit)) == []


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (author.body(author.misspells_an_attribute), "AttributeError: 'Tensor' object has no attribute 'sumn'"),
        (author.body(author.misspells_a_name), "NameError: name 'rolout' is not defined"),
        (author.body(author.calls_with_an_argument_too_many), r"TypeError: Batch.mask\(\) takes 2 .* but 3 were given"),
        (author.body(author.imports_what_is_not_there), "ModuleNotFoundError: No module named 'no_such_package'"),
        (
            author.body(author.right, author.misspells_a_function),
            "AttributeError: module 'torch' has no attribute 'sof",
        ),
    ],
)
def test_a_mistake_that_no_values_can_cure_is_one_line_with_file_and_line(tried, body, says):
    with pytest.raises(GraphError) as refused:
        tried(body)
    assert re.search(rf"failed on made-up rows, and would fail on any rows: .*{says}", str(refused.value))
    assert re.search(r"\(/.*/author\.py:\d+ in \w+\)$", str(refused.value))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("operator", "says"),
    [
        (author.dislikes_the_data, "KeyError: 'b'"),
        (author.looks_for_a_number, "AttributeError: 'NoneType' object has no attribute 'group'"),
        (author.binds_a_name_in_one_branch, "UnboundLocalError"),
        (author.divides_by_zero, "ZeroDivisionError"),
    ],
)
def test_an_error_that_made_up_rows_may_cause_stops_no_run(tried, operator, says):
    """It is told, with the line of the author's own file; what depends on it is not tried."""
    (warning,) = tried(author.body(operator, author.reads_returns))
    assert warning.startswith(f"{operator.name} failed on made-up rows")
    assert says in warning
    assert re.search(rf"author\.py:\d+ in {operator.name}\)$", warning)


def test_a_loss_with_a_zero_gradient_is_accepted(tried):
    """Of made-up advantages, say; and it need not depend on all that it asks for."""
    assert tried(author.body(author.right, author.asks_for_more_than_it_uses)) == []


@pytest.mark.parametrize(
    "body",
    [author.body(author.measures_a_mean), author.body(author.right, author.writes_into_its_batch)],
    ids=["tensor of a number", "columns of its own"],
)
def test_what_harms_nothing_is_accepted(tried, body):
    assert tried(body) == []


def test_a_loss_that_other_rows_change_gives_a_warning(tried):
    """A plan with more micro-batches would train on another loss."""
    (warning,) = tried(author.body(author.right, author.centres_over_the_micro_batch))
    assert re.match(r"a row's loss depends on other rows, or on chance: centres_over.* \(.*author\.py:\d+\); ", warning)


def test_a_state_that_no_checkpoint_can_hold_gives_a_warning(tried):
    """Without it, a run ends at its first checkpoint, perhaps hours later."""
    (warning,) = tried(author.body(author.keeps_a_tensor))
    assert warning.startswith("state of keeps_a_tensor: got 'Tensor', expected a dataclass with @saved_state or plain")
    assert warning.endswith("; the first checkpoint would end the run")


def test_log_probabilities_at_another_temperature_than_that_of_the_samples_give_a_warning():
    """Of a loss and of an inference; not if the flow names a temperature, and not of greedy answers."""
    (warning,) = other_temperatures(graph_of(author.samples_at(0.5)))
    assert warning.startswith(
        "student_generate samples at temperature 0.5, log-probabilities of again and student_train"
    )
    for body in (author.samples_at(0.5, temperature=0.5), author.samples_at(0.0), author.samples_at(1.0)):
        assert list(other_temperatures(graph_of(body))) == []


@pytest.mark.all
def test_a_computation_that_ends_its_process_stops_no_run(tried_afresh):
    (warning,) = tried_afresh(author.body(author.dies))
    assert warning.startswith("dies and later calls were not tried: rank 0 ended with status 3")


@pytest.fixture(scope="module")
def evaluated(gang, tmp_path_factory, tokenizer):
    """A graph that evaluates, and the metrics of its evaluation on made-up rows."""
    graph = graph_of(author.evaluates)
    folder, tokenizers = tmp_path_factory.mktemp("trial"), alone(tokenizer, graph)
    trial = Trial(evaluation_of(graph), gang, folder, tokenizers)
    assert list(trial.run()) == [], "neither a reward function was called nor what only training runs"
    return graph, trial.metrics


@pytest.mark.parametrize(
    ("metric", "says"),
    [
        (
            "record_evaluation.scoer",
            "record_evaluation.score, perhaps: evaluations have .*record_evaluation.score_short",
        ),
        ("record_evaluation.score_long", "record_evaluation.score"),
        (
            "student_evaluation.loss",
            ".*evaluations have student_evaluation.truncated, student_evaluation.kept_mass, score.exact, ",
        ),
        ("score.exat", "score.exact, perhaps"),
    ],
)
def test_a_best_metric_that_no_evaluation_can_have_is_refused_before_a_device_is_used(evaluated, metric, says):
    with pytest.raises(InvalidInput, match=f"best_metric: got '{metric}', expected {says}") as refused:
        BestModel(metric).check_metric(*evaluated)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("metric", ["measured.lenth", "score.exact/lenth"])
def test_a_best_metric_that_a_users_function_may_make_gives_a_warning(evaluated, metric):
    """What it makes of real rows may have other names than what it makes of made-up ones."""
    warning = BestModel(metric).check_metric(*evaluated)
    assert warning.startswith(f"best_metric: only the first evaluation shows whether {metric} exists; if not, ")
    assert "measured.length" in warning


@pytest.mark.parametrize(
    "metric",
    [
        "record_evaluation.score_exact",
        "measured.length",
        "score.short",
        "score.unscored",
        "student_evaluation.truncated",
    ],
)
def test_an_existing_best_metric_passes_silently(evaluated, metric):
    assert BestModel(metric).check_metric(*evaluated) is None


@pytest.mark.parametrize(("name", "entrypoint"), first(1, [("far_file", "{0}.py:{0}"), ("far_module", "{0}:{0}")]))
def test_an_operator_is_found_wherever_its_file_is(tried_afresh, tmp_path, monkeypatch, name, entrypoint):
    """Prefect loads a deployment's flow in the folder that was pulled, which stays on no path; a name may be taken."""
    (tmp_path / f"{name}_helper.py").write_text("NAME = 'advantages'\n")
    (tmp_path / f"{name}.py").write_text(
        "from prefect_rlhf.engines.compute import Computed\n"
        "from prefect_rlhf.tasks.tracing.operations import computation\n"
        f"from {name}_helper import NAME\n\n"
        f"@computation(NAME)\ndef {name}(rollout, scores, settings):\n"
        "    return Computed({NAME: rollout['logprobs']})\n"
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    if name == "far_file":
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    with monkeypatch.context() as pulled:
        pulled.chdir(tmp_path)
        operator = import_object(entrypoint.format(name))
    sys.path[:] = [entry for entry in sys.path if entry != str(tmp_path)]
    assert tried_afresh(author.body(operator)) == ()


def test_an_operator_that_a_fresh_process_cannot_import_is_refused(tried_afresh, tmp_path, monkeypatch):
    """It names operator, module and what to do."""
    file = tmp_path / "only_here.py"
    file.write_text(
        "import os\nfrom prefect_rlhf.tasks.tracing.operations import computation\n\n"
        "assert os.environ.get('ONLY_HERE') == str(os.getpid())\n\n"
        "@computation('advantages')\ndef only_here(rollout, scores, settings):\n    return None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("ONLY_HERE", str(os.getpid()))
    with pytest.raises(InvalidInput) as refused:
        tried_afresh(author.body(import_module("only_here").only_here))
    said = str(refused.value)
    assert said.startswith(
        f"operator of only_here: got 'only_here of {file}', expected an operator that a fresh process can import"
    )
    assert f"as ranks do; there: AssertionError ({file}:4 in <module>); fix that file, install its imports" in said
