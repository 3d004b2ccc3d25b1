"""A training step on a mesh: tensor, pipeline and data parallelism combined.

`apply_methods` has the order of wrapping, from the inside out: TP splits the matrices of every
layer, PP keeps this rank's layers of the result, and DP averages the gradients of what is left.
`course_lib.train` trains with the same function and with any strategy over dp. Notebook 11_mesh.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from course_lib.accumulation.accumulation import by_tokens, split_micro_batches
from course_lib.context_parallel.layouts import shard
from course_lib.core.errors import CourseError, MeshError
from course_lib.core.parallelism import Parallelism
from course_lib.core.specs import ModelSpec
from course_lib.cost.params import layers_on_stage
from course_lib.ddp.ddp import DDP
from course_lib.mesh.clip import clip_grad_norm_across, finish_over_axes, held_grads
from course_lib.mesh.model_part import apply_methods
from course_lib.mesh.rank_mesh import RankMesh
from course_lib.models import GPT, token_loss
from course_lib.models.data import mixed_seed
from course_lib.pipeline.engine import LossFn, Pipeline
from course_lib.pipeline.schedules import one_f_one_b
from course_lib.ranks.world import rank_device
from course_lib.tensor_parallel.cross_entropy import parallel_token_loss
from course_lib.zero.sharded_optimizer import ShardedOptimizer


class MeshTrainer:
    """One rank of a training run on a mesh of pp, dp and tp; all ranks make it together.

    trainer = MeshTrainer(spec, RankMesh(Mesh(pp=2, dp=2, tp=2)), 4, torch.optim.AdamW, lr=1e-3)
    loss = trainer.step(tokens, targets)      # the whole batch, the same on every rank

    mesh                has the axes pp, dp and tp, each of 1 or more, and maybe cp: its ranks then
                        have tokens in a row, all of a sequence together
    num_micro_batches   of each replica
    optimizer_cls       made with `settings`
    sharded             the optimizer state is sharded over dp: ZeRO-1
    max_norm            upper limit for the norm of the whole gradient; None: no limit
    frozen              parameters whose name begins so are not trained

    Raises: MeshError for other axes; CourseError for a model that they cannot split
    """

    def __init__(
        self,
        spec: ModelSpec,
        mesh: RankMesh,
        num_micro_batches: int,
        optimizer_cls: type[Optimizer],
        *,
        dtype: torch.dtype = torch.float64,
        dropout: float = 0.0,
        seed: int = 0,
        sharded: bool = False,
        max_norm: float | None = None,
        frozen: Sequence[str] = (),
        **settings: Any,
    ) -> None:
        if {*mesh.mesh.sizes} - {"cp"} != {"pp", "dp", "tp"}:
            raise MeshError(
                f"MeshTrainer: need a mesh with the axes pp, dp and tp; got {mesh.mesh}. Give an "
                "axis that you do not use the size 1; of others only cp can be there."
            )
        self.mesh, self.seed, self.max_norm, self.num_steps = mesh, seed, max_norm, 0
        self.dp, self.pp, self.tp = (mesh.size(axis) for axis in ("dp", "pp", "tp"))
        whole = _seeded_gpt(spec, dtype, dropout, seed, frozen)
        self.part = apply_methods(whole, mesh, _averaged, num_layers=evenly(spec, self.pp))
        self.stage, self.replica = self.part.module, self.part.wrapped
        loss_fn: LossFn = token_loss
        if self.tp > 1:
            loss_fn = partial(parallel_token_loss, group=mesh.group("tp"))
        self.pipeline = Pipeline(self.stage, loss_fn, mesh.group("pp"))
        self.schedule = one_f_one_b(self.pp, num_micro_batches)
        params = list(self.stage.parameters())
        if sharded:
            self.optimizer: Optimizer = ShardedOptimizer(
                params, optimizer_cls, mesh.copies, **settings
            )
        else:
            self.optimizer = optimizer_cls(params, **settings)

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        """Train on the whole batch; return its mean loss, which is the same on all ranks.

        Shapes:  tokens, targets [batch, seq], the same on every rank
        """
        self.optimizer.zero_grad()
        loss = self.gradients(tokens, targets)
        if self.max_norm is not None:
            clip_grad_norm_across(self.stage, self.mesh, self.max_norm)
        self.optimizer.step()
        self.num_steps += 1
        return loss

    def gradients(self, tokens: Tensor, targets: Tensor) -> float:
        """Add the gradients of the whole batch's mean loss to `param.grad`; return that loss."""
        # the ranks of a tp group draw the same dropout, the others draw their own; the seed is made
        # of coordinates, so the order of the axes does not change it
        draws = self.mesh.index("dp") * self.pp + self.mesh.index("pp")
        draws = draws * self.mesh.size("cp") + self.mesh.index("cp")
        torch.manual_seed(mixed_seed(mixed_seed(self.seed, self.num_steps), draws))
        mine = self._share(tokens), self._share(targets)
        micro_batches = split_micro_batches(mine, len(self.schedule[0]) // 2)
        inputs, asked = zip(*micro_batches, strict=True)
        # DDP divides the sum by the number of copies, so a share of the batch is counted so often
        weights = [by_tokens(one, targets) * self.mesh.num_copies for one in asked]
        with self.replica.no_sync():
            loss = self.pipeline.step(self.schedule, inputs, asked, weights)
        self.replica.finish()
        finish_over_axes(self.stage, self.mesh, held_grads(self.stage), sums_tied=False)
        return self._whole_loss(loss)

    def full_state(self) -> dict[str, Tensor]:
        """Return the state dict of the whole model, on every rank.

        Cost:    as `ModelPart.full_state`
        """
        return self.part.full_state()

    def _share(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a batch: all ranks that differ along pp or tp have it."""
        mine = whole.tensor_split(self.dp)[self.mesh.index("dp")]
        return shard(mine, self.mesh.index("cp"), self.mesh.size("cp"))

    def _whole_loss(self, loss: Tensor | None) -> float:
        """Average the losses of all copies; only the last stage knows its replica's."""
        total = torch.zeros((), dtype=torch.float64, device=rank_device())
        if loss is not None:
            total += loss.detach()
        dist.all_reduce(total, group=self.mesh.group("pp"))
        dist.all_reduce(total, group=self.mesh.copies)
        return float(total) / self.mesh.num_copies


def evenly(spec: ModelSpec, num_stages: int) -> list[int]:
    """Return the layers of each stage for `split_model`, which counts embedding and head, too."""
    parallelism = Parallelism(pp=num_stages)
    counts = [layers_on_stage(spec, parallelism, stage) for stage in range(num_stages)]
    counts[0] += 1
    counts[-1] += 1
    return counts


def _seeded_gpt(
    spec: ModelSpec, dtype: torch.dtype, dropout: float, seed: int, frozen: Sequence[str]
) -> GPT:
    torch.manual_seed(seed)
    model = GPT(spec, dropout=dropout).to(rank_device(), dtype)
    for prefix in frozen:
        found = [p for name, p in model.named_parameters() if name.startswith(prefix)]
        if not found:
            raise CourseError(f"MeshTrainer: need a parameter that begins so; got {prefix!r}.")
        for param in found:
            param.requires_grad_(False)
    return model


def _averaged(stage: nn.Module, group: dist.ProcessGroup) -> DDP:
    return DDP(stage, group=group)
