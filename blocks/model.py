"""Models: a Hugging Face folder, or a name on the Hub, and how a run uses it."""

from typing import ClassVar

from prefect.blocks.core import Block
from pydantic import BaseModel, Field

from prefect_rlhf.blocks.adapter import Adapter
from prefect_rlhf.blocks.saved import DOCUMENTATION_URL, NEEDED, DeploymentParameter, load_example
from prefect_rlhf.files.path_text import PathText
from prefect_rlhf.placement.models.model import BaseDtype, Dtype, Head, ModelSpec, OptimizerSpec, TransformerShape

PATH = (
    "Hugging Face folder, or the name of a model on the Hub, such as Qwen/Qwen2.5-0.5B-Instruct or OWNER/NAME@REVISION."
)


class ModelFields(BaseModel):
    """Fields of Model and a ModelBlock."""

    path: PathText = Field(description=PATH)
    head: Head = Field("lm", description="lm predicts tokens, scalar predicts a number per token, lm+scalar does both.")
    dtype: Dtype = Field(
        "bfloat16", description="Number format for computing; with bfloat16, main weights are float32."
    )
    new_head: bool = Field(False, description="Start with an untrained scalar head if the folder lacks a head.")
    eos_token: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="Text of the token that ends an answer; if empty, the chat template decides.",
    )
    chat_template: PathText | None = Field(
        None, min_length=1, description="File with a chat template, such as tools.jinja; if empty, the folder's own."
    )
    adapter: Adapter | None = Field(
        None, description="LoRA: train thin matrices beside frozen weights; empty: train all weights."
    )
    base_dtype: BaseDtype | None = Field(
        None, description="nf4: the frozen matrices below the adapter have four bits (QLoRA); empty: those of dtype."
    )


class ModelBlock(Block, ModelFields):
    """A saved model that flow runs refer to by name.

    >>> ModelBlock(path="models/smollm2").save("smollm2")  # doctest: +SKIP
    """

    _block_type_name = "RLHF Model"
    _block_type_slug = "rlhf-model"
    _documentation_url = DOCUMENTATION_URL
    _description = "A Hugging Face folder, or a name on the Hub, and how an RLHF run uses it."
    _code_example = load_example("model", "ModelBlock", "model")


class Model(DeploymentParameter, ModelFields):
    """A role's model: a Hugging Face folder or a name on the Hub, and how the run uses it."""

    block: ClassVar[type[Block]] = ModelBlock

    path: PathText = Field("", description=NEEDED + PATH)

    def to_spec(self, role: str, shape: TransformerShape, optimizer: OptimizerSpec | None = None) -> ModelSpec:
        """Return what planner and engines need to know about this model as `role`, except for its adapter.

        `shape` is from its config.json. An adapter may have a folder of its own.
        """
        return ModelSpec(role, self.path, self.head, shape, self.dtype, self.new_head, optimizer, self.eos_token)
