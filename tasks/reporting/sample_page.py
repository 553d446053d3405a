"""The artifact `samples`: a run's questions, answers and rewards as Markdown, before training and as it goes on."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from prefect_rlhf.tasks.data.rollouts import EVALUATION, ROLLOUTS, step_files
from prefect_rlhf.tasks.reporting.conversations import fenced, quoted
from prefect_rlhf.tasks.reporting.samples import SPEAKERS, Answer, Sample, held_out_samples, rollout_samples

SHOWN = 5
LONGEST = 1_500  # characters of a text; the Parquet file has all of it
MOST_MESSAGES = 20  # of a conversation
ENVIRONMENT = SPEAKERS["environment"]


def sample_page(run_dir: Path) -> str | None:
    """Return the page with a run's samples; None if no text was generated.

    All texts are in fences, so that no text of a dataset, a model or a tool is read as Markdown.
    """
    parts = []
    if shown := held_out_samples(run_dir, SHOWN):
        since = "before training" if len(shown[0].answers) == 1 else "before training, and after"
        parts += [f"# Held-out prompts, {since} ({_newest(run_dir, EVALUATION)})", *_sections(shown)]
    if shown := rollout_samples(run_dir, SHOWN):
        parts += [f"# Prompts of training ({_newest(run_dir, ROLLOUTS)})", *_sections(shown)]
    if not parts:
        return None
    cut = f"Texts are cut after {LONGEST:,} characters; the files named here, in the run's folder, have all of them."
    return "\n\n".join(["Last user message, answer and rewards of the first rows.", cut, *parts])


def _newest(run_dir: Path, folder: str) -> str:
    return f"`{folder}/{step_files(run_dir, folder)[-1].name}`"


def _sections(samples: Sequence[Sample]) -> Iterator[str]:
    for number, sample in enumerate(samples, 1):
        yield f"## {number}"
        yield fenced(sample.asked, LONGEST)
        for heading, answer in sample.answers.items():
            rewards = " · ".join(f"{_plain(name)} {value:.4g}" for name, value in answer.rewards.items())
            yield f"**{'Answer' if heading == answer.reward else heading.capitalize()}** · {rewards or 'no reward'}"
            yield from _spoken(answer)


def _spoken(answer: Answer) -> Iterator[str]:
    """Yield an answer, turn by turn if it is a conversation; what others said is quoted."""
    if not answer.messages:
        yield fenced(answer.text, LONGEST)
        return
    for speaker, words in answer.messages[:MOST_MESSAGES]:
        text = f"{speaker.capitalize()}\n\n{fenced(words, LONGEST)}"
        yield quoted(text) if speaker == ENVIRONMENT else text
    if len(answer.messages) > MOST_MESSAGES:
        yield f"[{len(answer.messages) - MOST_MESSAGES} further messages]"


def _plain(name: str) -> str:
    """Return the name of a column without signs that Markdown reads."""
    return "".join(sign if sign.isalnum() or sign in "_ " else " " for sign in name).replace("_", "\\_")
