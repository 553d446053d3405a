"""A flow whose judge has a tokenizer of its own, which encodes its cases and decodes its verdicts."""

from transformers import AutoTokenizer

from prefect_rlhf import (
    Batch,
    Computed,
    Context,
    Model,
    Prompts,
    Reward,
    Sampling,
    Settings,
    computation,
    computations,
    compute,
    generate,
    losses,
    rlhf_flow,
    score,
    train_step,
)


class Judged(Settings):
    """The settings of a run under `algo`."""

    batch_size: int = 4
    sampling: Sampling = Sampling(max_new_tokens=4)
    verdict: Sampling = Sampling(max_new_tokens=6)
    longest_case: int = 40


DEFAULT = Judged()


@computation("prompt_tokens")
def question_and_answer(rollout: Batch, settings: Judged, context: Context) -> Computed:
    """What the judge is asked about each answer."""
    judge = AutoTokenizer.from_pretrained(context.tokenizers["judge"])
    text = computations.text_columns(rollout, context.tokenizers["actor"])
    cases = [f"Question: {asked} Answer: {said} Grade:" for asked, said in zip(*text.values(), strict=True)]
    like = rollout.columns["tokens"][0]
    return Computed({"prompt_tokens": [like.new_tensor(judge.encode(one)[-settings.longest_case :]) for one in cases]})


@computation("advantages")
def above_the_judges_mean(rollout: Batch, scores: Batch, settings: Judged) -> Computed:
    """The score of the verdict less the mean, at each token of the answer."""
    scores_B = scores["scores"]
    return Computed({"advantages": (scores_B - scores_B.mean())[:, None] * rollout.mask("logprobs")})


@rlhf_flow("judged")
def judged(prompts: Prompts, actor: Model, judge: Model, reward: Reward, algo: Judged = DEFAULT) -> None:
    """One iteration: answer, ask the judge, score the verdict, and a step on the scores. Both are recorded."""
    rollout = generate(actor, prompts, batch_size=algo.batch_size, sampling=algo.sampling)
    asked = compute(question_and_answer, rollout, settings=algo, longest=algo.longest_case)
    verdict = generate(judge, asked, sampling=algo.verdict, name="verdict")
    scores = score(reward, verdict)
    advantages = compute(above_the_judges_mean, rollout, scores, settings=algo)
    compute(computations.record_rollouts, verdict, scores, advantages, settings=algo)
    compute(computations.record_evaluation, rollout, scores, settings=algo)
    train_step(actor, losses.policy_gradient().on(rollout, advantages))
