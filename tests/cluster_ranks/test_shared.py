"""All pools of a notebook share one allocation, and each world is spread over its nodes."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from course_lib.core import default_place as module
from course_lib.core.default_place import default_place
from course_lib.core.links import Link
from course_lib.ranks import RankError, Ranks
from tests.cluster_ranks.lesson_cells import ON_CLUSTER, run_cells

SSH = '#!/bin/sh\nshift\nexec sh -c "$*"\n'  # ssh HOST WORDS, here


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A kernel whose ranks are on two hosts, which are this machine."""
    path = tmp_path / "ssh"
    path.write_text(SSH)
    path.chmod(0o755)
    monkeypatch.setenv("COURSE_SSH", str(path))
    monkeypatch.setenv(module.PLACE, "ssh:localhost,localhost")
    module._first.cache_clear()
    yield
    default_place().allocation.close()
    module._first.cache_clear()


def sum_and_place(rank: int) -> tuple[float, str, str]:
    dist.all_reduce(total := torch.tensor([10.0**rank]))
    return total.item(), os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]


def fail(rank: int) -> None:
    raise ValueError(f"on {rank}")


def test_pools_of_any_size_take_turns_on_one_allocation(kernel, capsys):
    wire = Link(latency_s=1.0, bytes_per_s=1.0)
    four, three, one = Ranks(4), Ranks(3, link=wire), Ranks(1)
    assert four.run(sum_and_place) == [(1111.0, local, "2") for local in "0101"]
    server = default_place().allocation.place.links[0].channel
    assert three.run(sum_and_place) == [(111.0, "0", "2"), (111.0, "1", "2"), (111.0, "0", "1")]
    assert capsys.readouterr().out.count("Not emulated: link") == 1
    assert one.run(sum_and_place) == [(1.0, "0", "1")]
    assert three.events == []  # its ranks are gone
    with pytest.raises(RankError, match="on 0"):
        four.run(fail)
    del one
    gc.collect()
    assert four.run(sum_and_place)[3] == (1111.0, "1", "2")
    assert {event.rank for event in four.events} == {0, 1, 2, 3}
    assert default_place().allocation.place.links[0].channel is server  # asked for once
    assert default_place().name == "cluster (2 nodes, gloo)"
    with Ranks(2, cluster="laptop") as here:
        assert here.run(sum_and_place) == [(11.0, local, "2") for local in "01"]


@pytest.mark.parametrize("lesson", ON_CLUSTER)
def test_every_cell_of_a_lesson_passes_on_an_allocation(slurm, lesson):
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    passed, failures, notebook = run_cells(
        lesson, os.environ | {module.PLACE: "slurm:2", "PATH": path}
    )
    assert not failures, "\n".join(failures)
    assert passed > 30
    assert "Slurm job" in str(notebook.cells)
