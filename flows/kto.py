"""KTO (Ethayarajh et al. 2024, arXiv:2402.01306): learning from answers rated good or bad, without pairs."""

from __future__ import annotations

from prefect_rlhf.blocks.model import Model
from prefect_rlhf.blocks.rated_answers import RatedAnswers
from prefect_rlhf.flows.algorithm.rlhf_flow import rlhf_flow
from prefect_rlhf.tasks.rl.moving_reference import move_reference
from prefect_rlhf.tasks.rl.preference_evaluation import kto_kl, label_accuracy, mismatched_answers
from prefect_rlhf.tasks.rl.preference_losses import kto as kto_loss
from prefect_rlhf.tasks.rl.settings.offline import KTO
from prefect_rlhf.tasks.tracing.calls import compute, inference, train_step


@rlhf_flow("kto")
def kto(answers: RatedAnswers, held_out: RatedAnswers, actor: Model, ref: Model, algo: KTO = KTO()) -> None:
    """One iteration: the KL estimate of policy and reference on answers to other prompts, then a training step.

    With several mini-batches, the estimate stays at its value from the start of the step.
    """
    size, every = algo.batch_size, algo.evaluate_every
    mismatched = compute(mismatched_answers, answers, settings=algo, max_new_tokens=0, batch_size=size)
    gained = inference(actor, mismatched, output="logprobs", name="actor_mismatched")
    expected = inference(ref, mismatched, output="logprobs", name="ref_mismatched")
    kl = compute(kto_kl, mismatched, gained, expected, settings=algo)
    ref_logprobs = inference(ref, answers, output="logprobs", batch_size=size)
    loss = kto_loss(algo).on(answers, ref_logprobs, kl, batch_size=size, mean_over="rows")
    train_step(actor, loss, optimizer=algo.optimizer, update=algo.update)
    move_reference(ref, actor, algo.follow)
    logprobs = inference(actor, held_out, output="logprobs", every=every, name="actor_evaluation")
    reference = inference(ref, held_out, output="logprobs", every=every, name="ref_evaluation")
    compute(label_accuracy, held_out, logprobs, reference, settings=algo, every=every)
