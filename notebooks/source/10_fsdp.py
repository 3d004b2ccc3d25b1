# %% [markdown]
# # 10 FSDP: gather, use, free
#
# ZeRO's stage 3 keeps every number once, and gathers a module when it computes. In a simple version
# every rank waits for every gather. *Fully sharded data parallelism* (FSDP) gathers whole blocks,
# and overlaps the next gather with this block's computation. **What does it hold, what does it
# send, and how much of that costs time?**
#
# *After this lesson you can* shard a parameter on dim 0, and handle a unit with hooks; write the
# prefetch; say what a step holds and sends, in any combination of precisions; shard inside a node
# and replicate across; explain what PyTorch's `fully_shard` does.
#
# **Prerequisites:** lessons 06 (overlap) and 09 (ZeRO, flat parameters); 03 for precisions.
# **Time:** 65 minutes of reading, 105 of exercises (core: 1 to 3, 5; further: 4), with a break
# after section 4.
#
# | symbol | in code | meaning |
# |---|---|---|
# | $p$ | `p` | ranks, each with its part of the batch |
# | $N$ | `N` | parameters of the model |
# | unit | `unit` | modules that are gathered and freed together: a block |
# | root | unit 0 | what lies in no block: embedding, head, last norm |
# | $S$ | `sizes.whole_bytes(i)` | bytes of a whole unit |

# %%
# %load_ext course_lib.ranks
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from course_lib.checks import check
from course_lib.core import COMMUNICATION_KINDS, MODELS, Link, TwoLevelLink
from course_lib.cost.traffic import sent_bytes
from course_lib.display import Voices, claim, compare, memory, predict, reveal, show, timelines
from course_lib.fsdp import FSDP, cost, explorer, lab, pictures
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from course_lib.ranks import RankError, Ranks

# %% [markdown]
# ## 1 Units
#
# A unit is gathered before it computes, and freed after. Its parameters are sharded **on dim 0**,
# each by itself: of $n$ rows, rank $r$ keeps rows $rm$ to $(r+1)m-1$, with $m=\lceil n/p\rceil$.
# All shards of a unit are copied side by side into one buffer, sent as **one** message, and copied
# out to whole parameters.
#
# | who | cuts | so a shard is |
# |---|---|---|
# | FSDP1 (Zhao et al. 2023) | the unit's flat parameter | numbers of several parameters |
# | FSDP2, `fully_shard`, and this lesson | each parameter, on dim 0 | rows of one parameter |
# | DeepSpeed's stage 3 | each parameter, flattened | numbers of one parameter |
#
# Why did FSDP2 give up flat parameters (lesson 09)? A flat parameter has one dtype and one
# `requires_grad`, and its shards are 1-D pieces. With a shard of each parameter, `.grad` keeps its
# number of dimensions; frozen parameters, even of another dtype, fit into any unit; a checkpoint
# needs no flat layout. The price: copies in and out of the buffer, and up to $p-1$ rows of padding
# per parameter. FSDP1 sends the same messages, without this padding.
#
# Of the parameters, a rank holds at most: its shards; the root, whole from forward to backward; and
# a block. While a unit (even the root) is copied out of the buffer, it is there twice. GPT-2 in
# fp32, on 4 ranks: how much is that at the peak?

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
reveal(guess_peak, cost.peak_param_bytes(cost.UnitSizes(numels=(root, *[block] * 12), p=4)) / 1e6)

# %% [markdown]
# Now real ranks and a small GPT of four blocks. `lab.one_step` reads the storages after each gather
# and free; `cost.fsdp_ledger` predicts them.

# %%
four, spec = Ranks(4), replace(MODELS["tiny"], num_layers=4)
BATCH = next_tokens(token_batch(0, batch=12, seq=16, vocab=256))


def loss_on(model, rank, p):  # on this rank's part of the batch
    return token_loss(model(BATCH[0][rank::p]), BATCH[1][rank::p])


# %% tags=["picture"]
from itertools import groupby

ledger, calls, sizes = four.run(lab.one_step, spec, BATCH)[0]
ledgers = (ledger, cost.fsdp_ledger(sizes))  # each change once, in KiB
held, paper = ([b / 2**10 for b, _ in groupby(one.bytes_by_kind["params"])] for one in ledgers)
peak = cost.peak_param_bytes(sizes) / 2**10
title = f"Gather, use, free: at most {max(held):.0f} KiB; the formula says {peak:.0f}"
axes = {"x_label": "gathers and frees of a step", "y_label": "parameters on a rank (KiB)"}
figure = compare(range(len(held)), Voices(formula=paper, measurement=held), title, **axes)
show(figure, alt=f"{title}; each dot lies on the line")

# %% [markdown]
# The model is never whole: otherwise the curve would keep rising. A peak is one unit twice, or a
# unit and the next one's buffer (section 4); GPT-2's highest is its root's.
#
# ### Exercise 1 (core): shard and gather a parameter
#
# Shard a parameter as above, which is how `torch.chunk` splits. `shard` is an `nn.Parameter` with
# memory of its own, trained or frozen as the parameter was; on a rank without rows its shape is
# `[0, ...]`. `gather()` returns the whole parameter: a new, contiguous tensor without a graph, with
# the shards' current values. Keep no other tensor. Budget: one all-gather of equal messages. No
# parameter is a scalar. About 9 lines, 20 minutes.
#
# <details><summary>Hint: ranks have unequal rows</summary>
# Copy them into a zeroed buffer of $m$ rows; after the gather, cut off the tail.
# </details>
# <details><summary>Hint: if the whole parameter stays alive</summary>
# A slice is a view: <code>.clone()</code>.
# </details>


# %% tags=["exercise"] exercise="fsdp-1"
class ShardedParam:
    """One parameter: this rank's rows always, all of them while they are used."""

    def __init__(self, param):
        ### BEGIN SOLUTION: equal numbers of rows, rounded up, until there are none
        self.shape, self.p = param.shape, dist.get_world_size()
        self.rows = -(-len(param) // self.p)
        mine = param.detach()[self.rows * dist.get_rank() :][: self.rows]
        self.shard = nn.Parameter(mine.clone(), param.requires_grad)
        ### END SOLUTION

    def gather(self):
        ### BEGIN SOLUTION: pad, gather, cut
        padded = self.shard.new_zeros(self.rows, *self.shape[1:])
        padded[: len(self.shard)] = self.shard.detach()
        whole = padded.new_empty(self.p * self.rows, *self.shape[1:])
        dist.all_gather_single(whole, padded)
        return whole[: self.shape[0]]
        ### END SOLUTION


# %% tags=["check"] exercise="fsdp-1"
check("fsdp-1", ShardedParam)

# %% [markdown]
# **If blocks are freed after forward, the peak is a rank's shards, the root, and two blocks or a
# second root, whichever is larger.**
#
# ## 2 Backward
#
# When backward reaches a block, its parameters have been freed. So a hook on the block's *output*
# gathers them again once that output's gradient is known. Then the gradients of its parameters
# arrive, one by one (lesson 06). After the last, all are copied into a buffer $[p,k]$: line $r$ has
# rank $r$'s $k$ numbers, its rows of each gradient, padded with zeros. **One reduce-scatter**
# leaves each rank its line of the sum.
#
# ### Exercise 2 (core): the hooks of a unit
#
# `unit` has `params` (whole while gathered), their `shards`, `gather()` and `free()`;
# `unit.pack(tensors)` makes the buffer, `unit.unpack(line)` takes a line apart into tensors of the
# shards' shapes. After backward each shard's `.grad` has the mean over the ranks (added to what was
# there), and nothing whole is left: no buffer, no `param.grad`. Budget: a gather and a free in
# forward; a gather, a reduce-scatter and a free in backward. About 16 lines, 25 minutes.
#
# <details><summary>Hint: a hook on a tensor</summary>
# <code>output.register_hook(f)</code> calls <code>f(grad)</code>. What f returns replaces the
# gradient, unless it is None. In evaluation the output has no gradient: check
# <code>output.requires_grad</code>.
# </details>
# <details><summary>Hint: if your second backward sends nothing</summary>
# <code>missing</code> has to be full again.
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
            sent = unit.pack([param.grad for param in unit.params])  # [p, k]
            mean = sent.new_empty(sent.shape[1])
            dist.reduce_scatter_single(mean, sent.flatten())
            mean /= dist.get_world_size()
            for shard, grad in zip(unit.shards, unit.unpack(mean), strict=True):
                shard.grad = grad if shard.grad is None else shard.grad + grad
            for param in unit.params:
                param.grad = None
            self.missing = set(unit.params)
            unit.free()
        ### END SOLUTION


# %% tags=["check"] exercise="fsdp-2"
check("fsdp-2", Hooks)

# %% [markdown]
# The course's `FSDP(module)` does this for every member of a `ModuleList`, and for the root. Its
# parameters are the shards, under the old names: any elementwise optimizer can update them. Does it
# compute what one process does?


# %% tags=["check"]
def train(rank, p):
    torch.manual_seed(rank)  # other weights on each rank: FSDP has to make them equal
    model = FSDP(GPT(spec).double())
    sgd = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for _ in range(3):
        sgd.zero_grad()
        loss_on(model, rank, p).backward()
        sgd.step()
    return model.full_state_dict()


single, pair = Ranks(1), Ranks(2)
alone = single.run(train, 1)[0]
for p, ranks in {2: pair, 4: four}.items():
    found = ranks.run(train, p)[p - 1]
    near = all((alone[name] - found[name]).abs().max() < 1e-12 for name in alone)
    print(f"{p} ranks, after 3 steps: as one process, within 1e-12: {near}")

# %% [markdown]
# **Freed after forward, a block's parameters are gathered twice and its gradients reduced once per
# micro-batch; between uses, a rank has only its shards.**
#
# ## 3 To free or not to free
#
# Why free a block after forward, if backward needs it again? With `reshard_after_forward=False` it
# stays. Plain data parallelism all-reduces its gradients, and a ring all-reduce is a reduce-scatter
# and an all-gather. In fp32, FSDP sends how many times these bytes if it frees blocks? If not?

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
    ledger, calls, sizes = four.run(lab.one_step, spec, BATCH, reshard_after_forward=frees)[0]
    paper = cost.fsdp_traffic(sizes, reshard_after_forward=frees)
    theirs = four.run(beside.torchs_calls, spec, BATCH, frees)[0]
    sent[name] = [sent_bytes(found, 4) / ddp for found in (paper, calls, theirs)]
    peaks[name] = ledger
    print(f"{name}:", "formula {:.3f}, ours {:.3f}, PyTorch's {:.3f} of DP".format(*sent[name]))
reveal(guess_free, sent["freed"][1])
reveal(guess_keep, sent["kept"][1])
title = f"Freed, {sent['freed'][1]:.2f} times as much is sent, and less is held"
show(memory(peaks, title), alt=f"{title}: bars at the fullest moment of a step")

# %% [markdown]
# Without a root it would be 1.5: the root is gathered once, because it is needed last in forward
# and first in backward.
#
# With `reshard_after_forward=2`, each rank keeps half a block; backward gathers between two ranks.
#
# **In one precision, with one micro-batch, freeing after forward sends up to 1.5 times as much as
# plain data parallelism (without padding), and saves the memory of all blocks between the passes.**
#
# ## 4 Which gather is launched when
#
# An emulated link and five layers that sleep (lesson 06); each gather takes about as long as a
# layer's forward, its backward twice that. *On demand*, a gather waits until it is needed. How long
# is a step if the next gather is launched before this layer computes?

# %%
from course_lib.core.chrome_trace import trace_of_events
from course_lib.core import trace_reading
from course_lib.models import emulated_loss

wire = Link(name="slow Ethernet", latency_s=2e-3, bytes_per_s=10e6)
slow = Ranks(2, link=wire)
build = partial(lab.EmulatedModel, num_layers=5, forward_s=0.015, backward_s=0.03)
runs = {"on demand": {"prefetch": False}, "prefetch": {"prefetch": True}}
emulated = cost.UnitSizes(numels=(0, *[2**16] * 5), p=2)
times = lab.emulated_times(build())
plan = {name: cost.fsdp_step(times, emulated, 2, wire, **options) for name, options in runs.items()}
step_ms = {name: 1e3 * max(event.end_s for event in events) for name, events in plan.items()}
gather_ms = 1e3 * plan["prefetch"][0].duration_s
print(f"gather {gather_ms:.0f} ms, step on demand {step_ms['on demand']:.0f} ms (predicted)")

# %% tags=["predict"]
guess_step = predict("a step with prefetch", unit="ms")
### GUESS guess_step.commit(350)

# %% tags=["picture", "measured"]
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
trace = trace_of_events({"": measured["prefetch"].events})
for kind, start_s, seconds in trace_reading.exposed_transfers(trace, 0)[:3]:
    print(f"{kind} at {1e3 * start_s:.0f} ms: {1e3 * seconds:.0f} ms exposed")

# %% [markdown]
# By prediction, three messages stay exposed: the first gather of each pass, and the last reduce.
# (With a root, its backward hides the first gather of backward.)
#
# ### Exercise 3 (core): the asynchronous prefetch
#
# `before_forward(i)` and the other three are called around the computation of unit $i$; units count
# from 0, without a root. `unit.allocate()` returns memory for the whole unit, `unit.shard` is what
# to send, `unit.free()` gives the memory back. When unit $i$ computes it is whole, and the gather
# of the next unit of this pass is launched, but **not** waited for. Gather no unit that is
# allocated; at most two units are allocated if forward frees. Free after backward, and after
# forward if `reshard_after_forward`. `use` and `free` are your own helpers. Checked: the order of
# calls. About 13 lines, 25 minutes.
#
# <details><summary>Hint: a call that does not wait</summary>
# <code>work = dist.all_gather_single(whole, shard, async_op=True)</code>; later
# <code>work.wait()</code>.
# </details>
# <details><summary>Hint: if the same is gathered twice</summary>
# <code>use(number, following)</code> serves both passes, if it skips a unit that does not exist.
# </details>


# %% tags=["exercise"] exercise="fsdp-3"
class Prefetch:
    """Gather each unit before it computes, and the next one meanwhile."""

    def __init__(self, units, reshard_after_forward):
        self.units, self.reshard = units, reshard_after_forward
        self.works = {}  # by number: handles of what was launched, and is not freed

    def use(self, number, following):
        ### BEGIN SOLUTION: launch what is missing of both, wait for one
        for one in (number, following):
            if 0 <= one < len(self.units) and one not in self.works:
                unit, whole = self.units[one], self.units[one].allocate()
                self.works[one] = dist.all_gather_single(whole, unit.shard, async_op=True)
        self.works[number].wait()
        ### END SOLUTION

    def free(self, number):
        ### BEGIN SOLUTION: and forget its handle
        self.units[number].free()
        del self.works[number]
        ### END SOLUTION

    def before_forward(self, number):
        ### BEGIN SOLUTION: which one is next?
        self.use(number, number + 1)
        ### END SOLUTION

    def after_forward(self, number):
        ### BEGIN SOLUTION: or keep it
        if self.reshard:
            self.free(number)
        ### END SOLUTION

    def before_backward(self, number):
        ### BEGIN SOLUTION: which one is next?
        self.use(number, number - 1)
        ### END SOLUTION

    def after_backward(self, number):
        ### BEGIN SOLUTION: always
        self.free(number)
        ### END SOLUTION


# %% tags=["check"] exercise="fsdp-3"
check("fsdp-3", Prefetch)

# %% [markdown]
# Now 8 billion parameters, gathered in bf16, kept and reduced in fp32, on 8 GPUs. Larger units mean
# fewer latencies, but more memory. Over which link are 2,048 tokens too few to hide the gathers?

# %% tags=["picture"]
explorer.fsdp_explorer()

# %% [markdown]
# **Launch the next gather before this unit computes. Where communication takes no longer than the
# computation beside it, only the first gather and the last reduction are exposed; without a root,
# the first gather of backward, too.**
#
# *A good place for a break.*
#
# ## 5 Two precisions
#
# The optimizer needs fp32 (or stochastic rounding), or small updates are lost (lesson 03). But
# parameters may be gathered and used in bf16: half the bytes. And gradients? They are *added up*
# over ranks, and in bf16, with 8 significant bits, each addition rounds. So precision is a
# **policy**: `MixedPrecisionPolicy(param_dtype, reduce_dtype, output_dtype)`, for what is gathered
# and computed, for sums, and for what the model returns. Shards, their gradients and moments keep
# their dtype.
#
# Freeing after forward, FSDP sends two gathers and a reduce-scatter, DDP twice the bytes of its
# gradients. With $g$ bytes per number gathered, $r$ reduced, and $d$ all-reduced by DDP, the ratio
# is at most $(2g+r)/2d$. With bf16 gathers and fp32 reduction, how many times as much as DDP in
# bf16 is sent?

# %% tags=["predict"]
guess_bf16 = predict("sent, divided by what DDP sends in bf16")
### GUESS guess_bf16.commit(1.5)

# %%
for gathered, reduced in ((4, 4), (2, 4), (2, 2)):
    ratios = [cost.times_plain_dp(gathered, reduced, ddp_bytes) for ddp_bytes in (4, 2)]
    words = "{:.2f} times fp32 DDP, {:.2f} times bf16 DDP".format(*ratios)
    print(f"gathers {gathered} bytes per number, reduces {reduced}: at most {words}")
reveal(guess_bf16, cost.times_plain_dp(2, 4, 2))

# %% [markdown]
# How far off is a gradient computed and reduced in bf16? (One rounding is at most 0.4 %.) And does
# the loss show it?

# %% tags=["picture", "measured"]
compute = partial(four.run, beside.in_precision, spec, BATCH)
found = {name: compute({"mixed_precision": policy}) for name, policy in beside.POLICIES.items()}
off = {}
exact = torch.cat([grads for grads, _ in found["fp32"]])
for name, by_rank in found.items():
    error = torch.cat([grads for grads, _ in by_rank]) - exact
    off[name] = 100 * (error.norm() / exact.norm()).item()
    print(f"{name}: {off[name]:.2f} % off in the first step, last loss {by_rank[0][1][-1]:.4f}")
claim("computing is most of it", off["bf16, reduced in fp32"] > off["fp32, reduced in bf16"])
figure, alt = pictures.losses_beside_fp32({name: by_rank[0][1] for name, by_rank in found.items()})
show(figure, alt=alt)

# %% [markdown]
# On 4 ranks, most of the error comes from computing in bf16. Still, Llama 3 reduced in fp32, for
# convergence (Grattafiori et al. 2024, section 3.3.2), as TorchTitan does by default: the error of
# a sum grows with the ranks, about like the square root of their number if they add one by one.
#
# **Compute in bf16; reduce in fp32 when many ranks are in the sum; keep parameters in fp32.**
#
# ## 6 Hybrid sharding
#
# Between nodes a link is slow, and every gather crosses it. **Hybrid sharding** (HSDP) puts the
# ranks on a mesh of *replicate × shard*: a node of $s$ ranks shards the parameters, and each of
# $R=p/s$ nodes has all of them. Gathers stay inside a node; a gradient is reduce-scattered inside,
# and its shard of $S/s$ bytes all-reduced across nodes, among ranks at the same place. Memory:
# $1/s$ of the model, not $1/p$.
#
# Sharded over all $p$, each rank of a ring sends $3\frac{p-1}{p}S$ per unit, for two gathers and a
# reduction; hybrid only $2\frac{R-1}{R}\frac{S}{s}$ across nodes. (Here each rank has its own link
# out of the node.) On 2 nodes of 2 ranks, how many times as fast as the fully sharded step is a
# hybrid one? (Gathers inside take time, too.)

# %% tags=["predict"]
fast = Link(name="fast Ethernet", latency_s=1e-3, bytes_per_s=40e6)
two_nodes = TwoLevelLink(inside=fast, outside=wire, ranks_per_node=2)
guess_hybrid = predict(f"{two_nodes}: step sharded over 4 ranks / hybrid 2 x 2")
### GUESS guess_hybrid.commit(2)

# %%
build = partial(lab.EmulatedModel, num_layers=4, forward_s=0, backward_s=0)
idle, numels = lab.emulated_times(build()), (0, *[2**16] * 4)
ways = {"sharded over 4": {"p": 4}, "hybrid 2 x 2": {"p": 2, "replicas": 2}}
sizes = {name: cost.UnitSizes(numels=numels, **way) for name, way in ways.items()}
plan = {name: cost.fsdp_step(idle, one, 4, two_nodes) for name, one in sizes.items()}
flat_ms, hybrid_ms = (1e3 * max(event.end_s for event in events) for events in plan.values())
reveal(guess_hybrid, flat_ms / hybrid_ms)

# %% tags=["picture", "measured"]
runs = {"sharded over 4": {}, "hybrid 2 x 2": {"mesh": (2, 2)}}
real = lab.measure_fsdp(Ranks(4, link=two_nodes), build, emulated_loss, runs, turns=3)
rows = {f"{name}, predicted": events for name, events in plan.items()}
rows |= {f"{name}, measured": one.events for name, one in real.items()}
rows = {name: [event for event in events if event.rank == 0] for name, events in rows.items()}
before, after = (1e3 * one.step_s for one in real.values())
title = f"A step of {before:.0f} ms takes {after:.0f} ms if only shards of gradients cross"
claim("hybrid is faster", after < before)
show(timelines(rows, title, link=two_nodes), alt=title)

# %% [markdown]
# An all-reduce across nodes runs while the next block is gathered inside, on other links. Hybrid
# sharding can help where $1/s$ of the model fits on a rank.
#
# ### Exercise 4 (further): the groups of hybrid sharding
#
# `shard_size` consecutive ranks are a node. Make `shard_group`, this rank's node, and
# `replicate_group`, the ranks at its place in every node. `reduce(grad)` takes this rank's whole
# gradient (1-D, a multiple of $s$ long), and returns this rank's shard ($1/s$ of the numbers) of
# the mean over *all* ranks. Budget: a reduce-scatter inside, an all-reduce of the shard across.
# About 10 lines, 20 minutes.
#
# <details><summary>Hint: if it hangs</summary>
# <code>dist.new_group(ranks)</code> must be called by all ranks, members or not, in the same order.
# </details>


# %% tags=["exercise"] exercise="fsdp-4"
class Hybrid:
    """Shard inside a node, replicate across nodes."""

    def __init__(self, shard_size):
        ### BEGIN SOLUTION: every rank makes every group, and keeps two
        nodes = [
            list(range(first, first + shard_size))
            for first in range(0, dist.get_world_size(), shard_size)
        ]
        mine = []
        for ranks in [*nodes, *zip(*nodes, strict=True)]:
            group = dist.new_group(list(ranks))
            if dist.get_rank() in ranks:
                mine.append(group)
        self.shard_group, self.replicate_group = mine
        ### END SOLUTION

    def reduce(self, grad):
        ### BEGIN SOLUTION: scatter inside, then sum across
        shard = grad.new_empty(len(grad) // dist.get_world_size(self.shard_group))
        dist.reduce_scatter_single(shard, grad, group=self.shard_group)
        dist.all_reduce(shard, group=self.replicate_group)
        return shard / dist.get_world_size()
        ### END SOLUTION


# %% tags=["check"] exercise="fsdp-4"
check("fsdp-4", Hybrid)

# %% [markdown]
# **Shard where links are fast, replicate across slow ones: only shards of gradients cross.**
#
# ## 7 Micro-batches
#
# With $m$ micro-batches (lesson 02), each backward reduce-scatters, and shards of gradients add up.
# Or, in `no_sync()`, nothing is reduced until the last one, and whole gradients wait. With 4
# micro-batches on 4 ranks, by what factor do the bytes sent grow if every backward reduces?

# %% tags=["predict"]
guess_sync = predict("bytes if every backward sends, as a multiple of those if the last one does")
### GUESS guess_sync.commit(2)

# %% tags=["picture"]
every, last = (four.run(lab.one_step, spec, BATCH, 4, sync)[0] for sync in (True, False))
times = sent_bytes(every[1], 4) / sent_bytes(last[1], 4)
reveal(guess_sync, times)
held = {"sync every time": every[0], "sync at the end": last[0]}
at_once, waiting = (one.peak_bytes() / 2**20 for one in held.values())
title = f"A rank holds {at_once:.2f} MiB if gradients leave at once, {waiting:.2f} MiB if they wait"
show(memory(held, title), alt=f"{title}; {times:.2f} times the bytes sent")

# %% [markdown]
# Parameters are gathered in every micro-batch either way, so `no_sync()` saves a smaller share than
# in DDP, and keeps whole gradients, $4N$ bytes, instead of shards.
#
# **Accumulating under FSDP saves either memory or bytes sent, not both.**
#
# ## 8 All ranks call
#
# Clipping and a full state dict need all shards, so *every rank* calls `model.clip_grad_norm_(1.0)`
# or `model.full_state_dict()`.
#
# **Break it.** Some models skip blocks at random. If each rank draws its own random numbers, they
# differ: let rank 1 skip block 1. What happens?

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
    loss_on(FSDP(Skips(spec), prefetch=False), rank, 2).backward()


try:
    pair.run(some_skip)
except RankError:
    reveal(guess_skip, "an error")
    raise

# %% [markdown]
# Blocks have equal sizes: block 2's *gather* on rank 1 matches block 1's on rank 0, and both ranks
# compute with rows of both blocks. The error comes only in backward: rank 1, one call ahead,
# reduce-scatters where rank 0 gathers (our ranks compare calls; NCCL would not report it). Draw
# equal random numbers on all ranks, or run every unit on every rank.
#
# **Every rank must gather the same units in the same order.**
#
# ## 9 The real thing
#
# PyTorch's `fully_shard` and, where installed, Accelerate, Lightning and DeepSpeed's stage 3,
# beside ours: the same model, batches, optimizer. Adam in fp32 keeps 12 bytes per parameter between
# steps. How many on each of 2 ranks?

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
    words = f"weights within {off:.0e} of ours, {one.step_ms:.0f} ms per step, {one.calls} calls"
    print(f"{name:10} {words}; keeps {one.kept:.2f} and sends {one.sent:.2f} bytes per parameter")
reveal(guess_kept, results["ours"].kept)

# %% [markdown]
# `fully_shard` has our layout, and makes each shard a `DTensor`, which knows the whole shape: so
# FSDP composes with tensor parallelism, and a checkpoint fits other numbers of ranks. Lesson 09
# explains what else DeepSpeed keeps. (Here PyTorch frees the root, too, and sends more bytes.)
#
# **The engines compute the same numbers; they differ in what they keep and when they communicate.**
#
# ### Exercise 5 (core): which transfers are exposed?
#
# A *trace* (lesson 06, exercise 6; in µs) shows when ranks communicate. `computing(trace, pid)`
# gives the intervals in which a rank computes, without waits. For each transfer (`cat` in
# `COMMUNICATION_KINDS`) of which at least 1 µs lies outside (is *exposed*) return
# `(cat, start_s, exposed_s)` in seconds, the most exposed first. Transfers may overlap; each counts
# by itself. About 7 lines, 15 minutes.
#
# <details><summary>Hint: what two intervals share</summary>
# From the later start to the earlier end, if that is not negative.
# </details>


# %% tags=["exercise"] exercise="fsdp-5"
from course_lib.core.trace_reading import computing


def exposed_transfers(trace, pid):
    """Boxes of a trace have ph "X", pid, a kind cat, a start ts and a duration dur in µs."""
    busy = computing(trace, pid)  # [(start, end), ...] in µs: disjoint, in order
    boxes = [part for part in trace["traceEvents"] if part["ph"] == "X" and part["pid"] == pid]
    found = []
    ### BEGIN SOLUTION: of each transfer, subtract what it shares with computing
    for box in boxes:
        start, end = box["ts"], box["ts"] + box["dur"]
        hidden = sum(max(0, min(end, b) - max(start, a)) for a, b in busy)
        if box["cat"] in COMMUNICATION_KINDS and end - start - hidden >= 1:
            found.append((box["cat"], start / 1e6, (end - start - hidden) / 1e6))
    ### END SOLUTION
    return sorted(found, key=lambda one: -one[2])


# %% tags=["check"] exercise="fsdp-5"
check("fsdp-5", exposed_transfers)

# %% [markdown]
# ## 10 Two GPUs, and your machine
#
# Jin, Zhang and Huang (2023, a course project at Case Western Reserve University) wrote an FSDP
# with MPI4Py, and trained a character-level GPT-2 (10 epochs of Shakespeare) and a BERT (5 of
# movie dialogues). How many times as fast was the BERT on two GPUs?

# %% tags=["predict"]
for name, (millions, one_s, _) in beside.STUDY.items():
    print(f"{name}, {millions} million parameters: {one_s} s per epoch on one GPU")
guess_bert = predict("BERT: speed on two GPUs, divided by that on one")
### GUESS guess_bert.commit(1.6)

# %%
for name, (_, one_s, two_s) in beside.STUDY.items():
    print(f"{name}: {one_s / two_s:.2f} times as fast")
reveal(guess_bert, one_s / two_s)

# %% [markdown]
# The GPT-2 gained more, perhaps because it sends less per computation: bytes depend on parameters,
# not on a GPU's tokens. Two ranks reach one's losses, as tiny versions show.

# %% tags=["picture", "measured"]
curves = {}
for name in beside.TASKS:
    (line, one_s), (dots, two_s) = (r.run(beside.train_alike, name)[0] for r in (single, pair))
    curves[name] = Voices(formula=line, measurement=dots)
    apart = max(abs(a - b) for a, b in zip(line, dots, strict=True))
    print(f"{name}: {one_s / two_s:.2f} times as fast on two ranks, losses {apart:.0e} apart")
title = f"Two ranks reach the losses of one: from {line[0]:.1f} to {line[-1]:.1f} for BERT"
names = {"formula": "one rank", "measurement": "two ranks"}
axes = {"x_label": "step", "y_label": "loss", "names": names}
show(compare(range(60), curves, title, **axes), alt=f"{title}; the dots lie on the lines")

# %% [markdown]
# On your GPUs, this trains that GPT-2; compare with `--ranks 1`:
#
# `python -m course_lib.train --ranks 2 --strategy fsdp --model gpt2-char --data shakespeare`
#
# For the BERT, `--model bert-dialogues --data dialogues`. To time one step beside PyTorch's:
# `cluster/exercises/10_fsdp.py --model gpt2-char`.
#
# **Predict the speedup before you rent GPUs: computing is divided, communication is added.**
#
# ## What to keep
#
# - A block is gathered, used, freed, twice. Peak: shards, root, two blocks or a second root.
# - In one precision and micro-batch, freed after forward: up to 1.5 times plain DP's bytes.
# - Prefetch hides gathers as long as the link is as fast as the layers.
# - Compute in bf16; keep, and sum over many ranks, in fp32.
#
# **Read on**
#
# - Zhao et al. 2023, *PyTorch FSDP*, sections 3 and 4: flat parameters, overlap, memory.
# - PyTorch, `torch.distributed.fsdp.fully_shard`: FSDP2 beside FSDP1.
# - Liang et al. 2024, *TorchTitan*, section 2: FSDP2 with tensor and pipeline parallelism.
