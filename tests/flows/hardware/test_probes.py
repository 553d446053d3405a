"""Where probed speeds are kept, when a machine is probed again, and what a run does without a probe."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, make_dataclass, replace
from threading import Event

import pytest

from prefect_rlhf.blocks.lease_files import FileLock
from prefect_rlhf.errors.errors import EngineFailed
from prefect_rlhf.flows.commands.cli import main
from prefect_rlhf.flows.hardware import probes
from prefect_rlhf.flows.hardware.node_hardware import CPU
from prefect_rlhf.flows.hardware.profiles import describe_sources, measured_sources
from prefect_rlhf.placement.cost.speeds import KnownSpeeds, Speeds
from prefect_rlhf.placement.devices.lease import Lease
from prefect_rlhf.placement.devices.mesh import ClusterShape

pytestmark = pytest.mark.quick

DESK = ClusterShape("desk", 1, 2, 8 << 30)
HELD = Lease("local", "a", DESK, DESK.whole, DESK.whole.devices())
SPEEDS = Speeds(dtype="bfloat16", product_flops=5e11, memory_bytes_per_second=8e9, host_bytes_per_second=5e9)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(probes, "PROBES", tmp_path)
    return tmp_path


@pytest.fixture
def said():
    return []


@pytest.fixture
def measured(monkeypatch):
    """The results of the next probes, in order: speeds, or an error. What remains was not asked for."""
    results = []

    def next_result(leased, dtype):
        result = results.pop(0)
        if isinstance(result, Exception):
            raise result
        return replace(result, dtype=dtype)

    monkeypatch.setattr(probes, "_probe", next_result)
    return results


def ask(said, *dtypes):
    return probes.probed_speeds(HELD, dtypes or ("bfloat16",), said.append)


def test_a_machine_is_probed_once_and_a_line_states_the_result(measured, said):
    measured += [SPEEDS]
    known = ask(said)
    assert known.by_dtype == (SPEEDS,)
    assert said == [f"probe: {SPEEDS}"]
    assert ask(said) == known  # a second probe would find no result


def test_each_format_is_probed(measured, said):
    measured += [SPEEDS, SPEEDS]
    ask(said)
    assert [speeds.dtype for speeds in ask(said, "bfloat16", "float32").by_dtype] == ["bfloat16", "float32"]


def test_after_a_probe_on_busy_cores_the_next_run_probes_again_and_keeps_the_better_numbers(measured, said):
    measured += [replace(SPEEDS, busy=0.6), replace(SPEEDS, product_flops=1e11, busy=0.4)]
    ask(said)
    (speeds,) = ask(said).by_dtype
    assert (speeds.product_flops, speeds.busy) == (5e11, 0.4)
    assert said[0].endswith("other programs had 60% of the cores, so the next run probes again")
    assert said[1].endswith("probes again; of older and new speeds the better are used")


def test_a_failed_probe_leaves_the_datasheet_and_says_so(measured, said):
    measured += [EngineFailed("rank 1 exited\nwith a traceback")]
    assert ask(said) is None
    assert said == ["the probe of the devices failed, so plans use datasheets (rank 1 exited)"]


def test_a_failed_probe_leaves_older_speeds(measured, said):
    measured += [replace(SPEEDS, busy=0.6), EngineFailed("rank 1 exited")]
    known = ask(said)
    assert ask(said) == known
    assert "plans use older speeds" in said[-1]


def test_a_damaged_file_is_reported_ignored_and_replaced(measured, said):
    measured += [SPEEDS]
    file = probes.probe_file(probes.machine_key(HELD))
    file.write_text('{"machine": "cpu')
    assert ask(said).by_dtype == (SPEEDS,)
    assert said[0].startswith(f"the stored probe is ignored ({file}: got ")
    assert KnownSpeeds.from_json(file.read_bytes(), "file").by_dtype == (SPEEDS,)


def test_other_software_or_another_number_of_devices_is_another_machine(monkeypatch):
    key = probes.machine_key(HELD)
    alone = ClusterShape("desk", 1, 1, 8 << 30)
    assert probes.machine_key(Lease("local", "a", alone, alone.whole, alone.whole.devices())) != key
    monkeypatch.setattr("prefect_rlhf.flows.hardware.profiles.installed_version", lambda name: "0.0")
    assert probes.machine_key(HELD) != key


def test_a_version_that_measures_more_probes_again(monkeypatch):
    key = probes.machine_key(HELD)
    more = make_dataclass("Speeds", ["humidity", *(field.name for field in fields(Speeds))])
    monkeypatch.setattr(probes, "Speeds", more)
    assert probes.machine_key(HELD) != key


def test_another_driver_is_another_machine(monkeypatch):
    named = replace(DESK, node_devices=("h100",))
    leased = Lease("local", "a", named, named.whole, named.whole.devices(), "cuda")
    keys = set()
    for driver in ("580.1", "590.2"):
        monkeypatch.setattr(probes, "gpu_driver", lambda driver=driver: driver)
        keys.add(probes.machine_key(leased))
    assert len(keys) == 2


def test_a_run_waits_for_another_runs_probes_and_uses_them(measured, said, monkeypatch):
    monkeypatch.setattr(probes, "LOCK_SECONDS", 0.3)
    lock = FileLock.take(probes.PROBES / f"{probes.machine_key(HELD)}.lock")
    assert ask(said) is None
    assert said == ["another run has been probing this machine for 0.3 s: its speeds are not known"]
    lock.release()


def test_of_two_runs_on_the_same_devices_one_probes_and_both_use_its_speeds(said, monkeypatch):
    begun, may_end, calls = Event(), Event(), []

    def slow_probe(leased, dtype):
        calls.append(dtype)
        begun.set()
        assert may_end.wait(20)
        return SPEEDS

    monkeypatch.setattr(probes, "_probe", slow_probe)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(ask, said)
        assert begun.wait(20)
        second = pool.submit(ask, said)
        may_end.set()
        assert first.result(20) == second.result(20)
    assert calls == ["bfloat16"] and said == [f"probe: {SPEEDS}"]


def test_a_probe_replaces_the_guess_and_a_line_says_so():
    guessed = measured_sources([], HELD)
    probed = measured_sources([], HELD, KnownSpeeds("key", (SPEEDS,)))
    assert describe_sources(guessed).startswith("times: a guess, since CPUs have no datasheet")
    assert describe_sources(probed).startswith("times: from a probe of these devices")
    assert guessed.nodes == (replace(CPU, devices_per_node=2),)
    assert probed.nodes[0].device.bfloat16_flops > CPU.device.bfloat16_flops


def test_a_probe_of_a_node_does_not_describe_different_nodes():
    assert probes.is_uniform(HELD)
    for changes in ({"node_speeds": (1.0, 0.5)}, {"node_devices": ("h100", "a100-80")}):
        mixed = replace(DESK, num_nodes=2, **changes)
        assert not probes.is_uniform(replace(HELD, cluster=mixed, mesh=mixed.whole))


def test_the_command_forgets_probes(folder, capsys):
    (folder / "a.json").write_text("{}")
    assert main(["profile", "--forget"]) == 0
    assert capsys.readouterr().out.startswith("1 stored probe removed; ")
    assert not list(folder.iterdir())


def test_forgetting_takes_no_other_flag(capsys):
    assert main(["profile", "--forget", "--rows", "4"]) != 0
    assert "rows: 4 is not used: --forget measures nothing; remove it" in capsys.readouterr().err
