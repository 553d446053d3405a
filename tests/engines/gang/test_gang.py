"""The gang: what a call gives, and that no trouble of a rank hangs the controller or leaves a process behind."""

import fcntl
import gc
import logging
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from prefect_rlhf.engines.gang import open as opening
from prefect_rlhf.engines.gang.in_process import InProcessGang
from prefect_rlhf.engines.gang.local import LocalGang
from prefect_rlhf.engines.gang.processes.messages import GangSettings
from prefect_rlhf.engines.gang.processes.own_folder import PREFIX
from prefect_rlhf.engines.gang.ray.ray_gang import RayGang
from prefect_rlhf.engines.process_groups import world_limit
from prefect_rlhf.errors.errors import (
    CollectiveFailed,
    InvalidInput,
    OutOfDeviceMemory,
    RankFailed,
    RankLost,
    RankSilent,
    RlhfError,
    StaleWeights,
)
from tests.support.cases import first
from tests.support.device import DEVICE, on_hardware
from tests.support.ray_nodes import joined, ray_nodes, why_not

pytestmark = pytest.mark.slow


class Probe:
    """What a test asks of a rank."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size
        self.signalled = threading.Event()

    def await_signal(self, seconds):
        return self.signalled.wait(seconds)

    def signal(self):
        self.signalled.set()
        return threading.current_thread() is threading.main_thread()  # where calls that compute are answered

    def place(self):
        return self.rank, self.size

    def echo(self, value):
        return value

    def warn(self, line):
        logging.getLogger("prefect_rlhf.files.storage.patience").warning("%s of %d", line, self.rank)

    def pid(self):
        return os.getpid()

    def environment(self, name):
        return os.environ.get(name)

    def initial_environment(self):
        return Path("/proc/self/environ").read_text().split("\0")

    def threads(self):
        return torch.get_num_threads()

    def collector(self):
        return gc.isenabled(), gc.get_freeze_count()

    def main_module(self):
        return getattr(sys.modules["__main__"], "__file__", None)

    def total(self, ranks, value, device="cpu"):
        group = dist.new_group(ranks, use_local_synchronization=True)
        tensor = torch.tensor(value, device=device)
        dist.all_reduce(tensor, group=group)
        return int(tensor)

    def meet(self, folder):
        """Say that this rank is here; return whether the other came while this one waited."""
        Path(folder, str(self.rank)).touch()
        end = time.monotonic() + 20
        while len(list(Path(folder).iterdir())) < 2 and time.monotonic() < end:
            time.sleep(0.01)
        return len(list(Path(folder).iterdir())) == 2

    def sleep(self, seconds):
        time.sleep(seconds)
        return self.rank

    def spin(self, seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            torch.randn(256, 256) @ torch.randn(256, 256)

    def wait_for_all(self):
        dist.barrier()

    def raise_error(self, error):
        raise error

    def raise_on(self, rank, error):
        if self.rank == rank:
            raise error
        dist.barrier()

    def give_unpicklable(self):
        return lambda: None

    def end(self, status):
        os._exit(status)

    def limit_of_collectives(self):
        return world_limit().total_seconds()

    def leave_a_folder(self):
        """As a library does that removes its folder in an exit handler."""
        return tempfile.mkdtemp()


def call(gang, method, *arguments, ranks=None, seconds=30.0, resource="compute"):
    ranks = range(gang.size) if ranks is None else ranks
    arguments = dict.fromkeys(ranks, arguments)
    return gang.call(method, arguments, doing="a test", deadline_seconds=seconds, resource=resource)


MARK = "PREFECT__FLOW_RUN_ID"
NODE = r"(?: on node [\d.]+)?"
OVER_NODES = pytest.mark.skipif(bool(why_not()), reason=why_not())


@pytest.fixture(scope="module")
def nodes():
    """A Ray cluster of two nodes: with two devices each for `shared`, and one for `gang`."""
    with ray_nodes((3, 3)) as nodes, joined(nodes):
        yield nodes


def open_gang(request, settings):
    """A gang on this machine, or one whose ranks are divided between two nodes."""
    if request.param == "local":
        return LocalGang(settings)
    nodes = request.getfixturevalue("nodes")
    return RayGang(settings, (settings.size // 2,) * 2, nodes.address)


@pytest.fixture(params=["local", pytest.param("ray", marks=[OVER_NODES, pytest.mark.all])])
def gang(request):
    settings = GangSettings(2, Probe, environment={"OMP_NUM_THREADS": "1", MARK: "own"}, preload=("torch.distributed",))
    gang = open_gang(request, settings)
    yield gang
    gang.close()
    assert_gone(gang)


@pytest.fixture(scope="module", params=["local", pytest.param("ray", marks=[OVER_NODES, pytest.mark.all])])
def shared(request):
    """A gang for tests that leave it as they found it."""
    environment = {"OMP_NUM_THREADS": "1", MARK: "run-7"}
    settings = GangSettings(4, Probe, environment=environment, preload=("torch.distributed",), collective_seconds=777.0)
    gang = open_gang(request, settings)
    yield gang
    gang.close()
    assert_gone(gang, "run-7")


def processes_of(group):
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def children_of(pid):
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(stat.parent.name))
    return sorted(found)


def assert_gone(gang, mark="own"):
    """No process of the gang is left on its machine, or on its nodes."""
    if isinstance(gang, LocalGang):
        assert_group_gone(gang.process_group)
    else:
        end = time.monotonic() + 30
        while (found := ranks_of_nodes(mark)) and time.monotonic() < end:
            time.sleep(0.05)
        assert found == []


def ranks_of_nodes(mark):
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            variables = (process / "environ").read_bytes().split(b"\0")
            if f"{MARK}={mark}".encode() in variables:
                found.append(int(process.name))
    return found


def assert_group_gone(group, seconds=30.0):
    end = time.monotonic() + seconds
    while processes_of(group) and time.monotonic() < end:
        time.sleep(0.02)
    assert processes_of(group) == []


def test_collectives_of_ranks_have_the_limit_of_the_gang(shared):
    """Groups take it from the world: a limit below a call's deadline would end a rank that waits for a slow replica."""
    assert set(call(shared, Probe.limit_of_collectives).values()) == {777.0}


def test_a_ranks_warning_is_logged_once_under_its_name(shared, caplog):
    call(shared, Probe.warn, "waits for a store", ranks=(0, 2))
    call(shared, Probe.echo, 1)
    lines = [record.getMessage() for record in caplog.records if "waits for a store" in record.getMessage()]
    assert [re.sub(NODE, "", line) for line in lines] == [
        f"rank {rank}: waits for a store of {rank}" for rank in (0, 2)
    ]


def test_a_call_runs_on_each_rank_it_names(shared):
    """A call returns each rank's own answer, and only ranks that have arguments take part."""
    assert call(shared, Probe.place, ranks=[0, 2]) == {0: (0, 4), 2: (2, 4)}


class Order:
    """What becomes a 7 on its way, and counts how often it is sent off."""

    pickled = 0

    def __reduce__(self):
        Order.pickled += 1
        return int, (7,)


def test_what_several_ranks_are_told_alike_is_pickled_once(shared):
    """An order to 128 ranks is one to each of its kinds, whether or not their tuples of arguments are one object."""
    alike, other, before = Order(), Order(), Order.pickled
    orders = {0: (alike,), 1: (alike,), 2: (other,), 3: (alike,)}
    assert shared.call(Probe.echo, orders, doing="a test", deadline_seconds=30) == dict.fromkeys(range(4), 7)
    assert Order.pickled - before == 2


def test_any_ranks_can_form_a_group(shared):
    """Ranks of any subset can make a group among themselves."""
    totals = shared.call(Probe.total, {rank: ([1, 3], rank) for rank in (1, 3)}, doing="sum", deadline_seconds=20)
    assert totals == {1: 4, 3: 4}


def test_ranks_carry_the_environment(shared):
    """Whoever looks from outside finds the flow run's id in every rank's environment; threads are as asked."""
    assert list(call(shared, Probe.environment, "PREFECT__FLOW_RUN_ID").values()) == ["run-7"] * 4
    assert all("PREFECT__FLOW_RUN_ID=run-7" in seen for seen in call(shared, Probe.initial_environment).values())
    assert {1} == set(call(shared, Probe.threads).values())


def test_ranks_do_not_import_the_controllers_main_module(shared):
    """A flow run's main module is Prefect's; no rank pays for it."""
    assert all(
        str(main).endswith("engines/gang/processes/fork_server.py") for main in call(shared, Probe.main_module).values()
    )


def test_a_rank_collects_garbage_but_never_what_was_imported(shared):
    for enabled, frozen in call(shared, Probe.collector).values():
        assert enabled and frozen > 100_000


def test_calls_on_disjoint_ranks_overlap(shared, tmp_path):
    """Two calls from two threads on different ranks run at the same time: each ends when it has seen the other."""
    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(call, shared, Probe.meet, str(tmp_path), ranks=[rank]) for rank in (0, 1)]
    assert [called.result() for called in calls] == [{0: True}, {1: True}]


def beside(gang, first, second):
    """What two calls in flight at the same time return or raise, the first of which computes on all ranks."""

    def run(resource, method, *arguments):
        try:
            return call(gang, method, *arguments, resource=resource)
        except RlhfError as error:
            return error

    with ThreadPoolExecutor(2) as threads:
        return [one.result(60) for one in (threads.submit(run, "compute", *first), threads.submit(run, *second))]


@pytest.mark.parametrize("resource", ["host_link", "disk"])
def test_host_copies_and_writes_run_during_a_call_on_the_same_rank(shared, resource):
    """The call waits for a signal that only the copy gives; were they served in turn, none would come."""
    found = beside(shared, (Probe.await_signal, 30.0), (resource, Probe.signal))
    assert found == [dict.fromkeys(range(4), True), dict.fromkeys(range(4), False)]


def assert_overlap_is_refused(gang):
    """If two calls use the same resource of a rank at the same time, the second is refused and the first completes."""
    results = beside(gang, (Probe.sleep, 1.0), ("compute", Probe.sleep, 1.0))
    (refused,) = [result for result in results if isinstance(result, RlhfError)]
    assert "rank 0 was asked for a test while it was running a test: two calls cannot share the compute" in str(refused)
    assert {rank: rank for rank in range(gang.size)} in results


def test_calls_that_overlap_on_a_rank_are_refused(gang):
    """Who may use a device is decided by a run's device locks, once; the gang notices when that went wrong."""
    assert_overlap_is_refused(gang)


def test_past_a_deadline_each_rank_writes_the_collective_that_it_waits_in(tmp_path):
    """The newest entry of the rank that waits is of a collective that the other rank lacks."""
    settings = GangSettings(2, Probe, environment={"OMP_NUM_THREADS": "1"}, preload=("torch",), records=tmp_path)
    with closing(LocalGang(settings)) as gang:
        call(gang, Probe.wait_for_all)
        with pytest.raises(RankSilent, match="rank 1 did not answer"):
            call(gang, Probe.wait_for_all, ranks=[1], seconds=1.0)
    records = {rank: pickle.loads((tmp_path / f"flight_recorder_{rank}").read_bytes()) for rank in (0, 1)}
    of_ranks = {rank: [entry["profiling_name"] for entry in record["entries"]] for rank, record in records.items()}
    assert of_ranks == {0: ["gloo:barrier"], 1: ["gloo:barrier"] * 2}
    assert "wait_for_all" in [frame["name"] for frame in records[1]["entries"][-1]["frames"]]


@pytest.mark.all  # a silent rank does, too
def test_a_silent_copy_ends_the_gang(gang):
    """The host link has the same deadlines, and names the same way, as calls that compute."""
    with pytest.raises(RankSilent, match=f"ranks 0{NODE}, 1{NODE} did not answer within 0.5 s to a test"):
        call(gang, Probe.sleep, 60.0, seconds=0.5, resource="host_link")
    assert_gone(gang)


@pytest.mark.all  # a killed rank is noticed
def test_a_killed_rank_is_told_to_its_call_and_its_copy(gang):
    """Whichever hears of it first: no call in flight is left waiting, and the death is named."""
    pid = call(gang, Probe.pid)[1]
    threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
    found = beside(gang, (Probe.sleep, 30.0), ("host_link", Probe.sleep, 30.0))
    assert [type(error) for error in found] == [RankLost, RankLost]
    assert all(re.search(f"rank 1{NODE} was killed by SIGKILL in a test", str(error)) for error in found)


def test_an_error_in_a_copy_comes_back(shared):
    with pytest.raises(OutOfDeviceMemory, match=f"rank 2{NODE} failed in a test: MemoryError: all gone"):
        call(shared, Probe.raise_error, MemoryError("all gone"), ranks=[2], resource="host_link")
    assert call(shared, Probe.place, ranks=[2], resource="host_link") == {2: (2, 4)}


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ValueError("no such\nthing"), RankFailed, "rank 2 failed in a test: ValueError: no such"),
        (MemoryError("all gone"), OutOfDeviceMemory, "rank 2 failed in a test: MemoryError: all gone"),
        (StaleWeights("v2 is not v3"), StaleWeights, "rank 2: v2 is not v3"),
        (InvalidInput("a.b", 3, "an even number"), InvalidInput, "a.b: got 3, expected an even number"),
    ],
)
def test_an_error_in_a_rank_comes_back(shared, error, kind, text):
    """Our own errors come back as themselves, foreign ones as RankFailed in one line, with the rank named.

    That line has the place in the file of whoever is no library, and the rank's traceback comes along for the log.
    """
    with pytest.raises(kind) as caught:
        call(shared, Probe.raise_error, error, ranks=[2])
    line = Probe.raise_error.__code__.co_firstlineno + 1
    is_foreign = issubclass(kind, RankFailed)
    assert re.sub(NODE, "", str(caught.value)) == text + (f" ({__file__}:{line} in raise_error)" if is_foreign else "")
    assert not is_foreign or f'test_gang.py", line {line}, in raise_error' in caught.value.traceback
    assert "rank 2" in str(caught.value) or "rank 2" in caught.value.__notes__[0]
    assert call(shared, Probe.place, ranks=[2]) == {2: (2, 4)}


def test_an_answer_that_does_not_pickle_is_an_error(shared):
    """A rank survives a result that cannot be sent."""
    with pytest.raises(RankFailed, match=f"rank 1{NODE} failed in a test"):
        call(shared, Probe.give_unpicklable, ranks=[1])
    assert call(shared, Probe.place, ranks=[1]) == {1: (1, 4)}


def test_a_silent_rank_ends_the_gang(gang):
    """Past the deadline the error names rank, call and limit, every process is gone, and later calls say why."""
    began = time.monotonic()
    with pytest.raises(RankSilent, match=f"rank 1{NODE} did not answer within 0.5 s to sleeping"):
        gang.call(Probe.sleep, {0: (0.0,), 1: (60.0,)}, doing="sleeping", deadline_seconds=0.5)
    assert time.monotonic() - began < 30, "it waited for the sleep of the silent rank"
    assert_gone(gang)
    with pytest.raises(RankLost, match=f"no rank is left for a test: rank 1{NODE} did not answer"):
        call(gang, Probe.place)


def test_a_stopped_rank_is_silent(gang):
    """A rank that is stopped, not dead, ends the gang too."""
    os.kill(call(gang, Probe.pid)[1], signal.SIGSTOP)
    with pytest.raises(RankSilent, match="rank 1"):
        call(gang, Probe.place, seconds=0.5)
    assert_gone(gang)


def test_a_killed_rank_is_noticed_at_once(gang):
    """The death of a rank in a collective is told by its signal, while the others go on, and ends the gang."""
    pid = call(gang, Probe.pid)[1]
    threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
    began = time.monotonic()
    with pytest.raises(RankLost, match=f"rank 1{NODE} was killed by SIGKILL in a test"):
        gang.call(Probe.sleep, {0: (30.0,), 1: (30.0,)}, doing="a test", deadline_seconds=60)
    assert time.monotonic() - began < 20, "it waited for the sleep of the other rank"
    assert_gone(gang)


def test_a_rank_that_exits_is_lost(gang):
    """An exit status is told too; ranks that wait for it in a collective do not hide it."""
    with pytest.raises(RankLost, match=f"rank 0{NODE} ended with status 3 in a test"):
        gang.call(Probe.end, {0: (3,)}, doing="a test", deadline_seconds=10)


def test_a_failure_is_told_though_others_hang_behind_it(gang, monkeypatch):
    """When one rank raises and the other waits for it in a collective, the error is the first one's."""
    monkeypatch.setattr("prefect_rlhf.engines.gang.process_gang.FAILURE_GRACE_SECONDS", 0.5)
    began = time.monotonic()
    with pytest.raises(InvalidInput, match="x: got 1"):
        call(gang, Probe.raise_on, 0, InvalidInput("x", 1, "2"), seconds=60)
    assert time.monotonic() - began < 30, "it waited for the rank that hangs"
    assert_gone(gang)


def test_a_broken_collective_names_the_ranks_that_did_not_answer(gang, monkeypatch):
    monkeypatch.setattr("prefect_rlhf.engines.gang.process_gang.FAILURE_GRACE_SECONDS", 0.5)
    broken = CollectiveFailed("DistBackendError: NCCL error")
    with pytest.raises(CollectiveFailed, match=rf"rank 0{NODE} failed in .*: NCCL error; rank 1{NODE} did not answer"):
        call(gang, Probe.raise_on, 0, broken, seconds=60)
    assert_gone(gang)


def test_calls_in_flight_when_the_gang_is_closed_end(gang):
    """Closing from another thread, as a cancelled run does, ends a call that is waiting."""
    threading.Timer(0.3, gang.close).start()
    with pytest.raises(RankLost, match="the gang was closed"):
        call(gang, Probe.sleep, 60.0, seconds=60)
    gang.close()


def test_a_rank_that_cannot_start_says_why():
    """A factory that raises on one rank ends the start with its reason, and the other ranks."""
    before = children_of(os.getpid())
    with pytest.raises(RankFailed, match="rank 1 failed in joining the world: ZeroDivisionError"):
        LocalGang(GangSettings(2, broken_factory, start_seconds=60, preload=()))
    assert children_of(os.getpid()) == before


def test_a_start_past_its_limit_names_its_phase():
    with pytest.raises(RankSilent, match="ranks 0, 1 did not answer within 0.1 s to importing the engines"):
        LocalGang(GangSettings(2, Probe, start_seconds=0.1, preload=()))


@pytest.mark.parametrize(("ranks", "seconds"), [((1, 1), 150), ((8,), 360), ((8, 8), 360)])
def test_the_limit_of_a_start_grows_with_the_ranks_of_a_node(monkeypatch, ranks, seconds):
    """Ranks of a node read the same disk: eight may import for minutes from a slow one."""
    opened = []
    monkeypatch.setattr(opening, "LocalGang", opened.append)
    opening.open_gang(ranks, rank_factory=Probe, device="cpu")
    opening.open_gang(ranks, rank_factory=Probe, device="cpu", start_seconds=777.0)
    assert [settings.start_seconds for settings in opened] == [seconds, 777.0]


def broken_factory(rank, size):
    return 1 // (1 - rank)


CONTROLLER = """
import sys, threading, time
from prefect_rlhf.engines.gang.local import LocalGang
from prefect_rlhf.engines.gang.processes.messages import GangSettings
from tests.engines.gang.test_gang import Probe
gang = LocalGang(GangSettings(2, Probe, environment={"OMP_NUM_THREADS": "1"}, method=sys.argv[1], preload=("torch",)))
print(gang.process_group, flush=True)
gang.call(Probe.spin, {0: (60.0,), 1: (60.0,)}, doing="spinning", deadline_seconds=60)
"""


@pytest.mark.parametrize("method", first(1, ["fork", "spawn"]))
def test_no_process_and_no_folder_survives_a_killed_controller(method, tmp_path):
    """A controller killed by SIGKILL takes its ranks with it, even while they compute."""
    command = [sys.executable, "-c", CONTROLLER, method]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    controller = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3], env=environment
    )
    group = int(controller.stdout.readline())
    time.sleep(0.3)
    assert len(processes_of(group)) >= 2
    assert len(list(tmp_path.glob(f"{PREFIX}*"))) == 1
    controller.kill()
    controller.wait()
    assert_group_gone(group)
    assert list(tmp_path.glob(f"{PREFIX}*")) == []


def test_what_ranks_leave_in_their_temporary_folder_goes_with_them(tmp_path, monkeypatch):
    """Also what was left by ranks whose fork server was killed; not what another gang uses."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed, used = tmp_path / f"{PREFIX}killed", tmp_path / f"{PREFIX}used"
    for folder in (killed, used):
        (folder / "media").mkdir(parents=True)
    lock = os.open(used, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    monkeypatch.setattr("prefect_rlhf.engines.gang.processes.own_folder._YOUNG_SECONDS", 0.0)
    gang = LocalGang(GangSettings(2, Probe, environment={"OMP_NUM_THREADS": "1"}, preload=("torch",)))
    try:
        left = call(gang, Probe.leave_a_folder)
        assert all(Path(folder).is_dir() and Path(folder).is_relative_to(tmp_path) for folder in left.values())
    finally:
        gang.close()
        os.close(lock)
    assert list(tmp_path.iterdir()) == [used]


@pytest.mark.all  # nor one killed later
def test_no_process_survives_a_controller_killed_while_it_starts():
    """The process that imports the engines ends too, in the middle of its imports."""
    code = CONTROLLER.replace('preload=("torch",)', "preload=('tests.engines.gang.slow_import',)")
    command = [sys.executable, "-c", code, "fork"]
    controller = subprocess.Popen(command, cwd=Path(__file__).parents[3])
    end = time.monotonic() + 60
    groups: list[int] = []  # other children, which imports start for a moment, are of the controller's own group
    while not groups and time.monotonic() < end:
        time.sleep(0.05)
        groups = [child for child in children_of(controller.pid) if processes_of(child)]
    time.sleep(1.5)
    assert len(processes_of(groups[0])) == 1
    controller.kill()
    controller.wait()
    assert_group_gone(groups[0])


def test_a_rank_in_process_behaves_alike():
    """World size 1 gives the same answers and errors without another process."""
    gang = InProcessGang(Probe)
    assert call(gang, Probe.place) == {0: (0, 1)}
    assert {0: os.getpid()} == call(gang, Probe.pid)
    assert call(gang, Probe.total, [0], 5) == {0: 5}
    assert beside(gang, (Probe.await_signal, 30.0), ("host_link", Probe.signal)) == [{0: True}, {0: False}]
    assert_overlap_is_refused(InProcessGang(Probe))
    with pytest.raises(RankFailed, match="rank 0 failed in a test: ValueError: no"):
        call(gang, Probe.raise_error, ValueError("no"))
    with pytest.raises(RankSilent, match="rank 0 did not answer within 0.1 s to a test"):
        call(gang, Probe.sleep, 0.2, seconds=0.1)
    with pytest.raises(RankLost, match="the gang was closed"):
        call(gang, Probe.place)
    assert not dist.is_initialized()


@pytest.mark.gpu
@on_hardware
def test_ranks_sum_tensors_of_their_devices():
    """Through NCCL on GPUs, each rank on its own; through gloo on CPU."""
    size = 2 if DEVICE == "cpu" else min(2, torch.cuda.device_count())
    with closing(LocalGang(GangSettings(size, Probe, DEVICE, preload=("torch.distributed",)))) as gang:
        assert call(gang, Probe.total, list(range(size)), 5, DEVICE) == dict.fromkeys(range(size), 5 * size)
