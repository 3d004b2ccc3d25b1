# %% [markdown]
# # 07 Tensor parallelism: split the matrices
#
# **Question.** How do several ranks compute one layer together, what must they send each other, and
# why are these ranks usually in one node?
#
# Every rank holds a part of almost every matrix. All ranks see the *same* batch, and they add up
# their partial results.
#
# *After this lesson you can*
#
# - split an MLP, attention, the embedding and the loss over ranks;
# - say which collective stands at each boundary, and predict its bytes and its time;
# - say when communication takes longer than computation, and what can be overlapped;
# - write the two collectives of sequence parallelism, and derive the memory that it saves.
#
# **Prerequisites:** lessons 01, 04. **Time:** about 80 minutes to read and run, 80 for exercises.
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
# Data parallelism gives every rank a copy of the whole model. This does not help if the model is
# too large for a GPU, or if a step takes too long with even one sequence per rank. Tensor
# parallelism therefore splits the matrices themselves.
#
# Take an MLP, $Y = \text{GELU}(XA)\,B$, where $X$ has one row for each token, $A$ has the shape
# $[h, f]$ and $B$ the shape $[f, h]$. Call the input of its second matrix $Z = \text{GELU}(XA)$.
# One matrix can be split over $p$ ranks in two ways:
#
# - By **columns**: rank $r$ holds some columns $A_r$. From the whole $X$ it computes $XA_r$, which
#   are some *complete* columns of the product.
# - By **rows**: rank $r$ holds some rows $B_r$. It needs only the matching columns $Z_r$ of its
#   input, but $Z_r B_r$ is only a *partial sum*. The product is $\sum_r Z_r B_r$.
#
# We split $A$ by columns and $B$ by rows. How many collectives do 4 ranks need in forward?

# %% tags=["predict"]
guess_sums = predict("collectives in the forward pass of a split MLP")
### GUESS guess_sums.commit(2)


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
print(f"summed in Llama-8B, 4096 tokens in bf16: {4096 * llama.hidden * 2 / 2**20:.0f} MiB")
show(*pictures.split_mlp(4))

# %% [markdown]
# GELU acts on each value separately, so a rank can apply it to its own columns of $XA$. The result
# is $Z_r = \text{GELU}(XA_r)$, exactly the columns of $Z$ that its rows of $B$ need. Every entry of
# $ZB$ is a sum over the $f$ inner values, and each rank adds up the terms of its own values:
#
# $$ \text{GELU}(XA)\,B = \sum_r Z_r B_r = \sum_r \text{GELU}(XA_r)\,B_r . $$
#
# Only this sum over $r$ needs communication.
#
# Why not split $A$ by rows? Each rank would have a partial sum of $XA$. GELU is not linear:
# $\text{GELU}(u + v)$ is not $\text{GELU}(u) + \text{GELU}(v)$. So the ranks would have to
# add up $XA$ *before* GELU, in one more all-reduce. It would have $f$ values per token, while the
# all-reduce at the end has only $h$.
#
# **Split the first matrix by columns and the second by rows. If the operation between them is
# elementwise, forward needs one all-reduce, of an activation; no weights are sent.**
#
# ## 2 The backward pass: f and g
#
# The forward pass is right. But autograd sees only what its own rank computes; it does not know
# that other ranks used the same $x$. Does this matter? Let rank $r$ multiply the same $x$ by
# $10^r$, and let the loss be the sum of these products over all 4 ranks. The derivative of this
# loss with respect to $x$ is $1 + 10 + 100 + 1000 = 1111$. What is `x.grad` on rank 2?

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
# No error was raised, but each rank has only one term of the gradient. All layers *before* this
# point would train on this one term. The chain rule says what is missing. If rank $r$ computes
# $y_r = \varphi_r(x)$, the loss $L$ depends on $x$ through all $p$ results:
#
# $$ \frac{\partial L}{\partial x} = \sum_{r=0}^{p-1}
# \Big(\frac{\partial y_r}{\partial x}\Big)^{\!T} \frac{\partial L}{\partial y_r} . $$
#
# Autograd on rank $r$ computes the term of $r$. A tensor that is used $p$ times receives $p$
# gradient terms, and here they are on $p$ ranks, so an all-reduce has to add them up.
#
# The sum at the end of the MLP is the opposite case. In $Y = \sum_r Y_r$, where $Y_r = Z_r B_r$ is
# the partial sum of rank $r$, each term has the derivative 1:
#
# $$ \frac{\partial L}{\partial Y_r} = \frac{\partial L}{\partial Y} . $$
#
# Every rank computes the same loss from the same $Y$, so it already has this gradient, and backward
# needs no communication here. Shoeybi et al. (2019, section 3) call these two boundaries **f** and
# **g**: f is the identity in forward and an all-reduce in backward, and g is the reverse. The
# picture follows one rank through both of them, first in forward, then in backward:

# %% tags=["picture"]
show(*pictures.f_and_g())

# %% [markdown]
# ### Exercise 1 (core): f and g
#
# *Difficulty 2 of 5, importance 5 of 5, about 10 minutes.*
#
# Every tensor-parallel layer is built from these two boundaries. Write f's backward and both passes
# of g, in about 7 lines. Example: if two ranks have the partial sums 3 and 4, g returns 7 on both.
# If the gradient of this 7 is 1, so is the gradient of the 3. `all_reduce` changes its argument in
# place, so sum a clone, and return it. Budget: one all-reduce in forward (in g), one in backward
# (in f).
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
# Megatron-LM calls the part of a model between f and g a *tensor-parallel region*. The course's
# versions of the two boundaries are therefore called `copy_to_region` (f) and `reduce_from_region`
# (g).
#
# Lesson 04 lists `all_reduce` as the backward of `all_reduce`; in g it is the identity. Both are
# right, for different losses. In lesson 04 each rank has a loss *of its own*, and we differentiate
# the **sum** of these losses. A term of an all-reduced sum enters all $p$ losses, so it receives
# $p$ gradient terms. Here all ranks compute *the same* loss, and it **counts once**. For example,
# let four ranks have the same loss $y = x_0 + \dots + x_3$. The gradient of $x_0$ is 4 if the four
# losses are added, and 1 if $y$ counts once.
#
# ### Exercise 2 (core): a split MLP
#
# *Difficulty 3 of 5, importance 5 of 5, about 15 minutes.*
#
# This is the MLP of Megatron-LM. Copy this rank's part of two whole `nn.Linear` into the four
# parameters that the docstring names, and compute forward, in about 8 lines. `weight` is stored
# as `[out, in]`: *columns of A are rows of* `up.weight`. Example: of 7 inner values on 4 ranks,
# rank 1 keeps values 2 and 3, and rank 3 only value 6. Budget: one all-reduce of an activation in
# each pass; no memory for other ranks' parts.
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
# **With f in front and g behind, a split MLP needs one all-reduce in each pass, and a rank holds
# $1/p$ of its matrices.**
#
# ## 3 Attention: whole heads
#
# The MLP could be split because GELU treats each value separately. In attention a softmax takes the
# place of GELU, and it is not elementwise: each of its outputs depends on the scores of many
# tokens. How can attention be split without a collective in the middle?
#
# The answer is its heads. Each head computes its queries, keys, values and scores without the other
# heads, and only the output projection `out` mixes them. So we use the same pair of splits: the
# projections to queries, keys and values by columns, and `out` by rows. But a column split must not
# cut through a head. Its scores are dot products over all values of the head, so a rank with half a
# head would have to communicate before the softmax.
#
# Some code bases keep the three projections in one tall matrix: the rows of $Q$, then those of $K$,
# then those of $V$. In grouped-query attention $K$ and $V$ have fewer heads than $Q$.
#
# ### Exercise 3 (further): which rows?
#
# *Difficulty 2 of 5, importance 2 of 5, about 10 minutes.*
#
# Whoever loads such a matrix into split attention needs to know which of its rows belong to a rank.
# Return their numbers as a list, in order. Of each of $Q$, $K$ and $V$, rank 0 takes the first
# heads, rank 1 the next ones. $p$ divides both numbers of heads. Example: with 2 ranks, 4 query
# heads, 2 key-value heads and `head_dim` 1, rank 0 takes the rows 0, 1, 4 and 6. About 5 lines.
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
# **Attention is split by heads, and a head stays on one rank. With 8 key-value heads, as in
# Llama-8B, this works for up to 8 ranks; with more, several ranks must hold copies of the same
# key-value head.**
#
# ## 4 The vocabulary
#
# The blocks are split. What is left are the embedding and the output layer, which in Llama-8B are
# the two largest matrices. The embedding is split by vocabulary entries: a rank looks up the tokens
# whose rows it holds, uses zeros for the others, and g adds up the results. The output layer is
# split by columns, with f in front, so each rank computes *some* of the logits. But the softmax in
# the loss needs a sum over all of them. Do the ranks have to gather the logits?
#
# For one token with the logits $z$ and the target $t$, the loss is
#
# $$ -\log \text{softmax}(z)_t = -\log \frac{e^{z_t}}{\sum_v e^{z_v}}
# = \log \sum_v e^{z_v} - z_t . $$
#
# Without care $e^{z_v}$ can overflow. Subtracting the maximum $m = \max_v z_v$ from all logits
# multiplies numerator and denominator by $e^{-m}$, so the fraction stays the same:
#
# $$ -\log \text{softmax}(z)_t = \log \sum_v e^{z_v - m} - (z_t - m) . $$
#
# Each rank can compute the maximum of its own logits and its own part of the sum, and one rank has
# $z_t$. So only three values per token have to be combined: the maximum, the sum, and the target's
# logit (Shoeybi et al. 2019, section 3).
#
# ### Exercise 4 (further): the loss of split logits
#
# *Difficulty 4 of 5, importance 3 of 5, about 20 minutes.*
#
# With this loss, no rank needs memory for all logits. This rank has the logits of the vocabulary
# entries `first`, `first + 1` ... Return on every rank the mean loss over all tokens, without those
# whose target is -100. Example: two ranks have one logit each, both 0; for target 0 both return
# $\log 2 \approx 0.69$. Budget: at most 3 all-reduces for both passes together, 3 values per token
# in total. About 10 lines.
#
# <details><summary>Hint: the maximum</summary>
# <code>dist.all_reduce(top, dist.ReduceOp.MAX)</code>, detached: it cancels out, so it needs no
# gradient. Without a maximum, exp can overflow. Use one maximum per token. With a single maximum
# for all tokens together, all exps of some token can become 0.
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
# PyTorch calls this *loss parallel*. There the logits stay a `DTensor`, a tensor that knows how it
# is split, and inside `with loss_parallel():` the usual cross-entropy works on it. How much does
# this save in Llama-8B, with 8192 tokens on 8 ranks?

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
# **The logits, often the largest activation, can stay split: the loss needs only three values per
# token from each rank.**
#
# *A place for a break.*
#
# ## 5 A whole GPT
#
# Now all parts of a GPT can be split. `parallelize(model, mesh)` splits a whole GPT, in place. The
# *mesh* says which ranks share the model; here it contains all of them. Each rank's model then
# returns its part of the logits, and `parallel_token_loss` is the loss of exercise 4. Does this
# model train like the whole model in one process?

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


# %% tags=["measured"]
one, pair, tiny = Ranks(1), Ranks(2), MODELS["tiny"]
alone, split = (on.run(train, 100, on is pair)[0][0] for on in (one, pair))
apart = [abs(a - b) for a, b in zip(alone, split, strict=True)]
claim("the curves never differ by more than 1e-8", max(apart) < 1e-8)
print(f"100 steps in float64: the losses differ by at most {max(apart):.1e}")

# %% [markdown]
# The difference is rounding. The ranks add the same terms in another order, and in floating-point
# arithmetic the order changes the last digits.
#
# What does a rank hold? The matrices are split. Norms, positions, and biases that are added after
# an all-reduce are whole on every rank, so a rank holds a little more than $1/p$ of the parameters.
#
# And what does it send? The tiny GPT has 2 layers. In each layer, attention and MLP both need one
# all-reduce in forward (g) and one in backward (f), so a layer has four. The embedding adds one
# in forward (g), and the output layer one in backward (f). The loss needs one for the maximum,
# and then the sums. The course's loss puts the two sums into one tensor, so it needs two
# all-reduces, where exercise 4 may use three. `cost.tensor_traffic` returns the list of these
# calls; the next cell compares it with the calls that the ranks really make.

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
print(f"a rank of 4 holds {held[2][0] / held[0][0]:.3f} of all; a step has {len(paper)} calls")

# %% [markdown]
# PyTorch splits a model with `DTensor` and a *plan*, a dict from the names of layers to the way in
# which each is split. The next cell does so with the same model, here with separate parameters for
# the embedding and the output layer. PyTorch needs more all-reduces, for two reasons. Its loss uses
# three where the course's uses two. And in this plan q, k and v each have an f of their own, so
# their three input gradients are all-reduced separately. The course first adds the three gradients
# on each rank, and then all-reduces once.

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
for name, sizes in {"this course": [size for _, size in ours], "PyTorch": theirs}.items():
    print(f"{name}: {len(sizes)} all-reduces, {sum(sizes)} bytes")
print(missing("megatron.core") or "Trained for 4 steps:")
for name in ["this course"] + ["Megatron-Core"] * (not missing("megatron.core")):
    ran = pair.run(beside.run_tensor_parallel, tiny, [BATCH] * 4, name == "this course")[0]
    print(f"{name}: loss {ran.losses[-1]:.5f}, {ran.median_ms:.0f} ms, {ran.calls()}")


# %% [markdown]
# **Up to rounding, a split model computes the numbers of one process. A rank holds $1/p$ of the
# matrices, and each layer needs four all-reduces, two in each pass.**
#
# ## 6 Dropout: equal here, different there
#
# The model of section 5 had no dropout. Random masks bring a new problem, because each rank draws
# them on its own.
#
# All ranks hold the residual stream, so dropout must draw *the same* mask for it on all of them.
# The heads of attention are split. Here the masks must differ, because one process would also
# draw another mask for each head. Suppose that we try the simplest way: each of two ranks starts
# with a *different* seed. Are the weights of the norms, which both ranks hold, still equal after 5
# steps?

# %% tags=["predict"]
guess_alike = predict("different seeds: are the norms still the same?", choices=("yes", "no"))
### GUESS guess_alike.commit("yes")

# %% tags=["failure"]
from course_lib.models.gpt import Dropout
from course_lib.tensor_parallel import ShardedDropout


def masks(rank, own_seed, for_heads):
    torch.manual_seed(rank if own_seed else 0)
    return Dropout(0.5)(torch.ones(64)), for_heads(0.5)(torch.ones(1, 2, 64))


hows = {"one seed": (False, Dropout), "own seeds": (True, Dropout)}
hows["sharded"] = (False, ShardedDropout)
for name, how in hows.items():
    (a, b), (c, d) = pair.run(masks, *how)
    print(f"{name:9} equal on the residual stream: {torch.equal(a, c)}, heads: {torch.equal(b, d)}")
for own_seed in (False, True):
    (losses, a), (_, b) = pair.run(train, 5, True, own_seed, 0.1)
    print(f"own seeds {own_seed}: loss {losses[-1]:.2f}, norms differ by {(a - b).abs().max():.0e}")
reveal(guess_alike, "yes" if torch.equal(a, b) else "no")

# %% [markdown]
# With a seed of its own, each rank drops other values of the residual stream, computes other
# gradients for the norms, and changes them differently. The printed losses do not show it, but the
# ranks no longer hold *one* model.
#
# No choice of seeds solves this. With a different seed on each rank, the masks differ on the
# residual stream, too; with the same seed on all ranks, they are equal on the heads, too. There are
# two solutions. With the course's `ShardedDropout`, all ranks have the same seed. Every rank draws
# the mask of all heads, as one process would, and uses the part for its own heads. Megatron-LM has
# two random states: one with the same seed on all ranks, and one for split tensors, whose seed
# depends on the rank.
#
# **Dropout masks must be equal on tensors that all ranks hold, and independent on split ones.**
#
# ## 7 What it costs
#
# The split model computes the right numbers, and a rank needs only $1/p$ of the memory for
# matrices. The price is communication: each layer has four all-reduces that one GPU would not need.
# Is a layer on $p$ ranks still faster than on one?
#
# ### Exercise 5 (core): the price of a layer
#
# *Difficulty 2 of 5, importance 5 of 5, about 10 minutes.*
#
# The answer says how many ranks are worth using. Forward and backward of one layer (attention and
# MLP) take `compute_s` on one rank. How long do they take on $p$ ranks, in bf16, with ring
# all-reduces (lesson 04) and without overlap? `link` has `latency_s` and `bytes_per_s`. Example:
# with a latency of 1 ms and so much bandwidth that the bytes take no time, 100 ms on one rank
# become 58 ms on two. About 3 lines.
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
# The exercise assumes that a rank waits during every all-reduce. In forward it has to, because the
# next matrix needs the sum. In backward there is other work. For a matrix that is split by columns,
# backward computes two products: the gradient of the input, which f has to sum before the earlier
# layers can go on, and the gradient of the **weights**, which nobody needs before the optimizer
# step. So a rank can compute the input gradient, start its all-reduce, compute the weight gradient
# meanwhile, and only then wait for the all-reduce. `ColumnParallelLinear` does this with
# `overlap=True`.
#
# At most the shorter of the two times can be hidden. If the weight gradient takes 30 ms and the
# all-reduce 20 ms, overlap saves 20 ms. The next cell measures it on two ranks and a slow emulated
# link.

# %% tags=["picture", "measured"]
wire = Link(name="slow link", latency_s=1e-3, bytes_per_s=100e6)
with Ranks(2, link=wire) as wired:
    runs = lab.measure_overlap(wired)
claim("backward with overlap is faster", runs.saved_s > 0)
show(*pictures.overlapped_backward(runs, wire))

# %% [markdown]
# The results with and without overlap are equal bit for bit, because the ranks add the same numbers
# in the same order. Megatron-LM overlaps by default.
#
# The all-reduces of forward can be overlapped, too, if a matrix product is computed in pieces:
# while one piece is sent, the next one is computed. *User buffers* in Transformer Engine and
# *async TP* in PyTorch do this.
#
# ### When communication takes longer
#
# Without overlap, which of the two takes longer, computation or communication? Count both for one
# token and one layer with $f=4h$.
#
# - **Computation.** Attention (without grouped queries) has $4h^2$ weights, and the MLP $8h^2$.
#   Forward takes 2 FLOP per weight, and backward twice as many: $6 \cdot 12\,h^2 = 72\,h^2$. Each
#   rank computes $1/p$ of them. (Attention scores, which only add computation, are left out.)
# - **Communication.** A ring all-reduce of $n$ bytes sends $2n\,(p-1)/p$ bytes per rank, and in
#   bf16 a token has $n = 2h$. The four all-reduces send $16\,h\,(p-1)/p$.
#
# Both are proportional to the number of tokens, so it cancels in their ratio:
#
# $$ \frac{72\,h^2 / p}{16\,h\,(p-1)/p} = \frac{9h}{2\,(p-1)} \text{ FLOP per byte.} $$
#
# A GPU computes $F$ FLOP/s and sends $\beta$ bytes/s. Divide the FLOP by $F$ and the bytes by
# $\beta$ to get two times. Apart from latency, communication takes longer if the ratio is below
# $F/\beta$, that is, if $h < \frac{2}{9}(p-1)F/\beta$. So more ranks, faster GPUs and slower links
# all need a wider model; a larger batch does not help.

# %% tags=["picture"]
from course_lib.cost.hardware import H100

needed = cost.break_even_hidden(8, H100.peak(), H100.links["NVLink"])
print(f"8 H100 at their peak, over NVLink: communication takes longer below h = {needed:,.0f}")
show(*pictures.width_picture())

# %% [markdown]
# A GPU that reaches only half its peak computes twice as long, so half this $h$ is enough for
# computation to take longer. The stars are published runs: NVIDIA's models (16B to 462B), and the
# 3B model of Tazi et al. (2025). NVIDIA's models lie above the line of NVLink, so on it they
# compute longer than they communicate. They lie below the lines of PCIe and of one InfiniBand
# adapter: with these links, communication would take longer, if the GPUs computed at their peak.
#
# The 3B model ($h=3072$ in nanotron) lies near NVLink's line at $p=8$, which is one node. With 16
# ranks, every all-reduce has to cross from one node to the other. What fraction of the tokens/s per
# GPU on 8 ranks is left on 16?

# %% tags=["predict"]
guess_drop = predict("tokens/s per GPU on 16 ranks divided by those on 8 (like 3/4)")
### GUESS guess_drop.commit(3 / 4)

# %% tags=["picture"]
h100 = cost.h100_scaling()
reveal(guess_drop, h100.kept(8, 16)[0])  # as published, not by formula
show(*pictures.h100_picture(h100))

# %% [markdown]
# The circles are the formula. It adds the time of the FLOP (at a speed fitted at $p=2$) and the
# time of the bytes (at the bandwidths that Tazi et al. measured). Inside a node it is within 3 % of
# the black stars, the runs without sequence parallelism (section 8). Across nodes these runs are
# slower than the formula. It ignores, for example, the norms, and that a GPU multiplies thin
# matrices less efficiently. Narayanan et al. (2021, section 3.2) advise tensor parallelism inside a
# node, and pipeline parallelism across nodes.
#
# Splitting also frees memory, which can hold the activations of more sequences. Does a larger batch
# make communication cheaper? The number of messages stays the same, so all sequences together pay
# the latency once. But computation and bytes both grow with the number of sequences. Compare one
# sequence with $p$ sequences:

# %% tags=["picture"]
from course_lib.tensor_parallel.explorer import degree_explorer

degree_explorer()

# %% [markdown]
# **Keep tensor parallelism among GPUs that NVLink connects, and use pipeline parallelism (lesson
# 08) or data parallelism (lesson 05) across slower links.**
#
# ## 8 Sequence parallelism
#
# One part of the model is still not divided. Between g and the next f, all ranks compute and keep
# the same values: the norms, dropout, and the residual stream. These operations treat each token
# separately, so the ranks can split them by *tokens* (Korthikanti et al. 2022, section 4.2.2).
#
# The split matrices still need all tokens on every rank, so an **all-gather** replaces f. After
# them, a rank needs the complete sum, but only for its own tokens, so a **reduce-scatter** replaces
# g. Each of the two is the backward of the other (lesson 04). So in backward a reduce-scatter runs
# in place of f, and an all-gather in place of g.
#
# The name has a second meaning. In DeepSpeed-Ulysses (Jacobs et al. 2023), "sequence parallelism"
# splits the tokens in the whole layer, attention included, and no matrix is split. Before and after
# attention, all-to-alls exchange the values, so that during attention a rank has all tokens, but
# only some of the heads. This course counts that method as *context parallelism*.
#
# Forward now has two collectives where plain tensor parallelism has one. How many bytes does a rank
# send, divided by the bytes of the plain version?

# %% tags=["predict"]
guess_bytes = predict("bytes sent with sequence parallelism, divided by plain")
### GUESS guess_bytes.commit(0.5)

# %% tags=["picture"]
again = {"sequence_parallel": True, "gathers_again": True}
hows = {"plain": {}, "tokens split": {"sequence_parallel": True}, "gathers again": again}
sent = {n: sent_bytes(cost.tensor_traffic(llama, 1, 4096, **how), 8) for n, how in hows.items()}
reveal(guess_bytes, sent["tokens split"] / sent["plain"])
show(*pictures.sequence_region(4))

# %% [markdown]
# A ring all-reduce *is* a reduce-scatter, then an all-gather (lesson 04). Sequence parallelism
# sends the same bytes, but moves the two halves apart. Now dropout and the norms stand between
# them, and they are computed once for each token instead of on all $p$ ranks.
#
# ### Exercise 6 (core): gather and scatter
#
# *Difficulty 4 of 5, importance 4 of 5, about 15 minutes.*
#
# Each rank holds $\lceil s/p \rceil$ tokens, in rank order; the last tokens may be padding. Write
# both collectives, and put them before and after `part`, a function of all tokens.
# `Boundary.apply(x, function, adjoint)` returns `function(x)`; in backward it computes the gradient
# of x as `adjoint(grad)`. About 10 lines. Example: of 3 tokens on 2 ranks, rank 1 holds one token
# and padding, and `part` gets the 3 tokens. In the output and in the gradient of x, padding
# is zero. Budget: one all-gather and one reduce-scatter in each pass.
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
# How much memory does this save? As in lesson 01, count what a GPT layer ($f=4h$, no grouped
# queries) keeps for backward in bf16, in units of $sbh$ bytes (Korthikanti et al. 2022, section
# 4.1):
#
# | kept for backward | $sbh$ bytes | divided by tensor parallelism |
# |---|---|---|
# | inputs of the two norms | 4 | no |
# | input of $q$, $k$ and $v$; input of the MLP | 2 + 2 | no |
# | two dropout masks, 1 byte per value | 2 | no |
# | $q$, $k$ and $v$; input of `out` | 6 + 2 | yes |
# | inputs of GELU and of the second matrix | 8 + 8 | yes |
#
# Together these are **34**: 10 that stay whole, and 24 that tensor parallelism divides. The scores
# of $a$ heads, which are divided as well, add $5as/h$ (softmax 2, dropout mask 1, output after
# dropout 2). Sequence parallelism divides the 10, too. The bytes of a layer on one rank, without
# and with it:
#
# $$ sbh\left(10 + \frac{24}{p} + \frac{5as}{hp}\right) \;\to\;
# \frac{sbh}{p}\left(34 + \frac{5as}{h}\right) $$
#
# There is one difficulty. The gradient of a weight is computed from the *whole* input of its
# matrix, with the tokens of all ranks. There are two ways to have this input in backward:
#
# - **Keep it.** The course's layers do so without `overlap`. The two gathered inputs, $4\,sbh$, are
#   then not divided.
# - **Gather it again** in backward, while the input gradient is computed. Megatron-LM does so,
#   and the course's layers with `overlap`. A rank keeps only its own tokens, but sends more. The
#   four all-reduces of a layer are eight halves, each a gather or a reduce-scatter. Gathering the
#   two inputs again adds two such halves, so a rank sends 10/8 = 5/4 of the bytes.
#
# The next cell measures a layer on 1, 2 and 4 ranks, beside the formula.

# %% tags=["picture"]
whole = {"tensor parallel": 10, "sequence parallel": 4, "inputs gathered again": 0}  # sbh bytes
sp, kept = {"sequence_parallel": True}, {}
for name, how in zip(whole, ({}, sp, sp | {"overlap": True}), strict=True):
    on_p = {1: one, 2: pair, 4: ranks}.items()
    kept[name] = {p: on.run(lab.split_layer_bytes, tiny, 2, 64, **how)[0] for p, on in on_p}
less = kept["inputs gathered again"][4] / kept["tensor parallel"][4]
more = sent["gathers again"] / sent["plain"]
print(f"gathering again: {less:.2f} of the bytes kept, {more:.2f} times the bytes sent")
show(*pictures.layer_memory(tiny, 2, 64, whole, kept))

# %% [markdown]
# One more gradient needs care. Norms, positions, and the biases that are added after a
# reduce-scatter are whole on every rank, but a rank applies them only to its own tokens. The next
# cell records one backward pass on two ranks, compares it with one process, and prints how each
# parameter is used over tp, and what a rank then has of its gradient.

# %%
from course_lib.debugging.type_tables import type_lines, types_on_mesh
from course_lib.mesh import Mesh

names = ("attention.q.weight", "attention.out.weight", "attention.out.bias", "mlp_norm.weight")
names, of_tp = [f"blocks.0.{name}" for name in names] + ["positions.weight"], Mesh(pp=1, dp=1, tp=2)
types = {"": types_on_mesh(pair, tiny, of_tp)}
types["tokens split:"] = types_on_mesh(pair, tiny, of_tp, sequence_parallel=True)
print(*type_lines(names, ["tp"], types), sep="\n")

# %% [markdown]
# *Varying*: each rank has a shard, and the gradient of its shard. *Invariant*: the ranks hold
# copies and compute the same with them, so each has the whole gradient, and a sum would count it
# twice. *Replicate*: the ranks use their copies in different computations, so each has a *Partial*
# gradient, a term of a sum. Splitting the tokens changes no parameter, but it changes this type.
# `finish_gradients(model)` therefore all-reduces these gradients, once per step. (The names are
# those of meta-pytorch/spmd_types, 2026. Lesson 17 finds faults with them.)
#
# **Sequence parallelism also divides the activations between g and the next f. To divide the inputs
# of the matrices as well, backward has to gather them again, and a rank then sends 5/4 of the
# bytes.**
#
# ## What to keep
#
# - Split by columns, then by rows: a layer needs four all-reduces. Those of backward can run while
#   weight gradients are computed.
# - The slower the link and the more ranks, the wider the layers have to be. So use NVLink.
# - Sequence parallelism sends the same bytes, and divides the activations that plain tensor
#   parallelism leaves whole.
# - Wrong masks, a bias added $p$ times, or a missing sum raise no error, but train another model.
#
# **Read on**
#
# - Shoeybi et al. 2019, *Megatron-LM*, section 3: f, g and the split loss, in the original.
# - Korthikanti et al. 2022, *Reducing Activation Recomputation*, section 4: sequence parallelism,
#   and the 34.
# - Narayanan et al. 2021, *Efficient Large-Scale Language Model Training*, section 3: tensor and
#   pipeline parallelism together.
# - Wang et al. 2024, *Introducing Async Tensor Parallelism in PyTorch*: how to hide the all-reduces
#   of forward.
# - Tazi et al. 2025, *The Ultra-Scale Playbook*, "Tensor Parallelism": the measurements of section
#   7.
# - Jacobs et al. 2023, *DeepSpeed Ulysses*: the other "sequence parallelism", for long sequences.
