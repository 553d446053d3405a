"""Answers that are rated good or bad on their own, not in pairs, and the columns that a run reads."""

from typing import ClassVar, Literal

from prefect.blocks.core import Block
from pydantic import Field

from prefect_rlhf.blocks.dataset import FORM, DatasetFields, DatasetParameter, Name
from prefect_rlhf.blocks.saved import DOCUMENTATION_URL, load_example


class RatedAnswersFields(DatasetFields):
    """Fields of RatedAnswers and a RatedAnswersBlock."""

    form: Literal["completion", "sharegpt", "messages", "alpaca", "question"] | None = Field(None, description=FORM)
    prompt_column: Name = Field("prompt", description="Column with the prompt: text or messages.")
    completion_column: Name = Field("completion", description="Column with the answer: text or messages.")
    label_column: Name = Field("label", description="Column with the rating: true or 1 for good, false or 0 for bad.")


class RatedAnswersBlock(Block, RatedAnswersFields):
    """Rated answers that flow runs use by name.

    >>> RatedAnswersBlock(path="data/thumbs.parquet").save("thumbs")  # doctest: +SKIP
    """

    _block_type_name = "RLHF Rated answers"
    _block_type_slug = "rlhf-rated-answers"
    _documentation_url = DOCUMENTATION_URL
    _description = "Answers, each rated good or bad on its own."
    _code_example = load_example("rated_answers", "RatedAnswersBlock", "answers")


class RatedAnswers(DatasetParameter, RatedAnswersFields):
    """Answers, each rated good or bad."""

    block: ClassVar[type[Block]] = RatedAnswersBlock
    row_keys: ClassVar[tuple[str, ...]] = ("tokens", "prompt_length", "mask", "label")
