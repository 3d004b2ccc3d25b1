"""Lesson 10 outside of the notebook: measure what freeing, prefetch and bf16 do to a step.

torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 2 cluster/exercises/10_fsdp.py

A model takes a few steps under our FSDP in several ways, and under PyTorch's `fully_shard`; they
take turns, so that other load on the network affects all of them alike. `--model gpt2-char` and
`--model bert-dialogues` have as many parameters as the models of Jin, Zhang and Huang 2023
(lesson 10, section 10).
Predict first: which way is fastest, which keeps least? Run it on 1, 2 and 4 GPUs of a node, then on
two nodes. Each rank writes its run record to runs/10_fsdp, or where `--record-to` says.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.core import COMMUNICATION_KINDS, CourseError, ModelSpec
from course_lib.core.presets import ENCODERS, find_model
from course_lib.core.units import format_bytes
from course_lib.cost.traffic import sent_bytes
from course_lib.frameworks import fully_sharded
from course_lib.frameworks.fully_sharded import whole_weights
from course_lib.fsdp import FSDP
from course_lib.fsdp.lab import resident_over_time
from course_lib.models import BERT, GPT, mask_tokens, next_tokens, token_batch, token_loss
from course_lib.models.bert import EncoderBlock
from course_lib.models.gpt import Block
from course_lib.ranks import launch, record, span
from course_lib.ranks.timing import largest_difference
from course_lib.ranks.world import rank_device

ADAMW = partial(torch.optim.AdamW, lr=1e-4)
WAYS: dict[str, dict[str, Any]] = {
    "freed": {},
    "kept": {"reshard_after_forward": False},
    "no prefetch": {"prefetch": False},
    "bf16": {"compute_dtype": torch.bfloat16},
}
THEIRS = "PyTorch, freed"


def spec_of(name: str) -> ModelSpec:
    """Return the specification of a GPT or a BERT by its name.

    Raises: CourseError for a name that is neither
    """
    return ENCODERS[name] if name in ENCODERS else find_model(name)


def batch_of(rank: int, args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of a rank, from a seed."""
    spec, device = spec_of(args.model), rank_device()
    seq = min(args.seq, spec.max_seq)
    if args.model in ENCODERS:
        tokens = token_batch(rank, batch=args.batch, seq=seq - 1, vocab=spec.vocab)
        random = torch.Generator().manual_seed(rank)
        pair = mask_tokens(tokens, random, vocab=spec.vocab, mask=0, num_special=1)
    else:
        pair = next_tokens(token_batch(rank, batch=args.batch, seq=seq, vocab=spec.vocab))
    return pair[0].to(device), pair[1].to(device)


def prepared(args: argparse.Namespace) -> dict[str, tuple[nn.Module, Callable[[Tensor], Any]]]:
    """Return, by name, a model to call, and a function that is called with its loss."""
    kind: type[nn.Module] = BERT if args.model in ENCODERS else GPT
    unit = EncoderBlock if kind is BERT else Block
    made: dict[str, tuple[nn.Module, Callable[[Tensor], Any]]] = {}
    for name, options in WAYS.items():
        torch.manual_seed(0)
        model = FSDP(kind(spec_of(args.model)).to(rank_device()), **options)
        made[name] = (model, partial(step, ADAMW(model.parameters())))
    torch.manual_seed(0)
    theirs = fully_sharded(kind(spec_of(args.model)).to(rank_device()), ADAMW, unit=unit)
    return made | {THEIRS: (theirs.model, theirs.step)}


def step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """Run backward and the optimizer's step."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def sweep(rank: int, args: argparse.Namespace) -> dict[str, float]:
    """Return the fastest step of each way, in seconds."""
    ways, (inputs, targets) = prepared(args), batch_of(rank, args)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    notes: dict[str, str] = {}
    for turn in range(args.turns + 2):  # the first step learns the order of the units
        for name, (model, finish) in ways.items():
            dist.barrier()
            start_s = time.perf_counter()
            with record() as log, span("compute", name):
                finish(token_loss(model(inputs), targets))
                if inputs.is_cuda:
                    torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - start_s)
            if turn == 1:
                sent = sent_bytes(calls_in(log.events), dist.get_world_size())
                notes[name] = f"{format_bytes(sent)} sent"
    apart = weights_apart(ways["freed"][0], ways[THEIRS][0])
    for name, (model, _) in ways.items():
        if isinstance(model, FSDP):
            with resident_over_time(model) as ledger:
                token_loss(model(inputs), targets).backward()
            model.zero_grad()
            notes[name] += (
                f", at most {format_bytes(max(ledger.bytes_by_kind['params']))} of parameters"
            )
    found = {name: min(times[2:]) for name, times in seconds.items()}
    if rank == 0:
        print_table(found, notes, args, inputs)
        print(f"largest difference of their parameters, freed: {apart:.1e}", flush=True)
    return found


def weights_apart(ours: Any, theirs: nn.Module) -> float:
    """Return the largest difference of the whole parameters."""
    state, whole = ours.full_state_dict(), whole_weights(theirs)
    return largest_difference((state[name].to(rank_device()) for name in whole), whole.values())


def calls_in(events: list[Any]) -> list[Any]:
    """Return the communication among the events."""
    return [event for event in events if event.kind in COMMUNICATION_KINDS]


def print_table(
    found: dict[str, float], notes: dict[str, str], args: argparse.Namespace, inputs: Tensor
) -> None:
    """Print one line per way."""
    p = dist.get_world_size()
    print(f"{args.model} on {p} rank{'s' * (p > 1)}, AdamW; fastest of its turns", flush=True)
    for name, seconds in found.items():
        rate = p * inputs.numel() / seconds
        print(
            f"{name:>15}: {seconds * 1e3:8.1f} ms per step, {rate:8.0f} tokens/s, {notes[name]}",
            flush=True,
        )


def read_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line; end with a message where they make no sense."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="small", help="small, gpt2-char, bert-dialogues ...")
    parser.add_argument("--batch", type=int, default=1, help="sequences on each rank")
    parser.add_argument("--seq", type=int, default=64, help="tokens in a sequence")
    parser.add_argument("--turns", type=int, default=5, help="steps of each way, after two")
    parser.add_argument("--record-to", default="runs/10_fsdp", metavar="FOLDER")
    arguments = parser.parse_args(words)
    try:
        spec_of(arguments.model)
    except CourseError as problem:
        parser.error(str(problem))
    if min(arguments.batch, arguments.turns) < 1 or arguments.seq < 2:
        parser.error("need --batch and --turns above 0, and --seq above 1")
    return arguments


if __name__ == "__main__":
    arguments = read_arguments()
    launch(sweep, arguments, record_to=arguments.record_to)
