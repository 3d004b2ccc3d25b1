"""Checks of what Megatron-Core can split, each one sentence instead of an error inside of it.

Notebook 11_mesh.
"""

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from course_lib.core.errors import CourseError, MeshError, ShapeError
from course_lib.core.specs import ModelSpec
from course_lib.models import GPT


@dataclass(frozen=True, kw_only=True)
class MegatronSizes:
    """Sizes in which an engine splits a model and its batches; `where` begins each sentence."""

    where: str
    tp: int
    pp: int
    model_chunks: int
    sequence_parallel: bool

    def check_model(self, model: GPT) -> None:
        """Check that Megatron-Core has the model's layers and can split it over the ranks.

        Raises: CourseError for dropout, and what is not mapped; MeshError for sizes that do not fit
        """
        self._check_counts()
        spec, tp, pp = model.spec, self.tp, self.pp
        if model.dropout.p:
            raise CourseError(
                f"{self.where}: need no dropout, because Megatron-Core draws other random numbers; "
                f"got {model.dropout.p}. Try GPT(spec, dropout=0.0)."
            )
        self._check_mapped(spec)
        for what in ("num_heads", "kv_heads", "padded_vocab", "ffn_hidden"):
            if (size := getattr(spec, what)) % tp:
                what = what.removeprefix("padded_")
                raise MeshError(
                    f"{self.where}: need {what} divisible by tp; got {size} and {tp}. "
                    "Try a smaller tp."
                )
        if spec.num_layers % (pp * self.model_chunks):
            raise MeshError(
                f"{self.where}: need num_layers divisible by pp * model_chunks; got "
                f"{spec.num_layers} and {pp * self.model_chunks}. Try fewer stages."
            )
        if dist.get_world_size() % (tp * pp):
            raise MeshError(
                f"{self.where}: need ranks divisible by tp * pp; got {dist.get_world_size()} and "
                f"{tp} * {pp}. Try sizes whose product divides the number of ranks."
            )

    def _check_mapped(self, spec: ModelSpec) -> None:
        """Check that the engine has a setting of Megatron-Core for every part of the model."""
        others = {spec.has_bias("out"), spec.has_bias("mlp")}
        if spec.norm == "layer":
            others.add(spec.has_bias("norm"))
        mapped = {
            "qk_norm": spec.qk_norm == "none",
            "window": spec.window is None,
            "nope_layers": not spec.nope_layers,
            "parallel": not spec.parallel,
            "rope": spec.rope.share == 1 and not spec.rope.scaling,
            "bias": len(others) == 1 and (spec.has_bias("qkv") or True not in others),
        }
        for field, is_mapped in mapped.items():
            if not is_mapped:
                raise CourseError(
                    f"{self.where}: need a model whose {field} it maps to Megatron-Core; got "
                    f"{field} = {repr(getattr(spec, field))[:80]} of {spec.name}. Try "
                    "parallelize(GPT(spec), mesh), or --strategy ddp."
                )

    def _check_counts(self) -> None:
        for name in ("tp", "pp", "model_chunks"):
            size = getattr(self, name)
            if not _is_count(size):
                raise MeshError(
                    f"{self.where}: need {name} as a whole number above 0; got {size!r}. "
                    f"Try {name}=1."
                )
        if self.model_chunks > 1 and self.pp == 1:
            raise MeshError(
                f"{self.where}: need pp of 2 or more for model_chunks = {self.model_chunks}; got "
                "pp = 1. Try model_chunks=1."
            )

    def check_batch(self, inputs: Tensor, targets: Tensor, num_micro_batches: int, /) -> None:
        """Check the number of micro-batches, and that they split the sequences evenly.

        Raises: ShapeError where they do not
        """
        if inputs.dim() != 2 or inputs.shape != targets.shape:
            raise ShapeError(
                f"{self.where}: need inputs and targets of shape [batch, seq]; got "
                f"{list(inputs.shape)} and {list(targets.shape)}. Try next_tokens(tokens)."
            )
        batch, m = inputs.shape[0], num_micro_batches
        if not _is_count(m):
            raise ShapeError(
                f"{self.where}: need num_micro_batches as a whole number above 0; got {m!r}. "
                "Try num_micro_batches=1."
            )
        if self.model_chunks > 1 and m % self.pp:
            raise ShapeError(
                f"{self.where}: need num_micro_batches divisible by pp for the interleaved "
                f"schedule; got {m} and {self.pp}. Try {m - m % self.pp + self.pp}."
            )
        if not batch or batch % m:
            raise ShapeError(
                f"{self.where}: need a batch divisible by the {m} micro-batches; got "
                f"{batch}. Try {batch - batch % m or m} sequences."
            )

    def check_seq(self, seq: int, max_seq: int) -> None:
        """Check the tokens of a sequence.

        Raises: ShapeError for too many, and where sequence parallelism cannot split them
        """
        if not 0 < seq <= max_seq:
            raise ShapeError(
                f"{self.where}: need 1 to max_seq = {max_seq} tokens a sequence; got {seq}. "
                "Try tokens[:, :max_seq]."
            )
        if self.sequence_parallel and seq % self.tp:
            raise ShapeError(
                f"{self.where}: need seq divisible by tp with sequence_parallel; got {seq} and "
                f"{self.tp}. Try {max(seq - seq % self.tp, self.tp)} tokens a sequence."
            )


def _is_count(size: object) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and size > 0
