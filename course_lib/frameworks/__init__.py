"""The real frameworks behind one handle, to compare a lesson's own method with them.

engine = deepspeed_engine(model, partial(torch.optim.SGD, lr=0.1), stage=2)
engine.step(loss_of(engine.model(inputs)))
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
from course_lib.frameworks.engine import Engine, alive_bytes, missing
from course_lib.frameworks.fully_sharded import fully_sharded

__all__ = [
    "AS_IN_THE_PAPER",
    "Engine",
    "accelerate_ddp",
    "accelerate_deepspeed",
    "accelerate_fsdp",
    "alive_bytes",
    "deepspeed_config",
    "deepspeed_engine",
    "fully_sharded",
    "missing",
]
