"""The pictures of the deck 07_tensor_parallel, drawn by the functions that the notebook calls."""

from dataclasses import replace

import torch

from course_lib.core import INFINIBAND, MODELS, NVLINK, Parallelism, TwoLevelLink
from course_lib.cost.flops import train_step_flop
from course_lib.cost.traffic import sent_bytes, traffic_s
from course_lib.display import Voices, compare
from course_lib.memory import activations, params_on_rank
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from course_lib.tensor_parallel.cost import tensor_traffic
from course_lib.tensor_parallel.pictures import split_mlp

SPEED = 343e12  # FLOP/s of a GPU, fitted to the published run on 2 GPUs
# Ultra-Scale Playbook, tp_scaling and pp_comm_bandwidth: tokens/s a GPU, sequences, bytes/s
PUBLISHED = {
    2: (13923.18, 3, 435.967e9),
    4: (12420.76, 8, 435.967e9),
    8: (10903.32, 12, 435.967e9),
    16: (6245.6, 16, 361.749e9),
    32: (2146.44, 20, 160.14e9),
}


def mlp():
    """The cuts of an MLP on four ranks."""
    return split_mlp(4, "What a rank needs for B it has computed itself")


class TwoParts(torch.nn.Module):
    """An MLP computed in two parts, as two ranks would."""

    def __init__(self, whole):
        super().__init__()
        self.whole = whole

    def forward(self, x):
        up, out = self.whole.up, self.whole.out
        halves = zip(up.weight.chunk(2), up.bias.chunk(2), out.weight.chunk(2, dim=1), strict=True)
        parts = [torch.nn.functional.gelu(x @ a.T + bias) @ b.T for a, bias, b in halves]
        return sum(parts) + out.bias


def losses(split, steps=100):
    """The loss of a small GPT in each step."""
    torch.manual_seed(0)
    model, found = GPT(MODELS["tiny"]).double(), []
    for block in model.blocks if split else ():
        block.mlp = TwoParts(block.mlp)
    sgd = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for n in range(steps):
        inputs, targets = next_tokens(token_batch(n, batch=8, seq=16, vocab=256))
        sgd.zero_grad()
        loss = token_loss(model(inputs), targets)
        loss.backward()
        sgd.step()
        found.append(loss.item())
    return found


def curves():
    """The loss of one process, and of one that adds up two parts."""
    alone, split = losses(split=False), losses(split=True)
    apart = max(abs(a - b) for a, b in zip(alone, split, strict=True))
    title = f"100 steps in float64: never more than {apart:.0e} apart"
    voices = Voices(formula=alone[::4], measurement=split[::4])
    labels = {"x_label": "step", "y_label": "loss", "note": "line: whole; dots: in two parts"}
    return compare(range(0, 100, 4), voices, title, **labels)


def memory():
    """What a rank of Llama-8B holds, by degree."""
    spec, degrees = MODELS["llama-8b"], [1, 2, 4, 8]

    def kept(p, sequence_parallel):
        one = Parallelism(tp=p, sequence_parallel=sequence_parallel)
        return sum(activations(spec, 1, 8192, parallelism=one).values()) / 2**30

    params = [params_on_rank(spec, Parallelism(tp=p)) * 2 / 2**30 for p in degrees]
    voices = {
        "parameters, bf16": Voices(formula=params),
        "activations": Voices(formula=[kept(p, False) for p in degrees]),
        "activations, sequence parallel": Voices(formula=[kept(p, True) for p in degrees]),
    }
    title = f"{kept(1, False):.0f} GiB of activations become {kept(8, False):.0f} on 8 ranks, "
    title += f"and {kept(8, True):.0f} with the tokens split"
    labels = {"x_label": "ranks p", "y_label": "on a rank (GiB)"}
    return compare(degrees, voices, title, note="Llama-8B, 8192 tokens, bf16", **labels)


def wires():
    """Seconds of talking in a step of Llama-8B on 8 ranks."""
    spec, seqs = MODELS["llama-8b"], [512, 1024, 2048, 4096, 8192]
    voices = {
        link.name: Voices(
            formula=[1e3 * traffic_s(tensor_traffic(spec, 1, seq), 8, link) for seq in seqs]
        )
        for link in (NVLINK, INFINIBAND)
    }
    fast, slow = (one.formula[-1] for one in voices.values())
    title = f"Llama-8B, 8192 tokens on 8 ranks: {fast:.0f} ms of talking, or {slow:.0f}"
    return compare(seqs, voices, title, x_label="tokens", y_label="talking in a step (ms)")


def published():
    """Tokens a second of a GPU, published and on paper."""
    spec, paper = MODELS["llama-3b"], []
    for p, (_, batch, bytes_per_s) in PUBLISHED.items():
        talk_s = sent_bytes(tensor_traffic(spec, batch, 4096), p) / bytes_per_s
        step_s = train_step_flop(spec, batch, 4096) / p / SPEED + talk_s
        paper.append(batch * 4096 / p / step_s)
    measured = [tokens for tokens, *_ in PUBLISHED.values()]
    title = f"8 to 16 ranks: {measured[3] / measured[2]:.2f} of the speed, "
    title += f"{paper[3] / paper[2]:.2f} on paper"
    labels = {"x_label": "ranks p, 8 to a node", "y_label": "tokens/s of a GPU"}
    return compare(list(PUBLISHED), Voices(formula=paper, measurement=measured), title, **labels)


def batch():
    """The share of a step that computes, for one sequence and for one a rank."""
    spec, degrees, seq = MODELS["llama-8b"], [1, 2, 4, 8, 16, 32], 512
    outside = replace(INFINIBAND, bytes_per_s=8 * INFINIBAND.bytes_per_s)
    link = TwoLevelLink(inside=NVLINK, outside=outside, ranks_per_node=8)

    def share(p, sequences):
        compute_s = train_step_flop(spec, sequences, seq) / p / SPEED
        talk_s = traffic_s(tensor_traffic(spec, sequences, seq), p, link)
        return 100 * compute_s / (compute_s + talk_s)

    voices = {
        "1 sequence": Voices(formula=[share(p, 1) for p in degrees]),
        "p sequences": Voices(formula=[share(p, p) for p in degrees]),
    }
    title = f"8 ranks compute for {share(8, 1):.0f} % of the time, with 8 sequences "
    title += f"{share(8, 8):.0f} %"
    labels = {"x_label": "ranks p, 8 to a node", "y_label": "computing (% of the time)"}
    return compare(degrees, voices, title, note=f"Llama-8B, {seq} tokens", **labels)


def pictures():
    """All pictures by the names the deck calls them."""
    draws = (mlp, curves, memory, wires, published, batch)
    return {draw.__name__: draw() for draw in draws}
