"""A run's samples: question, the model's answer, and the rewards. A terminal shows each on a few lines."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from prefect_rlhf.tasks.data.conversation import ASSISTANT, ENVIRONMENT, FAILED, PROMPT
from prefect_rlhf.tasks.data.rollouts import EVALUATION, ROLLOUTS, step_files

PROMPTS_SHOWN = 3
LONGEST_TEXT = 88  # characters, so that a line has at most a hundred
MOST_CHARACTERS = 10_000  # of a text that are looked at, half of them at its end
MOST_MESSAGES = 8  # of a conversation at a terminal
ROWS_LOOKED_AT = 64  # for prompts that differ: a group has the same prompt
SPEAKERS: Mapping[str, str] = {ASSISTANT: "model", ENVIRONMENT: "environment", FAILED: "failed play"}


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of the model: its text, or a play's messages as (speaker, words), and its rewards by column."""

    text: str
    messages: tuple[tuple[str, str], ...]
    rewards: Mapping[str, float]

    @property
    def reward(self) -> str:
        """The main reward in words."""
        return f"reward {self.rewards['reward']:.4g}" if "reward" in self.rewards else "no reward"


@dataclass(frozen=True, slots=True)
class Sample:
    """A question (the last user message, or a prompt that is not a chat), and its answers by heading."""

    asked: str
    answers: Mapping[str, Answer]


def held_out_samples(run_dir: Path, number: int = PROMPTS_SHOWN) -> list[Sample]:
    """Return the first prompts of a run's evaluations, with responses from the first and from the newest evaluation.

    The headings are `before` and `after`; after a single evaluation, `before` alone. Returns an empty list without
    evaluations, and for files without texts.
    """
    files = step_files(run_dir, EVALUATION)
    if not files or not all(_has_texts(file) for file in files):
        return []
    first = _read(files[0])[:number]
    if len(files) == 1:
        return [Sample(_asked(row), {"before": _answer(row)}) for row in first]
    after = {row["prompt"]: row for row in reversed(_read(files[-1]))}
    pairs = [(row, after[row["prompt"]]) for row in first if row["prompt"] in after]
    return [Sample(_asked(row), {"before": _answer(row), "after": _answer(other)}) for row, other in pairs]


def rollout_samples(run_dir: Path, number: int = PROMPTS_SHOWN) -> list[Sample]:
    """Return the first different prompts of the newest rollouts, each with a response; its heading is its reward."""
    files = step_files(run_dir, ROLLOUTS)
    if not files or not _has_texts(files[-1]):
        return []
    by_prompt: dict[str, dict[str, Any]] = {}
    for row in _read(files[-1], ROWS_LOOKED_AT):
        by_prompt.setdefault(row["prompt"], row)
    answers = ((_asked(row), _answer(row)) for row in list(by_prompt.values())[:number])
    return [Sample(asked, {answer.reward: answer}) for asked, answer in answers]


def sample_lines(run_dir: Path) -> Iterator[str]:
    """Yield lines that show a run's responses before and after training, or else in the last step.

    Each fits on a terminal's line. Yields no line if no text is recorded.
    """
    shown = held_out_samples(run_dir)
    if shown and len(shown[0].answers) > 1:
        yield f"responses to {len(shown)} held-out prompts, before and after training:"
    elif shown := rollout_samples(run_dir):
        yield f"responses to {len(shown)} prompts of the last step:"
    for sample in shown:
        yield f"  {on_one_line(sample.asked)}"
        width = max(map(len, sample.answers)) + 1  # of the headings with their colons
        for heading, answer in sample.answers.items():
            if not answer.messages:
                yield f"    {f'{heading}:':<{width}} {on_one_line(answer.text)}"
                continue
            said = heading if heading.endswith(answer.reward) else f"{heading}, {answer.reward}"
            yield f"    {said}:"
            yield from (f"      {line}" for line in _turns(answer.messages))


def _turns(messages: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yield a line for each message, without the middle of a long conversation."""
    half = MOST_MESSAGES // 2
    left_out = len(messages) - MOST_MESSAGES
    shown = messages if left_out <= 0 else [*messages[:half], ("", ""), *messages[-half:]]
    for speaker, words in shown:
        yield f"{speaker}: {on_one_line(words)}" if speaker else f"… {left_out} further messages"


def on_one_line(text: str) -> str:
    r"""Join a text into one line: spaces, line breaks and control characters become single spaces, and a long middle is
    cut.

    >>> on_one_line(" 12.\n\nThis  is")
    '12. This is'
    >>> on_one_line("question " * 50 + "so 42")[-13:]
    'uestion so 42'
    """
    part = MOST_CHARACTERS // 2
    if len(text) > MOST_CHARACTERS:
        text = f"{text[:part]} {text[-part:]}"
    words = " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())
    half = (LONGEST_TEXT - 1) // 2
    return (words or "(empty)") if len(words) <= LONGEST_TEXT else f"{words[:half]}…{words[-half:]}"


def _has_texts(file: Path) -> bool:
    return {"prompt", "response"} <= set(pq.read_schema(file).names)


def _read(file: Path, most: int | None = None) -> list[dict[str, Any]]:
    """Return the texts, conversations and numbers of a file's rows, of the first `most` rows if it is set."""
    with pq.ParquetFile(file) as rows:
        schema = rows.schema_arrow
        texts = {"prompt", "response", "user_message", "messages"} & set(schema.names)
        columns = [*texts, *(field.name for field in schema if pa.types.is_floating(field.type))]
        if most is None:
            return list(rows.read(columns).to_pylist())
        first: Iterable[Any] = rows.iter_batches(batch_size=most, columns=columns)
        return next((list(batch.to_pylist()) for batch in first), [])


def _asked(row: Mapping[str, Any]) -> str:
    return str(row.get("user_message") or row["prompt"])


def _answer(row: Mapping[str, Any]) -> Answer:
    messages = tuple(
        (SPEAKERS.get(message["role"], "message"), str(message.get("words") or message["content"]))
        for message in row.get("messages") or ()
        if message["role"] != PROMPT
    )
    rewards = {
        name: value for name, value in row.items() if isinstance(value, float) and not isnan(value)
    }  # NaN: a row without a reward
    return Answer(row["response"], messages, rewards)
