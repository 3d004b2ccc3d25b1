"""Models and data to train: a GPT and a BERT whose saved bytes can be counted, tokens, texts.

gpt         GPT from a ModelSpec; `Block`, `Attention`, `MLP`, `token_loss`
bert        BERT from the same blocks; masked tokens
data        tokens from a seed: batch n is a function of (seed, n)
text        Shakespeare's plays, or any text file, one token per character
dialogues   film dialogues, one token per word
download    files from the web, checked and cached
emulated    layers that take a given time without using a processor
storages    bytes that tensors occupy, each storage once
"""

from course_lib.models.bert import BERT, mask_tokens, masked_accuracy, right_and_asked
from course_lib.models.data import IGNORED, next_tokens, padded_batch, token_batch
from course_lib.models.emulated import emulated_loss, emulated_model
from course_lib.models.gpt import GPT, token_loss

__all__ = [
    "BERT",
    "GPT",
    "IGNORED",
    "emulated_loss",
    "emulated_model",
    "mask_tokens",
    "masked_accuracy",
    "next_tokens",
    "padded_batch",
    "right_and_asked",
    "token_batch",
    "token_loss",
]
