"""PyTorch's profiler around chosen steps: `--profile 3-5` writes a trace of every rank.

`course trace` shows the compute, communication and waits of a rank; this trace shows each operator
and, on a GPU, each kernel. Both open in Perfetto.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from course_lib.core.errors import CourseError
from course_lib.core.files import check_result_path

FOLDER = "profile"  # in the run's folder; the files are named as TensorBoard's plugin wants them


class StepProfiler:
    """The profiler of one rank: `with profiler: with profiler.step(n): ...`.

    The trace is written after the last of the steps, or when the run ends before it.

    first   the step from which the run was resumed; its trace has a file name of its own
    """

    def __init__(self, steps: range, out: str | None, rank: int, first: int = 0) -> None:
        self.steps = steps
        name = f"rank{rank}" + (f"-from{first}" if first else "")  # as the run record's
        self.path = Path(out or "", FOLDER, f"{name}.pt.trace.json")
        self._recording: profile | None = None

    def check_path(self) -> None:
        """Make the folder of the trace, before the first step.

        Raises: CourseError where the trace could not be written
        """
        if self.steps:
            check_result_path(self.path)

    def __enter__(self) -> "StepProfiler":
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        recording, self._recording = self._recording, None
        if recording is None:
            return
        try:
            recording.stop()
            self._write(recording)
        except Exception:
            if kind is None:  # else the error inside the block is the one to report
                raise

    def _write(self, recording: profile) -> None:
        """Write the trace, whole or not at all. Raises: CourseError where it cannot be written"""
        beside = self.path.with_name(f".{self.path.name}.tmp")
        try:
            recording.export_chrome_trace(str(beside))  # it does not raise if it cannot write
            beside.replace(self.path)
        except OSError as problem:
            raise CourseError(
                f"--profile: need to write {self.path}; got: {problem.strerror}. "
                "Try an --out in a folder of yours, with room on the disk."
            ) from None
        finally:
            with suppress(OSError):
                beside.unlink(missing_ok=True)

    @contextmanager
    def step(self, n: int) -> Iterator[None]:
        """Run step n, recorded if it is one of the chosen steps."""
        if n not in self.steps:
            yield
            return
        if self._recording is None:
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # it reports its start and stop
            kinds = [ProfilerActivity.CPU]
            kinds += [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._recording = profile(activities=kinds, record_shapes=True)
            self._recording.start()
        with record_function(f"ProfilerStep#{n}"):  # the name that TensorBoard's plugin looks for
            yield
        if n == self.steps[-1]:
            self.__exit__()
