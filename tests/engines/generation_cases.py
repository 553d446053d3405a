"""What ranks do to generate on Megatron's weights, with the tiny models and prompts of the vLLM tests."""

from dataclasses import replace

from vllm_cases import build_command, make_prompts

from prefect_rlhf.engines.engine import Generated, SamplingSettings
from prefect_rlhf.engines.megatron.engine import MegatronEngine
from prefect_rlhf.placement.devices.strategy import Strategy

PROMPTS = [*make_prompts(6, 3, 40), *make_prompts(4, 130, 200)]
SEEDS = list(range(100, 110))
GREEDY = SamplingSettings(12, temperature=0.0, stop_at_eos=False)
SAMPLED = SamplingSettings(16, stop_at_eos=False)
STOPPED = SamplingSettings(24, temperature=2.0)
"""Hot enough that most rows meet an end token on the way, each in its own time."""
STRINGS = SamplingSettings(24, temperature=2.0, stop_at_eos=False, stop=("1 w2", "w33"))
"""One lies across two words, the other begins some of them."""


def build(folder: str, rank: int = 0, **where) -> MegatronEngine:
    command = build_command(folder, **where)
    return MegatronEngine(replace(command, instance=replace(command.instance, engine="megatron")), rank)


def generate(
    rank: int, folder: str, where: dict, calls: list[tuple[SamplingSettings, int]]
) -> tuple[int, list[Generated]]:
    """The replica of this rank and its answers to each (sampling, micro_batches)."""
    engine = build(folder, rank, **where)
    dp = where.get("dp", 1)
    strategy = Strategy(dp, where.get("tp", 1), where.get("pp", 1))
    replica = strategy.coordinates()[where["ranks"].index(rank)].dp
    part = len(PROMPTS) // dp
    rows = slice(replica * part, (replica + 1) * part)
    return replica, [engine.generate(PROMPTS[rows], sampling, SEEDS[rows], micro) for sampling, micro in calls]
