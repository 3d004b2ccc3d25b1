"""The pool of ranks: real processes, jobs, output, and every failure reported and survived."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from course_lib.core import CourseError, MeshError
from course_lib.ranks import RankError, Ranks
from tests.ranks.pools import fails, is_running, sum_of_powers


@pytest.fixture(scope="module")
def ranks():
    with Ranks(4) as four:
        yield four


# -- jobs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_every_world_size_sums_each_rank_once(world_size):
    with Ranks(world_size) as some:
        assert some.run(sum_of_powers) == [float("1" * world_size)] * world_size


def test_results_come_back_by_rank_with_arguments_and_closures(ranks):
    offset = 7
    assert ranks.run(lambda rank, x, *, y: (rank, x + y + offset), 1, y=2) == [
        (rank, 10) for rank in range(4)
    ]


@pytest.mark.parametrize("world_size", [0, -1, 65, 10**6, 1.5, 2.0, "2", True, None])
def test_world_size_has_to_be_a_whole_number_in_range(world_size):
    says = f"Ranks: need a whole number of ranks from 1 to 64; got {world_size!r}. Try Ranks(4)."
    with pytest.raises(MeshError) as caught:
        Ranks(world_size)
    assert str(caught.value) == says


def test_environment_is_what_torchrun_sets(ranks):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
    assert ranks.run(lambda rank: [os.environ[name] for name in names]) == [
        [str(rank), str(rank), "4", "4", "1"] for rank in range(4)
    ]


def test_a_rank_owns_little_memory(ranks):
    mine = ranks.run(lambda rank: psutil.Process().memory_full_info().uss)
    assert max(mine) < 80 * 2**20


def test_a_function_that_cannot_be_sent_is_told(ranks):
    lock = threading.Lock()
    with pytest.raises(CourseError, match=r"Ranks.run: need a function .* that can be sent"):
        ranks.run(lambda rank: lock.acquire())


def test_ranks_cannot_be_sent_to_ranks(ranks):
    with pytest.raises(CourseError, match="Ranks live in the notebook"):
        ranks.run(lambda rank: ranks.world_size)


# -- output -------------------------------------------------------------------------------------


def test_output_comes_in_rank_order(ranks, capsys):
    def late_first(rank):
        time.sleep(0.05 * (3 - rank))
        print("hello\nfrom", rank)
        os.write(1, b"from below Python\n")

    ranks.run(late_first)
    assert capsys.readouterr().out == "".join(
        f"[{rank}] hello\n[{rank}] from {rank}\n[{rank}] from below Python\n" for rank in range(4)
    )


def test_a_chatty_rank_is_folded_and_kept(ranks, capsys):
    ranks.run(lambda rank: [print("line", i) for i in range(1000)] if rank == 2 else None)
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 51
    assert shown[0] == "[2] line 0"
    assert shown[40] == "[2] ... 950 more lines: ranks.output(2) has them all"
    assert shown[-1] == "[2] line 999"
    assert ranks.output(2).splitlines() == [f"line {i}" for i in range(1000)]


def test_output_before_a_failure_is_shown(ranks, capsys):
    def speak_and_die(rank):
        print("last words of", rank, flush=True)
        if rank == 3:
            os._exit(5)

    fails(ranks, speak_and_die)
    assert "[3] last words of 3" in capsys.readouterr().out


# -- failures -----------------------------------------------------------------------------------


def test_one_rank_raises_while_others_wait(ranks):
    def forget(rank):
        if rank == 1:
            raise ValueError("forgot all_reduce")
        dist.all_reduce(torch.ones(1))

    error = fails(ranks, forget)
    assert error.kind == "raised"
    assert error.failures == {1: ("ValueError", "forgot all_reduce")}
    assert "rank 1 raised ValueError: forgot all_reduce\n" in str(error)
    assert "ranks 0, 2, 3 wait in all_reduce for rank 1\n" in str(error)
    assert 'raise ValueError("forgot all_reduce")' in str(error)
    assert "ValueError: forgot all_reduce" in error.tracebacks[1]


def test_equal_errors_are_said_once_and_state_is_kept(ranks):
    ranks.cell("kept = rank", "<test cell>")
    error = None
    with pytest.raises(RankError) as caught:
        ranks.run(lambda rank: 1 / 0)
    error = caught.value
    assert str(error).count("ZeroDivisionError") == 1
    assert str(error).startswith("ranks 0, 1, 2, 3 raised ZeroDivisionError: division by zero")
    assert "restarted" not in str(error)
    ranks.cell("assert kept == rank", "<test cell>")


def kill_myself(rank):
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def leave(rank):
    if rank == 2:
        os._exit(3)
    dist.all_reduce(torch.ones(1))


def overflow(rank):
    if rank == 2:
        os.abort()
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize(
    ("die", "says"),
    [
        (kill_myself, "rank 2 died: its process was killed by SIGKILL (by hand, or because memory"),
        (leave, "rank 2 died: its process ended with exit code 3"),
        (overflow, "rank 2 died: its process was killed by SIGABRT (a crash in C++)"),
    ],
)
def test_a_rank_that_dies_is_named(ranks, die, says):
    error = fails(ranks, die)
    assert error.kind == "died"
    assert says in str(error)
    assert "ranks 0, 1, 3 wait in all_reduce for rank 2" in str(error)


def test_a_call_that_autograd_forbids_is_no_hang(ranks):
    """It fails while it is waited for, as a lost connection does."""

    def gather_what_autograd_follows(rank):
        dist.all_gather_single(torch.zeros(4), torch.nn.Parameter(torch.ones(1)))

    error = fails(ranks, gather_what_autograd_follows)
    assert error.kind == "raised"
    assert "RuntimeError: A view was created in no_grad mode" in str(error)


def test_a_circle_of_sends_is_drawn(ranks):
    def send_first(rank):
        tensor = torch.ones(2)
        dist.send(tensor, (rank + 1) % 4)
        dist.recv(tensor, (rank - 1) % 4)

    error = fails(ranks, send_first)
    assert error.kind == "hang"
    assert "circle of waiting: 0 -> 1 -> 2 -> 3 -> 0" in str(error)
    assert [(w.rank, w.kind, w.waits_for) for w in error.waits] == [
        (rank, "send", ((rank + 1) % 4,)) for rank in range(4)
    ]
    assert all("dist.send(tensor, (rank + 1) % 4)" in wait.where for wait in error.waits)


def only_rank_0(rank):
    if rank == 0:
        dist.all_reduce(torch.ones(1))


def rank_3_leaves(rank):
    if rank != 3:
        dist.barrier()


def ddp_with_one_batch_more(rank):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    for _ in range(2 + (rank == 0)):
        model(torch.ones(1, 2)).sum().backward()


@pytest.mark.parametrize(
    ("hang", "says"),
    [
        (only_rank_0, "rank 0 waits in all_reduce for ranks 1, 2, 3"),
        (rank_3_leaves, "ranks 0, 1, 2 wait in barrier for rank 3"),
        (ddp_with_one_batch_more, "rank 0 waits in all_reduce for ranks 1, 2, 3"),
    ],
)
def test_a_hang_is_reported_with_who_waits_for_whom(ranks, hang, says):
    error = fails(ranks, hang)
    assert error.kind == "hang"
    assert says in str(error)
    assert "had returned" in str(error)


def test_results_and_exceptions_that_cannot_be_sent_say_so(ranks):
    class StubbornError(Exception):
        def __reduce__(self):
            raise TypeError("no")

        def __str__(self):
            raise TypeError("no")

    def stubborn(rank):
        raise StubbornError

    assert "a generator, which cannot be sent" in str(fails(ranks, lambda rank: (i for i in "ab")))
    assert "raised StubbornError: (its message cannot be read)" in str(fails(ranks, stubborn))


def test_exit_in_a_rank_is_a_failure_not_a_death(ranks):
    error = fails(ranks, lambda rank: sys.exit("enough"))
    assert error.failures[0] == ("SystemExit", "enough")


def test_a_rank_that_only_computes_is_not_called_hung(ranks):
    def slow(rank):
        if rank == 1:
            time.sleep(4)
        dist.barrier()
        return rank

    assert ranks.run(slow) == [0, 1, 2, 3]


def test_stop_names_every_rank_and_the_ranks_live_on(ranks):
    def forever(rank):
        if rank == 0:
            dist.recv(torch.ones(1), 1)
        while True:
            time.sleep(0.01)

    pressed = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    pressed.start()
    error = fails(ranks, forever)
    assert error.kind == "stopped"
    assert "rank 0 waits in recv for rank 1" in str(error)
    assert "rank 3 was computing" in str(error)


def test_no_rank_outlives_a_killed_kernel():
    script = (
        "from course_lib.ranks import Ranks\n"
        "import os, time\n"
        "ranks = Ranks(2)\n"
        "print(ranks.run(lambda rank: os.getpid()), flush=True)\n"
        "ranks.run(lambda rank: time.sleep(600))\n"
    )
    kernel = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in kernel.stdout.readline().strip("[]\n").split(",")]
    kernel.kill()
    kernel.wait()
    kernel.stdout.close()
    deadline = time.monotonic() + 5
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if is_running(pid)]


def test_an_interrupt_while_the_first_ranks_start_ends_neither_these_nor_the_next():
    script = (
        "import os, signal\n"
        "signal.signal(signal.SIGINT, lambda *_: None)\n"
        "from multiprocessing import forkserver\n"
        "from course_lib.ranks import Ranks\n"
        "from course_lib.ranks.fork_server import start_method\n"
        "start_method()\n"
        "server = forkserver._forkserver._forkserver_pid\n"
        "os.killpg(0, signal.SIGINT)  # as Stop and time limits do, here long before it is ready\n"
        "ranks = Ranks(2)\n"
        "os.killpg(0, signal.SIGINT)\n"
        "print(ranks.run(lambda rank: rank), forkserver._forkserver._forkserver_pid == server)\n"
        "ranks.close()\n"
    )
    words = [sys.executable, "-c", script]
    told = subprocess.run(words, capture_output=True, text=True, start_new_session=True)
    assert told.stdout == "[0, 1] True\n", told.stderr


def test_close_leaves_no_process_and_no_file():
    some = Ranks(2)
    pids = some.run(lambda rank: os.getpid())
    home = some._home
    some.close()
    assert not os.path.exists(home)
    assert not [pid for pid in pids if is_running(pid)]
    assert some.run(lambda rank: rank) == [0, 1]
    some.close()


def test_ranks_that_nobody_holds_any_more_end():
    some = Ranks(2)
    pids = some.run(lambda rank: os.getpid())
    home = some._home
    del some
    gc.collect()
    assert not os.path.exists(home)
    assert not [pid for pid in pids if is_running(pid)]
