# %% [markdown]
# # 07 Tensor parallelism: split the matrices
#
# Data parallelism keeps the whole model on every rank. Now we cut it up: every rank gets a piece of
# every matrix, all see the *same* batch, and in each layer they add up what they found. Half of
# this lesson is arithmetic, the other half is a question of wires. As always: **predict**, **run**,
# **compare**.
#
# | symbol | in code | meaning |
# |---|---|---|
# | $p$ | `p` | ranks that share one model (its *tp* degree) |
# | $h$, $f$ | `hidden`, `ffn_hidden` | numbers a token has: between layers; inside of an MLP |
# | $n$ | `n` | bytes of one activation, `[batch, seq, hidden]` |
# | $\alpha$, $\beta$ | `link` | latency, bytes a second (lesson 04) |

# %%
# %load_ext course_lib.ranks
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from course_lib.checks import check
from course_lib.core import COMMUNICATION_KINDS, INFINIBAND, MODELS, NVLINK, Link, TwoLevelLink
from course_lib.display import Voices, compare, explore, predict, reveal, show
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from course_lib.ranks import Ranks, record
from course_lib.tensor_parallel import copy_to_region, pictures, reduce_from_region

# %% [markdown]
# ## 1 Two ways to cut a matrix
#
# An MLP is $Y = \text{GELU}(XA)\,B$. Cut $A$ by **columns**: each rank computes some columns of
# $XA$, and those are complete. Cut $B$ by **rows**: each rank needs only some columns of its input,
# but all it gets is *a part of each sum*. Do both. How often do 4 ranks talk in forward? And in
# Llama-8B, bf16, for one sequence of 4096 tokens: how large is what they say?

# %% tags=["predict"]
guess_sums = predict("collectives in the forward pass of a split MLP")
guess_message = predict("what is summed there, in Llama-8B", unit="MiB")


# %%
def split_forward(rank, x, A, B):
    p = dist.get_world_size()
    columns, rows = A.tensor_split(p, dim=1)[rank], B.tensor_split(p, dim=0)[rank]
    y = F.gelu(x @ columns) @ rows  # a part of every sum
    dist.all_reduce(y)
    return y


ranks, llama = Ranks(4), MODELS["llama-8b"]
x, A, B = torch.randn(6, 8), torch.randn(8, 32), torch.randn(32, 8)
right, by_rank = F.gelu(x @ A) @ B, ranks.run(split_forward, x, A, B)
print("as one process:", all(torch.allclose(y, right, atol=1e-4) for y in by_rank))
reveal(guess_sums, sum(event.kind == "all_reduce" for event in ranks.events) / 4)
reveal(guess_message, 4096 * llama.hidden * 2 / 2**20)

# %% tags=["picture"]
title = "Columns, then rows: what a rank needs for B it has computed itself"
show(pictures.split_mlp(4, title), alt=f"{title}; 1 sum over 4 ranks at the end")

# %% [markdown]
# The columns of a rank's $A$ are the rows of its $B$. And the other way round? **Break it**: cut
# $A$ by rows, and forget that GELU needs whole sums.

# %% tags=["failure"]
parts = [x[:, mine] @ A[mine] for mine in torch.arange(8).tensor_split(4)]
wrong, right = sum(map(F.gelu, parts)), F.gelu(sum(parts))
for name, y in {"sum, then GELU": right, "GELU, then sum": wrong}.items():
    print(f"{name}: off by {(y - F.gelu(x @ A)).abs().max():.0e}")

# %% [markdown]
# GELU of a part of a sum is no part of anything. Right would be a sum in the *middle*, of $f$
# numbers a token. So: columns first.
#
# **Columns, then rows: one sum of an activation's size; weights never travel.**
#
# ## 2 The way back: f and g
#
# `dist.all_reduce` is not part of the graph. So what does backward do? Rank $r$ multiplies the
# same $x$ by $10^r$, and the loss is the sum over all ranks: its derivative is 1111. What does
# rank 2 find in `x.grad`?

# %% tags=["predict"]
guess_grad = predict("x.grad on rank 2")


# %% tags=["failure"]
def lonely(rank):
    x = torch.ones(1, requires_grad=True)
    (10.0**rank * x).sum().backward()  # the other ranks' parts of the loss use x, too
    return x.grad.item()


print("x.grad by rank:", found := ranks.run(lonely))
reveal(guess_grad, found[2])

# %% [markdown]
# Nothing failed; but the layers *before* would train on a part of their gradient. What is used on
# all ranks needs the sum of what all ranks say of it. Megatron's paper calls the pair **f**
# (nothing in forward, all-reduce in backward) and **g** (all-reduce in forward, nothing in
# backward).
#
# ### Exercise 1: f and g
#
# An `autograd.Function` says what its backward is. Clone before you sum: the tensor you get may be
# somebody else's. Return the one you summed. One all-reduce in forward and one in backward, on
# every rank, in the dtype of what is summed; x has any shape (also `[]`), and what `part` returns
# may have another one. `part` runs once; inf and nan stay. The same sum is needed where no
# gradient is. About 7 lines, 10 minutes.
#
# <details><summary>Hint: p times too large</summary>
# $y = y_0 + y_1 + \dots$: the derivative of $y$ by $y_1$ is 1. Behind g, all ranks go on alike with
# the same $y$. So every rank has the whole gradient of $y$ already, and hands it to its own part.
# </details>


# %% tags=["exercise"] exercise="tensor_parallel-1"
class CopyToRegion(torch.autograd.Function):  # f
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ### BEGIN SOLUTION: what do the other ranks say of x?
        total = grad.clone()
        dist.all_reduce(total)
        return total
        ### END SOLUTION


class ReduceFromRegion(torch.autograd.Function):  # g
    @staticmethod
    def forward(ctx, x):
        ### BEGIN SOLUTION: every rank has a part of the sum
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
# From here on we take the course's own pair: `copy_to_region` is f, `reduce_from_region` is g.
#
# ### Exercise 2: a split MLP
#
# Keep this rank's part of two `nn.Linear` and nothing else, under the names in the docstring, and
# leave both layers and x as they are (only the bias of `down` may be shared); x has any shape
# `[..., hidden]`. Careful: `weight` is stored as `[out, in]`, so *columns of A are rows of*
# `up.weight`. A width need not divide by $p$; `tensor_split` copes. One all-reduce in forward and
# one in backward, of an activation each. About 8 lines, 15 minutes.
#
# <details><summary>Hint: the output is off by a constant</summary>
# Whatever is added before the sum is added $p$ times. Where does the bias of <code>down</code>
# belong? (Not $1/p$ of it before: every rank finds the whole gradient, so a step would change the
# sum $p$ times too much.)
# </details>
# <details><summary>Hint: it keeps too many bytes</summary>
# A slice is a view, and keeps the whole matrix alive. Indexing with a tensor copies:
# <code>weight[mine]</code>; so does <code>.clone()</code>.
# </details>


# %% tags=["exercise"] exercise="tensor_parallel-2"
class SplitMLP(nn.Module):
    """This rank's part of down(gelu(up(x))): up_weight, up_bias, down_weight, down_bias."""

    def __init__(self, up, down):
        super().__init__()
        rank, p = dist.get_rank(), dist.get_world_size()
        mine = torch.arange(up.out_features).tensor_split(p)[rank]  # my numbers between the two
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
# **f in front, g behind: one all-reduce in forward, one in backward, and $1/p$ of the weights.**
#
# ## 3 Attention: whole heads
#
# Heads compute beside one another, and only `out` mixes them: queries, keys and values by columns,
# `out` by rows. But a *head* stays whole, since its softmax needs whole dot products. Many codes
# keep one tall matrix, $Q$ over $K$ over $V$; where several queries share a key, $K$ and $V$ have
# fewer heads.
#
# ### Exercise 3: which rows?
#
# The rows of that matrix for one rank, in order, as a new list: of each of the three, rank 0 takes
# the first heads, rank 1 the next ones. $p$ divides both numbers of heads. About 5 lines.
#
# <details><summary>Hint: rank 0 has no values</summary>
# It is three matrices under one another. Cut each of them into $p$ parts.
# </details>


# %% tags=["exercise"] exercise="tensor_parallel-3"
def rows_of_rank(rank, p, num_heads, num_kv_heads, head_dim):
    """The numbers of this rank's rows: its heads of q, then those of k, then those of v."""
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
# **Heads are what attention is cut into; with 8 heads of keys, more than 8 ranks need copies.**
#
# ## 4 The vocabulary
#
# The embedding is cut by tokens: a rank looks up those it has, gives zeros for the others, and g
# adds up. The output layer is cut by columns, so each rank has the logits of *some* tokens. The
# loss needs all of them. Or does it?
#
# $$ -\log \text{softmax}(z)_t = \log \sum_v e^{z_v - m} - (z_t - m), \quad m = \max_v z_v $$
#
# Three numbers a token are missing: $m$, the sum, $z_t$. Against gathering Llama's 128,256 logits,
# how many times fewer numbers is that?

# %% tags=["predict"]
guess_fewer = predict("numbers of the logits, by numbers that have to be sent")

# %%
reveal(guess_fewer, llama.vocab / 3)

# %% [markdown]
# ### Exercise 4: the loss, without the logits
#
# This rank has the logits of the tokens `first`, `first + 1` ... Targets of -100 have no loss.
# Return the mean over the others, the same on every rank, in the dtype of the logits or a wider
# one; write to neither argument. Budget, forward and backward: 3 all-reduces, of 3 numbers a token
# in all. About 10 lines, 20 minutes.
#
# <details><summary>Hint: the maximum</summary>
# <code>dist.all_reduce(top, dist.ReduceOp.MAX)</code>, on a detached tensor; one for each token,
# or exp overflows. It cancels out, so it needs no gradient.
# </details>
# <details><summary>Hint: the target is on another rank</summary>
# With <code>local = targets - first</code>, it is here if <code>(local >= 0) & (local <
# logits.shape[1])</code>. Elsewhere look up any logit, and multiply it by 0.
# </details>
# <details><summary>Hint: no gradient, or p times too large</summary>
# Sum with <code>reduce_from_region</code>: it is g. What is the same on all ranks already, such as
# the loss in the end, needs no sum.
# </details>


# %% tags=["exercise"] exercise="tensor_parallel-4"
def split_cross_entropy(logits, targets, first):
    """Mean cross-entropy; logits [tokens, own part of the vocabulary], targets [tokens]."""
    ### BEGIN SOLUTION: the largest, the sum of exponentials, the target's logit
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
# **The largest tensor of the step stays where it is: three numbers a token travel.**
#
# ## 5 A whole GPT
#
# `parallelize(model, mesh)` does all of that to a GPT, in place. The *mesh* says who belongs
# together; here, all ranks. What comes out are split logits, and `parallel_token_loss` is the loss
# you have just written. Does it train like one process?

# %%
from course_lib.tensor_parallel import gather_tensors, parallel_token_loss, parallelize


def split_gpt(spec, sequence_parallel=False, **more):
    torch.manual_seed(0)  # all ranks begin with the same weights, of which each keeps its part
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    return parallelize(GPT(spec, **more), mesh, sequence_parallel)


# %%
def train(rank, steps, split, own_seed=False, dropout=0.0):
    torch.manual_seed(0)
    model = split_gpt(tiny, dropout=dropout) if split else GPT(tiny)
    loss_of = parallel_token_loss if split else token_loss
    torch.manual_seed(rank if own_seed else 0)  # for dropout, in section 7
    sgd, losses = torch.optim.SGD(model.double().parameters(), lr=0.3, momentum=0.9), []
    for n in range(steps):
        inputs, targets = next_tokens(token_batch(n, batch=8, seq=16, vocab=256))
        sgd.zero_grad()
        loss = loss_of(model(inputs), targets)
        loss.backward()
        sgd.step()
        losses.append(loss.item())
    return losses, model.norm.weight.detach()


# %% tags=["picture"]
one, pair, tiny = Ranks(1), Ranks(2), MODELS["tiny"]
alone, split = (on.run(train, 100, on is pair)[0][0] for on in (one, pair))
apart = max(abs(a - b) for a, b in zip(alone, split, strict=True))
title = f"100 steps: loss {alone[0]:.2f} to {alone[-1]:.2f}, never more than {apart:.0e} apart"
axes = {"x_label": "step", "y_label": "loss", "note": "line: one process; dots: 2 ranks"}
voices = Voices(formula=alone[::4], measurement=split[::4])
show(compare(range(0, 100, 4), voices, title, **axes), alt=f"{title}; dots lie on the line")

# %% [markdown]
# The same numbers, up to the order of sums: that is the law, and the library's tests hold every
# gradient to it.
#
# What does a rank hold? Matrices are cut; norms, positions and the biases behind a sum are whole
# on each. And what does it send? Our tiny GPT has 2 layers, with two sums each way. Add one for the
# embedding, one for the head's f, and the loss, which the course sends in two calls.

# %% tags=["predict"]
guess_part = predict("parameters on each of 4 ranks, as a part of all (like 1/3)")
guess_calls = predict("collectives in one step of the tiny GPT")

# %%
from course_lib.cost.traffic import sent_bytes, traffic_s
from course_lib.tensor_parallel.cost import gathered_bytes, tensor_traffic

BATCH = next_tokens(token_batch(0, batch=2, seq=64, vocab=256))


def one_step(rank, spec):
    model = split_gpt(spec)
    with record() as log:
        parallel_token_loss(model(BATCH[0]), BATCH[1]).backward()
    calls = [(e.kind, e.num_bytes) for e in log.events if e.kind in COMMUNICATION_KINDS]
    grads = {name: param.grad for name, param in model.named_parameters()}
    return sum(param.nbytes for param in model.parameters()), calls, gather_tensors(model, grads)


# %%
held = [on.run(one_step, tiny)[0] for on in (one, pair, ranks)]
paper = [(call.kind, call.num_bytes) for call in tensor_traffic(tiny, 2, 64, number_bytes=4)]
print("every call as on paper, on 1, 2, 4 ranks:", [calls == paper for _, calls, _ in held])
reveal(guess_part, held[2][0] / held[0][0])
reveal(guess_calls, len(paper))

# %% [markdown]
# PyTorch has this in its `DTensor`: a plan says which layer is cut which way. Same model (untied),
# same batch. The loss takes three calls in place of two, and q, k and v have an f *each*. How many
# all-reduces does PyTorch make, by ours?

# %% tags=["predict"]
guess_torch = predict("PyTorch's all-reduces, by ours (like 3/2)")

# %%
from torch.distributed.tensor import DTensor, Replicate, parallel


def with_dtensor(rank, spec):
    torch.manual_seed(0)
    model, mesh = GPT(spec), init_device_mesh("cpu", (dist.get_world_size(),))
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


# %%
untied = replace(tiny, tied=False)
(_, ours, grads), (theirs, others) = (pair.run(run, untied)[0] for run in (one_step, with_dtensor))
print("same gradients:", all(torch.allclose(grads[n], others[n], atol=1e-6) for n in grads))
print(f"bytes: ours {sum(num_bytes for _, num_bytes in ours)}, PyTorch's {sum(theirs)}")
reveal(guess_torch, len(theirs) / len(ours))

# %% [markdown]
# **A split model is the same model: its numbers, $1/p$ of its matrices, four sums a layer.**
#
# ## 6 Sequence parallelism
#
# Between g and the next f, all ranks do the same work on the same tensor, and all keep it for
# backward: norms, dropout, the stream itself. Why not cut that by *tokens*? Then each region begins
# with an all-gather (in place of f) and ends with a reduce-scatter (in place of g), and backward
# the other way round. Compared with all-reduces, how many bytes is that?

# %% tags=["predict"]
guess_bytes = predict("bytes sent with sequence parallelism, by bytes without")

# %%
from course_lib.core.parallelism import Parallelism
from course_lib.memory import TORCH_CPU, activations, params_on_rank
from course_lib.memory.saved_tensors import measure_saved, tensors_of


def kept_kib(rank, sequence_parallel):
    model = split_gpt(tiny, sequence_parallel)
    given = [*tensors_of(model), *BATCH]
    kept = measure_saved(lambda: parallel_token_loss(model(BATCH[0]), BATCH[1]), given=given)
    return sum(one.num_bytes for one in kept) / 2**10


def on_paper_kib(p, sequence_parallel):
    parallelism = Parallelism(tp=p, sequence_parallel=sequence_parallel)
    parts = activations(tiny, 2, 64, number_bytes=4, parallelism=parallelism, kernels=TORCH_CPU)
    return (sum(parts.values()) + sequence_parallel * gathered_bytes(tiny, 2, 64, p, 4)) / 2**10


with_it, without = (tensor_traffic(llama, 1, 4096, sequence_parallel=sp) for sp in (True, False))
reveal(guess_bytes, sent_bytes(with_it, 8) / sent_bytes(without, 8))

# %% tags=["picture"]
p_values = [1, 2, 4]
on_paper = [params_on_rank(tiny, Parallelism(tp=p)) * 4 / 2**10 for p in p_values]
curves = {"parameters": Voices(formula=on_paper, measurement=[num / 2**10 for num, *_ in held])}
for name, sp in {"activations": False, "the same, sequence parallel": True}.items():
    measured = [on.run(kept_kib, sp)[0] for on in (one, pair, ranks)]
    curves[name] = Voices(formula=[on_paper_kib(p, sp) for p in p_values], measurement=measured)
title = f"{measured[0]:.0f} KiB of activations become {measured[2]:.0f} with both, on 4 ranks"
show(compare(p_values, curves, title, x_label="ranks p", y_label="KiB on a rank"), alt=title)

# %% [markdown]
# An all-reduce *is* a reduce-scatter and an all-gather (lesson 04); here they stand apart, and no
# activation is kept $p$ times. (With one exception: we keep what an all-gather brought. Megatron
# gathers again in backward, and keeps $1/p$ of that, too.)
#
# The price: norms have seen only their own tokens, so a norm's gradient is a part of a sum. After
# backward, `finish_gradients(model)` adds those up, in one small message a step.
#
# What is that at full size? Move `tp` and `sequence parallel`:

# %% tags=["picture"]
from course_lib.memory.explorer import calculator

calculator("--model llama-8b --gpu h100 --batch 4 --seq 8192 --tp 8")

# %% [markdown]
# **Same bytes on the wire, fewer in memory.**
#
# ## 7 Dropout: alike here, different there
#
# Dropout draws random numbers. On the stream, which all ranks hold, they must draw *the same*; on
# their own heads they must draw *different* ones. So neither one seed for all ranks nor a seed for
# each is right. After 5 steps with a seed for each: are the norms still the same on all ranks?

# %% tags=["predict"]
guess_alike = predict("a seed for each rank: are the norms still the same?", choices=("yes", "no"))

# %% tags=["failure"]
from course_lib.models.gpt import Dropout
from course_lib.tensor_parallel import ShardedDropout


def masks(rank, own_seed, for_heads):
    torch.manual_seed(rank if own_seed else 0)
    return Dropout(0.5)(torch.ones(64)), for_heads(0.5)(torch.ones(1, 2, 64))


hows = {"one seed": (False, Dropout), "one each": (True, Dropout), "ours": (False, ShardedDropout)}
for name, how in hows.items():
    (a, b), (c, d) = pair.run(masks, *how)
    print(f"{name:8} alike on the stream: {torch.equal(a, c)}, on the heads: {torch.equal(b, d)}")
for own_seed in (False, True):
    (losses, a), (_, b) = pair.run(train, 5, True, own_seed, 0.1)
    print(f"own seeds {own_seed}: loss {losses[-1]:.2f}, norms {(a - b).abs().max():.0e} apart")
reveal(guess_alike, "yes" if torch.equal(a, b) else "no")

# %% [markdown]
# The loss looks the same; but there is no *one* model any more. The course's `ShardedDropout` draws
# the mask of all heads on every rank and keeps its part: exactly the masks of one process. Megatron
# keeps a second random state for what is split, seeded with the rank.
#
# **What is whole on all ranks needs one random state; what is split needs another.**
#
# ## 8 What it costs
#
# Each sum stands in the way of the next matrix: nothing hides it behind computing.
#
# ### Exercise 5: the price of a layer
#
# Forward and backward of one layer (attention and MLP) takes one rank `compute_s`. On $p$ ranks, in
# bf16, with rings? `link` has `latency_s` and `bytes_per_s`. About 3 lines.
#
# <details><summary>Hint: how many all-reduces?</summary>
# Attention has an f and a g, and so has the MLP. Each talks in one direction only.
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
# Inside of a node there is NVLink, between nodes InfiniBand. We emulate both, a thousand times
# slower, so that two processes can show the difference. How much longer does a step of the tiny GPT
# talk over the slow one, with 32 sequences of 64 tokens?

# %% tags=["predict"]
guess_slower = predict("seconds over InfiniBand, by seconds over NVLink")


# %%
def talking_ms(rank, batch):
    model, times_ms = split_gpt(tiny), []
    inputs, targets = next_tokens(token_batch(0, batch=batch, seq=64, vocab=256))
    for _ in range(3):
        with record() as log:
            parallel_token_loss(model(inputs), targets).backward()
        times_ms.append(1e3 * sum(e.duration_s for e in log.events if e.kind == "all_reduce"))
    return times_ms[1:]  # the first one warms up


# %% tags=["picture"]
batches, curves, note = [1, 8, 16, 32], {}, "2 ranks, emulated; waiting for the other one counts"
for real in (NVLINK, INFINIBAND):
    wire = Link(latency_s=real.latency_s * 1e3, bytes_per_s=real.bytes_per_s / 1e3)
    paper = [1e3 * traffic_s(tensor_traffic(tiny, b, 64, 4), 2, wire) for b in batches]
    with Ranks(2, link=wire) as wired:
        measured = [wired.run(talking_ms, b)[0] for b in batches]
    curves[f"{real.name} / 1000"] = Voices(formula=paper, measurement=measured)
fast, slow = (curve.formula[-1] for curve in curves.values())
reveal(guess_slower, slow / fast)
title = f"{batches[-1]} sequences: {fast:.0f} ms of talking inside a node, {slow:.0f} between nodes"
axes = {"x_label": "sequences", "y_label": "talking in a step (ms)", "note": note}
show(compare(batches, curves, title, **axes), alt=f"{title}; measured: as on paper or above")

# %% [markdown]
# On real cards: a 3B model (we take Llama-3B's sizes), published for 2 to 32 GPUs, 8 to a node. We
# fit the speed of computing at $p = 2$ and take the measured bandwidth of all-reduces over 1, 2 and
# 4 nodes; the rest is the formula. From 8 to 16 ranks, what becomes of the tokens a second of each
# GPU?

# %% tags=["predict"]
guess_drop = predict("tokens/s of a GPU on 16 ranks, by those on 8 (like 3/4)")

# %% tags=["picture"]
from course_lib.cost.flops import train_step_flop

# Ultra-Scale Playbook, figures tp_scaling (the largest batches that fit) and pp_comm_bandwidth
published = {2: 13923.18, 4: 12420.76, 8: 10903.32, 16: 6245.6, 32: 2146.44}  # tokens/s a GPU
batches, gb_per_s = (3, 8, 12, 16, 20), (435.967, 435.967, 435.967, 361.749, 160.14)
model, speed, on_paper = MODELS["llama-3b"], 343e12, []  # FLOP/s of a GPU, fitted at p = 2
for p, batch, gb in zip(published, batches, gb_per_s, strict=True):
    talk_s = sent_bytes(tensor_traffic(model, batch, 4096), p) / (gb * 1e9)
    step_s = train_step_flop(model, batch, 4096) / p / speed + talk_s
    on_paper.append(batch * 4096 / p / step_s)
reveal(guess_drop, drop := published[16] / published[8])
title = f"8 to 16 ranks: {drop:.2f} of the speed, {on_paper[3] / on_paper[2]:.2f} on paper"
axes = {"x_label": "ranks p, 8 to a node", "y_label": "tokens/s of a GPU"}
voices = Voices(formula=on_paper, measurement=list(published.values()))
show(compare(list(published), voices, title, **axes), alt=f"{title}; close up to 8 ranks")

# %% [markdown]
# Inside of a node the formula fits. Beyond it, it sees most of the fall, but reality is worse: for
# one thing, it leaves out that a GPU computes slower on matrices so thin. That is why tensor
# parallelism ends at the node; how far the next node is depends on its network: move `cards`.
#
# And the batch? Each all-reduce pays $2(p-1)\,\alpha$, however little it carries. But splitting
# has made room: take more sequences.


# %% tags=["picture"]
def efficiency(model, seq, cards, p, batch):
    outside = replace(INFINIBAND, bytes_per_s=cards * INFINIBAND.bytes_per_s)
    link = TwoLevelLink(inside=NVLINK, outside=outside, ranks_per_node=8)
    compute_s = train_step_flop(MODELS[model], batch, seq) / p / speed
    talk_s = traffic_s(tensor_traffic(MODELS[model], batch, seq), p, link)
    return 100 * compute_s / (compute_s + talk_s)


def by_degree(tp_values=(1, 2, 4, 8, 16, 32), **at):
    one = [efficiency(**at, p=p, batch=1) for p in tp_values]
    more = [efficiency(**at, p=p, batch=p) for p in tp_values]
    title = f"8 ranks compute for {one[3]:.0f} % of the time, with 8 sequences {more[3]:.0f} %"
    curves = {"1 sequence": Voices(formula=one), "p sequences": Voices(formula=more)}
    return compare(tp_values, curves, title, x_label="ranks p", y_label="computing (% of the time)")


models, seqs = ["gpt2", "llama-1b", "llama-8b", "llama-70b"], [128, 512, 2048, 8192]
alt = "{model}, {seq} tokens, {cards} cards a node: less computing with every doubling of p"
explore(by_degree, alt, model=(models, "llama-8b"), seq=(seqs, 512), cards=([8, 4, 2, 1], 8))

# %% [markdown]
# Wider models compute $h^2$ and send $h$: they bear more ranks.
#
# **Talk over NVLink; widen the batch with the degree; beyond a node, split something else.**
#
# ## What to keep
#
# - Columns, then rows; whole heads; the vocabulary by tokens, and a loss of three numbers a token.
# - f in front, g behind: four all-reduces of an activation a layer, and none can hide.
# - Sequence parallelism: the same bytes, and the stream is no longer kept by all.
# - One random state for what is whole, another for what is split.
# - A rank that draws, adds or forgets something of its own gives no error, only another model.
#
# You can now split any transformer over the cards of a node, and say what it will cost. Lesson 08
# splits between nodes: by layers.
#
# Read on: Shoeybi et al. 2019 (Megatron-LM), section 3; Korthikanti et al. 2022 (sequence
# parallelism), section 4; the Ultra-Scale Playbook, "Tensor Parallelism".
