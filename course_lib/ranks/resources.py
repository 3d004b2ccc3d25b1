"""Memory and utilization of this process, for the steps of a run record."""

import resource
import sys

import psutil
import torch


class ResourceMonitor:
    """Memory and utilization of this process; all counts start when it is created."""

    def __init__(self) -> None:
        self._on_gpu = torch.cuda.is_available()
        self._process = psutil.Process()
        self._process.cpu_percent()  # from here on it says what was used since the last call
        self._before_bytes = self._process.memory_info().rss
        self._has_nvml = self._on_gpu and gpu_utilisation() is not None
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()

    def read(self) -> dict[str, float]:
        """Return the bytes in use now and, where it is known, the utilization between 0 and 1."""
        found: dict[str, float] = {"memory_bytes": self._held_bytes()}
        busy = self._busy()
        return found if busy is None else found | {"utilisation": busy}

    def peak_bytes(self) -> int:
        """Return the peak bytes so far."""
        if self._on_gpu:
            return torch.cuda.max_memory_allocated()
        unit = 1 if sys.platform == "darwin" else 1024
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return max(most - self._before_bytes, 0)

    def _held_bytes(self) -> int:
        if self._on_gpu:
            return torch.cuda.memory_allocated()
        return max(self._process.memory_info().rss - self._before_bytes, 0)

    def _busy(self) -> float | None:
        if self._on_gpu:
            return gpu_utilisation() if self._has_nvml else None
        return round(self._process.cpu_percent() / 100, 4)


def gpu_utilisation() -> float | None:
    """Return the recent utilization of this process's GPU between 0 and 1; None without NVML."""
    try:
        return torch.cuda.utilization() / 100
    except (ModuleNotFoundError, RuntimeError, OSError):
        return None
