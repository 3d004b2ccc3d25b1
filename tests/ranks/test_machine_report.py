"""The report of `course doctor --report` tells what failed, and not whose machine it is."""

import os
import pwd
import re
import socket
import sys

import pytest

from course_lib.core.course_files import PACKAGE
from course_lib.ranks import machine_report as reports
from course_lib.ranks.machine import describe_machine
from course_lib.ranks.machine_report import anonymous, machine_report, run_link_test

TITLES = ["What failed", "Links", "Doctor", "Versions", "Memory, disk, limits", "Settings"]


@pytest.fixture
def ada(monkeypatch):
    """The machine of somebody with a name."""
    entry = pwd.struct_passwd(("alove", "x", 1000, 1000, "Ada King,,", "/home/alove", "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: entry)
    monkeypatch.setattr(socket, "gethostname", lambda: "analytical7.uni.example")
    monkeypatch.setenv("HOME", "/home/alove")
    monkeypatch.setenv("USER", "alove")
    monkeypatch.setenv("COURSE_CACHE", "/data/groups/alove/cache")
    monkeypatch.setenv("NCCL_API_TOKEN", "hunter2")
    monkeypatch.setenv("https_proxy", "http://alove:hunter2@proxy.uni.example:3128")


@pytest.fixture
def machine():
    """This machine, with a GPU and its links as some have them."""
    return describe_machine() | {"gloo": True, "nccl": True, "usable_gpus": 2, "slurm": None}


def works(device: str, world_size: int) -> tuple[bool, str]:
    return True, f"{device} works on {world_size}"


def sections(text: str) -> dict[str, list[str]]:
    parts = re.split(r"^== (.*) ==$", text, flags=re.MULTILINE)
    return {name: body.split("\n")[1:] for name, body in zip(parts[1::2], parts[2::2], strict=True)}


def test_the_report_has_its_parts_and_both_links(machine):
    text, num_failed = machine_report(machine | {"torch": "2.13.0"}, works)
    found = sections(text)
    assert list(found) == TITLES
    assert found["Links"][:2] == [
        "gloo, 2 ranks on the CPU: cpu works on 2",
        "NCCL, 2 ranks with a GPU each: cuda works on 2",
    ]
    assert (found["What failed"][0], num_failed) == ("nothing", 0)
    assert any(line.startswith("torch 2.") for line in found["Versions"])
    assert any(line.startswith("open files: ") for line in found["Memory, disk, limits"])


def test_what_failed_stands_first_with_all_it_said(machine):
    def fails(device, world_size):
        return (False, "exit code 1\nunhandled system error") if device == "cuda" else (True, "ok")

    text, num_failed = machine_report(machine | {"torch": "2.12.1"}, fails)
    failed = "\n".join(sections(text)["What failed"])
    assert num_failed == 2
    assert "NCCL, 2 ranks with a GPU each: exit code 1\nunhandled system error" in failed
    assert "the lessons are proven with" in failed
    assert "FAILED, see above" in text


def test_no_name_no_host_no_folder_of_the_user_is_in_it(ada, machine):
    def fails(device, world_size):
        return False, (
            f'File "{os.getcwd()}/notes/try.py", line 3, in alove\n'
            'File "/home/alove/thesis/model.py", line 7\n'
            f'File "{PACKAGE}/ranks/pool.py", line 9\n'
            f'File "{sys.prefix}/lib/torch/x.py", line 1\n'
            "connect to analytical7.uni.example (analytical7, 10.1.2.3) refused, not 127.0.0.1\n"
            "mail ada.king@uni.example or Ada King; ALOVE_RUN=/scratch/proj42/alove/run7"
        )

    text, _ = machine_report(machine, fails)
    for secret in ("alove", "ada", "king", "analytical7", "10.1.2.3", "uni.example", "hunter2"):
        assert not re.search(secret, text, re.IGNORECASE), secret
    for secret in ("thesis/../", "/scratch", "proj42", "/data/groups", sys.prefix, os.getcwd()):
        assert secret not in text
    for kept in (
        'HOME/thesis/model.py", line 7',
        'COURSE/course_lib/ranks/pool.py", line 9',
        "/lib/torch/x.py",
        "connect to HOST (HOST, ADDRESS) refused, not 127.0.0.1",
        "mail EMAIL or USER; USER_RUN=.../run7",
        "COURSE_CACHE=.../cache",
        "https_proxy is set",
    ):
        assert kept in text, kept


def test_partitions_of_a_cluster_are_numbered(machine):
    parts = [{"name": "chem-dept", "state": "up", "num_nodes": "4"}]
    text, _ = machine_report(machine | {"slurm": {"version": "23.2", "partitions": parts}}, works)
    assert "chem-dept" not in text
    assert "partition 1 (4 nodes, up)" in text


def test_plain_words_and_numbers_stay_as_they_are(ada):
    text = "torch 2.13.0+cpu, 1/2 of 3 GB/s, version 10.1.2, alovely, http error 404, a/b/c"
    assert anonymous(text) == text


def test_two_ranks_sum_over_gloo():
    worked, said = run_link_test("cpu", 2)
    assert worked, said
    assert re.fullmatch(r"gloo works: 4 bytes in [\d.]+ ms, 16 MB in [\d.]+ ms", said)


def test_a_link_that_does_not_work_is_told_with_its_reason(monkeypatch):
    worked, said = run_link_test("nothing", 1)
    assert not worked
    assert "exit code 1" in said
    assert "nothing" in said
    monkeypatch.setattr(reports, "LINK_TEST", "import time; time.sleep(60)  # {} {}")
    monkeypatch.setattr(reports, "TEST_S", 0.5)
    assert run_link_test("cpu", 2) == (False, "no answer within 0.5 s")
