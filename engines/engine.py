"""An engine's interface to its rank: weights as regions, calls, offload and reload.

Shapes: B rows, S prompt and response tokens (right-padded), T response tokens (right-padded), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from prefect_rlhf.engines.losses.protocol import LossTerm
from prefect_rlhf.placement.layout.regions import Region, shape_of
from prefect_rlhf.placement.plan import ModelInstance, OffloadPart, Recompute

if TYPE_CHECKING:
    from torch import Tensor

StateKind = Literal["main", "exp_avg", "exp_avg_sq"]
OverlongAnswers = Literal["refuse", "keep_start", "keep_end", "end"]


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a parameter on this rank, under its Hugging Face name.

    `view` aliases the engine's own storage. Its elements are the region's, both in row-major order, but it may split
    axes and be non-contiguous (a fused qkv). Read with `view.reshape(shape)`, write with `view.copy_(...)`.
    """

    region: Region
    view: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return shape_of(self.region)


@dataclass(frozen=True, slots=True)
class StatePart:
    """A region of a parameter in this rank's state: float32 main weights or an Adam moment.

    `values` views the region's elements in row-major order, in the optimizer's own tensor or, for a follower without
    main weights, in its compute weights.
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
        """The length T of the longest response; 0 without rows."""
        return int((self.lengths_B - self.prompt_lengths_B).max()) if len(self) else 0

    def response_mask_BT(self) -> Tensor:
        """A mask [B, T]: 1.0 where response token t exists."""
        import torch  # only here: the controller and plans import this file without torch

        t = torch.arange(self.num_response_tokens, device=self.tokens_BS.device)
        return (t[None] < (self.lengths_B - self.prompt_lengths_B)[:, None]).float()


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """Settings of a train_step: `epochs` passes over the rows in `mini_batches`, with an optimizer step for each."""

    mini_batches: int = 1
    micro_batches: int = 1
    epochs: int = 1
    recompute: Recompute = 0
    """How many layers of each pipeline stage keep only their input for the backward pass."""
    tokens_over_tp: bool = False
    """Whether each tensor-parallel rank has its part of the tokens between products."""
    registered: tuple[tuple[str, Any], ...] = ()
    """Placement words from other packages."""


@dataclass(frozen=True, slots=True)
class TrainingRows:
    """This replica's rows of a row set in mini-batch order, with the losses that share a forward pass."""

    sequences: Sequences
    terms: tuple[LossTerm, ...]
    columns: tuple[Mapping[str, Tensor], ...]
    """For each of `terms`."""
    rows_per_item: int = 1  # adjacent rows that must stay in the same micro-batch
    mini_batch_rows: tuple[int, ...] = ()
    """The sizes of the mini-batches, in order; empty if all are equal."""
    some_without_rows: bool = False
    """Whether some replica has no row in some mini-batch."""


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """Settings for continuing a prompt. Temperature 0 is greedy; a top_k of 0 keeps all tokens.

    A response ends with the token that completes a string in `stop`; see StopStrings.
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
        """Whether some tokens of the vocabulary may be excluded."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


@dataclass(frozen=True, slots=True)
class Generated:
    """Responses to a batch of prompts, and each token's log-probability over the whole vocabulary at the temperature.

    `kept_mass` is the mean over tokens of the probability that top_k, top_p and min_p keep. It is None if they keep all
    tokens, and on ranks that do not sample.
    """

    tokens: Sequence[Sequence[int]]
    logprobs: Sequence[Sequence[float]]
    kept_mass: float | None = None


@dataclass(frozen=True, slots=True)
class PlaySettings:
    """Settings of plays in a call; `Play` states their bounds and defaults.

    From `function` to `python` they are as in PlayFunction.
    """

    function: str
    signature: str
    tools: tuple[str, ...]
    tool_format: str
    tool_errors: str
    arguments: str
    python: str
    max_tokens: int
    """Limit on the tokens after a prompt, including answers."""
    max_turns: int
    """Limit on the model's turns in a row."""
    max_answer_tokens: int
    """Limit on an environment's answer."""
    overlong_answers: OverlongAnswers
    """What to do with a longer answer."""
    workers: int
    """Processes per replica."""
    at_once: int
    """Plays open in each process."""
    deadline_seconds: float
    """Limit for an answer."""
    play_seconds: float
    """Limit for all answers of a row together, in wall time."""
    start_seconds: float
    """As in HostSettings. It also limits the start of MCP servers."""
    retries: int
    """As in HostSettings, like `failed_value`."""
    failed_value: float | None
    most_failed: float
    """As in HostSettings, but a share of a replica's rows."""
    environment_variables: tuple[str, ...]
    """Names of further variables for the workers."""
    together: bool
    """Whether rows take their turns in rounds, so that batches do not depend on delays."""


@dataclass(frozen=True)
class Turn:
    """Let the model take a turn in a play's row."""

    row: int
    number: int
    """Counts the row's turns from 0."""
    answer: tuple[int, ...]
    """Tokens that come before the turn."""
    at_most: int
    """Limit on the turn's tokens."""
    prompt: tuple[int, ...] | None = None
    """Before the first turn, it replaces the row's prompt if an environment has added text to it."""


@dataclass(frozen=True)
class PlayEnd:
    """The end of a row's play."""

    row: int
    score: float
    """NaN means not applicable."""
    rewards: tuple[float, ...]
    """By turn."""
    failed: bool = False
    """Whether the play failed, so that the row does not count."""
    truncated: bool = False
    """Whether the row ran out of tokens or turns."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Other numbers, by name."""
    answers: int = 0
    """How many answers the model's turns got."""
    answer_seconds: float = field(default=0.0, compare=False)  # of a clock
    """The time for all of them."""


Order = Turn | PlayEnd


class PlayTable(Protocol):
    """The plays of a replica's rows, on the rank that leads the replica."""

    def orders(self, wait: Literal["no", "any", "all"]) -> Sequence[Order]:
        """Return the next orders: the available orders ("no"), at least an order ("any"), or an order for each row
        ("all").

        No orders remain once each row has its PlayEnd.
        """
        ...

    def heard(self, row: int, tokens: Sequence[int], is_stopped: bool) -> None:
        """Take the tokens of a row's latest turn. `is_stopped` says that it ended before its token limit."""
        ...


@dataclass(frozen=True, slots=True)
class Conversed:
    """The rows of plays: all tokens after each prompt, with a value for each token in the other lists."""

    prompts: Sequence[Sequence[int]]
    """What the rows continue, with text added by environments."""
    tokens: Sequence[Sequence[int]]
    logprobs: Sequence[Sequence[float]]
    """0 for tokens that are not the model's own."""
    mask: Sequence[Sequence[int]]
    """1 at the model's own tokens."""
    turns: Sequence[Sequence[int]]
    """Each token's turn number; tokens between turns have the previous turn's."""
    ends: Sequence[PlayEnd]
    """In the order of the rows."""
    kept_mass: float | None = None
    """As in Generated."""


class Engine(Protocol):
    """A model instance's shard on this rank."""

    instance: ModelInstance

    def weights(self) -> Mapping[str, Shard]:
        """The compute weights on this rank, by Hugging Face name."""
        ...

    def weights_written(self) -> None:
        """Drop caches, repack, refresh main weights: must be called after weights were written through `weights()`."""
        ...

    def device_bytes(self) -> int:
        """Storage bytes of the tensors on the device that this engine keeps between calls.

        Another thread may ask while a call runs, so tensors that only the running call needs do not count; a
        certificate lists them separately.
        """
        ...

    def offload(self, part: OffloadPart = "all", copies: bool = True) -> int:
        """Free a part's device tensors; return the bytes copied to host memory. Idempotent.

        Without `copies`, the host copy of the last reload stays valid if the part was not written since. Otherwise the
        next reload has no copies either. Only an engine with the trait `drops_weights` receives `copies`.

        Without its optimizer an engine can do everything that needs its compute weights only. Runs in another thread,
        concurrently with calls that use other tensors: it must only touch the part's own storages.
        """
        ...

    def reload(self, part: OffloadPart = "all", copies: bool = True) -> int:
        """Restore the tensors that `offload` freed; return the bytes copied back. Idempotent; concurrent as `offload`.

        Without `copies`, the weights are undefined until they are written.
        """
        ...

    def close(self) -> None:
        """Free all memory of the engine, on the device and on the host. Collective; no other method may follow."""
        ...


class HasState(Protocol):
    """The part of a model on this rank that a checkpoint stores, apart from frozen weights."""

    def weights(self) -> Mapping[str, Shard]:
        """See Engine."""
        ...

    def weights_written(self) -> None:
        """See Engine."""
        ...

    @property
    def num_updates(self) -> int:
        """The optimizer's steps so far, which its warm-up and bias corrections count."""
        ...

    def state_parts(self) -> Iterator[StatePart]:
        """Yield the whole state on this rank, in pieces of any size; no moments before the first step."""
        ...

    def begin_after(self, num_updates: int) -> None:
        """Continue as if after that many optimizer steps; the moments exist as zeros, to be overwritten."""
        ...


class TrainingEngine(Engine, HasState, Protocol):
    """An engine that runs inference and train_step. Every rank of the mesh makes the same calls in the same order."""

    def infer(self, sequences: Sequences, output: str, micro_batches: int, temperature: float) -> Tensor | None:
        """Run this data-parallel replica's rows; the replica may have no rows.

        Returns the output on ranks of the last pipeline stage with tp coordinate 0, None on other ranks. Examples are
        logprobs [B, T] (of response tokens), values [B, T] (at the token before each response token) and scores [B] (at
        the last token). Vector outputs have another axis at the end.
        """
        ...

    def train(self, rows: Sequence[TrainingRows], settings: TrainSettings) -> dict[str, float]:
        """Take epochs * mini_batches optimizer steps, each on a mini-batch of every row set together.

        The gradient is that of the sum over all terms of weight * mean, for any split of the rows over replicas and
        micro-batches. A replica without rows in a set takes part in the collective operations and adds no gradient. If
        all means are over no values, the step is skipped, and `skipped_updates` counts it. `empty_updates` counts the
        steps with a gradient of 0 in every element. A count of 0 is left out.

        Returns the means over all rows and steps of the loss, its metrics and `grad_norm`, and the last step's
        `learning_rate`; they are equal on every rank. With several terms, each term's values are prefixed by its name
        and a dot, and `loss` is the weighted sum. Values prefixed by `initial_` are from the first mini-batch, before
        any update. New and old policy then have the same weights, so a difference in the loss is a difference between
        the two engines.
        """
        ...


class SharingEngine(Engine, Protocol):
    """An engine with the trait `shares_weights`. If its command has `shared` weights, its build ends with a call of
    `share`.
    """

    def share(self, lent: Sequence[tuple[Engine, Collection[str]]]) -> None:
        """Use other engines' tensors for some parameters, and free its own.

        All have the trait `lends_weights`, or are of its class. Raises EngineFailed for a tensor that is not the same.
        """
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
        """Continue this replica's prompts; the i-th row draws from seeds[i] only, in any batch.

        Returns no responses without prompts. Rows are split into `micro_batches` groups that alternate, so that the
        stages of a pipeline work at the same time.
        """
        ...


class PlayingEngine(GenerationEngine, Protocol):
    """An engine with the trait `plays`."""

    @property
    def leads(self) -> bool:
        """Whether this rank leads its replica, so that it has the table of a play."""
        ...

    def converse(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingSettings,
        seeds: Sequence[int],
        table: PlayTable | None,
        micro_batches: int = 1,
        *,
        together: bool = False,
    ) -> Conversed:
        """Continue this replica's rows turn by turn, as the leader's table says; the other ranks have no table.

        A row's turns draw from `play_seed` of the row's seed. With `together`, all rows wait for the slowest answer of
        each round, so that even rounding does not depend on delays.
        """
        ...
