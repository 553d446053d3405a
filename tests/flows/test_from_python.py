"""The examples of docs/from_python.md, run as their readers run them: in a notebook's kernel, and as scripts."""

import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from jupyter_client.manager import KernelManager

from prefect_rlhf.flows.commands.init import project, write_new
from tests.support.runs import environment
from tests.support.tiny import make_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.all,  # test_local_run.py has runs from Python
    pytest.mark.usefixtures("prefect"),
]

PAGE = Path(__file__).parents[2] / "docs" / "from_python.md"
FILES = re.compile(r"```python file=(\S+)\n(.*?)```", re.DOTALL)
LIMIT_SECONDS = 400


@pytest.fixture
def folder(tmp_path):
    """The folder that the README's first commands make, with the files of the page."""
    write_new(tmp_path, project(tmp_path))
    make_model(tmp_path / "models" / "smollm2")
    for name, text in FILES.findall(PAGE.read_text()):
        (tmp_path / name).write_text(text)
    return tmp_path


def script(folder, file):
    """A script as a person starts it, to its end."""
    words = {"cwd": folder, "env": environment(HOME=str(folder)), "capture_output": True, "text": True}
    return subprocess.run([sys.executable, file], timeout=LIMIT_SECONDS, check=False, **words)


@pytest.fixture
def cell(folder):
    """A notebook in that folder: what a cell replies, and what it prints."""
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(folder), env=environment(HOME=str(folder)))
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=LIMIT_SECONDS)

    def run(code, interrupted_when=None):
        printed, is_over = [], threading.Event()

        def interrupt():
            while not interrupted_when() and not is_over.is_set():
                time.sleep(0.1)
            manager.interrupt_kernel()

        if interrupted_when:
            threading.Thread(target=interrupt).start()
        hook = lambda message: printed.append(message["content"].get("text", ""))  # noqa: E731
        reply = client.execute_interactive(code, timeout=LIMIT_SECONDS, output_hook=hook)["content"]
        is_over.set()
        return reply, "".join(printed)

    yield run
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def test_a_notebook_runs_the_loop_of_the_page_and_is_still_there_after_an_interrupt(folder, cell):
    """A loop of events runs in a kernel's main thread."""
    reply, printed = cell("import asyncio; asyncio.get_running_loop(); from iterative_dpo import main; main(rounds=1)")
    assert reply["status"] == "ok", reply
    assert re.search(rf"round 0 loss \S+ model {folder}/runs/\S+/actor", printed), printed
    cell("import prefect_rlhf as rl, train_grpo")
    long = "rl.run('grpo', **train_grpo.PARAMETERS | {'steps': 500, 'output_dir': 'long'})"
    reply, printed = cell(long, interrupted_when=lambda: [*folder.glob("long/*/metrics.jsonl")])
    assert reply["ename"] == "RunStopped" and " of 500 steps; no checkpoint: " in reply["evalue"], reply
    assert "ERROR" not in printed
    reply, printed = cell("print(rl.run('grpo', **train_grpo.PARAMETERS | {'steps': 1}).metrics[-1]['step'])")
    assert reply["status"] == "ok" and printed.splitlines()[-1] == "1", reply
    reply, _ = cell("rl.run('grpo', **train_grpo.PARAMETERS | {'actor': {'path': '/nowhere'}})")
    assert reply["ename"] == "InvalidInput" and reply["evalue"].startswith("actor.path: got '/nowhere', expected")


def test_a_script_prints_the_trained_model_the_metrics_and_the_rollouts(folder):
    done = script(folder, "train_grpo.py")
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(
        r"trained model: \S+/runs/\S+/actor\n1 \S+ \S+\n2 \S+ \S+\nrollouts: \S+1.parquet \S+2.parquet\n", done.stdout
    )


def test_a_script_of_two_rounds_trains_the_model_of_the_first_in_the_second(folder):
    done = script(folder, "iterative_dpo.py")
    assert done.returncode == 0, done.stderr[-3000:]
    (first, second) = re.findall(r"^round (\d) loss \S+ model (\S+)$", done.stdout, re.MULTILINE)
    assert first[1] != second[1] and all((Path(model) / "model.safetensors").is_file() for _, model in (first, second))


UNGUARDED = """
import prefect_rlhf as rl

@rl.computation("advantages")
def scores_as_they_are(rollout, scores, settings):
    return rl.Computed({"advantages": scores["scores"][:, None] * rollout.mask("logprobs")})

@rl.rlhf_flow("mine")
def mine(prompts: rl.Prompts, actor: rl.Model, reward: rl.Reward, algo: rl.PolicyGradient = rl.PolicyGradient()):
    rollout = rl.generate(actor, prompts, batch_size=4, sampling=algo.sampling)
    advantages = rl.compute(scores_as_they_are, rollout, rl.score(reward, rollout), settings=algo)
    rl.train_step(actor, rl.losses.policy_gradient(algo).on(rollout, advantages))

import train_grpo
parameters = {name: train_grpo.PARAMETERS[name] for name in ("prompts", "actor", "reward")}
rl.run(mine, **parameters)
"""


def test_a_script_whose_own_computation_ranks_would_import_is_refused_in_one_line_without_a_guard(folder):
    (folder / "unguarded.py").write_text(UNGUARDED)
    done = script(folder, "unguarded.py")
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("prefect_rlhf.errors.")]
    assert 'importing the file of mine starts a run; put the call under `if __name__ == "__main__":`' in line
