"""A small GPT under every strategy, trained on the same batches: what the tests save and load."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from course_lib.checkpoint import latest, read_tensor
from course_lib.core import ModelSpec
from course_lib.ddp import DDP
from course_lib.fsdp import FSDP
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from course_lib.tensor_parallel import parallelize
from course_lib.zero import ShardedOptimizer, ZeRO1, ZeRO2, ZeRO3

SPEC = ModelSpec(  # 23 tokens and 12 hidden numbers: no world size divides all; heads fit 2 and 3
    hidden=12,
    num_layers=2,
    num_heads=6,
    ffn_hidden=20,
    vocab=23,
    max_seq=6,
    norm="rms",
    bias=False,
    tied=True,
)
OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
}
ZERO = {"zero1": ZeRO1, "zero2": ZeRO2, "zero3": ZeRO3}


def tensors(folder):
    """All tensors of the newest checkpoint, whole."""
    found = latest(folder)
    return {name: read_tensor(found, name) for name in found.manifest.tensors}


class Engine:
    """A model and its optimizer under a strategy, from a seed of its own.

    Tied embeddings, one frozen norm. `state` is what is saved.
    """

    def __init__(self, strategy, optimizer="adamw", seed=0, dropout=0.0, dtype=torch.float64):
        torch.manual_seed(seed)
        module = GPT(SPEC, dropout=dropout).to(dtype)
        module.blocks[0].attention_norm.requires_grad_(False)
        make, settings = OPTIMIZERS[optimizer]
        self.strategy, self.model = strategy, module
        if strategy in ZERO:
            self.model = ZERO[strategy](module, make, bucket_bytes=3000, **settings)
            self.stepper, self.optimizer = self.model, self.model.optimizer
        else:
            self.model = self._wrapped(module)
            params = [x for x in self.model.parameters() if x.requires_grad]
            if strategy == "sharded":
                self.optimizer = ShardedOptimizer(params, make, **settings)
            else:
                self.optimizer = make(params, **settings)
            self.stepper = self.optimizer
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def _wrapped(self, module):
        if self.strategy in ("ddp", "sharded"):
            return DDP(module)
        if self.strategy == "fsdp":
            return FSDP(module)
        if self.strategy == "tp":
            mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
            return parallelize(module, mesh["tp"], gather_output=True)
        if self.strategy == "torch-fsdp":
            for block in module.blocks:
                fully_shard(block)
            return fully_shard(module)
        return module

    def step(self, number, seed=0):
        """One training step; the loss. Batches are a function of (seed, number)."""
        tokens = token_batch(number, batch=2, seq=SPEC.max_seq, vocab=SPEC.vocab, seed=seed)
        inputs, targets = next_tokens(tokens)
        self.stepper.zero_grad()
        loss = token_loss(self.model(inputs), targets)
        loss.backward()
        if hasattr(self.model, "finish"):
            self.model.finish()
        self.stepper.step()
        return loss.item()
