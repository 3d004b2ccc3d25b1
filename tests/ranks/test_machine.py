"""`course doctor` reads any machine right: laptops, GPU servers, clusters, containers."""

import json
from collections.abc import Sequence

import pytest

from course_lib.core.units import GIB
from course_lib.ranks.machine import (
    Finding,
    describe_gpus,
    describe_machine,
    describe_slurm,
    doctor_report,
    findings,
    parse_links,
    run_command,
    usable_cores,
    usable_memory_bytes,
)

TWO_SOCKETS = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tPIX\tSYS\tSYS\tPXB\t0-15,32-47\t0\t\tN/A\n"
    "GPU1\tPIX\t X \tSYS\tSYS\tPXB\t0-15,32-47\t0\t\tN/A\n"
    "GPU2\tSYS\tSYS\t X \tPXB\tSYS\t16-31,48-63\t1\t\tN/A\n"
    "GPU3\tSYS\tSYS\tPXB\t X \tSYS\t16-31,48-63\t1\t\tN/A\n"
    "NIC0\tPXB\tPXB\tSYS\tSYS\t X \t\t\t\t\n"
    "\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe\n\nNIC Legend:\n\n"
    "  NIC0: mlx5_0\n"
)
NVLINK = (
    "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\n"
    "GPU0\t X \tNV18\t0-63\t0\n"
    "GPU1\tNV18\t X \t0-63\t0\n"
)
ONE_GPU = "\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t0-15\t0\t\tN/A\n"


def answers(**texts: str):
    """A command runner that knows some commands by the words they hold, and no others."""

    def run(command: Sequence[str]) -> str | None:
        line = " ".join(command)
        return next((text for words, text in texts.items() if words in line), None)

    return run


@pytest.fixture
def laptop():
    return {
        "system": "Linux x86_64",
        "cores": 8,
        "usable_cores": 8,
        "memory_bytes": 16 * GIB,
        "python": "3.12.1",
        "torch": "2.13.0+cpu",
        "gloo": True,
        "nccl": False,
        "usable_gpus": 0,
        "gpus": [],
        "gpu_links": [],
        "slurm": None,
        "jupyterlab": "4.6.6",
        "node": None,
        "chromium": None,
    }


def states(machine) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {"ok": [], "missing": [], "problem": []}
    for finding in findings(machine):
        found[finding.state].append(finding.text)
    return found


def test_link_matrix_is_read_without_network_cards_and_colours():
    assert parse_links(TWO_SOCKETS) == [
        ["X", "PIX", "SYS", "SYS"],
        ["PIX", "X", "SYS", "SYS"],
        ["SYS", "SYS", "X", "PXB"],
        ["SYS", "SYS", "PXB", "X"],
    ]
    assert parse_links(NVLINK) == [["X", "NV18"], ["NV18", "X"]]
    assert parse_links(ONE_GPU) == [["X"]]


@pytest.mark.parametrize("text", ["", "no devices were found\n", "GPU0\t X \n", TWO_SOCKETS[:90]])
def test_a_link_matrix_that_cannot_be_read_is_no_matrix(text):
    assert parse_links(text) == []


def test_gpus_are_read_with_their_memory_in_bytes():
    run = answers(query="NVIDIA RTX A6000, 49140\nNVIDIA H200, [N/A]\n")
    assert describe_gpus(run) == [
        {"name": "NVIDIA RTX A6000", "memory_bytes": 49140 * 2**20},
        {"name": "NVIDIA H200", "memory_bytes": 0},
    ]
    assert describe_gpus(answers()) == []


def test_slurm_is_read_with_its_partitions():
    run = answers(
        version="slurm 22.05.8\n", format="debug*|up|2|4|(null)\ngpu|up|8|64|gpu:h100:8\n"
    )
    slurm = describe_slurm(run)
    assert slurm is not None
    assert slurm["version"] == "22.05.8"
    assert [part["name"] for part in slurm["partitions"]] == ["debug*", "gpu"]
    assert slurm["partitions"][1]["devices"] == "gpu:h100:8"


def test_a_container_is_described_by_its_own_share(tmp_path):
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "cpu.max").write_text("50000 100000\n")
    (group / "memory.max").write_text(f"{GIB}\n")
    assert usable_cores(tmp_path) == 0.5
    assert usable_memory_bytes(tmp_path) == GIB
    (group / "cpu.max").write_text("max 100000\n")
    (group / "memory.max").write_text("max\n")
    assert usable_cores(tmp_path) >= 1
    assert usable_memory_bytes(tmp_path) > GIB


def test_this_machine_is_described_in_plain_values_and_can_run_the_course():
    machine = describe_machine()
    assert json.loads(json.dumps(machine)) == machine
    assert states(machine)["problem"] == []


def test_a_laptop_lacks_only_what_is_optional(laptop):
    found = states(laptop)
    assert found["problem"] == []
    assert all("(optional)" in text for text in found["missing"])
    assert any("4 ranks run at the same time" in text for text in found["ok"])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"torch": "2.15.0+cu130"}, "make lab"),
        ({"gloo": False}, "no gloo"),
        ({"memory_bytes": 2 * GIB}, "need 4 GiB"),
        ({"jupyterlab": None}, "make lab installs it"),
        ({"slurm": {"version": "23.11", "partitions": None}}, "controller does not answer"),
    ],
)
def test_each_problem_is_one_line_that_says_what_to_do(laptop, change, says):
    (problem,) = states(laptop | change)["problem"]
    assert says in problem


def test_gpus_that_torch_cannot_use_are_said_to_be_so(laptop):
    gpus = [{"name": "NVIDIA RTX A6000", "memory_bytes": 48 * GIB}] * 4
    unusable = states(laptop | {"gpus": gpus})
    assert any("4 x NVIDIA RTX A6000" in text for text in unusable["missing"])
    usable = states(laptop | {"gpus": gpus, "usable_gpus": 4, "nccl": True})
    assert any("NCCL works" in text for text in usable["ok"])


def test_the_report_shows_the_link_matrix_and_explains_its_words(laptop):
    report = doctor_report(laptop | {"gpu_links": parse_links(TWO_SOCKETS)})
    assert "GPU2   SYS   SYS     X   PXB" in report
    assert "SYS: across CPU sockets" in report
    assert "NVLink" not in report
    assert "reach each other" not in doctor_report(laptop)


def test_report_lines_begin_with_their_state(laptop):
    lines = doctor_report(laptop).splitlines()
    assert {line.split()[0] for line in lines} <= {"ok", "missing", "problem"}
    assert len(lines) == len(list(findings(laptop)))
    assert Finding("ok", "JupyterLab 4.6.6") in list(findings(laptop))


def test_a_command_that_is_missing_or_fails_answers_nothing():
    assert run_command(["no-such-command-anywhere"]) is None
    assert run_command(["false"]) is None
    assert run_command(["echo", "here"]) == "here\n"
