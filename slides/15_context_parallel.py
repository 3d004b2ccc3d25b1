"""The pictures of the deck 15_context_parallel, drawn by the functions that the notebook calls."""

from dataclasses import replace

from course_lib.context_parallel import pictures as lesson
from course_lib.context_parallel.cost import AttentionSizes
from course_lib.context_parallel.lab import forward_s
from course_lib.cost.hardware import H100

LLAMA = AttentionSizes(seq=131072, num_heads=32, kv_heads=8, head_dim=128)


def memory():
    """Bytes that one layer's attention keeps, over the length."""
    return lesson.memory_picture(LLAMA, 8)[0]


def ring():
    """Whose keys are where in each step."""
    return lesson.ring_blocks(4)[0]


def hiding():
    """Computing and sending, over the tokens of a rank."""
    return lesson.hiding_picture()[0]


def causal():
    """The mask in three layouts."""
    return lesson.causal_work(4)[0]


def heads():
    """Tokens become heads."""
    return lesson.tokens_to_heads(4)[0]


def forms():
    """The time of each form, over the length."""

    def seconds(seq):
        return forward_s(replace(LLAMA, seq=seq), 8, H100.peak() / 2, H100.links["InfiniBand NDR"])

    words = "Llama-8B, 8 H100 at half of their peak, one InfiniBand NDR adapter each"
    return lesson.forms_picture(seconds, [2**power for power in range(12, 21)], words)[0]


def published():
    """Runs of torchtitan, whose length grows with the ranks."""
    return lesson.long_runs_picture()[0]


def pictures():
    """All pictures by the names the deck calls them."""
    drawn = (memory, ring, hiding, causal, heads, forms, published)
    return {draw.__name__: draw() for draw in drawn}
