"""Buckets: which tensors travel together as one message.

Many small messages pay the latency many times, one large message cannot leave before the last
gradient is there; buckets are in between. Their gradients lie side by side in one flat tensor, and
every `param.grad` is a view of its place there. Notebook 06_ddp.
"""

from torch import nn

from course_lib.collectives.coalesced import group_alike
from course_lib.core.errors import CourseError


class Bucket:
    """Parameters whose gradients travel as one message; each gradient has its view of `flat`."""

    def __init__(self, named_params: list[tuple[str, nn.Parameter]]) -> None:
        self.names = [name for name, _ in named_params]
        self.params = [param for _, param in named_params]
        sizes = [param.numel() for param in self.params]
        self.flat = self.params[0].detach().new_zeros(sum(sizes))
        parts = zip(self.flat.split(sizes), self.params, strict=True)
        self.views = [part.view(param.shape) for part, param in parts]
        self.missing = set(range(len(sizes)))  # gradients that are not in `flat` yet

    @property
    def num_bytes(self) -> int:
        """Bytes of the message."""
        return self.flat.nbytes

    def take(self, index: int) -> None:
        """Copy a gradient into the bucket, and let `param.grad` be its view from now on."""
        param, view = self.params[index], self.views[index]
        if param.grad is not None and param.grad.is_sparse:
            raise CourseError(
                f"DDP: need dense gradients; got a sparse one for {self.names[index]}. "
                "Try sparse=False in its nn.Embedding."
            )
        if param.grad is not view:
            view.zero_() if param.grad is None else view.copy_(param.grad)
            param.grad = view
        self.missing.discard(index)


def make_buckets(module: nn.Module, bucket_bytes: float) -> list[Bucket]:
    """The buckets of a module's trainable parameters, in the order in which they will be full.

    The last parameter comes first, as backward gets there first; tied parameters come once. A
    bucket has one dtype and one device, and leaves when the last one of its parameters is there.
    """
    if not bucket_bytes > 0:
        raise CourseError(
            f"DDP: need bucket_bytes above 0; got {bucket_bytes}. Try 1, a bucket a parameter."
        )
    named = [(name, param) for name, param in module.named_parameters() if param.requires_grad]
    named.reverse()
    parts = sorted(group_alike([param for _, param in named], bucket_bytes), key=max)
    return [Bucket([named[number] for number in part]) for part in parts]
