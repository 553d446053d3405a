"""What a request fills in: whose tokenizer reads and writes, and when learning rates have fallen."""

import pytest

from prefect_rlhf.blocks.dataset import Prompts
from prefect_rlhf.blocks.model import Model
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.flows.algorithm.rlhf_flow import rlhf_flow
from prefect_rlhf.flows.dpo import dpo
from prefect_rlhf.flows.ppo import ppo
from prefect_rlhf.flows.reward import reward
from prefect_rlhf.flows.training.inputs import read_run_inputs
from prefect_rlhf.flows.training.steps import falling_over
from prefect_rlhf.placement.rows.token_writers import speaking_role
from prefect_rlhf.tasks.rl.losses import policy_gradient
from prefect_rlhf.tasks.rl.settings.offline import DPO
from prefect_rlhf.tasks.rl.settings.online import PPO
from prefect_rlhf.tasks.settings import Optimizer, Settings, Update
from prefect_rlhf.tasks.tracing.calls import generate, inference, train_step
from tests.flows.test_algorithms import traced
from tests.tiny import make_model, make_prompts

pytestmark = pytest.mark.quick


@rlhf_flow("distil")
def distil(prompts: Prompts, teacher: Model, student: Model) -> None:
    rollout = generate(student, prompts, batch_size=2)
    advantages = inference(teacher, rollout, output="logprobs")
    train_step(student, policy_gradient(Settings()).on(rollout, advantages))


def test_the_role_that_generates_speaks_else_the_one_that_is_trained():
    """Whatever their names and their order among the parameters."""
    assert [speaking_role(traced(flow)) for flow in (distil, ppo, dpo, reward)] == [
        "student",
        "actor",
        "actor",
        "reward",
    ]


def test_prompts_are_read_by_the_tokenizer_of_the_role_that_speaks(tmp_path):
    arguments = {
        "prompts": Prompts(path=make_prompts(tmp_path / "prompts.parquet")),
        "teacher": Model(path=make_model(tmp_path / "teacher")),
        "student": Model(path=make_model(tmp_path / "student")),
    }
    inputs = read_run_inputs(arguments)
    read = inputs.read_by("student")
    assert (read.tokenizer, read.sources["prompts"].tokenizer) == (str(tmp_path / "student"),) * 2
    assert read.longest == inputs.longest
    assert read.read_by("student") is read


def test_a_rate_falls_over_all_of_a_run_where_nobody_says_when():
    """So its end is part of the run's identity: another number of steps would have other rates."""
    falls = Optimizer(schedule="cosine", warmup_steps=2)
    algo = PPO(batch_size=4, update=Update(epochs=2, mini_batches=3), actor_optimizer=falls)
    graph = falling_over(traced(ppo, algo=algo), steps=5)
    assert graph.model("actor").optimizer.decay_steps == 30
    assert graph.model("critic").optimizer.decay_steps is None
    assert falling_over(graph, steps=7) == graph


def test_a_warm_up_that_leaves_nothing_to_fall_over_is_refused():
    graph = traced(dpo, algo=DPO(batch_size=4, optimizer=Optimizer(schedule="linear", warmup_steps=5)))
    with pytest.raises(
        InvalidInput, match=r"warmup_steps of the actor's optimizer: got 5, expected fewer than the 5 optim"
    ):
        falling_over(graph, steps=5)
