# %% [markdown]
# # 06 DDP: buckets and overlap
#
# In lesson 05, the ranks all-reduced the gradients after backward, and nobody computed meanwhile.
# But the gradients of the last layers are complete long before backward ends. **How much of the
# communication can run during backward, and how large should a message be?** In this lesson you
# build the core of PyTorch's `DistributedDataParallel` (DDP).
#
# *After this lesson you can*
#
# - overlap the all-reduce of gradients with backward, in buckets, with hooks;
# - predict the time of a step, and derive the best number of buckets;
# - use `no_sync`, handle unused parameters, and say why a rank hangs;
# - compress gradients (bf16, top-k, PowerSGD) and say what that costs.
#
# **Prerequisites:** lessons 04 and 05. **Time:** about 85 minutes to read and run, 95 for the
# exercises (1 to 3 and 6 are core, 4 and 5 go further).
#
# | symbol | in code | meaning |
# |---|---|---|
# | $p$ | `p` | ranks, each with the whole model |
# | $n$ | `n` | bytes of all gradients |
# | $k$ | `k` | number of buckets (one message each) |
# | $F$, $B$ | `forward_s`, `backward_s` | seconds of forward and backward |
# | $c$ | | seconds of one bucket's all-reduce |
# | $\alpha$, $\beta$ | `link` | latency (s), bandwidth (bytes/s; in papers often its inverse) |

# %%
# %load_ext course_lib.ranks
import time
from contextlib import nullcontext
from statistics import median

import torch
import torch.distributed as dist
from torch import nn

from course_lib.checks import check
from course_lib.core import COMMUNICATION_KINDS, COMPUTE_KINDS, MODELS, Link
from course_lib.cost import bandwidth, network, packing
from course_lib.ddp import DDP, lab, pictures
from course_lib.ddp.cost import best_bucket_bytes, best_num_buckets, step_s
from course_lib.display import claim, predict, reveal, show, waiting
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from course_lib.ranks import RankError, Ranks, record

# %% [markdown]
# ## 1 When is a gradient ready?
#
# To send a gradient during backward, we have to know when it is complete. Backward goes from the
# last layer to the first, and PyTorch can tell us: after
# `param.register_post_accumulate_grad_hook(f)`, it calls `f(param)` (with the *parameter*) as soon
# as the gradient of this parameter is complete.
#
# In our GPT the embedding and the output layer use the same matrix (they are *tied*). One is the
# first layer, the other the last. When is the gradient of this matrix ready?

# %% tags=["predict"]
guess_ready = predict("the gradient of the tied embedding is ready", choices=("first", "last"))
### GUESS guess_ready.commit("first")


# %%
def ready_order(model, loss):
    names, order = {param: name for name, param in model.named_parameters()}, []
    for param in names:
        param.register_post_accumulate_grad_hook(lambda param: order.append(names[param]))
    loss.backward()
    return list(names.values()), order


# %% tags=["picture"]
torch.manual_seed(0)
gpt, batch = GPT(MODELS["tiny"]), next_tokens(token_batch(0, batch=4, seq=16, vocab=256))
registered, ready = ready_order(gpt, token_loss(gpt(batch[0]), batch[1]))
reveal(guess_ready, "last" if ready[-1] == "embedding.weight" else "first")
show(*pictures.ready_order(registered, ready))

# %% [markdown]
# A matrix that is used twice has *one* gradient, the sum of two terms. It is complete when both
# uses have contributed, and the embedding contributes last. For the other gradients, the *reverse
# order* of `parameters()` is a good guess. The true order depends on the forward pass.
#
# **Most gradients are ready long before backward ends, roughly in reverse order of
# `parameters()`.**
#
# ## 2 Buckets
#
# Now we know when to send, but not how much at a time. With one message per parameter, every
# parameter pays the latency. A single message for all gradients pays it once, but cannot be sent
# before backward ends. DDP takes the middle way and sends gradients in **buckets** (in PyTorch, 25
# MiB by default). No gradient is split: in the course's code, a gradient that is larger than a
# bucket is sent alone. The next cell fills buckets with the gradients of GPT-2 in float32.

# %%
with torch.device("meta"):  # shapes without memory
    gpt2 = GPT(MODELS["gpt2"])
sizes, MIB = [param.numel() * 4 for param in gpt2.parameters()], 2**20
print(f"{sum(sizes) / MIB:.0f} MiB, of which the embedding {sizes[0] / MIB:.0f} MiB")
buckets = packing.fill_buckets(sizes[::-1], 25 * MIB)
params = list(gpt2.parameters())[::-1]
theirs, _ = dist._compute_bucket_assignment_by_size(params, [MIB, 25 * MIB])  # PyTorch's defaults
for name, found in (("this course", buckets), ("PyTorch", theirs)):
    found_mib = [sum(sizes[::-1][i] for i in bucket) / MIB for bucket in found]
    print(f"{name:11} {len(found)} buckets (MiB):", *(f"{mib:.0f}" for mib in found_mib))


# %% [markdown]
# PyTorch (2.13, `distributed.py` and `reducer.cpp`) differs in two ways. By default, its *first*
# bucket has a limit of 1 MiB, so that communication starts early. And it closes a bucket once the
# size *reaches* the limit; the course's code closes it before the limit is exceeded. In both, the
# last bucket contains the embedding. When it is full, no computation is left to hide its
# all-reduce.
#
# ### Exercise 1 (core): which bucket?
#
# *Difficulty 2 of 5, importance 4 of 5, about 15 minutes.*
#
# All messages of DDP follow this list. Return the buckets in the order in which they fill up: go
# from the last parameter to the first, and put as many into each bucket as fit into `bucket_bytes`.
# Example: with parameters of 4, 4, 8 and 20 bytes and a limit of 12, the buckets have 20, 8 + 4,
# and 4 bytes. Frozen parameters get no gradient; a tied parameter has a single one. About 8 lines.
#
# <details><summary>Hint: a tied weight appears twice</summary>
# <code>module.parameters()</code> lists every parameter once, even if it has several names.
# </details>
# <details><summary>Hint: over the limit, or an empty bucket</summary>
# If the bucket would exceed the limit, open a new one. An empty bucket takes any parameter.
# </details>


# %% tags=["exercise"] exercise="ddp-1"
def assign_buckets(module, bucket_bytes):
    """A list of buckets, each a list of parameters, in the order in which they will be sent."""
    buckets, filled = [], 0
    ### BEGIN SOLUTION: which parameter comes first, and does it still fit?
    for param in reversed([param for param in module.parameters() if param.requires_grad]):
        num_bytes = param.numel() * param.element_size()
        if not buckets or filled + num_bytes > bucket_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(param)
        filled += num_bytes
    ### END SOLUTION
    return buckets


# %% tags=["check"] exercise="ddp-1"
check("ddp-1", assign_buckets)

# %% [markdown]
# **Small buckets pay many latencies; large buckets are sent late.**
#
# ## 3 Send now, wait later
#
# A full bucket should be sent while backward goes on. So the call that sends it must not wait for
# the result: `dist.all_reduce(x, async_op=True)` starts the sum and returns a handle at once. With
# gloo, the `wait()` of this handle blocks until `x` holds the sum. With NCCL, by default only the
# current CUDA stream waits, and the CPU goes on.
#
# What happens if `wait()` is forgotten? Rank $r$ contributes $10^r$, and rank 0 divides `x` by
# four. Rank 3 is late. Is the mean on rank 0 right?

# %% tags=["predict"]
guess_wait = predict("is the mean right on rank 0 without wait()?", choices=("yes", "no"))
### GUESS guess_wait.commit("yes")


# %% tags=["failure"]
def mean_of_four(rank, wait):
    x = torch.tensor([10.0**rank])
    time.sleep(0.1 if rank == 3 else 0)
    work = dist.all_reduce(x, async_op=True)
    if wait:
        work.wait()
    return x.item() / dist.get_world_size()


ranks = Ranks(4)
right, wrong = (ranks.run(mean_of_four, wait) for wait in (True, False))
print(f"rank 0 with wait(): {right[0]}, without: {wrong[0]}")
reveal(guess_wait, "yes" if wrong[0] == right[0] else "no")

# %% [markdown]
# Rank 0 divided its own number by four, before the sum had arrived. No error was raised: training
# would go on with wrong gradients.
#
# ### Exercise 2 (core): hook and finish
#
# *Difficulty 5 of 5, importance 5 of 5, about 25 minutes.*
#
# This is the core of DDP, in about 15 lines. In `on_grad`, send a bucket when *all* its gradients
# are complete, but never bucket $i$ before bucket $i-1$: the ready order may differ between ranks.
# In `finish`, wait, and leave the mean in every `param.grad`. `ready` is for parameters with a
# complete gradient, `in_flight` for sent buckets. Example: gradients 1 and 3 on two ranks become 2.
# Budget: one all-reduce per bucket, in the dtype of its gradients.
#
# <details><summary>Hint: the ranks make different calls</summary>
# Send bucket <code>self.next</code>, not the bucket of this <code>param</code>; repeat while the
# next bucket is full.
# </details>
# <details><summary>Hint: the truth value of a tensor is ambiguous</summary>
# <code>param in bucket</code> compares values. A set compares identities:
# <code>self.ready.issuperset(bucket)</code>.
# </details>
# <details><summary>Hint: the second step is wrong</summary>
# At the end of <code>finish</code>, reset every attribute to its value in <code>__init__</code>.
# </details>
# <details><summary>Hint: from one flat tensor back to gradients</summary>
# <code>flat.split([param.numel() for param in bucket])</code>, then <code>view_as(param)</code>.
# Write into <code>param.grad</code> itself: if it is transposed in memory, its
# <code>flatten()</code> is a copy.
# </details>


# %% tags=["exercise"] exercise="ddp-2"
class Overlapped:
    """Data parallelism for a module: buckets leave during backward; finish() comes after it."""

    def __init__(self, module, buckets):
        self.buckets, self.next = buckets, 0  # next: number of the bucket that leaves next
        self.ready, self.in_flight = set(), []
        for param in [param for bucket in buckets for param in bucket]:
            param.register_post_accumulate_grad_hook(self.on_grad)

    def on_grad(self, param):
        """param.grad is complete: send what is full, in the order of the buckets."""
        ### BEGIN SOLUTION: remember it; while the next bucket is full, send it
        self.ready.add(param)
        while self.next < len(self.buckets) and self.ready.issuperset(self.buckets[self.next]):
            flat = torch.cat([param.grad.flatten() for param in self.buckets[self.next]])
            self.in_flight.append((dist.all_reduce(flat, async_op=True), flat))
            self.next += 1
        ### END SOLUTION

    def finish(self):
        """Wait for what is in flight; leave the mean over all ranks in every param.grad."""
        ### BEGIN SOLUTION: wait, divide, copy back, and clear for the next step
        for bucket, (work, flat) in zip(self.buckets, self.in_flight, strict=True):
            work.wait()
            parts = (flat / dist.get_world_size()).split([param.numel() for param in bucket])
            for param, part in zip(bucket, parts, strict=True):
                param.grad.copy_(part.view_as(param))
        self.ready.clear()
        self.in_flight.clear()
        self.next = 0
        ### END SOLUTION


# %% tags=["check"] exercise="ddp-2"
check("ddp-2", Overlapped)

# %% [markdown]
# From here on we use the course's `DDP`, which does the same: call `backward()`, `model.finish()`,
# then `step()`. At the start it also copies rank 0's weights to all ranks. Does it compute the same
# as one process?


# %% tags=["check"]
def train(rank, p):
    torch.manual_seed(rank)  # other weights on each rank: DDP has to make them equal
    model = DDP(GPT(MODELS["tiny"]).double(), bucket_bytes=2**16)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for n in range(3):
        inputs, targets = next_tokens(token_batch(n, batch=8, seq=16, vocab=256)[rank::p])
        sgd.zero_grad()
        token_loss(model(inputs), targets).backward()
        model.finish()
        sgd.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


alone, together = Ranks(1).run(train, 1)[0], ranks.run(train, 4)
print("all ranks bit-equal:", all(torch.equal(together[0], other) for other in together))
print("as one process, within 1e-12:", bool((together[0] - alone).abs().max() < 1e-12))

# %% [markdown]
# **Start all-reduces in the hook, in the same order on all ranks, and wait after backward.**
#
# ## 4 Overlap on a clock
#
# The numbers are right. Is a step also faster? On a GPU, NCCL's kernels run at the same time as
# those of backward, on their own CUDA stream. (Both use the GPU's SMs; our formulas ignore this.)
# On a laptop, the same CPU cores would have to do both. So the layers are *emulated*, like the
# link: the gradients are real, but a layer sleeps instead of computing.

# %% tags=["measured"]
from course_lib.models import emulated_loss, emulated_model

fast, slow = (Link(name="Ethernet", latency_s=2e-3, bytes_per_s=x) for x in (80e6, 20e6))
links = {"80 MB/s": fast, "20 MB/s": slow}
pairs = {name: Ranks(2, link=link) for name, link in links.items()}
num_layers, layer_bytes = 24, 2**17


def build():
    return emulated_model(num_layers, layer_bytes, forward_s=1.5e-3, backward_s=3e-3)


cost = lab.measure_cost(pairs["80 MB/s"], build, emulated_loss)  # computing only, nothing is sent
n, k = num_layers * layer_bytes, 6
wire_s = k * network.ring_all_reduce_s(n / k, 2, fast)
print(f"compute {cost.compute_s * 1e3:.0f} ms, then {k} messages {wire_s * 1e3:.0f} ms")

# %% [markdown]
# Without overlap, a step takes the sum of these two times. How long is it if each bucket is sent as
# soon as it is full? The next cell computes it by the formula of exercise 3, and measures it.

# %% tags=["picture", "measured"]
runs = {late: {"bucket_bytes": n / k, "overlap": not late} for late in (True, False)}
late, early = lab.measure_steps(pairs["80 MB/s"], build, emulated_loss, runs).values()
print(f"with overlap, by formula: {step_s(cost, n / k, 2, fast) * 1e3:.0f} ms")
claim("overlap makes the step faster", early.least_s < 0.9 * late.least_s)
show(*pictures.overlap_on_the_clock(cost, n / k, fast, late, early))

# %% [markdown]
# In the prediction, only the last all-reduce is *exposed*, that is, not hidden behind computation:
# when its bucket is full, nothing is left to compute.
#
# ### Exercise 3 (core): the time of a step
#
# *Difficulty 2 of 5, importance 5 of 5, about 15 minutes.*
#
# This formula decides how large a bucket should be. You get the seconds of forward, and of each
# bucket's backward and all-reduce. The link sends one bucket after another. When does the last
# all-reduce end? Follow two times: when a bucket is *ready*, and when the link is *free*. Example:
# with 1 s of forward, 2 and 2 s of backward, and 3 and 1 s of all-reduce, the step takes 7 s. About
# 4 lines.
#
# <details><summary>Hint: which clock counts?</summary>
# A bucket's all-reduce starts when the bucket is ready *and* the previous bucket has been reduced.
# </details>


# %% tags=["exercise"] exercise="ddp-3"
def overlapped_step_s(forward_s, backward_s, all_reduce_s):
    """Seconds of a step; backward_s and all_reduce_s are lists, one number per bucket."""
    ready_s = done_s = forward_s
    ### BEGIN SOLUTION: move both clocks on, bucket by bucket
    for compute_s, wire_s in zip(backward_s, all_reduce_s, strict=True):
        ready_s += compute_s
        done_s = max(ready_s, done_s) + wire_s
    ### END SOLUTION
    return done_s


# %% tags=["check"] exercise="ddp-3"
check("ddp-3", overlapped_step_s)

# %% [markdown]
# **By formula, only communication after backward makes the step longer: the last all-reduce, and
# those that queue before it.**
#
# ## 5 How many buckets?
#
# The last all-reduce is shorter if its bucket is smaller. Then why not use very many buckets? Take
# $k$ buckets with equal bytes and equal backward time. Each ring all-reduce takes
# $c = 2(p-1)(\alpha + \frac{n}{kp\beta})$, which on two ranks is $2\alpha + \frac{n}{k\beta}$. By
# exercise 3 the step takes $F + \frac{B}{k} + (k-1)\max(\frac{B}{k}, c) + c$: the first bucket has
# to fill, then the slower of computing and sending sets the pace, and the last all-reduce is
# exposed.
#
# A single bucket hides nothing; 24 buckets, one per layer, pay $48\alpha$. The next cells try all
# divisors of 24 as $k$, at 80 MB/s and at 20 MB/s. At 20 MB/s the bytes alone take longer than
# backward. Which $k$ is best there?

# %% tags=["predict"]
guess_slow = predict("best number of buckets at 20 MB/s by formula, a divisor of 24")
### GUESS guess_slow.commit(12)

# %% tags=["measured"]
numbers = [1, 2, 3, 4, 6, 8, 12, 24]
sizes = [n // k for k in numbers]
swept = lab.measure_sweeps(pairs, build, emulated_loss, sizes, turns=3)

# %% tags=["picture", "measured"]
for name, link in links.items():
    best = n // best_bucket_bytes(cost, 2, link, sizes)
    print(f"{name}: best {best} by formula; unrounded {best_num_buckets(cost, 2, link):.1f}")
    best_s, *ends_s = (swept[name][n // k].least_s for k in (best, 1, 24))
    claim(f"{name}: one bucket and 24 are both slower", best_s < min(ends_s))
reveal(guess_slow, best)
show(*pictures.sweep(cost, links, numbers, swept))

# %% tags=["picture", "measured"]
from course_lib.ddp.explorer import bucket_explorer

bucket_explorer(cost, links, swept)

# %% [markdown]
# The best number $k^*$ follows from two cases (on two ranks):
#
# - **The network keeps up**, $c \le \frac{B}{k}$. Each bucket is reduced before the next is full,
#   and only the last all-reduce is exposed: the step takes $F + B + c$, with
#   $c = 2\alpha + \frac{n}{k\beta}$. More buckets make $c$ smaller and the step shorter, up to the
#   limit $c = \frac{B}{k}$. Solved for $k$, this gives $k_1 = \frac{B - n/\beta}{2\alpha}$.
# - **Buckets queue up**, $c \ge \frac{B}{k}$. From the first full bucket on, the link is busy: the
#   step takes $F + \frac{B}{k} + kc = F + \frac{B}{k} + 2\alpha k + \frac{n}{\beta}$. More buckets
#   start earlier, but pay more latencies. The derivative by $k$, $-\frac{B}{k^2} + 2\alpha$, is
#   zero at $k_2 = \sqrt{B / (2\alpha)}$, for any bandwidth.
#
# The second case begins at $k_1$ buckets. If $k_2 \le k_1$, the step becomes longer beyond $k_1$,
# and $k_1$ is best. If $k_2 > k_1$ (for example, if $n/\beta$ exceeds $B$), the step becomes
# shorter until $k_2$. So $k^* = \max(k_1, k_2)$, rounded up or down, and at least 1. (On $p$ ranks,
# replace $2\alpha$ by $2(p-1)\alpha$, and $\frac{n}{\beta}$ by $\frac{2(p-1)}{p} \frac{n}{\beta}$.)
#
# So a network that keeps up can want *more* buckets than a slow one. The slow one is always busy
# once it has started, and every further bucket adds a latency.
#
# **By formula, use as many buckets as the network keeps up with, but at least about
# $\sqrt{B / (2(p-1)\alpha)}$ (on a ring). The higher the latency, the larger the best bucket.**
#
# *A place for a break.*
#
# ## 6 Accumulate without communication
#
# So far each backward is followed by an optimizer step. With accumulation (lesson 02), gradients of
# several micro-batches add up on each rank first. All-reducing after each of them would send the
# same bytes several times, although one all-reduce per bucket at the end is enough. Inside
# `with model.no_sync():` backward only accumulates. Run the forward inside `no_sync()`, too:
# otherwise the course's DDP sends the buffers (such as running means), and PyTorch's DDP sends the
# gradients.


# %%
def sizes_sent(rank, forget):
    model = DDP(GPT(MODELS["tiny"]), bucket_bytes=2**16)
    inputs, targets = next_tokens(token_batch(rank, batch=1, seq=16, vocab=256))
    with record() as log:
        for n in range(4):
            with model.no_sync() if n < 3 and not forget else nullcontext():
                (token_loss(model(inputs), targets) / 4).backward()
            if n == 3 or forget:
                model.finish()
    return [event.num_bytes for event in log.events if event.kind == "all_reduce"]


often, once = (ranks.run(sizes_sent, forget)[0] for forget in (True, False))
print(f"{len(often)} messages, in all {sum(often)} bytes; no_sync {len(once)}, {sum(once)} bytes")

# %% [markdown]
# ### Exercise 4 (further): send once
#
# *Difficulty 3 of 5, importance 3 of 5, about 15 minutes.*
#
# With this function a large batch fits into memory and costs the communication of a small one.
# Leave in every `param.grad` (None at first) the gradient of the mean over all micro-batches *and*
# ranks. Micro-batches have equal weights. Example: two micro-batches with the gradients 1 and 3 on
# every rank give 2. Budget: each bucket is sent once, during the last backward, and only one
# autograd graph is kept at a time. About 6 lines.
#
# <details><summary>Hint: right numbers, but no overlap</summary>
# Inside <code>no_sync()</code> backward sends nothing. Run the last micro-batch outside of it.
# </details>


# %% tags=["exercise"] exercise="ddp-4"
def accumulate(model, loss_fn, micro_batches):
    """Gradients of the mean of loss_fn(model(x), y) over all (x, y) and ranks; model is a DDP."""
    ### BEGIN SOLUTION: all but the last one in no_sync; finish once
    *early, last = micro_batches
    with model.no_sync():
        for x, y in early:
            (loss_fn(model(x), y) / len(micro_batches)).backward()
    x, y = last
    (loss_fn(model(x), y) / len(micro_batches)).backward()
    model.finish()
    ### END SOLUTION


# %% tags=["check"] exercise="ddp-4"
check("ddp-4", accumulate)

# %% [markdown]
# **With accumulation, DDP needs to communicate only once per step, during the last backward.**
#
# ## 7 A gradient that is never computed
#
# A bucket is sent when all its gradients are complete. But some may never come: in a mixture of
# experts, a step's loss can be independent of a layer, and the hooks of this layer are then not
# called. What happens to its bucket?


# %% tags=["failure", "raises-exception"]
class Heads(nn.ModuleList):
    def forward(self, which):
        return self[which](torch.ones(2)).sum()


def use_heads(rank, which, find_unused):
    model = DDP(Heads([nn.Linear(2, 1), nn.Linear(2, 1)]), find_unused=find_unused)
    model(which[rank]).backward()
    model.finish()
    return [head.weight.grad is not None for head in model.module]


pair = Ranks(2)
pair.run(use_heads, which=[0, 0], find_unused=False)

# %% [markdown]
# The bucket would never be full, so the course's `finish` raises an error (in PyTorch, the next
# forward does). With `find_unused=True`, a missing gradient counts as zero, and one small
# all-reduce finds out which parameters at least one rank used.

# %%
for which in ([0, 1], [0, 0]):
    has = pair.run(use_heads, which, find_unused=True)[0]
    print(f"the ranks use heads {which}: on rank 0, head 0 and 1 have a gradient: {has}")


# %% [markdown]
# If at least one rank used a parameter, *all* ranks have its gradient, and take the same optimizer
# step. If no rank used it, `grad` stays `None`.
#
# **In DDP, every rank sends every bucket in every step, also with unused parameters.**
#
# ## 8 Fewer bytes
#
# Overlap hides communication, but if the network is slow, some of it stays exposed. Then it can
# help to send less. A **communication hook** sends something smaller instead of the bucket:
# `hook(flat, group)` starts the communication in a process group, and returns an object whose
# `wait()` leaves the mean in `flat`. The course's `DDP` uses this one by default:
#
# ```python
# class Mean:
#     def __init__(self, flat, group):
#         self.flat, self.p = flat, dist.get_world_size(group)
#         self.work = dist.all_reduce(flat, group=group, async_op=True)
#
#     def wait(self):
#         self.work.wait()
#         self.flat.div_(self.p)
# ```
#
# ### Exercise 5 (further): half the bytes
#
# *Difficulty 2 of 5, importance 3 of 5, about 10 minutes.*
#
# The simplest compression sends each gradient in bfloat16 instead of float32: a bucket of 25 MiB
# becomes a message of 12.5 MiB. Start it in `__init__`. In `wait`, write the mean into `flat`,
# which stays float32. Several buckets are in flight at once, each with its own object of this
# class. About 4 lines.
#
# <details><summary>Hint: flat has not changed</summary>
# <code>self.flat = ...</code> rebinds a name; <code>self.flat.copy_(...)</code> writes into the
# tensor, and converts the dtype.
# </details>


# %% tags=["exercise"] exercise="ddp-5"
class HalfTheBytes:
    """A communication hook: the mean over the group, sent in bfloat16."""

    def __init__(self, flat, group):
        self.flat, self.p = flat, dist.get_world_size(group)
        ### BEGIN SOLUTION: convert, and start
        self.small = flat.bfloat16()
        self.work = dist.all_reduce(self.small, group=group, async_op=True)
        ### END SOLUTION

    def wait(self):
        ### BEGIN SOLUTION: wait, convert back, divide
        self.work.wait()
        self.flat.copy_(self.small).div_(self.p)
        ### END SOLUTION


# %% tags=["check"] exercise="ddp-5"
check("ddp-5", HalfTheBytes)

# %% [markdown]
# Two other methods send much less:
#
# **Top-k** (Aji and Heafield 2017) sends the values of a bucket that are largest in absolute value,
# with their indices. The indices differ from rank to rank, so an all-reduce cannot add the values.
# Instead, an all-gather sends both to all ranks, and the bytes per rank grow with $p$.
#
# **PowerSGD** (Vogels et al. 2019) sends a matrix of low rank $r$ (rank as in linear algebra). It
# approximates a gradient $M$ of size $a \times b$ by $P Q^T$, with $P$ of size $a \times r$ and $Q$
# of size $b \times r$: $r(a + b)$ values instead of $ab$. One step of *power iteration* finds them:
# compute $P = M Q$, orthonormalize its columns, compute $Q = M^T P$. Three things make this work:
#
# - $MQ$ and $M^T P$ are *linear* in $M$. With the same $Q$ on all ranks $i$,
#   $\sum_i M_i Q = (\sum_i M_i)\,Q$, and likewise for $P$. So two all-reduces are enough.
# - One step of iteration can be far from the best matrix of rank $r$. But the next training step
#   starts from this $Q$ (*warm start*), so the iteration continues.
# - The part that was not sent, the *residual* $M - P Q^T$, is added to the next step's gradient
#   (**error feedback**, Seide et al. 2014). Top-k has error feedback, too.
#
# The next cell iterates on one gradient, and computes the error of the best matrix of rank 2:


# %%
def power_step(matrix, q):  # [a, b], [b, r]
    p = torch.linalg.qr(matrix @ q).Q  # [a, r]; PowerSGD first sums matrix @ q over ranks
    return p, matrix.T @ p  # [b, r]; PowerSGD sums it, too


matrix = gpt.blocks[0].attention.out.weight.grad
q, errors = torch.randn(matrix.shape[1], 2, generator=torch.Generator().manual_seed(0)), []
for _ in range(4):
    p, q = power_step(matrix, q)
    errors.append(100 * ((matrix - p @ q.T).norm() / matrix.norm()).item())
best_error = 100 * (torch.linalg.svdvals(matrix)[2:].norm() / matrix.norm()).item()
print("missing after 1, 2, 3, 4 steps:", *(f"{error:.0f} %" for error in errors))
print(f"missing in the best matrix of rank 2: {best_error:.0f} %")

# %% [markdown]
# Even the best matrix of rank 2 misses more than half of this gradient (by its norm). PowerSGD
# sends vectors (biases, norms) uncompressed. How many bytes does it send with rank 2 for 100 bytes
# of our GPT's gradients?

# %% tags=["predict"]
guess_power = predict("bytes sent by PowerSGD, per 100 bytes in float32")
### GUESS guess_power.commit(2)

# %%
from course_lib.ddp import PowerSGD, TopK, bf16_hook

hooks = {"float32": None, "bf16": bf16_hook, "top 1 %": TopK(0.01), "PowerSGD": PowerSGD(2)}
num_steps = [1, 2, 4, 8, 16, 32, 64]


def delivered(rank, hook):
    """The mean of all gradients that have been delivered so far; the same batch in every step."""
    torch.manual_seed(0)
    model, total, means = DDP(GPT(MODELS["tiny"]), comm_hook=hook), 0, []
    inputs, targets = next_tokens(token_batch(rank, batch=1, seq=16, vocab=256))
    for step in range(1, num_steps[-1] + 1):
        model.zero_grad()
        token_loss(model(inputs), targets).backward()
        model.finish()
        total = total + torch.cat([param.grad.flatten() for param in model.parameters()])
        means += [total / step] if step in num_steps else []
    return means


# %% tags=["picture"]
means, sent = {}, {}
for name, hook in hooks.items():
    means[name] = pair.run(delivered, hook)[0]
    calls = [call for call in pair.events if call.kind in ("all_reduce", "all_gather")]
    sent[name] = sum(bandwidth.bus_factor(call.kind, 2) * call.num_bytes for call in calls)
share = {name: 100 * num_bytes / sent["float32"] for name, num_bytes in sent.items()}
reveal(guess_power, share["PowerSGD"])
show(*pictures.delivered(num_steps, means, share))

# %% [markdown]
# In this experiment weights and batch are fixed, so the true gradient stays the same. The mean of
# what top-k and PowerSGD have delivered approaches it, because error feedback delivers the missing
# part later. In training, the weights change meanwhile. Top-k and PowerSGD also need memory for
# residuals, and time to compress. So they help only where communication is exposed.
#
# **Compression saves bytes but makes gradients inexact; error feedback delivers the difference
# later.**
#
# ## 9 The real thing
#
# Does PyTorch do what we have built? Its DDP does it in C++, and needs no `finish()`. We run both
# with buckets of 2 MiB.

# %% tags=["measured"]
from course_lib.ddp.beside_frameworks import backward_in_turns

(ours, theirs), seen = pair.run(backward_in_turns, MODELS["small"])[0]
print("gradients bit-equal:", all(map(torch.equal, ours, theirs)))
for name, steps in zip(("this course", "PyTorch"), seen, strict=True):
    calls = [[e.num_bytes for e in step if e.kind == "all_reduce"] for step in steps]
    took_ms = 1e3 * median(e.duration_s for s in steps[2:] for e in s if e.kind == "compute")
    counts = f"messages in the first step {len(calls[0])}, then {len(calls[-1])}"
    print(f"{name:11} {counts}; {sum(calls[-1])} bytes, {took_ms:.0f} ms a step")


# %% [markdown]
# The gradients are equal bit for bit, because the order of two terms does not change their sum, and
# dividing by 2 is exact. PyTorch closes a bucket later (section 2), so it sends fewer messages. By
# default, it has a single bucket in its first step, then rebuilds its buckets in ready order.
#
# On a real cluster, how do you see what is exposed? A *trace* of a job (JSON for
# https://ui.perfetto.dev) comes from PyTorch's profiler or from `course trace`. In the course's
# traces, each box has a kind `cat`, a start `ts` and a duration `dur` (in µs), and the rank as
# `pid`.
#
# ### Exercise 6 (core): what does the trace say?
#
# *Difficulty 4 of 5, importance 4 of 5, about 15 minutes.*
#
# Exposed communication is what buckets, overlap or compression could still save. Return the seconds
# in which one rank communicates (`COMMUNICATION_KINDS`) and does not compute (`COMPUTE_KINDS`).
# Boxes overlap, and one can lie inside another: a `wait` inside a `backward` is not computing.
# Example: if a `backward` takes the µs 0 to 10 and an `all_reduce` 6 to 14, 4 µs are exposed. About
# 6 lines.
#
# <details><summary>Hint: where to cut</summary>
# Sort all starts and ends. Between two neighbors nothing changes.
# </details>

# %% tags=["exercise"] exercise="ddp-6"
from itertools import pairwise


def exposed_in(trace, pid):
    """Seconds in which a rank has a transfer under way, and does not compute."""
    parts = trace["traceEvents"]
    boxes = [part for part in parts if part["ph"] == "X" and part["pid"] == pid]
    edges = sorted({time for box in boxes for time in (box["ts"], box["ts"] + box["dur"])})
    exposed = 0.0
    ### BEGIN SOLUTION: between two edges, which kinds are under way?
    for start, end in pairwise(edges):
        around = [box for box in boxes if box["ts"] <= start and end <= box["ts"] + box["dur"]]
        kinds = {box["cat"] for box in around}
        computes = kinds & set(COMPUTE_KINDS) and "wait" not in kinds
        if kinds & set(COMMUNICATION_KINDS) and not computes:
            exposed += end - start
    ### END SOLUTION
    return exposed / 1e6


# %% tags=["check"] exercise="ddp-6"
check("ddp-6", exposed_in)

# %% [markdown]
# ## 10 One batch more
#
# All ranks have made the same calls so far. **Break it:** four ranks train, but the data was not
# divided evenly. Rank 2 has four batches, the others have three. Which rank hangs?

# %% tags=["predict"]
guess_hang = predict("which rank hangs?", choices=("rank 2", "the others", "nobody"))
### GUESS guess_hang.commit("the others")


# %% tags=["failure", "raises-exception"]
def one_more(rank):
    model = DDP(nn.Linear(2, 1))
    for _ in range(4 if rank == 2 else 3):
        model(torch.ones(2)).sum().backward()
        model.finish()


try:
    ranks.run(one_more)
except RankError as hang:
    reveal(guess_hang, "rank 2" if [wait.rank for wait in hang.waits] == [2] else "the others")
    show(waiting(hang.waits, 4), alt="rank 2 waits for the other ranks, which have returned")
    raise


# %% [markdown]
# Rank 2 waits in `finish()` for the others, which have no batch left; the report shows where its
# call began. No single call is wrong. So all ranks must take the *same number of steps*: the
# sampler of lesson 05 repeats items, or a rank without data takes part with a loss of weight 0.
#
# **Every rank takes part in every step, with every bucket, in the same order.**
#
# ## What to keep
#
# - Send gradients in the hook, when they are ready; wait in `finish`.
# - By formula, use as many buckets as the network keeps up with, or $\sqrt{B / (2(p-1)\alpha)}$ if
#   that is more.
# - If you compress, count the bytes, and check the gradient.
#
# ## Read on
#
# - Li et al. 2020, *PyTorch Distributed*: the design of DDP, and a sweep of bucket sizes.
# - Sergeev and Del Balso 2018, *Horovod*: ring all-reduce, fusion of small messages.
# - Vogels et al. 2019, *PowerSGD*: low-rank compression.
# - Aji and Heafield 2017, *Sparse Communication for Distributed Gradient Descent*: top-k.
# - Stich et al. 2018, *Sparsified SGD with Memory*: why error feedback converges.
# - Seide et al. 2014, *1-Bit Stochastic Gradient Descent*: early error feedback.
