"""The interface of an engine to its rank: state its weights as regions, run a call, leave and re-enter device memory.

Shapes: B rows, S prompt and response tokens (right-padded), T response tokens (right-padded), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from prefect_rlhf.engines.loss import LossTerm, Output
from prefect_rlhf.placement.layout.regions import Region
from prefect_rlhf.placement.plan import ModelInstance, OffloadPart

if TYPE_CHECKING:
    from torch import Tensor

StateKind = Literal["main", "exp_avg", "exp_avg_sq"]


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of one parameter that this rank holds, under its Hugging Face name.

    `view` aliases the engine's own storage; its elements in row-major order are the region's elements in row-major
    order, but it may split axes and be non-contiguous (a fused qkv). Read with `view.reshape(shape)`, write with
    `view.copy_(...)`.
    """

    region: Region
    view: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.region)


@dataclass(frozen=True, slots=True)
class StatePart:
    """A region of one parameter in what the optimizer keeps on this rank: float32 main weights or a moment of Adam's.

    `values` is a flat view of the region's elements in row-major order, in the optimizer's own tensor.
    """

    kind: StateKind
    parameter: str
    region: Region
    values: Tensor


@dataclass(frozen=True, slots=True)
class Sequences:
    """Rows of tokens: prompt then response, right-padded."""

    tokens_BS: Tensor
    prompt_lengths_B: Tensor
    lengths_B: Tensor

    def __len__(self) -> int:
        return self.tokens_BS.shape[0]

    @property
    def num_response_tokens(self) -> int:
        """The length T of the longest response; 0 of no rows."""
        return int((self.lengths_B - self.prompt_lengths_B).max()) if len(self) else 0

    def response_mask_BT(self) -> Tensor:
        """A mask [B, T]: 1.0 where response token t exists."""
        import torch  # only here: what the controller and a plan know of engines needs none

        t = torch.arange(self.num_response_tokens, device=self.tokens_BS.device)
        return (t[None] < (self.lengths_B - self.prompt_lengths_B)[:, None]).float()


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """Settings of one train_step's walk over its rows: `epochs` times over `mini_batches`, each one optimizer step."""

    mini_batches: int = 1
    micro_batches: int = 1
    epochs: int = 1


@dataclass(frozen=True, slots=True)
class TrainingRows:
    """This replica's rows of one row set, mini-batch by mini-batch, with the losses that one forward pass serves.

    `columns` are what each of `terms` sees of the rows. `mini_batch_rows` are the numbers of rows in each mini-batch,
    one after another; empty: all the same. `some_without_rows` says that some replica has no row of some mini-batch.
    """

    sequences: Sequences
    terms: tuple[LossTerm, ...]
    columns: tuple[Mapping[str, Tensor], ...]
    rows_per_item: int = 1  # adjacent rows that must stay in one micro-batch
    mini_batch_rows: tuple[int, ...] = ()
    some_without_rows: bool = False


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """Settings of the continuation of a prompt. Temperature 0 is greedy; top_k of 0 keeps all tokens.

    A response ends with the token that completes one of the strings in `stop`; see StopStrings.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop_at_eos: bool = True
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()

    @property
    def is_filtered(self) -> bool:
        """Whether some tokens of the vocabulary may be left out."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


@dataclass(frozen=True, slots=True)
class Generated:
    """Responses of a batch of prompts, and the log-probability of each token: of the whole vocabulary, tempered.

    `kept_mass` is the mean over tokens of the probability that top_k, top_p and min_p keep; None where they keep all,
    and on ranks that choose no token.
    """

    tokens: Sequence[Sequence[int]]
    logprobs: Sequence[Sequence[float]]
    kept_mass: float | None = None


class Engine(Protocol):
    """One model instance's shard on this rank."""

    instance: ModelInstance

    def weights(self) -> Mapping[str, Shard]:
        """The compute weights held here, by Hugging Face name."""
        ...

    def weights_written(self) -> None:
        """Drop caches, repack, refresh main weights: called after weights were written through `weights()`."""
        ...

    def device_bytes(self) -> int:
        """Storage bytes of every tensor registered with this engine that is on the device now."""
        ...

    def offload(self, part: OffloadPart = "all") -> int:
        """Move a part's device tensors to host memory; return the bytes freed. Idempotent.

        Without its optimizer an engine does all that needs its compute weights alone. Runs in another thread than calls
        do, beside one that uses other tensors: it may touch nothing but the part's own storages.
        """
        ...

    def reload(self, part: OffloadPart = "all") -> int:
        """Bring back what `offload` moved of the part; return the bytes. Idempotent; beside calls as `offload` is."""
        ...


class TrainingEngine(Engine, Protocol):
    """An engine that runs inference and train_step. Every rank of the mesh makes the same calls in the same order."""

    def infer(self, sequences: Sequences, output: Output, micro_batches: int, temperature: float) -> Tensor | None:
        """Run this data-parallel replica's rows; it may have none.

        Returns logprobs [B, T] (of response tokens), values [B, T] (at the token before each response token) or scores
        [B] (at the last token) on ranks of the last pipeline stage with tp coordinate 0, None elsewhere.
        """
        ...

    def train(self, rows: Sequence[TrainingRows], settings: TrainSettings) -> dict[str, float]:
        """Take epochs * mini_batches optimizer steps, each on a mini-batch of every row set together.

        The gradient is that of the sum over all terms of weight * mean, whatever replica or micro-batch a row is in.
        A replica without rows of one takes part in what replicas do together, and adds nothing. Where all means are
        over nothing, no step is taken.
        Returns the means over all rows and steps of the loss and its metrics, and of `grad_norm`, and the last step's
        `learning_rate`; equal on every rank. Of several terms each has its own, after its name and a dot, and `loss` is
        the weighted sum.
        Under `initial_...` those of the first mini-batch, before any update: there new and old policy have the same
        weights, so what a loss says of their difference is the difference of the two engines.
        """
        ...

    @property
    def num_updates(self) -> int:
        """The optimizer's steps so far, which its warm-up and bias corrections count."""
        ...

    def state_parts(self) -> Iterator[StatePart]:
        """Yield all that the optimizer keeps on this rank, in whatever pieces; no moments before the first step."""
        ...

    def begin_after(self, num_updates: int) -> None:
        """Go on as after that many optimizer steps; the moments are there, zero, to be written to."""
        ...


class GenerationEngine(Engine, Protocol):
    """An engine that runs generate. Every rank of a data-parallel replica makes the same calls in the same order."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingSettings,
        seeds: Sequence[int],
        micro_batches: int = 1,
    ) -> Generated:
        """Continue this replica's prompts; the i-th row draws from seeds[i] alone, whatever it is batched with.

        Without prompts there are no responses.
        Rows take turns in `micro_batches` groups, so that the stages of a pipeline have work at the same time.
        """
        ...
