"""What ranks meet outside of their own code: floods, full disks, stops, strays, killed kernels."""

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import tracemalloc
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from course_lib.core import CourseError
from course_lib.ranks import RankError, Ranks, scratch
from course_lib.ranks.output import HEAD_LINES, TAIL_LINES, Output
from tests.ranks.pools import fails, is_running


@pytest.fixture(scope="module")
def ranks():
    with Ranks(2) as two:
        yield two


@pytest.fixture
def ends(until):
    """Wait until these processes have ended: killed ones need a moment."""
    return lambda pids: until(lambda: not any(map(is_running, pids)), f"the end of {pids}")


def run_script(script, *before, **env):
    """Run a script in a process of its own; return what it printed, and its exit status."""
    done = subprocess.run(
        [*before, sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        env=os.environ | env,
    )
    return done.stdout + done.stderr, done.returncode


# -- output -------------------------------------------------------------------------------------


def test_a_flood_of_output_ends_the_ranks_before_it_is_read(ranks, monkeypatch, capsys, ends):
    def flood(rank):
        while True:
            os.write(1, b"again\n" * 10_000)

    pids, read = ranks.run(lambda rank: os.getpid()), []
    finish = Output.finish

    def watched(output, write=print):
        ends(pids)
        read.append(output.rank)
        finish(output, write)

    monkeypatch.setattr(Output, "finish", watched)
    with pytest.raises(RankError, match="printed more than 50 MiB; is it in a loop"):
        ranks.run(flood)
    assert read == [0, 1]
    shown = capsys.readouterr().out.splitlines()
    assert shown.count("[1] again") == HEAD_LINES + TAIL_LINES
    assert sum("more lines: ranks.output(1) has them all" in line for line in shown) == 1


def test_only_the_head_and_the_tail_of_a_long_output_are_in_memory(tmp_path):
    path, shown = tmp_path / "output", []
    path.touch()
    output = Output(str(path), 0)
    path.write_bytes(b"line\n" * 100)
    os.truncate(path, 300 * 2**20)  # and a line of zeros, which takes no room on the disk
    tracemalloc.start()
    output.finish(shown.append)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert shown[:HEAD_LINES] == ["[0] line"] * HEAD_LINES
    assert shown[HEAD_LINES] == "[0] ... 60 more lines: ranks.output(0) has them all"
    assert peak_bytes < 2**24


# -- disks --------------------------------------------------------------------------------------

SMALL_DISKS = """
    import os
    from course_lib.ranks import Ranks

    try:
        Ranks(2)
    except Exception as error:
        print(type(error).__name__, error)
    os.system(f"mount -o remount,size=8m {os.environ['TMPDIR']}")
    with Ranks(2) as ranks:
        try:
            ranks.run(lambda rank: print("x" * 10**7) if rank else None)
        except Exception as error:
            print(type(error).__name__, error)
        print(ranks.run(lambda rank: rank))
"""


def test_a_full_temporary_disk_is_told_and_kills_nobody(tmp_path):
    new_mounts = ["unshare", "--map-root-user", "--mount"]
    disk = f"mount -t tmpfs -o size=1m tmpfs {tmp_path}"
    if not shutil.which("unshare") or subprocess.call([*new_mounts, "sh", "-c", disk]):
        pytest.skip("this machine lets nobody mount a disk")
    shell = ["sh", "-c", f'{disk} && exec "$@"', "sh"]
    said, status = run_script(SMALL_DISKS, *new_mounts, *shell, TMPDIR=str(tmp_path))
    assert status == 0, said
    too_small, full, *_, works = (x for x in said.splitlines() if not x.startswith("[1] "))
    assert f"MachineError Ranks, {tmp_path}/ranks-" in too_small
    assert "bytes for temporary files; got: No space left on device (" in too_small
    assert "bytes are free). Try to set TMPDIR" in too_small
    assert f"RankError rank 1 raised OSError: Ranks, {tmp_path}/ranks-" in full
    assert "No space left on device (0 bytes are free). Try to set TMPDIR" in full
    assert works == "[0, 1]"


def test_a_folder_for_temporary_files_that_cannot_be_made_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(CourseError, match=r"/missing: need a folder .* Try to set TMPDIR"):
        Ranks(2)


def test_a_long_path_of_the_temporary_folder_works(tmp_path):
    home = tmp_path / ("long" * 40)
    home.mkdir()
    script = "from course_lib.ranks import Ranks\nprint(Ranks(2).run(lambda rank: rank))"
    assert run_script(script, TMPDIR=str(home)) == ("[0, 1]\n", 0)
    assert list(home.glob("ranks-*")) == []


def test_outside_of_notebooks_the_server_starts_with_the_first_ranks_and_has_what_is_loaded():
    script = (
        "import psutil, sys\n"
        "from course_lib.ranks import Ranks\n"
        "import course_lib.fsdp, course_lib.fsdp.pictures\n"
        "before = psutil.Process().children()\n"
        "names = ('course_lib.fsdp.mesh', 'course_lib.fsdp.pictures', 'matplotlib')\n"
        "print(before, Ranks(1).run(lambda rank: [name in sys.modules for name in names]))"
    )
    assert run_script(script) == ("[] [[True, False, False]]\n", 0)


@pytest.fixture
def short_path():
    """A temporary folder whose path is short enough for a socket in it."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def test_what_a_killed_kernel_leaves_is_removed_at_the_next_start(short_path):
    script = """
        import os, signal
        from course_lib.ranks import Ranks
        ranks = Ranks(2)
        ranks.run(print)
        print(sum("ranks-" in name for name in os.listdir(os.environ["TMPDIR"])), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    precious = short_path / "ranks-of-my-own"
    precious.mkdir()
    with_owner = scratch.make_folder(str(short_path))
    said, status = run_script(script, TMPDIR=str(short_path))
    assert said.splitlines()[-1] == "4"  # these two, one for sockets and one of the pool
    assert status == -signal.SIGKILL
    mine = scratch.make_folder(str(short_path))
    left = {str(path) for path in short_path.glob("*-*")}  # ranks-*, pymp-*
    assert left == {str(precious), with_owner.path, mine.path}
    with_owner.remove()
    mine.remove()
    assert list(short_path.glob("*-*")) == [precious]


def test_a_folder_that_is_taken_for_a_leftover_when_it_is_made_is_made_again(monkeypatch, tmp_path):
    """Another process sees it before its owner has locked it."""
    lock, taken = fcntl.flock, []

    def first_taken(file, flags):
        lock(file, flags)
        if not taken:
            taken.extend(tmp_path.iterdir())
            shutil.rmtree(taken[0])

    monkeypatch.setattr(fcntl, "flock", first_taken)
    made = scratch.make_folder(str(tmp_path))
    assert [str(path) for path in tmp_path.iterdir()] == [made.path]
    assert made.path != str(taken[0])
    made.remove()


# -- threads ------------------------------------------------------------------------------------


def test_calls_from_several_threads_take_turns(ranks):
    def echo(rank, number):
        print(number)
        dist.barrier()
        return number, rank

    results: dict[int, list] = {}

    def jobs(first):
        for number in range(first, first + 5):
            results[number] = ranks.run(echo, number)
            assert ranks.events is not None

    threads = [threading.Thread(target=jobs, args=(10 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    numbers = [10 * i + j for i in range(4) for j in range(5)]
    assert results == {n: [(n, 0), (n, 1)] for n in numbers}


# -- ranks that stop or run something else ------------------------------------------------------


def stop(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()


def stop_in_a_call_of_all(rank):
    work = dist.all_reduce(torch.ones(1), async_op=True)
    if rank == 1:
        time.sleep(1)  # the heartbeat sees this line
        os.kill(os.getpid(), signal.SIGSTOP)
    work.wait()
    dist.barrier()


def run_another_program(rank):
    if rank == 1:
        os.execv("/bin/sleep", ["sleep", "600"])
    dist.barrier()


def leave_a_child_with_the_pipes(rank):
    if rank == 1:
        if os.fork() == 0:
            time.sleep(600)
        os._exit(3)
    dist.barrier()


@pytest.mark.parametrize(
    ("end", "says"),
    [
        (stop, "rank 1 died: its process is stopped by a signal (SIGSTOP), and nothing"),
        (stop_in_a_call_of_all, "time.sleep(1)  # the heartbeat sees this line"),
        (run_another_program, "rank 1 died: its process runs another program now (os.exec...)"),
        (leave_a_child_with_the_pipes, "rank 1 died: its process ended with exit code 3"),
    ],
)
def test_a_rank_that_does_not_go_on_is_named(ranks, end, says):
    pids = ranks.run(lambda rank: os.getpid())
    error = fails(ranks, end)
    assert error.kind == "died"
    assert says in str(error)
    assert "rank 0 waits in" in str(error)
    assert "for rank 1" in str(error)
    assert not any(map(is_running, pids))


# -- what a rank starts -------------------------------------------------------------------------


def start_strays(rank, folder, die=False):
    """Leave a program and a fork in sessions of their own, whose parents have ended."""
    run = f"echo $$ > {folder}/program{rank}; exec sleep 600"
    subprocess.run(["sh", "-c", f"setsid env -i sh -c '{run}' &"], check=True)
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        Path(folder, f"fork{rank}").write_text(f"{os.getpid()}\n")
        time.sleep(600)
    while not all(_pid_in(folder, f"{kind}{rank}") for kind in ("program", "fork")):
        time.sleep(0.01)
    if die:
        os._exit(3)


def _pid_in(folder, name):
    with contextlib.suppress(FileNotFoundError, ValueError):
        return int(Path(folder, name).read_text())
    return None


def strays(folder):
    pids = [_pid_in(folder, f"{kind}{rank}") for kind in ("program", "fork") for rank in (0, 1)]
    assert all(pids)
    return pids


def test_what_a_rank_started_ends_with_the_pool(tmp_path, ends):
    with Ranks(2) as some, Ranks(1) as other:
        elsewhere = tmp_path / "other"
        elsewhere.mkdir()
        other.run(start_strays, elsewhere)
        kept = _pid_in(elsewhere, "program0"), _pid_in(elsewhere, "fork0")
        some.run(start_strays, tmp_path)
        some.close()
        ends(strays(tmp_path))
        assert all(map(is_running, kept))  # another pool's
        other.close()
        ends(kept)


def test_what_a_rank_started_ends_although_the_rank_died_by_itself(ranks, tmp_path, ends):
    error = fails(ranks, start_strays, tmp_path, True)
    assert error.kind == "died"
    ends(strays(tmp_path))


def test_what_a_rank_started_ends_although_the_kernel_has_a_rank_itself(tmp_path, ends):
    script = """
        import os
        from course_lib.ranks import RankError, Ranks, launch
        from tests.ranks.test_survival import start_strays
        launch(lambda rank: None)  # sets RANK, as torchrun does
        try:
            Ranks(2).run(start_strays, os.environ["STRAYS"], True)
        except RankError:
            print("died")
        pathlib.Path(os.environ["STRAYS"], "wait").touch()
        os.read(0, 1)  # the end of this process is not to end them
    """
    code = [sys.executable, "-c", textwrap.dedent(script)]
    env = os.environ | {"STRAYS": str(tmp_path)}
    with subprocess.Popen(code, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as kernel:
        assert kernel.stdout.readline() == b"died\n"
        ends(strays(tmp_path))
        kernel.stdin.close()


def test_an_orphan_whose_parent_ends_while_it_is_looked_for_is_ended_too():
    script = """
        import os, psutil, subprocess
        from course_lib.ranks import process_tree
        from tests.ranks.pools import is_running
        process_tree.adopt_orphans()
        fork = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True);"
        parent = subprocess.Popen(
            ["python", "-c", fork + "time.sleep(600)"], stdout=-1, start_new_session=True
        )
        child, look = int(parent.stdout.readline()), process_tree._descendants

        def looked_too_early(pids):
            parent.kill()  # its child is ours from now on, and no descendant of these any more
            parent.wait()
            return look(pids)

        process_tree._descendants = looked_too_early
        process_tree.end_orphans_of(os.getpid(), spare=set)
        os.waitpid(child, 0)  # hangs if it runs
        print("ended", is_running(child))
    """
    assert run_script(script) == ("ended False\n", 0)


def test_a_process_with_the_pid_of_an_old_one_is_ended_too():
    script = """
        import os, psutil, subprocess
        from course_lib.ranks.process_tree import end_descendants
        child = subprocess.Popen(["sleep", "600"])
        old = psutil.Process(child.pid)
        old._ident = (child.pid, 0.0)
        list(psutil.process_iter())
        psutil._pmap[child.pid] = old  # psutil remembers processes from one listing to the next
        end_descendants([os.getpid()])
        try:
            print(child.wait(9))
        finally:
            child.kill()
    """
    assert run_script(script) == (f"{-signal.SIGKILL}\n", 0)


def test_what_a_rank_started_ends_with_a_killed_kernel(tmp_path, ends):
    script = """
        import os, signal, sys
        from course_lib.ranks import Ranks
        from tests.ranks.test_survival import start_strays
        Ranks(2).run(start_strays, os.environ["STRAYS"])
        os.kill(os.getpid(), signal.SIGKILL)
    """
    said, status = run_script(script, STRAYS=str(tmp_path))
    assert status == -signal.SIGKILL, said
    ends(strays(tmp_path))
