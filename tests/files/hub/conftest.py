"""A stand-in of the Hub that this process asks, and a tiny model on it."""

import pytest

from tests.support.hub_stand_in import in_this_process, stand_in
from tests.support.tiny import make_model


@pytest.fixture
def hub(tmp_path):
    with stand_in() as hub, in_this_process(hub, tmp_path / "hf"):
        yield hub


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    make_model(folder)
    return folder


@pytest.fixture
def tiny(hub, tiny_folder):
    """The commit of `acme/tiny`, which also has files that no run needs."""
    files = {file.name: file.read_bytes() for file in tiny_folder.iterdir()}
    unused = ("pytorch_model.bin", "tiny-q4.gguf", "onnx/model.onnx", "consolidated.safetensors", "modeling_tiny.py")
    return hub.add("acme/tiny", files | dict.fromkeys(unused, b"unused" * 1000))
