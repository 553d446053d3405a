"""The loop that generates with Megatron's own weights: passes through the stages, sampling at each step, sent to all
ranks.

Groups of rows alternate, so that a pipeline's stages work on different groups at the same time. A single rank of a
replica (last stage, tp coordinate 0) has logits over the whole vocabulary and samples tokens. Every rank receives them,
and derives the remaining rows from them.

Shapes: B remaining rows, N tokens of a pass, H hidden, V vocabulary, R rows of the replica, T new tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from prefect_rlhf.engines.cpu_products import product
from prefect_rlhf.engines.engine import Generated, SamplingSettings
from prefect_rlhf.engines.megatron.groups import Groups
from prefect_rlhf.engines.megatron.key_value_cache import CachedPass
from prefect_rlhf.engines.megatron.model import Transformer
from prefect_rlhf.engines.megatron.sampling.row_group import RowGroup
from prefect_rlhf.engines.sampling.sampler import choose, uniforms


@dataclass(slots=True)
class _InFlight:
    """Messages of a group's latest pass: hidden states on their way to the next stage, the choice to all ranks."""

    choice_2B: Tensor
    work: list[Any] = field(default_factory=list)
    sent: list[Tensor] = field(default_factory=list)  # kept until the work is done

    def wait(self) -> Tensor:
        for work in self.work:
            work.wait()
        return self.choice_2B


class Generation:
    """A generate call on a rank; every rank of the replica makes the same call."""

    def __init__(
        self, model: Transformer, vocab_size: int, groups: Groups, sampling: SamplingSettings, seeds: Sequence[int]
    ) -> None:
        self._model, self._vocab_size, self._groups, self._sampling = model, vocab_size, groups, sampling
        self._device = next(model.parameters()).device
        self._chooses = groups.is_last_stage and groups.coordinate.tp == 0
        self._kept_mass, self._num_chosen = torch.zeros((), dtype=torch.float64, device=self._device), 0
        self._uniforms_RT: Tensor | None = None
        if self._chooses and sampling.temperature:
            self._uniforms_RT = uniforms(seeds, sampling.max_new_tokens).to(self._device)

    def run(self, groups: Sequence[RowGroup]) -> Generated:
        """Continue all rows of all groups until they end."""
        # All ranks walk the groups in the same order, so their sends and broadcasts match without tags. While a group's
        # choice is under way, the stages compute the other groups. A group ends on all ranks in the same round, because
        # all of them receive the same choices.
        in_flight = [self._prefill(group) for group in groups]
        while any(group.size for group in groups):
            for index, group in enumerate(groups):
                if group.size:
                    group.take(in_flight[index].wait())
                if group.size:
                    in_flight[index] = self._decode(group)
        rows = {row: (tokens, logprobs) for group in groups for row, tokens, logprobs in group.responses()}
        responses = [rows[row] for row in sorted(rows)]
        kept_mass = float(self._kept_mass) / self._num_chosen if self._num_chosen else None
        return Generated([tokens for tokens, _ in responses], [logprobs for _, logprobs in responses], kept_mass)

    def _prefill(self, group: RowGroup) -> _InFlight:
        flight = self._new_flight(group)
        last_hidden = []
        for tokens_1N, step, last_B in group.prefills():
            hidden_N1H = self._forward(tokens_1N, step, flight)
            last_hidden.append(hidden_N1H[last_B, 0])
        self._choose(group, torch.cat(last_hidden), flight)
        return flight

    def _decode(self, group: RowGroup) -> _InFlight:
        flight = self._new_flight(group)
        tokens_B1, step = group.decode()
        self._choose(group, self._forward(tokens_B1, step, flight)[0], flight)
        return flight

    def _new_flight(self, group: RowGroup) -> _InFlight:
        """Make room for tokens and log-probabilities, which travel together, both exact in float64."""
        return _InFlight(torch.empty(2, group.size, dtype=torch.float64, device=self._device))

    def _forward(self, tokens: Tensor, step: CachedPass, flight: _InFlight) -> Tensor:
        """Run this stage's layers, [1, B, H] or [N, 1, H], on the previous stage's output; send to the next stage."""
        pp, stage = self._groups.pp, self._groups.coordinate.pp
        if not self._groups.is_first_stage:
            config = self._model.config
            shape = (tokens.shape[1], tokens.shape[0], config.hidden_size)
            received = torch.empty(shape, dtype=config.params_dtype, device=self._device)
            dist.recv(received, group=pp, group_src=stage - 1)
            self._model.set_input_tensor(received)
        hidden: Tensor = self._model(tokens, step)
        if not self._groups.is_last_stage:
            flight.sent.append(hidden.contiguous())
            flight.work.append(dist.isend(flight.sent[-1], group=pp, group_dst=stage + 1))
        return hidden

    def _choose(self, group: RowGroup, hidden_BH: Tensor, flight: _InFlight) -> None:
        """On the rank that chooses, take a token for each row; start to send the choice to the replica's ranks."""
        logits_BV = self._logits(hidden_BH) if self._groups.is_last_stage else None
        if logits_BV is not None:
            next_B = None if self._uniforms_RT is None else self._uniforms_RT[group.numbers_B, group.num_steps]
            by = self._sampling
            choice = choose(logits_BV, next_B, by.temperature, by.top_p, by.top_k, by.min_p)
            flight.choice_2B[0], flight.choice_2B[1] = choice.tokens_B, choice.logprobs_B
            if choice.kept_mass_B is not None:
                self._kept_mass += choice.kept_mass_B.double().sum()
                self._num_chosen += len(choice.kept_mass_B)
        replica, last = self._groups.replica, self._groups.strategy.pp - 1
        if replica.size() > 1:
            chooser = last * self._groups.strategy.tp
            flight.work.append(dist.broadcast(flight.choice_2B, group=replica, group_src=chooser, async_op=True))

    def _logits(self, hidden_BH: Tensor) -> Tensor | None:
        """Return logits [B, V] on the rank that chooses; other ranks of the tensor-parallel group send their part."""
        tp = self._groups.tp
        part_BV = product(hidden_BH, self._model.head_weight("lm").t())
        if tp.size() == 1:
            return part_BV[:, : self._vocab_size]
        parts = [torch.empty_like(part_BV) for _ in range(tp.size())] if self._chooses else None
        dist.gather(part_BV, parts, group=tp, group_dst=0)
        return None if parts is None else torch.cat(parts, -1)[:, : self._vocab_size]  # padding lies at the end
