# %% [markdown]
# # 04 Collectives: how ranks talk
#
# Every way of training on many devices comes down to a few conversations: *tell everyone*, *add
# everything up*, *deal it out*. Here you build them from the only two words a wire knows, `send`
# and `recv`. Each time you **predict** what it costs, **run** it on real ranks, and **compare**.
#
# | symbol | in code | meaning |
# |---|---|---|
# | $p$ | `p` | how many ranks talk |
# | $n$ | `n` | bytes of the whole tensor |
# | $\alpha$ | `link.latency_s` | seconds until a message begins to arrive |
# | $\beta$ | `link.bytes_per_s` | bytes a second, once it flows |
# | $r$ | `rank` | which rank am I, $0 \dots p-1$ |
#
# One message of $n$ bytes takes $\alpha + n/\beta$ seconds. That is all the theory there is.
# (A message is a contiguous tensor, and so are all the tensors that you get here.)

# %%
# %load_ext course_lib.ranks
import time
from itertools import pairwise

import torch
import torch.distributed as dist

from course_lib.checks import check
from course_lib.collectives import messages
from course_lib.core import Link
from course_lib.cost import bandwidth, network
from course_lib.display import YES_NO, Voices, compare, explore, predict, reveal, show, stepper
from course_lib.ranks import RankError, Ranks

# %% [markdown]
# ## 1 One sender, seven friends
#
# You want to give 5 MB of pictures to seven friends. Your uplink carries 1 MB/s, and latency does
# not matter. After how many seconds does the last friend have them? Sending to all *at once* does
# not help: the same bytes leave through the same wire. But a friend who has the pictures owns an
# uplink too: when are you done if everyone who has them helps?

# %% tags=["predict"]
guess_alone = predict("until all seven have the pictures, from you alone", unit="s")
guess_helped = predict("until all seven have them, if everyone helps", unit="s")


# %%
def star_broadcast_s(n, p, link):
    return (p - 1) * (link.latency_s + n / link.bytes_per_s)


def tree_broadcast_s(n, p, link):
    num_rounds = (p - 1).bit_length()  # 1, 2, 4, 8 ... know: log2(p), rounded up
    return num_rounds * (link.latency_s + n / link.bytes_per_s)


uplink = Link(latency_s=0.0, bytes_per_s=1e6)
reveal(guess_alone, star_broadcast_s(5e6, 8, uplink))
reveal(guess_helped, tree_broadcast_s(5e6, 8, uplink))

# %% tags=["picture"]
from course_lib.display import timelines

# that was the formula; a second voice, the simulation, moves every message and looks at the clock
runs = {
    "one sender": messages.simulate(messages.star_broadcast_messages(8, 5e6), uplink),
    "everyone helps": messages.simulate(messages.tree_broadcast_messages(8, 5e6), uplink),
}
alone_s, helped_s = (messages.end_of(events) for events in runs.values())
title = f"Helping ends after {helped_s:g} s, one sender alone after {alone_s:g} s"
show(timelines(runs, title), alt=f"{title}: three rounds in place of seven messages")


# %%
def tree_broadcast(x, root=0):
    """The third voice: real ranks. This is the whole algorithm."""
    rank, p = dist.get_rank(), dist.get_world_size()
    mine = (rank - root) % p  # my number, counted from the root
    have = 1  # how many have it so far
    while have < p:
        if mine < have and mine + have < p:
            dist.send(x, (rank + have) % p)
        elif have <= mine < 2 * have:
            dist.recv(x, (rank - have) % p)
        have *= 2
    return x


# %% tags=["check"]
def same_as_torch(rank):
    ours, theirs = torch.full((5,), 10.0**rank), torch.full((5,), 10.0**rank)
    dist.broadcast(theirs, src=2)
    return torch.equal(tree_broadcast(ours, root=2), theirs)


print("equal to torch.distributed:", ranks.run(same_as_torch))

# %% [markdown]
# ### Exercise 1: the tree, backwards
#
# Run the film backwards and you have a **reduce**: ranks hand in their sums, and the root ends up
# with the total. Budget: every rank sends at most once, nobody receives more than
# $\lceil\log_2 p\rceil$ times, and all is done in as many rounds. x has any shape (also `[]`) and
# dtype, and stays as it is; the sum is a new tensor, in every call. About 7 lines, 10 minutes.
#
# <details><summary>Hint: a rank is missing in my sum</summary>
# The last round of the broadcast is the first one here: start with the largest <code>have</code>,
# the largest power of two below $p$, and halve it.
# </details>


# %% tags=["exercise"] exercise="collectives-1"
def tree_reduce(x, root=0):
    """Return the sum of x over all ranks, a new tensor, on the root; None elsewhere."""
    rank, p = dist.get_rank(), dist.get_world_size()
    mine = (rank - root) % p  # my number, counted from the root
    total, incoming = x.clone(), torch.empty_like(x)
    ### BEGIN SOLUTION: hand sums in, the farthest ranks first
    for k in reversed(range((p - 1).bit_length())):
        have = 2**k
        if have <= mine < 2 * have:
            dist.send(total, (rank - have) % p)
        elif mine < have and mine + have < p:
            dist.recv(incoming, (rank + have) % p)
            total += incoming
    ### END SOLUTION
    return total if rank == root else None


# %% tags=["check"] exercise="collectives-1"
check("collectives-1", tree_reduce)

# %% [markdown]
# **A tree needs $\lceil\log_2 p\rceil$ rounds, and each round moves the whole tensor.**
#
# ## 2 Everyone talks at once
#
# From now on all ranks stand in a circle and everyone passes something to the right. The obvious
# program: first send to the right, then receive from the left. Does it finish?

# %% tags=["predict"]
guess_finishes = predict("does it finish?", choices=YES_NO)

# %% tags=["failure", "raises-exception"]
from course_lib.display import waiting


def send_then_receive(rank):
    x, incoming = torch.full((3,), 10.0**rank), torch.empty(3)
    dist.send(x, (rank + 1) % 4)
    dist.recv(incoming, (rank - 1) % 4)


try:
    ranks.run(send_then_receive)
except RankError as hang:
    reveal(guess_finishes, "no")
    show(waiting(hang.waits, 4), alt=f"{len(hang.waits)} ranks in a circle, each waits in send")
    raise

# %% [markdown]
# `send` returns when the receiver has taken the message. All four wait for a receiver, and all four
# receivers come later in the program. No rank is wrong by itself; the *circle* is wrong.
# (Networks that buffer small messages hide this until the tensors grow.)
#
# ### Exercise 2: break the circle
#
# Pass x to the right, on two or more ranks, odd or even; x stays as it is. Budget: one message a
# rank, all of them in one round, so no rank waits for one of its messages before it has started
# the other. `dist.isend` and `dist.irecv` start a message and return at once; `.wait()` waits for
# its end. About 4 lines.
#
# <details><summary>Hint: it hangs all the same</summary>
# Start <em>both</em> messages before the first <code>.wait()</code>, and keep both handles: a
# message whose handle is dropped is forgotten.
# </details>


# %% tags=["exercise"] exercise="collectives-2"
def pass_right(x):
    """Send x to the right neighbour; return the tensor of the left one, a new tensor."""
    rank, p = dist.get_rank(), dist.get_world_size()
    incoming = torch.empty_like(x)
    ### BEGIN SOLUTION: start both messages, then wait for both
    sending = dist.isend(x, (rank + 1) % p)
    receiving = dist.irecv(incoming, (rank - 1) % p)
    sending.wait()
    receiving.wait()
    ### END SOLUTION
    return incoming


# %% tags=["check"] exercise="collectives-2"
check("collectives-2", pass_right)

# %% [markdown]
# **Start what can be started, then wait: no circle can form.** The `exchange` below does just that,
# and everything from here on is made of it.
#
# ## 3 Reduce-scatter on a ring
#
# Each of 4 ranks holds a gradient of $n$ bytes, cut into 4 shards. We want rank $r$ to end up with
# shard $r$ of the *sum*. A tree to one rank would leave most wires idle. Instead every rank sends
# one shard to its right, all at the same time; the receiver adds its own and passes it on. What
# part of $n$ has each rank sent in the end?

# %% tags=["predict"]
guess_part = predict("bytes each of 4 ranks sends, as a part of n (like 1/2)")


# %%
def exchange(out, to, incoming, source):
    for started in [dist.isend(out, to), dist.irecv(incoming, source)]:
        started.wait()


def ring_reduce_scatter(x):
    rank, p = dist.get_rank(), dist.get_world_size()
    shards = list(x.clone().tensor_split(p))
    for step in range(1, p):
        out, mine = shards[(rank - step) % p], shards[(rank - step - 1) % p]
        incoming = torch.empty_like(mine)
        exchange(out, (rank + 1) % p, incoming, (rank - 1) % p)
        mine += incoming
    return shards[rank].clone()


# %% tags=["check"]
def shard_of_sum(rank):
    return ring_reduce_scatter(torch.full((4,), 10.0**rank)).tolist()


print("sum of 1, 10, 100 and 1000, in shards:", ranks.run(shard_of_sum))

# %% tags=["picture"]
from course_lib.display import frames_from_messages, own_everything

sent = sum(e.num_bytes for e in ranks.events if (e.rank, e.kind) == (0, "send"))
reveal(guess_part, sent / 16)  # x was 4 numbers of 4 bytes
frames = frames_from_messages(messages.ring_reduce_scatter_messages(4), own_everything(4))
stepper(frames, "Every wire carries one shard in every step, and the sums grow on the way")

# %% [markdown]
# Every shard visits all ranks, so it is sent $p-1$ times: $\frac{p-1}{p}\,n$ bytes a rank.
#
# **Break it.** Be off by one: add what arrives to the *next* shard. Each rank brings $10^r$, so the
# digits of a wrong sum say who was counted how often. Set `fault=0` to mend it.


# %% tags=["failure"]
def off_by_one(rank, fault=1):
    shards = list(torch.full((4,), 10.0**rank).tensor_split(4))
    for step in range(1, 4):
        incoming = torch.empty(1)
        exchange(shards[(rank - step) % 4], (rank + 1) % 4, incoming, (rank - 1) % 4)
        shards[(rank - step - 1 + fault) % 4] += incoming
    return [int(shard) for shard in shards]


for rank, shards in enumerate(ranks.run(off_by_one)):
    print(f"rank {rank} holds {shards}; its own shard should be 1111")

# %% [markdown]
# No error, no hang, only wrong numbers: a training run would go on with them for a week.
#
# ### Exercise 3: all-gather
#
# Now every rank owns one shard and all want all of them, in the order of the ranks. Same ring, same
# bytes, but what arrives is stored, not added, and passed on in the next step. Budget: $p-1$
# messages a rank, one shard each, to the right neighbour only, in $p-1$ rounds. About 4 lines.
#
# <details><summary>Hint: zeros are left over</summary>
# In step 1 you send your own shard. What you send in step 2 is what came in step 1.
# </details>


# %% tags=["exercise"] exercise="collectives-3"
def gather_on_ring(shard):
    """Return the shards of all ranks, one after another: p * len(shard) numbers, a new tensor."""
    rank, p = dist.get_rank(), dist.get_world_size()
    whole = torch.zeros(p * len(shard), dtype=shard.dtype)
    shards = whole.tensor_split(p)  # views: what is written to shards[i] is in whole
    shards[rank].copy_(shard)
    ### BEGIN SOLUTION: pass on what came last, p - 1 times
    for step in range(p - 1):
        out, incoming = shards[(rank - step) % p], shards[(rank - step - 1) % p]
        exchange(out, (rank + 1) % p, incoming, (rank - 1) % p)
    ### END SOLUTION
    return whole


# %% tags=["check"] exercise="collectives-3"
check("collectives-3", gather_on_ring)

# %% [markdown]
# **Around a ring, each rank sends $\frac{p-1}{p}\,n$ bytes in $p-1$ steps, to add or to copy.**
#
# ## 4 All-reduce
#
# Data-parallel training adds up the gradients of all ranks and gives everyone the sum. You have
# both halves already; put one after the other. How do the bytes that *each rank* sends change when
# $p$ grows from 4 to 4,000?

# %% tags=["predict"]
guess_growth = predict("p from 4 to 4,000: the bytes of each rank grow by a factor of")

# %%
from course_lib.collectives import ring_all_gather, ring_reduce_scatter


def ring_all_reduce(x):
    return ring_all_gather(ring_reduce_scatter(x), out=x)


def bytes_per_rank(p):
    return 2 * (p - 1) / p  # in n


reveal(guess_growth, bytes_per_rank(4000) / bytes_per_rank(4))
frames = frames_from_messages(messages.ring_all_reduce_messages(4), own_everything(4))
stepper(frames, "All-reduce: three steps add, three steps copy")


# %% tags=["picture"]
def sent_by_rank_0(p, n=4 * 1200):
    with Ranks(p) as few:
        few.run(lambda rank: ring_all_reduce(torch.zeros(n // 4)))
        return sum(e.num_bytes for e in few.events if (e.rank, e.kind) == (0, "send")) / n


p_values = [1, 2, 3, 4, 5, 6]
on_paper = [messages.ring_all_reduce_messages(p, 1.0) for p in p_values]
simulated = [sum(m.num_bytes for m in moves if m.sender == 0) for moves in on_paper]
measured = [sent_by_rank_0(p) for p in p_values]
voices = Voices(formula=bytes_per_rank, simulation=simulated, measurement=measured)
title = "However many ranks there are, each sends less than 2 n bytes"
figure = compare(p_values, voices, title, x_label="ranks p", y_label="bytes sent by a rank, in n")
show(figure, alt=f"{title}: {measured[-1]:.2f} n on {p_values[-1]} ranks; the voices agree")

# %% [markdown]
# ### Exercise 4: the mean
#
# What data parallelism needs is the *mean*, in place, for floats of any length (10 numbers on 4
# ranks are shards of 3, 3, 2 and 2). Call the two halves; `out=x` tells the all-gather where the
# shards belong. Budget: $2(p-1)$ messages, $2\frac{p-1}{p}n$ bytes; where shards differ, that is
# the mean over the ranks, and each sends the shards' own bytes, no padding. About 2 lines.
#
# <details><summary>Hint: where does the division belong?</summary>
# Where the sum is complete and still small: between the two halves, on one shard.
# </details>


# %% tags=["exercise"] exercise="collectives-4"
def mean_all_reduce(x):
    """Replace x by its mean over all ranks, in place; return x."""
    ### BEGIN SOLUTION: sum in shards, divide once, gather
    shard = ring_reduce_scatter(x)
    ring_all_gather(shard / dist.get_world_size(), out=x)
    ### END SOLUTION
    return x


# %% tags=["check"] exercise="collectives-4"
check("collectives-4", mean_all_reduce)

# %% [markdown]
# **All-reduce = reduce-scatter + all-gather: $2\frac{p-1}{p}\,n$ bytes a rank, $2(p-1)$ steps.**
#
# ## 5 When does the ring lose?
#
# Few bytes, but many steps, and every step pays $\alpha$.
#
# ### Exercise 5: the price of the ring
#
# Write it down, in the style of `tree_broadcast_s`. One line.
#
# <details><summary>Hint: how large is a message?</summary>
# One shard, $n/p$ bytes. And there are two halves of $p-1$ steps each.
# </details>


# %% tags=["exercise"] exercise="collectives-5"
def ring_all_reduce_s(n, p, link):
    """Seconds of a ring all-reduce of n bytes on p ranks."""
    ### BEGIN SOLUTION: how many steps, how many bytes in each?
    return 2 * (p - 1) * (link.latency_s + n / p / link.bytes_per_s)
    ### END SOLUTION


# %% tags=["check"] exercise="collectives-5"
check("collectives-5", ring_all_reduce_s)

# %% [markdown]
# The rival is **recursive doubling**: swap sums with the rank 1 away, then 2 away, then 4. After
# $\log_2 p$ rounds everyone has everything; but each round carries the whole tensor. (In the code
# `rank ^ 4` flips one bit of the rank's number: the partner 4 away, seen from both sides.)
#
# Four real ranks get a slow wire: a message really takes $\alpha + n/\beta$, while the CPU is free.
# Small tensors are faster by doubling, large ones around the ring. From which size on?

# %% tags=["predict"]
wire = Link(name="slow wire", latency_s=10e-3, bytes_per_s=20e6)
guess_crossover = predict(f"over a {wire}, 4 ranks: the ring wins from", unit="MB")


# %%
def doubling_all_reduce(x):
    rank, p = dist.get_rank(), dist.get_world_size()  # p = 2, 4, 8, ...
    for k in range((p - 1).bit_length()):
        incoming = torch.empty_like(x)
        exchange(x, rank ^ 2**k, incoming, rank ^ 2**k)
        x += incoming
    return x


def seconds(rank, all_reduce, n, times=3):
    x, moments = torch.ones(n // 4), []
    for _ in range(times + 2):  # the first call warms up
        all_reduce(x)
        moments.append(time.perf_counter())
    return [end_s - start_s for start_s, end_s in pairwise(moments)][1:]


# %%
from course_lib.collectives import ring_all_reduce

slow_ranks, sizes = Ranks(4, link=wire), [2**k for k in range(14, 23, 2)]


def three_voices(cost_s, build, all_reduce):
    played = [messages.end_of(messages.simulate(build(4, n), wire)) for n in sizes]
    timed = [slow_ranks.run(seconds, all_reduce, n)[0] for n in sizes]
    return Voices(formula=lambda n: cost_s(n, 4, wire), simulation=played, measurement=timed)


ring = network.ring_all_reduce_s, messages.ring_all_reduce_messages
doubling = network.recursive_doubling_all_reduce_s, messages.recursive_doubling_messages
curves = {"ring": three_voices(*ring, ring_all_reduce)}
curves["doubling"] = three_voices(*doubling, doubling_all_reduce)

# %% tags=["picture"]
wins_from = network.crossover_bytes(4, wire) / 1e6
reveal(guess_crossover, wins_from)
title = f"The ring wins from {wins_from:.2g} MB on"
axes = {"x_label": "tensor (bytes)", "y_label": "time (s)", "log": True}
figure = compare(sizes, curves, title, note=f"emulated {wire}", **axes)
show(figure, alt=f"{title}; formula, simulation and four real ranks agree")


# %% tags=["picture"]
def finding(p, latency_us, gb_per_s):
    link = Link(latency_s=latency_us * 1e-6, bytes_per_s=gb_per_s * 1e9)
    return f"{p} ranks: the ring wins from {network.crossover_bytes(p, link) / 1e6:.3g} MB on"


def on_a_wire(p, latency_us, gb_per_s):
    link = Link(latency_s=latency_us * 1e-6, bytes_per_s=gb_per_s * 1e9)
    ring = Voices(formula=lambda n: network.ring_all_reduce_s(n, p, link))
    doubling = Voices(formula=lambda n: network.recursive_doubling_all_reduce_s(n, p, link))
    title = finding(p, latency_us, gb_per_s)
    return compare([1e3, 1e10], {"ring": ring, "doubling": doubling}, title, **axes)


wires = {"latency_us": ([1, 5, 20, 100], 5), "gb_per_s": ([1, 25, 100, 300], 25)}
explore(on_a_wire, finding, p=(3, 64, 8), **wires)

# %% [markdown]
# **Small tensors: count the messages. Large tensors: count the bytes.** The course's `all_reduce`
# picks by size.
#
# ## 6 This machine
#
# No emulation now. Two processes on your machine swap tensors, both at once, as in every step of a
# ring. What is $\alpha$ here? The two numbers you find know nothing of collectives; then they have
# to predict our ring, in a race against gloo, PyTorch's own library for CPUs.

# %% tags=["predict"]
guess_alpha = predict("alpha of this machine", unit="us")


# %%
def swaps(rank, num_bytes):
    mine, theirs = torch.ones(2, num_bytes, dtype=torch.uint8)
    moments = []
    for _ in range(15):
        exchange(mine, 1 - rank, theirs, 1 - rank)
        moments.append(time.perf_counter())
    return [end_s - start_s for start_s, end_s in pairwise(moments)][4:]  # the first warm up


pair, sizes = Ranks(2), [2**k for k in range(10, 25, 2)]
times_s = [pair.run(swaps, n)[0] for n in sizes]
every = [(n, one) for n, some in zip(sizes, times_s, strict=True) for one in some]
here = bandwidth.fit_link(*zip(*every, strict=True), name="this machine")
reveal(guess_alpha, here.latency_s * 1e6)

# %% tags=["picture"]
title = f"A swap of two messages takes what a wire of {here.latency_s * 1e6:.0f} us and "
title += f"{here.bytes_per_s / 1e9:.1f} GB/s would"
figure = compare(sizes, Voices(formula=here.time_s, measurement=times_s), title, **axes)
show(figure, alt=f"{title}: the line is fitted to {len(every)} swaps")

# %% tags=["picture"]
sizes = [2**k for k in range(16, 26, 3)]
ours, gloos = (
    [pair.run(seconds, all_reduce, n, times=7)[0] for n in sizes]
    for all_reduce in (ring_all_reduce, dist.all_reduce)
)
predicted = Voices(formula=lambda n: network.ring_all_reduce_s(n, 2, here), measurement=ours)
ratio = sorted(gloos[-1])[3] / sorted(ours[-1])[3]
title = f"At {sizes[-1] / 1e6:.0f} MB our ring has {ratio:.2f} of gloo's bandwidth on 2 ranks"
curves = {"our ring": predicted, "gloo": Voices(measurement=gloos)}
show(compare(sizes, curves, title, **axes), alt=f"{title}; the line knows only the swaps")

# %% [markdown]
# The formula takes adding as free, and gives each message a wire that is busy with nothing else.
# Where dots lie above the line, you see what it left out.
#
# ## 7 How fast is the wire?
#
# Benchmarks of GPUs print a *bus bandwidth*, since $n/t$ alone falls with $p$ even on a perfect
# wire. Published for 8 A100 GPUs: 17.18 GB all-reduced in 128 ms. How fast is each GPU's wire?

# %% tags=["predict"]
guess_speed = predict("speed of each GPU's wire", unit="GB/s")

# %%
n, time_s, p = 17_179_869_184, 0.127997, 8  # nccl-tests; stas00/ml-engineering, network/README.md
factor = bandwidth.bus_factor("all_reduce", p)  # 2 (p - 1) / p: what a rank sends, in n
reveal(guess_speed, factor * n / time_s / 1e9)
print(f"n / t is {n / time_s / 1e9:.0f} GB/s; the factor is {factor}")

# %% [markdown]
# **Bus bandwidth = what each rank really sends, by time; compare that with the datasheet.**
#
# ## 8 The whole family
#
# | call | before | after | sent by a rank | backward |
# |---|---|---|---|---|
# | `broadcast` | root: x | all: x | $n$ a round | `reduce` |
# | `reduce` | all: x | root: sum | $n$ a round | `broadcast` |
# | `scatter` | root: x | $r$: shard $r$ | root $\frac{p-1}{p}n$ | `gather` |
# | `gather` | $r$: shard $r$ | root: x | $\frac{1}{p}n$ | `scatter` |
# | `all_gather` | $r$: shard $r$ | all: x | $\frac{p-1}{p}n$ | `reduce_scatter` |
# | `reduce_scatter` | all: x | $r$: shard $r$ of sum | $\frac{p-1}{p}n$ | `all_gather` |
# | `all_reduce` | all: x | all: sum | $2\frac{p-1}{p}n$ | `all_reduce` |
# | `all_to_all` | $r$: one for each | $r$: one from each | $\frac{p-1}{p}n$ | `all_to_all` |
# | `barrier` | | all know all came | about 0 | |
#
# `course_lib.collectives` has them all, for any length and group, with sum, mean or max. The last
# column is what a gradient needs on its way back; later lessons live on it.
#
# ### Exercise 6: all-to-all
#
# Everyone has a letter for everyone: shard $s$ of rank $r$ goes to rank $s$, which files it under
# $r$. Mixture-of-experts models route their tokens this way, so x is `[n]`
# or `[n, d]`. Budget: $p-1$ messages a rank, one shard each, in $p-1$ rounds. About 4 lines.
#
# <details><summary>Hint: who sends to whom, and when?</summary>
# In step 1 everyone sends to the neighbour one to the right and receives from the one to the left;
# in step 2 to the one after that. Nobody is asked twice, and <code>exchange</code> cannot block.
# </details>


# %% tags=["exercise"] exercise="collectives-6"
def all_to_all(x):
    """Send shard s to rank s; return what came, in the order of the senders, a new tensor."""
    rank, p = dist.get_rank(), dist.get_world_size()
    letters = x.tensor_split(p)  # len(x) is a multiple of p
    filed = torch.zeros_like(x)
    places = filed.tensor_split(p)  # views of filed
    places[rank].copy_(letters[rank])
    ### BEGIN SOLUTION: one exchange with each distance 1 .. p - 1
    for step in range(1, p):
        to, source = (rank + step) % p, (rank - step) % p
        exchange(letters[to], to, places[source], source)
    ### END SOLUTION
    return filed


# %% tags=["check"] exercise="collectives-6"
check("collectives-6", all_to_all)

# %% [markdown]
# ## 9 Laboratory of mismatches
#
# A collective is a promise: *all ranks make the same calls in the same order*. Break it. First the
# shapes. (The course's ranks compare their calls before anything is sent; plain gloo would have
# ended the process from within.) Then equal shapes, but rank 0 sums the loss first, and the others
# the gradient. Will there be an error?


# %% tags=["failure", "raises-exception"]
def different_shapes(rank):
    dist.all_reduce(torch.ones(3 if rank == 2 else 4))


ranks.run(different_shapes)

# %% tags=["predict"]
guess_order = predict("same shapes in another order: will there be an error?", choices=YES_NO)


# %% tags=["failure"]
def other_order(rank):
    loss, gradient = torch.tensor([10.0**rank]), torch.tensor([2 * 10.0**rank])
    if rank == 0:
        dist.all_reduce(loss)
        dist.all_reduce(gradient)
    else:
        dist.all_reduce(gradient)
        dist.all_reduce(loss)
    return f"loss {loss.item():g}, gradient {gradient.item():g}"


for rank, line in enumerate(ranks.run(other_order)):
    print(f"rank {rank}: {line}; right would be 1111 and 2222")
reveal(guess_order, "no")

# %% [markdown]
# Same kind, same shape, no error: rank 0's loss was added to the others' gradients. The course's
# ranks compare their lines and say so; in a real run only a test against one process finds it.
#
# ## What to keep
#
# - A message costs $\alpha + n/\beta$: a tree pays for $\log_2 p$ large ones in a row, a ring for
#   $2(p-1)$ small ones.
# - All-reduce is reduce-scatter and all-gather; each rank sends less than $2n$ bytes, for any $p$.
# - Start both sides of an exchange before you wait for either.
# - Same calls, same shapes, same order on every rank: a wrong order is silent.
#
# Training with many copies of a model spends these $2n$ bytes on gradients, in every step.
#
# ## The same on a cluster
#
# `cluster/exercises/04_collectives.py` plays section 6 on as many nodes as you like: messages from
# the first rank to the last and back give $\alpha$ and $\beta$, and then all-reduces race. Which
# of the two changes when the ranks lie on two nodes? Predict, then type this into a terminal, in
# the course's folder:
#
# ```sh
# course submit 04 --nodes 2       # to your site's Slurm, else on this machine
# course logs -f 04_collectives-1  # reads along until it has ended
# course collect                   # brings its run records home: run the next cell
# ```
#
# <details><summary>Which of the two changes, and why do dots lie above the line?</summary>
# Between nodes both get worse: a longer $\alpha$, a smaller $\beta$; $\alpha$ decides small
# messages. On nodes that are only played, neither changes. Ranks that share busy cores wait for a
# core before they can send or add, and the line knows only the wire: so dots lie above it.
# </details>

# %% tags=["picture"]
from course_lib.display import last_run, show, wire_run

records = last_run("04_collectives")  # of the newest job that was brought home
if records:
    figure, finding = wire_run(records)
    show(figure, alt=finding)
