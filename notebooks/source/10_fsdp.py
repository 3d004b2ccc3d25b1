# %% [markdown]
# # 10 FSDP: gather, use, free
#
# ZeRO's stage 3 keeps every number once, and gathers a module when it computes. In a simple version
# every rank waits for every gather. *Fully sharded data parallelism* (FSDP) gathers whole blocks,
# and overlaps the next gather with the computation of this block. **What does it hold, what does it
# send, and how much of that costs time?**
#
# *After this lesson you can* build a unit that is gathered and freed, with the hooks that drive it;
# say what a step holds and sends, in any combination of precisions; order the gathers so that
# communication overlaps; explain what PyTorch's `fully_shard` does differently.
#
# *Before:* lessons 06 (overlap) and 09 (ZeRO, flat parameters); 03 for precisions. *Time:* 65
# minutes of reading, 80 of exercises, with a break after section 4. Exercises 1 to 3 are the core,
# 4 goes further.
#
# | symbol | in code | meaning |
# |---|---|---|
# | $p$ | `p` | ranks, each with its part of the batch |
# | $N$ | `N` | parameters of the model |
# | unit | `unit` | modules that are gathered and freed together: a block |
# | root | unit 0 | what lies in no block: embedding, head, last norm |
# | $N_i$ | `numels[i]` | parameters of unit $i$ |

# %%
# %load_ext course_lib.ranks
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from course_lib.checks import check
from course_lib.core import COMMUNICATION_KINDS, MODELS, Link
from course_lib.cost.traffic import sent_bytes
from course_lib.display import Voices, claim, compare, memory, predict, reveal, show, timelines
from course_lib.fsdp import FSDP, cost, lab
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from course_lib.ranks import RankError, Ranks, record
from course_lib.zero import FlatLayout

# %% [markdown]
# ## 1 Units
#
# A unit's parameters lie in one **flat parameter**, cut into $p$ equal shards (lesson 09). It is
# gathered before its block computes, and freed after: one message per block, not one per parameter.
#
# **Who does it how?** Flat parameters are how PyTorch's first FSDP works
# (`FullyShardedDataParallel`, Zhao et al. 2023), and what you build here. Its successor
# `fully_shard`, also called FSDP2, shards *each parameter by itself on dim 0*: rank $r$ keeps the
# $r$-th slice of its first dimension, as a `DTensor`. For the gather, the slices of a unit are
# copied into one buffer, and the whole parameters out of it; so it also sends one message per unit,
# and pays a copy. In return a shard is a tensor with a name, a dtype and `requires_grad` of its
# own: frozen parameters and other dtypes fit into the same unit, and a checkpoint needs no gather.
# DeepSpeed cuts each parameter, too, but flattened. All of them free between uses what they
# gathered, and send the same bytes, but for padding.
#
# What is the most that a rank holds of the parameters? Its shards; the root, which stays whole from
# forward to backward; and the largest block, together with the next one, which is already being
# gathered. GPT-2 in fp32, on 4 ranks: how much is that at the peak?

# %% tags=["predict"]
with torch.device("meta"):  # shapes without memory
    gpt2 = GPT(MODELS["gpt2"])
block = sum(param.numel() for param in gpt2.blocks[0].parameters())
root = sum(param.numel() for param in gpt2.parameters()) - 12 * block
print(f"{4 * (root + 12 * block) / 1e6:.0f} MB: ", end="")
print(f"the root {4 * root / 1e6:.0f} MB, each of 12 blocks {4 * block / 1e6:.0f} MB")
guess_peak = predict("parameters on a rank at the peak", unit="MB")
### GUESS guess_peak.commit(250)

# %%
sizes = cost.UnitSizes(numels=(root, *[block] * 12), p=4)
reveal(guess_peak, cost.peak_param_bytes(sizes) / 1e6)
one_unit = cost.UnitSizes(numels=(root + 12 * block,), p=4)
print(f"all in one unit: {cost.peak_param_bytes(one_unit) / 1e6:.0f} MB, more than the model")

# %% [markdown]
# Now real ranks and a small GPT with four blocks. `lab.resident_over_time` reads the storages
# whenever something is gathered or freed; `cost.fsdp_ledger` predicts the same step.

# %%
four = Ranks(4)
spec = replace(MODELS["tiny"], num_layers=4)
BATCH = next_tokens(token_batch(0, batch=12, seq=16, vocab=256))


def loss_on(model, rank, p):  # on this rank's part of the batch
    return token_loss(model(BATCH[0][rank::p]), BATCH[1][rank::p])


def one_step(rank, p, **options):
    """Return the bytes over a step, its messages, and the sizes of its units."""
    model = FSDP(GPT(spec), **options)
    for _ in range(2):  # the first step learns the order of the units
        model.zero_grad()
        with lab.resident_over_time(model) as ledger, record() as log:
            loss_on(model, rank, p).backward()
    calls = [event for event in log.events if event.kind in COMMUNICATION_KINDS]
    return ledger, calls, lab.sizes_of(model)


# %% tags=["picture"]
from itertools import pairwise


def teeth(numbers):  # KiB, each change once
    return [now / 2**10 for last, now in pairwise([None, *numbers]) if now != last]


ledger, calls, sizes = four.run(one_step, 4)[0]
held = teeth(ledger.bytes_by_kind["params"])
paper = teeth(cost.fsdp_ledger(sizes).bytes_by_kind["params"])
peak = cost.peak_param_bytes(sizes) / 2**10
title = f"Gather, use, free: at most {max(held):.0f} KiB; the formula says {peak:.0f}"
axes = {"x_label": "gathers and frees of a step", "y_label": "parameters on a rank (KiB)"}
figure = compare(range(len(held)), Voices(formula=paper, measurement=held), title, **axes)
show(figure, alt=f"{title}; each dot lies on the line")

# %% [markdown]
# The model is never whole: that would be one wide tooth in the middle.
#
# ### Exercise 1 (core): a unit
#
# `self.shard` is this rank's part. `gather()` fills the flat parameter, and makes the parameters
# views of it: `param.data = view`. `free()` makes them empty (`flat.new_empty(0)`), and gives the
# memory back.
#
# How? Between forward and backward, autograd holds views of the flat parameter, so dropping our own
# reference frees nothing. But its *storage* can be emptied and filled again, as PyTorch's FSDP
# does: `flat.untyped_storage().resize_(0)`, later `.resize_(num_bytes)`. Budget: one all-gather.
# About 11 lines, 20 minutes.
#
# <details><summary>Hint: the shard has no storage</summary>
# A slice is a view of the flat parameter, and is emptied with it: <code>.clone()</code>.
# </details>
# <details><summary>Hint: where are the views from?</summary>
# <code>self.layout.flatten(params)</code> makes the flat parameter,
# <code>self.layout.views(flat)</code> are views of it.
# </details>
# <details><summary>Hint: originals are alive</summary>
# They live until <code>param.data</code> is something else. <code>__init__</code> may end with
# <code>self.free()</code>.
# </details>


# %% tags=["exercise"] exercise="fsdp-1"
class FlatUnit:
    """A module's parameters: a shard of them always, all of them from gather() to free()."""

    def __init__(self, module):
        self.params = list(module.parameters())
        self.layout = FlatLayout.of(self.params, dist.get_world_size())
        ### BEGIN SOLUTION: the flat parameter, self.shard, and nothing else that is large
        self.flat = self.layout.flatten(self.params)
        self.flat_bytes = self.flat.nbytes
        self.shard = self.flat[self.layout.shard_slice(dist.get_rank())].clone()
        self.free()
        ### END SOLUTION

    def gather(self):
        ### BEGIN SOLUTION: bytes, numbers, views
        self.flat.untyped_storage().resize_(self.flat_bytes)
        dist.all_gather_single(self.flat, self.shard)
        for param, view in zip(self.params, self.layout.views(self.flat), strict=True):
            param.data = view
        ### END SOLUTION

    def free(self):
        ### BEGIN SOLUTION: no views, no bytes
        for param in self.params:
            param.data = self.flat.new_empty(0)
        self.flat.untyped_storage().resize_(0)
        ### END SOLUTION


# %% tags=["check"] exercise="fsdp-1"
check("fsdp-1", FlatUnit)

# %% [markdown]
# **The peak of the parameters: all shards, the root, and the largest unit together with the next.**
#
# ## 2 Backward
#
# When backward reaches a block, its parameters have been freed. So a hook on the block's *output*
# gathers them again as soon as the gradient of that output is known. Then the gradients of the
# block's parameters arrive, one by one (lesson 06). With the last of them, the flat gradient is
# sent in **one reduce-scatter**, and each rank keeps its shard of the mean.
#
# ### Exercise 2 (core): the hooks of a unit
#
# `unit` has `params`, `layout`, `shard`, `gather()` and `free()`. After backward, the mean is in
# `unit.shard.grad` (added to what is there), and nothing whole is left: no flat gradient, no
# `param.grad`. Budget: a gather and a free in forward; a gather, a reduce-scatter and a free in
# backward. About 13 lines, 25 minutes.
#
# <details><summary>Hint: a hook on a tensor</summary>
# <code>output.register_hook(f)</code> calls <code>f(grad)</code>. What f returns replaces the
# gradient, unless it is None. Without gradients (evaluation) there is nothing to hook:
# <code>output.requires_grad</code>.
# </details>
# <details><summary>Hint: the second backward sends nothing</summary>
# <code>missing</code> has to be full again.
# </details>
# <details><summary>Hint: the padding</summary>
# The flat gradient is longer than the gradients. <code>unit.layout.flatten(grads)</code> puts zeros
# there.
# </details>


# %% tags=["exercise"] exercise="fsdp-2"
class Hooks:
    """Gather a unit, use it, free it; twice a step."""

    def __init__(self, module, unit):
        self.unit, self.missing = unit, set(unit.params)  # missing: whose gradient is not there
        module.register_forward_pre_hook(self.before_forward)
        module.register_forward_hook(self.after_forward)
        for param in unit.params:
            param.register_post_accumulate_grad_hook(self.on_grad)

    def before_forward(self, module, args):
        ### BEGIN SOLUTION: one line
        self.unit.gather()
        ### END SOLUTION

    def after_forward(self, module, args, output):
        ### BEGIN SOLUTION: free; and what happens when the output's gradient is there?
        self.unit.free()
        if output.requires_grad:
            output.register_hook(lambda grad: self.unit.gather())
        ### END SOLUTION

    def on_grad(self, param):
        ### BEGIN SOLUTION: with the last one: send, keep the mean, clear, free
        self.missing.discard(param)
        if not self.missing:
            unit = self.unit
            flat = unit.layout.flatten([param.grad for param in unit.params])
            mean = torch.empty_like(unit.shard)
            dist.reduce_scatter_single(mean, flat)
            mean = mean / dist.get_world_size()
            unit.shard.grad = mean if unit.shard.grad is None else unit.shard.grad + mean
            for param in unit.params:
                param.grad = None
            self.missing = set(unit.params)
            unit.free()
        ### END SOLUTION


# %% tags=["check"] exercise="fsdp-2"
check("fsdp-2", Hooks)

# %% [markdown]
# The course's `FSDP(module)` does this for every member of a `ModuleList`, and for the root. Its
# `parameters()` are the shards, so any elementwise optimizer can step them. (Frozen parameters have
# a flat parameter of their own, without a reduce-scatter.) Does it compute what one process does?


# %%
def train(rank, p):
    torch.manual_seed(rank)  # other weights on each rank: FSDP has to make them equal
    model = FSDP(GPT(spec).double())
    sgd = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for _ in range(3):
        sgd.zero_grad()
        loss_on(model, rank, p).backward()
        sgd.step()
    return model.full_state_dict()


# %% tags=["check"]
single, pair = Ranks(1), Ranks(2)
alone = single.run(train, 1)[0]
for p, ranks in {2: pair, 4: four}.items():
    found = ranks.run(train, p)[p - 1]
    near = all((alone[name] - found[name]).abs().max() < 1e-12 for name in alone)
    print(f"{p} ranks, after 3 steps: as one process, within 1e-12: {near}")

# %% [markdown]
# **Freed after forward, a block is gathered twice and reduced once per step; in
# between a rank has only its shard.**
#
# ## 3 To free or not to free
#
# Why free a block after forward, if backward needs it again? With `reshard_after_forward=False` it
# stays. Plain data parallelism all-reduces its gradients, and a ring all-reduce is a reduce-scatter
# and an all-gather. Everything in fp32: how many times as much does FSDP send, if it frees, and if
# it does not?

# %% tags=["predict"]
guess_free = predict("freed after forward: bytes sent, as a multiple of plain DP's (like 4/3)")
### GUESS guess_free.commit("3/2")
guess_keep = predict("kept until backward: bytes sent, as a multiple of plain DP's")
### GUESS guess_keep.commit(1)

# %% tags=["picture"]
from course_lib.fsdp import beside_frameworks as beside

sent, peaks = {}, {}
ddp = sum(map(sizes.grad_bytes, range(5))) * 2 * 3 / 4
for name, frees in {"freed": True, "kept": False}.items():
    ledger, calls, sizes = four.run(one_step, 4, reshard_after_forward=frees)[0]
    paper = cost.fsdp_traffic(sizes, reshard_after_forward=frees)
    theirs = four.run(beside.torchs_calls, spec, BATCH, frees)[0]
    sent[name] = [sent_bytes(found, 4) / ddp for found in (paper, calls, theirs)]
    peaks[name] = ledger
    words = "formula {:.3f}, ours {:.3f}, PyTorch's {:.3f} of plain DP"
    print(f"{name}: {words.format(*sent[name])}")
reveal(guess_free, sent["freed"][1])
reveal(guess_keep, sent["kept"][1])
title = f"Freed, {sent['freed'][1]:.2f} times as much is sent, and less is held"
show(memory(peaks, title), alt=f"{title}: bars at the fullest moment of a step")

# %% [markdown]
# Without a root it would be 1.5: the root is gathered once, because it is needed last in forward
# and first in backward. The formula, our ranks and PyTorch's `fully_shard` count the same bytes.
#
# **In one precision, freeing after forward sends up to 1.5 times as much as plain data parallelism,
# and saves the memory of the whole model between forward and backward.**
#
# ## 4 Which gather is launched when
#
# An emulated link and layers that sleep (lesson 06): five of them, and each gather takes about as
# long as a forward. How long is a step if every gather waits until it is needed, and how long if
# the next one is launched before this layer computes?

# %%
wire = Link(name="slow Ethernet", latency_s=2e-3, bytes_per_s=10e6)
slow = Ranks(2, link=wire)
build = partial(lab.EmulatedModel, num_layers=5, forward_s=0.015, backward_s=0.03)
runs = {"on demand": {"prefetch": False}, "prefetch": {"prefetch": True}}
emulated = cost.UnitSizes(numels=(0, *[2**16] * 5), p=2)
times = lab.emulated_times(build())
plan = {name: cost.fsdp_step(times, emulated, 2, wire, **options) for name, options in runs.items()}
step_ms = {name: 1e3 * max(event.end_s for event in events) for name, events in plan.items()}
gather_ms = 1e3 * plan["prefetch"][0].duration_s
print(f"computing {times.compute_s * 1e3:.0f} ms, a gather {gather_ms:.0f} ms, and so a reduce")
print(f"on demand, on paper: {step_ms['on demand']:.0f} ms")

# %% tags=["predict"]
guess_step = predict("a step with prefetch", unit="ms")
### GUESS guess_step.commit(350)

# %% tags=["picture", "measured"]
from course_lib.models.emulated import emulated_loss

measured = lab.measure_fsdp(slow, build, emulated_loss, runs, turns=5)
reveal(guess_step, step_ms["prefetch"])
rows = {
    "measured, on demand": measured["on demand"].events,
    "predicted, with prefetch": plan["prefetch"],
    "measured, with prefetch": measured["prefetch"].events,
}
rows = {name: [event for event in events if event.rank == 0] for name, events in rows.items()}
before, after = (1e3 * measured[name].step_s for name in runs)
title = f"Prefetch shortens the step from {before:.0f} ms to {after:.0f} ms"
claim("prefetch shortens the step", after < before)
show(timelines(rows, title, link=wire), alt=f"{title}: gathers overlap with computing")

# %% [markdown]
# Three messages stay exposed: the first gather, the first one of backward, and the last reduce.
#
# ### Exercise 3 (core): the order of a step
#
# Write what a rank does: `("gather", i)` when the message is *launched*, `("forward", i)`,
# `("backward", i)`, `("free", i)`. Units are numbered 0 to $n-1$; there is no root. With prefetch
# the next unit is launched before this one computes, in backward too. What is there, or under way,
# is not gathered again. A unit is freed after its backward, and with `reshard_after_forward` after
# its forward as well, the last one too. About 14 lines, 20 minutes.
#
# <details><summary>Hint: twice the same</summary>
# A helper for both passes: this unit, and the one that follows if there is one; gather what is not
# in a set <code>there</code>.
# </details>


# %% tags=["exercise"] exercise="fsdp-3"
def order_of(num_units, reshard_after_forward, prefetch):
    """A list of (kind, unit)."""
    moves, there = [], set()
    ### BEGIN SOLUTION: forward from 0 on, backward from the last one on

    def use(kind, unit, following):
        for one in [unit, following] if prefetch else [unit]:
            if 0 <= one < num_units and one not in there:
                there.add(one)
                moves.append(("gather", one))
        moves.append((kind, unit))

    for unit in range(num_units):
        use("forward", unit, unit + 1)
        if reshard_after_forward:
            there.discard(unit)
            moves.append(("free", unit))
    for unit in reversed(range(num_units)):
        use("backward", unit, unit - 1)
        moves.append(("free", unit))
    ### END SOLUTION
    return moves


# %% tags=["check"] exercise="fsdp-3"
check("fsdp-3", order_of)

# %% [markdown]
# And a large model? 8 billion parameters in bf16 on 8 GPUs, 2,048 tokens on each. Fewer, larger
# units pay fewer latencies, and need more memory. On which link does prefetch stop helping?

# %% tags=["picture"]
from course_lib.fsdp.explorer import fsdp_explorer

fsdp_explorer()

# %% [markdown]
# **Launch the next gather before this unit computes: where a gather takes no longer than the
# computation beside it, only the first gather of each pass and the last reduction are exposed.**
#
# *This is a good place for a break.*
#
# ## 5 Two precisions
#
# The optimizer needs fp32, or small updates are lost (lesson 03). But what is gathered and computed
# with may be bf16: half the bytes of a gather. And the gradients? They are *added up* over ranks.
# In bf16, with 8 significant bits, each addition rounds.
#
# ### Exercise 4 (further): bf16 to compute, fp32 to keep
#
# `shard` is an fp32 parameter. `gather()` returns all parameters in bf16; `reduce(grads)` takes
# bf16 gradients of this rank, and sets `shard.grad` to their fp32 mean over the ranks. Budget: 2
# bytes per number to gather, 4 to reduce. Besides the shard, only these 2 bytes per number are
# alive after `gather()`, and only `shard.grad` after `reduce()`. About 8 lines, 15 minutes.
#
# <details><summary>Hint: half the bytes</summary>
# Convert, then send: <code>self.shard.detach().bfloat16()</code>.
# </details>


# %% tags=["exercise"] exercise="fsdp-4"
class Mixed:
    """A unit that computes in bf16, and keeps fp32."""

    def __init__(self, shard, layout):
        self.shard, self.layout = shard, layout

    def gather(self):
        """All parameters in bf16, a list of tensors."""
        ### BEGIN SOLUTION: convert, then send
        mine = self.shard.detach().bfloat16()
        flat = mine.new_empty(self.layout.padded_numel)
        dist.all_gather_single(flat, mine)
        return self.layout.views(flat)
        ### END SOLUTION

    def reduce(self, grads):
        """Leave the mean in self.shard.grad."""
        ### BEGIN SOLUTION: convert, then add up, then divide
        flat = self.layout.flatten([grad.float() for grad in grads])
        mean = flat.new_empty(self.layout.shard_numel)
        dist.reduce_scatter_single(mean, flat)
        self.shard.grad = mean / dist.get_world_size()
        ### END SOLUTION


# %% tags=["check"] exercise="fsdp-4"
check("fsdp-4", Mixed)

# %% [markdown]
# So "1.5 times" was a statement about one precision. Freed after forward, FSDP sends two gathers
# and a reduce-scatter, DDP twice the bytes of its gradients: with $g$, $r$ and $d$ bytes per number
# gathered, reduced, and all-reduced by DDP, the ratio is $(2g + r) / 2d$. bf16 gathers, fp32
# reduction: how many times what DDP sends with bf16 gradients?

# %% tags=["predict"]
guess_bf16 = predict("sent, divided by what DDP sends in bf16")
### GUESS guess_bf16.commit(1.5)

# %%
for gathered, reduced in ((4, 4), (2, 4), (2, 2)):
    ratios = [cost.times_plain_dp(gathered, reduced, ddp_bytes) for ddp_bytes in (4, 2)]
    words = "{:.2f} times fp32 DDP, {:.2f} times bf16 DDP".format(*ratios)
    print(f"gathers {gathered} bytes per number, reduces {reduced}: {words}")
reveal(guess_bf16, cost.times_plain_dp(2, 4, 2))

# %% [markdown]
# How far off is a gradient that was computed and reduced in bf16? One rounding is at most 0.4 % of
# a number; but there are many of them. Measured on 4 ranks, by the length of the error. And does
# the loss show it?

# %% tags=["predict"]
guess_off = predict("error of the gradient, reduced in bf16", unit="%")
### GUESS guess_off.commit(3)

# %%
from course_lib.fsdp.pictures import losses_beside_fp32, ring_sums

POLICIES = {
    "fp32": {},
    "bf16, reduced in fp32": {"compute_dtype": torch.bfloat16},
    "bf16, reduced in bf16": {"compute_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16},
    "only reduced in bf16": {"reduce_dtype": torch.bfloat16},
}

# %% tags=["picture", "measured"]
found = {name: four.run(beside.in_precision, spec, BATCH, how) for name, how in POLICIES.items()}
off = {}
exact = torch.cat([grads for grads, _ in found["fp32"]])
for name, by_rank in found.items():
    error = torch.cat([grads for grads, _ in by_rank]) - exact
    off[name] = 100 * (error.norm() / exact.norm()).item()
    print(f"{name}: {off[name]:.2f} % off in the first step, last loss {by_rank[0][1][-1]:.4f}")
reveal(guess_off, off["bf16, reduced in bf16"])
claim("computing is most of it", off["bf16, reduced in fp32"] > off["only reduced in bf16"])
figure, alt = losses_beside_fp32({name: by_rank[0][1] for name, by_rank in found.items()})
show(figure, alt=alt)

# %% [markdown]
# A loss curve that looks right proves little. And on 4 ranks, most of the error comes from
# computing in bf16; reducing in bf16 adds little. Why did Llama 3 reduce in fp32, then (Grattafiori
# et al. 2024, section 3.3.2), and why is that the default of TorchTitan? The error of a sum grows
# with its ranks. Here random numbers of $p$ ranks are added hop by hop, as on a ring:

# %% tags=["picture"]
figure, alt = ring_sums()
show(figure, alt=alt)

# %% [markdown]
# (A tree adds in $\log_2 p$ levels and loses less. fp32 makes all of it negligible, and doubles the
# bytes of the reduction.)
#
# **Compute in bf16; reduce in fp32 when many ranks are in the sum; keep parameters in fp32.**
#
# ## 6 Micro-batches
#
# With $m$ micro-batches (lesson 02), each backward reduce-scatters, and the shards of gradients add
# up. Or, in `no_sync()`, nothing is reduced until the last one, and whole gradients wait. Which is
# better? Four micro-batches, 4 ranks: how many times as much is sent by reducing every time?

# %% tags=["predict"]
guess_sync = predict("bytes if every backward sends, as a multiple of those if the last one does")
### GUESS guess_sync.commit(2)

# %%
from contextlib import nullcontext

from course_lib.core.units import format_bytes


def accumulated(rank, p, sync, m=4):
    model = FSDP(GPT(spec))
    for _ in range(2):
        model.zero_grad()
        with lab.resident_over_time(model) as ledger, record() as log:
            for n in range(m):
                with nullcontext() if sync or n == m - 1 else model.no_sync():
                    (loss_on(model, rank, p) / m).backward()
    return ledger, sent_bytes([one for one in log.events if one.kind in COMMUNICATION_KINDS], p)


# %% tags=["picture"]
every, last = (four.run(accumulated, 4, sync)[0] for sync in (True, False))
reveal(guess_sync, every[1] / last[1])
held = {"sync every time": every[0], "sync at the end": last[0]}
at_once, waiting = (format_bytes(max(one.bytes_by_kind["grads"])) for one in held.values())
title = f"Gradients: {at_once} if they leave at once, {waiting} if they wait"
show(memory(held, title), alt=f"{title}; {every[1] / last[1]:.2f} times the bytes sent")

# %% [markdown]
# Parameters are gathered in every micro-batch either way, so `no_sync()` saves a smaller share than
# it did for DDP; and it costs $4N$ bytes of gradients, which FSDP was to shard.
#
# **Accumulating under FSDP saves either memory or bytes sent, not both.**
#
# ## 7 Everybody calls
#
# A norm for clipping and a full state for a file concern all shards, so *every rank* calls
# `model.clip_grad_norm_(1.0)` or `model.full_state_dict()` (lesson 09). `model.state_dict()` is
# this rank's shards, without a message.
#
# **Break it.** Gathers are hidden inside forward, where nobody looks for them. Some models skip
# blocks at random, and here each rank draws its own random numbers: rank 1 skips block 1. What
# happens?

# %% tags=["predict"]
guess_skip = predict("rank 1 skips a block", choices=("an error", "wrong numbers", "nothing"))
### GUESS guess_skip.commit("wrong numbers")


# %% tags=["failure", "raises-exception"]
class Skips(GPT):
    def forward(self, tokens):
        x = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            if (dist.get_rank(), number) != (1, 1):
                x = block(x)
        return self.head(self.norm(x))


def some_skip(rank):
    model = FSDP(Skips(spec), prefetch=False)
    loss_on(model, rank, 2).backward()


try:
    pair.run(some_skip)
except RankError:
    reveal(guess_skip, "an error")
    raise

# %% [markdown]
# Blocks have equal sizes: the *gather* of block 2 on rank 1 matches that of block 1 on rank 0, and
# both then compute with parameters that are half one block and half another. It is noticed only
# because the ranks' numbers of collectives differ in the end. So draw the *same* random numbers on
# all ranks, or use every unit.
#
# **Every rank must gather the same units in the same order.**
#
# ## 8 The real thing
#
# PyTorch's `fully_shard` and, where they are installed, Accelerate and DeepSpeed's stage 3, beside
# ours: the same model, batches and optimizer. Adam in fp32 keeps 12 bytes per parameter between two
# steps: the parameter and two moments. How many on each of 2 ranks?

# %% tags=["predict"]
guess_kept = predict("bytes for each parameter, on each of 2 ranks, between steps")
### GUESS guess_kept.commit(8)

# %% tags=["measured"]
results = {}
for name in beside.FRAMEWORKS:
    try:
        results[name] = pair.run(beside.run_framework, name)[0]
    except RankError as missing:
        print(next(line for line in str(missing).splitlines() if "need " in line).strip())
for name, one in results.items():
    off = (one.weights - results["ours"].weights).abs().max().item()
    words = f"weights within {off:.0e} of ours, {one.step_ms:.0f} ms per step"
    print(f"{name:10} {words}, keeps {one.kept:.2f} and sends {one.sent:.2f} bytes per parameter")
reveal(guess_kept, results["ours"].kept)

# %% [markdown]
# The sums agree although `fully_shard` shards each parameter and ours a flat one: sharding decides
# where a number is kept, not what it is. Lesson 09 explains what DeepSpeed keeps besides. (Bytes
# are exact; the milliseconds are those of a busy CPU, whose cores also run the communication.)
#
# **Why not MPI?** You could: lesson 04 built these collectives from sends. But here they have to
# overlap with the layers' computation on the GPU, over whatever links join the GPUs. NCCL does
# that; an engine should not depend on the network.
#
# **The engines compute the same numbers; they differ in what they keep and in when they
# communicate.**
#
# ## 9 Two GPUs, and your machine
#
# Jin, Zhang and Huang (2023, a course project at Case Western Reserve University) wrote their own
# FSDP with MPI4Py, and trained a character-level GPT-2 (Shakespeare, 10 epochs) and a BERT (movie
# dialogues, 5 epochs; accuracy was about 50 %, the same on one GPU and on two). Seconds per epoch:

# %%
for name, (millions, one_s, two_s) in beside.STUDY.items():
    print(f"{name}, {millions} million parameters: {one_s} s on one GPU, {two_s} s on two")

# %% [markdown]
# How many times as fast is the BERT on two GPUs?

# %% tags=["predict"]
guess_bert = predict("BERT: speed on two GPUs, divided by that on one")
### GUESS guess_bert.commit(1.6)

# %%
speed_up = {name: one_s / two_s for name, (_, one_s, two_s) in beside.STUDY.items()}
reveal(guess_bert, speed_up["BERT"])
print(f"GPT-2: {speed_up['GPT-2']:.2f} times as fast")

# %% [markdown]
# The larger model gained less: what a step sends grows with the parameters, however few tokens a
# GPU has, and a step's computation with both. (Two runs of two models prove no law; the tokens per
# step are not published.) What can be checked in seconds are the losses: tiny versions of both, by
# our FSDP on one rank and on two.

# %% tags=["picture", "measured"]
curves = {}
for name in beside.TASKS:
    (line, one_s), (dots, two_s) = (r.run(beside.train_alike, name)[0] for r in (single, pair))
    curves[name] = Voices(formula=line, measurement=dots)
    apart = max(abs(a - b) for a, b in zip(line, dots, strict=True))
    print(f"{name}: {one_s / two_s:.2f} times as fast on two ranks, losses {apart:.0e} apart")
title = f"Two ranks reach the losses of one: from {line[0]:.1f} to {line[-1]:.1f} for BERT"
axes = {
    "x_label": "step",
    "y_label": "loss",
    "names": {"formula": "one rank", "measurement": "two ranks"},
}
show(compare(range(60), curves, title, **axes), alt=f"{title}; the dots lie on the lines")

# %% [markdown]
# (Two ranks here share the cores that one had alone, so do not expect a factor of two.) On your
# GPUs, one command trains that GPT-2; compare its seconds with those of `--ranks 1`:
#
# `python -m course_lib.train --ranks 2 --strategy fsdp --model gpt2-char --data shakespeare`
#
# For the BERT, `--model bert-dialogues --data dialogues`. One step in several ways, beside
# PyTorch's: `cluster/exercises/10_fsdp.py --model gpt2-char`.
#
# **Predict what two GPUs bring before you rent them: computing is halved, communication is not.**
#
# ## What to keep
#
# - A unit is gathered, used, freed, twice. Peak: shards, root, the largest unit and the next one.
# - In one precision, freed after forward: up to 1.5 times the bytes of plain data
#   parallelism; kept: as
#   many. bf16 gathers with fp32 reduction: as many as fp32 DDP, twice as many as bf16 DDP.
# - Prefetch hides gathers as long as the link is as fast as the layers; one unit ahead is enough.
# - Compute in bf16, reduce in fp32 when many ranks are in the sum, keep fp32.
# - Micro-batches: either whole gradients wait, or every one of them sends.
# - Every rank, every unit, in one order.
# - Flat parameters (here, FSDP1) or a shard of each parameter (`fully_shard`, FSDP2): the same
#   messages and numbers, other conveniences.
#
# You can now write a fully sharded training step, say what it holds and sends, and prove that it
# computes the same. Lesson 11 saves it, and brings it back.
#
# **Read on**
#
# - Zhao et al. 2023, *PyTorch FSDP*, sections 3 and 4: flat parameters, overlap, memory.
# - PyTorch documentation, `torch.distributed.fsdp.fully_shard`: FSDP2 beside FSDP1.
# - Liang et al. 2024, *TorchTitan*, section 2: FSDP2 with tensor and pipeline parallelism.
# - Rajbhandari et al. 2020, *ZeRO*, section 5.3: where the idea comes from.
# - Micikevicius et al. 2018, *Mixed precision training*: why an fp32 copy of the weights.
