"""Algorithms with a play: real Prefect, Megatron-core and vLLM, a tiny model."""

import re
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prefect.artifacts import Artifact
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from prefect_rlhf.flows.grpo import grpo
from prefect_rlhf.flows.ppo import ppo
from prefect_rlhf.flows.remax import remax
from prefect_rlhf.tasks.reporting.conversations import conversations_markdown, newest_evaluation
from tests.support.runs import completed, end, read_lines
from tests.tasks.small_tokenizer import WORDS

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect", "own_home")]
PLAYS = Path(__file__).parent / "plays.py"


def play(name, **changed):
    return {"function": f"{PLAYS}:{name}", "max_tokens": 24, "max_turns": 3} | changed


@pytest.fixture
def played(parameters, tmp_path):
    """A run of GRPO whose rows are plays, without a reward and a reference."""
    table = pq.read_table(parameters["prompts"]["path"])
    table = table.append_column("number", pa.array(list(range(table.num_rows))))
    pq.write_table(table, tmp_path / "prompts.parquet")
    kept = ("held_out", "actor", "output_dir", "steps", "plan")
    changed = {name: parameters[name] for name in kept if name in parameters}
    for name in ("prompts", "held_out"):
        changed[name] = parameters[name] | {"path": str(tmp_path / "prompts.parquet")}
    algo = {"batch_size": 4, "samples_per_prompt": 2, "kl": {"coefficient": 0.0}, "sampling": {"max_new_tokens": 6}}
    return changed | {"play": play("counts"), "algo": algo}


def test_grpo_trains_on_plays_and_records_their_turns(played):
    run_dir = completed(grpo, played)
    rows = pq.read_table(run_dir / "rollouts" / "step-000001.parquet").to_pylist()
    assert len(rows) == 8
    for row in rows:
        response = row["tokens"][len(row["tokens"]) - len(row["logprobs"]) :]
        assert len(response) == len(row["mask"]) == len(row["turn"]) <= 24
        lengths = [
            sum(own and number == k for own, number in zip(row["mask"], row["turn"], strict=True)) for k in (0, 1)
        ]
        assert row["turn_rewards"] == pytest.approx([-0.1 * lengths[0], -0.2 * lengths[1]])
        assert row["reward"] == pytest.approx(sum(row["turn_rewards"]))
        assert all(logprob == 0 for logprob, own in zip(row["logprobs"], row["mask"], strict=True) if not own)
        assert [message["role"] for message in row["messages"]] == ["prompt", "assistant", "environment", "assistant"]
        assert row["turns"] == 2
    assert Artifact.get("conversations").data == conversations_markdown(newest_evaluation(run_dir))
    first = read_lines(run_dir / "metrics.jsonl")[0]
    assert (first["actor_generate.turns"], first["actor_generate.failed"]) == (2, 0)
    assert first["actor_generate.play/characters"] > 0


@pytest.mark.all
def test_ppo_and_remax_take_a_play(played, parameters):
    algo = {"batch_size": 4, "sampling": {"max_new_tokens": 6}}
    roles = {name: parameters[name] for name in ("critic", "ref")}
    completed(ppo, played | roles | {"algo": algo, "play": play("guesses")})
    completed(remax, played | {"algo": algo | {"kl": {"coefficient": 0.0, "kind": "fixed"}}, "play": play("guesses")})


TEMPLATE = (
    "{% if tools %}{{ tools[0].function.description }} {% endif %}{% for m in messages %}{{ m.role }} {{ m.content }} "
    "{% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
)
CALL = '<tool_call>{"name":"film_of","arguments":{"number":%d}}</tool_call>'


def save_tokenizer_with_calls(folder):
    """Write a tokenizer whose words are mostly calls of a tool, so that a random model makes some."""
    words = [*WORDS, "tool", "best_film", *(CALL % number for number in range(64 - len(WORDS) - 2))]
    of_words = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    of_words.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=of_words, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


@pytest.mark.all
def test_grpo_trains_on_plays_whose_model_calls_tools(played, tmp_path):
    folder = shutil.copytree(played["actor"]["path"], tmp_path / "caller")  # other tests share the original
    save_tokenizer_with_calls(folder)
    played["actor"] = {"path": str(folder)}
    tools = {"signature": "tools", "tools": [f"{PLAYS}:film_of"], "function": f"{PLAYS}:answers"}
    played["play"] = {"max_tokens": 40, "max_turns": 3} | tools
    played["algo"]["sampling"] = {"max_new_tokens": 6, "stop": ["</tool_call>"]}
    for name in ("prompts", "held_out"):
        played[name] = played[name] | {"chat_template": True}
    run_dir = completed(grpo, played)
    first = read_lines(run_dir / "metrics.jsonl")[0]
    assert first["actor_generate.play/tool_calls"] > 1
    assert (first["actor_generate.play/bad_calls"], first["actor_generate.failed"]) == (0, 0)
    rows = pq.read_table(run_dir / "rollouts" / "step-000001.parquet").to_pylist()
    assert all(row["prompt"].startswith("the best film user ") for row in rows)
    assert sum(row["reward"] for row in rows) == sum(row["response"].count("best_film") for row in rows) > 0


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        pytest.param(
            {"play": play("dies")},
            r"play .*plays.py:dies failed on 1 of [48] rows, at most 10% may; row \d: RuntimeError: ",
            marks=pytest.mark.all,  # tests/engines/functions/test_plays.py has the reason
        ),
        ({"play": play("count")}, r"^InvalidInput: play.function: got .*plays.py:count', expected .*it has counts"),
        ({"play": play("counts", max_tokens=999)}, r"play.max_tokens: got 999, expected at most \d+, the room left"),
        ({"reward": {"functions": {"a": {"function": "a:b"}}}}, "reward: 'functions' is not used: play scores its own"),
        (
            {
                "play": {"signature": "gymnasium", "function": "a:b", "max_tokens": 8},
                "algo": {"batch_size": 4, "sampling": {"stop_at_eos": False}, "kl": {"coefficient": 0.0}},
            },
            "sampling.stop_at_eos: got False, expected true: with signature gymnasium an answer follows",
        ),
        ({"play": None}, "reward: missing; expected a reward model or functions, or a play, which scores its own rows"),
    ],
)
def test_a_play_that_cannot_run_ends_the_run_in_one_line(played, changed, says):
    state = end(grpo, played | changed)
    assert state.is_failed()
    assert "\n" not in state.message
    assert re.search(says, state.message), state.message
