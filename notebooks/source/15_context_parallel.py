# %% [markdown]
# # 15 Context parallelism: one long sequence on many ranks
#
# **Question.** A batch can be split until every rank has one sequence. What if even one sequence is
# too long for a GPU? In a Transformer, only attention lets a token look at other tokens.
# How do several ranks compute it together, when each of them holds only a part of the sequence?
#
# *After this lesson you can*
#
# - compute softmax attention in parts, and merge the parts without overflow;
# - write ring attention, and say from which length on its messages are hidden;
# - balance a causal mask over the ranks;
# - swap tokens for heads with an all-to-all, as DeepSpeed-Ulysses does;
# - choose between a ring, Ulysses and an all-gather for a model, a length and a cluster.
#
# **Prerequisites:** lessons 04, 06, 07. **Time:** about 40 minutes to read and run, 50 for five
# exercises (core: 1, 2, 3, 5).
#
# | symbol | in code | meaning |
# |---|---|---|
# | $p$ | `p` | ranks that share one sequence: the context-parallel (CP) degree |
# | $b$, $s$ | `batch`, `seq` | sequences; tokens in each |
# | $n$ | | tokens of a sequence on one rank, $s/p$ |
# | $h$ | | values per token in the queries: heads times `head_dim` |
# | $h_{kv}$ | | the same of the keys: KV heads times `head_dim` |
# | $F$, $\beta$ | | FLOP/s of a GPU; bandwidth of a link in bytes/s (in papers often its inverse) |

# %%
# %load_ext course_lib.ranks
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.nn import functional as F

from course_lib.checks import check
from course_lib.context_parallel import lab, merge, pictures
from course_lib.context_parallel.cost import AttentionSizes
from course_lib.core import MODELS
from course_lib.display import claim, predict, reveal, show
from course_lib.ranks import Ranks

# %% [markdown]
# ## 1 Attention that does not fit
#
# Models are trained on longer and longer sequences: whole books, code repositories, hours of
# speech. Llama 3 was trained on sequences of up to 131,072 tokens (Grattafiori et al. 2024, section
# 3.4.2).
#
# Most of a layer does not care about the length. The projections and the MLP work on each token
# separately, so their FLOP per token stay the same. But each query is compared with all earlier
# keys, so the scores of a token cost FLOP in proportion to $s$. FlashAttention does not store the
# scores, but it has to compute them. In a Llama-8B with 4,096 tokens, the scores are only a few
# percent of a layer's FLOP. What fraction are they with 131,072 tokens?

# %% tags=["predict"]
from course_lib.context_parallel.cost import FORMS, kept_bytes
from course_lib.cost.flops import forward_flop

llama = MODELS["llama-8b"]


def share_of_scores(seq):
    flop = forward_flop(llama, 1, seq, causal=True)
    return flop["attention scores"] / (sum(flop.values()) - flop["logits"])


print(f"with 4,096 tokens: {share_of_scores(4096):.2f}")
guess_share = predict("share of the scores in a layer's FLOP with 131,072 tokens (like 0.2)")
### GUESS guess_share.commit(0.2)

# %%
reveal(guess_share, share_of_scores(131072))
of_llama = AttentionSizes(seq=131072, num_heads=32, kv_heads=8, head_dim=128)
for p in (1, 16):
    gib = kept_bytes(of_llama, p, "ring") / 2**30
    print(f"on {p} ranks: {gib:.2f} GiB per layer, {gib * llama.num_layers:.0f} in all layers")

# %% [markdown]
# At this length attention is most of the work. It also needs memory. For backward, FlashAttention
# keeps the queries, keys, values, outputs, and one number per query and head (section 2). In all
# layers together they need as much memory as an H100 has, before a single weight is stored.
#
# The methods of the earlier lessons do not solve this. Data parallelism cannot split one sequence.
# Pipeline parallelism gives each stage some layers, but the whole sequence. Tensor parallelism
# splits attention by heads, but this model has only 8 key-value heads, and its all-reduces should
# stay inside a node (lesson 07). Recomputation (lesson 03) frees the memory, but not the time.
#
# So we split the sequence itself: each of $p$ ranks holds $n = s/p$ tokens through all layers. This
# is *context parallelism*. Norms, projections, MLP and loss need no change, because they treat each
# token separately. Only attention is left: a rank has the queries of its own tokens, but they need
# the keys and values of *all* tokens.
#
# **If a sequence is split over ranks, only attention has to communicate, and at long lengths
# attention is most of the work.**
#
# ## 2 Softmax in parts
#
# The simplest solution would send all keys and values to all ranks. But then each rank would have
# to hold the keys and values of the whole sequence again. Can a rank attend first to one part of
# the keys, then to the next, and forget each part afterwards? This is not obvious, because the
# weights of attention come from a softmax over *all* keys.
#
# Take one query and four keys, with the scores 1, 1, 3, 3 and the values 0, 20, 10, 30. The first
# two keys are on rank A, the last two on rank B. Each rank computes attention over its own two
# keys. The scores on a rank are equal, so its output is a mean: 10 on rank A, 20 on rank B. What is
# the output over all four keys?

# %% tags=["predict"]
scores, values = torch.tensor([1.0, 1.0, 3.0, 3.0]), torch.tensor([0.0, 20.0, 10.0, 30.0])
guess_merged = predict("attention over all four keys")
### GUESS guess_merged.commit(15)


# %%
def attend(z, v):
    """Softmax attention of one query: its output, and the sum of the exponentials."""
    total = z.exp().sum()
    return ((z.exp() @ v) / total).item(), total.item()


for name, keys in {"rank A": slice(0, 2), "rank B": slice(2, 4), "all": slice(0, 4)}.items():
    o, total = attend(scores[keys], values[keys])
    print(f"{name:6} output {o:5.2f}, sum of exponentials {total:5.2f}")
reveal(guess_merged, o)

# %% [markdown]
# The plain mean, 15, is wrong, because the keys of B have higher scores. A part has to return not
# only *what* it found, but also *how much it weighs*. With scores $z_j$ and values $v_j$, part A
# returns
#
# $$ o_A = \frac{1}{Z_A} \sum_{j \in A} e^{z_j} v_j, \qquad Z_A = \sum_{j \in A} e^{z_j} . $$
#
# So $Z_A o_A$ is the numerator of A. Over all keys, numerators and denominators add up:
#
# $$ o = \frac{Z_A\, o_A + Z_B\, o_B}{Z_A + Z_B} . $$
#
# The weights of the two parts are $Z_A/(Z_A + Z_B)$ and $Z_B/(Z_A + Z_B)$. But $Z$ overflows
# easily: $e^{89}$ is already infinite in fp32. So one keeps its logarithm $\ell = \log Z$, called
# **lse** (log-sum-exp). Then
#
# $$ \ell = \log\left(e^{\ell_A} + e^{\ell_B}\right), \qquad
# o = e^{\ell_A - \ell}\, o_A + e^{\ell_B - \ell}\, o_B . $$
#
# Both exponents are at most 0, so nothing overflows. The merged pair $(o, \ell)$ has the same form
# as the two that went in, so it can be merged with a third part, in any order. The order changes
# only the last bits. FlashAttention merges tiles of keys in the same way *inside* a GPU (Dao et al.
# 2022, section 3.1). It keeps the largest score $m$ and the sum $Z e^{-m}$; together they give
# $\ell = m + \log(Z e^{-m})$.
#
# ### Exercise 1 (core): merge two parts
#
# *Difficulty 2 of 5, importance 5 of 5, about 5 minutes.*
#
# Ring attention consists of such merges. Merge the attention of the same queries to two sets of
# keys: `o` has the shape `[..., n, head_dim]`, `lse` `[..., n]`. Return the merged `o` and `lse`.
# Example: o = 10 and 20 with lse = 0 and 0 become o = 15, lse = 0.69. Where a query has seen no key
# of a part, its lse is -inf, and the part counts nothing; if both are empty, return o = 0 and lse =
# -inf. About 4 lines.
#
# <details><summary>Hint: inf or nan</summary>
# <code>torch.logaddexp</code> computes log(exp a + exp b) without overflow. For a query with two
# empty parts, <code>lse - both</code> is -inf + inf = nan: replace this <code>both</code> by 0
# first.
# </details>


# %% tags=["exercise"] exercise="context_parallel-1"
def merge_parts(o1, lse1, o2, lse2):
    """Merge the attention of the same queries to two sets of keys."""
    ### BEGIN SOLUTION: the lse of both, then the weight of each part
    both = torch.logaddexp(lse1, lse2)
    safe = both.masked_fill(both == -torch.inf, 0.0)
    weight1, weight2 = (lse1 - safe).exp(), (lse2 - safe).exp()
    return weight1[..., None] * o1 + weight2[..., None] * o2, both
    ### END SOLUTION


# %% tags=["check"] exercise="context_parallel-1"
check("context_parallel-1", merge_parts)

# %% [markdown]
# **Attention over a part of the keys returns an output and an lse. Two such pairs merge into one,
# exactly and in any order, so no rank has to hold all keys.**
#
# ## 3 A ring
#
# Now every rank can work through the keys of all others, one block after another. Who sends which
# block when? If all ranks began with the block of rank 0, then rank 0 would have to send it to all
# of them at once. *Ring attention* (Liu, Zaharia and Abbeel 2023) uses the pattern of lesson 04
# instead: in each step, a rank computes with the keys and values that it has, and sends this same
# block to its right neighbor. Queries stay where they are.

# %% tags=["picture"]
show(*pictures.ring_blocks(4))

# %% [markdown]
# (Section 4 explains the pale blocks. First we leave out the mask.) After $p$ steps each query has
# seen all keys. Besides its own block, which it keeps for backward, a rank never holds more than
# two blocks: the one it computes with, and the one that is arriving.
#
# ### Exercise 2 (core): the ring's forward
#
# *Difficulty 3 of 5, importance 5 of 5, about 15 minutes.*
#
# Return the attention of this rank's queries to the keys of all ranks, without a mask. `q`, `k`,
# `v` are `[batch, heads, n, head_dim]`, `n` the same everywhere. `attend(q, k, v)` returns `o` and
# `lse` for one block; `merge` is exercise 1's. Example: rank 2 of 4 attends to the blocks of ranks
# 2, 1, 0, 3. Budget: p - 1 times one message to the right with keys and values together
# (`torch.stack`), under way while `attend` computes; p calls of `attend`. About 12 lines.
#
# <details><summary>Hint: start a message, and wait later</summary>
# <code>dist.isend(block, to)</code> and <code>dist.irecv(coming, source)</code> start and return a
# handle; <code>handle.wait()</code> waits. Receive into a new tensor,
# <code>torch.empty_like(block)</code>: the old one is still being sent.
# </details>


# %% tags=["exercise"] exercise="context_parallel-2"
def ring_forward(q, k, v, attend):
    """Attend to the keys of all ranks: [batch, heads, n, head_dim]."""
    rank, p = dist.get_rank(), dist.get_world_size()
    ### BEGIN SOLUTION: p steps: start the messages, compute, merge, wait
    block, total = torch.stack([k, v]), None
    for step in range(p):
        works, coming = [], torch.empty_like(block)
        if step < p - 1:
            works = [dist.isend(block, (rank + 1) % p), dist.irecv(coming, (rank - 1) % p)]
        part = attend(q, *block)
        total = merge(*total, *part) if total else part
        for work in works:
            work.wait()
        block = coming
    return total[0]
    ### END SOLUTION


# %% tags=["check"] exercise="context_parallel-2"
check("context_parallel-2", ring_forward)

# %% [markdown]
# What does it cost? A rank sends $p - 1$ blocks of keys and values, each with $2\,b\,n\,h_{kv}$
# numbers and $n = s/p$:
#
# $$ 2\,b\,s\,h_{kv}\,\frac{p-1}{p} \text{ numbers in forward.} $$
#
# With more ranks, the computation of a rank shrinks, but the bytes that it sends do not. So why is
# a ring a good idea? Because its messages can be hidden. Compare computing and sending in one step.
# The scores of $n$ queries and $n$ keys take $2n^2h$ FLOP (all heads together), and weighting the
# values takes as many again. The next block has $2\,n\,h_{kv}$ numbers of 2 bytes. The message is
# hidden if computing takes at least as long as sending:
#
# $$ \frac{4\,n^2\,h}{F} \ge \frac{4\,n\,h_{kv}}{\beta}
# \quad\Longleftrightarrow\quad n \ge \frac{F}{\beta}\cdot\frac{h_{kv}}{h} . $$
#
# Computation grows with $n^2$, the message only with $n$. So if messages are exposed, a longer
# sequence hides them, and more ranks for the same sequence expose them. Grouped-query attention
# helps, too: in Llama-8B $h_{kv}/h$ is 1/4. The next cell sets $F$ to the peak of an H100.
# Attention that reaches only half of it computes longer, so it needs half the tokens.

# %%
from course_lib.context_parallel.cost import hides_from
from course_lib.cost.hardware import H100

for share in (1, 1 / 4):
    for link in ("NVLink", "InfiniBand NDR"):
        tokens = hides_from(H100.peak(), H100.links[link], kv_share=share)
        print(f"h_kv / h = {share:g}, {link}: hidden from {tokens:,.0f} tokens per rank on")

# %% [markdown]
# Backward needs the keys and values again, so they travel around the ring a second time. Behind
# each block follows its gradient: each rank adds the term of its own queries, and after a whole
# round the sum arrives at home. The weights of attention are not stored; they are computed again
# from the scores and the final lse, as FlashAttention does. `ring_attention` in the course's
# library has this backward pass. Does it compute what one process computes?

# %%
from course_lib.context_parallel import ring_attention, shard

torch.manual_seed(0)
QKV = [torch.randn(1, heads, 64, 16, dtype=torch.float64) for heads in (8, 4, 4)]


def attend_on_ranks(rank, form, layout="contiguous"):
    """Return how far this rank's outputs and gradients are from those of one process."""
    whole = [x.clone().requires_grad_() for x in QKV]
    own = [shard(x, rank, dist.get_world_size(), layout, dim=2).requires_grad_() for x in QKV]
    alone = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
    ours = form(*own, layout=layout)
    for o in (alone, ours):
        o.pow(2).sum().backward()
    pairs = [(alone, ours), *((a.grad, b.grad) for a, b in zip(whole, own, strict=True))]
    p = dist.get_world_size()
    return max((shard(a, rank, p, layout, dim=2) - b).abs().max().item() for a, b in pairs)


# %%
four = Ranks(4)
apart = max(four.run(attend_on_ranks, ring_attention))
print("output and gradients are those of PyTorch's attention in one process:", apart < 1e-12)

# %% [markdown]
# **A ring sends keys and values to the next rank while it computes with them. Without a mask, its
# messages are hidden from $n = (F/\beta)(h_{kv}/h)$ tokens per rank on.**
#
# ## 4 Why the last rank works longest
#
# Language models use a causal mask: a query sees only keys at its own position or earlier. With a
# *contiguous* layout, rank 0 holds the first $n$ tokens, and rank $p-1$ the last ones. Look at the
# picture of the ring again. Rank 0 has only early queries, so all blocks but its own are empty
# (pale). Rank 3 needs all four blocks. A good implementation skips empty blocks. How many times as
# fast as one rank are 4 ranks then, if messages take no time?

# %% tags=["predict"]
guess_speed = predict("speedup of causal attention on 4 ranks, contiguous")
### GUESS guess_speed.commit(4)

# %% tags=["picture"]
from course_lib.context_parallel.cost import contiguous_imbalance

reveal(guess_speed, 4 / contiguous_imbalance(4))
show(*pictures.causal_work(4))

# %% [markdown]
# Count in blocks, for a long sequence. (The picture has only 24 tokens, so its numbers differ a
# little.) A rank's own block is half full, so rank $r$ computes $r + \frac12$ blocks. All ranks
# together compute $p^2/2$, that is, $p/2$ on average. The last rank computes $p - \frac12$, and
# everyone waits for it:
#
# $$ \frac{p - 1/2}{p/2} = 2 - \frac1p \text{ times the balanced time.} $$
#
# With many ranks this is a factor of almost 2. (If a rank computes its own block whole and masks
# half of it afterwards, rank $r$ computes $r + 1$ blocks, and the factor is $p$ divided by
# $(p+1)/2$, that is, $2p/(p+1)$.)
#
# The remedy is to give each rank early *and* late tokens. Cut the sequence into $2p$ chunks. In the
# *zigzag* layout rank $r$ holds chunks $r$ and $2p - 1 - r$: an early one and its mirror image. The
# *striped* layout (Brandon et al. 2023) deals out single tokens: token $i$ goes to rank
# $i \bmod p$. Llama 3 used the zigzag (Grattafiori et al. 2024, section 3.3.2).
#
# ### Exercise 3 (core): which blocks are empty?
#
# *Difficulty 2 of 5, importance 4 of 5, about 8 minutes.*
#
# A ring with a zigzag computes such a list in each step. The keys of rank `source` have just
# arrived. Return the pairs `(query chunk, key chunk)` that a causal mask does not empty, as a list
# in any order. Example with p = 2: rank 0 holds chunks 0 and 3. With its own keys it computes
# (0, 0), (3, 0) and (3, 3); with those of rank 1, (3, 1) and (3, 2). About 3 lines.


# %% tags=["exercise"] exercise="context_parallel-3"
def blocks_of_step(rank, source, p):
    """The pairs (query chunk, key chunk) that `rank` computes with the keys of `source`."""
    ### BEGIN SOLUTION: the chunks of both ranks; which queries see which keys?
    queries, keys = (rank, 2 * p - 1 - rank), (source, 2 * p - 1 - source)
    return [(q, k) for q in queries for k in keys if k <= q]
    ### END SOLUTION


# %% tags=["check"] exercise="context_parallel-3"
check("context_parallel-3", blocks_of_step)

# %% [markdown]
# Whatever the two ranks, a step with foreign keys has exactly two full pairs out of four. The step
# with a rank's own keys has one full pair and two half ones, which is as much. So all ranks compute
# equally much, and not only in total, but *in every step*. This matters because in each step a rank
# waits for its neighbor's block.
#
# The causal mask removes half of the computation, but the messages are as long as before. So under
# a balanced causal mask, a ring needs twice as many tokens per rank as in section 3 to hide them.
#
# Does it hold on real ranks? The next cell measures for each rank how many seconds of a processor
# it used, in all three layouts. (Waiting does not count. The four ranks share the cores of your
# machine, so wall time would say little.) `show(*pictures.ring_on_the_clock(busy))` in a new cell
# draws the same runs on a clock, and a button saves them as a trace for Perfetto (lesson 06).

# %% tags=["picture", "measured"]
sizes = AttentionSizes(seq=1024, num_heads=4, kv_heads=4, head_dim=32, number_bytes=4)
busy = lab.measure_ring(four, sizes, turns=3)
least_s = [min(turns) for turns in busy["contiguous"].busy_s]
claim(
    "with a contiguous layout, the last rank works longer than the first", least_s[3] > least_s[0]
)
show(*pictures.busy_picture(sizes, 4, busy))

# %% [markdown]
# The measured ratio of the contiguous layout is nearer to 1 than that of the formula: copying
# messages and merging parts costs time, too, on all ranks. And the striped layout is balanced, but
# its ranks work longer. In it every block is half masked, and the library computes attention in
# tiles, of which it masks a part afterwards.
#
# **Under a causal mask, the last rank of a contiguous layout works $2 - 1/p$ times as long as the
# average, if no rank computes what is masked. Give each rank early and late tokens: a zigzag is
# balanced in every step.**
#
# *This is a good place for a break.*
#
# ## 5 A whole GPT, and one thing to break
#
# Attention works. What else in a GPT depends on where a token is? There are three places, and none
# of them raises an error when it is wrong.
#
# - **Positions.** Rank 1's first token is not the first token of the sequence. Rotary or learned
#   positions have to be the *global* ones. In a zigzag, a rank has two separate ranges of them.
# - **Targets.** The target of a token is the next token. For a chunk's last token, this is the
#   first token of the next chunk, which may be on another rank. So shift the targets *before* the
#   split.
# - **The loss.** The ranks hold different tokens and the same parameters, as in data parallelism,
#   so gradients are averaged over *dp and cp together*. Where ranks have different numbers of
#   targets (padding), weight the loss by tokens.
#
# `parallelize_context` takes care of the first, `shard_batch` of the second, and `context_loss` of
# the third. Then DDP (lesson 06) averages the gradients.

# %%
from course_lib.context_parallel import context_loss, parallelize_context, shard_batch
from course_lib.ddp import DDP
from course_lib.models import GPT, next_tokens, token_batch

tiny = replace(MODELS["tiny"], positions="rope")
drawn = [token_batch(n, batch=4, seq=64, vocab=tiny.vocab) for n in range(60)]
BATCHES = [next_tokens(tokens) for tokens in drawn]


# %%
def train(rank, prepare=parallelize_context):
    p = dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(prepare(GPT(tiny).double(), layout="zigzag"))
    sgd, losses = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), []
    for whole in BATCHES:
        tokens, targets = shard_batch(*whole, rank, p, "zigzag")
        sgd.zero_grad()
        loss = context_loss(model(tokens), targets)
        loss.backward()
        model.finish()
        sgd.step()
        losses.append(loss.detach())
    dist.all_reduce(total := torch.stack(losses))
    return (total / p).tolist(), sum(param.sum().item() for param in model.parameters())


# %% tags=["measured"]
one, pair = Ranks(1), Ranks(2)
(alone, _), (right, _) = (on.run(train)[0] for on in (one, pair))
apart = max(abs(a - b) for a, b in zip(alone, right, strict=True))
claim("the losses of one rank and of two never differ by more than 1e-8", apart < 1e-8)
print(f"60 steps in float64: the losses differ by at most {apart:.1e}")

# %% [markdown]
# ### Break it
#
# `parallelize_context` replaces the module that rotates queries and keys, `attention.turn`, by one
# that knows global positions. Undo this: then each rank counts 0, 1, 2, ... in its own shard.
# Everything else stays right, also the causal mask. In this model the first loss is about 5.5. What
# is the loss after 60 steps, divided by that of the correct run?

# %% tags=["predict"]
guess_loss = predict("last loss with positions that restart, divided by the correct one")
### GUESS guess_loss.commit(1.5)


# %%
def with_restarting_positions(model, layout):
    """Make a GPT context-parallel, but let positions begin with 0 in each shard."""
    parallelize_context(model, layout=layout)
    for block in model.blocks:
        block.attention.turn = block.attention.turn.rotary
    return model


# %% tags=["picture", "failure"]
from course_lib.display.losses import losses

(broken, a), (_, b) = pair.run(train, with_restarting_positions)
reveal(guess_loss, round(broken[-1] / right[-1], 3))
print(f"first loss {broken[0]:.2f}, last {broken[-1]:.2f}; weights of the ranks agree: {a == b}")
runs = {"one process": alone, "restarting positions": broken}
show(
    losses(runs, "With positions that restart in every shard, the loss still falls"), "Loss curves"
)

# %% [markdown]
# The loss falls as in the correct run, here even a little faster. No error is raised, and the ranks
# agree on the weights, so the usual checks see nothing. (In this synthetic text a token depends
# only on the one before it, so a model can do without most positions.) But the model has learned
# with wrong distances between many of its tokens. This shows only later, when somebody runs it on
# one GPU, where positions are right.
#
# How can it be found? Compare with one process, *before* training, in float64:

# %% tags=["failure"]
off = abs(broken[0] - alone[0])
print("first loss of the correct run is that of one process:", abs(right[0] - alone[0]) < 1e-12)
print(f"with restarting positions it is off by {off:.0e};", end=" ")
print("visible with the 8 bits of bf16:", off / alone[0] > 2**-8)

# %% [markdown]
# The difference is small, since the attention of an untrained model is almost uniform. But the
# rounding errors of float64 are at least a million times smaller than it. A comparison in bf16
# would not have shown it.
#
# In the course's trainer, all of this is one more axis of the mesh (lesson 11). Two ranks for each
# sequence, two for each layer, and FSDP over the ranks that hold the same parameters, which are
# those of dp and cp together:
#
# `python -m course_lib.train --mesh cp=2,tp=2 --strategy fsdp --cp-form ring --cp-layout zigzag`
#
# Its losses are those of one rank (`python -m course_lib.train`), up to the last bits.
#
# **Positions, targets and the weighting of the loss must be those of the whole sequence. A falling
# loss does not test this; a comparison with one process in float64 does.**
#
# ## 6 Ulysses: swap tokens for heads
#
# A ring needs a special attention that merges parts. Is there a form in which attention stays the
# usual one? Heads do not need each other (lesson 07). So before attention, let the ranks exchange:
# instead of *all heads of some tokens*, each rank gets *some heads of all tokens*. This is an
# all-to-all (lesson 04). Then each rank computes ordinary attention for its heads, with any mask
# and any kernel, and a second all-to-all turns the output back. DeepSpeed-Ulysses (Jacobs et al.
# 2023) does this. (DeepSpeed calls it *sequence parallelism*. Megatron's sequence parallelism, in
# lesson 07, is another method: it splits norms and dropout along tp.)

# %% tags=["picture"]
show(*pictures.tokens_to_heads(4))

# %% [markdown]
# ### Exercise 4 (further): two all-to-alls
#
# *Difficulty 3 of 5, importance 4 of 5, about 12 minutes.*
#
# Write both exchanges. `to_heads` gets this rank's tokens of all heads, `[batch, heads, n,
# head_dim]`, and returns all tokens, in rank order, of this rank's heads: `[batch, heads/p, n p,
# head_dim]`. Rank 0 gets the first heads. `to_tokens` does the reverse. Example with 2 ranks and
# one token each: rank 1 sends head 0 of token 1 to rank 0, and receives head 1 of token 0. Budget:
# one `all_to_all_single` each. About 8 lines.
#
# <details><summary>Hint: the wrong order</summary>
# <code>dist.all_to_all_single(into, x)</code> cuts <code>x</code> along dim 0 into p parts for p
# ranks, and returns those received in rank order. So bring the p parts to the front:
# <code>torch.stack(x.chunk(p, dim))</code>. Afterwards, <code>torch.cat(list(into), dim)</code>.
# </details>


# %% tags=["exercise"] exercise="context_parallel-4"
def to_heads(x):
    """[batch, heads, n, head_dim] -> [batch, heads/p, n p, head_dim]."""
    ### BEGIN SOLUTION: cut the heads, exchange, put the tokens together
    parts = torch.stack(x.chunk(dist.get_world_size(), dim=1))
    into = torch.empty_like(parts)
    dist.all_to_all_single(into, parts)
    return torch.cat(list(into), dim=2)
    ### END SOLUTION


def to_tokens(x):
    """[batch, heads/p, n p, head_dim] -> [batch, heads, n, head_dim]."""
    ### BEGIN SOLUTION: cut the tokens, exchange, put the heads together
    pieces = torch.stack(x.chunk(dist.get_world_size(), dim=2))
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces)
    return torch.cat(list(received), dim=1)
    ### END SOLUTION


def ulysses(q, k, v, attend):
    """Attention for this rank's tokens; `attend` is given all tokens of this rank's heads."""
    return to_tokens(attend(to_heads(q), to_heads(k), to_heads(v)))


# %% tags=["check"] exercise="context_parallel-4"
check("context_parallel-4", ulysses)

# %% [markdown]
# `dist.all_to_all_single` has no gradient of its own here. In the library's `ulysses_attention`,
# the backward of each exchange is the other one.
#
# Now the bytes. Ulysses exchanges four tensors: q, k, v and the output. A ring sends only two, k
# and v. How many bytes does a rank send with Ulysses in the forward pass of Llama-8B's attention on
# 8 ranks, divided by those of a ring?

# %% tags=["predict"]
guess_ulysses = predict("bytes sent with Ulysses divided by those with a ring, 8 ranks")
### GUESS guess_ulysses.commit(2)

# %% tags=["picture"]
sent = {form: count(of_llama, 8).forward for form, count in FORMS.items()}
reveal(guess_ulysses, sent["Ulysses"] / sent["ring"])
for p in (2, 4, 8):
    mib = ", ".join(
        f"{form} {count(of_llama, p).forward / 2**20:.0f}" for form, count in FORMS.items()
    )
    print(f"MiB sent by a rank on {p} ranks: {mib}")

# %% [markdown]
# In a ring, the keys of *all* tokens pass through each rank. In an all-to-all, a rank sends only
# what *it* holds, $1/p$ of each tensor, and keeps $1/p$ of that:
#
# $$ \underbrace{2\,b\,s\,h_{kv}\,\frac{p-1}{p}}_{\text{ring}}
# \qquad\text{and}\qquad
# \underbrace{(2h + 2h_{kv})\,\frac{b\,s}{p}\,\frac{p-1}{p}}_{\text{Ulysses}} . $$
#
# The ratio is $(1 + h/h_{kv})/p$. With more ranks it falls, which favors Ulysses; with fewer KV
# heads it rises, which favors the ring. But a ring can hide its messages, and Ulysses in this form
# cannot: attention begins when the exchange ends. And $p$ must divide the heads. With 8 KV heads,
# more than 8 ranks need copies of KV heads. Tensor parallelism uses up heads, too: with tp 8, each
# rank has only one KV head left.
#
# **Ulysses swaps tokens for heads, so attention itself is unchanged. A rank sends fewer bytes the
# more ranks there are, but without copies there can be only as many ranks as KV heads.**
#
# ## 7 All-gather: the simplest form
#
# Section 2 began with the simplest solution: gather all keys and values on each rank. We left it
# because of memory. Is that memory really too much? With grouped queries, keys and values are
# small. For one layer of Llama-8B with 131,072 tokens on 16 ranks:

# %% tags=["picture", "measured"]
for form in FORMS:
    gib = kept_bytes(of_llama, 16, form) / 2**30
    print(f"{form:10} keeps {gib:.2f} GiB for backward")
small = AttentionSizes(seq=256, num_heads=8, kv_heads=4, head_dim=16)
measured = {p: lab.measure_bytes(on, small) for p, on in {1: one, 2: pair, 4: four}.items()}
show(*pictures.bytes_picture(small, measured))

# %% [markdown]
# An all-gather keeps the keys and values of all tokens, so here about four times as much as a ring.
# That is still only a quarter of what one rank alone would keep (section 1). Without grouped
# queries, keys and values would be four times as large. Where memory is short, a rank can keep only
# its own keys and values, and gather again in backward. (Ulysses keeps a little more than a ring,
# since 16 ranks need copies of 8 KV heads.)
#
# The picture compares bytes, by formula and as counted on real ranks, for forward and backward
# together. In forward, the all-gather sends exactly the bytes of the ring. In backward it sends no
# keys and values again, because it has kept them, and a reduce-scatter sums their gradients.
#
# Llama 3 chose this form (Grattafiori et al. 2024, section 3.3.2), for two reasons. First, its
# sequences are packed documents, and a token must see its own document only. A rank that holds all
# keys can apply a mask of any shape in a single call of attention. (In the course's library
# `set_documents` does this for a whole GPT, with any of the three forms.) Second, with few KV heads
# the exposed communication is short. The next cell computes this for the 405B model: tp 8 leaves
# each rank 16 query heads and one KV head.

# %%
part = AttentionSizes(seq=131072, num_heads=16, kv_heads=1, head_dim=128)
gather_s = FORMS["all-gather"](part, 16).forward / H100.links["InfiniBand NDR"]
attention_s = lab.forward_s(part, 16, 0.5 * H100.peak(), float("inf"))["all-gather"]
print(f"all-gather {1e3 * gather_s:.1f} ms, attention at half the peak {1e3 * attention_s:.1f} ms")
for form in lab.ATTENTION.values():
    same = max(four.run(attend_on_ranks, form, "zigzag")) < 1e-12
    print(f"{form.__name__}, zigzag: the numbers of one process: {same}")

# %% [markdown]
# **An all-gather of keys and values sends what a ring sends in forward, does not overlap with
# attention in this form, and holds all keys. With few KV heads this is cheap, and any mask is
# easy.**
#
# ## 8 Which one when
#
# All three forms compute the same numbers. Which one is fastest depends on the model (heads and KV
# heads), the length, the number of ranks and the link.
#
# ### Exercise 5 (core): seconds of each form
#
# *Difficulty 3 of 5, importance 4 of 5, about 10 minutes.*
#
# Return a dict with the seconds of one layer's attention in forward: `"ring"`, `"all-gather"`, and
# `"Ulysses"` only if p divides `heads` and `kv_heads`. One sequence, bf16, a balanced causal mask
# (half of 4 s² h FLOP, divided over p ranks). All but the ring first send, then compute. A ring
# computes in p equal steps; in the first p - 1 it sends a block meanwhile, so a step takes the
# longer of the two. Example: with infinite bandwidth all forms take equally long. About 9 lines.
#
# <details><summary>Hint: bytes</summary>
# A block of one rank has 2 (s / p) h_kv numbers of 2 bytes, and a ring and an all-gather both send
# p - 1 of them. Ulysses: the formula of section 6.
# </details>


# %% tags=["exercise"] exercise="context_parallel-5"
def seconds_by_form(seq, p, heads, kv_heads, head_dim, flop_per_s, bytes_per_s):
    """Seconds of causal attention in forward, by form."""
    ### BEGIN SOLUTION: compute, send, and which of them overlap?
    compute_s = 2 * seq**2 * heads * head_dim / p / flop_per_s
    head_s = 2 * seq / p * head_dim / bytes_per_s  # one head of this rank's tokens
    block_s = 2 * kv_heads * head_s
    found = {"ring": (p - 1) * max(compute_s / p, block_s) + compute_s / p}
    found["all-gather"] = (p - 1) * block_s + compute_s
    if heads % p == 0 and kv_heads % p == 0:
        found["Ulysses"] = 2 * (heads + kv_heads) * head_s * (p - 1) / p + compute_s
    return found
    ### END SOLUTION


# %% tags=["check"] exercise="context_parallel-5"
check("context_parallel-5", seconds_by_form)

# %% [markdown]
# The next picture uses this model for Llama-8B on 8 GPUs that InfiniBand connects, at half of the
# peak of an H100. The explorer below it shows one such pass on a clock: blue boxes compute, with
# the number of the block, and green ones send. What changes with the zigzag? With how many tokens
# per rank do the gaps vanish, on InfiniBand and on NVLink? For which forms does the layout matter?


# %% tags=["picture"]
def seconds(seq, p=8, link="InfiniBand NDR"):
    one_layer = replace(of_llama, seq=seq)
    return lab.forward_s(one_layer, p, 0.5 * H100.peak(), H100.links[link])


lengths = [2**power for power in range(12, 21)]
words = "Llama-8B, 8 H100 at half of their peak, one InfiniBand NDR adapter each"
show(*pictures.forms_picture(seconds, lengths, words))
for p, link in ((8, "NVLink"), (16, "InfiniBand NDR")):
    times = seconds(32768, p, link)
    print(f"{p} ranks, {link}: {min(times, key=times.get)} of {', '.join(times)} at 32,768 tokens")

# %% tags=["picture"]
from course_lib.context_parallel.explorer import attention_explorer

attention_explorer()

# %% [markdown]
# For short sequences Ulysses is fastest here: messages cannot be hidden, so the fewest bytes win,
# and on 8 ranks these are those of Ulysses. From some length on the ring's messages are hidden. For
# very long sequences all three are almost equal, because computation grows with $s^2$ and bytes
# with $s$. The model leaves out latency, and that a GPU computes many small blocks less efficiently
# than one large one. A ring suffers most from both, with its $p$ small steps. By this model an
# all-gather is never faster than a ring. Llama 3 chose it for its masks, and because its messages
# are short.
#
# In the explorer, with a contiguous layout rank 0 of a ring soon has nothing to compute, but it
# goes on passing blocks. The layout matters for the all-gather, too, but not for Ulysses: there
# each rank has all tokens. And a ring in zigzag has no gaps from $2(F/\beta)(h_{kv}/h)$ tokens per
# rank on, twice as many as in section 3, because of the mask.
#
# What did others measure?
#
# - Liu, Zaharia and Abbeel (2023, section 5) train with a ring on GPUs and TPUs. The longest
#   sequence that fits grows in proportion to the number of devices.
# - Jacobs et al. (2023, abstract and section 4) train 2.5 times as fast with Ulysses as with
#   Megatron's sequence parallelism, and with sequences 4 times as long.
# - Fang and Zhao (2024, USP) combine both: Ulysses inside a node, and a ring between nodes, as
#   `usp_attention` in the course's library does. They report 47 % MFU for Llama3-8B with 208K
#   tokens, on two nodes of eight A800 (abstract).
# - Grattafiori et al. (2024, section 3.3.2) train Llama 3 405B with 16 ranks per sequence of
#   131,072 tokens, an all-gather and a zigzag.

# %% tags=["picture"]
from course_lib.cost.published import rows

for run in rows("llama3"):
    split = ", ".join(f"{axis} {run[axis]}" for axis in ("tp", "cp", "pp", "dp"))
    print(f"{int(run['seq_len']):,} tokens, {split}: {run['bf16_mfu_pct']} % MFU")
show(*pictures.long_runs_picture())

# %% [markdown]
# Llama 3 loses only a few points of MFU at 16 times the length, on as many GPUs. The picture shows
# runs of torchtitan. Each doubles the length *and* the number of ranks that share a sequence, so
# the memory of a GPU stays the same: this is what context parallelism is for. Tokens per second
# have to fall, because each token attends to more keys. The line shows this effect alone. The
# measured runs (the stars) fall further. The published numbers do not say why. Two causes are
# likely. Messages may be exposed. And the runs use float8, which speeds up the matrices but not
# attention: the more of the work is attention, the lower is the mean speed.
#
# In frameworks the forms are options: Megatron-Core's `--context-parallel-size` with
# `--cp-comm-type p2p`, `all_gather`, `a2a` or `a2a+p2p` (the last combines both, as USP does); in
# PyTorch
#
# ```python
# with context_parallel(mesh["cp"], buffers=[tokens, targets, rope], buffer_seq_dims=[1, 1, 0]):
#     loss = loss_fn(model(tokens), targets)   # attention to the tokens of all ranks
#     loss.backward()
# ```
#
# Inside, `scaled_dot_product_attention` merges parts. By default it gathers keys and values while
# it computes with its own block; after `set_rotate_method("alltoall")` it passes them on step by
# step, as a ring does. This is a prototype; it balances a causal mask with a zigzag, and refuses
# the CPU, for whose attention it has no rule (`make gpu` compares it with attention on one GPU).
# Note the `buffers`: the rotary table is split, too, so positions stay global.
#
# On your cluster, one command times all forms for two lengths (`--seqs` sets others):
#
# `torchrun --nproc-per-node 8 cluster/exercises/15_context_parallel.py`
#
# **Take Ulysses where the heads suffice and messages cannot be hidden, a ring where sequences are
# long enough to hide them, and an all-gather where keys are small or masks are irregular.**
#
# ## What to keep
#
# - A part of attention is an output and an lse. Parts merge exactly, in any order.
# - A ring hides its messages behind computation if each rank has enough tokens, under a causal mask
#   twice as many.
# - A causal mask needs a balanced layout: without it the last rank works almost twice as long as
#   the average.
# - Positions, targets and loss weights are those of the whole sequence, and gradients are averaged
#   over dp and cp together.
#
# **Read on**
#
# - Liu, Zaharia and Abbeel 2023, *Ring Attention with Blockwise Transformers*, section 3: the ring,
#   and when it hides its messages.
# - Brandon et al. 2023, *Striped Attention*, section 3: the balance of a causal mask.
# - Jacobs et al. 2023, *DeepSpeed Ulysses*, section 3: the all-to-alls, and their bytes.
# - Fang and Zhao 2024, *USP: A Unified Sequence Parallelism Approach*, section 3: both together.
# - Grattafiori et al. 2024, *The Llama 3 Herd of Models*, section 3.3.2: an all-gather, and why.
# - Dao et al. 2022, *FlashAttention*, section 3.1: softmax in parts, inside one GPU.
