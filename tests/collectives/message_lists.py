"""Messages of collectives that no lesson draws: expected by tests of real ranks and of formulas."""

from dataclasses import replace

from course_lib.collectives.messages import Message, scatter_messages, tree_broadcast_messages
from course_lib.cost.network import num_doublings


def tree_reduce_messages(p: int, num_bytes: float = 0.0, root: int = 0) -> list[Message]:
    """Reverse the tree broadcast, adding: ceil(log2 p) steps."""
    return [
        replace(
            message,
            step=num_doublings(p) + 1 - message.step,
            sender=message.receiver,
            receiver=message.sender,
            adds=True,
        )
        for message in reversed(tree_broadcast_messages(p, num_bytes, root))
    ]


def gather_messages(p: int, num_bytes: float = 0.0, root: int = 0) -> list[Message]:
    """Send each rank's shard to the root, one after another: p - 1 steps."""
    return [
        replace(message, sender=message.receiver, receiver=root)
        for message in scatter_messages(p, num_bytes, root)
    ]


def all_to_all_messages(p: int, num_bytes: float = 0.0) -> list[Message]:
    """Send shard s of rank r to position r of rank s: all at once, one after another per port."""
    return [
        Message(
            step=1,
            sender=rank,
            receiver=(rank + i) % p,
            shard=(rank + i) % p,
            to_shard=rank,
            num_bytes=num_bytes / p,
        )
        for i in range(1, p)
        for rank in range(p)
    ]
