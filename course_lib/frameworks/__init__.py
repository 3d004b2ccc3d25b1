"""Frameworks behind one interface, to compare the course's own code with.

engine = deepspeed_engine(model, partial(torch.optim.SGD, lr=0.1), stage=2)
engine.step(loss_of(engine.model(inputs)))

    engine              `Engine`: the interface that all share; read this first
    deepspeed_engine    DeepSpeed's ZeRO, stages 0 to 3, and offload
    accelerate_engine   Accelerate's DDP, DeepSpeed and FSDP plugins
    lightning_engine    Lightning Fabric: DDP, and `fully_shard` through ModelParallelStrategy
    megatron_engine     Megatron-Core: tensor, pipeline and data parallel; on CPUs, too
    fully_sharded       PyTorch's own FSDP (`fully_shard`)
"""

from course_lib.frameworks.accelerate_engine import (
    accelerate_ddp,
    accelerate_deepspeed,
    accelerate_fsdp,
)
from course_lib.frameworks.deepspeed_engine import (
    AS_IN_THE_PAPER,
    deepspeed_config,
    deepspeed_engine,
)
from course_lib.frameworks.engine import Engine, alive_bytes, alive_storages, missing
from course_lib.frameworks.fully_sharded import fully_sharded
from course_lib.frameworks.lightning_engine import lightning_ddp, lightning_fsdp
from course_lib.frameworks.megatron_engine import MegatronEngine

__all__ = [
    "AS_IN_THE_PAPER",
    "Engine",
    "MegatronEngine",
    "accelerate_ddp",
    "accelerate_deepspeed",
    "accelerate_fsdp",
    "alive_bytes",
    "alive_storages",
    "deepspeed_config",
    "deepspeed_engine",
    "fully_sharded",
    "lightning_ddp",
    "lightning_fsdp",
    "missing",
]
