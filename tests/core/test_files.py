"""A file is written whole or not at all."""

import os
from pathlib import Path

import pytest

from course_lib.core.errors import CourseError
from course_lib.core.files import check_result_path, whole_file, write_result, write_whole


def test_bytes_and_text_are_written_and_folders_made(tmp_path):
    path = tmp_path / "a" / "b" / "notes.txt"
    assert write_whole(path, "größer\n") == path
    assert path.read_bytes() == "größer\n".encode()
    write_whole(str(path), b"\x00\x01")
    assert path.read_bytes() == b"\x00\x01"
    assert list(path.parent.iterdir()) == [path]


def stopped(path, **options):
    with whole_file(path, **options) as file:
        file.write(b"half of the new")
        file.flush()
        assert path.read_text() == "old"
        raise ValueError("stop")


@pytest.mark.parametrize("options", [{}, {"sync": True}, {"one_writer": True}])
def test_what_fails_in_the_middle_leaves_the_old_file_and_nothing_else(tmp_path, options):
    path = tmp_path / "state"
    write_whole(path, "old")
    with pytest.raises(ValueError, match="stop"):
        stopped(path, **options)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_two_processes_write_beside_each_other_and_one_writer_reuses_its_name(tmp_path):
    path = tmp_path / "state"
    with whole_file(path):
        (shared,) = tmp_path.iterdir()
    with whole_file(path, one_writer=True):
        (alone,) = (one for one in tmp_path.iterdir() if one != path)
    assert str(os.getpid()) in shared.name
    assert alone.name == ".state.tmp"


def test_only_sync_waits_for_the_disk(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    write_whole(tmp_path / "state", "quick")
    assert synced == []
    with whole_file(tmp_path / "state", sync=True) as file:
        file.write(b"safe")
    assert len(synced) == 1


def test_a_result_is_bytes_or_text_and_follows_links(tmp_path):
    path, link = tmp_path / "result", tmp_path / "link"
    link.symlink_to(path)
    for content, expected in ((b"\x00\xff", b"\x00\xff"), ("größer", "größer".encode())):
        check_result_path(link)
        write_result(link, content)
        assert path.read_bytes() == expected
        assert link.is_symlink()
    check_result_path(Path(os.devnull))
    write_result(Path(os.devnull), b"\x00")
    assert Path(os.devnull).is_char_device()


@pytest.mark.parametrize("content", [b"x", "\ud800"])
def test_a_result_that_cannot_be_written_is_one_sentence(tmp_path, content):
    path = tmp_path if content == b"x" else tmp_path / "result"
    with pytest.raises(CourseError, match=r"need a file that can be written; got: .* Try a path"):
        write_result(path, content)
