"""What is installed, and in which version; and whether a process knows its place on its node."""

import importlib.metadata
import re
import sys

import pytest
import torch.distributed as dist

from course_lib.core import CourseError, MeshError
from course_lib.frameworks import engine, missing
from course_lib.frameworks.engine import PACKAGES, in_world, same_minor


def test_a_folder_named_megatron_is_not_megatron_core(monkeypatch, tmp_path):
    (tmp_path / "megatron").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "megatron", raising=False)
    assert engine.find_spec("megatron")
    assert "need megatron-core 0.16.1; it is not installed here" in missing("megatron.core")


@pytest.mark.parametrize("found", ["0.15.3", "0.17.0", "1.16.1", "0.16"])
def test_only_another_patch_of_megatron_core_is_accepted(monkeypatch, found):
    monkeypatch.setattr(engine, "version", lambda name: found)
    if found == "0.16":
        return same_minor("megatron.core", "here")
    said = f"here: need megatron-core 0.16.1, for which the engine is written; got {found}. Try pip"
    with pytest.raises(CourseError, match=re.escape(said)) as told:
        same_minor("megatron.core", "here")
    assert len(str(told.value).splitlines()) == 1


def test_a_version_that_nobody_knows_is_told(monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(engine, "version", version)
    with pytest.raises(
        CourseError, match=f"need megatron-core {PACKAGES['megatron.core'].version}"
    ):
        same_minor("megatron.core", "here")


@pytest.mark.parametrize(
    ("unset", "says"),
    [
        (["LOCAL_RANK"], "LOCAL_RANK is not set"),
        (["LOCAL_WORLD_SIZE"], "LOCAL_WORLD_SIZE is not set"),
        (["LOCAL_RANK", "LOCAL_WORLD_SIZE"], "LOCAL_RANK and LOCAL_WORLD_SIZE are not set"),
    ],
)
def test_a_rank_without_a_place_on_its_node_is_told(monkeypatch, unset, says):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    in_world("here")
    for name in unset:
        monkeypatch.delenv(name)
    with pytest.raises(MeshError, match=f"here: need ranks that know .* {says}. Try torchrun"):
        in_world("here")
