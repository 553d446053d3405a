"""The step of plays that both sides of `play_step.py` do: its sizes, its prompts, its tool and its reward."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.beside_trl.step_work import StepWork

TOOL_SECONDS = (0.0, 0.05, 0.5)
QUESTIONS = (
    "what is seven times six",
    "what is six times seven",
    "how many is forty and two",
    "what is half of eighty four",
)
ANSWER = "42"
TEMPLATE = (
    "{% for tool in tools or [] %}<|im_start|>system\n{{ tool.function.name }}<|im_end|>\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A short chat template that shows tools: the model's own shows none, so TRL refuses it."""


@dataclass(frozen=True, kw_only=True)
class PlayWork(StepWork):
    """Steps of `batch_size` * `samples` rows: `turns` turns of exactly `response_tokens` tokens, a tool after each.

    Each number of `tool_seconds` is that of `repeats` steps, in turn, after a first step that is not measured. An
    answer has at most `answer_tokens` tokens.
    """

    batch_size: int = 4
    samples: int = 8
    turns: int = 4
    answer_tokens: int = 16
    response_tokens: int = 8
    repeats: int = 1
    tool_seconds: Sequence[float] = TOOL_SECONDS
    learning_rate: float = 1e-6
    plan: str = "flattening"

    @property
    def rows(self) -> int:
        """Rows of a step."""
        return self.batch_size * self.samples

    @property
    def most_tokens(self) -> int:
        """The most tokens of a row after its prompt."""
        return self.turns * self.response_tokens + (self.turns - 1) * self.answer_tokens

    @property
    def seconds_of_step(self) -> list[float]:
        """The tool's seconds in each step, the first included."""
        return [self.tool_seconds[0], *(seconds for _ in range(self.repeats) for seconds in self.tool_seconds)]

    def question(self, number: int) -> str:
        """Return the question of a prompt."""
        return QUESTIONS[number % len(QUESTIONS)]

    def with_tools(self) -> Path:
        """Return a folder with the model and a chat template that shows tools; it is written unless it exists."""
        model = Path(self.model).resolve()
        folder = model.with_name(f"{model.name}-with-tools")
        if not (folder / "chat_template.jinja").is_file():
            folder.mkdir(exist_ok=True)
            for file in model.iterdir():
                if file.suffix == ".safetensors":
                    (folder / file.name).unlink(missing_ok=True)
                    (folder / file.name).symlink_to(file)
                else:
                    shutil.copy(file, folder)
            (folder / "chat_template.jinja").write_text(TEMPLATE)
        return folder


def look_up(question: str) -> str:
    """Look up an answer.

    Args:
        question: The question.
    """
    return ANSWER


def vowels(text: str) -> float:
    """Score a text by its share of vowels."""
    return sum(text.count(vowel) for vowel in "aeiou") / max(1, len(text))
