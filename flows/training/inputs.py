"""Convert a run's parameters to models and datasets, with every check that needs no device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from prefect_rlhf.blocks.chats import Chats
from prefect_rlhf.blocks.dataset import Preferences, Prompts
from prefect_rlhf.blocks.model import Model
from prefect_rlhf.blocks.rated_answers import RatedAnswers
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.cost.made_rows import row_lengths
from prefect_rlhf.placement.graph import DataflowGraph, Dataset
from prefect_rlhf.placement.models.model import ModelSpec
from prefect_rlhf.tasks.data.chats import ChatDataset
from prefect_rlhf.tasks.data.datasets import PreferenceDataset, PromptDataset
from prefect_rlhf.tasks.data.tools import shown_by
from prefect_rlhf.tasks.model_shape import read_model_spec
from prefect_rlhf.tasks.play import Play

ABSENT = "(not there)"  # path of a dataset that was not named, in a what-if
MANY = 1 << 30  # items of such a dataset

DatasetParameter = Prompts | Preferences | Chats | RatedAnswers
Source = PromptDataset | PreferenceDataset | ChatDataset


@dataclass(frozen=True, slots=True)
class RunInputs:
    """The models and datasets among a run's parameters, by parameter name."""

    models: Mapping[str, ModelSpec]
    sources: Mapping[str, Source]
    datasets: Mapping[str, Dataset]
    longest: Mapping[str, int]  # tokens of each dataset's longest row
    tokenizer: str

    def read_by(self, role: str) -> RunInputs:
        """Return these inputs, read with the tokenizer of a role. Raises InvalidInput for rows that it cannot serve."""
        tokenizer = self.models[role].path
        if tokenizer == self.tokenizer:
            return self
        vocabulary = self.models[role].shape.vocab_size
        sources = {name: replace(source, tokenizer=tokenizer) for name, source in self.sources.items()}
        longest = {name: source.check(self.context, vocabulary) for name, source in sources.items()}
        for name, source in sources.items():
            if source.num_items != self.sources[name].num_items:
                expected = f"as many as the tokenizer of {role} keeps, which is {source.num_items}"
                raise InvalidInput(f"{name}.overlong_prompts", f"{self.sources[name].num_items} prompts", expected)
        return replace(self, sources=sources, longest={**self.longest, **longest}, tokenizer=tokenizer)

    @property
    def context(self) -> int:
        """Tokens of the longest sequence that all models accept."""
        return shortest_context(self.models)


def read_run_inputs(arguments: Mapping[str, Any]) -> RunInputs:
    """Read the model configs and datasets that `arguments` name. Raises InvalidInput for any that cannot be used."""

    def read_model(role: str, model: Model) -> ModelSpec:
        return read_model_spec(role, model.path, model.head, dtype=model.dtype, new_head=model.new_head)

    return read_inputs(arguments, read_model)


def read_inputs(
    arguments: Mapping[str, Any], read_model: Callable[[str, Model], ModelSpec], may_be_absent: bool = False
) -> RunInputs:
    """Read the models and datasets among `arguments`. Raises InvalidInput for any that cannot be used.

    With `may_be_absent`, a dataset may be ABSENT: then only its name and columns are known.
    """
    models = {role: read_model(role, value) for role, value in arguments.items() if isinstance(value, Model)}
    if not models:
        raise InvalidInput("models", (), "at least one Model parameter")
    tokenizer = next(iter(models.values())).path
    context, vocabulary = shortest_context(models), next(iter(models.values())).shape.vocab_size
    named = {name: value for name, value in arguments.items() if isinstance(value, DatasetParameter)}
    there = {name: value for name, value in named.items() if not (may_be_absent and value.path == ABSENT)}
    sources = {name: open_source(name, value, tokenizer) for name, value in there.items()}
    plays = [value for value in arguments.values() if isinstance(value, Play)]
    if prompts := prompts_among(sources):
        tools = shown_by(play for play in plays if play.shows_tools)
        sources |= {name: replace(source, tools=tools) for name, source in prompts.items() if tools}
    longest = {name: sources[name].check(context, vocabulary) if name in sources else 0 for name in named}
    items = {name: sources[name].num_items if name in sources else MANY for name in named}
    columns = {name: sources[name].columns if name in sources else tuple(named[name].columns) for name in named}
    datasets = {name: value.to_spec(name, items[name], columns[name]) for name, value in named.items()}
    return RunInputs(models, sources, datasets, longest, tokenizer)


def prompts_among(sources: Mapping[str, Source]) -> dict[str, PromptDataset]:
    """Return the datasets of prompts."""
    return {name: source for name, source in sources.items() if isinstance(source, PromptDataset)}


def shortest_context(models: Mapping[str, ModelSpec]) -> int:
    """Return the tokens of the longest sequence that all models accept."""
    return min(model.shape.max_position_embeddings for model in models.values())


def open_source(name: str, value: DatasetParameter, tokenizer: str) -> Source:
    """Return the dataset as ranks read it."""
    settings = value.model_dump(exclude={"saved", "columns"})
    if isinstance(value, Prompts):
        return PromptDataset(name, tokenizer=tokenizer, column_paths=value.columns, **settings)
    if isinstance(value, Chats):
        return ChatDataset(name, tokenizer=tokenizer, column_paths=value.columns, **settings)
    if isinstance(value, RatedAnswers):
        return ChatDataset(name, tokenizer=tokenizer, column_paths=value.columns, form="completion", **settings)
    return PreferenceDataset(name, tokenizer=tokenizer, column_paths=value.columns, **settings)


def longest_sequence(graph: DataflowGraph, inputs: RunInputs) -> int:
    """Return the tokens of the longest row, prompt and response. Raises InvalidInput if a model accepts fewer."""
    lengths, context = row_lengths(graph, inputs.longest), inputs.context
    for call in (call for call in graph if lengths.get(call.name, 0) > context):
        limit = call.row_limit
        if limit is not None and limit.longest is not None:
            raise InvalidInput(f"{call.name}.longest", limit.longest, f"at most {context}, the context of the models")
        field = f"{call.name}.max_new_tokens" if limit else f"{call.name}.sampling.max_new_tokens"
        field = field if call.play is None else "play.max_tokens"
        new = limit.max_new_tokens if limit else call.max_new_tokens
        left = context - (lengths[call.name] - new)
        raise InvalidInput(field, new, f"at most {left}, the room left in the context of the models")
    return max(lengths.values())
