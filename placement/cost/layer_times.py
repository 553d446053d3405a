"""Seconds of one layer and of the head on one device, which datasheets and profiles both tell."""

from __future__ import annotations

from typing import Protocol

from prefect_rlhf.placement.cost.collectives import CollectiveGroup
from prefect_rlhf.placement.cost.hardware import Links
from prefect_rlhf.placement.cost.seconds import Seconds
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.workload import ModelCallKind


class LayerTimes(Protocol):
    """One model on one kind of device. Times are of one layer's tp-th part, without communication.

    `rows` of `length` tokens each pass through together; `context` is the tokens that a decoded token attends to. The
    experts that a device has, of every `ep`-th, serve the tokens of `ep` replicas with as many each.
    """

    @property
    def sizes(self) -> ModelSizes: ...

    @property
    def links(self) -> Links: ...

    def fixed(self, kind: ModelCallKind) -> float:
        """Return what a call of that kind takes besides its layers, once."""
        ...

    def forward(self, rows: float, length: float, tp: int, split: int = 1, ep: int = 1) -> Seconds:
        """Run one layer forward; [tokens, hidden] is in `split` parts outside of matrix products."""
        ...

    def backward(self, rows: float, length: float, tp: int, split: int = 1, ep: int = 1) -> Seconds:
        """Run one layer backward, without its forward again."""
        ...

    def head_forward(self, tokens: float, tp: int) -> Seconds:
        """Go from last hidden states to log-probabilities or values."""
        ...

    def head_backward(self, tokens: float, tp: int) -> Seconds: ...

    def decode(self, rows: float, context: float, tp: int, cuda_graphs: bool, ep: int = 1) -> Seconds:
        """Run one layer for one new token per row."""
        ...

    def sample(self, rows: float, tp: int) -> Seconds:
        """End a decoding step: the head, and the choice of a token for each row."""
        ...

    def exchange(self) -> float:
        """Return what the hosts of two stages take to pass a micro-batch on, while their devices wait."""
        ...

    def adam(self, num_parameters: float) -> float:
        """Take one optimizer step on so many of the parameters."""
        ...

    def written(self, num_parameters: float) -> float:
        """Return the cost of so many newly written weights: their fingerprint. A datasheet says nothing of it."""
        ...

    def packed(self, num_parameters: float) -> float:
        """Return the cost of the first generation after weights were written, where its engine packs them."""
        ...

    def all_reduce(self, num_bytes: float, group: CollectiveGroup) -> float:
        """Give every rank of the group the sum of `num_bytes` of each."""
        ...

    def share(self, num_parameters: float, group: CollectiveGroup) -> float:
        """Sum gradients over replicas, each its share, and give every replica the new weights."""
        ...
