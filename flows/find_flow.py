"""Which flow a word on the command line or in a form stands for."""

from __future__ import annotations

from importlib import import_module

from prefect_rlhf.flows.rlhf_flow import AlgorithmFlow
from prefect_rlhf.placement.errors import InvalidInput

ALGORITHMS = ("ppo", "reward", "dpo", "grpo", "remax")


def find_flow(name: str) -> AlgorithmFlow:
    """The flow that `name` stands for. Raises InvalidInput when there is none.

    >>> find_flow("ppo") is find_flow("prefect_rlhf.flows.ppo:ppo")
    True
    """
    module, _, attribute = (name if ":" in name else f"prefect_rlhf.flows.{name}:{name}").partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidInput("algorithm", name, f"one of {', '.join(ALGORITHMS)}, or module:function") from error
    if not isinstance(found, AlgorithmFlow):
        raise InvalidInput("algorithm", name, "a function decorated with @rlhf_flow")
    return found
