"""The lessons and the profiler on a machine with a GPU."""

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.gpu.findings import Finding

ROOT = Path(__file__).resolve().parents[2]
# The cells of most lessons create their tensors on the CPU, so that results are the same on every
# machine. In those of ON_GPU, ranks compute on `rank_device()`, for some of the cells.
LESSONS = ("00_ranks", "03_recompute", "06_ddp", "07_tensor_parallel", "10_fsdp", "11_mesh")
ON_GPU = ("10_fsdp", "11_mesh")
CONTEXT_BYTES = 100 * 2**20  # a CUDA context alone takes more: some hundred MiB in each process
SAMPLE_S = 0.05


def prove_lessons(rehearsal: bool) -> Iterator[Finding]:
    """Run solved lessons from top to bottom, and compare their outputs, as nbval does."""
    for lesson in LESSONS[1:2] if rehearsal else LESSONS:
        notebook = ROOT / "notebooks" / "solved" / f"{lesson}.ipynb"
        command = [sys.executable, "-m", "pytest", "-q", "--nbval", str(notebook)]
        with GPUMemory(rehearsal) as memory:
            ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if ended.returncode:
            print(ended.stdout[-2000:], flush=True)
        yield Finding(what=f"{lesson}: exit code of nbval", measured=ended.returncode, high=0)
        if not rehearsal:
            yield _gpu_memory(lesson, memory.used_bytes)


def _gpu_memory(lesson: str, used_bytes: int) -> Finding:
    """Return by how much the memory in use on the first GPU grew while a lesson ran.

    It shows that some process of the lesson used the GPU, not which cell. It counts other users of
    the GPU too: where there are any, it proves nothing.
    """
    where = "" if lesson in ON_GPU else " (its cells compute on the CPU, on purpose)"
    low = CONTEXT_BYTES / 2**20 if lesson in ON_GPU else None
    return Finding(what=f"{lesson}: GPU memory of its processes{where}",
                   measured=used_bytes / 2**20, unit="MiB", low=low)  # fmt: skip


class GPUMemory:
    """Sample the memory in use on the first GPU, by all processes, while the block runs."""

    def __init__(self, rehearsal: bool) -> None:
        self.used_bytes, self._rehearsal = 0, rehearsal
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "GPUMemory":
        if not self._rehearsal:
            self._free_bytes = torch.cuda.mem_get_info(0)[0]  # with this process's own context
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        if not self._rehearsal:
            self._thread.join()

    def _sample(self) -> None:
        while not self._is_over.wait(SAMPLE_S):
            used = self._free_bytes - torch.cuda.mem_get_info(0)[0]
            self.used_bytes = max(self.used_bytes, used)


def prove_profiler(rehearsal: bool) -> Iterator[Finding]:
    """Profile two steps of the training script: the trace has the GPU's kernels."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "course_lib.train", "--steps", "4", "--profile", "2-3"]
        subprocess.run([*command, "--every", "0", "--out", folder], cwd=ROOT, check=True)
        trace = json.loads(Path(folder, "profile", "rank0.pt.trace.json").read_text())
    kinds = [part.get("cat") for part in trace["traceEvents"]]
    wanted = "cpu_op" if rehearsal else "kernel"
    yield Finding(what=f"events of category {wanted} in a trace of two steps",
                  measured=kinds.count(wanted), low=10)  # fmt: skip
