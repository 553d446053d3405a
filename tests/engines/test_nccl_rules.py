"""NCCL's rules on gloo ranks: which calls break them, and that ours keep them; see tests/nccl_rules."""

import threading
from contextlib import closing

import pytest
import torch
import torch.distributed as dist

from prefect_rlhf.engines.gang.local import LocalGang
from prefect_rlhf.engines.gang.processes.messages import GangSettings
from prefect_rlhf.engines.process_groups import name_groups_by_members
from prefect_rlhf.engines.weights import move_weights
from prefect_rlhf.engines.weights.send_receive import send_receive
from prefect_rlhf.errors.errors import RankFailed
from tests.support.nccl_rules.rules import SECONDS, BrokenRule

pytestmark = pytest.mark.slow
CALLS = "tests.support.nccl_rules.calls"
BUFFERS = "prefect_rlhf.engines.megatron.cpu.gradient_buffers"
OLD_START = "tests.support.nccl_rules.old_start"


class Caller:
    """A rank that makes calls that gloo accepts."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size
        name_groups_by_members()

    def group(self, *ranks, opened=True):
        group = dist.new_group([*ranks], use_local_synchronization=True)
        if opened:
            dist.all_reduce(torch.zeros(1), group=group)
        return group

    def move_weights(self):
        """The messages of a reallocation between the ranks that are called."""
        move_weights.uses_nccl = lambda tensor: True
        others = {0, 1} - {self.rank}
        sent = [(torch.full((3,), float(self.rank)), peer) for peer in others]
        received = [(torch.zeros(3), peer) for peer in others]
        for work in move_weights._start(received, sent):
            work.wait()
        return [tensor[0].item() for tensor, _ in received]

    def share(self, ranks):
        """The messages by which the profile timed a sum over replicas; return the rule that they break."""
        from prefect_rlhf.engines.megatron.cpu.gradient_buffers import sum_shares

        with pytest.raises(BrokenRule) as broken:
            sum_shares(torch.ones(6), torch.float32, self.group(*ranks))
        return str(broken.value)

    def reduce_in_order(self, *pairs):
        """Use a group of the first ranks of each number in `pairs`, one after another, without a wait."""
        groups = {size: self.group(*range(size)) for size in (2, 3) if self.rank < size}
        sizes = pairs[self.rank]
        works = [dist.all_reduce(torch.ones(1), group=groups[size], async_op=True) for size in sizes]
        for work in works:
            work.wait()

    def other_collective(self):
        """Rank 1 makes another collective than rank 0."""
        if self.rank:
            dist.broadcast(torch.zeros(1), src=0)
        else:
            dist.all_reduce(torch.zeros(1))

    def first_is_a_message(self):
        group = self.group(0, 1, opened=False)
        post = dist.isend if self.rank else dist.irecv
        post(torch.zeros(1), 1 - self.rank, group=group).wait()

    def ring(self, opened):
        """A batch in which each rank has two peers of three."""
        group, size = self.group(*range(self.size), opened=opened), self.size
        after, before = torch.full((1,), float(self.rank)), torch.zeros(1)
        operations = [
            dist.P2POp(dist.isend, after, (self.rank + 1) % size, group=group),
            dist.P2POp(dist.irecv, before, (self.rank - 1) % size, group=group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return before.item()

    def pipeline(self):
        """Messages from rank to rank outside of a batch, in one direction."""
        for _ in range(2):
            if self.rank:
                dist.recv(torch.zeros(1), self.rank - 1)
            if self.rank < self.size - 1:
                dist.isend(torch.zeros(1), self.rank + 1).wait()

    def two_threads(self):
        caught = []

        def call():
            try:
                dist.all_reduce(torch.zeros(1))
            except RuntimeError as error:
                caught.append(error)

        dist.all_reduce(torch.zeros(1))
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        if caught:
            raise caught[0]

    def rows(self):
        send_receive({1 - self.rank: [torch.ones(2)]}, {1 - self.rank: [torch.zeros(2)]})


def call(method, *arguments, size=2, ranks=None, more=(), **environment):
    environment = {"OMP_NUM_THREADS": "1", **environment}
    settings = GangSettings(size, Caller, environment=environment, preload=(CALLS, *more))
    with closing(LocalGang(settings)) as gang:
        of_ranks = ranks if isinstance(ranks, dict) else dict.fromkeys(ranks or range(size), arguments)
        return gang.call(method, of_ranks, doing="a test", deadline_seconds=100)


def test_finding_a1_a_reallocation_as_the_first_use_of_the_world_is_refused():
    """Ranks 0 and 1 of 3 exchange weights in a world that no collective has opened."""
    with pytest.raises(RankFailed, match=r"first use of group \[0, 1, 2\] .* is a batch .* some members do not make"):
        call(Caller.move_weights, size=3, ranks=(0, 1), more=(OLD_START,), **{SECONDS: "1"})


@pytest.mark.all
def test_such_a_reallocation_is_right_in_a_world_that_all_ranks_opened():
    assert call(Caller.move_weights, size=3, ranks=(0, 1)) == {0: [1.0], 1: [0.0]}


@pytest.mark.all
def test_finding_a6_shares_by_messages_are_refused():
    """Of two ranks, whose pair cannot receive before it has sent, and of three, which wait in a circle."""
    ranks = {rank: ((0, 1) if rank < 2 else (2, 3, 4),) for rank in range(5)}
    for rank, broken in call(Caller.share, ranks=ranks, size=5, more=(BUFFERS,)).items():
        circle = [rank, 1 - rank] if rank < 2 else [2 + (rank - 2 + step) % 3 for step in range(3)]
        named = ", ".join(map(str, circle))
        assert broken == f"ranks {named} send to each other before any of them receives, outside of a batch"


@pytest.mark.all
def test_one_way_messages_are_right():
    call(Caller.pipeline, size=3)


@pytest.mark.all
def test_shared_groups_need_the_same_order():
    call(Caller.reduce_in_order, (2, 3), (2, 3), (3,), size=3)
    with pytest.raises(RankFailed, match=r"rank \d makes allreduce on group .* rank \d makes allreduce on group"):
        call(Caller.reduce_in_order, (2, 3), (3, 2), (3,), size=3)


@pytest.mark.all
def test_members_make_the_same_collective():
    with pytest.raises(RankFailed, match="makes (allreduce|broadcast) .* makes (allreduce|broadcast)"):
        call(Caller.other_collective)


@pytest.mark.all
def test_a_group_may_not_start_with_a_single_message():
    with pytest.raises(RankFailed, match="the first use of .* is a message outside of a batch"):
        call(Caller.first_is_a_message)


@pytest.mark.parametrize("opened", [False, pytest.param(True, marks=pytest.mark.all)])
def test_a_batch_of_all_members_may_be_the_first_use(opened):
    assert call(Caller.ring, opened, size=3) == {0: 2.0, 1: 0.0, 2: 1.0}


def test_groups_are_used_from_a_single_thread():
    with pytest.raises(RankFailed, match="are used from two threads"):
        call(Caller.two_threads)
