"""Turns a run's parameters into models and datasets, with every check that needs no device."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from prefect_rlhf.blocks.chats import Chats
from prefect_rlhf.blocks.dataset import DatasetParameter, Prompts
from prefect_rlhf.blocks.model import Model
from prefect_rlhf.blocks.rated_answers import RatedAnswers
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.model_folder import ADAPTER, is_adapter
from prefect_rlhf.files.storage.inputs import dataset_path, is_on_hub, model_folder, pinned_dataset, pinned_model
from prefect_rlhf.flows.forms.evaluation import datasets_in, plays_of, with_others
from prefect_rlhf.flows.training.log import log_info, log_now
from prefect_rlhf.placement.cost.made_rows import row_lengths
from prefect_rlhf.placement.graph import DataflowGraph, Dataset
from prefect_rlhf.placement.layout.layout import blocks_to_keep
from prefect_rlhf.placement.models.model import ModelSpec
from prefect_rlhf.tasks.data.chats import ChatDataset
from prefect_rlhf.tasks.data.datasets import PreferenceDataset, PromptDataset
from prefect_rlhf.tasks.data.rows.row_checks import CheckedRows, Say, silent
from prefect_rlhf.tasks.data.tokenizer import check_end, end_remark, read_template
from prefect_rlhf.tasks.data.tools import shown_by
from prefect_rlhf.tasks.model_shape import read_adapter, read_model_spec

ABSENT = "(not there)"  # path of a dataset that was not named, in a what-if
CHECKED_WHOLE = 100_000  # items: so many are checked in seconds, and all their mistakes are found
MANY = 1 << 30  # items of such a dataset

Source = PromptDataset | PreferenceDataset | ChatDataset


@dataclass(frozen=True, slots=True)
class RunInputs:
    """The models and datasets among a run's parameters, by parameter name.

    `checked_rows` and `checked_items` say which rows and items of each dataset were checked. `commits` maps the Hub's
    repositories and branches to commits.
    """

    models: Mapping[str, ModelSpec]
    sources: Mapping[str, Source]
    datasets: Mapping[str, Dataset]
    tokenizer: str
    checked_rows: Mapping[str, CheckedRows] = field(default_factory=dict)
    checked_items: Mapping[str, Sequence[int]] = field(default_factory=dict)
    commits: Mapping[str, str] = field(default_factory=dict)

    @property
    def longest(self) -> dict[str, int]:
        """The tokens of the longest checked row of each dataset; 0 for a dataset without rows, in a what-if."""
        return {name: self.checked_rows[name].longest if name in self.sources else 0 for name in self.datasets}

    @property
    def remarks(self) -> tuple[str, ...]:
        """Lines for the log: how rows are read, and the token that ends an answer."""
        of_each = [(self.sources[name].rows.remark, *rows.remarks) for name, rows in self.checked_rows.items()]
        lines = [line for remarks in of_each for line in remarks]
        ends = {(source.eos_token, source.template) for source in self.sources.values()}  # one: a role reads them all
        return (*lines, *(end_remark(self.tokenizer, *end) for end in ends))

    def read_by(self, role: str) -> RunInputs:
        """Return these inputs, read with a role's tokenizer. Raises InvalidInput for rows that don't work with it."""
        model = self.models[role]
        tokenizer, eos_token, template = model.path, model.eos_token, model.chat_template
        read_with = {(source.tokenizer, source.eos_token, source.template) for source in self.sources.values()}
        if tokenizer == self.tokenizer and read_with <= {(tokenizer, eos_token, template)}:
            return self
        sources = {
            name: replace(source, tokenizer=tokenizer, eos_token=eos_token, template=template)
            for name, source in self.sources.items()
        }
        for name, source in sources.items():
            if source.num_items != self.sources[name].num_items:
                expected = f"as many as the tokenizer of {role} keeps, which is {source.num_items}"
                raise InvalidInput(f"{name}.overlong_prompts", f"{self.sources[name].num_items} prompts", expected)
        return replace(self, sources=sources, tokenizer=tokenizer)

    def checked(self, read: Mapping[str, Sequence[int]] = MappingProxyType({})) -> RunInputs:
        """Check large datasets: the items in `read`, or all items of a dataset that is not in it.

        Small datasets were checked completely already. Raises InvalidInput for rows that would fail in some step.
        """
        vocabulary = next(model.shape.vocab_size for model in self.models.values() if model.path == self.tokenizer)
        checked, items_of = {}, {}
        for name, source in self.sources.items():
            begin, is_large = time.monotonic(), source.num_items > CHECKED_WHOLE
            items = read.get(name, range(source.num_items)) if is_large else range(source.num_items)
            rows = source.check(self.context, vocabulary, items if is_large else None)
            said = (_on_check(source, len(items), time.monotonic() - begin),) if is_large else ()
            checked[name], items_of[name] = replace(rows, remarks=(*said, *rows.remarks)), items
        return replace(self, checked_rows=checked, checked_items=items_of)

    def warnings(self) -> tuple[str, ...]:
        """Return log lines about problems that the tokens alone do not show."""
        return tuple(line for source in self.sources.values() for line in source.warnings())

    @property
    def context(self) -> int:
        """The longest sequence that all models accept, in tokens."""
        return shortest_context(self.models)


def at_commits(arguments: Mapping[str, Any], known: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Fix the Hub's repositories in a run's parameters to commits; also return the commits by repository and branch.

    A `known` commit is kept, so a resumed run reads the same files as the run before it. Missing files are downloaded.
    Raises InvalidInput for a repository that the Hub does not have or does not give.
    """
    commits: dict[str, str] = dict(known)
    pinned: dict[str, Any] = {}
    models = {name: value for name, value in arguments.items() if isinstance(value, Model)}
    data = datasets_in(arguments)
    for values, pin in ((models, pinned_model), (data, pinned_dataset)):
        for name, value in values.items():
            path = pin(value.path, f"{name}.path", commits, log_info)
            pinned[name] = value if path == value.path else value.model_copy(update={"path": path})
    for name, value in models.items():
        if value.adapter is not None and value.adapter.path:
            field = f"{name}.adapter.path"
            path = pinned_model(value.adapter.path, field, commits, log_info)
            model_folder(path, field, "adapter", seen=value.adapter.path, say=log_now)
            own = pinned[name].adapter.model_copy(update={"path": path})
            pinned[name] = pinned[name].model_copy(update={"adapter": own})
    # Small files first: a model that may not be read is found before the weights of another are downloaded. A dry run
    # needs weights too, since `read_model_spec` compares their tensors with config.json; `plan` does with small files.
    for part in ("tokenizer", "all"):
        for name, value in models.items():
            if is_on_hub(path := pinned[name].path):
                model_folder(path, f"{name}.path", part, seen=value.path, say=log_now)
    for name, value in data.items():
        if is_on_hub(path := pinned[name].path):
            dataset_path(path, f"{name}.path", seen=value.path, say=log_now)
    return with_others(arguments, pinned), commits


def read_run_inputs(arguments: Mapping[str, Any]) -> RunInputs:
    """Read the model configs and datasets that `arguments` name. Raises InvalidInput for any that cannot be used."""

    def read_model(role: str, model: Model) -> ModelSpec:
        check_end(model.path, model.eos_token, f"{role}.eos_token")
        file = model.chat_template
        template = None if file is None else read_template(file, model.path, f"{role}.chat_template")
        spec = read_model_spec(role, model.path, model.head, dtype=model.dtype, new_head=model.new_head)
        _refuse_adapter_beside(role, model)
        return with_adapter(replace(spec, eos_token=model.eos_token, chat_template=template), model)

    return read_inputs(arguments, read_model)


def _refuse_adapter_beside(role: str, model: Model) -> None:
    """Raise InvalidInput for a whole model with an adapter's files, unless the role states its adapter's folder.

    transformers adds such an adapter to its base without a word.
    """
    field = f"{role}.path"
    if (model.adapter is None or not model.adapter.path) and is_adapter(model_folder(model.path, field)):
        right = f"a whole model alone: move the adapter to a folder of its own, and state that as {role}.adapter.path"
        raise InvalidInput(
            field, f"{ADAPTER} beside the model in {model.path}", f"{right}, or remove it if it is merged"
        )


def with_adapter(spec: ModelSpec, model: Model) -> ModelSpec:
    """Return the specification with the model's adapter (new or from a folder) and its base's format.

    Raises InvalidInput for an adapter or a format that does not suit the model.
    """
    adapter, field = model.adapter, f"{spec.role}.base_dtype"
    if adapter is None and model.base_dtype is not None:
        right = "no value without an adapter; state it for a role that has an adapter on this base"
        raise InvalidInput(field, model.base_dtype, right)
    if adapter is None:
        return spec
    spec = replace(spec, base_dtype=model.base_dtype)
    if needed := blocks_to_keep(spec, 1):
        raise InvalidInput(field, model.base_dtype, f"no value, since four bits need {needed}")
    if not adapter.path:
        return replace(spec, adapter=adapter.to_spec(spec.role, spec.shape))
    stated = adapter.stated(spec.role, spec.shape)
    return replace(spec, adapter=read_adapter(replace(spec, adapter=None), adapter.path, stated, log_info))


def read_inputs(
    arguments: Mapping[str, Any],
    read_model: Callable[[str, Model], ModelSpec],
    may_be_absent: bool = False,
) -> RunInputs:
    """Read the models and open the datasets among `arguments`. Raises InvalidInput for any that cannot be used.

    With `may_be_absent`, a dataset may be ABSENT: then only its name and columns are known.
    """
    models = {role: read_model(role, value) for role, value in arguments.items() if isinstance(value, Model)}
    if not models:
        raise InvalidInput("models", (), "at least one Model parameter")
    first = next(iter(models.values()))
    tokenizer, eos_token, template = first.path, first.eos_token, first.chat_template
    named = datasets_in(arguments)
    there = {name: value for name, value in named.items() if not (may_be_absent and value.path == ABSENT)}
    sources = {
        name: replace(open_source(name, value, tokenizer, log_now), eos_token=eos_token, template=template)
        for name, value in there.items()
    }
    for name, source in prompts_among(sources).items():
        if tools := shown_by(play for play in plays_of(name, arguments) if play.shows_tools):
            sources[name] = replace(source, tools=tools)
    items = {name: sources[name].num_items if name in sources else MANY for name in named}
    columns = {name: sources[name].columns if name in sources else tuple(named[name].columns) for name in named}
    found = {name: source.rows.found.identity for name, source in sources.items()}
    datasets = {
        name: value.to_spec(name, items[name], columns[name], found.get(name, "")) for name, value in named.items()
    }
    return RunInputs(models, sources, datasets, tokenizer)


def prompts_among(sources: Mapping[str, Source]) -> dict[str, PromptDataset]:
    """Return the datasets of prompts."""
    return {name: source for name, source in sources.items() if isinstance(source, PromptDataset)}


def shortest_context(models: Mapping[str, ModelSpec]) -> int:
    """Return the longest sequence that all models accept, in tokens."""
    return min(model.shape.max_position_embeddings for model in models.values())


def open_source(name: str, value: DatasetParameter, tokenizer: str, say: Say = silent) -> Source:
    """Open a dataset as ranks read it. During a long check, `say` gets progress lines."""
    settings = value.model_dump(exclude={"saved", "columns"}) | {"column_paths": value.columns, "say": say}
    if isinstance(value, Prompts):
        return PromptDataset(name, tokenizer=tokenizer, **settings)
    if isinstance(value, Chats | RatedAnswers):
        return ChatDataset(name, tokenizer=tokenizer, **settings)
    return PreferenceDataset(name, tokenizer=tokenizer, **settings)


def _on_check(source: Source, checked: int, seconds: float) -> str:
    """Return a line for the log on the check of so many items of a large dataset."""
    if checked == source.num_items:
        return f"{source.name}: all {checked:,} items checked in {seconds:.0f} s"
    of_all = f"{checked:,} of {source.num_items:,} items checked in {seconds:.0f} s"
    return f"{source.name}: {of_all}, as this run reads no others"


def longest_sequence(graph: DataflowGraph, inputs: RunInputs) -> int:
    """Return the longest row (prompt and response) in tokens. Raises InvalidInput if a model accepts fewer."""
    lengths, context = row_lengths(graph, inputs.longest), inputs.context
    for call in (call for call in graph if lengths.get(call.name, 0) > context):
        limit = call.row_limit
        if limit is not None and limit.longest is not None:
            raise InvalidInput(f"{call.name}.longest", limit.longest, f"at most {context}, the models' context")
        field = f"{call.name}.max_new_tokens" if limit else call.setting("max_new_tokens")
        field = field if call.play is None else "play.max_tokens"
        new = limit.max_new_tokens if limit else call.max_new_tokens
        left = context - (lengths[call.name] - new)
        raise InvalidInput(field, new, f"at most {left}, the room left in the models' context")
    return max(lengths.values())
