"""Flows with an author's mistakes, each in one operator."""

import os
import re
from pathlib import Path

import torch
from transformers import AutoTokenizer

from prefect_rlhf.engines.compute import Computed
from prefect_rlhf.engines.losses.protocol import LossValues
from prefect_rlhf.tasks.data.rollouts import record_rollouts, text_columns
from prefect_rlhf.tasks.host_rewards import HostRewards, RewardFunction
from prefect_rlhf.tasks.rl.evaluation.held_out import record_evaluation
from prefect_rlhf.tasks.rl.losses import policy_gradient
from prefect_rlhf.tasks.settings import Sampling, Settings
from prefect_rlhf.tasks.tracing.calls import compute, generate, inference, score, train_step
from prefect_rlhf.tasks.tracing.operations import computation, loss

PLAIN = Settings()


@computation("advantages")
def right(rollout, scores, settings, context):
    assert context.generated_by == "student"
    return Computed({"advantages": scores["scores"][:, None] * rollout.mask("logprobs")})


@computation("advantages")
def reads_a_typo(rollout, scores, settings):
    return Computed({"advantages": scores["logprobz"]})


@computation("advantages")
def masks_a_typo(rollout, scores, settings):
    return Computed({"advantages": rollout.mask("scores")})


@computation("advantages")
def names_another_key(rollout, scores, settings):
    return Computed({"advantage": rollout["logprobs"]})


@computation("advantages")
def names_one_key_more(rollout, scores, settings):
    return Computed({"advantages": rollout["logprobs"], "returns": rollout["logprobs"]})


@computation("advantages")
def drops_rows(rollout, scores, settings):
    return Computed({"advantages": rollout["logprobs"][:1]})


@computation("advantages")
def returns_a_tensor(rollout, scores, settings):
    return rollout["logprobs"]


@computation("advantages")
def dislikes_the_data(rollout, scores, settings):
    numbers = {"a": 1}
    return Computed({"advantages": numbers["b"] * rollout["logprobs"]})


@computation("advantages")
def misspells_an_attribute(rollout, scores, settings):
    return Computed({"advantages": rollout["logprobs"].sumn(1)})


@computation("advantages")
def misspells_a_name(rollout, scores, settings):
    return Computed({"advantages": rolout["logprobs"]})  # noqa: F821


@computation("advantages")
def calls_with_an_argument_too_many(rollout, scores, settings):
    return Computed({"advantages": rollout.mask("logprobs", "values")})


@computation("advantages")
def imports_what_is_not_there(rollout, scores, settings):
    import no_such_package  # noqa: PLC0415

    return Computed({"advantages": no_such_package.mask(rollout)})


@computation("advantages")
def looks_for_a_number(rollout, scores, settings):
    """Made-up responses have none, real ones might."""
    number = re.search("[0-9]+", "a good film").group()
    return Computed({"advantages": int(number) * rollout["logprobs"]})


@computation("advantages")
def binds_a_name_in_one_branch(rollout, scores, settings):
    if scores["scores"].min() > 100:
        advantages = rollout["logprobs"]
    return Computed({"advantages": advantages})


@computation("advantages")
def divides_by_zero(rollout, scores, settings):
    return Computed({"advantages": rollout["logprobs"] * (1 / len(scores["scores"][:0]))})


@computation("advantages")
def dies(rollout, scores, settings):
    os._exit(3)


@computation("advantages")
def writes_a_file(rollout, scores, settings, context):
    (context.run_dir / "mine.txt").write_text("written")
    Path(settings.told).write_text(str(context.run_dir))
    return right.function(rollout, scores, settings, context)


class Told(Settings):
    told: str


@computation("prompt_tokens")
def adds_two_tokens(rollout, settings):
    return Computed({"prompt_tokens": [torch.cat([row, row[:2]]) for row in rollout.columns["tokens"]]})


def second_turn(**limit):
    """The body of a flow whose second turn has two tokens more than the first, and states how many."""

    def two_turns(prompts, teacher, student):
        first = generate(student, prompts, batch_size=4)
        asked = compute(adds_two_tokens, first, settings=PLAIN, **limit)
        second = generate(student, asked, name="second")
        inference(teacher, second, output="scores")

    return two_turns


@computation("advantages")
def returns_an_array(rollout, scores, settings):
    return Computed({"advantages": rollout["logprobs"].numpy()})


@computation("advantages")
def returns_plain_numbers(rollout, scores, settings):
    return Computed({"advantages": scores["scores"].tolist()})


@computation("advantages")
def returns_one_number(rollout, scores, settings):
    return Computed({"advantages": scores["scores"].mean()})


@computation("advantages")
def names_no_key(rollout, scores, settings):
    return Computed(rollout["logprobs"])


@computation("advantages")
def measures_each_row(rollout, scores, settings):
    return Computed({"advantages": rollout["logprobs"]}, metrics={"score": scores["scores"]})


@computation("advantages")
def measures_a_mean(rollout, scores, settings):
    """A tensor of a single number is a number."""
    return Computed({"advantages": rollout["logprobs"]}, metrics={"score": scores["scores"].mean()})


@computation("advantages", stateful=True)
def keeps_a_tensor(rollout, scores, settings, state=None):
    return Computed({"advantages": rollout["logprobs"]}, state=scores["scores"])


@computation("advantages")
def changes_its_rows(rollout, scores, settings):
    for row in rollout.columns["logprobs"]:
        row.mul_(2)
    return Computed({"advantages": rollout["logprobs"]})


@loss("logprobs")
def returns_an_array_of_values(logprobs_BT, batch, settings):
    return LossValues(logprobs_BT.detach().numpy())


@loss("logprobs")
def measures_with_a_plain_number(logprobs_BT, batch, settings):
    return LossValues(logprobs_BT, {"share": 0.5})


@loss("logprobs")
def averages_itself(logprobs_BT, batch, settings):
    return LossValues((logprobs_BT * batch["advantages"]).mean())


@loss("logprobs")
def centres_over_the_micro_batch(logprobs_BT, batch, settings):
    return LossValues(-logprobs_BT * (batch["advantages"] - batch["advantages"].mean()))


@loss("logprobs")
def writes_into_its_batch(logprobs_BT, batch, settings):
    """Each micro-batch has columns of its own."""
    return LossValues(-logprobs_BT * batch["advantages"].mul_(3))


@loss("logprobs")
def reads_returns(logprobs_BT, batch, settings):
    return LossValues(batch["returns"] * logprobs_BT)


@loss("logprobs")
def is_detached(logprobs_BT, batch, settings):
    return LossValues(logprobs_BT.detach() * batch["advantages"])


@loss("logprobs")
def ignores_the_model(logprobs_BT, batch, settings):
    return LossValues(torch.ones_like(logprobs_BT, requires_grad=True))


@loss("logprobs", "entropy")
def asks_for_more_than_it_uses(logprobs_BT, entropy_BT, batch, settings):
    return LossValues(0.0 * logprobs_BT)


@loss("logprobs")
def misspells_a_function(logprobs_BT, batch, settings):
    return LossValues(torch.softplus(logprobs_BT))


@loss("logprobs")
def returns_a_number(logprobs_BT, batch, settings):
    return torch.zeros(())


def body(operator, loss=policy_gradient, settings=PLAIN):
    """The body of a flow that trains a student by a teacher's scores."""

    def student_flow(prompts, teacher, student):
        rollout = generate(student, prompts, batch_size=4, samples=2)
        scores = inference(teacher, rollout, output="scores")
        advantages = compute(operator, rollout, scores, settings=settings)
        compute(record_rollouts, rollout, scores, advantages, settings=settings)
        train_step(student, loss(settings).on(rollout, advantages))

    return student_flow


def samples_at(sampled_at, **on):
    """An algorithm that samples at a temperature."""

    def sampled(prompts, teacher, student):
        rollout = generate(student, prompts, batch_size=4, sampling=Sampling(temperature=sampled_at))
        advantages = compute(right, rollout, inference(teacher, rollout, output="scores"), settings=PLAIN)
        inference(student, rollout, output="logprobs", name="again", **on)
        train_step(student, policy_gradient().on(rollout, advantages, **on))

    return sampled


def without_advantages(prompts, teacher, student):
    rollout = generate(student, prompts, batch_size=4)
    inference(teacher, rollout, output="scores")
    train_step(student, policy_gradient().on(rollout))


@computation()
def measured(rollout, settings):
    return Computed(metrics={"length": 1.0})


def evaluates(prompts, teacher, student):
    """Trains with what ends its process, and evaluates with functions that are not there."""
    rollout = generate(student, prompts, batch_size=4)
    advantages = compute(dies, rollout, inference(teacher, rollout, output="scores"), settings=PLAIN)
    train_step(student, policy_gradient().on(rollout, advantages))
    functions = {name: RewardFunction(function=f"/nowhere.py:{name}") for name in ("exact", "short")}
    greedy = generate(student, prompts, every=2, name="student_evaluation")
    scores = score(HostRewards(functions=functions), greedy, every=2)
    compute(record_evaluation, greedy, scores, settings=PLAIN, every=2)
    compute(measured, greedy, settings=PLAIN, every=2)


@computation("prompt_tokens")
def case(rollout, settings, context):
    """Prompts of a judge, which has a tokenizer of its own."""
    judge = AutoTokenizer.from_pretrained(context.tokenizers["judge"])
    asked = [judge.encode(text) for text in text_columns(rollout)["response"]]
    return Computed({"prompt_tokens": [rollout.columns["tokens"][0].new_tensor(tokens) for tokens in asked]})


@computation("texts")
def decodes_both_with_one(rollout, verdict, settings, context):
    texts = [text_columns(rows, context.tokenizer)["response"] for rows in (rollout, verdict)]
    return Computed({"texts": rollout["prompt_length"] * len(texts)})


@computation("texts")
def decodes_with_the_others(rollout, verdict, settings, context):
    texts = [text_columns(rows, context.tokenizers["student"])["response"] for rows in (rollout, verdict)]
    return Computed({"texts": rollout["prompt_length"] * len(texts)})


def judged_by(operator):
    """A flow that reads the rows of an actor and of its judge in one computation."""

    def flow(prompts, student, judge):
        rollout = generate(student, prompts, batch_size=4)
        asked = compute(case, rollout, longest=64, settings=PLAIN)
        verdict = generate(judge, asked, name="verdict")
        compute(operator, rollout, verdict, settings=PLAIN)

    return flow
