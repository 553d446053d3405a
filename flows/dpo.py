"""Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290) and its variants, without a reward model.

DPO, cDPO, robust DPO, IPO and SimPO are settings of this flow.
"""

from __future__ import annotations

from prefect_rlhf.blocks.dataset import Preferences
from prefect_rlhf.blocks.model import Model
from prefect_rlhf.errors.errors import Missing, NotUsed
from prefect_rlhf.flows.algorithm.rlhf_flow import rlhf_flow
from prefect_rlhf.tasks.rl.moving_reference import move_reference
from prefect_rlhf.tasks.rl.preference_evaluation import preference_accuracy
from prefect_rlhf.tasks.rl.preference_losses import dpo as dpo_loss
from prefect_rlhf.tasks.rl.settings.offline import DPO
from prefect_rlhf.tasks.tracing.calls import compute, inference, train_step


@rlhf_flow("dpo")
def dpo(pairs: Preferences, held_out: Preferences, actor: Model, ref: Model | None = None, algo: DPO = DPO()) -> None:
    """One iteration: the reference's log-probabilities of the pairs, then a training step. Evaluates on held-out pairs.

    SimPO needs no reference.
    """
    if algo.needs_reference and ref is None:
        raise Missing("ref", f"a model, which loss {algo.loss} compares with")
    if ref is not None and not algo.needs_reference:
        raise NotUsed("ref", getattr(ref, "path", ref), f"loss {algo.loss} has no reference")
    size, every = algo.batch_size, algo.evaluate_every
    reference = [inference(ref, pairs, output="logprobs", batch_size=size)] if ref else []
    loss = dpo_loss(algo).on(pairs, *reference, batch_size=size)
    train_step(actor, loss, optimizer=algo.optimizer, update=algo.update)
    move_reference(ref, actor, algo.follow)
    logprobs = inference(actor, held_out, output="logprobs", every=every, name="actor_evaluation")
    compared = [inference(ref, held_out, output="logprobs", every=every, name="ref_evaluation")] if ref else []
    compute(preference_accuracy, logprobs, *compared, settings=algo, every=every)
