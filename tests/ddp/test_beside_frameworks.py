"""Ours and PyTorch's DDP, in turns: the same gradients, and who sends how many messages."""

import torch

from course_lib.core import MODELS
from course_lib.ddp.beside_frameworks import backward_in_turns


def test_gradients_are_bit_equal_and_pytorch_sends_fewer_messages(pools):
    for (ours, theirs), seen in pools(2).run(backward_in_turns, MODELS["small"], 2, 3):
        assert all(map(torch.equal, ours, theirs))
        calls = [
            [[event.num_bytes for event in step if event.kind == "all_reduce"] for step in steps]
            for steps in seen
        ]
        assert [len(steps) for steps in calls] == [3, 3]
        assert sum(calls[0][-1]) == sum(calls[1][-1]) == sum(grad.nbytes for grad in ours)
        assert len(calls[1][-1]) < len(calls[0][-1])
        assert len(calls[1][0]) == 1  # PyTorch learns the order of the gradients first
        assert all(sum(event.kind == "compute" for event in step) == 1 for step in seen[0])
