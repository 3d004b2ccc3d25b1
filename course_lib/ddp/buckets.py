"""Buckets: which gradients are sent as one message, and in which order.

Many small messages pay the latency many times; one large message cannot start before the last
gradient is computed; buckets are in between. A bucket's gradients lie side by side in one flat
tensor, and every `param.grad` is a view of its part. Notebook 06_ddp.
"""

from torch import nn

from course_lib.collectives.coalesced import group_alike
from course_lib.core.errors import CourseError
from course_lib.data_parallel.gradients import need_dense


class Bucket:
    """Parameters whose gradients are sent as one message.

    flat          the gradients side by side
    views         each gradient as a view of `flat`, in the shape of its parameter
    missing       indices of the parameters whose gradient is not in `flat` yet
    launched_at   version of `flat` when it was sent: zero_grad() since then makes it another
    """

    def __init__(self, named_params: list[tuple[str, nn.Parameter]]) -> None:
        self.names = [name for name, _ in named_params]
        self.params = [param for _, param in named_params]
        sizes = [param.numel() for param in self.params]
        self.flat = self.params[0].detach().new_zeros(sum(sizes))  # [sum of numels]
        parts = zip(self.flat.split(sizes), self.params, strict=True)
        self.views = [part.view(param.shape) for part, param in parts]
        self.missing, self.launched_at = set(range(len(sizes))), -1

    @property
    def num_bytes(self) -> int:
        """Bytes of the message."""
        return self.flat.nbytes

    def copy_grad(self, index: int) -> None:
        """Copy a gradient into the bucket, and make `param.grad` its view from now on."""
        param, view = self.params[index], self.views[index]
        need_dense(param.grad, self.names[index], "DDP")
        if param.grad is not view:
            view.zero_() if param.grad is None else view.copy_(param.grad)
            param.grad = view
        self.missing.discard(index)


def make_buckets(module: nn.Module, bucket_bytes: float) -> list[Bucket]:
    """Return the buckets of a module's trainable parameters, in the order in which they fill up.

    The last parameter is the first, because backward reaches it first; tied parameters count once.
    A bucket has one dtype and one device, and is sent when its last gradient is complete.
    """
    if not bucket_bytes > 0:
        raise CourseError(
            f"DDP: need bucket_bytes above 0; got {bucket_bytes}. Try 1, one bucket per parameter."
        )
    named = [(name, param) for name, param in module.named_parameters() if param.requires_grad]
    named.reverse()
    parts = sorted(group_alike([param for _, param in named], bucket_bytes), key=max)
    return [Bucket([named[number] for number in part]) for part in parts]
