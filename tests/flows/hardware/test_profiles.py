"""Where profiles are kept, which one a run uses, and which are refused."""

from dataclasses import replace

import pytest

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.flows.commands.cli import main
from prefect_rlhf.flows.hardware import profiles
from prefect_rlhf.flows.hardware.node_hardware import CPU
from prefect_rlhf.flows.profile import kind_of_nodes, legal_degrees
from prefect_rlhf.placement.cost.contention import SlowDown
from prefect_rlhf.placement.cost.datasheets.hardware import Links
from prefect_rlhf.placement.cost.datasheets.kinds import DATASHEETS
from prefect_rlhf.placement.cost.times.profile import Profile
from prefect_rlhf.placement.devices.lease import Lease
from prefect_rlhf.placement.devices.mesh import ClusterShape, DeviceMesh
from prefect_rlhf.placement.models.known_models import KNOWN_SHAPES
from prefect_rlhf.placement.models.model import ModelSpec

pytestmark = pytest.mark.quick

SHAPE, OTHER = KNOWN_SHAPES["llama-7b"], KNOWN_SHAPES["llama-13b"]
ACTOR, CRITIC = ModelSpec("actor", "", "lm", SHAPE), ModelSpec("critic", "", "scalar", OTHER)
DESK = ClusterShape("desk", 1, 2, 8 << 30)
HELD = Lease("local", "a", DESK, DESK.whole, DESK.whole.devices())


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(profiles, "PROFILES", tmp_path / "profiles")
    return tmp_path / "profiles"


def kept(of, num_devices=2, num_nodes=1, machine=("cpu",), **changes):
    """Write the profile of a shape, perhaps with something in it that is not so."""
    subject = profiles.Machine.read(*machine).subject(of, "bfloat16", num_devices, num_nodes)
    slow_downs = (SlowDown("inference", "megatron", (1, num_devices), (1.0, 1.5), 1.5),) if num_devices > 1 else ()
    made = Profile(
        of, "bfloat16", machine[-1], subject.versions, (), Links(1e9, 1e9, 1e9 * (num_nodes > 1), 1e9), 1e-9,
        processor=subject.processor, num_devices=num_devices, num_nodes=num_nodes, slow_downs=slow_downs,
    )  # fmt: skip
    made = replace(made, **changes)
    profiles.keep_profile(made, profiles.profile_file(subject))
    return made


def test_a_run_uses_a_profile_of_its_model_and_devices():
    made = kept(SHAPE)
    assert profiles.measured_sources([ACTOR], HELD).profiles == (made,)


def test_without_a_profile_of_every_model_the_datasheet_counts():
    kept(SHAPE)
    sources = profiles.measured_sources([ACTOR, CRITIC], HELD)
    assert sources.profiles == ()
    assert "datasheet" in profiles.describe_sources(sources)


def test_a_profile_of_another_number_of_devices_is_another_profile():
    kept(SHAPE, num_devices=1)
    assert profiles.measured_sources([ACTOR], HELD).profiles == ()


def test_nodes_of_several_kinds_are_each_counted_by_their_own(monkeypatch):
    """By what the cluster says of them: the machine that plans may have no GPU to ask."""
    monkeypatch.setenv("PATH", "")
    rack = ClusterShape("rack", 2, 8, 32 << 30, (1.0, 0.401), node_devices=("a100-80", "v100-32"))
    leased = Lease("mesh", "a", rack, rack.whole, rack.whole.devices(), "cuda")
    nodes = profiles.measured_sources([ACTOR], leased).nodes
    assert [node.device for node in nodes] == [DATASHEETS["a100-80"], DATASHEETS["v100-32"]]

    nodes = profiles.measured_sources([ACTOR], replace(leased, kind="cpu")).nodes
    assert nodes[0].device == CPU.device
    assert nodes[1].device.bfloat16_flops == 0.401 * CPU.device.bfloat16_flops


def test_profiles_of_several_kinds_count_where_each_has_one():
    rack = ClusterShape("rack", 2, 2, 32 << 30, (1.0, 0.401), node_devices=("a100-80", "v100-32"))
    leased = Lease("mesh", "a", rack, rack.whole, rack.whole.devices(), "cuda")
    alone = replace(leased, mesh=DeviceMesh.parse("n1:0-1"))
    for device in ("v100-32", "a100-80"):
        assert profiles.measured_sources([ACTOR], leased).profiles == ()
        for num_nodes in (1, 2):
            kept(SHAPE, num_nodes=num_nodes, machine=("cuda", device), processor="")
        assert [one.device for one in profiles.measured_sources([ACTOR], alone).profiles] == ["v100-32"]
    found = profiles.measured_sources([ACTOR], leased).profiles
    assert {(one.device, one.num_nodes) for one in found} == {("a100-80", 2), ("v100-32", 2)}


@pytest.mark.parametrize(
    ("kind", "names", "says"),
    [
        (
            "cuda",
            ("a100-80", "v100-32"),
            "mesh: got 'n0-1:0-1 of a100-80 and v100-32', expected nodes of the same kind",
        ),
        ("cpu", ("old", "old"), "node_kinds: got ['old'], expected GPUs, or no kinds"),
    ],
)
def test_a_profile_of_mixed_subjects_is_refused(kind, names, says):
    rack = ClusterShape("rack", 2, 2, 32 << 30, node_devices=names)
    with pytest.raises(InvalidInput) as caught:
        kind_of_nodes(Lease("mesh", "a", rack, rack.whole, rack.whole.devices(), kind))
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"versions": (("torch", "1.0"),)}, "profile.versions.torch: got '1.0', expected "),
        ({"processor": "abacus"}, "profile.processor: got 'abacus', expected "),
        ({"shape": OTHER}, "profile.shape: got "),
        ({"slow_downs": ()}, "profile.slow_downs: got 'none', expected a newer profile, which also has times"),
    ],
)
def test_a_stale_profile_is_refused_in_one_line_that_says_what_to_do(changes, field):
    kept(SHAPE, **changes)
    with pytest.raises(InvalidInput) as error:
        profiles.measured_sources([ACTOR], HELD)
    assert str(error.value).startswith(field)
    assert "run rlhf/profile again" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_broken_file_is_refused_in_one_line(folder):
    kept(SHAPE)
    (file,) = folder.iterdir()
    file.write_text("{")
    with pytest.raises(InvalidInput) as error:
        profiles.measured_sources([ACTOR], HELD)
    assert "\n" not in str(error.value)


def test_degrees_divide_devices_and_model():
    odd = replace(SHAPE, num_attention_heads=9, num_kv_heads=3, intermediate_size=1536)
    assert legal_degrees(odd, 2) == (1,)
    assert legal_degrees(odd, 6) == (1, 3)
    assert legal_degrees(SHAPE, 8) == (1, 2, 4, 8)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["no-such-model"], "models.model: got 'no-such-model', expected a Hugging Face folder, or the name"),
        (["llama-7b", "--rows", "0"], "--rows: got '0', expected a whole number from 1"),
        (["llama-7b", "--longest", "4"], "--longest: got '4', expected a whole number from 16"),
        (["llama-7b", "--tensor-parallel", "two"], "--tensor-parallel: got 'two', expected degrees, such as 1,2"),
        (["llama-7b", "--tensor-parallel", "3"], "tensor_parallel: got 3, expected a divisor of the model's 32 heads"),
        (["llama-7b", "--longest", "4096"], "longest: got 4096, expected at most 4090"),
        (["llama-7b", "--kind", "cuda"], "kind: got 'cuda', expected a machine with nvidia-smi"),
    ],
)
def test_mistakes_get_one_line(arguments, complaint, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert main(["profile", *arguments]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith(f"prefect-rlhf: {complaint}")
