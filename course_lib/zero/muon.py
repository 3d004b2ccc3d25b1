"""Muon: the hidden matrices move by orthogonal steps, everything else by AdamW.

A step needs a whole matrix, so the work is shared out by matrices: each has one owner among the
ranks of a group, which alone keeps its momentum, steps it and sends it to the others. Notebook
09_zero says why ZeRO's flat shards do not fit such an optimizer.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.collectives.group import Group, member_of
from course_lib.core.errors import CourseError
from course_lib.memory.optimizer_states import is_hidden_matrix

A, B, C = 3.4445, -4.7750, 2.0315  # x -> A x + B x^3 + C x^5 lifts small singular values the most
NUM_STEPS = 5  # then all of them are about 1: between 0.7 and 1.2
EPS = 1e-7


class Muon(torch.optim.Optimizer):
    """Muon for the hidden matrices of a model, AdamW for embeddings, head, norms and biases.

    optimizer = Muon(dict(model.named_parameters()), group, lr=1e-3)

    Gradients have to be means over the group already. A learning rate of AdamW fits both, as an
    orthogonal step is scaled to AdamW's usual length. `param_groups` are this rank's matrices, and
    what AdamW trains, on every rank.

    Cost:    per step one broadcast of each matrix: all matrices' bytes, after DDP's all_reduce of
             all gradients. This rank computes about 1 / p of 5 * (4 r^2 c + 2 r^3) FLOP for the
             matrices [r, c], r <= c, and keeps about 1 / p of one number for each of theirs
    Raises:  CourseError where there is no hidden matrix; MeshError outside of the group
    Source:  Jordan et al. 2024 (Muon: an optimizer for hidden layers); the length of a step: Liu et
             al. 2025 (Muon is Scalable for LLM Training), section 2.2, eq. 4. Weight decays are
             those of PyTorch's Muon and AdamW
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        group: Group = None,
        *,
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
    ) -> None:
        self.group, self.member = group, member_of(group, "Muon")
        matrices = [p for name, p in params.items() if is_hidden_matrix(name, tuple(p.shape))]
        if not matrices:
            raise CourseError(
                f"Muon: need hidden matrices; got {len(params)} other parameters. Try AdamW."
            )
        self.owner_of = shared_out(matrices, self.member.size)
        own = [matrix for matrix, owner in self.owner_of.items() if owner == self.member.rank]
        super().__init__(
            [{"params": own}], {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        )
        self.adamw = torch.optim.AdamW(
            [{"params": [p for p in params.values() if p not in self.owner_of]}], lr=lr
        )
        self.param_groups += self.adamw.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, also those of other ranks' matrices."""
        super().zero_grad(set_to_none)
        for matrix in self.owner_of:
            matrix.grad = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step what AdamW trains and this rank's matrices; all ranks get all matrices."""
        with torch.enable_grad():
            loss = closure() if closure else None
        self.adamw.state, self.adamw.param_groups = self.state, self.param_groups[1:]
        self.adamw.step()
        sent = []
        for matrix, owner in self.owner_of.items():  # in one order on all ranks
            if owner == self.member.rank and matrix.grad is not None:
                self._step_matrix(matrix, matrix.grad, **self.param_groups[0])
            work = dist.broadcast(matrix.detach(), group=self.group, group_src=owner, async_op=True)
            sent.append(work)  # the next one is computed meanwhile
        for work in sent:
            work.wait()
        return loss

    def _step_matrix(
        self,
        matrix: Tensor,
        grad: Tensor,
        *,
        lr: float,
        momentum: float,
        weight_decay: float,
        **_: Any,
    ) -> None:
        """Step with Nesterov's momentum, made orthogonal; 0.2 is the RMS of AdamW's steps."""
        state = self.state[matrix]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(matrix)
        kept = state["momentum_buffer"].lerp_(grad, 1 - momentum)
        update = orthogonal(grad.lerp(kept, momentum))
        matrix.mul_(1 - lr * weight_decay)
        matrix.add_(update, alpha=-lr * 0.2 * math.sqrt(max(matrix.shape)))


def orthogonal(matrix: Tensor) -> Tensor:
    """Return about U V^T of the matrix U S V^T, by five Newton-Schulz steps.

    They run in bfloat16, which is enough, as in PyTorch; in float64 for a matrix in float64, so
    that any number of ranks has the same numbers.

    Shapes:  [rows, columns] -> the same
    """
    x = matrix.to(torch.float64 if matrix.dtype == torch.float64 else torch.bfloat16)
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=EPS)  # no singular value is above 1
    for _ in range(NUM_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x.T if is_tall else x


def shared_out(matrices: list[nn.Parameter], num_ranks: int) -> dict[nn.Parameter, int]:
    """Return the owner of each matrix: the largest first, each to the rank with the least so far.

    So no rank has more numbers than a fair share and one matrix.
    """
    load, owner_of = [0] * num_ranks, dict.fromkeys(matrices, 0)
    for matrix in sorted(matrices, key=torch.numel, reverse=True):
        owner = min(range(num_ranks), key=load.__getitem__)
        owner_of[matrix] = owner
        load[owner] += matrix.numel()
    return owner_of
