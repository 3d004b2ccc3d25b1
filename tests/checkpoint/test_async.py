"""save_async: the copy is what was there when it was called, and nobody's messages are mixed."""

import subprocess
import sys
import threading
from types import SimpleNamespace

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from course_lib.checkpoint import (
    all_checkpoints,
    latest,
    load,
    pending,
    read_tensor,
    save,
    save_async,
    saving,
)
from course_lib.checkpoint.saving import Saving
from course_lib.core import CourseError
from tests.checkpoint import engines
from tests.checkpoint.engines import Engine

for module in (engines, sys.modules[__name__]):
    cloudpickle.register_pickle_by_value(module)


@pytest.fixture
def held(monkeypatch):
    """An event; until it is set, no thread writes a byte."""
    go, write = threading.Event(), saving.write_tensors

    def wait_and_write(*args):
        assert go.wait(60)
        return write(*args)

    monkeypatch.setattr(saving, "write_tensors", wait_and_write)
    yield go
    go.set()
    pending._PENDING.clear()


def test_the_next_step_does_not_change_what_is_saved(tmp_path, held):
    engine = Engine("plain")
    engine.step(0)
    save_now = {name: x.clone() for name, x in engine.model.state_dict().items()}
    moments = [x["exp_avg"].clone() for x in engine.optimizer.state.values()]
    waiting = save_async(engine.state, tmp_path, step=1)
    assert not waiting.done()
    assert latest(tmp_path) is None
    engine.step(1)  # while the thread has not written anything
    held.set()
    found = waiting.wait()
    assert waiting.done()
    assert found.step == latest(tmp_path).step == 1
    for name, x in save_now.items():
        assert torch.equal(read_tensor(found, f"model.{name}"), x), name
    assert not torch.equal(engine.model.state_dict()["norm.weight"], save_now["norm.weight"])
    other = Engine("plain", seed=9)
    load(other.state, tmp_path)
    for x, moment in zip(other.optimizer.state.values(), moments, strict=True):
        assert torch.equal(x["exp_avg"], moment)


def test_the_times_are_those_of_copying_and_of_writing(tmp_path, held, monkeypatch):
    """By a clock of our own: called at 10, copied at 12, written at 18."""
    now, write = {"s": 10.0}, saving.write_tensors

    def written_at_18(*args):
        found = write(*args)
        now["s"] = 18.0
        return found

    clock = SimpleNamespace(perf_counter=lambda: now["s"])
    monkeypatch.setattr(saving, "write_tensors", written_at_18)
    monkeypatch.setattr(saving, "time", clock)
    monkeypatch.setattr(pending, "time", clock)
    monkeypatch.setattr(saving.Saving, "stage", lambda _: now.update(s=12.0))
    waiting = save_async({"x": torch.zeros(3)}, tmp_path, step=1)
    assert waiting.blocked_s == 2.0
    now["s"] = 14.0
    assert waiting.write_s == 2.0
    held.set()
    waiting.wait()
    now["s"] = 30.0  # it has long ended
    assert waiting.write_s == 6.0


@pytest.mark.parametrize("then", ["save", "save_async", "load"])
def test_whatever_comes_next_waits_for_the_pending_save(tmp_path, held, then):
    numbers = torch.zeros(3)
    first = save_async({"x": numbers}, tmp_path, step=1)
    found, seen = [], []

    def next_call():
        if then == "load":
            found.append(load({"x": numbers}, tmp_path).step)
        elif then == "save":
            found.append(save({"x": numbers}, tmp_path, step=2).step)
        else:
            found.append(save_async({"x": numbers}, tmp_path, step=2).wait().step)

    thread = threading.Thread(target=next_call)
    thread.start()
    thread.join(0.2)
    seen.append((thread.is_alive(), first.done(), found[:]))
    held.set()
    thread.join(60)
    assert seen == [(True, False, [])]
    assert found == [1 if then == "load" else 2]
    assert [one.step for one in all_checkpoints(tmp_path)] == ([1] if then == "load" else [2, 1])


def test_an_error_of_the_thread_is_told_by_wait_and_by_the_next_save(tmp_path, capsys):
    blocked = tmp_path / "file"
    blocked.write_text("")
    for tells in ("wait", "save"):
        failed = save_async({"x": torch.zeros(3)}, blocked / "inside", step=1)
        with pytest.raises(CourseError, match="need room and permission for a checkpoint"):
            failed.wait() if tells == "wait" else save({"x": torch.zeros(3)}, tmp_path, step=1)
        assert capsys.readouterr().err.startswith("save_async: save: need room and permission")
    save({"x": torch.zeros(3)}, tmp_path / "good", step=1)  # told once


END = """
import sys, threading, torch
from course_lib.checkpoint import save_async, saving
write, main = saving.write_tensors, threading.main_thread()
def late(*args):
    main.join()  # the program's last line has run
    return write(*args)
saving.write_tensors = late
save_async({"x": torch.arange(3)}, sys.argv[1], step=1)
"""


def test_a_process_that_ends_normally_waits_for_what_is_pending(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", END, str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert read_tensor(latest(tmp_path), "x").tolist() == [0, 1, 2]


def train_on(rank, folder):
    """Every step is saved while the next ones communicate; the losses, and if groups were kept."""
    engine, losses = Engine("fsdp"), []
    for step in range(6):
        losses.append(engine.step(step, seed=rank))
        if step % 2:
            saved = save_async(engine.state, f"{folder}/async", step=step + 1, keep=2)
    saved.wait()
    two = dist.new_group([1, 2])
    if rank in (1, 2):
        state = {"x": torch.full((3,), 7)}
        save_async(state, f"{folder}/part", step=1, group=two).wait()
    save(engine.state, f"{folder}/sync", step=6)
    return losses, len(pending._OWN)


def test_training_goes_on_beside_the_saves_of_a_world(pools, tmp_path):
    found = pools(4).run(train_on, tmp_path)
    beside, after = latest(tmp_path / "async"), latest(tmp_path / "sync")
    assert [one.step for one in all_checkpoints(tmp_path / "async")] == [6, 4]
    for name in after.manifest.tensors:
        assert torch.equal(read_tensor(beside, name), read_tensor(after, name)), name
    assert [groups for _, groups in found] == [1, 2, 2, 1], "one group of its own for each group"
    assert read_tensor(latest(tmp_path / "part"), "x").tolist() == [7, 7, 7]


def cannot_copy(rank, folder):
    """What each rank hears where rank 1 has no memory for its copy."""
    if rank == 1:
        Saving.stage = lambda self: (_ for _ in ()).throw(MemoryError("no room"))
    try:
        save_async({"x": torch.ones(4)}, folder, step=1)
    except (CourseError, MemoryError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_a_rank_that_cannot_copy_ends_the_save_of_all(pools, tmp_path):
    first, second = pools(2).run(cannot_copy, tmp_path)
    assert "rank 1: MemoryError: no room" in first
    assert second == "MemoryError: no room"
    assert latest(tmp_path) is None
