"""Megatron-Core on the ranks of the course: tensor, pipeline and data parallel of one GPT.

A pipeline's schedule calls the model itself, once per micro-batch, so `MegatronEngine` takes the
batch where the other engines take a loss. It orders the axes of its mesh from outermost to
innermost: pp, dp, tp. Notebooks 07_tensor_parallel, 08_pipeline and 11_mesh.

    model     GPTModel with the local layer spec and PyTorch's norms, all fusions off
    data      Megatron-Core's DistributedDataParallel and `finalize_model_grads`
    schedule  without stages: micro-batches in turn; else 1F1B, or interleaved with model chunks
    loss      Megatron-Core's vocabulary-parallel one; in float64 PyTorch's, on gathered logits,
              because Megatron-Core's rounds logits to float32
    update    PyTorch's optimizer: Megatron-Core's own needs Apex or Transformer Engine
"""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.core.errors import CourseError
from course_lib.frameworks.engine import MakeOptimizer, in_world, needed, same_minor
from course_lib.frameworks.megatron_checkpoint import load_sharded, save_sharded
from course_lib.frameworks.megatron_checks import MegatronSizes
from course_lib.frameworks.megatron_groups import MegatronGroups
from course_lib.frameworks.megatron_on_cpu import stand_ins
from course_lib.frameworks.megatron_weights import Weights, source_of, whole_weights
from course_lib.models import GPT, IGNORED
from course_lib.models.mlp import ACTIVATIONS
from course_lib.ranks.world import rank_device

WHERE = "MegatronEngine"


class MegatronEngine:
    """A GPT of the course under Megatron-Core, on every rank of the world.

    engine = MegatronEngine(GPT(spec), partial(torch.optim.SGD, lr=0.1), tp=2, pp=2)
    loss = engine.step(inputs, targets, num_micro_batches=4)
    engine.close()

    model         the whole model, the same on every rank; this rank's shards of it are copied
    tp, pp        ranks that split each layer, and stages; dp = world size / (tp * pp)
    model_chunks  on each stage, for the interleaved schedule
    sequence_parallel   norms and the residual stream hold seq/tp tokens on each rank

    Raises: CourseError where Megatron-Core is not installed in the version that the course is
            written for, or has no such layer; MeshError for ranks or layers that cannot be split
            like that, while another engine is open, and outside of a world
    """

    def __init__(
        self,
        model: GPT,
        make_optimizer: MakeOptimizer,
        *,
        tp: int = 1,
        pp: int = 1,
        model_chunks: int = 1,
        sequence_parallel: bool = False,
    ) -> None:
        in_world(WHERE)
        self.spec, self.tp, self.pp = model.spec, tp, pp
        self.sizes = MegatronSizes(
            where=WHERE,
            tp=tp,
            pp=pp,
            model_chunks=model_chunks,
            sequence_parallel=sequence_parallel,
        )
        self.sizes.check_model(model)
        whole = {name: param.detach() for name, param in model.named_parameters()}
        self._like = {name: tensor.to("meta") for name, tensor in whole.items()}  # for the shapes
        with _quiet():
            needed("megatron.core", WHERE)
            same_minor("megatron.core", WHERE)
            with stand_ins():
                self._groups = MegatronGroups(WHERE, tp, pp, model_chunks)
            try:
                with stand_ins():
                    self.config = _transformer_config(model, self.sizes)
                    self.chunks: list[Any] = [self._build(n, whole) for n in range(model_chunks)]
                self.optimizer = make_optimizer(param for _, param in self._named_parameters())
            except BaseException:
                self.close()
                raise

    @property
    def name(self) -> str:
        """The name of the engine, with its sizes."""
        return f"Megatron-Core, tp={self.tp} pp={self.pp}"

    def forward_backward(
        self, inputs: Tensor, targets: Tensor, num_micro_batches: int = 1
    ) -> Tensor:
        """Compute the gradients of the mean loss over all tokens of all ranks.

        All ranks of a replica pass the same part of the batch.

        Shapes:  [batch, seq] twice -> [2]: the sum of the losses of this replica's tokens and
                 their number; both 0 on all stages but the last
        Raises:  ShapeError for a part of the batch that does not split evenly; CourseError after
                 `close`
        """
        self._check_open()
        self.sizes.check_batch(inputs, targets, num_micro_batches)
        self.sizes.check_seq(inputs.shape[1], self.spec.max_seq)
        parts = (x.to(rank_device()).chunk(num_micro_batches) for x in (inputs, targets))
        micro_batches = list(zip(*parts, strict=True))
        with _quiet(), stand_ins():
            from megatron.core.pipeline_parallel import get_forward_backward_func

            for chunk in self.chunks:
                chunk.zero_grad_buffer()  # of Megatron-Core's data parallel
            losses = get_forward_backward_func()(
                forward_step_func=_forward_step,
                data_iterator=[iter(micro_batches) for _ in self.chunks],
                model=self.chunks,
                num_microbatches=num_micro_batches,
                seq_length=inputs.shape[1],
                micro_batch_size=len(inputs) // num_micro_batches,
                forward_only=False,
            )
        total = torch.zeros(2, dtype=torch.float64, device=rank_device())
        for one in losses:  # empty on all stages but the last
            total += one["loss and tokens"]
        return total

    def update(self) -> None:
        """Step the optimizer with the gradients of `forward_backward`."""
        self._check_open()
        for _, param in self._named_parameters():
            param.grad = param.main_grad
        self.optimizer.step()
        self.optimizer.zero_grad()  # else the next backward would add to both

    def step(self, inputs: Tensor, targets: Tensor, num_micro_batches: int = 1) -> float:
        """Run both; return the replica's mean loss, nan on all stages but the last."""
        total = self.forward_backward(inputs, targets, num_micro_batches)
        self.update()
        return (total[0] / total[1]).item()

    def weights(self) -> Weights:
        """Return the whole weights under the course's names; every rank has to call it."""
        return self._gathered(lambda param: param.detach())

    def grads(self) -> Weights:
        """Return the whole gradients under the course's names; every rank has to call it."""
        return self._gathered(lambda param: param.main_grad)

    def save(self, folder: str) -> None:
        """Write model and optimizer in Megatron-Core's own format; every rank has to call it."""
        self._check_open()
        with _quiet(), stand_ins():
            save_sharded(self.chunks, self.optimizer, folder)

    def load(self, folder: str) -> None:
        """Load what `save` has written; every rank has to call it."""
        self._check_open()
        with _quiet(), stand_ins():
            load_sharded(self.chunks, self.optimizer, folder)

    def close(self) -> None:
        """Destroy the process groups; every rank has to call it. A second call does nothing."""
        self._groups.close()

    def _check_open(self) -> None:
        if not self._groups.is_open:
            raise CourseError(
                f"{WHERE}: need an open engine; this one is closed. Try a new {WHERE}."
            )

    def _build(self, index: int, whole: Weights) -> nn.Module:
        """Return a chunk with its shards of `whole`, under Megatron-Core's data parallel."""
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.models.gpt import GPTModel

        where = {"ignore_virtual": False, "vp_stage": index}
        chunk: Any = GPTModel(
            self.config,
            _layers(self.config, index),
            self.spec.padded_vocab,
            self.spec.max_seq,
            pre_process=self._groups.state.is_pipeline_first_stage(**where),
            post_process=self._groups.state.is_pipeline_last_stage(**where),
            share_embeddings_and_output_weights=self.spec.tied,
            position_embedding_type="rope" if self.spec.positions == "rope" else "learned_absolute",
            vp_stage=index,
        ).to(rank_device(), self.config.params_dtype)
        if self.spec.positions == "rope":  # rounded as the course's
            pairs = torch.arange(0, self.spec.head_size, 2) / self.spec.head_size
            chunk.rotary_pos_emb.inv_freq = (self.spec.rope.theta**-pairs).to(rank_device())
        rank = self._groups.state.get_tensor_model_parallel_rank()
        with torch.no_grad():
            for name, param in _named_in_whole(chunk):
                param.copy_(source_of(name, self.spec, self.tp).shard(whole, rank, self.tp))
        how = DistributedDataParallelConfig()
        return DistributedDataParallel(self.config, how, chunk, disable_bucketing=index > 0)

    def _named_parameters(self) -> Iterator[tuple[str, Any]]:
        for chunk in self.chunks:
            yield from _named_in_whole(chunk.module)

    def _gathered(self, tensor_of: Callable[[Any], Tensor]) -> Weights:
        self._check_open()
        own = {name: tensor_of(param).cpu() for name, param in self._named_parameters()}
        by_rank: list[Any] = [None] * dist.get_world_size()
        rank = self._groups.state.get_tensor_model_parallel_rank()
        dist.all_gather_object(by_rank, (rank, own))
        return whole_weights(by_rank, self.spec, self.tp, self._like)


def _forward_step(micro_batches: Iterator[tuple[Tensor, Tensor]], chunk: Any) -> Any:
    """Run one micro-batch, as Megatron-Core's schedules ask for it; return the loss function."""
    inputs, targets = next(micro_batches)
    counted = targets != IGNORED
    positions = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
    gathers = chunk.module.config.params_dtype == torch.float64
    how = {"runtime_gather_output": True} if gathers else {"labels": targets.where(counted, 0)}

    def loss_of(out: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        losses = _losses(out, targets) if gathers else out
        total, count = (losses * counted).sum(), counted.sum()
        return total, count.int(), {"loss and tokens": torch.stack([total.detach(), count])}

    return chunk(inputs, positions, None, **how), loss_of


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return each token's cross-entropy: [batch, seq, vocab] and [batch, seq] -> [batch, seq]."""
    return nn.functional.cross_entropy(
        logits.transpose(1, 2), targets, ignore_index=IGNORED, reduction="none"
    )


def _named_in_whole(chunk: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield a chunk's parameters by name, with the layer numbers of the whole model."""
    for name, param in chunk.named_parameters():
        _, found, tail = name.partition("decoder.layers.")
        if found:
            index, _, rest = tail.partition(".")
            name = f"{found}{chunk.decoder.layers[int(index)].layer_number - 1}.{rest}"
        yield name, param


class _Norm:
    """PyTorch's norm for a layer spec: Megatron-Core's wrapper has no sequence parallelism."""

    def __new__(cls, config: Any, hidden_size: int, eps: float, **_: Any) -> Any:
        made: nn.Module = nn.RMSNorm(hidden_size, eps=eps)
        if config.normalization == "LayerNorm":
            made = nn.LayerNorm(hidden_size, eps=eps, bias=config.add_bias_linear)
        for param in made.parameters():  # `finalize_model_grads` looks for it
            param.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return made


def _layers(config: Any, index: int) -> Any:
    """Return the local spec of a chunk's layers, with PyTorch's norms."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import (
        TransformerBlockSubmodules,
        get_num_layers_to_build,
    )

    layer = get_gpt_layer_local_spec(normalization=config.normalization)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = _Norm
    number = get_num_layers_to_build(config, vp_stage=index)
    return TransformerBlockSubmodules(layer_specs=[layer] * number, layer_norm=_Norm)


def _transformer_config(model: GPT, sizes: MegatronSizes) -> Any:
    """Return Megatron-Core's config of the model: everything that it fuses on a GPU is off."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.transformer import TransformerConfig

    spec, dtype, chunks = model.spec, model.embedding.weight.dtype, sizes.model_chunks
    off = ("gradient_accumulation", "bias_dropout", "masked_softmax", "bias_activation")
    return TransformerConfig(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden,
        num_attention_heads=spec.num_heads,
        num_query_groups=spec.kv_heads,
        ffn_hidden_size=spec.ffn_hidden,
        gated_linear_unit=spec.gated,
        kv_channels=spec.head_size,
        activation_func=ACTIVATIONS[spec.mlp_activation],
        layernorm_epsilon=spec.norm_eps,
        normalization="RMSNorm" if spec.norm == "rms" else "LayerNorm",
        add_bias_linear=spec.has_bias("out"),
        add_qkv_bias=spec.has_bias("qkv"),
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=sizes.tp,
        pipeline_model_parallel_size=sizes.pp,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        sequence_parallel=sizes.sequence_parallel and sizes.tp > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        overlap_p2p_comm=chunks > 1,  # batched, two stages would mix up their messages
        batch_p2p_comm=chunks == 1,
        use_cpu_initialization=True,
        calculate_per_token_loss=True,
        finalize_model_grads_func=finalize_model_grads,
        apply_rope_fusion=False,
        **{f"{name}_fusion": False for name in off},
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress Megatron-Core's warnings that Transformer Engine and Apex are missing."""
    logging.getLogger("megatron").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
