"""Datasets of prompts or of preference pairs: their files, and the columns that a run reads."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from prefect.blocks.core import Block
from pydantic import BaseModel, BeforeValidator, Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from prefect_rlhf.blocks.saved import DOCUMENTATION_URL, NEEDED, DeploymentParameter, load_example
from prefect_rlhf.errors.wrong_setting import not_used
from prefect_rlhf.files.path_text import MOST_CHARACTERS, PathText
from prefect_rlhf.placement.graph import Dataset

PATH = (
    "A Parquet, JSON or CSV file, a folder of them, a pattern such as data/train-*.parquet, a folder that"
    " datasets.save_to_disk wrote, a file on the Hub such as hf://datasets/OWNER/NAME/FILE, or a task such as"
    " reasoning_gym:chain_sum?size=500&seed=42."
)
FORM = "Format of a row; if empty, the columns decide."
GENERATED = "reasoning_gym:"  # prefix of a path that defines its rows instead of locating files
Name = Annotated[str, Field(min_length=1, max_length=MOST_CHARACTERS)]
"""Name of a column, or a value in it."""


def _no_file(value: object) -> object:
    """Return a value unchanged. Raises the error that pydantic shows if it may be a template, or the path of one."""
    if isinstance(value, str) and ("." in value or "{" in value):
        right = "true or false; a model names the file of a template, as in actor.chat_template"
        raise PydanticCustomError("chat_template", right)
    return value


class DatasetFields(BaseModel):
    """Fields of every dataset."""

    path: PathText = Field(description=PATH)
    split_column: Name | None = Field("split", description="Column that names each row's split; empty reads all rows.")
    split: Name = Field("train", description="The run uses rows with this value in the split column.")
    chat_template: Annotated[bool, BeforeValidator(_no_file)] = Field(
        False, description="Wrap prompts in the tokenizer's chat template."
    )
    chat_template_kwargs: dict[Name, JsonValue] = Field(
        {}, max_length=64, description="Variables of the chat template, such as enable_thinking: false."
    )
    tools_column: Name | None = Field(
        "tools",
        description="Column with tool schemas, which the chat template shows to the model; empty: no such column.",
    )
    columns: dict[Name, Name] = Field(
        {},
        description="Names for more columns, or for fields inside structs: ground_truth: reward_model.ground_truth.",
    )


class PromptsFields(DatasetFields):
    """Fields of Prompts and a PromptsBlock."""

    form: Literal["prompt", "sharegpt", "messages", "alpaca", "question"] | None = Field(None, description=FORM)
    prompt_column: Name = Field("prompt", description="Column with the prompt: text or messages.")
    last_answer: Literal["refuse", "strip"] = Field(
        "refuse", description="If a chat ends with an assistant message: refuse the chat, or strip the message."
    )

    system_prompt: str | None = Field(
        None, min_length=1, description="System message before every chat; if empty, the chat template may add its own."
    )
    max_prompt_length: int | None = Field(
        None,
        ge=1,
        le=1 << 24,
        description="Longest prompt in tokens; if empty, whatever fits into the models' context.",
    )
    overlong_prompts: Literal["refuse", "drop", "keep_end", "keep_start"] = Field(
        "refuse", description="If a prompt is longer: refuse it, drop it, or keep its end or its start."
    )

    @model_validator(mode="after")
    def _cut_has_a_length(self) -> PromptsFields:
        """Refuse a treatment of overlong prompts if no prompt can be overlong."""
        if self.overlong_prompts != "refuse" and self.max_prompt_length is None:
            raise not_used(
                "overlong_prompts", "no prompt is overlong without max_prompt_length", "set max_prompt_length"
            )
        return self


class PreferencesFields(DatasetFields):
    """Fields of Preferences and a PreferencesBlock."""

    form: Literal["pairs", "sharegpt", "alpaca", "question"] | None = Field(None, description=FORM)
    prompt_column: Name | None = Field(
        "prompt", description="Column with the prompt that both answers share; it may be missing."
    )
    chosen_column: Name = Field("chosen", description="Column with the better answer.")
    rejected_column: Name = Field("rejected", description="Column with the worse answer.")
    end_of_text: bool = Field(
        False,
        description="End answers of plain text with the end-of-sequence token, as messages end with the template's.",
    )


class PromptsBlock(Block, PromptsFields):
    """Prompts that flow runs use by name.

    >>> PromptsBlock(path="data/prompts.parquet").save("openings")  # doctest: +SKIP
    """

    _block_type_name = "RLHF Prompts"
    _block_type_slug = "rlhf-prompts"
    _documentation_url = DOCUMENTATION_URL
    _description = "Prompts to continue."
    _code_example = load_example("dataset", "PromptsBlock", "prompts")


class PreferencesBlock(Block, PreferencesFields):
    """Preference pairs that flow runs use by name.

    >>> PreferencesBlock(path="data/pairs.parquet").save("ratings")  # doctest: +SKIP
    """

    _block_type_name = "RLHF Preferences"
    _block_type_slug = "rlhf-preferences"
    _documentation_url = DOCUMENTATION_URL
    _description = "Pairs of a better and a worse answer."
    _code_example = load_example("dataset", "PreferencesBlock", "pairs")


class DatasetParameter(DeploymentParameter, DatasetFields):
    """Base class for a run's datasets. An item has `rows_per_item` rows; each row has `row_keys`."""

    row_keys: ClassVar[tuple[str, ...]]
    rows_per_item: ClassVar[int] = 1

    path: PathText = Field("", description=NEEDED + PATH)

    def to_spec(self, name: str, num_items: int, columns: tuple[str, ...] = (), found: str = "") -> Dataset:
        """Return this dataset as source `name` of a graph, with `num_items` items and the further `columns`.

        `found` is the format of the files, if it is not ours.

        >>> Prompts(path="data/prompts.parquet").to_spec("prompts", num_items=640, columns=("answer",))
        Dataset(name='prompts', keys=('prompt_tokens',), num_items=640, rows_per_item=1, columns=('answer',))
        """
        return Dataset(name, self.row_keys, num_items, self.rows_per_item, read_as(self, found), columns)


class Prompts(DatasetParameter, PromptsFields):
    """Prompts to continue."""

    block: ClassVar[type[Block]] = PromptsBlock
    row_keys: ClassVar[tuple[str, ...]] = ("prompt_tokens",)


class Preferences(DatasetParameter, PreferencesFields):
    """Preference pairs. Each pair becomes two rows, the chosen answer first."""

    block: ClassVar[type[Block]] = PreferencesBlock
    row_keys: ClassVar[tuple[str, ...]] = ("tokens", "prompt_length")
    rows_per_item: ClassVar[int] = 2


def read_as(dataset: DatasetFields, found: str = "") -> str:
    """Return every setting that decides which rows are read, except for the files' location, and the format `found`.

    Settings at their defaults are left out, so a run still matches when a later version adds a setting.

    >>> read_as(Prompts(path="data/prompts.parquet", chat_template=True, prompt_column="question"))
    'chat_template=True prompt_column=question'
    """
    said = dataset.model_dump(exclude={"path", "saved"}, exclude_defaults=True)
    for name in ("columns", "chat_template_kwargs"):
        if name in said:
            said[name] = dict(sorted(said[name].items()))
    if dataset.path.startswith(GENERATED):
        said["path"] = dataset.path
    return " ".join([*(f"{name}={value}" for name, value in said.items()), *([found] if found else [])])
