"""A mistake in a body is refused in one line with file and line, and says what would be right."""

import re

import pytest

from prefect_rlhf.engines.compute import Computed
from prefect_rlhf.engines.losses.protocol import LossValues
from prefect_rlhf.engines.rows import Batch
from prefect_rlhf.errors.errors import GraphError
from prefect_rlhf.flows.algorithm.rlhf_flow import rlhf_flow
from prefect_rlhf.flows.training.request import untrained
from prefect_rlhf.placement.graph import Dataset
from prefect_rlhf.placement.models.model import ModelSpec, TransformerShape
from prefect_rlhf.tasks.rl.losses import nll
from prefect_rlhf.tasks.settings import Optimizer, Sampling, Settings
from prefect_rlhf.tasks.tracing.calls import compute, generate, inference, score, train_step
from prefect_rlhf.tasks.tracing.operations import computation, loss
from prefect_rlhf.tasks.tracing.trace import trace_body

pytestmark = pytest.mark.quick

SHAPE = TransformerShape(64, 128, 2, 4, 2, 16, 100, 64, 1e4, 1e-5, True)


class Prompts:
    """A dataset parameter."""


class Actor:
    """A model parameter."""


def traced(body):
    """The graph of a body with a model and a dataset."""
    datasets = {"prompts": Dataset("prompts", ("prompt_tokens",), 10)}
    models = {"actor": ModelSpec("actor", "a", "lm", SHAPE)}
    return trace_body("mine", body, {"prompts": Prompts(), "actor": Actor()}, models, datasets)


@computation("halves")
def halved_for_wrong_bodies(rows: Batch, settings: Settings) -> Computed:
    """Half of each."""
    return Computed({"halves": rows["logprobs"]})


READ = "do not exist while the body is traced; read them in a @computation"
ON_ROWS = {
    "mean": (lambda rows: rows.mean(), f"the rows of actor_generate, and their 'mean', {READ}"),
    "power": (lambda rows: rows**2, f"the rows of actor_generate {READ}"),
    "absolute": (abs, f"the rows of actor_generate {READ}"),
    "rounded": (round, f"the rows of actor_generate {READ}"),
    "product": (lambda rows: rows @ rows, f"the rows of actor_generate {READ}"),
    "assigned": (lambda rows: rows.__setitem__("scores", 1), f"the rows of actor_generate {READ}"),
    "settings": (
        lambda rows: compute(halved_for_wrong_bodies, rows, settings={"a": 1}),
        "got settings={'a': 1}, expected a value of a Settings class, such as the flow's algo",
    ),
    "called": (
        lambda rows: halved_for_wrong_bodies(rows, settings=Settings()),
        "write compute(halved_for_wrong_bodies, rows, settings=algo)",
    ),
    "loss of rows": (lambda rows: train_step("actor", nll(rows)), "write nll(algo).on(rows)"),
    "function": (lambda rows: score(len, rows), "expected a Reward parameter; the parameters name the function"),
}


@pytest.mark.parametrize("name", ON_ROWS)
def test_a_bodys_misuse_of_rows_is_named(name):
    act, says = ON_ROWS[name]

    def body(prompts, actor):
        act(generate(actor, prompts))

    check_refused(body, says)


ARGUMENTS = {
    "batch_size=4.0": ({"batch_size": 4.0}, "got batch_size=4.0, expected a whole number: 4"),
    "batch_size='4'": ({"batch_size": "4"}, "got batch_size='4', expected a whole number"),
    "samples=2.0": ({"samples": 2.0}, "got samples=2.0, expected a whole number of at least 1: 2"),
    "samples=0": ({"samples": 0}, "got samples=0, expected a whole number of at least 1"),
    "staleness": ({"staleness": -1}, "got staleness=-1, expected a whole number of at least 0 (steps)"),
    "sampling": (
        {"sampling": {"temperature": 0.5}},
        "got sampling={'temperature': 0.5}, expected Sampling(temperature=0.5), or the Sampling of the flow's",
    ),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_wrong_argument_of_generate_is_refused_with_a_valid_value(name):
    arguments, says = ARGUMENTS[name]

    def body(prompts, actor):
        generate(actor, prompts, **arguments)

    check_refused(body, f"flow mine: generate.*: {re.escape(says)}", is_pattern=True)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"optimizer": 1e-5}, "got optimizer=1e-05, expected Optimizer(lr=1e-5), or the Optimizer of the flow's"),
        ({"optimizer": {"lr": 0.1}}, "got optimizer={'lr': 0.1}, expected Optimizer(lr=0.1)"),
        ({"update": 2}, "got update=2, expected Update(mini_batches=1)"),
    ],
)
def test_a_wrong_argument_of_train_step_is_refused_with_a_valid_value(wrong, says):
    def body(prompts, actor):
        train_step(actor, nll().on(generate(actor, prompts)), **wrong)

    check_refused(body, says)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"temperature": 0.0}, "got temperature=0.0, expected more than 0: logits are divided by it"),
        ({"temperature": -1}, "got temperature=-1, expected more than 0"),
        ({"temperature": "1"}, "got temperature='1', expected a finite number"),
        ({"mean_over": float("inf")}, "got inf as mean_over, expected"),
        ({"mean_over": float("nan")}, "got nan as mean_over, expected"),
    ],
)
def test_a_wrong_argument_of_a_loss_on_rows_is_refused(wrong, says):
    def body(prompts, actor):
        train_step(actor, nll().on(generate(actor, prompts), **wrong))

    check_refused(body, f"nll: {says}")


def test_a_wrong_temperature_of_an_inference_is_refused():
    """That of greedy sampling, say."""

    def body(prompts, actor):
        inference(actor, generate(actor, prompts), output="logprobs", temperature=Sampling(temperature=0).temperature)

    check_refused(body, "inference actor_inference: got temperature=0.0, expected more than 0")


@loss("values")
def of_values_for_wrong_bodies(values, batch, settings):
    """Has no logits."""
    return LossValues(values)


def test_a_temperature_of_what_has_no_logits_is_refused():
    def body(prompts, actor):
        train_step(actor, of_values_for_wrong_bodies().on(generate(actor, prompts), temperature=0.7))

    check_refused(body, "of_values_for_wrong_bodies: temperature is not used: values have no logits; remove it")


def test_a_body_that_exits_is_refused():
    def body(prompts, actor):
        raise SystemExit(3)

    check_refused(body, "flow mine: its body raised SystemExit: 3")


def check_refused(body, says, is_pattern=False):
    """Check the line of a body's mistake, and its place at the end."""
    with pytest.raises(GraphError) as refused:
        traced(body)
    line = str(refused.value)
    assert re.search(says if is_pattern else re.escape(says), line), line
    assert re.search(rf"\({re.escape(__file__)}:\d+ in [\w<>]+\)$", line) and "\n" not in line, line


async def waits(actor: Actor) -> None:
    """Async."""


def yields(actor: Actor):
    """A generator."""
    yield actor


def untyped(actor) -> None:
    """Without types."""


def takes_all(actor: Actor, **more: int) -> None:
    """With keywords."""


def takes_steps(actor: Actor, steps: int = 3) -> None:
    """With a parameter of every run."""


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (waits, "flow mine: waits is async, expected def without async"),
        (yields, "flow mine: yields has a yield, expected a body without one"),
        (untyped, "flow mine: parameter actor has no type, expected its type"),
        (takes_all, "flow mine: got **more: int, expected a separate parameter for each"),
        (takes_steps, "takes_steps: got a parameter 'steps', expected another name"),
    ],
)
def test_a_function_that_cannot_be_a_body_is_refused_at_its_decorator(body, says):
    with pytest.raises(GraphError, match=re.escape(says)):
        rlhf_flow("mine")(body)


def test_a_decorator_without_parentheses_is_refused_with_its_right_form():
    with pytest.raises(
        GraphError, match=re.escape('got untyped, expected the algorithm\'s name: @rlhf_flow("untyped")')
    ):
        rlhf_flow(untyped)  # type: ignore[arg-type]  # the mistake
    with pytest.raises(GraphError, match=re.escape('got untyped, expected the names of its keys: @loss("logprobs")')):
        loss(untyped)  # type: ignore[arg-type]  # the mistake
    with pytest.raises(GraphError, match=re.escape('its keys: @computation("advantages")')):
        computation(untyped)  # type: ignore[arg-type]  # the mistake


def test_a_body_that_neither_trains_nor_records_gets_a_warning():
    def body(prompts, actor):
        generate(actor, prompts, sampling=Sampling())

    def trains(prompts, actor):
        train_step(actor, nll().on(generate(actor, prompts)), optimizer=Optimizer())

    assert untrained(traced(body)).startswith("mine has no train_step: no weights change")
    assert not untrained(traced(trains))
