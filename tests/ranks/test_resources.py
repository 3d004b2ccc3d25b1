"""The monitor of a process: bytes how busy a rank was; on a CPU, and on a pretended GPU."""

import subprocess
import sys
import textwrap
import time

import pytest
import torch

from course_lib.ranks.resources import ResourceMonitor, gpu_utilisation

MIB = 2**20


def test_on_a_cpu_it_sees_what_the_process_grows_by():
    script = """
        import numpy as np
        from course_lib.ranks.resources import ResourceMonitor
        monitor = ResourceMonitor()
        before = monitor.read()["memory_bytes"]
        kept = np.ones(2**26, dtype=np.uint8)
        print(monitor.read()["memory_bytes"] - before, monitor.peak_bytes())
    """  # a process of its own: nothing that another test left is freed meanwhile
    told = subprocess.check_output([sys.executable, "-c", textwrap.dedent(script)])
    grown, peak = map(int, told.split())
    assert 60 * MIB < grown < 80 * MIB
    assert peak >= 60 * MIB


def share_of(monitor, act):
    """What the monitor says of the time of `act`, and what the process's own clocks say."""
    monitor.read()
    start_s, used_s = time.perf_counter(), time.process_time()
    act()
    share = monitor.read()["utilisation"]
    return share, (time.process_time() - used_s) / (time.perf_counter() - start_s)


def compute(seconds=0.3):
    until_s = time.process_time() + seconds
    while time.process_time() < until_s:
        pass


def test_on_a_cpu_it_tells_computing_from_waiting():
    monitor = ResourceMonitor()
    for act in (compute, lambda: time.sleep(0.5)):
        share, expected = share_of(monitor, act)
        assert share == pytest.approx(expected, abs=0.1)  # it counts hundredths of a second


class Card:
    """A GPU as torch.cuda shows it."""

    def __init__(self, nvml):
        self.nvml = nvml

    def utilization(self):
        if not self.nvml:
            raise ModuleNotFoundError("pynvml")
        return 83


@pytest.mark.parametrize(("nvml", "busy"), [(True, {"utilisation": 0.83}), (False, {})])
def test_on_a_gpu_it_asks_pytorch_and_nvml_where_there_is_one(monkeypatch, nvml, busy):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 7 * MIB)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 9 * MIB)
    monkeypatch.setattr(torch.cuda, "utilization", Card(nvml).utilization)
    monitor = ResourceMonitor()
    assert monitor.read() == {"memory_bytes": 7 * MIB} | busy
    assert monitor.peak_bytes() == 9 * MIB


def test_without_a_gpu_there_is_no_utilisation_of_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "utilization", Card(nvml=False).utilization)
    assert gpu_utilisation() is None
