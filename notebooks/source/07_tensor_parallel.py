# %% [markdown]
# # 07 Tensor parallelism: split the matrices
#
# **Question.** How do several ranks compute one layer, what must they send each other, and why are
# these ranks usually in one node?
#
# Every rank holds a part of almost every matrix. All ranks see the *same* batch, and sum their
# partial results.
#
# *After this lesson you can*
#
# - split an MLP, attention, embedding and loss over ranks;
# - say which collective stands at each boundary, and predict its bytes and time;
# - say when communication takes longer than computation, and what can be overlapped;
# - write the two collectives of sequence parallelism, and derive the memory that it saves.
#
# **Prerequisites:** lessons 01, 04. **Time:** about 75 minutes to read and run, 80 for exercises.
#
# | symbol | in code | meaning |
# |---|---|---|
# | $p$ | `p` | ranks that share one model: the tensor-parallel (TP) degree |
# | $b$, $s$ | `batch`, `seq` | sequences; tokens in each |
# | $h$ | `hidden` | values per token between layers |
# | $f$ | `ffn_hidden` | values per token inside an MLP (not the boundary **f** of section 2) |
# | $\alpha$, $\beta$ | `link` | latency (s), bandwidth (bytes/s; in papers often its inverse) |

# %%
# %load_ext course_lib.ranks
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from course_lib.checks import check
from course_lib.core import COMMUNICATION_KINDS, MODELS, Link
from course_lib.display import claim, predict, reveal, show
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from course_lib.ranks import Ranks, record
from course_lib.tensor_parallel import copy_to_region, pictures, reduce_from_region

# %% [markdown]
# ## 1 Two ways to split a matrix
#
# An MLP is $Y = \text{GELU}(XA)\,B$. Split $A$ by **columns**: each rank computes some complete
# columns of $XA$. Split $B$ by **rows**: each rank needs only some columns of $B$'s input, but
# computes only a *partial sum* of each output. With both, how many collectives do 4 ranks need in
# forward? How large is the summed tensor in Llama-8B, in bf16, for 4096 tokens?

# %% tags=["predict"]
guess_sums = predict("collectives in the forward pass of a split MLP")
### GUESS guess_sums.commit(2)
guess_message = predict("tensor that is summed, in Llama-8B", unit="MiB")
### GUESS guess_message.commit(16)


# %%
def split_forward(rank, x, A, B):
    p = dist.get_world_size()
    columns, rows = A.tensor_split(p, dim=1)[rank], B.tensor_split(p, dim=0)[rank]
    y = F.gelu(x @ columns) @ rows  # a partial sum of every output
    dist.all_reduce(y)
    return y


# %% tags=["picture"]
ranks, llama = Ranks(4), MODELS["llama-8b"]
x, A, B = torch.randn(6, 8), torch.randn(8, 32), torch.randn(32, 8)
right, by_rank = F.gelu(x @ A) @ B, ranks.run(split_forward, x, A, B)
print("as one process:", all(torch.allclose(y, right, atol=1e-4) for y in by_rank))
reveal(guess_sums, sum(event.kind == "all_reduce" for event in ranks.events) / 4)
reveal(guess_message, 4096 * llama.hidden * 2 / 2**20)
show(*pictures.split_mlp(4))

# %% [markdown]
# On each rank the columns of $A$ match the rows of $B$. Splitting $A$ by rows would need one more
# collective *between* the two, of $f$ values per token, because GELU is not linear and needs
# complete sums.
#
# **Columns, then rows: one all-reduce of an activation in forward. No weights are sent.**
#
# ## 2 The backward pass: f and g
#
# Autograd sees only its own rank. Rank $r$ multiplies the same $x$ by $10^r$, and the loss is the
# sum over all ranks, so its derivative is 1111. What is `x.grad` on rank 2?

# %% tags=["predict"]
guess_grad = predict("x.grad on rank 2")
### GUESS guess_grad.commit(1111)


# %% tags=["failure"]
def lonely(rank):
    x = torch.ones(1, requires_grad=True)
    (10.0**rank * x).sum().backward()  # the other ranks' terms of the loss use x, too
    return x.grad.item()


print("x.grad by rank:", found := ranks.run(lonely))
reveal(guess_grad, found[2])

# %% [markdown]
# No error was raised, but the layers *before* would train on one term of their gradient: if all
# ranks use a tensor, its gradient is the sum over all ranks. Shoeybi et al. (2019, section 3) call
# the boundaries **f** (identity in forward, all-reduce in backward) and **g** (the reverse).
#
# ### Exercise 1 (core): f and g
#
# An `autograd.Function` defines its own backward. `all_reduce` works in place: sum a clone, and
# return it. Budget: one all-reduce in each pass, on every rank, in the dtype of what is summed. x
# has any shape (also `[]`); the output of `part` may have another. Call `part` once; inf and nan
# must stay. Forward must also sum where no gradient is needed. About 7 lines, 10 minutes.
#
# <details><summary>Hint: p times too large</summary>
# $y = y_0 + y_1 + \dots$, so $\partial y/\partial y_1 = 1$. After g all ranks compute *the same*
# loss from the same $y$, and this loss counts once. So every rank already has the whole gradient of
# $y$.
# </details>


# %% tags=["exercise"] exercise="tensor_parallel-1"
class CopyToRegion(torch.autograd.Function):  # f
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ### BEGIN SOLUTION: x was used on every rank
        total = grad.clone()
        dist.all_reduce(total)
        return total
        ### END SOLUTION


class ReduceFromRegion(torch.autograd.Function):  # g
    @staticmethod
    def forward(ctx, x):
        ### BEGIN SOLUTION: every rank has a partial sum
        total = x.clone()
        dist.all_reduce(total)
        return total
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad):
        ### BEGIN SOLUTION: what is the gradient of one term of a sum?
        return grad
        ### END SOLUTION


def together(x, part):
    """The sum of part(x) over all ranks, for an x that is the same on all of them."""
    return ReduceFromRegion.apply(part(CopyToRegion.apply(x)))


# %% tags=["check"] exercise="tensor_parallel-1"
check("tensor_parallel-1", together)

# %% [markdown]
# Each rank computes its part inside a *region*; the course's `copy_to_region` (f) opens it,
# `reduce_from_region` (g) closes it.
#
# Lesson 04 lists `all_reduce` as the backward of `all_reduce`; here it is the
# identity. Both are right. There, each rank has a loss *of its own*, and the total is their
# **sum**; here, the loss is *the same* on all, and **counts once**. On four ranks with the same
# loss $y = x_0 + \dots + x_3$, the gradient of $x_0$ is 4 if the losses are summed, and 1 if $y$
# counts once.
#
# ### Exercise 2 (core): a split MLP
#
# Copy this rank's part of two `nn.Linear`, under the names in the docstring; keep nothing else
# (only the bias of `down` may be the layer's own tensor). Do not change the layers or x, of any
# shape `[..., hidden]`. `weight` is stored as `[out, in]`: *columns of A are rows of* `up.weight`.
# $p$ need not divide the width. One all-reduce in each pass, of an activation. About 8 lines, 15
# minutes.
#
# <details><summary>Hint: the output is off by a constant</summary>
# A bias that is added before the sum is added $p$ times. Where does the bias of <code>down</code>
# belong?
# </details>
# <details><summary>Hint: it keeps too many bytes</summary>
# A slice is a view and keeps the whole matrix alive. Indexing with a tensor copies:
# <code>weight[mine]</code>; so does <code>.clone()</code>.
# </details>


# %% tags=["exercise"] exercise="tensor_parallel-2"
class SplitMLP(nn.Module):
    """This rank's part of down(gelu(up(x))): up_weight, up_bias, down_weight, down_bias."""

    def __init__(self, up, down):
        super().__init__()
        rank, p = dist.get_rank(), dist.get_world_size()
        mine = torch.arange(up.out_features).tensor_split(p)[rank]  # my indices in ffn_hidden
        ### BEGIN SOLUTION: four nn.Parameters; which are cut, along which dim?
        self.up_weight = nn.Parameter(up.weight.detach()[mine])
        self.up_bias = nn.Parameter(up.bias.detach()[mine])
        self.down_weight = nn.Parameter(down.weight.detach()[:, mine])
        self.down_bias = nn.Parameter(down.bias.detach().clone())
        ### END SOLUTION

    def forward(self, x):
        ### BEGIN SOLUTION: f, up, GELU, down, g; and the bias of down
        x = F.gelu(F.linear(copy_to_region(x), self.up_weight, self.up_bias))
        return reduce_from_region(F.linear(x, self.down_weight)) + self.down_bias
        ### END SOLUTION


# %% tags=["check"] exercise="tensor_parallel-2"
check("tensor_parallel-2", SplitMLP)

# %% [markdown]
# **With f in front and g behind: one all-reduce in each pass, and $1/p$ of the matrices.**
#
# ## 3 Attention: whole heads
#
# Heads are independent, and only `out` mixes them: split queries, keys and values by columns, `out`
# by rows. But a *head* stays whole, because its softmax needs complete dot products. Some code
# bases keep one tall matrix, $Q$ above $K$ above $V$; $K$ and $V$ may have fewer heads
# (grouped-query attention).
#
# ### Exercise 3 (further): which rows?
#
# Return one rank's row numbers of that matrix, in order, as a new list. Of each of $Q$, $K$ and
# $V$, rank 0 takes the first heads, rank 1 the next. $p$ divides both numbers of heads. About 5
# lines, 10 minutes.
#
# <details><summary>Hint: rank 0 gets no rows of V</summary>
# Split each of the three matrices into $p$ parts.
# </details>


# %% tags=["exercise"] exercise="tensor_parallel-3"
def rows_of_rank(rank, p, num_heads, num_kv_heads, head_dim):
    """Return the numbers of this rank's rows: its heads of q, then those of k, then those of v."""
    rows, start = [], 0
    ### BEGIN SOLUTION: from each of the three matrices, this rank's heads
    for heads in (num_heads, num_kv_heads, num_kv_heads):
        n = heads // p * head_dim
        rows += range(start + rank * n, start + (rank + 1) * n)
        start += heads * head_dim
    ### END SOLUTION
    return rows


# %% tags=["check"] exercise="tensor_parallel-3"
check("tensor_parallel-3", rows_of_rank)

# %% [markdown]
# **Attention is split by heads. With 8 key-value heads, more than 8 ranks need copies of them.**
#
# ## 4 The vocabulary
#
# The embedding is split by vocabulary entries: a rank looks up those it has, uses zeros for the
# others, and g sums. The output layer is split by columns: each rank has *some* logits. The loss
# seems to need all of them:
#
# $$ -\log \text{softmax}(z)_t = \log \sum_v e^{z_v - m} - (z_t - m), \quad m = \max_v z_v $$
#
# But only three values per token have to be combined: $m$, the sum, and $z_t$ (after Shoeybi et
# al., section 3).
#
# ### Exercise 4 (further): the loss of split logits
#
# This rank has the logits of vocabulary entries `first`, `first + 1` ... Targets of -100 have no
# loss. Return the mean over the others, on every rank, in the logits' dtype or a wider one; leave
# the arguments unchanged. Budget: at most 3 all-reduces for both passes together, 3 values per
# token in total. About 10 lines, 20 minutes.
#
# <details><summary>Hint: the maximum</summary>
# <code>dist.all_reduce(top, dist.ReduceOp.MAX)</code>, detached: it cancels out, so it needs no
# gradient. Without a maximum, exp can overflow; with one for all tokens, a token's exps can all be
# 0.
# </details>
# <details><summary>Hint: the target is on another rank</summary>
# With <code>local = targets - first</code>, the target is here if <code>(local >= 0) & (local <
# logits.shape[1])</code>. If not, look up any logit, and replace it by 0.
# </details>
# <details><summary>Hint: no gradient, or p times too large</summary>
# Sum with <code>reduce_from_region</code> (g). The final loss needs no sum: all ranks have it.
# </details>


# %% tags=["exercise"] exercise="tensor_parallel-4"
def split_cross_entropy(logits, targets, first):
    """Mean cross-entropy; logits [tokens, own part of the vocabulary], targets [tokens]."""
    ### BEGIN SOLUTION: the maximum, the sum of exponentials, the target's logit
    top = logits.detach().max(dim=-1).values
    dist.all_reduce(top, dist.ReduceOp.MAX)
    shifted = logits - top[:, None]
    total = reduce_from_region(shifted.exp().sum(-1))
    local, counts = targets - first, targets != -100
    here = (local >= 0) & (local < logits.shape[1])
    own = shifted.gather(-1, local.where(here, 0)[:, None])[:, 0] * here
    losses = total.log() - reduce_from_region(own)
    return (losses * counts).sum() / counts.sum()
    ### END SOLUTION


# %% tags=["check"] exercise="tensor_parallel-4"
check("tensor_parallel-4", split_cross_entropy)

# %% [markdown]
# PyTorch calls this *loss parallel*: the logits stay a `DTensor` (a tensor that knows its split),
# and `with loss_parallel():` replaces the cross-entropy. What does it save in Llama-8B, with 8192
# tokens on 8 ranks?

# %%
from course_lib.cost.traffic import sent_bytes
from course_lib.tensor_parallel import cost, lab

tokens, vocab, p = 8192, llama.vocab, 8
gathered_mib = tokens * vocab * 2 * (p - 1) / p / 2**20  # bf16 logits of the other ranks
values_kib = 2 * (p - 1) / p * 3 * tokens * 4 / 2**10  # all-reduces of 3 fp32 values per token
print(f"sent by a rank: {gathered_mib:.0f} MiB of logits, or {values_kib:.0f} KiB of values")
for name, size in {"whole": vocab, "split": vocab // p}.items():
    print(f"kept by a rank, {name}: {tokens * size * 4 / 2**30:.2f} GiB of softmax in fp32")

# %% [markdown]
# **The logits, often the largest activation, stay split: three values per token are sent.**
#
# *A place for a break.*
#
# ## 5 A whole GPT
#
# `parallelize(model, mesh)` splits a GPT like this, in place; the *mesh* says which ranks share it.
# The model then returns split logits, for `parallel_token_loss` (exercise 4). Does it train like
# one process?

# %%
from course_lib.tensor_parallel import gather_tensors, parallel_token_loss, parallelize


def split_gpt(spec, **more):
    torch.manual_seed(0)  # all ranks begin with the same weights, of which each keeps its part
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    return parallelize(GPT(spec, **more), mesh)


# %%
def train(rank, steps, split, own_seed=False, dropout=0.0):
    torch.manual_seed(0)
    model = split_gpt(tiny, dropout=dropout) if split else GPT(tiny)
    loss_of = parallel_token_loss if split else token_loss
    torch.manual_seed(rank if own_seed else 0)  # for dropout, in section 6
    sgd, losses = torch.optim.SGD(model.double().parameters(), lr=0.3, momentum=0.9), []
    for n in range(steps):
        inputs, targets = next_tokens(token_batch(n, batch=8, seq=16, vocab=256))
        sgd.zero_grad()
        loss = loss_of(model(inputs), targets)
        loss.backward()
        sgd.step()
        losses.append(loss.item())
    return losses, model.norm.weight.detach()


# %% tags=["picture", "measured"]
one, pair, tiny = Ranks(1), Ranks(2), MODELS["tiny"]
alone, split = (on.run(train, 100, on is pair)[0][0] for on in (one, pair))
apart = [abs(a - b) for a, b in zip(alone, split, strict=True)]
claim("the curves never differ by more than 1e-8", max(apart) < 1e-8)
show(*pictures.losses_apart(alone, split))

# %% [markdown]
# Only the order of sums differs.
#
# What does a rank hold? Matrices are split; norms, positions, and biases added after a sum are
# whole. And what does it send? Count the sums of the tiny GPT's 2 layers; add one for the
# embedding, one for f of the output layer, and two for the loss (one carries two values).

# %% tags=["predict"]
guess_part = predict("parameters on each of 4 ranks, as a part of all (like 1/3)")
### GUESS guess_part.commit(1 / 4)
guess_calls = predict("collectives in one step of the tiny GPT")
### GUESS guess_calls.commit(10)

# %%
BATCH = next_tokens(token_batch(0, batch=2, seq=64, vocab=256))


def one_step(rank, spec):
    model = split_gpt(spec)
    with record() as log:
        parallel_token_loss(model(BATCH[0]), BATCH[1]).backward()
    calls = [(e.kind, e.num_bytes) for e in log.events if e.kind in COMMUNICATION_KINDS]
    grads = {name: param.grad for name, param in model.named_parameters()}
    return sum(param.nbytes for param in model.parameters()), calls, gather_tensors(model, grads)


held = [on.run(one_step, tiny)[0] for on in (one, pair, ranks)]
paper = [(call.kind, call.num_bytes) for call in cost.tensor_traffic(tiny, 2, 64, 4)]
print("every call as predicted, on 1, 2, 4 ranks:", [calls == paper for _, calls, _ in held])
reveal(guess_part, held[2][0] / held[0][0])
reveal(guess_calls, len(paper))

# %% [markdown]
# PyTorch does this with `DTensor` and a dict (the plan) of the splits, here for the same model,
# untied. PyTorch's loss takes three calls; in this plan q, k and v have an f *each*.

# %%
from torch.distributed.tensor import DTensor, Replicate, parallel


def with_dtensor(rank, spec):
    torch.manual_seed(0)
    model, mesh = GPT(spec), dist.init_device_mesh("cpu", (dist.get_world_size(),))
    columns, rows = parallel.ColwiseParallel, parallel.RowwiseParallel
    plan = {"embedding": rows(input_layouts=Replicate()), "head": columns(use_local_output=False)}
    plan |= {f"blocks.*.attention.{name}": columns() for name in "qkv"}
    plan |= {"blocks.*.mlp.up": columns(), "blocks.*.mlp.out": rows()}
    plan["blocks.*.attention.out"] = rows()
    parallel.parallelize_module(model, mesh, plan)
    with record() as log, parallel.loss_parallel():
        token_loss(model(BATCH[0]), BATCH[1]).backward()
    grads = {name: param.grad for name, param in model.named_parameters()}
    grads |= {name: g.full_tensor() for name, g in grads.items() if isinstance(g, DTensor)}
    return [e.num_bytes for e in log.events if e.kind == "all_reduce"], grads


# %% tags=["measured"]
from course_lib.frameworks import missing
from course_lib.tensor_parallel import beside_frameworks as beside

untied = replace(tiny, tied=False)
(_, ours, grads), (theirs, others) = (pair.run(run, untied)[0] for run in (one_step, with_dtensor))
print("same gradients:", all(torch.allclose(grads[n], others[n], atol=1e-6) for n in grads))
for whose, sizes in {"ours": [size for _, size in ours], "PyTorch's": theirs}.items():
    print(f"{whose}: {len(sizes)} all-reduces, {sum(sizes)} bytes")
print(missing("megatron.core") or "Trained for 4 steps:")
for name in ["ours"] if missing("megatron.core") else ["ours", "Megatron-Core"]:
    ran = pair.run(beside.run_tensor_parallel, tiny, [BATCH] * 4, name == "ours")[0]
    print(f"{name}: loss {ran.losses[-1]:.5f}, {ran.median_ms:.0f} ms, {ran.calls()}")

# %% [markdown]
# **Up to rounding, a split model computes the same numbers, with $1/p$ of its matrices per rank and
# four all-reduces per layer, two in each pass.**
#
# ## 6 Dropout: equal here, different there
#
# On the residual stream, which all ranks hold, dropout must draw *the same* mask on all ranks; on
# the heads, which are split, masks must differ. With a *different* seed on each rank, are the
# norms' weights still equal on both ranks after 5 steps?

# %% tags=["predict"]
guess_alike = predict("different seeds: are the norms still the same?", choices=("yes", "no"))
### GUESS guess_alike.commit("yes")

# %% tags=["failure"]
from course_lib.models.gpt import Dropout
from course_lib.tensor_parallel import ShardedDropout


def masks(rank, own_seed, for_heads):
    torch.manual_seed(rank if own_seed else 0)
    return Dropout(0.5)(torch.ones(64)), for_heads(0.5)(torch.ones(1, 2, 64))


hows = {"one seed": (False, Dropout), "one each": (True, Dropout), "ours": (False, ShardedDropout)}
for name, how in hows.items():
    (a, b), (c, d) = pair.run(masks, *how)
    print(f"{name:8} equal on the residual stream: {torch.equal(a, c)}, heads: {torch.equal(b, d)}")
for own_seed in (False, True):
    (losses, a), (_, b) = pair.run(train, 5, True, own_seed, 0.1)
    print(f"own seeds {own_seed}: loss {losses[-1]:.2f}, norms differ by {(a - b).abs().max():.0e}")
reveal(guess_alike, "yes" if torch.equal(a, b) else "no")

# %% [markdown]
# The printed losses do not show it, but the norms differ: the ranks no longer hold *one* model. Our
# `ShardedDropout` draws the mask of all heads, as one process would, and keeps its part.
# Megatron-LM has a second random state for split tensors, whose seed depends on the rank.
#
# **Masks must be equal on tensors that all ranks hold, and different on split ones.**
#
# ## 7 What it costs
#
# ### Exercise 5 (core): the price of a layer
#
# Forward and backward of one layer (attention and MLP) take `compute_s` on one rank. How long do
# they take on $p$ ranks, in bf16, with ring all-reduces and without overlap? `link` has `latency_s`
# and `bytes_per_s`. About 3 lines, 10 minutes.
#
# <details><summary>Hint: how many all-reduces?</summary>
# Attention and the MLP both have an f and a g; f and g communicate in one pass only.
# </details>


# %% tags=["exercise"] exercise="tensor_parallel-5"
def split_layer_s(compute_s, batch, seq, hidden, p, link):
    """Seconds of one layer, forward and backward, on p ranks."""
    ### BEGIN SOLUTION: how many all-reduces, of how many bytes?
    n = 2 * batch * seq * hidden
    all_reduce_s = 2 * (p - 1) * (link.latency_s + n / p / link.bytes_per_s)
    return compute_s / p + 4 * all_reduce_s
    ### END SOLUTION


# %% tags=["check"] exercise="tensor_parallel-5"
check("tensor_parallel-5", split_layer_s)

# %% [markdown]
# ### What can be overlapped
#
# The plain version computes nothing during an all-reduce, because the next matrix needs the sum.
# But in backward, no other layer waits for the gradient of the **weights**. So compute the input
# gradient, start its all-reduce, compute the weight gradient, then wait (`overlap=True` in
# `ColumnParallelLinear`). If the weight gradient takes 30 ms and the all-reduce 20 ms, how much
# does this save?

# %% tags=["predict"]
guess_saved = predict("time saved per all-reduce", unit="ms")
### GUESS guess_saved.commit(10)

# %% tags=["picture", "measured"]
reveal(guess_saved, 1e3 * cost.overlap_saves_s(30e-3, 20e-3))
wire = Link(name="slow link", latency_s=1e-3, bytes_per_s=100e6)
with Ranks(2, link=wire) as wired:
    runs = lab.measure_overlap(wired)
claim("backward with overlap is faster", runs.saved_s > 0)
show(*pictures.overlapped_backward(runs, wire))

# %% [markdown]
# The results are equal bit for bit. Megatron-LM overlaps by default.
#
# More can be hidden, also in forward, if a piece of a product is sent while the next is computed.
# *User buffers* in Transformer Engine and PyTorch's *async TP* do so.
#
# ### When communication takes longer
#
# In forward and backward, a layer with $f=4h$ computes $72\,h^2$ FLOP per token in its matrices,
# and each rank $1/p$ of them. In its four all-reduces, a rank sends $16\,h\,(p-1)/p$ bytes per
# token in bf16. For any number of tokens,
#
# $$ \frac{72\,h^2 / p}{16\,h\,(p-1)/p} = \frac{9h}{2\,(p-1)} \text{ FLOP per byte.} $$
#
# Without overlap and latency, communication takes longer if this ratio is below $F/\beta$, where
# $F$ is the GPU's FLOP/s. That is the case if $h < \frac{2}{9}(p-1)F/\beta$. (Attention
# scores, which only add computation, are left out.) Which $h$ is that for 8 H100 at
# peak, over NVLink?

# %% tags=["predict"]
guess_width = predict("hidden size on 8 ranks: below it, communication takes longer")
### GUESS guess_width.commit(4096)

# %% tags=["picture"]
from course_lib.cost.hardware import H100

reveal(guess_width, round(cost.break_even_hidden(8, H100.peak(), H100.links["NVLink"])))
show(*pictures.width_picture())

# %% [markdown]
# At half the peak, half this $h$ is enough. NVIDIA's models shown lie above NVLink's line.
#
# The 3B model of Tazi et al. (2025; $h=3072$ in nanotron) lies near NVLink's line at $p=8$. The
# formula in the next picture adds the time of the FLOP (speed fitted at $p=2$) and of the bytes (at
# the bandwidths they measured). Of the tokens/s per GPU on 8 ranks, what fraction is left on 16?

# %% tags=["predict"]
guess_drop = predict("tokens/s per GPU on 16 ranks divided by those on 8 (like 3/4)")
### GUESS guess_drop.commit(3 / 4)

# %% tags=["picture"]
h100 = cost.h100_scaling()
reveal(guess_drop, h100.kept(8, 16)[0])  # as published, not by formula
show(*pictures.h100_picture(h100))

# %% [markdown]
# Inside a node the formula is within 3 % of the black stars. Across nodes the black stars are
# lower; the formula ignores, for example, norms and how slow thin matrices are. Narayanan et al.
# (2021, section 3.2) advise pipeline parallelism across nodes.
#
# Splitting frees memory for more sequences. They share the latency, but the bytes grow:

# %% tags=["picture"]
from course_lib.tensor_parallel.explorer import degree_explorer

degree_explorer()

# %% [markdown]
# **Keep tensor parallelism among GPUs that NVLink connects; use other methods beyond them.**
#
# ## 8 Sequence parallelism
#
# Between g and the next f, all ranks compute and keep the same values: norms, dropout, the residual
# stream. These operations treat tokens separately, so the ranks can split them by *tokens*
# (Korthikanti et al. 2022, section 4.2.2). A region needs all tokens: an **all-gather** replaces f.
# After the region each rank needs the complete sum for its own tokens: a **reduce-scatter**
# replaces g. In backward each becomes the other. How many bytes does a rank send now, divided by
# the bytes with all-reduces?

# %% tags=["predict"]
guess_bytes = predict("bytes sent with sequence parallelism, divided by plain")
### GUESS guess_bytes.commit(0.5)

# %% tags=["picture"]
hows = {"plain": {}, "ours": {"sequence_parallel": True}}
hows["gathers again"] = {"sequence_parallel": True, "gathers_again": True}
sent = {n: sent_bytes(cost.tensor_traffic(llama, 1, 4096, **how), 8) for n, how in hows.items()}
reveal(guess_bytes, sent["ours"] / sent["plain"])
print(f"gathering once more in backward: {sent['gathers again'] / sent['plain']:.2f} times")
show(*pictures.sequence_region(4))

# %% [markdown]
# A ring all-reduce *is* a reduce-scatter, then an all-gather (lesson 04). Now norms and dropout
# stand between these two halves, and are computed once, not $p$ times.
#
# ### Exercise 6 (core): gather and scatter
#
# Each rank holds $\lceil s/p \rceil$ tokens, in rank order. The last tokens may be padding. `part`
# must not get them; in the output and in the gradient of x they are zeros. Budget: one all-gather
# and one reduce-scatter in each pass, in the dtype of what is sent. Call `part` once. About 10
# lines, 15 minutes.
#
# <details><summary>Hint: the wrong tokens</summary>
# Collectives on one tensor concatenate along dim 0; tokens are dim 1. Parts must be
# contiguous.
# </details>
# <details><summary>Hint: the gradient</summary>
# A gathered token is used on <i>every</i> rank, so a slice of the gradient lacks the other ranks'
# terms. A scattered token has its gradient on <i>one</i> rank only.
# </details>


# %% tags=["exercise"] exercise="tensor_parallel-6"
def gather_tokens(x, seq):
    """All tokens, from those of each rank: [batch, ceil(seq/p), hidden] -> [batch, seq, hidden]."""
    ### BEGIN SOLUTION: the tokens of all ranks, in order, without the padding
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return torch.cat(parts, dim=1)[:, :seq]
    ### END SOLUTION


def scatter_sum(x):
    """This rank's tokens of the sum: [batch, seq, hidden] -> [batch, ceil(seq/p), hidden]."""
    ### BEGIN SOLUTION: pad, cut into p parts, and reduce_scatter
    p = dist.get_world_size()
    parts = F.pad(x, (0, 0, 0, -x.shape[1] % p)).chunk(p, dim=1)
    own = torch.empty_like(parts[0])
    dist.reduce_scatter(own, [part.contiguous() for part in parts])
    return own
    ### END SOLUTION


class Boundary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, function, adjoint):
        ctx.adjoint = adjoint
        return function(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.adjoint(grad), None, None


def in_region(x, part, seq):
    """Sum part(all tokens) over the ranks; return this rank's tokens."""
    gather = partial(gather_tokens, seq=seq)
    ### BEGIN SOLUTION: Boundary.apply in front of part and behind it
    out = part(Boundary.apply(x, gather, scatter_sum))
    return Boundary.apply(out, scatter_sum, gather)
    ### END SOLUTION


# %% tags=["check"] exercise="tensor_parallel-6"
check("tensor_parallel-6", in_region)

# %% [markdown]
# ### The memory
#
# What does a GPT layer ($f=4h$, no grouped queries) keep for backward, in bf16? In units of $sbh$
# bytes: the input of attention 2; $q$, $k$ and $v$ 6; the inputs of `out` 2, of the MLP 2, of GELU
# 8, of the second matrix 8; the inputs of two norms 4; two dropout masks 2. Together these are
# **34** (Korthikanti et al., section 4.1). The scores of $a$ heads add $5as/h$: softmax 2, dropout
# mask 1, output after dropout 2.
#
# Tensor parallelism divides the tensors inside the regions. Inputs of norms, the two dropout
# masks, and inputs of regions stay whole: 10. Sequence parallelism divides these, too:
#
# $$ sbh\left(10 + \frac{24}{p} + \frac{5as}{hp}\right) \;\to\;
# \frac{sbh}{p}\left(34 + \frac{5as}{h}\right) $$
#
# But a weight gradient needs the *whole* input of its region. Without `overlap`, our layers keep
# the gathered inputs: $4\,sbh$. With `overlap`, as in Megatron-LM, a rank keeps its own tokens and
# **gathers again in backward**, while it computes the input gradient; then it sends $5/4$ of the
# bytes. On 4 ranks, with $5as/h=20$, what fraction of plain tensor parallelism's *kept* bytes is
# left?

# %% tags=["predict"]
guess_kept = predict("bytes kept when gathering again, divided by plain (like 2/3)")
### GUESS guess_kept.commit(1 / 2)

# %% tags=["picture"]
whole = {"tensor parallel": 10, "sequence parallel": 4, "gathering again": 0}  # in sbh bytes
sp, kept = {"sequence_parallel": True}, {}
for name, how in zip(whole, ({}, sp, sp | {"overlap": True}), strict=True):
    on_p = {1: one, 2: pair, 4: ranks}.items()
    kept[name] = {p: on.run(lab.split_layer_bytes, tiny, 2, 64, **how)[0] for p, on in on_p}
reveal(guess_kept, kept["gathering again"][4] / kept["tensor parallel"][4])
show(*pictures.layer_memory(tiny, 2, 64, whole, kept))

# %% [markdown]
# Norms, positions, and biases that are added to a split residual stream have seen only their rank's
# tokens. Their gradients are partial sums, which `finish_gradients(model)` adds up once per step.
#
# **Sequence parallelism also divides the activations outside the regions. If backward gathers
# inputs again, a rank sends 5/4 of the bytes; otherwise it keeps these inputs whole.**
#
# ## What to keep
#
# - A layer needs four all-reduces; those of backward can run beside weight gradients.
# - Wrong masks, a bias added $p$ times, or a missing sum raise no error, but train another model.
#
# **Read on**
#
# - Shoeybi et al. 2019, *Megatron-LM*, section 3: f, g and the split loss.
# - Korthikanti et al. 2022, *Reducing Activation Recomputation*, section 4: sequence parallelism.
# - Narayanan et al. 2021, *Efficient Large-Scale Language Model Training*, section 3.
# - Wang et al. 2024, *Introducing Async Tensor Parallelism in PyTorch*.
# - Tazi et al. 2025, *The Ultra-Scale Playbook*, "Tensor Parallelism".
