"""Exercises 4 to 6 of lesson 01: right answers in another style pass, other wrong ones do not."""

import re
from itertools import accumulate

import pytest
import torch

from course_lib.checks import CheckFailed, find_exercise


def layer_by_tensors(spec, batch, seq, number_bytes):
    def tensor(*shape, size=number_bytes):
        return torch.Size(shape).numel() * size

    x, wide = (batch, seq, spec.hidden), (batch, seq, spec.ffn_hidden)
    keys = (batch, spec.kv_heads, seq, spec.head_dim)
    pairs = (batch, spec.num_heads, seq, seq)
    return {
        "masks": tensor(*x, size=1) + tensor(*x, size=1),
        "norms": tensor(*x) + tensor(*x),
        "scores": tensor(*pairs) + tensor(*pairs, size=1) + tensor(*pairs),
        "attention": sum(tensor(*shape) for shape in (x, x, keys, keys, x)),
        "mlp": tensor(*x) + tensor(*wide) + tensor(*wide),
    }


def peak_by_sums(states, acts, grads, num_micro_batches):
    if num_micro_batches > 1:
        return states + sum(acts) + sum(grads)
    left = [0, *accumulate(acts)]
    came = [0, *accumulate(grads[::-1])]
    return states + max(a + g for a, g in zip(left[::-1], came, strict=True))


def peak_by_a_list(states, acts, grads, num_micro_batches):
    held, seen = {"states": states}, []

    def note(**more):
        held.update(more)
        seen.append(sum(held.values()))

    for _ in range(num_micro_batches):
        for layer, size in enumerate(acts):
            note(**{f"acts {layer}": size})
        for layer in range(len(acts) - 1, -1, -1):
            del held[f"acts {layer}"]
            note(**{f"grads {layer}": grads[layer]})
    return max(seen)


def flop_by_products(spec, batch, seq, causal):
    def product(m, k, n):
        return 2 * m * k * n

    tokens, head = batch * seq, spec.hidden // spec.num_heads
    columns = [spec.hidden, spec.kv_heads * head, spec.kv_heads * head, spec.hidden]
    layer = sum(product(tokens, spec.hidden, n) for n in columns)
    layer += (2 + spec.gated) * product(tokens, spec.hidden, spec.ffn_hidden)
    scores = batch * spec.num_heads * (product(seq, head, seq) + product(seq, seq, head))
    layer += scores // 2 if causal else scores
    forward = spec.num_layers * layer + product(tokens, spec.hidden, spec.vocab)
    return forward + 2 * forward


@pytest.mark.parametrize(
    ("key", "answer"),
    [
        ("memory-4", layer_by_tensors),
        ("memory-5", peak_by_sums),
        ("memory-5", peak_by_a_list),
        ("memory-6", flop_by_products),
    ],
)
def test_another_right_answer_passes(key, answer):
    exercise = find_exercise(key)
    assert exercise.verdict(answer)
    assert exercise.seeded("hw1 ada").verdict(answer)


def the_whole_paper(spec, batch, seq, number_bytes):
    sbh, scores = seq * batch * spec.hidden, spec.num_heads * seq * seq * batch
    return {"norms": 4 * sbh, "attention": 10 * sbh, "scores": 5 * scores, "mlp": 18 * sbh,
            "masks": 2 * sbh}  # fmt: skip


def its_sum(spec, batch, seq, number_bytes):
    return sum(layer_by_tensors(spec, batch, seq, number_bytes).values())


def floats(spec, batch, seq, number_bytes):
    right = layer_by_tensors(spec, batch, seq, number_bytes)
    return {part: float(size) for part, size in right.items()}


@pytest.mark.parametrize(
    ("key", "answer", "says"),
    [
        ("memory-4", the_whole_paper, "mlp: need"),  # its MLP is 4h, its numbers are bf16
        ("memory-4", its_sum, "Return a dict with these keys"),
        ("memory-4", floats, "An int is needed"),
        ("memory-4", lambda *_: {"mlp": 1}, "got mlp"),
        ("memory-5", lambda states, acts, grads, n: states + sum(acts), "need"),
        ("memory-6", lambda spec, batch, seq, causal: 6 * batch * seq, "Print your parts"),
    ],
)
def test_a_wrong_answer_is_named(key, answer, says):
    with pytest.raises(CheckFailed, match=re.escape(says)):
        find_exercise(key).verdict(answer)
