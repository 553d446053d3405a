"""What a person sees of a run's answers: the question and not the template, turn by turn, and never as Markdown."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prefect_rlhf.tasks.reporting.sample_page import LONGEST, sample_page
from prefect_rlhf.tasks.reporting.samples import LONGEST_TEXT, on_one_line, sample_lines

pytestmark = pytest.mark.quick

TEMPLATE = "system You are a helpful AI assistant named SmolLM, trained by Hugging Face user "
QUESTIONS = ("What is 3 + 4?", "What is 5 + 1?", "What is 9 + 9?", "What is 1 + 1?")


def write(run_dir, folder, number, rows):
    """Write rows as a computation does."""
    file = run_dir / folder / f"step-{number:06d}.parquet"
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), file)


def row(question, response, reward, **more):
    values = {"prompt": f"{TEMPLATE}{question}", "user_message": question, "response": response, "reward": reward}
    return values | {"tokens": [1, 2], "row_id": 0} | more


def answers(*texts, **more):
    return [row(question, text, len(text) / 4, **more) for question, text in zip(QUESTIONS, texts, strict=False)]


def played(said, reward):
    """A row of a play, as it is recorded."""
    turns = [
        {"role": "prompt", "content": "<|im_start|>user\nSay the number after 3.", "words": "Say the number after 3."},
        {"role": "assistant", "content": f"{said}<|im_end|>", "words": said},
        {"role": "environment", "content": "<|im_start|>user\nNow after 4.<|im_end|>", "words": "Now after 4."},
        {"role": "assistant", "content": "5<|im_end|>", "words": "5"},
    ]
    return row("Say the number after 3.", f"{said} user Now after 4. assistant 5", reward, messages=turns)


def test_the_terminal_shows_the_last_user_message_with_both_answers(tmp_path):
    write(tmp_path, "evaluation", 0, answers("7", "I do\nnot know", "18", "2"))
    write(tmp_path, "evaluation", 6, answers("it is 7", "6", "", "2"))
    assert list(sample_lines(tmp_path)) == [
        "responses to 3 held-out prompts, before and after training:",
        "  What is 3 + 4?",
        "    before: 7",
        "    after:  it is 7",
        "  What is 5 + 1?",
        "    before: I do not know",
        "    after:  6",
        "  What is 9 + 9?",
        "    before: 18",
        "    after:  (empty)",
    ]


def test_a_play_is_shown_turn_by_turn(tmp_path):
    write(tmp_path, "evaluation", 0, [played("4", -0.5)])
    write(tmp_path, "evaluation", 6, [played("It is 4.", float("nan"))])
    assert list(sample_lines(tmp_path))[1:] == [
        "  Say the number after 3.",
        "    before, reward -0.5:",
        "      model: 4",
        "      environment: Now after 4.",
        "      model: 5",
        "    after, no reward:",
        "      model: It is 4.",
        "      environment: Now after 4.",
        "      model: 5",
    ]


def test_the_middle_of_a_long_play_is_left_out(tmp_path):
    turns = [{"role": "assistant", "content": f"turn {n}", "words": f"turn {n}"} for n in range(20)]
    write(tmp_path, "rollouts", 0, [row("Count.", "", 1.0, messages=turns)])
    lines = list(sample_lines(tmp_path))
    assert len(lines) == 12 and lines[7] == "      … 12 further messages" and lines[8] == "      model: turn 16"


@pytest.mark.parametrize("evaluations", [0, 1])
def test_a_run_without_a_comparison_shows_the_last_rollouts(tmp_path, evaluations):
    """One of each prompt, although a group has several."""
    for number in range(evaluations):
        write(tmp_path, "evaluation", number, answers("?"))
    write(tmp_path, "rollouts", 0, answers("old"))
    write(tmp_path, "rollouts", 1, [row(QUESTIONS[0], "7", 1.0), *answers("8", "6")])
    assert list(sample_lines(tmp_path)) == [
        "responses to 2 prompts of the last step:",
        "  What is 3 + 4?",
        "    reward 1: 7",
        "  What is 5 + 1?",
        "    reward 0.25: 6",
    ]


def test_a_file_without_user_messages_shows_its_prompts(tmp_path):
    """A prompt that is no chat often differs only at its end."""
    examples = "Question: What is 1 + 1?\nAnswer: 2\n" * 5
    write(tmp_path, "rollouts", 0, [{"prompt": f"{examples}Question: What is 4 + 4?", "response": "8", "score": 0.5}])
    _, asked, answer = sample_lines(tmp_path)
    assert asked.endswith("Question: What is 4 + 4?") and len(asked) <= 100
    assert answer == "    no reward: 8"


def test_without_texts_no_sample_is_shown(tmp_path):
    assert list(sample_lines(tmp_path)) == [] and sample_page(tmp_path) is None
    write(tmp_path, "rollouts", 0, [{"mine": 1.0}])
    assert list(sample_lines(tmp_path)) == [] and sample_page(tmp_path) is None


@pytest.mark.parametrize(
    "text", ["x" * 1000, "words " * 10_000, "\x1b[2J\x1b]0;title\x07 and \u202eback", "\u2028 a \t b"]
)
def test_a_terminal_line_is_short_and_without_control_characters(text):
    line = on_one_line(text)
    assert len(line) <= LONGEST_TEXT and line.isprintable()


def test_the_page_has_questions_answers_and_every_reward(tmp_path):
    write(tmp_path, "evaluation", 0, answers("7", reward_exact=1.0, reward_short_enough=float("nan"), cost=0.125))
    text = sample_page(tmp_path)
    assert "# Held-out prompts, before training (`evaluation/step-000000.parquet`)" in text
    assert "**Before** · reward 0.25 · reward\\_exact 1 · cost 0.125\n" in text
    write(tmp_path, "evaluation", 6, answers("it is 7"))
    write(tmp_path, "rollouts", 5, answers("7!"))
    text = sample_page(tmp_path)
    order = ["before training, and after (`evaluation/step-000006.parquet`)", "What is 3 + 4?", "**Before**", "7"]
    order += ["**After** · reward 1.75", "it is 7", "# Prompts of training (`rollouts/step-000005.parquet`)"]
    order += ["What is 3 + 4?", "**Answer** · reward 0.5", "7!"]
    places, place = [], 0
    for part in order:
        place = text.index(part, place) + 1
        places.append(place)
    assert places == sorted(places) and TEMPLATE not in text


def outside_of_fences(text):
    """The lines that Markdown reads: a fence ends at a line with as many backticks as it began with."""
    read, fence = [], ""
    for line in text.splitlines():
        bare = line.removeprefix(">").strip()
        if fence:
            fence = "" if bare == fence else fence
        elif bare.startswith("```"):
            fence = bare.removesuffix("text")
        else:
            read.append(line)
    assert not fence
    return "\n".join(read)


EVIL = (
    "![i](http://evil/pixel.png) [click](http://evil) <img src='http://evil/x'> <script>evil()</script> | a | b |\n"
    "```\n# evil\n````text\n![evil](http://evil)\n`````\n> evil http://evil\n    evil\n~~~\n"
)


@pytest.mark.parametrize("is_play", [False, True])
def test_prompts_answers_and_tools_are_never_read_as_markdown(tmp_path, is_play):
    """So none becomes a picture or a link that a browser loads from the network, or ends a table."""
    turns = [{"role": role, "content": EVIL, "words": EVIL} for role in ("prompt", "assistant", "environment", "evil")]
    write(tmp_path, "evaluation", 0, [row(EVIL, EVIL, 1.0, **({"messages": turns} if is_play else {}))])
    write(tmp_path, "rollouts", 0, [row(EVIL, EVIL, 1.0, **{"evil![](http://evil)|": 1.0})])
    read = outside_of_fences(sample_page(tmp_path))
    assert "://" not in read and "<" not in read and "![" not in read and "|" not in read


def test_a_long_text_is_cut_and_its_file_is_named(tmp_path):
    write(tmp_path, "rollouts", 3, answers("x" * (LONGEST + 7)))
    text = sample_page(tmp_path)
    assert "[7 further characters]" in text and "`rollouts/step-000003.parquet`" in text
