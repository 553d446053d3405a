"""Supervised fine-tuning: the likelihood of the assistant's answers in chats, of completions, or of whole texts."""

from __future__ import annotations

from prefect_rlhf.blocks.chats import Chats
from prefect_rlhf.blocks.model import Model
from prefect_rlhf.flows.algorithm.rlhf_flow import rlhf_flow
from prefect_rlhf.tasks.rl.evaluation.held_out import token_loss
from prefect_rlhf.tasks.rl.losses import nll
from prefect_rlhf.tasks.rl.settings.offline import SFT
from prefect_rlhf.tasks.tracing.calls import compute, inference, train_step


@rlhf_flow("sft")
def sft(chats: Chats, held_out: Chats, actor: Model, algo: SFT = SFT()) -> None:
    """One iteration: train on a batch of chats; at intervals, the loss on held-out chats."""
    train_step(actor, nll(algo).on(chats, batch_size=algo.batch_size), optimizer=algo.optimizer, update=algo.update)
    every = algo.evaluate_every
    logprobs = inference(actor, held_out, output="logprobs", every=every, name="actor_evaluation")
    compute(token_loss, held_out, logprobs, settings=algo, every=every)
