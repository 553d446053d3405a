"""Supervised data (chats, prompts with completions, or texts) and the columns that a run reads."""

from __future__ import annotations

from typing import ClassVar, Literal

from prefect.blocks.core import Block
from pydantic import Field

from prefect_rlhf.blocks.dataset import FORM, DatasetFields, DatasetParameter, Name
from prefect_rlhf.blocks.saved import DOCUMENTATION_URL, load_example


class ChatsFields(DatasetFields):
    """Fields of Chats and a ChatsBlock."""

    form: Literal["messages", "completion", "text", "sharegpt", "alpaca", "question"] | None = Field(
        None, description=FORM
    )
    messages_column: Name = Field(
        "messages", description="Column with whole chats; the model learns the assistant's turns."
    )
    prompt_column: Name = Field("prompt", description="Column with the prompt before the completion: text or messages.")
    completion_column: Name = Field("completion", description="Column with the completion to learn: text or messages.")
    text_column: Name = Field("text", description="Column with texts; the model learns every token.")


class ChatsBlock(Block, ChatsFields):
    """Chats that flow runs use by name.

    >>> ChatsBlock(path="data/chats.jsonl").save("lessons")  # doctest: +SKIP
    """

    _block_type_name = "RLHF Chats"
    _block_type_slug = "rlhf-chats"
    _documentation_url = DOCUMENTATION_URL
    _description = "Chats, answered prompts or texts to learn."
    _code_example = load_example("chats", "ChatsBlock", "chats")


class Chats(DatasetParameter, ChatsFields):
    """Chats, answered prompts or texts to learn from."""

    block: ClassVar[type[Block]] = ChatsBlock
    row_keys: ClassVar[tuple[str, ...]] = ("tokens", "prompt_length", "mask")
