"""The folder of a trained model in other programs, as docs/use_the_model.md has it: vLLM in processes of their own."""

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import torch

from prefect_rlhf.engines.files.huggingface import read_model_spec, write_folder
from prefect_rlhf.placement.models.weights import parameters
from tests.support.tiny import make_model

PAGE = Path(__file__).parents[1] / "docs" / "use_the_model.md"
DEADLINE_SECONDS = 500


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working folder with an export of random weights, and the page's programs."""
    folder = tmp_path_factory.mktemp("first")
    made = make_model(folder / "made")
    spec = read_model_spec("actor", made, "lm", dtype="float32")
    torch.manual_seed(1)
    tensors = ((each.name, torch.randn(each.shape) / 8) for each in parameters(spec))
    (folder / "runs" / "latest").mkdir(parents=True)
    write_folder(folder / "runs" / "latest" / "actor", spec, tensors, made)
    for name in ("vllm_chat.py", "ask_server.py"):
        (program,) = re.findall(rf"```python file={name}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
        (folder / name).write_text(program)
    return folder


@pytest.mark.slow
@pytest.mark.all
def test_vllm_answers_chats_with_an_export(folder):
    words = {"cwd": folder, "env": shell(), "capture_output": True, "text": True, "timeout": DEADLINE_SECONDS}
    done = subprocess.run([sys.executable, "vllm_chat.py"], **words, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    known = {"a", "good", "bad", "film", "what", "is", "it", "the", "best", "user", "assistant"}
    assert {word for line in done.stdout.splitlines() for word in line.split()} & known


@pytest.mark.slow
@pytest.mark.all
def test_vllm_serves_an_export_and_a_client_of_its_api_gets_an_answer(folder):
    """With the page's command and program, at a free port."""
    (command,) = re.findall(r"^\$ python (-m vllm\..*)$", PAGE.read_text(), re.MULTILINE)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = [sys.executable, *command.split(), "--port", port]
    server = subprocess.Popen(words, cwd=folder, env=shell(), process_group=0)
    try:
        wait_for_server(f"http://localhost:{port}/health", server)
        words = [sys.executable, "ask_server.py", f"http://localhost:{port}/v1"]
        words = {"args": words, "cwd": folder, "capture_output": True, "text": True, "timeout": DEADLINE_SECONDS}
        assert subprocess.run(**words, check=True).stdout.strip()
    finally:
        server.terminate()
        server.wait(DEADLINE_SECONDS)


def shell():
    """The environment of a person's shell: engines that earlier tests built in this process left their variables."""
    users = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "TORCHDYNAMO_"))}
    return users | {"HF_HUB_OFFLINE": "1"}


def wait_for_server(url, process):
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, "the server ended"
        try:
            with urlopen(url, timeout=10) as answer:
                return answer.status
        except (URLError, ConnectionError):
            time.sleep(1)
    raise AssertionError("the server did not start")
