"""Tiny random Llamas as Hugging Face folders, commands to build them in vLLM, and transformers as the oracle."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from prefect_rlhf.engines.commands import BuildCommand
from prefect_rlhf.engines.engine import Generated, Shard
from prefect_rlhf.placement.devices.mesh import DeviceMesh
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.layout.layout import Layout
from prefect_rlhf.placement.models.adapter import AdapterSpec
from prefect_rlhf.placement.models.model import ModelSpec, TransformerShape
from prefect_rlhf.placement.plan import ModelInstance
from tests.support.layouts import vllm_layout
from tests.support.rounding import MODEL, within

SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
WORDS = [f"w{token}" for token in range(512)]
END_TOKENS = list(range(16))
MAX_LENGTH = 256


def make_folder(path: Path, seed: int, *, tied: bool) -> str:
    """Write a random Llama (fp32, weights of standard deviation 0.15); return the folder."""
    torch.manual_seed(seed)
    config = LlamaConfig(**SHAPE, tie_word_embeddings=tied, initializer_range=0.15, bos_token_id=1, eos_token_id=2)
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=END_TOKENS, bos_token_id=1)
    model.save_pretrained(path)
    words = Tokenizer(models.WordLevel({word: token for token, word in enumerate(WORDS)}, unk_token=WORDS[0]))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token=WORDS[0]).save_pretrained(path)
    return str(path)


def stopped(responses: list[list[int]], strings: tuple[str, ...]) -> list[list[int]]:
    """Responses up to and including the word that completes one of the strings."""
    ends = []
    for response in responses:
        texts = (" ".join(WORDS[token] for token in response[: end + 1]) for end in range(len(response)))
        ends.append(next((i + 1 for i, text in enumerate(texts) if any(s in text for s in strings)), len(response)))
    return [response[:end] for response, end in zip(responses, ends, strict=True)]


def build_command(
    folder: str,
    *,
    ranks: tuple[int, ...] = (0,),
    dp: int = 1,
    tp: int = 1,
    pp: int = 1,
    tied: bool = True,
    dtype: str = "float32",
    head: str = "lm",
    adapter: AdapterSpec | None = None,
) -> BuildCommand:
    shape = TransformerShape(128, 256, 4, 4, 2, 32, 512, 512, 10000.0, 1e-5, tied)
    model = ModelSpec("actor", folder, head, shape, dtype, adapter=adapter)
    strategy = Strategy(dp, tp, pp)
    instance = ModelInstance("actor", "vllm", DeviceMesh(0, 1, 0, len(ranks)), strategy)
    layout = vllm_layout(model, strategy, ranks) if pp == 1 else Layout({}, {})
    return BuildCommand(model, instance, ranks, layout, MAX_LENGTH, max_rows=64)


def make_prompts(count: int, shortest: int = 3, longest: int = 40) -> list[list[int]]:
    """Random prompts of many lengths, no two alike."""
    generator = torch.Generator().manual_seed(count + 1000 * shortest)
    lengths = torch.linspace(shortest, longest, count).int().tolist()
    return [torch.randint(16, 512, (length,), generator=generator).tolist() for length in lengths]


def write_weights(shards: dict[str, Shard], folder: str) -> None:
    """Write another model's weights through the views, as a hand-over from a training engine does."""
    state = LlamaForCausalLM.from_pretrained(folder).state_dict()
    for name, shard in shards.items():
        shard.view.copy_(state[name][tuple(slice(*bounds) for bounds in shard.region)])


class Oracle:
    """transformers' own forward pass, one sequence at a time, without a cache."""

    def __init__(self, folder: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> Tensor:
        """[S, V]"""
        return self.model(torch.tensor([tokens])).logits[0].float()

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(num_tokens):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]

    def logprobs(self, prompt: list[int], response: list[int], temperature: float) -> list[float]:
        """Of each response token in the whole vocabulary at a temperature."""
        probs = self._probs(prompt, response, temperature)
        return [row[token].log().item() for row, token in zip(probs, response, strict=True)]

    def nuclei(
        self, prompt: list[int], response: list[int], temperature: float, top_p: float
    ) -> list[dict[int, float]]:
        """At each response token, the fewest likeliest tokens that together have top_p, and their probabilities."""
        return [_nucleus(row, top_p) for row in self._probs(prompt, response, temperature)]

    def _probs(self, prompt: list[int], response: list[int], temperature: float) -> Tensor:
        """[T, V]"""
        return (self.logits([*prompt, *response])[len(prompt) - 1 : -1].double() / temperature).softmax(-1)


def _nucleus(probs: Tensor, top_p: float) -> dict[int, float]:
    kept: dict[int, float] = {}
    for token in probs.argsort(descending=True).tolist():
        if sum(kept.values()) >= top_p:
            break
        kept[token] = probs[token].item()
    return kept


def check_sampling(oracle: Oracle, made: Generated, prompts: list[list[int]], temperature: float, top_p: float) -> None:
    """Logprobs are the whole vocabulary's, tokens are of the nucleus, kept_mass is the nucleus's mean probability."""
    masses = []
    for prompt, response, logprobs in zip(prompts, made.tokens, made.logprobs, strict=True):
        assert oracle.logprobs(prompt, response, temperature) == within(MODEL, logprobs)
        nuclei = oracle.nuclei(prompt, response, temperature, top_p)
        assert all(token in nucleus for token, nucleus in zip(response, nuclei, strict=True))
        masses += [sum(nucleus.values()) for nucleus in nuclei]
    if top_p == 1:
        assert made.kept_mass is None
    else:
        assert made.kept_mass == within(MODEL, sum(masses) / len(masses))
