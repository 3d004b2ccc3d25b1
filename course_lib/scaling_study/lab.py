"""Tools of notebook 13_scaling_study: an emulated device, links, a broken script.

The device has a clock of its own, so that what it shows is the same on every machine.
"""

from course_lib.core.errors import CourseError

LAUNCH_S = 1e-5


class EmulatedDevice:
    """An asynchronous device: queues work at once and completes it later, in order, as a GPU does.

    orders   what it was told to do: "backward" and "step", in order
    """

    def __init__(self, backward_s: float = 0.03, step_s: float = 0.02) -> None:
        self.backward_s, self.step_s = backward_s, step_s
        self.orders: list[str] = []
        self._now_s = self._free_s = 0.0

    def backward(self, num_tokens: int) -> None:
        """Launch forward and backward of one micro-batch without waiting."""
        if num_tokens < 1:
            raise CourseError(f"Device.backward: need tokens; got {num_tokens}. Try 512.")
        self._order("backward", self.backward_s)

    def step(self) -> None:
        """Launch an optimizer step without waiting."""
        self._order("step", self.step_s)

    def synchronize(self) -> None:
        """Wait until all launched work is done."""
        self._now_s = max(self._now_s, self._free_s)

    def now_s(self) -> float:
        """Return the time of the clock, whatever the device is still working on."""
        return self._now_s

    def _order(self, name: str, takes_s: float) -> None:
        self.orders.append(name)
        self._now_s += LAUNCH_S
        self._free_s = max(self._free_s, self._now_s) + takes_s


# made up for the lesson, in the words of `nvidia-smi topo -m`: two pairs on two sockets
EXAMPLE_LINKS = (
    ("X", "PIX", "SYS", "SYS"),
    ("PIX", "X", "SYS", "SYS"),
    ("SYS", "SYS", "X", "PXB"),
    ("SYS", "SYS", "PXB", "X"),
)
BROKEN_SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=study
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
# SBATCH --gpus-per-node=2
#SBATCH --cpus-per-task=4
#SBATCH --time=2:00                     # two hours
#SBATCH --output=study-$SLURM_JOB_ID.out

set -euo pipefail
#SBATCH --exclude=node7
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
torchrun --nnodes="$SLURM_NNODES" --nproc-per-node=2 \\
  --rdzv-backend=c10d --rdzv-endpoint=localhost:29500 \\
  cluster/exercises/06_ddp.py --turns 3
"""
