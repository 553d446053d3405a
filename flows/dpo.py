"""Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290): preferences without a reward model."""

from __future__ import annotations

from prefect_rlhf.blocks.dataset import Preferences
from prefect_rlhf.blocks.model import Model
from prefect_rlhf.flows.rlhf_flow import rlhf_flow
from prefect_rlhf.tasks.calls import inference, train_step
from prefect_rlhf.tasks.rl.hyperparameters import DPO
from prefect_rlhf.tasks.rl.losses import dpo as dpo_loss


@rlhf_flow("dpo")
def dpo(pairs: Preferences, actor: Model, ref: Model, algo: DPO = DPO()) -> None:
    """One iteration: how likely the reference finds both answers, then a step of the policy."""
    ref_logprobs = inference(ref, pairs, output="logprobs", batch_size=algo.batch_size)
    loss = dpo_loss(algo).on(pairs, ref_logprobs, batch_size=algo.batch_size)
    train_step(actor, loss, optimizer=algo.optimizer, update=algo.update)
