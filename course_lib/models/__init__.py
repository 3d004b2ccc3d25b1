"""What is trained: a GPT and a BERT whose every saved byte can be named, and tokens from a seed."""

from course_lib.models.bert import BERT, mask_tokens, masked_accuracy, right_and_asked
from course_lib.models.data import IGNORED, next_tokens, padded_batch, token_batch
from course_lib.models.gpt import GPT, token_loss

__all__ = [
    "BERT",
    "GPT",
    "IGNORED",
    "mask_tokens",
    "masked_accuracy",
    "next_tokens",
    "padded_batch",
    "right_and_asked",
    "token_batch",
    "token_loss",
]
