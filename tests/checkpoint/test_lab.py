"""The lab of checkpoints: ranks die where it says, and what is measured is what it says."""

import sys
import time
from dataclasses import replace

import cloudpickle
import pytest
import torch

from course_lib.checkpoint import cost, lab, latest, save
from course_lib.checkpoint.explorer import FailureLab
from course_lib.checkpoint.power_cut import EmulatedDisk, cuts
from course_lib.core import CourseError, Link
from course_lib.ranks import RankError, Ranks
from course_lib.train.trainer import train
from tests.train.training_runs import EXACT

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def parts(rank, folder):
    """Save three times, a tensor of each rank."""
    for step in (1, 2, 3):
        save({"mine": {rank: torch.full((2,), step)}}, folder, step=step)


def test_a_killed_rank_dies_in_the_middle_of_the_save_that_is_told(pools, tmp_path):
    pools(2).run(lab.die_in_save, 1, 4, parts, tmp_path / "whole")
    assert latest(tmp_path / "whole").step == 3
    with pytest.raises(RankError, match="rank 1 died"):
        pools(2).run(lab.die_in_save, 1, 2, parts, tmp_path)
    assert latest(tmp_path).step == 1
    (left,) = (tmp_path / "step-00000002").glob("*r00001*")
    assert left.read_bytes() == b"a part of the data"


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
    (kept,) = (event.duration_s for event in found.events if event.kind == "wait")
    assert 0 < kept <= found.blocked_s


def test_checkpoints_are_counted(pools):
    stopped_s, count = pools(2).run(lab.extra_time, 4, num_steps=10, step_s=0.0, mb=1)[0]
    assert count == 2
    assert stopped_s > 0


def test_dcp_beside_ours_saves_as_many_bytes(pools, tmp_path):
    ours, theirs = pools(2).run(lab.beside_dcp, str(tmp_path))[0].values()
    assert ours.num_bytes == pytest.approx(theirs.num_bytes, rel=0.5)
    assert min(ours.num_files, theirs.num_files) >= 3


def test_a_killed_rank_comes_back_without_buttons():
    config = replace(EXACT, strategy="ddp", steps=100, save_every=5, out="")
    failure_lab = FailureLab(train, config)
    failure_lab.start()
    while not failure_lab.pids:
        time.sleep(0.05)
    failure_lab.kill(1)
    log = failure_lab.wait()
    assert sum("You kill rank 1" in line for line in log) == 1
    assert sum("rank 1 died" in line for line in log) == 1
    assert log[-1] == "Done: step 100 is reached."


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
