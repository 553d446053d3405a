"""Offloading: part of a call's copy of weights is in host memory while no call uses it."""

from prefect_rlhf.placement.plan import Offload
from prefect_rlhf.placement.words.word import Word

OFFLOAD = Word[Offload](
    name="offload",
    default="none",
    type=Offload,
    description="What is in host memory while no call uses it.",
    offered=lambda traits: traits.holds_weights,
    other_engines="{} holds no weights".format,
    of_copy=True,
    rebuilds=True,
    of_evaluation=True,
    is_written=True,
)
"""`placement/plans/check.py` checks the words that several calls have to agree on."""
