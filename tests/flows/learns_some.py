"""An author's flow: supervised fine-tuning whose loss is multiplied by a number, from a step on by 0."""

from prefect_rlhf.blocks.chats import Chats
from prefect_rlhf.blocks.model import Model
from prefect_rlhf.engines.compute import Computed
from prefect_rlhf.engines.losses.protocol import LossValues
from prefect_rlhf.flows.algorithm.rlhf_flow import rlhf_flow
from prefect_rlhf.tasks.settings import Optimizer, Settings
from prefect_rlhf.tasks.tracing.calls import compute, inference, train_step
from prefect_rlhf.tasks.tracing.operations import computation, loss


class Scaled(Settings):
    """The steps that learn: all before `steps`."""

    steps: int = 0
    optimizer: Optimizer = Optimizer(lr=1e-2, warmup_steps=100)


ALGO = Scaled()


@computation("scale")
def scale_of_step(logprobs, settings, context):
    return Computed({"scale": (logprobs["logprobs"] * 0 + 1.0) * (context.step <= settings.steps)})


@loss("logprobs")
def scaled_nll(logprobs_BT, batch, settings):
    return LossValues(-batch["scale"] * logprobs_BT)


@rlhf_flow("learns_some")
def learns_some(chats: Chats, actor: Model, algo: Scaled = ALGO) -> None:
    logprobs = inference(actor, chats, output="logprobs", batch_size=2)
    scale = compute(scale_of_step, logprobs, settings=algo)
    train_step(actor, scaled_nll(algo).on(chats, scale), optimizer=algo.optimizer)
