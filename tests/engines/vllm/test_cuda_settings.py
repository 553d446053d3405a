"""What vLLM makes of our settings on CUDA: its own configuration, with its CUDA platform and without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_cases import make_folder

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What a process reports in which vLLM believes to be on an H100; it takes some ten seconds."""
    root: Path = tmp_path_factory.mktemp("cuda")
    script = Path(__file__).with_name("as_on_cuda.py")
    command = [sys.executable, str(script), make_folder(root / "model", 1, tied=True), str(root / "seen.json")]
    paths = os.pathsep.join([str(script.parent.parent), str(Path.cwd()), *sys.path])
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return json.loads((root / "seen.json").read_text())


def test_our_sampler_is_in_the_runner(seen):
    """Model Runner V2 makes it instead of its own, while an engine of ours is built and no longer."""
    assert all(seen[name]["runner V2"] for name in ("alone", "pair", "offloaded", "eager"))
    assert seen["building"]["sampler"] == "StreamSampler"
    assert seen["building"]["restored"]


def test_an_engine_sleeps_only_if_its_plan_offloads_it(seen):
    """vLLM's allocator for sleep serves a single engine of a process."""
    assert {name for name, config in seen.items() if isinstance(config, dict) and config.get("sleeps")} == {"offloaded"}
    assert [seen[name]["cumem"] for name in ("alone", "offloaded")] == [False, True]


def test_graphs_are_captured_unless_the_command_forbids_it(seen):
    assert [seen[name]["eager"] for name in ("alone", "eager")] == [False, True]


def test_a_profile_times_decoding_with_graphs_as_runs_decode(seen):
    assert not seen["profiled"]["eager"]
    assert seen["profiled graphs"] == [False, False]


def test_engines_share_no_buffer_of_flashinfer(seen):
    """On a Hopper GPU vLLM would fuse the sum over ranks with norms, in a buffer of the process."""
    assert not seen["FlashInfer"]
    assert not seen["pair"]["fuses all-reduce"]


def test_custom_all_reduce_only_with_ascending_ranks(seen):
    assert [seen[name]["custom all-reduce"] for name in ("pair", "descending")] == [True, False]


def test_rows_in_flight_follow_the_cache(seen):
    """At most vLLM's own number for large GPUs; of a small cache, eight times what it holds at the longest."""
    assert [seen[name]["rows"] for name in ("alone", "many rows", "small cache")] == [64, 1024, 8 * 4]
    assert all(seen[name]["tokens of a pass"] >= seen[name]["rows"] for name in ("many rows", "small cache"))


def test_every_engine_names_its_groups_alike(seen):
    """The names are in compiled code, which the next start loads; the code of each device is kept apart."""
    assert seen["building"]["names"] == ["tp:0", "tp:1"]
    assert seen["building"]["cache"].endswith("/device_3")


def test_only_its_own_devices_random_state_is_kept(seen):
    assert set(seen["building"]["forked"]) == {3}
