# %% [markdown]
# # 10 FSDP: gather, use, free
#
# ZeRO's stage 3 (lesson 09) shards all parameters, and gathers those of a module just before it
# computes. That saves memory, but the simple version has two problems: every module is a message of
# its own, and every rank waits for each message. *Fully sharded data parallelism* (FSDP) is the
# same method made fast: it gathers a whole block in one message, and it sends the next block's
# message while this block computes. **What does a rank hold, what does it send, and how much time
# does that cost?**
#
# *After this lesson you can*
#
# - shard a parameter on dim 0, gather a unit in hooks, and prefetch the next one;
# - compute what a step holds and sends, also with two precisions;
# - shard inside nodes and replicate across nodes;
# - explain what PyTorch's `fully_shard` does, and read from a trace what it did not hide.
#
# **Prerequisites:** lessons 06 (overlap) and 09 (ZeRO, flat parameters); 03 for precisions.
# **Time:** 65 minutes of reading, 105 of exercises (core: 1 to 3, 5; further: 4).
#
# | symbol | in code | meaning |
# |---|---|---|
# | $p$ | `p` | ranks |
# | $N$ | `N` | parameters of the model |
# | unit | `unit` | modules that are gathered and freed together, usually a block |
# | root | unit 0 | parameters outside of blocks: embedding, head, last norm |
# | $S$ | `sizes.whole_bytes(i)` | bytes of all parameters of a unit |

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
from course_lib.display import claim, predict, reveal, show
from course_lib.fsdp import FSDP, cost, explorer, lab, pictures
from course_lib.fsdp import beside_frameworks as beside
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from course_lib.ranks import RankError, Ranks

# %% [markdown]
# ## 1 Units
#
# The first problem is the number of messages. FSDP therefore works on *units*: a unit is gathered
# before it computes, and freed afterwards. A transformer block is the usual unit.
#
# Each parameter of a unit is sharded **on dim 0**: of $n$ rows, rank $r$ keeps rows $rm$ to
# $(r+1)m-1$, with $m=\lceil n/p\rceil$. With 10 rows on 4 ranks, the ranks keep 3, 3, 3 and 1 rows.
# To gather a unit, each rank copies its shards of all parameters into one buffer, and all buffers
# are gathered in **one** collective. The result is ordered by rank: first everything from rank 0,
# then everything from rank 1. The rows of one parameter are therefore not next to each other, and
# they have to be copied out to whole parameters.
#
# | who | what is split | a shard contains |
# |---|---|---|
# | FSDP1 (Zhao et al. 2023) | a unit's flat parameter | numbers of several parameters |
# | FSDP2 (`fully_shard`), our FSDP | each parameter, by default on dim 0 | rows of one parameter |
# | DeepSpeed's stage 3 | each parameter, flattened | numbers of one parameter |
#
# Why did FSDP2 give up flat parameters (lesson 09)? A flat parameter is one 1-D tensor with one
# dtype, in which the parameters of a unit have lost their shapes. If each parameter has its own
# shard, `.grad` keeps its number of dimensions, a unit can contain frozen parameters of another
# dtype, and a checkpoint needs no flat layout. The price is that each gather copies twice, into the
# buffer and out of it, and that a parameter has up to $p-1$ rows of padding.
#
# How much memory does that need? A rank always holds its shards. It holds one whole block at a
# time, and the whole root: the root's embedding and head compute at both ends of the model, so it
# stays whole from forward to backward. While a unit (also the root) is copied out of the buffer,
# the rank holds it twice. How large is the peak for GPT-2 in fp32 on 4 ranks?

# %% tags=["predict"]
with torch.device("meta"):  # shapes without memory
    gpt2 = GPT(MODELS["gpt2"])
block = sum(param.numel() for param in gpt2.blocks[0].parameters())
root = sum(param.numel() for param in gpt2.parameters()) - 12 * block
print(f"{4 * (root + 12 * block) / 1e6:.0f} MB: ", end="")
print(f"the root {4 * root / 1e6:.0f} MB, each of 12 blocks {4 * block / 1e6:.0f} MB")
guess_peak = predict("bytes of parameters on a rank at the peak", unit="MB")
### GUESS guess_peak.commit(250)

# %%
reveal(guess_peak, cost.peak_param_bytes(cost.UnitSizes(numels=(root, *[block] * 12), p=4)) / 1e6)

# %% [markdown]
# The peak is far above a quarter of the model. GPT-2 has a large vocabulary for its size, so its
# root is as large as several blocks, and it is there twice while it is copied out. In Llama 3 8B,
# the root is as large as five blocks, and even at 70B it is larger than two. Frameworks therefore
# often make the embedding and the head units of their own.
#
# Now real ranks train a small GPT of four blocks. `lab.one_step` measures the memory of all
# parameters after each gather and each free; `cost.fsdp_ledger` predicts it.

# %%
four, spec = Ranks(4), replace(MODELS["tiny"], num_layers=4)
BATCH = next_tokens(token_batch(0, batch=12, seq=16, vocab=256))


def loss_on(model, rank, p):  # on this rank's part of the batch
    return token_loss(model(BATCH[0][rank::p]), BATCH[1][rank::p])


# %% tags=["picture"]
ledger, calls, sizes = four.run(lab.one_step, spec, BATCH)[0]
show(*pictures.params_over_step(cost.fsdp_ledger(sizes), ledger))

# %% [markdown]
# Each tooth of this sawtooth is a gathered block.
#
# ### Exercise 1 (core): shard and gather a parameter
#
# *Difficulty 2 of 5, importance 5 of 5, about 20 minutes.*
#
# Shard a parameter on dim 0, as `torch.chunk` splits it. `shard` is an `nn.Parameter` with memory
# of its own and the parameter's `requires_grad`; on a rank without rows its shape is `[0, ...]`.
# `gather()` returns the whole parameter as a new, contiguous tensor without a graph. Keep only
# `shard`. Example: `[10, 4]` on 4 ranks gives shards of 3, 3, 3 and 1 rows. This is what
# `fully_shard` does to every parameter. Budget: one all-gather of equal messages. About 9 lines.
#
# <details><summary>Hint: ranks have different numbers of rows</summary>
# Copy this rank's rows into a zeroed buffer of $m$ rows. After the gather, drop the padding.
# </details>
# <details><summary>Hint: if the whole parameter stays alive</summary>
# A slice is a view, which keeps the whole storage: use <code>.clone()</code>.
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
# **If blocks are freed after forward, a rank's parameter memory peaks at its shards, the root, and
# either two blocks or a second root, whichever is larger.**
#
# ## 2 Backward
#
# Forward is now clear: gather, compute, free. But backward needs the parameters again, and nobody
# calls our code when backward reaches a block. Autograd does: a hook on the block's *output* runs
# as soon as the gradient of this output is known. That is exactly the moment at which backward is
# about to enter the block, so the hook gathers its parameters.
#
# Then the gradients of the block's parameters arrive one by one. After the last one, all of them
# are copied into a buffer $[p,k]$. Line $r$ holds the $k$ numbers for rank $r$: its rows of each
# gradient, padded with zeros. **One reduce-scatter** sums the buffers of all ranks, and gives rank
# $r$ line $r$ of the sum. Divided by $p$, these are the gradients of its shards.
#
# ### Exercise 2 (core): the hooks of a unit
#
# *Difficulty 4 of 5, importance 5 of 5, about 25 minutes.*
#
# `unit` has `params` (whole while gathered), their `shards`, `gather()` and `free()`.
# `unit.pack(tensors)` makes the buffer; `unit.unpack(line)` splits a line into tensors of the
# shards' shapes. Backward adds the mean over the ranks to each shard's `.grad`, and leaves nothing
# whole, also no `param.grad`. Example on 2 ranks: gradients 2 and 4 of one number give 3. Budget: a
# gather and a free in forward; a gather, a reduce-scatter and a free in backward. About 16 lines.
#
# <details><summary>Hint: a hook on a tensor</summary>
# <code>output.register_hook(f)</code> calls <code>f(grad)</code>; <code>f</code> should return
# None. Under <code>no_grad</code> the output has no gradient: check
# <code>output.requires_grad</code>.
# </details>
# <details><summary>Hint: if your second backward sends nothing</summary>
# Refill <code>missing</code> after the reduce-scatter.
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
# `parameters()` are the shards. An optimizer that updates each number by itself, such as SGD or
# Adam, can update shards as if they were whole parameters. The proof is again that the ranks train
# the same weights as one process.


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
# **If a block is freed after forward, a step of one micro-batch gathers its parameters twice and
# reduces its gradients once.** `course_lib/fsdp/whole.py` is a short file that does just this. The
# next sections are about when to gather, and how little to keep.
#
# ## 3 To free or not to free
#
# Gathering twice costs bytes. The alternative is `reshard_after_forward=False`: a block stays whole
# from its forward to its backward, and is gathered only once. Then a rank holds all blocks at the
# end of forward.
#
# We compare both with plain data parallelism (DP), which all-reduces the gradients. Recall from
# lesson 04 that a ring all-reduce is a reduce-scatter followed by an all-gather. In fp32, how many
# times the bytes of plain DP does FSDP send if it frees blocks after forward?

# %% tags=["predict"]
guess_free = predict("freed after forward: bytes sent, as a multiple of plain DP's (like 4/3)")
### GUESS guess_free.commit("3/2")

# %% tags=["picture"]
sent, held, ddp = {}, {}, 2 * 3 / 4 * sum(map(sizes.grad_bytes, range(5)))
for name, frees in {"freed": True, "kept": False}.items():
    held[name], calls, _ = four.run(lab.one_step, spec, BATCH, reshard_after_forward=frees)[0]
    theirs = four.run(beside.torchs_calls, spec, BATCH, frees)[0]
    paper = cost.fsdp_traffic(sizes, reshard_after_forward=frees)
    sent[name] = [sent_bytes(found, 4) / ddp for found in (paper, calls, theirs)]
    print(f"{name}:", "formula {:.3f}, ours {:.3f}, PyTorch's {:.3f} of DP".format(*sent[name]))
reveal(guess_free, sent["freed"][1])
show(*pictures.freed_beside_kept(held, sent["freed"][1]))

# %% [markdown]
# For a unit of $S$ bytes, each of the three collectives sends $\frac{p-1}{p}S$ per rank. So
#
# $$ \frac{\text{FSDP that frees}}{\text{DP}}
# = \frac{\text{gather} + \text{gather} + \text{reduce-scatter}}
# {\text{reduce-scatter} + \text{gather}} = \frac{3}{2} . $$
#
# If blocks are kept, one gather disappears and the ratio is 1. The measured ratio is a little below
# 1.5, because the root is gathered only once: it is used last in forward and first in backward.
#
# **In one precision, with one micro-batch and without padding, FSDP that frees blocks after forward
# sends up to 1.5 times as much as plain DP. In return, no rank holds all blocks at once.**
#
# ## 4 Which gather is launched when
#
# Now the second problem: waiting. In the simplest version, a gather is launched *on demand*, when
# its unit is needed, and the rank waits until it is complete. With *prefetch*, the next unit's
# gather is launched before this unit computes. Both then run at the same time, and the next unit is
# there when it is needed.
#
# To see the effect alone, five layers sleep instead of computing (lesson 06). On this emulated
# link, a gather takes about as long as a layer's forward, and backward takes twice as long as
# forward. How long is a step with prefetch?

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
claim("prefetch shortens the step", measured["prefetch"].step_s < measured["on demand"].step_s)
show(*pictures.prefetch_steps(plan, wire, measured))
trace = trace_of_events({"": measured["prefetch"].events})
for kind, start_s, seconds in trace_reading.exposed_transfers(trace, 0)[:3]:
    print(f"{kind} at {1e3 * start_s:.0f} ms: {1e3 * seconds:.0f} ms exposed")

# %% [markdown]
# (In the measured rows, F and B include waiting.)
#
# The predicted times can be checked by hand. On demand, each of five layers waits for two gathers
# and a reduce-scatter: the step is the computation plus 15 transfers. With prefetch, only three
# transfers are fully exposed: the first gather of forward, because nothing computes before it; the
# first gather of backward, because the last layer was freed just before (frameworks often keep it
# whole and save this gather); and the last reduce-scatter, because nothing computes after it.
#
# ### Exercise 3 (core): the asynchronous prefetch
#
# *Difficulty 4 of 5, importance 5 of 5, about 25 minutes.*
#
# The methods run before and after unit $i$ computes (from 0, no root). `unit.allocate()` returns
# memory for the whole unit, `unit.shard` is sent, `unit.free()` frees. When a unit computes, it is
# whole, and the next unit of this pass is launched but **not** waited for: with 3 units, backward
# of unit 2 launches 1. Never gather an allocated unit. Free a unit after its backward, and after
# forward if `reshard_after_forward`; then at most two are allocated. `use` and `free` are your own
# helpers. About 13 lines.
#
# <details><summary>Hint: a call that does not wait</summary>
# <code>work = dist.all_gather_single(whole, shard, async_op=True)</code>, and later
# <code>work.wait()</code>.
# </details>
# <details><summary>Hint: if the same unit is gathered twice</summary>
# Let <code>use(number, following)</code> skip a unit that is in <code>works</code>, and a number
# that no unit has.
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
# Prefetch works only if the transfers fit beside the computation. The explorer predicts a step of 8
# billion parameters on 8 GPUs. They gather in bf16, keep and reduce in fp32, and compute 2,048
# tokens each, at an assumed 400 TFLOP/s. Larger units need fewer messages but more memory. Over
# which links can prefetch not hide the gathers?

# %% tags=["picture"]
explorer.fsdp_explorer()

# %% [markdown]
# **Launch the next gather before this unit computes. If the collectives beside each unit's
# computation together take no longer than this computation, at most the first gather of each pass
# and the last reduce-scatter are exposed.**
#
# *This is a good place for a break.*
#
# ## 5 Two precisions
#
# Where a link is too slow for prefetch, the next remedy is to send fewer bytes. Not every number
# needs 4 bytes:
#
# - The optimizer updates parameters in fp32, because in bf16 small updates can be lost (lesson 03).
#   So the shards stay in fp32.
# - Parameters can be gathered and used in bf16. This halves the bytes of each gather.
# - Gradients are *added up* over ranks. In bf16, each addition rounds to 8 significant bits, so
#   these sums are often reduced in fp32.
#
# PyTorch's `MixedPrecisionPolicy` therefore has three dtypes: `param_dtype` for gathers and
# computation, `reduce_dtype` for the sums of gradients, and `output_dtype` for the model's output.
#
# What does that do to the ratio of section 3? FSDP that frees sends two gathers of $b_g$ bytes per
# number and one reduce-scatter of $b_r$ bytes per number. DDP sends two such collectives of $b_d$
# bytes per number. So the ratio is at most $(2b_g+b_r)/(2b_d)$ (without padding). What is it for
# bf16 gathers, fp32 reduction, and DDP in bf16?

# %% tags=["predict"]
guess_bf16 = predict("bytes that FSDP sends, divided by those of DDP in bf16")
### GUESS guess_bf16.commit(1.5)

# %%
for gathered, reduced in ((4, 4), (2, 4), (2, 2)):
    ratios = [cost.times_plain_dp(gathered, reduced, ddp_bytes) for ddp_bytes in (4, 2)]
    words = "{:.2f} times fp32 DDP, {:.2f} times bf16 DDP".format(*ratios)
    print(f"gathers {gathered} bytes per number, reduces {reduced}: at most {words}")
reveal(guess_bf16, cost.times_plain_dp(2, 4, 2))

# %% [markdown]
# The same FSDP sends as much as DDP in fp32, and twice as much as DDP in bf16. A ratio says nothing
# without the precisions of both sides.
#
# Is the cheaper reduction in bf16 good enough? We measure the error of a gradient that is computed
# and reduced in bf16, and look at whether the loss shows it.

# %% tags=["picture", "measured"]
compute = partial(four.run, beside.in_precision, spec, BATCH)
found = {name: compute({"mixed_precision": policy}) for name, policy in beside.POLICIES.items()}
grads = {name: torch.cat([shards for shards, _ in by_rank]) for name, by_rank in found.items()}
losses = {name: by_rank[0][1] for name, by_rank in found.items()}
exact, off = grads["fp32"], {}
for name, found_grads in grads.items():
    off[name] = 100 * ((found_grads - exact).norm() / exact.norm()).item()
    print(f"{name}: {off[name]:.2f} % off in the first step, last loss {losses[name][-1]:.4f}")
claim("computing in bf16 adds most", off["bf16, reduced in fp32"] > off["fp32, reduced in bf16"])
show(*pictures.losses_beside_fp32(losses))

# %% [markdown]
# In this run on 4 ranks, most of the error comes from computing in bf16, and the loss curves hardly
# differ. But the partial sum is rounded again on each rank of the ring, so the relative error of a
# bf16 sum grows with the number of ranks, about like its square root. Llama 3 reduced gradients in
# fp32 to ensure convergence (Grattafiori et al. 2024, section 3.3.2).
#
# **Compute in bf16, keep parameters in fp32, and reduce in fp32 when many ranks are in the sum.**
#
# ## 6 Hybrid sharding
#
# Another remedy is to send the bytes over better links. Links are faster inside a node than between
# nodes (lesson 04), and so far all $p$ ranks gather from each other, wherever they are. **Hybrid
# sharding** (HSDP; Zhao et al. 2023, section 3.2.2) uses a mesh *replicate × shard*: the $s$ ranks
# of a node shard the model among themselves, and each of the $R=p/s$ nodes has a full copy.
#
# Gathers then stay inside a node. A gradient takes two steps: it is reduce-scattered inside the
# node, and the resulting shards of $S/s$ bytes are all-reduced across nodes. The price is memory: a
# rank keeps $1/s$ of the model, not $1/p$.
#
# How many bytes cross the slow link? If all $p$ ranks shard, they form one ring here, as slow as
# its slowest link, and each rank sends $3\frac{p-1}{p}S$ bytes per unit in two gathers and a
# reduce-scatter. With hybrid sharding, only the all-reduce of the shards crosses: each of the $s$
# ranks of a node sends $2\frac{R-1}{R}\frac{S}{s}$ bytes, so together $2\frac{R-1}{R}S$ bytes leave
# a node. We take 2 nodes of 2 ranks, and layers that take no time. Each rank has a network adapter
# of its own, but one flat ring uses only one adapter of each node. What is, by formula, the time of
# a fully sharded step divided by that of a hybrid step?

# %% tags=["predict"]
fast = Link(name="fast Ethernet", latency_s=1e-3, bytes_per_s=40e6)
two_nodes = TwoLevelLink(inside=fast, outside=wire, ranks_per_node=2)
guess_hybrid = predict(f"{two_nodes}: sharded over 4 / hybrid 2 x 2")
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
claim("hybrid is faster", real["hybrid 2 x 2"].step_s < real["sharded over 4"].step_s)
show(*pictures.hybrid_steps(plan, two_nodes, real))

# %% [markdown]
# Part of this gain is the second adapter, which our flat ring leaves idle. A node of eight H100 has
# eight adapters, and NCCL makes a ring through each of them. What does hybrid sharding gain there,
# and what if all eight GPUs share one adapter?

# %%
from course_lib.cost.hardware import H100, nodes_of

numels = (0, *[8 * 10**9 // 32] * 32)  # 32 units of a model of 8 billion parameters
for num_nodes, adapters in ((2, 1), (2, 8), (64, 8)):
    times = []
    for way in ({"p": 8 * num_nodes}, {"p": 8, "replicas": num_nodes}):
        units = cost.UnitSizes(numels=numels, compute_bytes=2, **way)
        nothing = cost.UnitTimes(forward_s=(0.0,) * 32, backward_s=(0.0,) * 32)
        events = cost.fsdp_step(nothing, units, 8 * num_nodes, nodes_of(H100, adapters=adapters))
        times.append(max(event.end_s for event in events))
    words = f"{num_nodes:2} nodes of 8 H100, adapters per node: {adapters}"
    print(f"{words}: sharded over all takes {times[0] / times[1]:.1f} times as long as hybrid")

# %% [markdown]
# With an adapter per GPU, eight rings together carry nearly as many bytes per second as NVLink, so
# on two nodes hybrid sharding gains little. On 64 nodes it does not even send fewer bytes: with
# gathers in bf16 and reduction in fp32, an adapter carries about $N$ bytes per step in both ways.
# What hybrid sharding saves there is steps of the ring: over 512 ranks a ring has 511 steps, and
# each of them costs a latency. (An algorithm with fewer steps than a ring would therefore make this
# gain smaller.)
#
# ### Exercise 4 (further): the groups of hybrid sharding
#
# *Difficulty 3 of 5, importance 3 of 5, about 20 minutes.*
#
# `shard_size` consecutive ranks are a node. Make `shard_group`, the ranks of this rank's node, and
# `replicate_group`, the ranks at this rank's position in every node. With 4 ranks and `shard_size`
# 2, rank 1 has the groups 0, 1 and 1, 3. `reduce(grad)` takes this rank's whole gradient (1-D;
# `shard_size` divides its length), and returns this rank's shard of the mean over *all* ranks. This
# is HSDP's backward. Budget: a reduce-scatter inside the node, an all-reduce of the shard across
# nodes. About 10 lines.
#
# <details><summary>Hint: if it hangs</summary>
# All ranks must call <code>dist.new_group(ranks)</code> for every group, in the same order, members
# or not.
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
# **Shard over fast links and replicate over slow links: only shards of gradients cross slow links.
# How much that gains depends on the number of adapters and nodes.**
#
# ## 7 Micro-batches
#
# All counts so far were for one micro-batch. In a step of several micro-batches, there are two ways
# to handle the gradients. Every backward can reduce them, and the shards add up. Or only the last
# backward reduces; before it, in `no_sync()`, each rank adds up *whole* gradients. DDP would send a
# quarter of the bytes in the second way, with 4 micro-batches. FSDP saves less, because it gathers
# its blocks in every micro-batch in both ways.

# %% tags=["picture"]
every, last = (four.run(lab.one_step, spec, BATCH, 4, sync)[0] for sync in (True, False))
times = sent_bytes(every[1], 4) / sent_bytes(last[1], 4)
print(f"every backward reduces: {times:.2f} times the bytes of reducing once")
show(*pictures.every_backward_or_the_last(every[0], last[0], times))

# %% [markdown]
# (PyTorch's FSDP2 has no `no_sync()`; there, `set_requires_gradient_sync(False)` does this.) The
# second way sends fewer bytes, but it keeps whole gradients ($4N$ bytes in fp32) instead of shards.
# For a model that needs FSDP at all, that is often too much.
#
# **When FSDP accumulates gradients, `no_sync()` sends fewer bytes but needs more memory.**
#
# ## 8 All ranks call
#
# FSDP hides many collectives in ordinary code, and all of them need every rank. Clipping and a full
# state dict need all shards, so *every rank* must call `clip_grad_norm_` and `full_state_dict`,
# even if only one rank prints the result. A forward gathers, so every rank must run the same units.
#
# **Break it.** Some models skip blocks at random (stochastic depth). If each rank draws its own
# random numbers, ranks skip different blocks. Let only rank 1 skip block 1. What happens?

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
# Why is this dangerous? All blocks have the same size. So rank 1's gather of block 2 fits rank 0's
# gather of block 1, and both ranks would compute with rows of both blocks. Here, ranks compare
# their calls, and FSDP names the unit in each call, so the error comes at once. By default, NCCL
# compares nothing: the run can hang or compute wrong numbers. Draw the same random numbers on all
# ranks, or run every unit on every rank.
#
# **All ranks must gather the same units in the same order.**
#
# ## 9 The real thing
#
# Does all this hold for the engines that people use? We compare our FSDP with PyTorch's
# `fully_shard` and, where installed, Accelerate, Lightning and DeepSpeed's stage 3. Each trains the
# same model on 2 ranks. Without sharding, fp32 parameters and Adam's two moments take 12 bytes per
# parameter between steps; sharded over 2 ranks, each should keep 6.

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

# %% [markdown]
# `fully_shard` uses the layout of section 1. Each shard is a `DTensor`, which records the whole
# shape and how it is sharded. This helps to combine FSDP with tensor parallelism (lesson 11). (In
# the row *PyTorch*, the root is also freed, so more bytes are sent.) Lesson 09 explains what else
# DeepSpeed keeps.
#
# **The engines compute the same numbers up to rounding; they differ in what they keep and when they
# communicate.**
#
# Whether an engine hides its communication on *your* machine, only a trace can tell.
#
# ### Exercise 5 (core): which transfers are exposed?
#
# *Difficulty 3 of 5, importance 4 of 5, about 15 minutes.*
#
# A *trace* (lesson 06, exercise 6) has times in µs. `computing(trace, pid)` returns the intervals
# in which a rank computes. A transfer is a box whose `cat` is in `COMMUNICATION_KINDS`; its part
# outside these intervals is *exposed*. For each transfer of this rank with at least 1 µs exposed,
# return `(cat, box start, exposed)` in seconds, the most exposed first. Example: computing from 0
# to 10 µs, a gather from 8 to 15: 5 µs are exposed. This finds what slows a step. About 7 lines.
#
# <details><summary>Hint: the overlap of two intervals</summary>
# It goes from the later start to the earlier end; if that is negative, the overlap is 0.
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
# What does all this gain in the end? Jin, Zhang and Huang (2023, a project at Case Western Reserve
# University) trained a character-level GPT-2 on Shakespeare and a BERT on movie dialogues. Their
# abstract announces an FSDP; their published code uses DDP. On two GPUs, each computes half of an
# epoch, but neither model became twice as fast:

# %%
for name, (millions, one_s, two_s) in beside.STUDY.items():
    print(f"{name}, {millions} million parameters: {one_s} s per epoch on one GPU, {two_s} on two")
    print(f"    {one_s / two_s:.2f} times as fast")

# %% [markdown]
# Two GPUs halve the computation, but they add communication. Tiny versions of both models show
# that two ranks reach the losses of one. (On shared CPU cores, they may not become faster.)

# %% tags=["picture", "measured"]
losses = {}
for name in beside.TASKS:
    (one, one_s), (two, two_s) = (r.run(beside.train_alike, name)[0] for r in (single, pair))
    losses[name], apart = (one, two), max(abs(a - b) for a, b in zip(one, two, strict=True))
    print(f"{name}: {one_s / two_s:.2f} times as fast on two ranks, losses {apart:.0e} apart")
show(*pictures.losses_on_two_ranks(losses))

# %% [markdown]
# And on many GPUs? In three series of published FSDP runs, the tokens per GPU and step are fixed,
# so the batch grows with the number of GPUs. In the fourth, plain DP divides a fixed batch of 256
# sequences of 4,096 tokens among its GPUs.

# %% tags=["picture"]
show(*pictures.fsdp_at_scale())

# %% [markdown]
# The fourth loses most. The series also differ in model and software, so the picture alone does not
# show why. One reason is known: fewer tokens per GPU mean less computation beside messages of the
# same size, so less of the communication can be hidden.
#
# On your GPUs, this command trains a GPT of the study's size. Compare it with `--ranks 1`:
#
# `python -m course_lib.train --ranks 2 --strategy fsdp --model gpt2-char --data shakespeare`
#
# For the BERT, use `--model bert-dialogues --data dialogues`. `cluster/exercises/10_fsdp.py` times
# a step beside PyTorch's.
#
# **With a fixed batch and one micro-batch, more GPUs divide the computation, not the bytes that
# each GPU sends.**
#
# ## What to keep
#
# - A rank holds its shards always, and a whole block only around its computation.
# - In one precision, with one micro-batch and without padding, freeing blocks after forward sends
#   up to 1.5 times DP's bytes.
# - Prefetch can hide a gather that takes no longer than the computation beside it.
# - All ranks must gather the same units in the same order.
#
# **Read on**
#
# - Zhao et al. 2023, *PyTorch FSDP*, sections 3 and 4: flat parameters, overlap, memory.
# - PyTorch, `torch.distributed.fsdp.fully_shard`: FSDP2 beside FSDP1.
# - Liang et al. 2024, *TorchTitan*, section 2: FSDP2 with tensor and pipeline parallelism.
