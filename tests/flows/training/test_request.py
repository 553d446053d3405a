"""What a request fills in: whose tokenizer reads and writes, and when learning rates have fallen."""

import pytest

from prefect_rlhf.blocks.dataset import Prompts
from prefect_rlhf.blocks.model import Model
from prefect_rlhf.errors.errors import InvalidInput, NotUsed
from prefect_rlhf.flows.algorithm.rlhf_flow import rlhf_flow
from prefect_rlhf.flows.dpo import dpo
from prefect_rlhf.flows.ppo import ppo
from prefect_rlhf.flows.reward import reward
from prefect_rlhf.flows.training.inputs import read_run_inputs
from prefect_rlhf.flows.training.spec.steps import falling_over
from prefect_rlhf.flows.training.tokenizers import check_model_settings
from prefect_rlhf.placement.rows.token_writers import speaking_role
from prefect_rlhf.tasks.data.role_tokenizers import tokenizers_of
from prefect_rlhf.tasks.rl.losses import policy_gradient
from prefect_rlhf.tasks.rl.settings.offline import DPO
from prefect_rlhf.tasks.rl.settings.online import PPO
from prefect_rlhf.tasks.settings import Optimizer, Settings, Update
from prefect_rlhf.tasks.tracing.calls import generate, inference, train_step
from tests.flows.test_algorithms import traced
from tests.support.tiny import make_model, make_prompts
from tests.tasks.small_tokenizer import TEMPLATE, WORDS

pytestmark = pytest.mark.quick


@rlhf_flow("distil")
def distil(prompts: Prompts, teacher: Model, student: Model) -> None:
    rollout = generate(student, prompts, batch_size=2)
    advantages = inference(teacher, rollout, output="logprobs")
    train_step(student, policy_gradient(Settings()).on(rollout, advantages))


def test_the_generating_role_speaks_else_the_trained_role():
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
    assert read.checked().longest == inputs.checked().longest
    assert read.read_by("student") is read


def test_the_speaking_role_decides_the_end_of_an_answer(tmp_path):
    """The log names it; a setting of the model overrides it, and is part of what its rows are read with."""
    prompts = Prompts(path=make_prompts(tmp_path / "prompts.parquet"))
    paths = {role: make_model(tmp_path / role) for role in ("teacher", "student")}
    models = {"teacher": Model(path=paths["teacher"]), "student": Model(path=paths["student"], eos_token="best")}
    inputs = read_run_inputs({"prompts": prompts, **models})
    assert inputs.checked().remarks[-1].startswith("an answer ends with </s> (2), from the tokenizer")
    read = inputs.read_by("student")
    assert read.sources["prompts"].eos_token == "best"
    assert read.checked().remarks[-1] == (
        "an answer ends with best (13), from the setting eos_token; a response also ends with </s> (2)"
    )
    assert read.models["student"].eos_token == "best"


def test_the_chat_template_that_a_model_names_writes_the_rows_of_the_role_that_speaks(tmp_path):
    """In the place of the folder's, for rows, ends of responses, plays and the trained model."""
    file = tmp_path / "mine.jinja"
    file.write_text(TEMPLATE.replace("{{ m.role }} ", "the "))
    prompts = Prompts(path=make_prompts(tmp_path / "prompts.parquet"), chat_template=True)
    paths = {role: make_model(tmp_path / role) for role in ("teacher", "student")}
    student = Model(path=paths["student"], chat_template=str(file))
    inputs = read_run_inputs({"prompts": prompts, "teacher": Model(path=paths["teacher"]), "student": student})
    before = inputs.sources["prompts"].read([0])["prompt_tokens"][0]
    read = inputs.read_by("student")
    after = read.sources["prompts"].read([0])["prompt_tokens"][0]
    assert (before[0], after[0]) == (WORDS.index("user"), WORDS.index("the")) and before[1:] == after[1:]
    assert read.models["student"].chat_template == file.read_text()
    assert read.checked().remarks[1].startswith("prompts: the setting chat_template renders a prompt as 'the {prompt}")
    arguments = {name: object() for name in ("prompts", "teacher", "student")}
    graph = distil.algorithm.trace(arguments, read.models, read.datasets)
    assert tokenizers_of(graph).templates == {"student": file.read_text()}


@pytest.mark.parametrize("setting", [{"eos_token": "best"}, {"chat_template": "mine.jinja"}])
def test_a_setting_of_chats_is_refused_for_a_model_that_reads_others_tokens(setting):
    """Here a teacher, which scores what the student says."""
    (name,) = setting
    graph, others = traced(distil), {"teacher": Model(path="a"), "student": Model(path="b")}
    check_model_settings(graph, "student", others | {"student": Model(path="b", **setting)})
    says = (
        f"^teacher.{name}: .* is not used: teacher only reads tokens of other roles; remove it, or set student.{name}"
    )
    with pytest.raises(NotUsed, match=says):
        check_model_settings(graph, "student", others | {"teacher": Model(path="a", **setting)})


def test_an_end_that_the_tokenizer_lacks_is_refused(tmp_path):
    prompts = Prompts(path=make_prompts(tmp_path / "prompts.parquet"))
    actor = Model(path=make_model(tmp_path / "actor"), eos_token="<|im_end|>")
    says = r"^actor.eos_token: got '<\|im_end\|>', expected a token of the tokenizer of .*, such as </s>, which ends"
    with pytest.raises(InvalidInput, match=says):
        read_run_inputs({"prompts": prompts, "actor": actor})


def test_by_default_a_rate_falls_over_the_whole_run():
    """So its end is part of the run's identity: another number of steps would have other rates."""
    falls = Optimizer(schedule="cosine", warmup_steps=2)
    algo = PPO(batch_size=4, update=Update(epochs=2, mini_batches=3), actor_optimizer=falls)
    graph = falling_over(traced(ppo, algo=algo), steps=5)
    assert graph.model("actor").optimizer.decay_steps == 30
    assert graph.model("critic").optimizer.decay_steps is None
    assert falling_over(graph, steps=7) == graph


def test_a_warm_up_as_long_as_the_run_is_refused():
    graph = traced(dpo, algo=DPO(batch_size=4, optimizer=Optimizer(schedule="linear", warmup_steps=5)))
    with pytest.raises(InvalidInput, match=r"^algo.optimizer.warmup_steps: got 5, expected fewer than the 5 optim"):
        falling_over(graph, steps=5)
