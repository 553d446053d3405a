"""A third engine, as CONTRIBUTING.md describes: it generates and infers with a Llama in plain torch.

It computes each row alone and keeps no keys and values. Shapes: S tokens of a row, H hidden, D width of a head.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn import functional as F  # noqa: N812  its usual name

from prefect_rlhf.engines.engine import Generated, Shard
from prefect_rlhf.engines.sampling.chats.answer_end import end_tokens
from prefect_rlhf.engines.sampling.response_end import check_lengths
from prefect_rlhf.engines.sampling.sampler import choose, uniforms
from prefect_rlhf.engines.weights.memory import storage_bytes
from prefect_rlhf.engines.weights.offload import OffloadedTensors
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.engine_traits import EngineTraits

NAME = "plain"
TRAITS = EngineTraits(serves=("generate", "inference"), engine_class=f"{__name__}:PlainEngine")


class PlainEngine:
    """A whole copy of a Llama's weights on this rank."""

    def __init__(self, command, rank):
        if command.instance.strategy.tp != 1:
            raise InvalidInput(f"{command.instance.name}: tp", command.instance.strategy.tp, f"1 with engine {NAME}")
        self.instance, self._shape = command.instance, command.model.shape
        self._max_length, self._ends = command.max_sequence_length, end_tokens(command.model.path)
        stored = load_file(Path(command.model.path, "model.safetensors"))
        self._weights = {name: stored[name].clone() for name in command.layout.of_rank(rank)}
        self._offloaded = OffloadedTensors(torch.device("cpu"))

    def weights(self):
        return {name: Shard(tuple((0, size) for size in one.shape), one) for name, one in self._weights.items()}

    def weights_written(self):
        """Keep nothing that depends on the weights."""

    def device_bytes(self):
        return storage_bytes(self._weights.values())

    def offload(self, part="all"):
        if part != "all":
            return 0
        return self._offloaded.offload(list(self._weights.values()))

    def reload(self, part="all"):
        return self._offloaded.reload() if part == "all" else 0

    @torch.no_grad()
    def infer(self, sequences, output, micro_batches, temperature):
        if output != "logprobs":
            raise InvalidInput("output", output, f"logprobs with engine {NAME}")
        logprobs_BT = torch.zeros(len(sequences), sequences.num_response_tokens)
        lengths = zip(sequences.prompt_lengths_B.tolist(), sequences.lengths_B.tolist(), strict=True)
        for row, (prompt, end) in enumerate(lengths):
            tokens_S = sequences.tokens_BS[row, :end]
            logprobs_SV = (self._logits(tokens_S) / temperature).log_softmax(-1)
            logprobs_BT[row, : end - prompt] = logprobs_SV[:-1].gather(1, tokens_S[1:, None])[prompt - 1 :, 0]
        return logprobs_BT

    @torch.no_grad()
    def generate(self, prompts, sampling, seeds, micro_batches=1):
        check_lengths(prompts, sampling, self._max_length)
        if sampling.stop:
            raise InvalidInput("stop", sampling.stop, f"no strings with engine {NAME}")
        rows = [self._respond(prompt, sampling, seed) for prompt, seed in zip(prompts, seeds, strict=True)]
        kept = [choice.kept_mass_B for choices in rows for choice in choices if choice.kept_mass_B is not None]
        tokens, logprobs = ([[choice[part].item() for choice in row] for row in rows] for part in (0, 1))
        return Generated(tokens, logprobs, torch.cat(kept).mean().item() if kept else None)

    def _respond(self, prompt, sampling, seed):
        tokens, choices = list(prompt), []
        for uniforms_B in uniforms([seed], sampling.max_new_tokens).T:
            logits_1V = self._logits(torch.tensor(tokens))[-1:]
            numbers = sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p
            choices.append(choose(logits_1V, uniforms_B if sampling.temperature else None, *numbers))
            tokens.append(choices[-1].tokens_B.item())
            if sampling.stop_at_eos and tokens[-1] in self._ends:
                break
        return choices

    def _logits(self, tokens_S):
        hidden_SH = self._weights["model.embed_tokens.weight"][tokens_S]
        for layer in range(self._shape.num_layers):
            weights = {name.removeprefix(f"model.layers.{layer}."): one for name, one in self._weights.items()}
            hidden_SH = hidden_SH + self._attention(weights, self._norm(hidden_SH, weights["input_layernorm.weight"]))
            inner_SH = self._norm(hidden_SH, weights["post_attention_layernorm.weight"])
            gate, up, down = (weights[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
            hidden_SH = hidden_SH + (F.silu(inner_SH @ gate.T) * (inner_SH @ up.T)) @ down.T
        output = self._weights.get("lm_head.weight", self._weights["model.embed_tokens.weight"])
        return self._norm(hidden_SH, self._weights["model.norm.weight"]) @ output.T

    def _norm(self, hidden_SH, weight):
        return F.rms_norm(hidden_SH, weight.shape, weight, self._shape.rms_norm_eps)

    def _attention(self, weights, hidden_SH):
        query, key, value = (
            (hidden_SH @ weights[f"self_attn.{name}_proj.weight"].T).unflatten(1, (-1, self._shape.head_dim))
            for name in ("q", "k", "v")
        )
        query, key = (self._rotated(one.transpose(0, 1)) for one in (query, key))
        value = value.transpose(0, 1)
        mixed = F.scaled_dot_product_attention(query[None], key[None], value[None], is_causal=True, enable_gqa=True)[0]
        return mixed.transpose(0, 1).flatten(1) @ weights["self_attn.o_proj.weight"].T

    def _rotated(self, heads_NSD):
        """Rotate each head's halves by the token's position (Su et al. 2021, RoFormer)."""
        exponents = torch.arange(0, self._shape.head_dim, 2) / self._shape.head_dim
        angles = torch.arange(heads_NSD.shape[1])[:, None] / self._shape.rope_theta**exponents
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        left, right = heads_NSD.chunk(2, -1)
        return heads_NSD * cos + torch.cat((-right, left), -1) * sin
