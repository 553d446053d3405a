"""All formats of other libraries, in the order in which messages name them."""

from __future__ import annotations

from prefect_rlhf.tasks.data.formats.alpaca import ALPACA
from prefect_rlhf.tasks.data.formats.format import Format
from prefect_rlhf.tasks.data.formats.openai import MESSAGES
from prefect_rlhf.tasks.data.formats.question import QUESTION
from prefect_rlhf.tasks.data.formats.sharegpt import SHAREGPT

FORMATS: tuple[Format, ...] = (SHAREGPT, MESSAGES, ALPACA, QUESTION)
