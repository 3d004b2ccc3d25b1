# %% [markdown]
# # 06 DDP: buckets and overlap
#
# Data parallelism ends every step with a conversation: all ranks add up their gradients. While they
# talk, nobody computes. But the last layer's gradient is complete when backward has hardly begun:
# why not send it *now*? Here you build what PyTorch's `DistributedDataParallel` does. As always:
# **predict**, **run**, **compare**.
#
# | symbol | in code | meaning |
# |---|---|---|
# | $p$ | `p` | ranks, each with the whole model |
# | $n$ | `n` | bytes of all gradients |
# | $k$ | `k` | buckets: messages in one step |
# | $F$, $B$ | `forward_s`, `backward_s` | seconds of forward and backward |
# | $\alpha$, $\beta$ | `link` | latency, bytes a second (lesson 04) |

# %%
# %load_ext course_lib.ranks
import time
from contextlib import nullcontext
from copy import deepcopy
from statistics import median

import torch
import torch.distributed as dist
from torch import nn

from course_lib.checks import check
from course_lib.core import MODELS, Link
from course_lib.cost import bandwidth, network, packing
from course_lib.ddp.cost import best_bucket_bytes, ddp_step, exposed_s, on_the_wire, step_s
from course_lib.display import Voices, compare, explore, predict, reveal, show, timelines, waiting
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from course_lib.ranks import RankError, Ranks, record, span

# %% [markdown]
# ## 1 When is a gradient ready?
#
# Backward goes from the last layer to the first. PyTorch tells when a parameter's gradient is
# complete: `param.register_post_accumulate_grad_hook(f)` calls `f(param)` (with the *parameter*).
#
# In our GPT the output layer *is* the embedding: one matrix, used by the first and the last layer.
# When is its gradient ready?

# %% tags=["predict"]
guess_ready = predict("the gradient of the tied embedding is ready", choices=("first", "last"))


# %%
def ready_order(model, loss):
    names, order = {param: name for name, param in model.named_parameters()}, []
    for param in names:
        param.register_post_accumulate_grad_hook(lambda param: order.append(names[param]))
    loss.backward()
    return list(names.values()), order


gpt, batch = GPT(MODELS["tiny"]), next_tokens(token_batch(0, batch=4, seq=16, vocab=256))
registered, ready = ready_order(gpt, token_loss(gpt(batch[0]), batch[1]))
for when, names in {"registered": registered, "ready": ready}.items():
    print(f"{when:10}", ", ".join(names[:3]), "...", ", ".join(names[-2:]))
reveal(guess_ready, "last" if ready[-1] == "embedding.weight" else "first")

# %% tags=["picture"]
last, places = len(ready) - 1, [ready.index(name) for name in registered]
moved = sum(place != last - i for i, place in enumerate(places))
voices = Voices(formula=lambda i: last - i, measurement=places)
title = f"Last registered, first ready: {moved} of {len(ready)} parameters are out of line"
axes = {"x_label": "place in the order of registration", "y_label": "place in the ready order"}
show(compare(range(len(ready)), voices, title, **axes), alt=f"{title}; the rest falls on a line")

# %% [markdown]
# A matrix that is used twice has *one* gradient, and it is complete when both uses are in. Around
# it, *reverse registration* is a good guess, not a law: the order depends on what forward did.
#
# **A gradient is ready long before backward ends; the last registered one comes first.**
#
# ## 2 Buckets
#
# A message a parameter pays the latency each time; one message for all cannot leave before the end.
# So gradients travel in **buckets**; PyTorch fills up to 25 MiB. How many are that for GPT-2, in
# float32? Nothing is cut: what is larger than a bucket travels alone.

# %% tags=["predict"]
with torch.device("meta"):  # shapes without memory
    gpt2 = GPT(MODELS["gpt2"])
sizes = [param.numel() * 4 for param in gpt2.parameters()]
print(f"{sum(sizes) / 2**20:.0f} MiB, of which the embedding {sizes[0] / 2**20:.0f} MiB")
guess_messages = predict("messages for GPT-2, in buckets of 25 MiB")

# %%
buckets = packing.fill_buckets(sizes[::-1], 25 * 2**20)
reveal(guess_messages, len(buckets))

# %% [markdown]
# The last one is the embedding, alone, and nothing is left to hide it behind.
#
# ### Exercise 1: which bucket?
#
# In the order in which they will be full: from the last parameter to the first, as many as fit into
# `bucket_bytes`. Frozen parameters never get a gradient; tied ones get one. About 8 lines.
#
# <details><summary>Hint: a tied weight comes twice</summary>
# <code>module.parameters()</code> gives every parameter once, however many names it has.
# </details>
# <details><summary>Hint: over the limit, or an empty bucket</summary>
# Before you add a parameter, ask: would it go over? Then open a new bucket; but an empty bucket
# takes anything.
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
# **A bucket is a compromise between many latencies and one late message.**
#
# ## 3 Send now, wait later
#
# `dist.all_reduce(x, async_op=True)` starts, and returns a handle at once; `wait()` ends it. Called
# in a hook, that is all of overlap. Rank $r$ brings $10^r$: `wait()` gives the mean of four. Is it
# right on rank 0, too, if nobody waits and the last rank is late?

# %% tags=["predict"]
guess_wait = predict("is the mean right on rank 0 without wait()?", choices=("yes", "no"))


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
# Rank 0 divided its own number by four; nothing failed, and a loss would even fall.
#
# ### Exercise 2: hook and finish
#
# Now with buckets. In `on_grad`, send a bucket when *all* its gradients are there, but never bucket
# $i$ before bucket $i-1$: another rank may have another ready order. In `finish`, wait, and
# leave the mean in every `param.grad`. `ready` is for parameters whose gradient is there,
# `in_flight` for what was sent. Budget: one all_reduce a bucket, in the dtype of its gradients.
# Other models may be in the process; gradients may lie transposed, and be zeros on a rank. inf and
# nan stay what they are. About 15 lines, 20 minutes.
#
# <details><summary>Hint: the ranks make different calls</summary>
# Do not send the bucket of this <code>param</code>, but bucket <code>self.next</code>, and go on
# while that one is full.
# </details>
# <details><summary>Hint: the truth value of a tensor is ambiguous</summary>
# <code>param in bucket</code> compares numbers. A set asks for the same object:
# <code>self.ready.issuperset(bucket)</code>.
# </details>
# <details><summary>Hint: the second step is wrong</summary>
# At the end of <code>finish</code> everything has to be as in <code>__init__</code>.
# </details>
# <details><summary>Hint: from one flat tensor back to gradients</summary>
# <code>flat.split([param.numel() for param in bucket])</code>, then <code>view_as(param)</code>.
# Write into <code>param.grad</code> itself: if it lies transposed, its <code>flatten()</code> is a
# copy.
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
# From here on the course's `DDP` does it: `backward()`, then `model.finish()`, then `step()`. It
# also makes the ranks' weights equal at the start. Does it compute what one process would?


# %%
from course_lib.ddp import DDP, lab


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


# %% tags=["check"]
alone, together = Ranks(1).run(train, 1)[0], ranks.run(train, 4)
print("all ranks bit-equal:", all(torch.equal(together[0], other) for other in together))
print("as one process, within 1e-12:", bool((together[0] - alone).abs().max() < 1e-12))

# %% [markdown]
# **Start in the hook, wait after backward, in one order on all ranks.**
#
# ## 4 Overlap on a clock
#
# Your cores compute *and* carry messages; beside a GPU these are two machines. So here the layers
# are *emulated*, like the wire: real gradients, but their compute time is slept.

# %%
from course_lib.models import emulated_loss, emulated_model

wire = Link(name="slow Ethernet", latency_s=2e-3, bytes_per_s=60e6)
slow, num_layers, layer_bytes = Ranks(2, link=wire), 12, 2**18


def build():
    return emulated_model(num_layers, layer_bytes, forward_s=3e-3, backward_s=6e-3)


cost = lab.measure_cost(slow, build, emulated_loss)  # both ranks compute, nobody talks
n, k = num_layers * layer_bytes, 6
wire_s = k * network.ring_all_reduce_s(n / k, 2, wire)
print(f"compute {cost.compute_s * 1e3:.0f} ms, then {k} messages {wire_s * 1e3:.0f} ms")

# %% [markdown]
# How long is a step if each bucket leaves as soon as it is full?

# %% tags=["predict"]
guess_step = predict("a step with overlap, in 6 buckets, on paper", unit="ms")

# %% tags=["picture"]
runs = {late: {"bucket_bytes": n / k, "overlap": not late} for late in (True, False)}
late, early = lab.measure_steps(slow, build, emulated_loss, runs, turns=5).values()
reveal(guess_step, step_s(cost, n / k, 2, wire) * 1e3)
rows = {
    "measured, all sent after backward": on_the_wire(late.events),
    "predicted, with overlap": ddp_step(cost, n / k, 2, wire),
    "measured, with overlap": on_the_wire(early.events),
}
title = f"Overlap: {early.step_s * 1e3:.0f} ms in place of {late.step_s * 1e3:.0f} ms"
show(timelines(rows, title, link=wire), alt=f"{title}; the first bucket leaves early in backward")

# %% [markdown]
# What shows in the end is the last bucket: its gradients come when nothing is left to compute.
#
# ### Exercise 3: the price of a step
#
# Two clocks: when is a bucket *ready*, and when is the wire *free*? Given are the seconds of
# forward, of backward bucket by bucket, and of each all-reduce. About 4 lines.
#
# <details><summary>Hint: which clock counts?</summary>
# A bucket starts when both are there: it is ready, and the one before it has arrived.
# </details>


# %% tags=["exercise"] exercise="ddp-3"
def overlapped_step_s(forward_s, backward_s, all_reduce_s):
    """Seconds of a step; backward_s and all_reduce_s are lists, one number a bucket."""
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
# **Only what is on the wire after backward costs time: the last bucket, and the queue before it.**
#
# ## 5 How large a bucket?
#
# With $k$ equal buckets and $c = 2(p-1)(\alpha + \frac{n}{kp\beta})$ for each, the two clocks give
# $F + \frac{B}{k} + (k-1)\max(\frac{B}{k}, c) + c$. At one end a single bucket hides nothing; at
# the other, a bucket a layer pays the latencies of twelve all-reduces. Where is the best one?

# %% tags=["predict"]
guess_best = predict("best bucket size", unit="KiB")


# %%
def formula_s(bucket_bytes):
    k, c = n / bucket_bytes, network.ring_all_reduce_s(bucket_bytes, 2, wire)
    return cost.forward_s + cost.backward_s / k + (k - 1) * max(cost.backward_s / k, c) + c


sizes = [n // k for k in (12, 6, 4, 3, 2, 1)]
swept = lab.measure_sweep(slow, build, emulated_loss, sizes, turns=5)

# %% tags=["picture"]
best = best_bucket_bytes(cost, 2, wire, sizes)
reveal(guess_best, best / 2**10)
voices = Voices(
    formula=lambda kib: formula_s(kib * 2**10) * 1e3,
    simulation=[step_s(cost, size, 2, wire) * 1e3 for size in sizes],
    measurement=[[second * 1e3 for second in swept[size].seconds] for size in sizes],
)
title = f"The best of {n // 2**20} MiB: {n // best} buckets of {best // 2**10} KiB"
axes = {"x_label": "bucket (KiB)", "y_label": "step (ms)", "note": f"emulated {wire} and layers"}
figure = compare([size / 2**10 for size in sizes], voices, title, **axes)
off = max(abs(swept[size].step_s / step_s(cost, size, 2, wire) - 1) for size in sizes)
show(figure, alt=f"{title}; both ends are slower; measured within {100 * off:.0f} % of the model")
print("wire keeps up, k =", round((cost.backward_s - n / wire.bytes_per_s) / 2 / wire.latency_s, 1))


# %% tags=["picture"]
def finding(num_buckets):
    shown_s = exposed_s(cost, n / num_buckets, 2, wire)
    return f"k = {num_buckets}: {shown_s * 1e3:.0f} ms of talking do not hide"


def one_size(num_buckets):
    both = {"predicted": ddp_step(cost, n / num_buckets, 2, wire)}
    both["measured"] = on_the_wire(swept[n // num_buckets].events)
    return timelines(both, finding(num_buckets), link=wire)


explore(one_size, finding, num_buckets=([1, 2, 3, 4, 6, 12], 6))

# %% [markdown]
# As long as the wire keeps up ($c \le \frac{B}{k}$), smaller is better: only the last bucket shows.
# Below that, latencies queue up. The best bucket is the one at which *the wire just keeps up*:
# $k = \frac{B - n/\beta}{2\alpha}$ on two ranks (of the sizes tried, one next to it).
#
# **The longer the latency, the larger the bucket; 25 MiB is a guess for fast networks.**
#
# ## 6 Accumulate without talking
#
# With four micro-batches (lesson 02) backward runs four times. Gradients add up on each rank; one
# conversation at the end is enough. Inside `with model.no_sync():` backward only adds. The forward
# belongs in it, too: outside, ours sends the buffers, PyTorch the gradients. How many times as many
# bytes does a rank send if you forget it?

# %% tags=["predict"]
guess_bytes = predict("bytes without no_sync, as a multiple of those with it")


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
reveal(guess_bytes, sum(often) / sum(once))
print(f"{len(often)} messages of {sum(often)} bytes; with no_sync {len(once)} of {sum(once)}")

# %% [markdown]
# ### Exercise 4: one conversation
#
# Leave in `param.grad`, which is None before, the gradient of the mean over all micro-batches *and*
# ranks; inf and nan stay what they are. Each bucket leaves once, during the last backward. Each
# micro-batch counts the same, however many items it has. Keep one graph at a time (a name may hold
# the last output). Leave the batch, the random state and the model as they are: its parts' modes,
# what is frozen, its hooks. About 6 lines.
#
# <details><summary>Hint: right numbers, but no overlap</summary>
# Inside <code>no_sync()</code> nothing leaves. The last micro-batch belongs outside of it.
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
# **Talk once a step, in the last backward.**
#
# ## 7 A gradient that never comes
#
# A mixture of experts, an auxiliary head: sometimes the loss does not use a layer, and its hook
# never fires. What does its bucket do?


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
# It would wait for ever, so `finish` says it (as PyTorch does). With `find_unused=True`, what is
# missing counts as zero, and one small message tells who used what.

# %%
for which in ([0, 1], [0, 0]):
    has = pair.run(use_heads, which, find_unused=True)[0]
    print(f"the ranks use heads {which}: on rank 0, head 0 and 1 have a gradient: {has}")

# %% [markdown]
# What one rank used has a gradient on *all*: they take the same optimizer step. What nobody used
# keeps `grad = None`.
#
# **Every rank sends every bucket in every step, used or not.**
#
# ## 8 Fewer bytes
#
# A **comm hook** sends something smaller in place of the bucket: `hook(flat, group)` starts
# (`group`: the ranks that take part), and returns an object whose `wait()` leaves the mean in
# `flat`. This is what `DDP` does by default:
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
# ### Exercise 5: half the bytes
#
# Send bfloat16. Start in `__init__`; in `wait`, bring the mean back into `flat`, which stays
# float32, and is the same on all ranks. Several buckets are in flight at once. About 4 lines.
#
# <details><summary>Hint: flat has not changed</summary>
# <code>self.flat = ...</code> gives a name to another tensor; <code>self.flat.copy_(...)</code>
# writes into it, and converts.
# </details>


# %% tags=["exercise"] exercise="ddp-5"
class HalfTheBytes:
    """A comm hook: the mean over the group, sent in bfloat16."""

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
# Others go further. **Top-k** sends only the largest numbers; **PowerSGD** sends two thin matrices
# whose product is close to the gradient: for $a \times b$ numbers at rank 2, $2(a + b)$. What they
# leave out is not lost: it is added to the next step's gradient (*error feedback*). Of 100 bytes,
# how many does PowerSGD send here, with rank 2?

# %% tags=["predict"]
guess_power = predict("bytes of PowerSGD, of 100 in float32")

# %%
from course_lib.ddp import PowerSGD, TopK, bf16_hook

hooks = {"float32": None, "bf16": bf16_hook, "top 1 %": TopK(0.01), "PowerSGD": PowerSGD(2)}
moments = [1, 2, 4, 8, 16, 32, 64]


def delivered(rank, hook):
    """The mean of all gradients that have come out so far; the same batch in every step."""
    torch.manual_seed(0)
    model, total, means = DDP(GPT(MODELS["tiny"]), comm_hook=hook), 0, []
    inputs, targets = next_tokens(token_batch(rank, batch=1, seq=16, vocab=256))
    for step in range(1, moments[-1] + 1):
        model.zero_grad()
        token_loss(model(inputs), targets).backward()
        model.finish()
        total = total + torch.cat([param.grad.flatten() for param in model.parameters()])
        means += [total / step] if step in moments else []
    return means


# %% tags=["picture"]
means, sent = {}, dict.fromkeys(hooks, 0.0)
for name, hook in hooks.items():
    means[name] = pair.run(delivered, hook)[0]
    for call in pair.events:
        if call.kind in ("all_reduce", "all_gather"):
            sent[name] += bandwidth.bus_factor(call.kind, 2) * call.num_bytes
share = {name: 100 * num_bytes / sent["float32"] for name, num_bytes in sent.items()}
reveal(guess_power, share["PowerSGD"])

# %% tags=["picture"]
right, curves = means["float32"][0], {}
for name in list(hooks)[1:]:
    errors = [100 * ((mean - right).norm() / right.norm()).item() for mean in means[name]]
    curves[name] = Voices(measurement=errors)
title = f"PowerSGD: {errors[0]:.0f} % are missing in the first step, {errors[-1]:.0f} % after 64"
note = "bytes sent: " + ", ".join(f"{name} {part:.1f} %" for name, part in share.items())
axes = {"x_label": "steps", "y_label": "missing (% of the gradient)", "log": True, "note": note}
show(compare(moments, curves, title, **axes), alt=f"{title}; {note}")

# %% [markdown]
# bf16 rounds, and that is all. The other two deliver late: like stale gradients, that changes
# the training, and they compute more. All of it pays only where the wire is what you wait for.
#
# **A hook trades exactness for bytes; error feedback pays it back later.**
#
# ## 9 The real thing
#
# PyTorch's DDP does all this in C++, and its `backward()` finishes by itself. Same model, same
# batches, same bucket size. How many messages does PyTorch send for each
# of ours?

# %% tags=["predict"]
guess_torch = predict("PyTorch's messages, by ours (like 1/2)")


# %%
def side_by_side(rank, times=9):
    torch.manual_seed(0)
    gpt, torch_ddp, seen = GPT(MODELS["small"]), nn.parallel.DistributedDataParallel, ([], [])
    models = DDP(deepcopy(gpt), 2 * 2**20), torch_ddp(gpt, bucket_cap_mb=2)
    inputs, targets = next_tokens(token_batch(rank, batch=1, seq=64, vocab=2048))
    for step in range(2 * times):  # they take turns
        model = models[step % 2]
        model.zero_grad()
        with record() as log, span("compute"):
            token_loss(model(inputs), targets).backward()
            if step % 2 == 0:
                model.finish()
        seen[step % 2].append(log.events)
    return [[param.grad for param in model.parameters()] for model in models], seen


# %%
(ours, theirs), seen = pair.run(side_by_side)[0]
print("gradients bit-equal:", all(map(torch.equal, ours, theirs)))
for name, steps in zip(("ours", "PyTorch's"), seen, strict=True):
    calls = [[e.num_bytes for e in step if e.kind == "all_reduce"] for step in steps]
    took_ms = 1e3 * median(e.duration_s for s in steps[2:] for e in s if e.kind == "compute")
    counts = f"messages in the first step {len(calls[0])}, then {len(calls[-1])}"
    print(f"{name:9} {counts}; {sum(calls[-1])} bytes, {took_ms:.0f} ms a step")
reveal(guess_torch, len(calls[-1]) / sum(e.kind == "all_reduce" for e in seen[0][-1]))

# %% [markdown]
# The same bits. PyTorch closes a bucket once it is *over* the limit, ours before. Its first step
# has one bucket, learns the true ready order from it, and builds the others anew.
#
# ## 10 One batch more
#
# **Break it.** Four ranks train, but the data did not come out even: rank 2 has four batches, the
# others three. Who waits for ever?

# %% tags=["predict"]
guess_hang = predict("who waits for ever?", choices=("rank 2", "the others", "nobody"))


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
    show(waiting(hang.waits, 4), alt="rank 2 waits for the others, who have returned")
    raise

# %% [markdown]
# Nothing is wrong on the line that hangs. On a cluster this is the job that stands still at the end
# of an epoch, with all GPUs reserved. So all ranks take the *same number of steps*: the sampler of
# lesson 05 drops or repeats items, or a rank without data joins in with a loss of weight 0.
#
# **A step is a promise: every rank, every bucket, in one order.**
#
# ## What to keep
#
# - A gradient is ready long before backward ends: send it in the hook, wait in `finish`.
# - Buckets: large enough for the latency, small enough that the last one does not show. The best
#   one lets the wire just keep up.
# - With accumulation, talk once a step.
# - Compression is a hook: count its bytes, and look at what it does to the gradient.
# - Whoever takes a step more than the others waits for ever.
#
# Data parallelism keeps the whole model on every rank. Lesson 07 begins to cut it up.
