"""The role that speaks: prompts are read and responses written by the tokenizer of the role that generates."""

from prefect_rlhf.blocks.dataset import Prompts
from prefect_rlhf.blocks.model import Model
from prefect_rlhf.flows.dpo import dpo
from prefect_rlhf.flows.ppo import ppo
from prefect_rlhf.flows.reward import reward
from prefect_rlhf.flows.rlhf_flow import rlhf_flow
from prefect_rlhf.flows.training.inputs import read_run_inputs
from prefect_rlhf.flows.training.request import speaking_role
from prefect_rlhf.tasks.calls import generate, inference, train_step
from prefect_rlhf.tasks.rl.losses import policy_gradient
from prefect_rlhf.tasks.settings import Settings
from tests.flows.test_algorithms import traced
from tests.tiny import make_model, make_prompts


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
