"""Communication hooks that compress gradients: for DDP(..., comm_hook=...).

`bf16_hook` halves the bytes of every fp32 number. `TopK` sends the largest ones with their indices;
`PowerSGD` sends two thin matrices whose product approximates the gradient. These two use error
feedback: what a step did not send is kept as a residual and added to the next step's gradient.
Training then no longer follows the numbers of one process. Notebook 06_ddp.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.collectives.group import Group
from course_lib.core.errors import CourseError
from course_lib.ddp.buckets import Bucket
from course_lib.ddp.ddp import Mean


def bf16_hook(flat: Tensor, group: Group) -> Any:
    """Average in bfloat16 (8 bits of precision), and convert back to the gradient's own dtype.

    Cost:    2 bytes per number
    """
    return _Narrow(flat, group)


class _Narrow:
    def __init__(self, flat: Tensor, group: Group) -> None:
        self.flat, self.mean = flat, Mean(flat.bfloat16(), group)

    def wait(self) -> None:
        self.mean.work.wait()
        self.flat.copy_(self.mean.flat).div_(self.mean.p)


class TopK:
    """Send the `fraction` of a bucket's numbers with the largest magnitudes, and their indices.

    What is not sent stays in `residuals[flat]` and is added to the bucket's next gradients.

    Cost:    an all_gather of k = ceil(fraction * n) numbers, one of k indices (4 bytes each)
    Raises:  CourseError for a fraction outside of 0 < fraction <= 1
    """

    def __init__(self, fraction: float) -> None:
        if not 0 < fraction <= 1:
            raise CourseError(f"TopK: need 0 < fraction <= 1; got {fraction}. Try TopK(0.01).")
        self.fraction = fraction
        self.residuals: dict[Tensor, Tensor] = {}  # per bucket, by its flat tensor: [numel]

    def __call__(self, flat: Tensor, group: Group) -> Any:
        residual = self.residuals.setdefault(flat, torch.zeros_like(flat))
        residual += flat
        k = math.ceil(self.fraction * flat.numel())
        indices = residual.abs().topk(k, sorted=False).indices  # [k]
        numbers = residual[indices]
        residual[indices] = 0
        return _Gathered(flat, numbers, indices.int(), group)


class _Gathered:
    def __init__(self, flat: Tensor, numbers: Tensor, indices: Tensor, group: Group) -> None:
        self.flat, self.p = flat, dist.get_world_size(group)
        self.all = [part.new_empty(self.p * len(part)) for part in (numbers, indices)]  # [p * k]
        self.works = [
            dist.all_gather_single(whole, part, group=group, async_op=True)
            for whole, part in zip(self.all, (numbers, indices), strict=True)
        ]

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.flat.zero_()
        for numbers, indices in zip(*(whole.chunk(self.p) for whole in self.all), strict=True):
            self.flat.index_add_(0, indices, numbers)  # in one order on every rank
        self.flat.div_(self.p)


class PowerSGD:
    """Send every matrix M [n, m] as P [n, r] and Q [m, r], with P Q^T near the mean of M.

    P = M Q is summed over the group and orthonormalized; then Q = M^T P is averaged. The next step
    starts from this Q (warm start), and M - P Q^T is added to the next gradient (error feedback).
    Dims after the first are flattened into columns. A gradient of fewer than two dims, or a matrix
    that would not get `min_rate` times smaller, is averaged uncompressed; so is everything in the
    first `start_step` steps.

    Cost:    all_reduces of r n numbers and of all uncompressed ones in backward, and of r m numbers
             in `finish`
    Raises:  CourseError for rank < 1, or a hook that has not seen the buckets
    Source:  Vogels et al. 2019 (PowerSGD), in the form of PyTorch's own,
             torch/distributed/algorithms/ddp_comm_hooks/powerSGD_hook.py, powerSGD_hook
    """

    def __init__(
        self, rank: int, *, start_step: int = 0, min_rate: float = 1.0, seed: int = 0
    ) -> None:
        if rank < 1:
            raise CourseError(f"PowerSGD: need a rank of 1 or more; got {rank}. Try PowerSGD(4).")
        self.rank, self.start_step, self.min_rate = rank, start_step, min_rate
        self.random = torch.Generator().manual_seed(seed)
        self._parts: dict[Tensor, _Factors] = {}

    @property
    def residuals(self) -> list[Tensor]:
        """The residual of each matrix: the part that has not been sent yet."""
        return [residual for part in self._parts.values() for residual in part.residuals]

    def watch(self, buckets: Sequence[Bucket]) -> None:
        """Allocate the factors of every bucket from the shapes of its gradients; DDP calls it."""
        for bucket in buckets:
            self._parts[bucket.flat] = _Factors(bucket.views, self)

    def is_worth_it(self, view: Tensor) -> bool:
        """Return whether two factors are at least `min_rate` times smaller than this gradient."""
        if view.dim() < 2 or not view.numel():
            return False
        n, m = view.flatten(1).shape
        return min(self.rank, n, m) * (n + m) * self.min_rate < n * m

    def __call__(self, flat: Tensor, group: Group) -> Any:
        if flat not in self._parts:
            raise CourseError(
                "PowerSGD: need the shapes of the gradients; this bucket is unknown. "
                "Try DDP(module, comm_hook=hook), or hook.watch(model.buckets)."
            )
        part = self._parts[flat]
        part.step += 1
        return Mean(flat, group) if part.step <= self.start_step else part.start(group)


class _Factors:
    """One bucket of PowerSGD: its matrices, their residuals, and the Q of the last step."""

    def __init__(self, views: Sequence[Tensor], hook: PowerSGD) -> None:
        self.step = 0
        self.matrices = [view.flatten(1) for view in views if hook.is_worth_it(view)]
        self.rest = [view for view in views if not hook.is_worth_it(view)]
        self.residuals = [torch.zeros_like(matrix) for matrix in self.matrices]
        self.qs = [
            torch.randn(
                m.shape[1], min(hook.rank, *m.shape), generator=hook.random, dtype=m.dtype
            ).to(m.device)
            for m in self.matrices
        ]

    def start(self, group: Group) -> "_Factors":
        self.group = group
        for matrix, residual in zip(self.matrices, self.residuals, strict=True):
            residual += matrix  # [n, m], the matrix to approximate
        self.ps = [
            residual @ _orthonormal(q) for residual, q in zip(self.residuals, self.qs, strict=True)
        ]  # each [n, r]
        self.means = [_packed_mean(self.ps, group), _packed_mean(self.rest, group)]
        return self

    def wait(self) -> None:
        for tensors, mean in zip((self.ps, self.rest), self.means, strict=True):
            _unpack(mean, tensors)
        self.ps = [_orthonormal(p) for p in self.ps]
        self.qs = [r.T @ p for r, p in zip(self.residuals, self.ps, strict=True)]  # each [m, r]
        _unpack(_packed_mean(self.qs, self.group), self.qs)
        for matrix, residual, p, q in zip(
            self.matrices, self.residuals, self.ps, self.qs, strict=True
        ):
            torch.matmul(p, q.T, out=matrix)
            residual -= matrix


def _orthonormal(columns: Tensor) -> Tensor:
    wide = columns if columns.dtype == torch.float64 else columns.float()
    return torch.linalg.qr(wide).Q.to(columns.dtype)


def _packed_mean(tensors: Sequence[Tensor], group: Group) -> Mean | None:
    """Start one all_reduce for all tensors together; return None if there are none."""
    packed = [tensor.reshape(-1) for tensor in tensors]
    return Mean(torch.cat(packed), group) if packed else None


def _unpack(mean: Mean | None, tensors: Sequence[Tensor]) -> None:
    """Wait for the mean and copy its parts into the tensors."""
    if mean is not None:
        mean.wait()
        parts = mean.flat.split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))
