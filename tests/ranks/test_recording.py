"""What the recorder sees: every call, whoever makes it; and the same function under torchrun."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.distributed as dist

from course_lib.core import CourseError, RunRecord
from course_lib.core.records import read_runs
from course_lib.ranks import RankError, Ranks, record, span


@pytest.fixture(scope="module")
def ranks():
    with Ranks(2) as two:
        yield two


def calls(ranks, rank=0):
    """(kind, bytes) of a rank's calls in the last job, without its waits."""
    return [(e.kind, e.num_bytes) for e in ranks.events if e.rank == rank and e.kind != "wait"]


def all_collectives(rank):
    x, one = torch.ones(2), torch.ones(1)
    pair = [torch.ones(1), torch.ones(1)]
    dist.all_reduce(x)
    dist.broadcast(x, 1)
    dist.reduce(x, 1)
    dist.all_gather(pair, one)
    dist.all_gather_single(x, one)
    dist.reduce_scatter(one, pair)
    dist.reduce_scatter_single(one, x)
    dist.scatter(one, pair if rank == 1 else None, src=1)
    dist.gather(one, pair if rank == 1 else None, dst=1)
    dist.all_to_all_single(torch.ones(2), x)
    dist.barrier()


def test_every_collective_is_recorded_with_the_bytes_of_the_whole_tensor(ranks):
    ranks.run(all_collectives)
    assert calls(ranks) == [
        ("all_reduce", 8),
        ("broadcast", 8),
        ("reduce", 8),
        ("all_gather", 8),
        ("all_gather", 8),
        ("reduce_scatter", 8),
        ("reduce_scatter", 8),
        ("scatter", 8),
        ("gather", 8),
        ("all_to_all", 8),
        ("barrier", 0),
    ]
    assert all(event.group == (0, 1) for event in ranks.events if event.kind != "wait")
    assert {e.peer for e in ranks.events if e.kind in ("broadcast", "scatter", "gather")} == {1}


def test_sends_know_their_peer_and_all_ranks_share_a_clock(ranks):
    def pass_on(rank):
        x = torch.ones(3)
        if rank == 0:
            dist.isend(x, 1).wait()
        else:
            dist.irecv(x, 0).wait()

    ranks.run(pass_on)
    send, recv = (next(e for e in ranks.events if e.kind == kind) for kind in ("send", "recv"))
    assert (send.rank, send.peer, send.num_bytes) == (0, 1, 12)
    assert (recv.rank, recv.peer, recv.num_bytes) == (1, 0, 12)
    assert min(event.start_s for event in ranks.events) == 0
    assert recv.end_s > send.start_s


def test_a_receive_from_anyone_tells_who_it_was(ranks):
    def from_anyone(rank):
        x = torch.full((2,), 10.0)
        return dist.recv(x) if rank == 0 else dist.send(x, 0)

    assert ranks.run(from_anyone)[0] == 1


def test_a_receive_from_anyone_may_be_waited_for_twice(ranks):
    def twice(rank):
        x = torch.full((2,), 10.0**rank)
        if rank:
            return dist.send(x, 0)
        work = dist.irecv(x)
        return [work.wait() for _ in range(2)], x.tolist()

    assert ranks.run(twice)[0] == ([True, True], [10.0, 10.0])


def test_a_message_to_anyone_counts_for_those_to_a_rank_that_come_later(ranks):
    def first_anyone_then_rank_1(rank):
        x, y = torch.full((2,), 10.0), torch.ones(3)
        if rank == 0:
            return dist.recv(x), dist.recv(y, 1)
        dist.send(x, 0)
        dist.send(y, 0)
        return None

    assert ranks.run(first_anyone_then_rank_1)[0] == (1, 1)


def test_ddp_fsdp_and_dtensor_are_recorded(ranks):
    def ddp(rank):
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        model(torch.ones(1, 4)).sum().backward()

    def fsdp(rank):
        from torch.distributed.fsdp import fully_shard

        model = torch.nn.Linear(4, 4)
        fully_shard(model)
        model(torch.ones(1, 4)).sum().backward()

    def dtensor(rank):
        from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

        mesh = init_device_mesh("cpu", (2,))
        distribute_tensor(torch.arange(8.0), mesh, [Shard(0)]).full_tensor()

    ranks.run(ddp)
    assert ("all_reduce", 80) in calls(ranks)
    ranks.run(fsdp)
    assert [call for call in calls(ranks) if call[0] in ("all_gather", "reduce_scatter")] == [
        ("all_gather", 80),
        ("all_gather", 80),
        ("reduce_scatter", 80),
    ] or ("reduce_scatter", 80) in calls(ranks)
    ranks.run(dtensor)
    assert ("all_gather", 32) in calls(ranks)


def test_a_call_is_on_record_when_whoever_waited_for_its_future_goes_on(ranks):
    def lost_steps(rank):
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        lost = 0
        for _ in range(300):
            with record() as log:
                model(torch.ones(1, 4)).sum().backward()
            lost += [event.kind for event in log.events if event.num_bytes].count("all_reduce") != 1
        return lost

    assert ranks.run(lost_steps) == [0, 0]


def test_a_call_that_gloo_has_no_future_for_is_recorded_when_it_is_waited_for(ranks):
    def scattered(rank):
        out = torch.empty(2)
        with record() as log:
            dist.reduce_scatter_single(out, torch.arange(4.0), async_op=True).wait()
        return out.tolist(), [(event.kind, event.num_bytes) for event in log.events][:1]

    found = ranks.run(scattered)
    assert found == [([0, 2], [("reduce_scatter", 16)]), ([4, 6], [("reduce_scatter", 16)])]


def test_subgroups_are_recorded_by_their_world_ranks():
    def in_pairs(rank):
        pairs = [dist.new_group([0, 2]), dist.new_group([1])]
        if rank != 1:
            dist.broadcast(torch.ones(1), 2, group=pairs[0])

    with Ranks(3) as three:
        three.run(in_pairs)
        found = [e for e in three.events if e.kind == "broadcast"]
    assert [(e.rank, e.group, e.peer) for e in sorted(found, key=lambda e: e.rank)] == [
        (0, (0, 2), 2),
        (2, (0, 2), 2),
    ]


def test_spans_waits_and_recordings_are_events(ranks):
    def work(rank):
        with record() as log:
            with span("forward", "F0"):
                torch.ones(10).sum()
            dist.all_reduce(torch.ones(1))
        return [(event.kind, event.label) for event in log.events if event.kind != "wait"]

    assert (
        ranks.run(work) == [[("forward", "F0"), ("all_reduce", "all_reduce(sum) float32 [1]")]] * 2
    )
    assert any(event.kind == "wait" for event in ranks.events)


def test_events_belong_to_the_last_job_only(ranks):
    ranks.run(all_collectives)
    ranks.run(lambda rank: None)
    assert ranks.events == []


def test_record_needs_a_rank():
    with pytest.raises(CourseError, match="record: need a rank"), record():
        pass


def test_a_span_outside_of_ranks_does_no_harm():
    with span("forward"):
        total = sum(range(3))
    assert total == 3


# -- torchrun -----------------------------------------------------------------------------------

SCRIPT = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from course_lib.ranks import launch

def main(rank, *args):
    mode = sys.argv[2]
    if mode == "fine":
        from torch.distributed.nn import functional  # as PyTorch itself does, sooner or later
        holder = [dist.group.WORLD]
        holder.append(holder)  # a circle, as models and their hooks make it
    if mode == "hang" and rank == 0:
        dist.recv(torch.ones(1), 1)
    if mode == "mismatch":
        dist.all_reduce(torch.ones(4 + rank))
    if mode == "drop" and rank == 1:
        dist.irecv(torch.ones(1), 0)
    if mode == "early" and rank == 1:
        return
    x = torch.tensor([10.0 ** rank])
    dist.all_reduce(x)
    print(f"sum {x.item():.0f}", flush=True)

if __name__ == "__main__":
    launch(main, record_to=sys.argv[1])
    threads = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    print(f"threads of gloo: {sum('gloo' in name for name in threads)}", flush=True)
"""


def run_script(tmp_path, mode, world_size):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable]
    if world_size > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        command += ["--nproc-per-node", str(world_size)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, str(script), str(tmp_path / "runs"), mode],
        capture_output=True, text=True, timeout=90, env=environment,
    )  # fmt: skip


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_same_function_runs_under_torchrun_and_leaves_records(tmp_path, world_size):
    done = run_script(tmp_path, "fine", world_size)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("threads of gloo: 0") == world_size  # they may not outlive Python
    assert done.stdout.count("sum " + "1" * world_size) == world_size
    runs = read_runs(tmp_path / "runs")
    assert [(run.rank, run.world_size) for run in runs] == [
        (r, world_size) for r in range(world_size)
    ]
    assert all("all_reduce" in {event.kind for event in run.events} for run in runs)
    assert runs[0].machine["cores"] == os.cpu_count()


def test_a_hang_under_torchrun_ends_with_the_same_report(tmp_path):
    done = run_script(tmp_path, "hang", 2)
    assert done.returncode != 0
    assert "hang: nothing can move any more" in done.stderr
    assert "rank 0 waits in recv for rank 1" in done.stderr
    assert "rank 1 waits in all_reduce for rank 0" in done.stderr


def test_a_mismatch_under_torchrun_is_named(tmp_path):
    done = run_script(tmp_path, "mismatch", 2)
    assert done.returncode != 0
    assert "all_reduce(sum) float32 [4]" in done.stderr
    assert "all_reduce(sum) float32 [5]" in done.stderr


def test_a_rank_that_returns_early_under_torchrun_is_named(tmp_path):
    done = run_script(tmp_path, "early", 2)
    assert done.returncode != 0
    assert "rank 1 had returned: the barrier is the one at the end of launch()" in done.stderr


def test_a_receive_that_never_arrives_under_torchrun_is_told_and_holds_no_rank_back(tmp_path):
    done = run_script(tmp_path, "drop", 2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("threads of gloo: 0") == 2
    assert "orphan: rank 1 calls recv float32 [1] 0->1, and the other end" in done.stderr
    assert "dist.irecv(torch.ones(1), 0)" in done.stderr


# -- the cell magic -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shell():
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "course_lib.ranks")
    yield shell
    shell.user_ns["ranks"].close()
    InteractiveShell.clear_instance()


def test_a_ranks_cell_keeps_its_names_and_prints_by_rank(shell, capsys):
    shell.run_cell_magic("ranks", "", "mine = rank * 10\nprint('of', world_size)")
    shell.run_cell_magic("ranks", "", "mine + 1")
    assert capsys.readouterr().out.splitlines() == [
        *(f"[{rank}] of 4" for rank in range(4)),
        *(f"[{rank}] {rank * 10 + 1}" for rank in range(4)),
    ]


def test_a_line_puts_other_ranks_in_their_place(shell, capsys):
    before = shell.user_ns["ranks"]
    made = shell.run_line_magic("ranks", "start 2")
    assert shell.user_ns["ranks"] is made is not before
    shell.run_cell_magic("ranks", "", "print(world_size)")
    assert capsys.readouterr().out == "[0] 2\n[1] 2\n"
    for line, got in (("stop", "invalid choice: 'stop'"), ("start two", "'two'")):
        with pytest.raises(CourseError, match=f"%ranks: need start .*{got}"):
            shell.run_line_magic("ranks", line)
    shell.run_line_magic("ranks", "close")
    shell.run_line_magic("ranks", "start 4")


def test_a_ranks_cell_that_fails_shows_its_line(shell):
    with pytest.raises(RankError) as caught:
        shell.run_cell_magic("ranks", "", "x = 1\nif rank == 2:\n    x / 0\n")
    assert "rank 2 raised ZeroDivisionError: division by zero\n    cell line 4: x / 0" in str(
        caught.value
    )


def test_a_syntax_error_in_a_ranks_cell_is_one_error(shell):
    with pytest.raises(RankError, match="ranks 0, 1, 2, 3 raised SyntaxError"):
        shell.run_cell_magic("ranks", "", "x = = 1")


def test_ranks_cells_run_on_a_pool_by_name(shell, capsys):
    with Ranks(2) as two:
        shell.user_ns["two"] = two
        shell.run_cell_magic("ranks", "two", "world_size")
    assert capsys.readouterr().out == "[0] 2\n[1] 2\n"
    with pytest.raises(CourseError, match="need a variable that holds ranks; 'three' does not"):
        shell.run_cell_magic("ranks", "three", "1")


def test_push_gives_cells_a_copy(shell, capsys):
    shell.user_ns["ranks"].push(batch=torch.arange(2))
    shell.run_cell_magic("ranks", "", "int(batch.sum()) + rank")
    assert capsys.readouterr().out == "[0] 1\n[1] 2\n[2] 3\n[3] 4\n"


def test_records_are_json_lines(ranks, tmp_path):
    ranks.run(all_collectives)
    mine = [event for event in ranks.events if event.rank == 0]
    path = RunRecord(rank=0, world_size=2, events=mine).write(tmp_path / "rank0.jsonl")
    assert all(json.loads(line)["line"] for line in path.read_text().splitlines())
    assert RunRecord.read(path).events == mine
