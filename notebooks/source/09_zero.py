# %% [markdown]
# # 09 ZeRO: stop keeping copies
#
# **Question.** In data parallelism every rank holds the same parameters, the same gradients and the
# same optimizer state: $p$ copies of everything. ZeRO (Rajbhandari et al. 2020) keeps each number
# *once*, and sends it when it is needed. How much memory does this save, and what does it cost?
#
# DDP (lesson 06) makes training faster, but it does not help with a model that is too large: each
# rank needs as much memory as one process. ZeRO keeps the computation of data parallelism and
# removes its copies, in three stages.
#
# *After this lesson you can*
#
# - say what each stage of ZeRO keeps and sends, and choose a stage;
# - build a sharded optimizer step, sharded gradients, and a layer that owns only a shard;
# - test that they compute the same numbers as one process.
#
# **Prerequisites:** lessons 01, 04 and 06. **Time:** 70 minutes of reading, 75 of exercises, with a
# break after section 5.
#
# | symbol | in code | meaning |
# |---|---|---|
# | $p$ | `p` | data-parallel ranks, each with its part of the batch |
# | $N$ | `N` | parameters of the model |
# | stage | `zero` | what is sharded: 1 optimizer state, 2 also gradients, 3 also parameters |
# | shard | `shard` | the part that a rank owns: $1/p$ of a flat parameter |
# | $m$ | `m` | micro-batches per optimizer step (lesson 02) |

# %%
# %load_ext course_lib.ranks
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.nn import functional as F

from course_lib.checks import check
from course_lib.core import MODELS, PCIE
from course_lib.core.parallelism import Parallelism
from course_lib.display import predict, reveal, show, waiting
from course_lib.memory import model_states
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from course_lib.ranks import RankError, Ranks
from course_lib.zero import FlatLayout, ZeRO1, ZeRO2, ZeRO3, lab, pictures

# %% [markdown]
# ## 1 What is there $p$ times?
#
# In mixed precision with Adam, each parameter needs 2 bytes in bf16, its gradient another 2 bytes,
# and its optimizer state 12 bytes: an fp32 copy of the parameter and two fp32 moments (lesson 01).
# That is $16N$ bytes, and with data parallelism they are on *every* rank, however many ranks there
# are.
#
# Which of them does a rank need all the time? The parameters and gradients are needed while a
# module computes. The 12 bytes of optimizer state are needed only in the optimizer's step, and for
# this step it is enough if *one* rank has them. So ZeRO begins with them:
#
# - stage 1 shards the optimizer state: $4N+\frac{12N}{p}$ bytes per rank;
# - stage 2 also shards the gradients: $2N+\frac{14N}{p}$;
# - stage 3 also shards the parameters: $\frac{16N}{p}$.
#
# Without ZeRO, 7.5 billion parameters need 120 GB per rank. With stage 2 on 64 ranks, how many GB
# does each rank hold?

# %% tags=["predict"]
guess_stage_2 = predict("7.5 billion parameters, stage 2, 64 ranks: a rank holds", unit="GB")
### GUESS guess_stage_2.commit(22)

# %%
states = model_states(7_500_000_000, "bf16", parallelism=Parallelism(dp=64, zero=2))
reveal(guess_stage_2, sum(states.values()) / 1e9)

# %% tags=["picture"]
show(*pictures.states_on_paper())

# %% [markdown]
# Stage 1 divides the largest part by $p$. But parameters and gradients stay whole, so on any number
# of ranks more than $4N$ bytes are left, and with stage 2 more than $2N$. As far as these states
# are concerned, only stage 3 lets the size of a model grow in proportion to the number of ranks.
#
# Do GPUs agree with this arithmetic? The next picture shows published measurements: the Ultra-Scale
# Playbook's runs of a model of 1.34 billion parameters (Tazi et al. 2025), without ZeRO and with
# stage 1. A peak also includes activations and buffers, which the formula does not know. So the
# line is the *measured* peak without ZeRO, minus the $12N(1-1/p)$ bytes that stage 1 should save.
# The measured peaks of stage 1 lie above it, on 256 GPUs almost on it.

# %% tags=["picture"]
show(*pictures.stage_1_on_gpus())

# %% [markdown]
# Now we measure on our own ranks, with a small GPT in bf16: how many bytes are in the storages that
# a rank holds after backward? The course's `ZeRO1`, `ZeRO2` and `ZeRO3` are *engines*: each wraps a
# model together with its sharded optimizer.

# %%
BATCH = next_tokens(token_batch(0, batch=12, seq=16, vocab=256))
worlds, stages = {p: Ranks(p) for p in (1, 2, 3, 4)}, (ZeRO1, ZeRO2, ZeRO3)
tiny = replace(MODELS["tiny"], vocab=320)


def loss_on(engine, rank, p):  # on this rank's part of the batch
    return token_loss(engine(BATCH[0][rank::p]), BATCH[1][rank::p])


def owned_kib(rank, p, stage):
    engine = stage(GPT(tiny).bfloat16(), torch.optim.AdamW, lr=1e-3)
    owned = lab.owned_after_backward(engine, lambda: loss_on(engine, rank, p))
    return sum(owned.values()) / 2**10


# %% tags=["picture"]
num, held_kib = sum(param.numel() for param in GPT(tiny).parameters()), {}
for zero, stage in enumerate(stages, start=1):
    held_kib[zero] = [ranks.run(owned_kib, p, stage)[0] for p, ranks in worlds.items()]
show(*pictures.states_on_ranks(num, [*worlds], held_kib))

# %% [markdown]
# **With Adam in mixed precision, 12 of the 16 bytes per parameter serve only the optimizer step,
# and for this step one owner per parameter is enough.**
#
# ## 2 One flat parameter, equal shards
#
# We want each rank to own $1/p$ of all numbers. But a model consists of tensors of very different
# sizes, and their sizes are not multiples of $p$. If ranks owned whole tensors, some would own more
# than others (section 10), and collectives such as reduce-scatter need equal parts.
#
# So we put the tensors one after another into one **flat parameter**, add zeros at the end
# (*padding*) until its length is a multiple of $p$, and cut it into $p$ equal shards. Move the
# slider: a shard may begin or end inside a tensor. Is that allowed? SGD and Adam update each number
# independently of the others, so they can work on pieces of tensors. Optimizers that need whole
# matrices, such as Shampoo and Muon, have to gather them first.

# %% tags=["picture"]
from course_lib.zero.explorer import shards_explorer, zero_explorer

shards_explorer()

# %% [markdown]
# ### Exercise 1 (core): the pieces of a shard
# *Difficulty 2 of 5, importance 3 of 5, about 10 minutes and 6 lines.*
#
# Which numbers of which tensors does a rank own? `sizes` has the number of elements of each tensor,
# in the order of the flat parameter; padding at its end belongs to no tensor. For `sizes = [3, 5]`
# and $p=2$, shards have 4 numbers: rank 0 owns `[(0, 0, 3), (1, 0, 1)]`, and rank 1 owns `[(1, 1,
# 5)]`. Checkpoints (lesson 14) need the same computation.
#
# <details><summary>Hint: where do two intervals overlap?</summary>
# From the larger beginning to the smaller end, if the end is larger.
# </details>


# %% tags=["exercise"] exercise="zero-1"
def pieces_of(sizes, p, rank):
    """Pieces (index, start, stop): the rank owns tensors[index].flatten()[start:stop]."""
    pieces, begin = [], 0  # begin: where the next tensor begins in the flat parameter
    ### BEGIN SOLUTION: where does each tensor overlap with the shard?
    n = -(-sum(sizes) // p)
    for index, size in enumerate(sizes):
        first, last = max(rank * n, begin), min((rank + 1) * n, begin + size)
        if first < last:
            pieces.append((index, first - begin, last - begin))
        begin += size
    ### END SOLUTION
    return pieces


# %% tags=["check"] exercise="zero-1"
check("zero-1", pieces_of)

# %% [markdown]
# From here on, the course's `FlatLayout.of(tensors, p)` computes this layout. Its
# `flatten(tensors)` returns the flat tensor of `padded_numel` numbers, and
# `flat[shard_slice(rank)]` is a rank's shard of it, `shard_numel` numbers. `views(flat)` returns
# the tensors again.
#
# **Cutting a flat parameter gives equal shards, and each number has exactly one owner.**
#
# ## 3 Stage 1: shard the optimizer state
#
# We know who owns what. How does a step work if each rank has the optimizer state of its shard
# only?
#
# After DDP's all-reduce, every rank has the mean of all gradients. A rank takes its part of them
# and updates its own shard: for this it needs only its own optimizer state. But the next forward
# needs *all* new parameters on every rank, so after the step the ranks gather them.
#
# ### Exercise 2 (core): step your own shard
# *Difficulty 3 of 5, importance 5 of 5, about 15 minutes and 8 lines.*
#
# Write stage 1 after DDP's all-reduce: the gradients are already means, so only read them.
# `make_optimizer([tensor])` returns an optimizer for a tensor. `dist.all_gather_single(flat,
# shard)` gathers all ranks' shards into `flat`. Budget: one all-gather per step; a rank keeps its
# shard, and the shard's gradient and optimizer state, in the parameters' dtype. With 8 parameters,
# Adam and $p=4$, that is 2 numbers of each kind instead of 8.
#
# <details><summary>Hint: too many bytes are alive</summary>
# A slice is a view that keeps the whole buffer alive. Copy it:
# <code>flat[self.mine].clone()</code>. Copy the slice of the gradients, too.
# </details>
# <details><summary>Hint: the ranks are one step apart</summary>
# Step first, then gather, then copy the result into the parameters, in the same `step()`.
# </details>


# %% tags=["exercise"] exercise="zero-2"
class ShardedStep:
    """Stage 1, after DDP's all-reduce: this rank updates its shard of the trained parameters."""

    def __init__(self, module, make_optimizer):
        self.params = [param for param in module.parameters() if param.requires_grad]
        self.layout = FlatLayout.of(self.params, dist.get_world_size())
        self.mine = self.layout.shard_slice(dist.get_rank())
        ### BEGIN SOLUTION: self.shard, a tensor of its own; self.optimizer for it
        self.shard = self.layout.flatten(self.params)[self.mine].clone()
        self.optimizer = make_optimizer([self.shard])
        ### END SOLUTION

    @torch.no_grad()
    def step(self):
        ### BEGIN SOLUTION: the shard's gradient, its step, all shards, all parameters
        grads = [param.grad for param in self.params]
        self.shard.grad = self.layout.flatten(grads)[self.mine].clone()
        self.optimizer.step()
        flat = self.shard.new_empty(self.layout.padded_numel)
        dist.all_gather_single(flat, self.shard)
        for param, view in zip(self.params, self.layout.views(flat), strict=True):
            param.copy_(view)
        ### END SOLUTION


# %% tags=["check"] exercise="zero-2"
check("zero-2", ShardedStep)

# %% [markdown]
# With DDP, `ShardedStep` needs an all-reduce *and* an all-gather per step, one more collective than
# DDP alone. Is this necessary? A ring all-reduce is a reduce-scatter followed by an all-gather
# (lesson 04). After the reduce-scatter, a rank has the summed gradients of its shard, and these are
# all that its step needs. So `ZeRO1` leaves out the all-gather of gradients: it runs a
# reduce-scatter, then the step, then the all-gather of *new parameters*. The optimizer's step has
# moved between the two halves of the all-reduce.
#
# **With Adam, stage 1 shards the largest part of the state. It sends as many bytes as DDP, if
# gradients and parameters have the same dtype.**
#
# ## 4 Stage 2: shard the gradients
#
# Stage 1 still keeps all gradients until the step, although a rank uses only $1/p$ of them. Stage 2
# sends them earlier. During backward, gradients become complete one after another, and DDP collects
# them in buckets (lesson 06). When a bucket is full, stage 2 runs a reduce-scatter instead of an
# all-reduce. Each rank keeps its shard of the mean, and frees the bucket's whole gradients.
#
# ### Exercise 3 (core): shards of gradients
# *Difficulty 4 of 5, importance 5 of 5, about 20 minutes and 10 lines.*
#
# `on_grad(param)` is called when `param.grad` is complete. If this completes a bucket,
# reduce-scatter it, and return when this is done; afterwards only the shards are alive. Parameters
# come in any order, also mixed between buckets. Backward may run several times before a step, so
# add up the shards of the means: with gradients 2 and 4 on two ranks, a pass adds 3. Budget: one
# reduce-scatter per bucket and pass. PyTorch's FSDP does this for its gradients, too.
#
# <details><summary>Hint: gradients are still there</summary>
# Set <code>param.grad = None</code> for each parameter of the bucket; zeros need as much memory.
# Does a list or a view still refer to the gradients?
# </details>
# <details><summary>Hint: which bucket is full?</summary>
# It is full if <code>self.ready.issuperset(bucket)</code>. After sending it, remove only its
# parameters from <code>ready</code>, for the next backward.
# </details>
# <details><summary>Hint: the call</summary>
# <code>dist.reduce_scatter_single(shard, flat)</code> sums the ranks' flat gradients and writes
# this rank's part into <code>shard</code>, of <code>layout.shard_numel</code> numbers.
# </details>


# %% tags=["exercise"] exercise="zero-3"
class ShardedGrads:
    """Stage 2: buckets of gradients leave during backward; `shards` holds this rank's parts."""

    def __init__(self, buckets):
        p = dist.get_world_size()
        self.buckets, self.layouts = buckets, [FlatLayout.of(bucket, p) for bucket in buckets]
        self.shards, self.ready = [None] * len(buckets), set()
        for param in [param for bucket in buckets for param in bucket]:
            param.register_post_accumulate_grad_hook(self.on_grad)

    def on_grad(self, param):
        """param.grad is complete."""
        ### BEGIN SOLUTION: a full bucket is sent, its mean is kept, its gradients are freed
        self.ready.add(param)
        for n, (bucket, layout) in enumerate(zip(self.buckets, self.layouts, strict=True)):
            if self.ready.issuperset(bucket):
                flat = layout.flatten([param.grad for param in bucket])
                shard = flat.new_empty(layout.shard_numel)
                dist.reduce_scatter_single(shard, flat)
                mean = shard / dist.get_world_size()
                self.shards[n] = mean if self.shards[n] is None else self.shards[n] + mean
                for param in bucket:
                    param.grad = None
                self.ready.difference_update(bucket)
        ### END SOLUTION


# %% tags=["check"] exercise="zero-3"
check("zero-3", ShardedGrads)

# %% [markdown]
# After backward, $1/p$ of the gradients is left. But what decides whether a model fits is the peak
# *during* backward. The course's engine is asynchronous: it fills one bucket while it sends
# another. The next cell runs our small GPT in fp32 on four ranks, with buckets of 64 KiB; the
# embedding is larger and has its own bucket. At the peak, what fraction of stage 1's gradient bytes
# does stage 2 hold?

# %% tags=["predict"]
guess_fullest = predict("peak of gradient bytes, stage 2 / stage 1 (like 3/4)")
### GUESS guess_fullest.commit(0.3)


# %%
def over_time(rank, p, stage):
    engine = stage(GPT(tiny), torch.optim.AdamW, lr=1e-3, bucket_bytes=2**16)
    for _ in range(2):
        engine.zero_grad()
        with lab.owned_over_time(engine) as ledger:
            loss_on(engine, rank, p).backward()
            engine.step()
    return ledger


ranks = worlds[4]
one, two, three = (ranks.run(over_time, 4, stage)[0] for stage in stages)
most = [max(ledger.bytes_by_kind["grads"]) for ledger in (one, two)]
reveal(guess_fullest, most[1] / most[0])

# %% tags=["picture", "measured"]
show(*pictures.grads_over_time(one, 1))
show(*pictures.grads_over_time(two, 2, one.peak_bytes()))

# %% [markdown]
# It is more than a quarter. At the peak, stage 2 holds the shards of the buckets that it has sent,
# one bucket that is being filled, the gradient that is copied into it, and one bucket that is being
# sent. In a small model these buckets are a large part of all gradients. In a large model with
# buckets of the same size, the peak comes closer to $1/p$, unless a single tensor, such as the
# embedding here, is a large part of the model.
#
# **With stage 2, a whole gradient stays in memory until its bucket has been sent. Smaller buckets
# need less memory, but their messages cost more latencies.**
#
# The short file `course_lib/zero/whole.py` has stage 2 alone, with one message per parameter.
#
# ## 5 Stage 3: gather, use, free
#
# One copy is left on every rank: the parameters. A rank cannot do without them, because it computes
# the whole model. But it does not need all of them at the same time. A layer's parameters are
# needed while this layer computes, once in forward and again in backward. Stage 3 keeps only a
# shard of them, gathers a module's parameters just before they are used, and frees them right
# after.
#
# ### Exercise 4 (further): a linear layer that owns a shard
# *Difficulty 4 of 5, importance 4 of 5, about 20 minutes and 9 lines.*
#
# Write forward and backward of a linear layer whose `weight` and `bias` `whole(shard, layout)`
# gathers. In backward, the shard's gradient is its part of the *mean* over the ranks: with 2 and 4
# on two ranks, 3. The gradient of `x` is not averaged. Budget: one gather in forward; one gather
# and one reduce-scatter in backward. Between forward and backward, keep only `x` and the shard.
# This is the core of FSDP (lesson 10).
#
# <details><summary>Hint: never freed</summary>
# What you save in <code>ctx</code> stays in memory until backward. Save <code>x</code> and
# <code>shard</code>, and gather again.
# </details>
# <details><summary>Hint: the gradients of a linear layer</summary>
# For <code>y = x @ weight.T + bias</code>: <code>grad @ weight</code> for x, <code>grad.T @
# x</code> for the weight, <code>grad.sum(0)</code> for the bias.
# </details>
# <details><summary>Hint: invalid gradient, or too small</summary>
# The shard's gradient is a shard of the mean over ranks. The gradient of x is not averaged.
# </details>


# %% tags=["exercise"] exercise="zero-4"
def whole(shard, layout):
    """The tensors, put together out of all ranks' shards."""
    flat = shard.new_empty(layout.padded_numel)
    dist.all_gather_single(flat, shard.detach())
    return layout.views(flat)


class ShardedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shard, layout):  # x: [tokens, in]
        ### BEGIN SOLUTION: gather, use, and keep what is needed to do it again
        ctx.save_for_backward(x, shard)
        ctx.layout = layout
        weight, bias = whole(shard, layout)
        return F.linear(x, weight, bias)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad):
        ### BEGIN SOLUTION: gather again; gradients for x and the shard, None for layout
        x, shard = ctx.saved_tensors
        weight, _ = whole(shard, ctx.layout)
        flat = ctx.layout.flatten([grad.T @ x, grad.sum(0)])
        mean = torch.empty_like(shard)
        dist.reduce_scatter_single(mean, flat)
        return grad @ weight, mean / dist.get_world_size(), None
        ### END SOLUTION


def sharded_linear(x, shard, layout):
    return ShardedLinear.apply(x, shard, layout)


# %% tags=["check"] exercise="zero-4"
check("zero-4", sharded_linear)

# %% [markdown]
# The course's `ZeRO3` does this with hooks, for modules that use only their own parameters. The
# next picture shows its memory over time. Our GPT's embedding is *tied*: the output layer uses the
# same matrix. How often is this matrix gathered in one step?

# %% tags=["predict"]
guess_gathers = predict("gathers of the tied embedding, in one step of stage 3")
### GUESS guess_gathers.commit(2)

# %% tags=["picture", "measured"]
show(*pictures.params_over_time(three, one.peak_bytes()))
sizes = [e.num_bytes for e in ranks.events if (e.kind, e.rank) == ("all_gather", 0)]
reveal(guess_gathers, sizes.count(max(sizes)) / 2)  # in two steps

# %% [markdown]
# Two modules use this matrix, and each of them needs it in forward and in backward. Because our
# engine frees it after each use, it gathers it 4 times. An engine that kept it from the output
# layer's forward to its backward, which follows at once, would need 3.
#
# The picture also shows what limits stage 3: at least the largest module has to be whole for a
# moment. So a model should be split into modules of similar size.
#
# Sharding must not change what is computed. Do all three stages on four ranks compute what one
# process computes, in float64 and up to rounding?


# %%
def train(rank, p, stage, steps, state=None):
    torch.manual_seed(rank)  # other weights on each rank: the engine has to make them equal
    engine = stage(GPT(tiny).double(), torch.optim.SGD, lr=0.3, momentum=0.9)
    if state:
        engine.load_full_state_dict(state)  # section 9
    losses = []
    for _ in range(steps):
        engine.zero_grad()
        loss = loss_on(engine, rank, p)
        loss.backward()
        engine.step()
        dist.all_reduce(loss.detach_())
        losses.append(loss.item() / p)
    return losses, engine.full_state_dict()


# %% tags=["check"]
alone = worlds[1].run(train, 1, ZeRO1, 3)[0][1]["model"]
for stage in stages:
    found = ranks.run(train, 4, stage, 3)[3][1]["model"]
    near = all((alone[name] - found[name]).abs().max() < 1e-12 for name in alone)
    print(f"{stage.__name__} on 4 ranks: as one process, within 1e-12: {near}")

# %% [markdown]
# **Stage 3 keeps every number once. In this simple version, the whole parameters of a module exist
# only while it computes.**
#
# *This is a good place for a break.*
#
# ## 6 What is sent, and when
#
# We have saved memory by sending numbers when they are needed. What does that cost? The table
# collects the collectives of each stage.
#
# | in our engines | forward | backward | step |
# |---|---|---|---|
# | DDP | | all-reduce gradients (once per step, lesson 06) | |
# | stage&nbsp;1 | | | reduce-scatter gradients, all-gather parameters |
# | stage&nbsp;2 | | reduce-scatter gradients | all-gather parameters |
# | stage&nbsp;3 | all-gather parameters | all-gather parameters, reduce-scatter gradients | |
#
# In a ring, a reduce-scatter and an all-gather of the same tensor send equally many bytes:
# $\frac{p-1}{p}$ of its size per rank (lesson 04). DDP's all-reduce consists of one of each, so it
# costs 2 such units. Stages 1 and 2 also have one of each. Stage 3 has two all-gathers and one
# reduce-scatter, 3 units. This holds if parameters and gradients have one dtype, no two modules
# share a parameter, and there is one micro-batch per step.
#
# With gradient accumulation (lesson 02), DDP can still wait for the last micro-batch before it
# communicates. With 4 micro-batches in a step, how many bytes does stage 3 send, divided by DDP's
# bytes?

# %% tags=["predict"]
guess_four = predict("stage 3 with 4 micro-batches, as a multiple of DDP's (once per step)")
### GUESS guess_four.commit(4)

# %%
from course_lib.cost.traffic import sent_bytes
from course_lib.zero.cost import ParamTraffic, offload_bytes, zero_traffic


def step_of(rank, p, stage, m):
    """The collectives of m micro-batches, and the flat parameters; untied: one module each."""
    engine = stage(GPT(replace(tiny, tied=False)), torch.optim.SGD, lr=0.1)
    flats = [ParamTraffic(num_bytes=one.layout.padded_numel * 4) for one in engine.all_flat_params]
    return lab.step_calls(engine, [lambda: loss_on(engine, rank, p) / m] * m), flats


def by_ddp(calls, flats):  # bytes sent, as a multiple of DDP's
    return sent_bytes(calls, 2) / sent_bytes(zero_traffic(0, flats), 2)


# %% tags=["picture"]
counts, pair, sent = [1, 2, 4], worlds[2], {}
for zero, stage in enumerate(stages, start=1):
    sent[zero] = [by_ddp(*pair.run(step_of, 2, stage, m)[0]) for m in counts]
print("one micro-batch, bytes / DDP's:", {f"stage {z}": round(sent[z][0], 2) for z in sent})
reveal(guess_four, sent[3][2])
show(*pictures.sent_by_stage(counts, sent))

# %% [markdown]
# Our stages 2 and 3 communicate in *every* micro-batch. Between micro-batches, stage 2 keeps no
# whole gradients, so it has to reduce them each time: $m$ reduce-scatters and one all-gather,
# $\frac{m+1}{2}$ times DDP's bytes. Stage 3 also keeps no whole parameters, so all three of its
# collectives run $m$ times: $\frac{3m}{2}$. If you accumulate many micro-batches and have the
# memory, prefer stage 1.
#
# **In one dtype, with one micro-batch and no shared parameters, stages 1 and 2 send as many bytes
# as DDP, and stage 3 sends 1.5 times as many.**
#
# ## 7 Clip by the whole norm
#
# The optimizer step itself needs no other rank's numbers. But some operations around it do.
# Gradients are often *clipped*: scaled down so that their norm is at most `max_norm`. This norm is
# over all parameters, and now a rank has only a shard of the gradients. Norms do not add up, but
# squares do: each number has one owner, so $\lVert g\rVert^2=\sum_r\lVert g_r\rVert^2$ over the
# ranks' shards $g_r$.
#
# ### Exercise 5 (further): one norm for all
# *Difficulty 2 of 5, importance 4 of 5, about 10 minutes and 8 lines.*
#
# Scale the shards in place, and return the norm before clipping. If the norm is at most `max_norm`,
# change nothing. With a 3 on one rank, a 4 on the other and `max_norm = 1`, the norm is 5, and the
# shards become 0.6 and 0.8. A rank may have no shards. Shards may be fp16, whose squares overflow:
# square and add in fp32 or more. Budget: one all-reduce of one number.
#
# <details><summary>Hint: it hangs</summary>
# Only the all-reduce tells whether to clip, so every rank calls it.
# </details>


# %% tags=["exercise"] exercise="zero-5"
def clip_shards(grads, max_norm):
    """Clip by the norm over all shards of all ranks; grads is a list of tensors."""
    ### BEGIN SOLUTION: what adds up? And when does nothing change?
    squares = torch.zeros((), dtype=torch.float64)
    for grad in grads:
        squares += grad.double().square().sum()
    dist.all_reduce(squares)
    norm = squares.sqrt()
    if norm > max_norm:
        for grad in grads:
            grad.mul_(max_norm / norm)
    return norm
    ### END SOLUTION


# %% tags=["check"] exercise="zero-5"
check("zero-5", clip_shards)

# %% [markdown]
# If each rank used the norm of its own shard, the ranks would scale by different factors. Nothing
# fails, but the gradient then points in another direction.
#
# **If parameters are sharded, a sum over all parameters needs every rank.**
#
# ## 8 Offload
#
# What if even the shards do not fit? The optimizer state is used once per step, so it can stay in
# the host's memory (ZeRO-Offload, Ren et al. 2021). In each step, a rank copies its gradient shard
# to the host, the CPU computes the optimizer step, and the new parameters are copied back. In bf16
# these are $\frac{2N}{p}$ bytes in each direction, and in exchange the GPU no longer holds
# $\frac{12N}{p}$ bytes.
#
# The next cell counts the bytes of a small run, and computes how long the copies take for 7.5
# billion parameters on 4 ranks, each with its own PCIe 3 link (12 GB/s).


# %%
def offloaded(rank, p):
    engine = ZeRO2(GPT(tiny).bfloat16(), torch.optim.AdamW, lr=1e-3, offload=True)
    loss_on(engine, rank, p).backward()
    engine.step()
    flats = [ParamTraffic(num_bytes=one.layout.padded_numel * 2) for one in engine.all_flat_params]
    return engine.offload.num_bytes, sum(offload_bytes(2, flats, p))


counted, on_paper = ranks.run(offloaded, 4)[0]
print(f"the tiny GPT, stage 2: {counted} bytes of transfers counted, {on_paper} on paper")
there, back = offload_bytes(2, [ParamTraffic(num_bytes=2 * 7_500_000_000)], p=4)
print(f"7.5 billion parameters on 4 ranks: {12 * 7.5 / 4} GB per GPU are freed")
print(f"the link: {PCIE}")
print(f"copies of one step: {PCIE.time_s(there) + PCIE.time_s(back):.3f} s")

# %% [markdown]
# Our ranks compute on the CPU, so a second buffer stands for the host's memory: the bytes are
# counted, and the seconds are computed from the link's bandwidth. Whether the copies matter depends
# on the rest of the step. The longer forward and backward take, for example with large batches, the
# smaller is their share.
#
# **Offload frees GPU memory at the cost of PCIe transfers and a slower optimizer step. Both costs
# matter less if forward and backward take long.**
#
# ## 9 One rank saves
#
# **Break it.** In plain data parallelism, every rank has everything, so rank 0 alone can write the
# checkpoint. With ZeRO no rank has the whole state, and `full_state_dict()` has to gather it.
# Suppose that a script still says `if rank == 0`. Which rank hangs?

# %% tags=["predict"]
guess_hang = predict("who waits forever?", choices=("rank 0", "the others", "nobody"))
### GUESS guess_hang.commit("the others")


# %% tags=["failure", "raises-exception"]
def save_on_rank_0(rank):
    engine = ZeRO3(GPT(tiny), torch.optim.AdamW, lr=1e-3)
    if rank == 0:
        return engine.full_state_dict()["model"].keys()


try:
    worlds[3].run(save_on_rank_0)
except RankError as hang:
    reveal(guess_hang, "rank 0" if [wait.rank for wait in hang.waits] == [0] else "the others")
    show(waiting(hang.waits, 3), alt="rank 0 waits in a gather for ranks 1 and 2, which have left")
    raise

# %% [markdown]
# Rank 0 waits in a gather for ranks that have long gone on. The repair is that all ranks gather,
# and only then rank 0 writes. But the whole state must then fit into rank 0's memory, and one rank
# writes all of it. So at scale each rank saves its own shard (`engine.state_dict()`). Which form is
# better? Shards of 2 ranks have to be cut again before 3 ranks can load them (lesson 14), while a
# full state fits any number of ranks.
#
# The next cell saves a full state after 6 steps of stage 2 at $p=2$, and continues with stage 3 at
# $p=3$. Do the losses equal those of one process that never stopped?

# %% tags=["measured"]
never_stopped, _ = worlds[1].run(train, 1, ZeRO1, 12)[0]
first, state = pair.run(train, 2, ZeRO2, 6)[0]
second, _ = worlds[3].run(train, 3, ZeRO3, 6, state)[0]
apart = max(abs(a - b) for a, b in zip(never_stopped, first + second, strict=True))
print("equal losses, within 1e-9:", apart < 1e-9)
print(f"loss from {first[0]:.4f} to {second[-1]:.4f}, never more than {apart:.0e} from one process")

# %% [markdown]
# They do: the stage and the number of ranks decide where the numbers are, but not what they are.
#
# **A gather is a collective: either all ranks of the group call it, or none.**
#
# ## 10 The real thing
#
# In practice you would use a framework. How do the frameworks differ from our engines? PyTorch's
# stage 1 is `ZeroRedundancyOptimizer`, for models in DDP. It assigns *whole tensors* to ranks,
# where we cut a flat parameter. The next cell compares the weights after a step, and how much of
# Adam's state each of 4 ranks keeps.

# %%
from course_lib.ddp import DDP
from course_lib.zero import ShardedOptimizer


def side_by_side(rank, p):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    weights, state_kib = [], []
    for optimizer_cls in (ShardedOptimizer, ZeroRedundancyOptimizer):
        torch.manual_seed(0)
        model = DDP(GPT(tiny).double())
        optimizer = optimizer_cls(model.parameters(), torch.optim.AdamW, lr=1e-3)
        loss_on(model, rank, p).backward()
        model.finish()
        optimizer.step()
        state_kib.append(lab.moment_bytes(optimizer) / 2**10)
        weights.append([param.detach() for param in model.parameters()])
    return state_kib, weights


# %% tags=["picture"]
found = ranks.run(side_by_side, 4)
(ours, theirs), (kib, torch_kib) = found[0][1], zip(*(state for state, _ in found), strict=True)
equal = all((a - b).abs().max() < 1e-12 for a, b in zip(ours, theirs, strict=True))
print("the same weights, within 1e-12:", equal)
share = max(torch_kib) / (sum(torch_kib) / 4)
print(f"PyTorch's fullest rank keeps {share:.2f} times a quarter of all state")
show(*pictures.moments_by_rank(num, kib, torch_kib))

# %% [markdown]
# The weights are the same. Pieces of a flat parameter give equal shares, and whole tensors do not,
# although in this model the difference is small. It grows if one tensor is larger than a rank's
# equal share. In exchange, whole tensors suit optimizers that need matrices.
#
# If DeepSpeed is installed, the next cell runs its ZeRO beside ours. *Alive* counts all tensors
# that still exist in Python after the step.

# %% tags=["measured"]
from course_lib.frameworks import missing
from course_lib.zero import beside_frameworks as beside

print("DeepSpeed:", missing("deepspeed") or "installed.")
for zero in (1, 2, 3):
    for name in ["ours", "DeepSpeed"][: 1 if missing("deepspeed") else 2]:
        steps = pair.run(beside.run_stage, tiny, BATCH, zero, name == "ours")[0]
        words = "third loss {:.4f}, {:.0f} ms per step, {:.0f} KiB alive".format(*steps)
        paper = sum(beside.kept_bytes(zero, num, 2, name == "ours").values()) / 2**10
        print(f"stage {zero}, {name:9}: {words}, {paper:.0f} on paper")

# %% [markdown]
# Both compute the same losses. Why does DeepSpeed keep more? Its code (version 0.19,
# `runtime/zero`) shows the parts:
#
# | between steps, fp32 | our engines | DeepSpeed adds |
# |---|---|---|
# | stages 1 and 2 | $4N$ parameters, $8N/p$ moments | $4N/p$: an fp32 copy of its shard |
# | stage 3 | $4N/p$ parameters, $8N/p$ moments | $4N/p$ copy, $4N/p$ grads, bucket, $4N$ whole |
#
# - The copy is the fp32 *master* that 16-bit training needs (section 1). DeepSpeed makes it for an
#   fp32 model, too.
# - Stage 3 keeps its buffers for gradients and for a bucket (here $2^{14}$ numbers; default
#   $5\cdot10^8$) between steps, which avoids memory fragmentation.
# - Stage 3 keeps small tensors gathered (`stage3_param_persistence_threshold`: up to $10^5$
#   numbers), because freeing them saves little and each gather costs a latency. All tensors of our
#   tiny model are small.
#
# By default, DeepSpeed's stages 1 and 2 all-reduce gradients (`use_multi_rank_bucket_allreduce`),
# so they send more than in section 6.
#
# **ZeRO fixes what is computed. Implementations differ in what they keep between steps and in what
# they send, so measure the one that you use.**
#
# ## 11 What would you choose?
#
# A higher stage holds less and sends more. Which one should you use? The bars show the states that
# a rank holds, and the dashed line the memory of an H100. Beside each name you see how long its
# ranks communicate per step. The slider *link* begins with NVLink (450 GB/s in each direction).
# Between nodes, a ring over all eight GPUs of each node uses their eight adapters of 50 GB/s
# together; a group with one GPU per node has one adapter.

# %% tags=["picture"]
zero_explorer()

# %% [markdown]
# Activations and buckets are not included in the bars. None of the three stages shards activations,
# because each rank still computes the whole model on its part of the batch.
#
# **Begin with the lowest stage that fits, activations included. A higher stage can be faster, for
# example if the memory that it frees allows larger micro-batches.**
#
# ## What to keep
#
# - With Adam in mixed precision, DDP keeps 16 bytes per parameter on each rank. Stage 1 shards 12
#   of them, stage 2 shards 14, and stage 3 all 16.
# - Stage 1 moves the optimizer step between the two halves of an all-reduce. Stage 2 frees
#   gradients bucket by bucket during backward. Stage 3 gathers a module's parameters when they are
#   used.
# - In one dtype, with one micro-batch and no shared parameters, stages 1 and 2 send as many bytes
#   as DDP, and stage 3 sends 1.5 times as many. In our stages 2 and 3, every micro-batch
#   communicates.
# - Whatever needs all parameters (a norm, a full checkpoint) needs all ranks.
#
# **Read on**
#
# - Rajbhandari et al. 2020, *ZeRO*: the stages (section 5) and what they send (section 7).
# - Ren et al. 2021, *ZeRO-Offload*: which part of a step runs on the CPU.
# - Xu et al. 2020, *Automatic Cross-Replica Sharding of Weight Update*: stage 1 in a compiler.
