"""What is trained: a GPT whose every saved byte can be named, and tokens made from a seed."""

from course_lib.models.data import IGNORED, next_tokens, padded_batch, token_batch
from course_lib.models.gpt import GPT, token_loss

__all__ = ["GPT", "IGNORED", "next_tokens", "padded_batch", "token_batch", "token_loss"]
