"""The words of a call's placement that you may set beside its plan: `placement.actor_train.micro_batches=16`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field, model_serializer

from prefect_rlhf.placement.words.entries import Entries, with_words
from prefect_rlhf.placement.words.word import MOST
from prefect_rlhf.tasks.settings import Settings


@with_words  # it adds a field for each axis and each word of placement/words/
class PlacementWords(Settings, Entries):
    """Words of a call's placement, with the same meaning as in a plan file. The plan chooses a word that is empty."""

    words_are_optional: ClassVar[bool] = True

    mesh: str | None = Field(None, min_length=1, max_length=256, description="Devices, such as n0:0-3.")
    engine: str | None = Field(None, min_length=1, max_length=256, description="Engine: megatron or vllm.")
    order: tuple[Annotated[int, Field(ge=0, lt=MOST)], ...] | None = Field(
        None, strict=False, description="The mesh's devices, by position, in the order of coordinates."
    )

    @model_serializer(mode="plain")
    def _stated_alone(self) -> dict[str, Any]:
        """Leave empty words out, so that a run's parameter file has only what you set."""
        return {word: value for word, value in self if value is not None}

    @property
    def stated(self) -> dict[str, Any]:
        """The stated words, by name."""
        return self.model_dump()
