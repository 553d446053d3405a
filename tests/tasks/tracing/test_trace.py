"""Tracing: a body becomes exactly the calls it makes, and a body that describes nothing runnable is refused."""

import re
from dataclasses import replace
from functools import partial
from importlib import import_module

import pytest
import torch

from prefect_rlhf.engines.compute import Computed
from prefect_rlhf.engines.losses.protocol import LossValues
from prefect_rlhf.errors.errors import GraphError, InvalidInput
from prefect_rlhf.placement.graph import Dataset, Operation
from prefect_rlhf.placement.models.adapter import AdapterSpec
from prefect_rlhf.placement.models.model import ModelSpec, TransformerShape
from prefect_rlhf.tasks.settings import Optimizer, Product, Sampling, Settings, Update
from prefect_rlhf.tasks.tracing.calls import compute, generate, inference, train_step
from prefect_rlhf.tasks.tracing.heads import adapter_remarks
from prefect_rlhf.tasks.tracing.operations import Bound, computation, loss
from prefect_rlhf.tasks.tracing.select import select
from prefect_rlhf.tasks.tracing.trace import trace_body

pytestmark = pytest.mark.quick

SHAPE = TransformerShape(64, 128, 2, 4, 2, 16, 100, 64, 1e4, 1e-5, True)


class Gain(Settings):
    factor: float = 2.0


@loss("logprobs")
def some_loss(output, batch, settings):
    return LossValues(output * settings.factor)


@loss("values")
def value_loss(output, batch, settings):
    return LossValues(output)


@loss("scores")
def score_loss(output, batch, settings):
    return LossValues(output)


@computation("advantages")
def some_advantages(rollout, scores, settings):
    return Computed({"advantages": rollout["logprobs"]})


class Stand:
    """An argument object with an identity."""


MODELS = {"actor": ModelSpec("actor", "a", "lm", SHAPE), "reward": ModelSpec("reward", "r", "scalar", SHAPE)}
DATASETS = {"prompts": Dataset("prompts", ("prompt_tokens",), 10)}


def traced(body, models=MODELS, datasets=DATASETS):
    arguments = {name: Stand() for name in (*models, *datasets)}
    return trace_body("some", body, arguments, models, datasets)


def good_body(prompts, actor, reward):
    rollout = generate(actor, prompts, batch_size=4, sampling=Sampling(max_new_tokens=3), samples=2)
    scores = inference(reward, rollout, output="scores")
    advantages = compute(some_advantages, rollout, scores, settings=Gain())
    train_step(actor, some_loss(Gain(factor=3.0)).on(rollout, advantages))


def test_the_generates_staleness_becomes_the_graphs():
    """All of them say the same; evaluation says nothing, since it has the newest weights."""

    def body(first, second, evaluation=0):
        def inner(prompts, actor, reward):
            generate(actor, prompts, batch_size=4, staleness=first)
            rollout = generate(actor, prompts, batch_size=4, staleness=second, name="again")
            inference(reward, rollout, output="scores")
            generate(actor, prompts, every=2, staleness=evaluation, name="evaluate")
            train_step(actor, some_loss(Gain()).on(rollout))

        return inner

    graph = traced(body(1, 1))
    lags = {edge.target: edge.lag for edge in graph.version_edges()}
    assert (graph.staleness, lags) == (1, {"actor_generate": 2, "again": 2, "evaluate": 0, "actor_train": 1})
    with pytest.raises(GraphError, match="again has staleness 0, an earlier generate 1"):
        traced(body(1, 0))
    with pytest.raises(GraphError, match="evaluate is evaluation, which uses the newest weights"):
        traced(body(1, 1, evaluation=1))


def test_a_body_becomes_its_calls_and_data_edges():
    graph = traced(good_body)
    assert [call.name for call in graph] == ["actor_generate", "reward_inference", "some_advantages", "actor_train"]
    assert graph.reads_of("some_advantages")["reward_inference"] == ("scores",)
    assert [call.num_rows for call in graph] == [8, 8, 8, 8]
    assert [call.max_new_tokens for call in graph] == [3, 0, 0, 0]
    assert graph.model("actor").optimizer is not None
    assert graph.model("reward").optimizer is None


def test_a_loss_crosses_a_graph_with_its_settings():
    """What the rank runs is what the body bound, settings included."""
    (term,) = traced(good_body).call("actor_train").terms
    assert Bound(term.operation)(torch.tensor(2.0), {}).values == 6.0


def test_a_graph_names_operations_and_not_their_modules():
    """The module goes along to other processes, but two graphs that differ in it alone are one."""
    operation = traced(good_body).call("some_advantages").operation
    assert (operation.name, operation.module) == ("some_advantages", __name__)
    assert replace(operation, module="elsewhere", settings_type="elsewhere:Gain") == operation


def test_an_operation_is_registered_under_its_stated_name():
    named = loss("logprobs", name="gain")(value_loss.function)
    assert named(Gain()).operation.name == "gain"
    assert Bound(Operation("gain")).operator is named


def test_a_second_operation_with_the_same_name_is_refused_naming_both():
    """Whatever its kind; the same function again is no second one."""
    loss("logprobs")(some_loss.function)

    def other():
        def some_loss(batch, settings):
            return batch

        return some_loss

    said = rf"^two definitions of loss or computation 'some_loss': {__name__}:some_loss and {__name__}:test.*; register"
    with pytest.raises(GraphError, match=said) as error:
        computation("more")(other())
    assert "\n" not in str(error.value)


def test_a_file_loaded_as_two_modules_registers_one_operation(tmp_path, monkeypatch):
    """As Prefect loads a flow's file under a name of its own, which a link may lead to."""
    file, link = tmp_path / "first_copy.py", tmp_path / "second_copy.py"
    file.write_text(
        "from prefect_rlhf.tasks.tracing.operations import computation\n\n"
        "@computation()\ndef twice_loaded(rollout, settings):\n    return rollout\n"
    )
    link.symlink_to(file)
    monkeypatch.syspath_prepend(tmp_path)
    copies = [import_module(name) for name in ("first_copy", "second_copy")]
    assert Bound(Operation("twice_loaded")).operator is copies[-1].twice_loaded


def test_a_name_that_no_module_registers_is_refused():
    with pytest.raises(GraphError, match="^no loss or computation is registered as 'nobody' in json$"):
        Bound(Operation("nobody", module="json")).operator  # noqa: B018


@computation("prompt_tokens")
def judge_prompts(rollout, settings):
    return Computed({"prompt_tokens": rollout.columns["tokens"]})


def asking(operator, **limit):
    """A body whose computation is given these limits."""

    def body(prompts, actor, reward):
        rollout = generate(actor, prompts, batch_size=4)
        compute(operator, rollout, settings=Gain(), **limit)

    return body


def asks_of_scores_alone(prompts, actor, reward):
    scores = inference(reward, generate(actor, prompts), output="scores")
    compute(judge_prompts, scores, settings=Gain(), max_new_tokens=4)


@computation("length")
def makes_no_rows(rollout, settings):
    return Computed({"length": rollout["prompt_length"]})


def draws_from_nothing(prompts, actor, reward):
    generate(actor, prompts, draws="")


def unused_role(prompts, actor, reward):
    generate(actor, prompts)


def twice_named(prompts, actor, reward):
    generate(actor, prompts)
    generate(actor, prompts)


def rows_for_a_model(prompts, actor, reward):
    generate(prompts, actor)


def scores_of_a_language_model(prompts, actor, reward):
    inference(actor, generate(actor, prompts), output="scores")


def loss_of_a_language_model(prompts, actor, reward):
    train_step(actor, value_loss(Gain()).on(generate(actor, prompts)))


def bare_function(prompts, actor, reward):
    compute(len, generate(actor, prompts), settings=Gain())


def loss_as_computation(prompts, actor, reward):
    compute(some_loss, generate(actor, prompts), settings=Gain())


@computation("advantages")
def of_three(rollout, scores, ref, settings, context):
    return Computed({"advantages": rollout["logprobs"]})


@loss("logprobs", rows_per_item=2)
def loss_of_pairs(output, batch, settings):
    return LossValues(output)


@loss("logprobs")
def loss_without_settings(output, batch):
    return LossValues(output)


def an_input_too_few(prompts, actor, reward):
    rollout = generate(actor, prompts)
    compute(of_three, rollout, inference(reward, rollout, output="scores"), settings=Gain())


def an_input_too_many(prompts, actor, reward):
    rollout = generate(actor, prompts)
    compute(some_advantages, rollout, rollout, inference(reward, rollout, output="scores"), settings=Gain())


def loss_that_takes_no_settings(prompts, actor, reward):
    train_step(actor, loss_without_settings(Gain()).on(generate(actor, prompts)))


def unbound_loss(prompts, actor, reward):
    generate(actor, prompts)
    train_step(actor, some_loss)


def no_loss(prompts, actor, reward):
    generate(actor, prompts)
    train_step(actor, "some_loss")


def unknown_output(prompts, actor, reward):
    inference(actor, generate(actor, prompts), output="logits")


def looks_into_rows(prompts, actor, reward):
    if generate(actor, prompts)["logprobs"] > 0:
        inference(reward, generate(actor, prompts, name="again"), output="scores")


def branches_on_rows(prompts, actor, reward):
    if generate(actor, prompts):
        pass


def values_of_a_language_model(prompts, actor, reward):
    inference(actor, generate(actor, prompts), output="values")


def generates_without_words(prompts, actor, reward):
    generate(reward, prompts)


def logprobs_without_words(prompts, actor, reward):
    train_step(reward, some_loss(Gain()).on(generate(actor, prompts)))


def calculates_with_rows(prompts, actor, reward):
    scores = inference(reward, generate(actor, prompts), output="scores")
    return 2 * scores - 1


def trained_twice(prompts, actor, reward):
    rollout = generate(actor, prompts)
    train_step(actor, some_loss(Gain()).on(rollout))
    train_step(actor, some_loss(Gain()).on(rollout), name="again")


def trains_on_prompts(prompts, actor, reward):
    train_step(actor, some_loss(Gain()).on(prompts))


def continues_responses(prompts, actor, reward):
    generate(actor, generate(actor, prompts), name="again")


def infers_on_scores(prompts, actor, reward):
    inference(actor, inference(reward, generate(actor, prompts), output="scores"), output="logprobs")


def pairs_unrelated_rows(prompts, actor, reward):
    rollout = generate(actor, prompts, batch_size=4)
    other = generate(actor, prompts, batch_size=2, samples=2, name="other")
    train_step(actor, some_loss(Gain()).on(rollout, other))


def rows_of_another_batch(prompts, actor, reward):
    compute(
        some_advantages, generate(actor, prompts, batch_size=4), generate(actor, prompts, name="all"), settings=Gain()
    )


def splits_groups_of_one(prompts, actor, reward):
    train_step(actor, loss_of_pairs(Gain()).on(generate(actor, prompts)))


def misspelt_attribute(prompts, actor, reward):
    generate(actor, prompts).filter(0.5)


def misspelt_name(prompts, actor, reward):
    generate(actor, promts)  # noqa: F821


def misspelt_argument(prompts, actor, reward):
    generate(actor, prompts, num_samples=4)


def misspelt_setting(prompts, actor, reward):
    generate(actor, prompts, sampling=Sampling(temprature=1.0))


def empty(prompts, actor, reward):
    pass


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (unused_role, "parameter 'reward' is used by no call"),
        (twice_named, "two calls are named 'actor_generate'"),
        (rows_for_a_model, "needs a Model parameter"),
        (values_of_a_language_model, "inference of actor for values needs a model with head: scalar .*, not lm$"),
        (generates_without_words, "generate of reward for logprobs needs a model with head: lm .*, not scalar$"),
        (logprobs_without_words, "train_step of reward for logprobs needs a model with head: lm .*, not scalar$"),
        (scores_of_a_language_model, "needs a model with head: scalar"),
        (loss_of_a_language_model, "needs a model with head: scalar"),
        (bare_function, "decorated with @computation"),
        (loss_as_computation, "decorated with @computation"),
        (trained_twice, "both train the weights of actor"),
        (
            an_input_too_few,
            r"^flow some: of_three\(rollout, scores, ref, settings, context\) is given 2 inputs and settings: "
            rf"missing a required argument: 'ref' \({__file__}:\d+\)$",
        ),
        (
            an_input_too_many,
            "some_advantages.* is given 3 inputs and settings: multiple values for argument 'settings'",
        ),
        (
            loss_that_takes_no_settings,
            r"loss_without_settings\(output, batch\) is given logprobs, batch and settings: got an",
        ),
        (
            unbound_loss,
            r"^flow some: train_step actor_train: loss some_loss has no rows; write some_loss\(algo\).on\(rows\)$",
        ),
        (
            no_loss,
            "^flow some: train_step actor_train: got 'some_loss', expected a loss on rows, such as policy_gradient",
        ),
        (unknown_output, r"got output 'logits', expected one of \('logprobs', 'values', 'scores', 'entropy'\)"),
        (
            looks_into_rows,
            "^flow some: the rows of actor_generate do not exist while the body is traced; .*@computation",
        ),
        (branches_on_rows, "the rows of actor_generate do not exist"),
        (calculates_with_rows, "the rows of reward_inference do not exist"),
        (trains_on_prompts, "train_step actor_train needs 'tokens', and prompts has prompt_tokens; a generate, "),
        (
            continues_responses,
            "generate again needs 'prompt_tokens', and actor_generate has tokens, prompt_length, logp",
        ),
        (infers_on_scores, "inference actor_inference needs 'tokens', and reward_inference has scores; a generate, "),
        (
            pairs_unrelated_rows,
            "train_step actor_train reads actor_generate and other, whose rows do not belong together: actor_generate "
            "has 1 for each of prompts, and other has 2 for each of prompts \\(2 items\\)",
        ),
        (
            rows_of_another_batch,
            "compute some_advantages reads actor_generate and all, whose rows do not belong together",
        ),
        (
            splits_groups_of_one,
            "loss loss_of_pairs needs 2 rows that belong together, but actor_generate has 1 for each",
        ),
        (empty, "made no model function call"),
        (draws_from_nothing, "generate actor_generate has draws ''; expected a name of random numbers"),
        (
            asking(judge_prompts),
            "^flow some: compute judge_prompts: the length of the rows that it makes is missing: state longest=..., or "
            "max_new_tokens=..., tokens beyond the longest row of its inputs$",
        ),
        (asking(judge_prompts, longest=8, max_new_tokens=2), "expected one of them; remove the other"),
        (asking(judge_prompts, max_new_tokens=-1), "got max_new_tokens -1, expected tokens, 0 or more"),
        (asking(judge_prompts, longest=2.5), "got longest 2.5, expected tokens, 1 or more"),
        (asking(makes_no_rows, longest=8), "longest is not used: the computation makes no new rows; remove it"),
        (asks_of_scores_alone, "judge_prompts: got max_new_tokens, expected longest=...: its inputs have no tokens"),
        (misspelt_attribute, r"the rows of actor_generate, and their 'filter', do not exist while the body is traced;"),
        (misspelt_name, rf"^flow some: its body raised NameError: name 'promts' is not def.* \({__file__}:\d+ in "),
        (
            misspelt_argument,
            r"^flow some: its body raised TypeError: generate\(\) got .*'num_samples'; its arg",
        ),
        (misspelt_setting, r"^flow some: Sampling.temprature: unknown key \(got 1.0\); closest: temperature"),
    ],
)
def test_a_body_that_describes_no_algorithm_is_refused_with_its_reason(body, says):
    with pytest.raises(GraphError) as refused:
        traced(body)
    line = str(refused.value)
    assert "flow some" in line
    assert re.search(says, line) or re.search(says, PLACE.sub("", line)), line


PLACE = re.compile(rf" \({re.escape(__file__)}:\d+ in \w+\)$")


def test_a_mistake_in_a_body_is_named_with_its_file_and_line():
    def body(prompts, actor, reward):
        generate(actor, prompts, samples=0)

    with pytest.raises(GraphError, match=PLACE.pattern):
        traced(body)


def test_a_batch_larger_than_its_dataset_is_refused():
    with pytest.raises(InvalidInput, match=r"^batch_size of generate: got 11, expected 1 to 10"):
        traced(lambda prompts, actor, reward: generate(actor, prompts, batch_size=11))


@pytest.mark.parametrize("every", [None, 2])
@pytest.mark.parametrize(
    ("sampling", "says"),
    [
        (
            Sampling(temperature=0),
            r"temperature: got 0\.0, expected above 0, or samples=1: a prompt.s 4 greedy samples",
        ),
        (Sampling(top_k=1), "top_k: got 1, expected 0 or at least 2, or samples=1"),
        (Sampling(min_p=1.0), r"min_p: got 1\.0, expected below 1, or samples=1"),
    ],
)
def test_several_greedy_samples_are_refused(sampling, says, every):
    """They are all equal: a group teaches nothing, and an evaluation pays for one response several times."""

    def body(prompts, actor, reward, samples=4):
        rollout = generate(actor, prompts, sampling=sampling, samples=samples, every=every)
        inference(reward, rollout, output="scores", every=every)

    with pytest.raises(InvalidInput, match=rf"^actor_generate\.sampling\.{says}"):
        traced(body)
    assert traced(partial(body, samples=1)).call("actor_generate").num_rows == 10


def test_a_call_outside_a_body_is_refused():
    with pytest.raises(GraphError, match="outside of the body"):
        generate(Stand(), Stand())


def test_one_object_for_two_parameters_is_refused():
    """The tracer tells parameters apart by identity, so sharing one would mix two roles up."""
    same = Stand()
    with pytest.raises(GraphError, match="two parameters hold the same object"):
        trace_body("some", good_body, {"prompts": Stand(), "actor": same, "reward": same}, MODELS, DATASETS)


@pytest.mark.parametrize(("role", "only"), [("actor", "lm"), ("reward", "scalar")])
def test_an_unused_head_is_refused(role, only):
    def body(prompts, actor, reward):
        inference(reward, generate(actor, prompts), output="scores")

    models = MODELS | {role: replace(MODELS[role], head="lm+scalar")}
    with pytest.raises(GraphError, match=rf"flow some: {role}.head is lm\+scalar, but calls use only {only}$"):
        traced(body, models)


def test_a_loss_on_rows_without_settings_is_refused_in_one_line():
    def body(prompts, actor, reward):
        train_step(actor, some_loss.on(generate(actor, prompts)))

    with pytest.raises(GraphError, match=r"^loss some_loss has no settings yet: write some_loss\(algo\).on\(...\) \("):
        traced(body)


@pytest.mark.parametrize(
    ("head", "losses", "is_refused"),
    [
        ("scalar", [score_loss], False),
        ("lm+scalar", [some_loss, value_loss], False),
        ("lm+scalar", [some_loss], True),
        ("scalar", [], True),
    ],
)
def test_a_new_head_that_no_loss_trains_is_refused(head, losses, is_refused):
    """It starts at zero, so its scores would say nothing of the rows."""

    def body(prompts, actor, reward):
        rollout = generate(actor, prompts)
        inference(reward, rollout, output="scores")
        if losses:
            train_step(reward, sum(each().on(rollout) for each in losses))

    models = MODELS | {"reward": replace(MODELS["reward"], head=head, new_head=True)}
    if not is_refused:
        traced(body, models)
        return
    with pytest.raises(InvalidInput, match="^reward.new_head: got True, expected false: no train_step trains the head"):
        traced(body, models)


def test_an_untrained_new_adapter_is_refused():
    """It would stay zero, and the model would equal its base. An adapter from a folder makes another model."""

    def body(prompts, actor, reward):
        rollout = generate(actor, prompts)
        inference(reward, rollout, output="scores")

    adapter = AdapterSpec(4, 8.0, ("q_proj",))
    models = MODELS | {"reward": replace(MODELS["reward"], adapter=adapter)}
    with pytest.raises(InvalidInput, match="^reward.adapter: got 'rank 4', expected no adapter, or adapter.path: no"):
        traced(body, models)
    of_folder = replace(models["reward"], adapter=replace(adapter, path="/adapters/judge"))
    traced(body, models | {"reward": of_folder})


def test_the_log_suggests_a_learning_rate_for_each_adapter_that_is_trained():
    """Once, with the rate that stays."""
    adapted = replace(MODELS["actor"], adapter=AdapterSpec(4, 8.0, ("q_proj",)))
    (line,) = adapter_remarks(traced(good_body, MODELS | {"actor": adapted}))
    assert line.startswith("actor trains an adapter at a learning rate of ") and "about ten times" in line
    assert adapter_remarks(traced(good_body)) == ()


@computation("values")
def mean_value(*values, settings):
    return Computed({"values": sum(each["logprobs"].sum(1) for each in values) / len(values)})


def test_several_values_per_row_are_refused_with_their_number_and_a_remedy():
    """A loss on the parents has no value for each row, and the tokens are not what is missing."""

    def body(prompts, actor):
        rollout = generate(actor, prompts)
        again = compute(new_prompts, rollout, settings=Settings(), longest=20)
        samples = generate(actor, again, samples=3, name="samples")
        advantages = compute(mean_value, rollout, samples, settings=Settings(), name="vine_advantages")
        train_step(actor, some_loss(Gain()).on(rollout, advantages))

    with pytest.raises(GraphError) as error:
        traced(body, {"actor": MODELS["actor"]})
    assert PLACE.sub("", str(error.value)) == (
        "flow some: train_step actor_train trains on the tokens of actor_generate, and vine_advantages has 3 rows for "
        "each row of actor_generate, expected 1; compute(..., per=ROWS) has a row for each of ROWS, and reads the 3 "
        "scores of each as [B, 3]"
    )


def vine(per, of="scores", kept=False):
    """A body that reads the scores of three responses to each row."""

    def body(prompts, actor):
        rollout = generate(actor, prompts)
        again = compute(new_prompts, rollout, settings=Settings(), longest=20)
        samples = generate(actor, again, samples=3, name="samples")
        read = {
            "scores": lambda: compute(lengths_of_samples, samples, settings=Settings()),
            "tokens": lambda: samples,
            "own": lambda: rollout,
            "others": lambda: generate(actor, prompts, every=2, name="evaluation"),
        }[of]()
        rows = {"rollout": rollout, "again": again, "prompts": prompts}[per]
        rows = select(kept_of_samples, rows, settings=Settings()) if kept else rows
        values = compute(mean_value, rollout, read, settings=Settings(), per=rows)
        train_step(actor, some_loss(Gain()).on(rollout, values))

    return body


@pytest.mark.parametrize("per", ["rollout", "again"])
def test_a_computation_reads_the_numbers_of_rows_made_from_each_row(per):
    graph = traced(vine(per), {"actor": MODELS["actor"]})
    call = graph.call("mean_value")
    assert (call.num_rows, call.rows.base) == (10, graph.call("actor_generate").rows.base)
    assert [(port.source, port.children, port.rows_each) for port in call.inputs] == [
        ("actor_generate", 1, 1),
        ("lengths_of_samples", 3, 1),
    ]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (
            vine("rollout", "tokens"),
            "got samples, which has tokens, and per=actor_generate: samples has 3 for each of ",
        ),
        (vine("rollout", "own"), "per=actor_generate is not used: no input has several rows for each; remove it"),
        (vine("rollout", "others"), "got evaluation and per=actor_generate, expected rows made from actor_gen"),
        (
            vine("rollout", kept=True),
            "got rows that a select keeps, expected the rows before the select, with per=actor_generate",
        ),
    ],
)
def test_rows_that_do_not_belong_together_are_refused(body, says):
    with pytest.raises(GraphError, match=f"^flow some: compute mean_value: {re.escape(says)}"):
        traced(body, {"actor": MODELS["actor"]})


@computation("scores")
def lengths_of_samples(rows, settings):
    return Computed({"scores": rows["prompt_length"]})


@computation("keep")
def kept_of_samples(rows, settings):
    return Computed({"keep": rows["prompt_length"]})


def test_a_body_may_loop_and_a_computation_may_take_all_results():
    def body(prompts, actor):
        rollout = generate(actor, prompts)
        again = compute(new_prompts, rollout, settings=Settings(), longest=20)
        values = [generate(actor, again, name=f"sample_{number}") for number in range(3)]
        train_step(actor, some_loss(Gain()).on(rollout, compute(mean_value, *values, settings=Settings())))

    graph = traced(body, {"actor": MODELS["actor"]})
    assert [port.source for port in graph.call("mean_value").inputs] == ["sample_0", "sample_1", "sample_2"]


@computation("prompt_tokens")
def new_prompts(rollout, settings):
    return Computed({"prompt_tokens": rollout.columns["tokens"]})


class Rates(Settings):
    """A group of optimizers."""

    actor: Optimizer = Optimizer()


class Sizes(Settings):
    batch_size: int = 4
    ptx_batch_size: int = 5
    update: Update = Update()
    critic_update: Update = Update()


@pytest.mark.parametrize(
    ("algo", "size", "says"),
    [
        ({"batch_size": 11}, "batch_size", "algo.batch_size: got 11, expected 1 to 10, the items of prompts"),
        ({"ptx_batch_size": 12}, "ptx_batch_size", "algo.ptx_batch_size: got 12, expected 1 to 10"),
        ({"batch_size": 8}, lambda algo: 2 * algo.batch_size, "batch_size of generate: got 16, expected 1 to 10"),
        (
            {"batch_size": 8},
            lambda algo: Product(batch_size=algo.batch_size, over_sampling=1.3),
            "algo.batch_size x algo.over_sampling: got '8 x 1.3 = 11, rounded up', expected 1 to 10, the items of",
        ),
    ],
)
def test_a_large_batch_is_refused_with_the_settings_behind_it(algo, size, says):
    def body(prompts, actor, algo):
        number = size(algo) if callable(size) else getattr(algo, size)
        generate(actor, prompts, batch_size=number)

    with pytest.raises(InvalidInput) as error:
        traced_with(body, Sizes(**algo))
    assert str(error.value).startswith(says)


def test_too_many_mini_batches_are_refused_with_their_setting():
    def body(prompts, actor, algo):
        train_step(actor, some_loss(Gain()).on(generate(actor, prompts, batch_size=4)), update=algo.critic_update)

    with pytest.raises(InvalidInput, match="^algo.critic_update.mini_batches: got 7, expected at most 4, since"):
        traced_with(body, Sizes(critic_update=Update(mini_batches=7)))


class OneTurn(Settings):
    """Settings with a group of each class."""

    first: Sampling = Sampling(max_new_tokens=3)
    rates: Rates = Rates()


class TwoTurns(OneTurn):
    """Settings with two groups of one class."""

    second: Sampling = Sampling(max_new_tokens=5)


def test_a_call_knows_the_parameter_that_is_its_settings():
    """So a message about them names what a person states. A value of the body is none, if several could be meant."""

    def body(prompts, actor, algo):
        rollout = generate(actor, prompts, batch_size=4, sampling=algo.first)
        generate(actor, prompts, batch_size=4, sampling=Sampling(max_new_tokens=5), name="second")
        generate(actor, prompts, sampling=algo.first.greedy(), every=2, name="evaluation")
        train_step(actor, some_loss(Gain()).on(rollout), optimizer=algo.rates.actor)

    graph = traced_with(body, TwoTurns())
    assert [call.setting("max_new_tokens") for call in graph.calls[:3]] == [
        "algo.first.max_new_tokens",
        "algo.second.max_new_tokens",
        "max_new_tokens of evaluation",
    ]
    assert graph.call("actor_train").setting("lr") == "algo.rates.actor.lr"
    assert traced_with(body, OneTurn()).call("evaluation").setting("stop") == "algo.first.stop"
    assert replace(graph.calls[0].operation, parameter="") == graph.calls[0].operation


def traced_with(body, algo):
    models = {"actor": MODELS["actor"]}
    return trace_body("some", body, {name: Stand() for name in (*models, *DATASETS)} | {"algo": algo}, models, DATASETS)
