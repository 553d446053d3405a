"""An author's flow of five generates on the same prompts, on two engines: its own metrics say which are alike."""

from prefect_rlhf.blocks.dataset import Prompts
from prefect_rlhf.blocks.model import Model
from prefect_rlhf.engines.compute import Computed
from prefect_rlhf.flows.algorithm.rlhf_flow import rlhf_flow
from prefect_rlhf.tasks.settings import Sampling, Settings
from prefect_rlhf.tasks.tracing.calls import compute, generate
from prefect_rlhf.tasks.tracing.operations import computation

ALGO = Settings()
SAMPLING = Sampling(max_new_tokens=8, stop_at_eos=False)


@computation()
def alike(rollout, other, settings):
    """How many of the responses are the same."""
    same = [bool((a == b).all()) for a, b in zip(rollout["tokens"], other["tokens"], strict=True)]
    return Computed({}, metrics={"share": sum(same) / len(same)})


@rlhf_flow("draws_alike")
def draws_alike(prompts: Prompts, actor: Model, algo: Settings = ALGO) -> None:
    shared = {"batch_size": 16, "sampling": SAMPLING}
    rollout = generate(actor, prompts, **shared)
    again = generate(actor, prompts, **shared, name="again")
    again_on_vllm = generate(actor, prompts, **shared, name="again_on_vllm")
    common = generate(actor, prompts, **shared, draws="actor_generate", name="common")
    common_on_vllm = generate(actor, prompts, **shared, draws="actor_generate", name="common_on_vllm")
    for name, other in {"again": again, "again_on_vllm": again_on_vllm}.items():
        compute(alike, rollout, other, settings=algo, name=f"{name}_alike")
    for name, other in {"common": common, "common_on_vllm": common_on_vllm}.items():
        compute(alike, rollout, other, settings=algo, name=f"{name}_alike")
