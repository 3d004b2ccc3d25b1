# %% [markdown]
# # 04 Collectives: how ranks communicate
#
# **Question.** How do ranks copy, sum and exchange tensors, and how long does it take?
#
# Every parallel training method in this course communicates through a few *collectives*: calls that
# all ranks make together, such as `all_reduce`. A library hides the messages inside them. But how
# fast a method is depends on these messages: on how many there are, and on how large they are. In
# this lesson you write the collectives from single messages and derive what they cost.
#
# *After this lesson you can*
#
# - write the usual collectives from messages, without a deadlock;
# - derive their cost, and say which all-reduce is fastest at which size;
# - explain why libraries use rings, trees and hierarchies;
# - measure $\alpha$ and $\beta$ of a machine, and interpret a bus bandwidth.
#
# **Prerequisites:** lesson 00. **Time:** about 60 minutes to read and run, 75 for the exercises (35
# for the core ones). Section 4 ends with a break.
#
# | symbol | in code | meaning |
# |---|---|---|
# | $p$ | `p` | number of ranks that communicate |
# | $n$ | `n` | bytes of the whole tensor |
# | $\alpha$ | `link.latency_s` | latency: seconds until an empty message arrives |
# | $\beta$ | `link.bytes_per_s` | bandwidth, bytes/s; in papers, $\beta$ often means its inverse |
# | $r$ | `rank` | number of this rank, $0 \dots p-1$ |
#
# **The alpha-beta model:** a message of $n$ bytes takes $\alpha+n/\beta$ seconds. At any time, a
# rank sends at most one message and receives at most one, but it can do both at once. We also
# assume that adding two tensors takes no time. (All tensors in the exercises are contiguous.)

# %%
# %load_ext course_lib.ranks
import time
from itertools import pairwise

import torch
import torch.distributed as dist

from course_lib.checks import check
from course_lib.collectives import lab, messages
from course_lib.core import Link, TwoLevelLink
from course_lib.cost import bandwidth, network
from course_lib.display import YES_NO, claim, predict, reveal, show, wires
from course_lib.ranks import Ranks

# %% [markdown]
# ## 1 One sender, seven friends
#
# The simplest collective is a **broadcast**: one rank has a tensor, and all ranks need a copy. You
# know this problem. You want to send 5 MB of pictures to each of seven friends. Your uplink carries
# 1 MB/s, and latency is negligible. If you send them one after the other, the last friend has them
# after $7\cdot5=35$ s. Sending to all friends *at once* does not help, because the same bytes leave
# through the same wire. But a friend who has all the pictures can forward them, through an uplink
# of the same speed. When does the last friend have them now?

# %% tags=["predict"]
guess_helped = predict("until all seven have them, if each forwards the whole set", unit="s")
### GUESS guess_helped.commit(20)


# %%
def star_broadcast_s(n, p, link):
    return (p - 1) * (link.latency_s + n / link.bytes_per_s)


def tree_broadcast_s(n, p, link):
    num_rounds = (p - 1).bit_length()  # 1, 2, 4, 8 ... ranks: log2(p), rounded up
    return num_rounds * (link.latency_s + n / link.bytes_per_s)


uplink = Link(latency_s=0.0, bytes_per_s=1e6)
print(f"you alone: {star_broadcast_s(5e6, 8, uplink):g} s")
reveal(guess_helped, tree_broadcast_s(5e6, 8, uplink))

# %%
# that was the formula; a simulation gives every message its time on the link
runs = {
    "one sender": messages.simulate(messages.star_broadcast_messages(8, 5e6), uplink),
    "everyone helps": messages.simulate(messages.tree_broadcast_messages(8, 5e6), uplink),
}
alone_s, helped_s = (messages.end_of(events) for events in runs.values())
print(f"simulated: {helped_s:g} s if everyone helps, {alone_s:g} s with one sender")


# %%
def tree_broadcast(x, root=0):
    """Copy the root's x to all ranks, in place, on real ranks."""
    rank, p = dist.get_rank(), dist.get_world_size()
    mine = (rank - root) % p  # my number, counted from the root
    have = 1  # how many ranks have it so far
    while have < p:
        if mine < have and mine + have < p:
            dist.send(x, (rank + have) % p)
        elif have <= mine < 2 * have:
            dist.recv(x, (rank - have) % p)
        have *= 2
    return x


print("from rank 2:", ranks.run(lambda rank: tree_broadcast(torch.tensor(rank), root=2).item()))

# %% [markdown]
# ### Exercise 1 (core): the tree, backwards
# *Difficulty 2 of 5, importance 3 of 5, about 10 minutes and 7 lines.*
#
# A **reduce** gives the root the sum of all ranks' tensors. It sends the messages of
# `tree_broadcast` in reverse order and in the opposite direction: each rank sends the sum that it
# has so far, and the receiver adds it to its own. If four ranks hold 1, 10, 100 and 1000, the root
# returns 1111. Budget: every rank sends at most once and receives at most $\lceil\log_2 p\rceil$
# times.
#
# <details><summary>Hint: a rank is missing in my sum</summary>
# The last round of the broadcast is the first round of the reduce. Start with the largest power of
# two below $p$ as <code>have</code>, and halve it.
# </details>


# %% tags=["exercise"] exercise="collectives-1"
def tree_reduce(x, root=0):
    """Return the sum of x over all ranks, a new tensor, on the root; None elsewhere."""
    rank, p = dist.get_rank(), dist.get_world_size()
    mine = (rank - root) % p  # my number, counted from the root
    total, incoming = x.clone(), torch.empty_like(x)
    ### BEGIN SOLUTION: send the sums, the farthest ranks first
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
# In each round of the tree, every rank that has the tensor sends it to one that does not, as long
# as there is one. So the number of ranks that have it doubles, and after $k$ rounds, $2^k$ ranks
# have it. All $p$ ranks have it as soon as $2^k\ge p$, that is, after $\lceil\log_2 p\rceil$
# rounds. If the root sends to every rank itself, it needs $p-1$ messages, one after the other.
#
# **A *binomial tree* broadcasts or reduces a tensor in $\lceil\log_2 p\rceil$ rounds, and each
# round sends the whole tensor.**
#
# ## 2 Everyone sends at once
#
# In each round of the tree, a rank only sends or only receives, although it could do both at once.
# Faster collectives use this: all ranks send *and* receive at the same time. Let the ranks form a
# circle in which each passes a tensor to its right neighbor. In the obvious program, each rank
# first sends to the right, then receives from the left. You know from lesson 00 that this program
# never finishes. Run it once more, and read in the report who waits for whom. How can all ranks
# send at the same time without such a hang?


# %% tags=["failure", "raises-exception"]
def send_then_receive(rank):
    x, incoming = torch.full((3,), 10.0**rank), torch.empty(3)
    dist.send(x, (rank + 1) % 4)
    dist.recv(incoming, (rank - 1) % 4)


ranks.run(send_then_receive)

# %% [markdown]
# This is a **deadlock**: each rank waits for another, and the waiting forms a circle. On these
# ranks, `send` returns only when the receiver has taken the message. The receiver would take it in
# `recv`, but it is still in its own `send`, which waits for the next rank, and so on around the
# circle. A library that buffers small messages lets `send` return at once. There, the mistake stays
# hidden until the tensors grow.
#
# ### Exercise 2 (core): break the circle
# *Difficulty 1 of 5, importance 5 of 5, about 5 minutes and 4 lines.*
#
# Pass x to the right neighbor, and return what comes from the left one. On 4 ranks that hold 1, 10,
# 100 and 1000, rank 0 returns 1000 and rank 1 returns 1. `dist.isend` and `dist.irecv` take the
# same arguments as `send` and `recv`, but they only start a message and return a handle at once.
# The handle's `.wait()` blocks until the message is complete. All collectives on a ring are built
# from this exchange. Budget: one message per rank, all in one round.
#
# <details><summary>Hint: it still hangs</summary>
# Start <em>both</em> messages before the first <code>.wait()</code>.
# </details>


# %% tags=["exercise"] exercise="collectives-2"
def pass_right(x):
    """Send x to the right neighbor; return the tensor of the left one, a new tensor."""
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
# **If every rank starts its send and its receive of a step before it waits for either, the step
# cannot deadlock.** (With NCCL, start both together, by `batch_isend_irecv`.)
#
# ## 3 Reduce-scatter on a ring
#
# The reduce of section 1 sums tensors, but every message carries all $n$ bytes, and in its last
# round only two ranks are busy. With the exchange of section 2, all ranks can be busy in every
# step. For this, we cut the tensor into $p$ *shards*. Then each rank can add numbers of a different
# shard at the same time.
#
# Each of 4 ranks holds a gradient of $n$ bytes, cut into 4 shards. After a **reduce-scatter**, rank
# $r$ holds shard $r$ of the *sum*. In each step, every rank sends one shard to its right neighbor.
# The receiver adds its own numbers to this shard, and sends the result on in the next step. What
# fraction of $n$ does each rank send in total?

# %% tags=["predict"]
guess_part = predict("bytes each of 4 ranks sends, as a fraction of n (like 1/2)")
### GUESS guess_part.commit("1/4")


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


# %% tags=["picture"]
parts = ranks.run(lambda rank: ring_reduce_scatter(torch.full((4,), 10.0**rank)).tolist())
print("sum of 1, 10, 100 and 1000, in shards:", parts)
sent = sum(e.num_bytes for e in ranks.events if (e.rank, e.kind) == (0, "send"))
reveal(guess_part, sent / 16)  # x was 4 numbers of 4 bytes
wires.reduce_scatter_steps(4)

# %% [markdown]
# Follow one shard in the picture. In every step, one more rank adds its numbers, so after $p-1$
# steps the shard contains the numbers of all $p$ ranks. In each of these steps, every rank sends
# one message, a shard of $n/p$ bytes. A rank therefore sends
# $(p-1)\cdot\frac{n}{p}=\frac{p-1}{p}\,n$ bytes in total.
#
# In the code, the indices decide which shard travels when, and they are easy to get wrong.
#
# **Break it.** Here one index is off by one: a rank adds what arrives to the shard that it has just
# sent, not to the one that it will send next. Rank $r$ contributes $10^r$, so each digit of a sum
# shows how often one rank was counted. `fault=0` corrects the index.


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
# The sums are wrong, but no error is raised: shapes, message counts and partners are all right.
# Choose test inputs that reveal who was counted, such as powers of ten.
#
# ### Exercise 3 (core): all-gather
# *Difficulty 2 of 5, importance 5 of 5, about 15 minutes and 4 lines.*
#
# Now every rank has one shard, and all ranks need all shards, in rank order: shards `[1]`, `[10]`
# and `[100]` become `[1, 10, 100]` on every rank. Use the same ring, but store what arrives instead
# of adding it, and send it on in the next step. This is the second half of an all-reduce, and FSDP
# (lesson 10) gathers its parameters this way. Budget: $p-1$ messages per rank, each of one shard,
# to the right neighbor only.
#
# <details><summary>Hint: zeros are left over</summary>
# In step 1, you send your own shard; in step 2, the shard that came in step 1.
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
# **On a ring, a reduce-scatter or an all-gather sends $\frac{p-1}{p}\,n$ bytes per rank, in $p-1$
# steps.**
#
# ## 4 All-reduce
#
# After a reduce-scatter, each rank has only one shard of the sum. Data-parallel training needs
# more: every rank needs the complete sum of all gradients. This is an **all-reduce**. We already
# have both halves of it: a reduce-scatter computes the sum in shards, and an all-gather gives all
# shards to all ranks. Each half sends $\frac{p-1}{p}\,n$ bytes per rank, so the all-reduce sends
# twice as many. If $p$ grows from 4 to 4,000, by what factor do the bytes of *each rank* grow?

# %%
from course_lib.collectives import ring_all_gather, ring_reduce_scatter


def ring_all_reduce(x):
    return ring_all_gather(ring_reduce_scatter(x), out=x)


def bytes_per_rank(p):
    return 2 * (p - 1) / p  # in n


growth = bytes_per_rank(4000) / bytes_per_rank(4)
print(f"with 4,000 ranks, each sends {growth:.2f} times the bytes that it sends with 4")


# %%
def sent_by_rank_0(p, n=4 * 1200):
    with Ranks(p) as few:
        few.run(lambda rank: ring_all_reduce(torch.zeros(n // 4)))
        return sum(e.num_bytes for e in few.events if (e.rank, e.kind) == (0, "send")) / n


for p in range(1, 7):
    print(f"{p} ranks: formula {bytes_per_rank(p):.3f} n, counted {sent_by_rank_0(p):.3f} n")

# %% [markdown]
# The bytes per rank hardly grow, because each half sends less than $n$ bytes, however many ranks
# there are. What does grow with $p$ is the number of steps, and each step costs a latency.
#
# ### Exercise 4 (core): the mean
# *Difficulty 1 of 5, importance 5 of 5, about 5 minutes and 2 lines.*
#
# Data parallelism needs the *mean* of the gradients. Replace x by its mean over all ranks, in
# place: 1, 10, 100 and 1000 become 277.75 everywhere. Call `ring_reduce_scatter` and then
# `ring_all_gather(shard, out=x)`, which writes the shards of all ranks into x. Both work for any
# length (10 floats on 4 ranks are shards of 3, 3, 2 and 2). Budget: $2(p-1)$ messages per rank,
# without padding.
#
# <details><summary>Hint: where does the division belong?</summary>
# Divide where the sum is complete and still small: between the two halves, on one shard.
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
# Can another algorithm send fewer bytes? Count how often a number has to be sent for one element of
# the tensor. Before any rank can know the sum of this element, each of the $p-1$ other ranks has to
# send its contribution: at least $p-1$ transfers. After that, these $p-1$ ranks still have to
# receive the sum: at least $p-1$ more. So for all elements, all ranks together send at least
# $2(p-1)\,n$ bytes, which is $2\frac{p-1}{p}n$ per rank on average. Patarasuk and Yuan (2009) prove
# this bound, and the ring reaches it. It does not hold if the network itself can add (section 5,
# NVLS).
#
# **All-reduce = reduce-scatter + all-gather. On a ring, it sends $2\frac{p-1}{p}\,n$ bytes per rank
# in $2(p-1)$ steps, and no algorithm sends fewer bytes in total, as long as only ranks add.**
#
# *A good place for a break.*
#
# ## 5 Fewer messages
#
# A ring sends the fewest bytes, but in many messages. In each of its $2(p-1)$ steps, a rank sends
# $n/p$ bytes, so a ring takes $2(p-1)(\alpha+\frac{n}{p\beta})$ seconds. For a small tensor, almost
# all of this time is latency. Can an all-reduce do with fewer messages?
#
# **Recursive doubling** can. Each rank exchanges its sum with the rank 1 away, then with the rank 2
# away, then 4 away, and adds what it receives. After the first round, each sum contains the
# contributions of 2 ranks, after the second of 4, then of 8. If $p$ is a power of two, every rank
# has the whole sum after $\log_2{p}$ rounds. But each round sends the whole tensor, so the time is
# $\log_2{p}\,(\alpha+n/\beta)$. (In the code, `rank ^ 4` flips one bit of the rank's number. This
# gives the partner 4 away.)
#
# So doubling is faster for small tensors, and the ring for large ones. Four ranks communicate over
# an emulated slow wire. From which size on is the ring faster?


# %%
def doubling_all_reduce(x):
    rank, p = dist.get_rank(), dist.get_world_size()  # p = 2, 4, 8, ...
    for k in range((p - 1).bit_length()):
        incoming = torch.empty_like(x)
        exchange(x, rank ^ 2**k, incoming, rank ^ 2**k)
        x += incoming
    return x


wire = Link(name="slow wire", latency_s=10e-3, bytes_per_s=20e6)
print(f"over a {wire}, the ring is faster from {network.crossover_bytes(4, wire) / 1e6:g} MB on")

# %% [markdown]
# To find this size, set both times equal. With $p=4$, the ring takes
# $6\alpha+\frac{6}{4}\frac{n}{\beta}$, and doubling takes $2\alpha+2\frac{n}{\beta}$. They are
# equal if $4\alpha=\frac12\frac{n}{\beta}$, that is, if $n=8\alpha\beta$. The product $\alpha\beta$
# is the number of bytes that a wire could carry during one latency.
#
# Recursive doubling saves messages, and the ring saves bytes. **Halving-doubling** (Thakur,
# Rabenseifner and Gropp 2005) saves both. It is again a reduce-scatter and an all-gather:
#
# 1. *Halving.* In the first round, two partners both hold all of x. Each becomes responsible for
#    one half: it sends the other half to its partner, and adds what it receives to its own half. In
#    the next round, it halves this part again, with another partner. So the messages shrink: $n/2$,
#    $n/4$ and so on. After $\log_2{p}$ rounds, each rank has the sum of one shard.
# 2. *Doubling.* The same partners meet in reverse order, and send each other the parts whose sums
#    they have. So these parts double in every round, until each rank has the sum of all of x.

# %% tags=["picture"]
wires.halving_doubling_steps(4)

# %% [markdown]
# The halving rounds send $\frac{n}{2}+\frac{n}{4}+\dots+\frac{n}{p}$ bytes. This sum is
# $n-\frac{n}{p}=\frac{p-1}{p}n$, because each term is half of what was left before. The doubling
# rounds send the same again. So each rank sends $2\frac{p-1}{p}n$ bytes, as on a ring, but in only
# $2\log_2{p}$ messages.
#
# ### Exercise 5 (further): all-reduce by halves
# *Difficulty 4 of 5, importance 3 of 5, about 25 minutes and 10 lines.*
#
# Sum the one-dimensional x over all ranks, in place, by halving and doubling, for $p=1,2,4,8\dots$
# The partners are `rank ^ 1`, `rank ^ 2`, `rank ^ 4` and so on. If the part has an odd length, its
# halves differ in length; `tensor_split(2)` handles this. On 4 ranks, `[1, 1]`, `[10, 10]`,
# `[100, 100]` and `[1000, 1000]` all become `[1111, 1111]`. MPI libraries use this algorithm for
# large tensors. Budget: $2\log_2{p}$ messages and, on average, $2\frac{p-1}{p}n$ bytes per rank.
#
# <details><summary>Hint: which half do I keep?</summary>
# Partners differ in bit $k$ of their rank. If <code>rank & 2**k</code> is not 0, keep the high
# half.
# </details>
# <details><summary>Hint: right on 2 ranks, wrong on 4</summary>
# The doubling starts with the <em>last</em> partner. Append partner and halves of each round to a
# list, and go through it backwards.
# </details>


# %% tags=["exercise"] exercise="collectives-5"
def all_reduce_by_halves(x):
    """Replace x by its sum over all ranks, in place, and return it; p is 1, 2, 4, 8 ..."""
    rank, p = dist.get_rank(), dist.get_world_size()
    part, halvings = x, []  # the part of x that this rank still has to sum
    ### BEGIN SOLUTION: halve your part and add, log2(p) times; then send the sums back
    for k in range((p - 1).bit_length()):
        partner = rank ^ 2**k
        low, high = part.tensor_split(2)  # views of x
        part, given = (high, low) if rank & 2**k else (low, high)
        incoming = torch.empty_like(part)
        exchange(given, partner, incoming, partner)
        part += incoming
        halvings.append((partner, part, given))
    for partner, mine, theirs in reversed(halvings):
        exchange(mine, partner, theirs, partner)
    ### END SOLUTION
    return x


# %% tags=["check"] exercise="collectives-5"
check("collectives-5", all_reduce_by_halves)


# %% tags=["picture", "measured"]
from course_lib.collectives import halving_doubling_all_reduce, ring_all_reduce

sizes = [2**k for k in range(14, 23, 2)]
rivals = {"ring": ring_all_reduce, "doubling": doubling_all_reduce}
rivals["halving-doubling"] = halving_doubling_all_reduce
times_s = lab.race(Ranks(4, link=wire), rivals, sizes)
ring, doubling, halving = ([min(times) for times in by_size] for by_size in times_s.values())
claim("doubling is fastest at 16 KiB", doubling[0] < min(ring[0], halving[0]))
claim("halving-doubling beats the ring at 256 KiB", halving[2] < ring[2])
claim("halving-doubling beats doubling at 4 MiB", halving[4] < doubling[4])
show(*wires.all_reduces(sizes, 4, wire, times_s))

# %% tags=["picture"]
print(wires.costs_table(8))
wires.explore_all_reduces()  # it starts from H100's NVLink: 450 GB/s; we assume 3 us

# %% [markdown]
# In this model, for every $p\ge4$ that is a power of two, recursive doubling is the fastest of the
# three for small tensors, and halving-doubling for larger ones. The ring is never the fastest: it
# sends as many bytes as halving-doubling, in more messages. (At $p=2$, these two are equal.)
#
# Why, then, do libraries build rings? Because real machines differ from the model in four ways:
#
# - **Shared links.** The model gives each pair of ranks a wire of its own. Suppose instead that 8
#   ranks are wired in a circle. Then a message to the rank 4 away passes over four wires. If every
#   rank sends such a message, and all go round to the right, each wire carries four of them at
#   once. (The table's last column adds up the bytes on the busiest wire of each step.) In a ring,
#   each message passes over one wire only. Patarasuk and Yuan (2009) design their ring so that no
#   two messages share a link, on almost all clusters of that time.
# - **Topology.** A ring can follow the machine: it enters and leaves each node once.
# - **Pipelining.** A rank of a ring has the same neighbors in all steps, so it can cut its shards
#   into small pieces and add one piece while the next one arrives.
# - **Any $p$.** If $p$ is not a power of two, a ring needs no extra rounds.
#
# NCCL, the collectives library for NVIDIA GPUs, chooses among several algorithms by size and
# topology:
#
# - **Rings:** several at once, over different links (Hu et al. 2025).
# - **Double binary trees** across nodes: two trees over the same nodes, each of which sums half of
#   the tensor. In a tree, an inner node sends and receives more than a leaf. So the trees are built
#   such that, with an even number of nodes, each node is a leaf in one tree and an inner node in
#   the other. This balances the load, and the depth of both trees grows only with the logarithm of
#   the number of nodes (Sanders, Speck and Träff 2009; Jeaugey 2019).
# - **NVLS** (NVLink SHARP, from H100 on): the NVLink switch itself adds.
#
# `course_lib`'s `all_reduce` chooses doubling or ring by size.
#
# ### Two levels of links
#
# On a cluster, links inside a node are faster than links between nodes. In each step of a ring, a
# rank needs the shard that arrived in the step before, so the whole ring runs at the speed of its
# slowest link. On two nodes of two ranks, only one rank of each node sends to the other node, and
# the other ranks wait for it in every step.
#
# A **hierarchical** all-reduce uses the slow links less:
#
# 1. A reduce-scatter inside each node: each rank gets a part of the node's sum.
# 2. An all-reduce *across* nodes: each rank sends only its part, through a link of its own.
# 3. An all-gather inside each node.
#
# How much faster is this? Count the steps that use a slow link, on 4 ranks. The ring has $2(p-1)=6$
# steps, and in each of them a shard of $n/4$ bytes crosses between the nodes. In the hierarchical
# all-reduce, each rank all-reduces its half of the tensor with one partner on the other node. This
# takes two steps, with $n/4$ bytes each. So the slow links are used in 2 steps instead of 6, and
# the hierarchical all-reduce is up to 3 times as fast. The formula gives less than 3, because the
# steps inside the nodes take time, too.

# %%
inside = Link(name="fast wire", latency_s=1e-3, bytes_per_s=200e6)
two_nodes = TwoLevelLink(inside=inside, outside=wire, ranks_per_node=2)
ring_s = network.ring_all_reduce_s(sizes[-1], 4, two_nodes)
levels_s = network.hierarchical_all_reduce_s(sizes[-1], 4, two_nodes, ranks_per_node=2)
print(f"formula, 4 MiB: two levels are {ring_s / levels_s:.1f} times as fast; {two_nodes}")

# %% tags=["picture", "measured"]
from course_lib.collectives import hierarchical_all_reduce

rivals = {"ring": ring_all_reduce}
rivals["hierarchical"] = lambda x: hierarchical_all_reduce(x, ranks_per_node=2)
times_s = lab.race(Ranks(4, link=two_nodes), rivals, sizes)
flat_s, levels_s = (min(times[-1]) for times in times_s.values())  # 4 MiB
claim("two levels are at least 1.8 times as fast at 4 MiB", flat_s > 1.8 * levels_s)
show(*wires.two_levels(sizes, 4, two_nodes, times_s))

# %% [markdown]
# The measured ring is faster than its formula, so the measured ratio is smaller. The formula takes
# one step after the other, but in `course_lib` a rank can start its next slow message during the
# latency of the last one.
#
# **For small tensors, count messages. For large tensors, count bytes: on the slowest link, and on
# links that messages share.**
#
# ## 6 This machine
#
# So far, we chose $\alpha$ and $\beta$ ourselves, and emulated the link. To apply the formulas to a
# real machine, we have to measure both. Two processes on your machine exchange tensors as in a
# ring, without emulation. We fit $\alpha$ and $\beta$ to the times, and use them to predict how
# long our ring takes. Beside it, we measure gloo, PyTorch's backend for CPUs. These messages never
# leave your machine. How large is their latency?

# %% tags=["predict"]
guess_alpha = predict("alpha of this machine", unit="us")
### GUESS guess_alpha.commit(50)


# %% tags=["measured"]
def swaps(rank, num_bytes):
    mine, theirs = torch.ones(2, num_bytes, dtype=torch.uint8)
    ends_s = []
    for _ in range(15):
        exchange(mine, 1 - rank, theirs, 1 - rank)
        ends_s.append(time.perf_counter())
    return [end_s - start_s for start_s, end_s in pairwise(ends_s)][4:]  # the first warm up


pair, sizes = Ranks(2), [2**k for k in range(10, 25, 2)]
fastest_s = [min(pair.run(swaps, n)[0]) for n in sizes]  # slower ones waited for a core
here = bandwidth.fit_link(sizes, fastest_s, name="this machine")
reveal(guess_alpha, here.latency_s * 1e6)
print(f"fitted to the fastest exchange of each size: {here}")

# %% tags=["picture", "measured"]
sizes = [2**k for k in range(16, 26, 3)]
times_s = lab.race(pair, {"our ring": ring_all_reduce, "gloo": dist.all_reduce}, sizes, 9)
predicted_s = [network.ring_all_reduce_s(n, 2, here) for n in sizes]
show(*wires.ring_on_this_machine(sizes, times_s, predicted_s))

# %% [markdown]
# The latency is not the time of a signal in a wire. It is the time of the software: Python, PyTorch
# and the operating system all work before the first byte arrives.
#
# The prediction comes from the *fastest* exchange of each size, so it leaves out the time that a
# process waits for a core. It also leaves out the time for adding, as the model does. So measured
# times may lie above it.
#
# **Two numbers, fitted to messages between two ranks, predict roughly how long a collective takes
# on the same links, if its ranks do not wait for other work.**
#
# ## 7 How fast is the wire?
#
# Two ranks of your own are easy to measure. On a cluster, you will usually not fit $\alpha$ and
# $\beta$, but run a benchmark. How do you see from its output whether the network is as fast as it
# should be?
#
# The obvious quotient $n/t$, bytes of the tensor divided by time, is misleading. A rank of a ring
# sends $2\frac{p-1}{p}n$ bytes, not $n$. This number grows with $p$, so $n/t$ falls when $p$ grows,
# even on a perfect wire. Benchmarks therefore print a *bus bandwidth*: the bytes that a rank of a
# ring sends, divided by the time. For an all-reduce, it is $2\frac{p-1}{p}$ times $n/t$. The next
# cell computes it for 8 A100, on which Bekman (*Machine Learning Engineering*, network) measured
# 128 ms for an all-reduce of 16 GiB.

# %%
n, time_s, p = 2**34, 0.127997, 8  # nccl-tests; stas00/ml-engineering@744d01e
factor = bandwidth.bus_factor("all_reduce", p)  # 2 (p - 1) / p: what a rank sends, in n
print(f"n / t is {n / time_s / 1e9:.0f} GB/s; bus bandwidth: {factor} times as much, ", end="")
print(f"{factor * n / time_s / 1e9:.0f} GB/s")

# %% [markdown]
# An A100's NVLink carries 300 GB/s in each direction, so this all-reduce uses most of it. Bekman
# ran a similar benchmark on 8 H200, whose NVLink carries 450 GB/s in each direction (half of the
# data sheet's 900). Which bus bandwidth did it print for 16 GiB?

# %% tags=["predict"]
guess_bus = predict("bus bandwidth on 8 H200, whose link carries 450 GB/s", unit="GB/s")
### GUESS guess_bus.commit(400)

# %% tags=["picture"]
from course_lib.cost.published import rows

on_h200 = [row for row in rows("bandwidth") if row["hardware"] == wires.H200]
reveal(guess_bus, float(on_h200[-1]["value"]))  # the last row is the largest size, 16 GiB
show(*wires.published_by_size())
show(*wires.published_by_nodes())

# %% [markdown]
# How can a GPU send more than its link carries? It does not. With NVLS the switch adds, and a GPU
# sends only $\frac{p+1}{p}n$ bytes (Jeaugey 2023, NCCL's GitHub issue 1083). The benchmark does not
# know this, and still counts the $2\frac{p-1}{p}n$ bytes of a ring. Without NVLS, Bekman measured
# 368 GB/s.
#
# The first picture shows how the bus bandwidth grows with the size. NCCL has several protocols (Hu
# et al. 2025), so one $\alpha$ and one $\beta$ describe it only roughly.
#
# In the second picture, the bandwidth falls with the number of nodes. Tazi et al. (2025, *The
# Ultra-Scale Playbook*, pipeline parallelism) explain this by the slower network between nodes. The
# line is our formula for one ring whose links are all equal. It falls, too, because a longer ring
# has more latencies, but it falls more evenly.
#
# **Bus bandwidth = the bytes that each rank of a ring would send, divided by the time. Compare it
# with a link's bandwidth in one direction only if the algorithm is a ring.**
#
# ## 8 The whole family
#
# The factor $2\frac{p-1}{p}$ is that of an all-reduce. What do the other collectives send? We have
# built broadcast, reduce, reduce-scatter, all-gather and all-reduce. A few more complete the list.
# The fourth column gives the bytes that a rank sends.
#
# | call | before | after | sent by a rank | backward |
# |---|---|---|---|---|
# | `broadcast` | root: x | all: x | up to $n$ per round | `reduce` |
# | `reduce` | all: x | root: sum | $n$, once | `broadcast` |
# | `scatter` | root: x | $r$: shard $r$ | root $\frac{p-1}{p}n$ | `gather` |
# | `gather` | $r$: shard $r$ | root: x | $\frac{1}{p}n$ | `scatter` |
# | `all_gather` | $r$: shard $r$ | all: x | $\frac{p-1}{p}n$ | `reduce_scatter` |
# | `reduce_scatter` | all: x | $r$: shard $r$ of sum | $\frac{p-1}{p}n$ | `all_gather` |
# | `all_reduce` | all: x | all: sum | $2\frac{p-1}{p}n$ | `all_reduce` |
# | `all_to_all` | $r$: one for each | $r$: one from each | $\frac{p-1}{p}n$ | `all_to_all` |
# | `barrier` | | no rank returns before all have called it | about 0 | |
#
# The last column matters when a collective is part of a model, as in tensor parallelism. It names
# the call that computes the gradients in the backward pass, if the loss is the **sum of the losses
# of all ranks**. The rule is the one of any autograd graph. Where forward copies a tensor, backward
# sums the gradients of the copies. Where forward sums tensors, backward copies the gradient to
# every term of the sum.
#
# `all_reduce` does both. It sums, and it gives a copy of the sum to every rank. So a rank's x
# influences the losses of all ranks. The gradient of x is therefore the sum of the gradients that
# all ranks have for their copies: another all-reduce. It is different if all ranks compute *the
# same* loss and it counts once. Then the backward of `all_reduce` is the identity. Lesson 07 shows
# both cases.
#
# **In the backward pass, a collective that copies becomes one that sums, and the reverse. Say first
# whether the ranks' losses are added.**
#
# ### Exercise 6 (further): all-to-all
# *Difficulty 3 of 5, importance 4 of 5, about 15 minutes and 4 lines.*
#
# Shard $s$ of rank $r$ goes to rank $s$, which stores it in place $r$. For two ranks with `[1, 2]`
# and `[10, 20]`, rank 0 returns `[1, 10]` and rank 1 returns `[2, 20]`. Mixture-of-experts models
# send tokens to their experts this way. Shards are cut along the first dimension of x. In every
# step, each rank should send to one rank and receive from one. Budget: $p-1$ messages per rank,
# each of one shard, in $p-1$ rounds.
#
# <details><summary>Hint: who sends to whom, and when?</summary>
# In step 1, send to your right neighbor and receive from your left one; in step 2, use the ranks 2
# away.
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
# ## 9 The wrong order
#
# All collectives of the table share one rule: all ranks have to make the same calls in the same
# order. In section 2, a wrong order of messages made the ranks hang, and a hang is hard to miss.
# What happens if collectives are called in a wrong order? If the kinds or the shapes of two calls
# differ, the course's ranks raise an error. In the next cell, kinds and shapes are equal, but rank
# 0 sums the loss first, and the other ranks sum the gradient first. Will there be an error?

# %% tags=["predict"]
guess_order = predict("same shapes in another order: will there be an error?", choices=YES_NO)
### GUESS guess_order.commit("yes")


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
# There is no error. Each rank's first call is combined with the first calls of the others, so rank
# 0's loss was added to the others' gradients, and its gradient to their losses. The course's ranks
# at least print `swapped`; NCCL and gloo by default print nothing. A comparison with a run on one
# rank finds such a mistake with every backend.
#
# **All ranks of a group have to make the same collective calls in the same order. A library can
# detect only some violations.**
#
# ## What to keep
#
# - A message takes $\alpha+n/\beta$ seconds. A ring sends few bytes, doubling few messages, and
#   halving-doubling few bytes in few messages (for $p$ a power of two).
# - All-reduce = reduce-scatter + all-gather: less than $2n$ bytes per rank on a ring, for any $p$.
# - Start both sides of an exchange before you wait; make the same calls in the same order.
#
# ## The same on a cluster
#
# `cluster/exercises/04_collectives.py` repeats section 6 on any number of nodes. Messages to the
# last rank and back give $\alpha$ and $\beta$; then the program times collectives. Which of
# $\alpha$ and $\beta$ changes on two nodes? Predict, then type into a terminal, in the course's
# folder:
#
# ```sh
# course submit 04 --nodes 2       # to your site's Slurm, else on this machine
# course logs -f 04_collectives-1  # follows the output until the job has ended
# course collect                   # copies its run records here: run the next cell
# ```
#
# <details><summary>Which of the two changes?</summary>
# Between nodes both are usually worse: a larger $\alpha$, a smaller $\beta$. If one machine
# simulates the nodes, neither changes.
# </details>
#
# ## Read on
#
# - Thakur, Rabenseifner, Gropp, *Optimization of Collective Communication Operations in MPICH*,
#   2005: trees, doubling and halving-doubling.
# - Patarasuk, Yuan, *Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations*, 2009:
#   the lower bound, and a ring without contention.
# - Sanders, Speck, Träff, *Two-Tree Algorithms for Full Bandwidth Broadcast, Reduction and Scan*,
#   2009; Jeaugey, *Massively Scale Your Deep Learning Training with NCCL 2.4*, 2019: double trees.
# - Hu et al., *Demystifying NCCL*, 2025 (arXiv 2507.04786): protocols, channels, rings and trees.
# - NVIDIA, nccl-tests, `doc/PERFORMANCE.md`: the factors of the bus bandwidth.

# %% tags=["picture", "measured"]
from course_lib.display import last_run, show, wire_run

records = last_run("04_collectives")  # of the newest job that was collected
if records:
    show(*wire_run(records))
