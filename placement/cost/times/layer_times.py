"""Times of layers and heads on a device. Datasheets and profiles both provide them."""

from collections.abc import Hashable
from typing import Protocol

from prefect_rlhf.placement.cost.datasheets.collectives import CollectiveGroup
from prefect_rlhf.placement.cost.datasheets.hardware import Links
from prefect_rlhf.placement.cost.seconds import Seconds
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.workload import ModelCallKind


class LayerTimes(Hashable, Protocol):
    """A model on a kind of device. Times are per tp-th part of a layer, without communication.

    `rows` rows of `length` tokens pass through together; `context` is how many tokens a decoded token attends to. The
    experts of a device, every `ep`-th expert, serve the tokens of `ep` replicas with equally many tokens each.
    """

    @property
    def sizes(self) -> ModelSizes: ...

    @property
    def links(self) -> Links: ...

    def fixed(self, kind: ModelCallKind) -> float:
        """Return the fixed time of a call of this kind in seconds, in addition to its layers."""
        ...

    def forward(self, rows: float, length: float, tp: int, split: int = 1, ep: int = 1) -> Seconds:
        """Run a layer forward; [tokens, hidden] is in `split` parts outside of matrix products."""
        ...

    def backward(self, rows: float, length: float, tp: int, split: int = 1, ep: int = 1) -> Seconds:
        """Run a layer backward, without its forward again."""
        ...

    def head_forward(self, tokens: float, tp: int) -> Seconds:
        """Go from last hidden states to log-probabilities or values."""
        ...

    def head_backward(self, tokens: float, tp: int) -> Seconds: ...

    def decode(self, rows: float, context: float, tp: int, cuda_graphs: bool, ep: int = 1) -> Seconds:
        """Run a layer for a new token per row."""
        ...

    def sample(self, rows: float, tp: int) -> Seconds:
        """End a decoding step: compute the head and sample a token for each row."""
        ...

    def exchange(self) -> float:
        """Return the seconds that two stages' hosts need to pass on a micro-batch, while their devices wait."""
        ...

    def adam(self, num_parameters: float) -> float:
        """Take an optimizer step on `num_parameters` parameters."""
        ...

    def written(self, num_parameters: float) -> float:
        """Return the cost of newly written weights, which is their fingerprint. A datasheet has no value for it."""
        ...

    def packed(self, num_parameters: float) -> float:
        """Return the cost of the first generation after weights were written, if the engine packs them."""
        ...

    def taken(self, num_layers: int) -> float:
        """Return the host's work to bring `num_layers` layers of new weights into another engine."""
        ...

    def host_step(self, rows: float) -> float:
        """Return the host's work for a decoding step of `rows` rows, while the devices wait."""
        ...

    def all_reduce(self, num_bytes: float, group: CollectiveGroup) -> float:
        """Give every rank of the group the sum of `num_bytes` bytes of each rank."""
        ...

    def share(self, num_parameters: float, group: CollectiveGroup) -> float:
        """Sum gradients over replicas, each a share, and give every replica the new weights."""
        ...
