"""From a run's parameters to what the graph and the ranks need; every check that needs no device is made here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prefect_rlhf.tasks.datasets import PreferenceDataset, PromptDataset

from prefect_rlhf.blocks.dataset import Preferences, Prompts
from prefect_rlhf.blocks.model import Model
from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.placement.graph import DataflowGraph, Dataset
from prefect_rlhf.placement.model import ModelSpec
from prefect_rlhf.tasks.checkpoints import read_model_spec
from prefect_rlhf.tasks.settings import Sampling

Source = PromptDataset | PreferenceDataset


@dataclass(frozen=True, slots=True)
class Inputs:
    """The models and datasets among a run's parameters, by parameter name."""

    models: Mapping[str, ModelSpec]
    sources: Mapping[str, Source]
    tokenizer: str

    @property
    def context(self) -> int:
        """The longest sequence that every model takes."""
        return min(model.shape.max_position_embeddings for model in self.models.values())

    @property
    def datasets(self) -> dict[str, Dataset]:
        return {name: source.dataset for name, source in self.sources.items()}


def read_inputs(arguments: Mapping[str, Any]) -> Inputs:
    """Read the configs and datasets that `arguments` name. Raises InvalidInput for any that cannot serve."""
    models = {
        role: read_model_spec(role, value.path, value.head, dtype=value.dtype, new_head=value.new_head)
        for role, value in arguments.items()
        if isinstance(value, Model)
    }
    if not models:
        raise InvalidInput("models", (), "at least one Model parameter")
    _check_vocabularies(models)
    tokenizer = next(iter(models.values())).path
    context = min(model.shape.max_position_embeddings for model in models.values())
    sources = {
        name: open_source(name, value, tokenizer, context)
        for name, value in arguments.items()
        if isinstance(value, Prompts | Preferences)
    }
    return Inputs(models, sources, tokenizer)


def open_source(name: str, value: Prompts | Preferences, tokenizer: str, max_tokens: int) -> Source:
    """The dataset as ranks read it, checked row by row."""
    kind = PromptDataset if isinstance(value, Prompts) else PreferenceDataset
    return kind.open(name, tokenizer=tokenizer, max_tokens=max_tokens, **value.model_dump(exclude={"saved"}))


def longest_sequence(graph: DataflowGraph, sources: Mapping[str, Source], context: int) -> int:
    """The most tokens that any row can have, prompt and response. Raises InvalidInput when the models take fewer."""
    longest = max(source.longest for source in sources.values())
    for call in graph:
        if call.kind == "generate":
            sampling = Sampling.model_validate_json(call.operation.settings)
            needed = sources[call.rows_from].longest + sampling.max_new_tokens
            if needed > context:
                expected = f"at most {context - sources[call.rows_from].longest}, which the context leaves"
                raise InvalidInput(f"{call.name}.sampling.max_new_tokens", sampling.max_new_tokens, expected)
            longest = max(longest, needed)
    return longest


def _check_vocabularies(models: Mapping[str, ModelSpec]) -> None:
    first, *others = models.values()
    for other in others:
        if other.shape.vocab_size != first.shape.vocab_size:
            expected = f"{first.shape.vocab_size}, the vocabulary of {first.role}"
            raise InvalidInput(f"{other.role}.vocab_size", other.shape.vocab_size, expected)
