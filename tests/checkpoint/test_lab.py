"""The lab of checkpoints: killed runs continue bit for bit; what is measured is what it says."""

import shutil
import time

import pytest

from course_lib.checkpoint import all_checkpoints, cost, lab, latest
from course_lib.checkpoint.explorer import FailureLab
from course_lib.checkpoint.power_cut import EmulatedDisk, cuts
from course_lib.core import CourseError, Link
from course_lib.ranks import RankError, Ranks

STEPS = 8


@pytest.fixture(scope="module")
def whole(pools, tmp_path_factory):
    """The losses of a run on 2 ranks that never stopped, and its checkpoints."""
    folder = str(tmp_path_factory.mktemp("whole"))
    return pools(2).run(lab.train, folder, STEPS, every=3)[0], folder


@pytest.mark.parametrize("kill", [lab.Kill(1, 4), lab.Kill(0, 5, while_saving=True)])
def test_a_killed_run_continues_bit_for_bit(pools, whole, tmp_path, kill):
    folder = str(tmp_path)
    with pytest.raises(RankError, match=f"rank {kill.rank} died"):
        pools(2).run(lab.train, folder, STEPS, every=3, kill=kill)
    assert latest(folder).step == 3, "at most one interval is lost"
    continued = pools(2).run(lab.train, folder, STEPS, every=3)[0]
    assert continued == {step: loss for step, loss in whole[0].items() if step >= 3}
    assert [one.step for one in all_checkpoints(folder)] == [6, 3]


@pytest.mark.parametrize("strategy", lab.STRATEGIES)
def test_another_strategy_and_size_goes_on(pools, whole, tmp_path, strategy):
    losses, folder = whole
    shutil.copytree(folder, tmp_path / "copy")
    found = pools(4).run(lab.train, str(tmp_path / "copy"), STEPS, every=3, strategy=strategy)[0]
    assert found == pytest.approx({step: losses[step] for step in (6, 7)}, rel=1e-4)


def test_every_rank_writes_while_none_gathers():
    link = Link(name="slow", latency_s=1e-3, bytes_per_s=40e6)
    with Ranks(2, link=link) as ranks:
        saves = lab.measure_saves(ranks, 2**20, 40e6)
    gathers = [event for event in saves["through rank 0"] if event.kind == "gather"]
    writers = {
        name: sorted((e.rank, e.num_bytes) for e in events if e.label == "write")
        for name, events in saves.items()
    }
    assert len(gathers) == 2
    assert writers == {"through rank 0": [(0, 2**20)], "every rank": [(0, 2**19), (1, 2**19)]}
    assert lab.duration_s(saves["every rank"]) >= cost.save_s_sharded(2**20, 2, 40e6)


def test_an_async_save_writes_beside_the_steps(pools):
    found = pools(2).run(lab.measure_overlap, 2**20, asynchronous=True, num_steps=4)[0]
    kinds = [event.kind for event in found.events]
    assert kinds.count("write") == 1
    assert kinds.count("wait") == 1
    assert 0 <= found.hidden_s <= found.write_s


def test_checkpoints_are_counted(pools):
    stopped_s, count = pools(2).run(lab.extra_time, 4, num_steps=10, step_s=0.0, mb=1)[0]
    assert count == 2
    assert stopped_s > 0


def test_dcp_beside_ours_saves_as_many_bytes(pools, tmp_path):
    ours, theirs = pools(2).run(lab.beside_dcp, str(tmp_path))[0].values()
    assert ours.num_bytes == pytest.approx(theirs.num_bytes, rel=0.5)
    assert min(ours.num_files, theirs.num_files) >= 3


def test_a_killed_rank_comes_back_without_buttons():
    failure_lab = FailureLab(num_steps=6, every=2, step_s=0.2)
    failure_lab.start()
    while not failure_lab.pids:
        time.sleep(0.05)
    failure_lab.kill(1)
    log = failure_lab.wait()
    assert sum("You kill rank 1" in line for line in log) == 1
    assert sum("rank 1 died" in line for line in log) == 1
    assert log[-1] == "Done: step 6 is reached."


# --- the emulated disk


def left_by(disk):
    return {tuple(sorted(cut.files.items())) for cut in cuts(disk.before, disk.operations)}


def test_a_synced_rename_is_old_or_new():
    disk = EmulatedDisk({"a": b"old!"})
    disk.write("b", b"new!")
    disk.sync("b")
    disk.rename("b", "a")
    disk.sync_names()
    assert {dict(files)["a"] for files in left_by(disk)} == {b"old!", b"new!"}
    assert disk.files == {"a": b"new!"}


def test_what_is_not_synced_is_torn_by_a_power_cut():
    disk = EmulatedDisk()
    disk.write("b", b"new!")
    disk.rename("b", "a")
    disk.sync_names()
    assert (("a", b"ne"),) in left_by(disk)


def test_a_removed_name_comes_back_until_names_are_synced():
    disk = EmulatedDisk({"a": b"1", "b": b"2"})
    disk.remove("a")
    assert (("a", b"1"), ("b", b"2")) in {
        tuple(sorted(cut.files.items())) for cut in cuts(disk.before, disk.operations)
        if cut.done == 1
    }  # fmt: skip
    with pytest.raises(CourseError, match="remove: need a file that is there; got 'a'"):
        disk.remove("a")


def test_a_power_cut_undoes_names_of_one_folder_and_keeps_those_of_another():
    disk = EmulatedDisk({"old/manifest": b"1", "new/tmp": b"2"})
    disk.rename("new/tmp", "new/manifest")
    disk.remove("old/manifest")
    assert (("new/tmp", b"2"),) in left_by(disk)
    disk.sync_names()
    assert {tuple(cut.files) for cut in cuts(disk.before, disk.operations) if cut.done == 3} == {
        ("new/manifest",)
    }
