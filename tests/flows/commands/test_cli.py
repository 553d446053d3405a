"""The command line as a newcomer meets it: help of every command, and one line for what is not there."""

import os
import subprocess
import sys

import pytest

from benchmarks.planner.read_flags import read_flags
from prefect_rlhf.flows.commands.cli import COMMANDS, main
from prefect_rlhf.flows.commands.plan import plan
from tests.support.cases import first


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def test_help_names_every_command_and_what_it_does(capsys):
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(f" {name} " in said and what in said for name, what in COMMANDS.items())


def test_without_a_word_it_shows_the_help_and_fails(capsys):
    assert main([]) == 2
    assert "Usage: prefect-rlhf COMMAND" in capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_a_commands_help_explains_its_purpose_and_every_flag(command, capsys):
    assert main([command, "--help"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(
        f"Usage: prefect-rlhf {command}" if command in ("init", "runs") else f"Usage: prefect-rlhf {command} [OPTIONS]"
    )
    assert "--" in said and "Raises" not in said and "default: None" not in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["pln"], "algorithm: got 'pln', expected a command"),
        (["pln"], "; closest: plan"),
        (["ppoo"], "; closest: ppo, "),
        (["run", "grp"], "; closest: grpo"),
        (["plan", "ppo", "--modle", "a=b"], "unknown flag --modle; closest: --model, "),
        (["plan", "ppo", "--prompt", "5"], "unknown flag --prompt; closest: --prompt-length"),
        (["run", "ppo", "--qqq"], "unknown flag --qqq; see prefect-rlhf run --help"),
        (
            ["ppo", "--num_generations", "8"],
            "unknown flag --num_generations; here: algo.samples_per_prompt; see prefect",
        ),
        (
            ["ppo", "--use-peft"],
            "unknown flag --use-peft; here: actor.adapter.rank",
        ),
        (["ppo", "--step", "5"], "unknown flag --step; closest: -p steps=VALUE; "),
        (["ppo", "--parameters", "a", "--parameters", "b"], "--parameters is repeated; expected a single value"),
        (["chat", "m", "What", "is", "2?"], "too many arguments: is 2?; a message needs quotes: 'What is 2?'; see "),
        (["chat", "m", "What", "is", "--plain"], "too many arguments: is; a message needs quotes: 'MESSAGE'; see "),
        (["run", "ppo", "again"], "too many arguments: again; see prefect-rlhf run --help"),
        (["plan"], "ALGORITHM: missing value; see prefect-rlhf plan --help"),
        (["plan", "ppo", "--cluster"], "--cluster: missing value"),
        (["profile", "llama-7b", "--kind", "tpu"], "--kind: got 'tpu', expected one of cpu, cuda"),
        (["ppo", "--no-dry-run"], "unknown flag --no-dry-run; closest: --dry-run"),
    ],
)
def test_an_unknown_name_gives_a_line_with_close_names(words, says, capsys):
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("prefect-rlhf: ") and says in line


def test_a_flag_may_be_given_in_every_way_that_people_type_it():
    """Values after a space or =, short flags, often where there may be many; of a single value the last counts."""
    words = ["ppo", "-p", "a=1", "--param=b=-2", "-pc=3", "--model", "actor=x", "--model", "ref=y", "--explain"]
    flags = read_flags(plan, [*words, "--budget", "1", "--budget=2"])
    assert flags.param == ("a=1", "b=-2", "c=3")
    assert flags.models == ("actor=x", "ref=y")
    assert flags.explain and flags.budget_seconds == "2"


@pytest.mark.parametrize("words", [["--dry-run", "ppo"], ["ppo", "--dry-run"], ["run", "--dry-run", "ppo"]])
def test_an_algorithm_alone_is_short_for_run(words, capsys):
    assert main(words) == 2
    assert "actor, ref, prompts, held_out" in capsys.readouterr().err


HEAVY = {"prefect", "torch", "numba", "scipy", "numpy", "pyarrow", "transformers", "vllm", "megatron", "ray"}
PROGRAM = (
    "import sys; sys.modules['pandas'] = None; "  # Prefect imports it if it is there
    "from prefect_rlhf.flows.commands.cli import main; status = main(sys.argv[1:]); print(*sys.modules)"
)


def heavy_after(folder, *words):
    """Which packages that cost seconds are imported once the command has ended."""
    (folder / "mine.py").write_text(
        "from prefect_rlhf import rlhf_flow\n\n@rlhf_flow('mine')\ndef mine() -> None:\n    pass\n"
    )
    line = [sys.executable, "-c", PROGRAM, *words]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=60, check=True)
    return HEAVY & set(done.stdout.splitlines()[-1].split()), done.stderr


@pytest.mark.parametrize(
    "words", first(1, [["run", "--help"], ["--help"], ["--version"], ["profile", "--help"], ["nodes", "--help"]])
)
def test_help_needs_neither_prefect_nor_an_engine(words, tmp_path):
    assert heavy_after(tmp_path, *words) == (set(), "")


@pytest.mark.parametrize(
    ("words", "says"),
    first(
        3,
        [
            (["trian"], "algorithm: got 'trian', expected a command"),
            (["plan", "pppo"], "algorithm: got 'pppo', expected one of ppo, "),
            (["run", "pppo"], "algorithm: got 'pppo', expected a command"),
            (["graph", "pppo"], "algorithm: got 'pppo', expected one of ppo, "),
            (["run", "--dry-run", "nofile.py:mine"], "an existing file; "),
            (["run", "mine.py:mein"], "an @rlhf_flow function of mine.py: mine ('mein' does not exist)"),
            (["run", "nowhere:mine"], "an existing module: nowhere is neither in "),
            (["ppo", "--stepz", "5"], "unknown flag --stepz"),
            (["graph", "ppo", "--otput", "5"], "unknown flag --otput; closest: --output"),
            (["plan", "ppo", "--modle", "5"], "unknown flag --modle; closest: --model"),
            (["profile", "llama-7b", "--row", "5"], "unknown flag --row; closest: --rows"),
            (["nodes", "--joim", "5"], "unknown flag --joim; closest: --join"),
            (["ppo", "--parameters", "none.yaml"], "--parameters: got 'none.yaml', expected a readable file"),
        ],
    ),
)
def test_a_wrong_command_flag_or_flow_name_is_refused_before_prefect_is_imported(words, says, tmp_path):
    heavy, line = heavy_after(tmp_path, *words)
    assert says in line
    assert heavy <= ({"numpy"} if words[0] == "plan" else set())


@pytest.mark.parametrize("words", first(1, [["-p", "algo.clipp=1"], ["-p", "steps=-1"], []]))
def test_a_wrong_parameter_is_refused_before_a_search_or_an_engine_is_imported(words, tmp_path):
    heavy, line = heavy_after(tmp_path, "run", "grpo", *words)
    assert line.startswith("prefect-rlhf: ") and heavy == {"prefect"}


@pytest.mark.parametrize("words", [["--help"], ["plan", "--help"], ["graph", "grpo"], ["runs", "."]], ids=" ".join)
def test_a_reader_that_has_read_enough_ends_a_command_without_a_word(words, tmp_path):
    """As in `prefect-rlhf plan ... | head`: with a shell's status for a closed pipe, or that of rich for a help."""
    reading, writing = os.pipe()
    os.close(reading)
    program = "import sys; from prefect_rlhf.flows.commands.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, *words]
    ended = subprocess.run(command, cwd=tmp_path, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (1 if "--help" in words else 141, "")
