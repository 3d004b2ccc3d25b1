# %% [markdown]
# # 16 Experts: more parameters without more FLOP
#
# **Question.** In a dense Transformer every token uses every parameter. So a model with ten times
# the parameters needs ten times the FLOP. What if each token used only a few small parts of the
# model, its *experts*? Where do these parts live, how do tokens reach them, and what can go wrong?
#
# *After this lesson you can*
#
# - write a router, and say what its gradient is;
# - send tokens to experts on other ranks with an uneven all-to-all, and bring the results back;
# - say whose gradients are averaged with whom, and find a wrong scale that the loss hides;
# - keep experts balanced, with an auxiliary loss or with a bias that is moved;
# - choose how to split the experts of a published model.
#
# **Prerequisites:** lessons 04, 06, 07; 09 and 11 help. **Time:** about 40 minutes to read and run,
# 50 for five exercises (core: 1, 2, 3, 4).
#
# | symbol | in code | meaning |
# |---|---|---|
# | $E$, $k$ | `experts`, `top_k` | experts of a layer; experts that a token uses |
# | $T$, $h$ | `tokens`, `hidden` | tokens of one rank; values per token |
# | $p$ | `ep` | ranks that share the experts of a layer: the expert-parallel (EP) degree |
# | | `dp` | ranks with tokens of their own; the ep ranks are some of them |
# | $c$ | `capacity` | capacity factor |
# | | copy | the values of a token on their way to one expert: a token has $k$ copies |

# %%
# %load_ext course_lib.ranks
from copy import deepcopy
from dataclasses import replace

import torch
import torch.distributed as dist

from course_lib.checks import check
from course_lib.core import MODELS
from course_lib.display import claim, predict, reveal, show
from course_lib.expert_parallel import lab, pictures
from course_lib.cost.params import active_params, count_params
from course_lib.ranks import Ranks

# %% [markdown]
# ## 1 Larger, but not more expensive
#
# A step of a dense model takes $6N$ FLOP per token (lesson 01b): ten times the parameters $N$ cost
# ten times as much. A *mixture of experts* (MoE) breaks this rule. It replaces the MLP of a layer
# by $E$ smaller ones, the experts. For each token, a *router* chooses $k$ of them, and the token
# uses no others. So its FLOP follow from its *active* parameters: $6 N_\text{active}$.
#
# The idea is old (Jacobs et al. 1991); Shazeer et al. (2017) made it large. DeepSeek-V3 has 256
# experts in almost every layer, of which a token uses 8, and one *shared* expert that every token
# uses (DeepSeek-AI 2024, section 4.2). What share of its parameters does a token use?

# %% tags=["predict"]
guess_active = predict("active parameters of DeepSeek-V3 divided by all (like 0.25)")
### GUESS guess_active.commit(0.1)

# %%
deepseek = MODELS["deepseek-v3"]
reveal(guess_active, active_params(deepseek) / count_params(deepseek))
for name in ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3"):
    spec = MODELS[name]
    total, active = (count(spec) / 1e9 for count in (count_params, active_params))
    experts = f"{spec.experts.active} of {spec.experts.count} experts"
    print(f"{name}: {total:.1f} B parameters, {active:.1f} B active; {experts}")

# %% [markdown]
# Compute follows the active parameters, but memory does not: all experts have to be stored with
# their gradients and optimizer state (16 bytes per parameter, lesson 01), because the next token
# may choose any of them. ZeRO-1 (lesson 09) divides 12 of the 16 bytes over the ranks that hold the
# same parameter. Tensor parallelism could also divide attention, dense MLPs and shared experts
# ("split" below); norms and routers stay whole. Experts get an axis of their own: *expert
# parallelism* (EP) gives each of $p$ ranks $E/p$ experts.

# %%
from course_lib.core.parallelism import Parallelism
from course_lib.expert_parallel.cost import state_bytes

for ep in (1, 8, 64):
    kinds = state_bytes(deepseek, Parallelism(dp=512, ep=ep, expert_tp=1, zero=1))
    gib = {kind: num_bytes / 2**30 for kind, num_bytes in kinds.items()}
    words = ", ".join(f"{kind} {one:,.0f}" for kind, one in gib.items())
    print(f"ep {ep:2}, ZeRO-1: {sum(gib.values()):,.0f} GiB per rank: {words}")

# %% [markdown]
# The memory of experts falls by less than ep, because ZeRO-1 divides an expert's optimizer state
# only over the dp/ep ranks that hold it. And even 64 ranks are not enough for an H100 with 80 GB:
# DeepSeek added a pipeline of 16 stages, which divides all three kinds (DeepSeek-AI 2024, section
# 3.2).
#
# **A mixture of experts computes like a small model, and stores like a large one. So its experts
# are divided over ranks, and the tokens have to travel.**
#
# ## 2 The router, and its gradient
#
# Before tokens travel, the router has to decide where to. It is one small matrix, which turns the
# $h$ values of a token into $E$ logits $z_e$. The token takes the $k$ experts with the largest
# logits, and adds their outputs $f_e(x)$ with weights $w_e$:
#
# $$ y = \sum_{e \in \text{top-}k} w_e\, f_e(x), \qquad
# w_e = \frac{\exp z_e}{\sum_{j \in \text{top-}k} \exp z_j} . $$
#
# These weights are a softmax over the chosen logits only (Mixtral, Jiang et al. 2024, section 2.1).
#
# <details><summary>Other weights</summary>
# The same, up to rounding, is a softmax over all experts whose chosen probabilities are divided by
# their sum. Some models leave out the division; then the weights of a token add up to less than 1.
# </details>
#
# How does the router learn? The choice itself is a step function: a small change of a logit does
# not change it, so it has no gradient. A gradient reaches the router only through the weights. With
# the gradients $g_e$ of the weights, the backward of softmax is
#
# $$ \frac{\partial L}{\partial z_e} = w_e \Big( g_e - \sum_{j \in \text{top-}k} w_j\, g_j \Big)
# \text{ for chosen experts, and 0 for all others.} $$
#
# In words: a logit grows if its expert helps more than the weighted average of those chosen. An
# expert that was not chosen gets no signal, not even that it would have been better. Now take
# $k = 1$ with these weights. How large is the router's gradient?

# %% tags=["predict"]
guess_router = predict("largest gradient of a router's logit, for k = 1 and these weights")
### GUESS guess_router.commit(0.5)

# %%
torch.manual_seed(0)
logits = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)


def largest_gradient(top_k):
    weights = logits.topk(top_k, dim=-1).values.softmax(-1)
    loss = (weights * torch.arange(1.0, top_k + 1)).sum()
    return torch.autograd.grad(loss, logits)[0].abs().max().item()


reveal(guess_router, largest_gradient(1))
print(f"with k = 2 it is {largest_gradient(2):.2f}")

# %% [markdown]
# A single weight that is divided by its own sum is always 1. It does not depend on the logit, so
# the router never learns. Switch Transformers use $k = 1$, and therefore take the probability of
# the softmax over *all* experts as the weight (Fedus et al. 2021, equation 2). Then the other
# logits have a gradient too, through the denominator; but it does not say whether their experts
# would have been better.
#
# ### Exercise 1 (core): a router and its gradient
#
# *Difficulty 3 of 5, importance 5 of 5, about 8 minutes.*
#
# Return the chosen experts (best first) and their weights, both `[tokens, top_k]`, and the gradient
# of `logits`, `[tokens, experts]`. The weights are the softmax over the chosen logits;
# `grad_weights` is the gradient of the weights. Compute the gradient by the formula, without
# autograd. Example: logits 0, 5, 5 and -1 with top_k = 2 choose experts 1 and 2 with the weights
# 0.5; grad_weights 1 and 0 become the gradient 0, 0.25, -0.25, 0. About 5 lines.
#
# <details><summary>Hint: putting gradients where they belong</summary>
# <code>best = logits.topk(top_k, dim=-1)</code> has <code>best.values</code> and
# <code>best.indices</code>. <code>zeros.scatter(-1, best.indices, values)</code> puts numbers at
# indices.
# </details>


# %% tags=["exercise"] exercise="experts-1"
def route(logits, grad_weights, top_k):
    """Return experts and weights [tokens, top_k], and the gradient of logits [tokens, experts]."""
    ### BEGIN SOLUTION: choose, weigh the chosen, then softmax's backward for them
    best = logits.topk(top_k, dim=-1)
    weights = best.values.softmax(-1)
    mean = (weights * grad_weights).sum(-1, keepdim=True)
    grad = torch.zeros_like(logits).scatter(-1, best.indices, weights * (grad_weights - mean))
    return best.indices, weights, grad
    ### END SOLUTION


# %% tags=["check"] exercise="experts-1"
check("experts-1", route)

# %% [markdown]
# **A router learns only through the weights of the experts that it chose. If these weights do not
# depend on the logits, as with one expert and normalized weights, it does not learn at all.**
#
# ## 3 There and back: dispatch and combine
#
# Tokens are divided over ranks (data parallelism), and so are experts. Which of the two should
# travel? An expert of Mixtral has 176 million parameters, a token 4,096 values. So copies of tokens
# travel: *dispatch* sends each to the rank of its expert, and *combine* sends the results back.

# %% tags=["picture"]
choices = [[0], [2], [1], [0], [3], [0], [0], [1]]
show(*pictures.dispatch_picture(choices, ep=4, experts=4))

# %% [markdown]
# This is an all-to-all (lesson 04), but an *uneven* one: each rank sends a different number of
# copies to each other rank, and a receiver has to know the numbers to allocate memory. So each rank
#
# 1. sorts its copies by expert, and counts them;
# 2. exchanges the *counts*: a small all-to-all with equal parts;
# 3. exchanges the copies: an all-to-all with these numbers as split sizes;
# 4. runs its experts on what has arrived;
# 5. sends the results back: the same all-to-all with the split sizes swapped;
# 6. adds up the results of each token, with their weights, in the original order.
#
# Step 2 has a price on GPUs: split sizes have to be known on the host, which waits for the counts.
#
# ### Exercise 2 (core): dispatch and combine
#
# *Difficulty 4 of 5, importance 5 of 5, about 14 minutes.*
#
# Sorting, counting and `local_experts`, which gives `which`, are written; write the rest. Return
# the outputs of this rank's tokens, `[tokens, hidden]`. `experts` and `weights` are `[tokens,
# top_k]`. Rank 0 holds the first `num_experts / p` experts, rank 1 the next ones. `run(inputs,
# which)` runs this rank's experts: row i of `inputs` is for its expert `which[i]`. Example with 2
# ranks and 4 experts: a copy for expert 3 goes to rank 1, with `which` 1. Budget: three
# `all_to_all_single`. A rank may have no tokens, or receive no rows. Forward only. About 8 lines.
#
# <details><summary>Hint: uneven all-to-all</summary>
# <code>dist.all_to_all_single(into, x, received_rows, sent_rows)</code> takes two lists with a
# number of rows for each rank. <code>into</code> has <code>sum(received_rows)</code> rows.
# </details>
# <details><summary>Hint: rows for each rank</summary>
# Exchange the counts of all experts: <code>arriving</code> then has, for each source rank, those of
# your own experts. <code>counts.view(p, -1).sum(1)</code> are the rows for each rank.
# </details>


# %% tags=["exercise"] exercise="experts-2"
def local_experts(arriving, p):
    """Return for which of this rank's experts, counted from 0, each received row is."""
    return torch.arange(len(arriving) // p).repeat(p).repeat_interleave(arriving)


def experts_on_ranks(tokens, experts, weights, run, num_experts):
    """Send tokens to their experts, and combine what comes back: [tokens, hidden]."""
    p, top_k = dist.get_world_size(), experts.shape[1]
    order = experts.flatten().argsort(stable=True)  # copy n is of token n // top_k
    counts = torch.bincount(experts.flatten(), minlength=num_experts)
    ### BEGIN SOLUTION: exchange counts, then copies, run, send back, add up
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts)
    sent, received = (c.view(p, -1).sum(1).tolist() for c in (counts, arriving))
    inputs = tokens.new_empty(sum(received), tokens.shape[1])
    dist.all_to_all_single(inputs, tokens[order // top_k], received, sent)
    which = local_experts(arriving, p)
    results = tokens.new_empty(len(order), tokens.shape[1])
    dist.all_to_all_single(results, run(inputs, which), sent, received)
    weighted = results * weights.flatten()[order, None]
    return torch.zeros_like(tokens).index_add(0, order // top_k, weighted)
    ### END SOLUTION


# %% tags=["check"] exercise="experts-2"
check("experts-2", experts_on_ranks)

# %% [markdown]
# What about backward? The gradient of a received row belongs to the rank that sent the row. So
# backward is the all-to-all with the split sizes swapped: that of combine looks like dispatch, and
# that of dispatch like combine. The library's `parallelize_experts` has both. Does it compute what
# one process computes?

# %%
from course_lib.expert_parallel import parallelize_experts
from course_lib.models.moe import MoE

tiny = MODELS["moe-tiny"]


def layer_on_ranks(rank):
    """Return how far this rank's outputs, and its tokens' gradients, are from one process's."""
    torch.manual_seed(0)
    alone = MoE(tiny).double()
    ours = parallelize_experts(deepcopy(alone))
    tokens = torch.randn(dist.get_world_size(), 16, tiny.hidden, dtype=torch.float64)
    whole, own = tokens.clone().requires_grad_(), tokens[rank].clone().requires_grad_()
    pairs = [(alone(whole)[rank], ours(own))]
    for y in (alone(whole), ours(own)):
        y.pow(2).sum().backward()
    pairs += [(whole.grad[rank], own.grad)]
    return max((a - b).abs().max().item() for a, b in pairs)


# %%
four = Ranks(4)
apart = max(four.run(layer_on_ranks))
print("outputs and the tokens' gradients are those of one process:", apart < 1e-12)

# %% [markdown]
# **Dispatch and combine are uneven all-to-alls. The counts are exchanged first, and backward is the
# same pair in reverse.**
#
# ## 4 What it costs, and when splitting each expert is better
#
# Count the values that a rank sends. It has $T$ tokens with $k$ copies each. If experts are chosen
# equally often, a share of $(p-1)/p$ goes to other ranks. Dispatch and combine together send
#
# $$ 2\,T\,k\,h\,\frac{p-1}{p} \text{ values in forward, and again in backward.} $$
#
# The alternative is to split *each* expert over the ranks, as tensor parallelism splits an MLP
# (lesson 07). Every rank then needs the tokens of all ranks: an all-gather in front of the experts
# sends $(p-1)\,T\,h$ values per rank, and a reduce-scatter behind them as many. For Mixtral ($k =
# 2$) on 8 ranks: how many bytes does expert parallelism send, divided by those of this *expert
# tensor parallelism*?

# %% tags=["predict"]
guess_bytes = predict("bytes of expert parallelism / expert tensor parallelism, k = 2, 8 ranks")
### GUESS guess_bytes.commit(0.5)

# %% tags=["picture"]
from course_lib.expert_parallel.cost import RoutedSizes, exchange_bytes, expert_tensor_bytes

mixtral = RoutedSizes(tokens=4096, hidden=4096, experts=8, active=2)
ratio = exchange_bytes(mixtral, 8).forward / expert_tensor_bytes(mixtral, 8).forward
reveal(guess_bytes, ratio)
one, pair = Ranks(1), Ranks(2)
small = RoutedSizes(tokens=64, hidden=tiny.hidden, experts=8, active=2, number_bytes=4)
measured = {
    k: {
        p: lab.measure_bytes(on, replace(small, active=k))
        for p, on in {1: one, 2: pair, 4: four}.items()
    }
    for k in (1, 2)
}
show(*pictures.bytes_picture(small, measured))

# %% [markdown]
# The ratio is $k/p$: expert parallelism sends $k$ copies of a token, of which $(p-1)/p$ leave the
# rank; splitting sends each token to $p - 1$ ranks. So expert parallelism sends less if $k < p$.
# Splitting makes matrices narrow, which GPUs compute less efficiently. But all ranks then compute
# equally much, whatever the router chooses (section 7).
#
# ### Across nodes
#
# With 64 ranks most copies leave the node, over a link that is several times slower. But if
# several experts of a token are on one node, the token needs to travel there only once: inside the
# node, the fast link passes it on. DeepSeek-V3 does this. Its 256 experts are on 64 GPUs, that is,
# on 8 nodes. With 8 experts at random, on how many of these nodes are a token's experts, on
# average?

# %% tags=["predict"]
guess_nodes = predict("nodes, of 8, with experts of a token, on average: 8 of 256 experts")
### GUESS guess_nodes.commit(8)

# %% tags=["picture"]
from course_lib.expert_parallel.cost import nodes_reached

reveal(guess_nodes, nodes_reached(8, active=8))
show(*pictures.nodes_picture())

# %% [markdown]
# One choice misses a node of $n$ with probability $1 - 1/n$, and $k$ choices all miss it with about
# $(1 - 1/n)^k$. So on average a token is sent to $n\,(1 - (1 - 1/n)^k)$ nodes. (The experts of a
# token differ, so the tokens that were drawn reach 1 % more.) DeepSeek-V3 limits this: the router
# first chooses at most 4 nodes for each token, then 8 experts on them (DeepSeek-AI 2024, section
# 2.1.2).
#
# Move the sliders: up to how many ranks is the exchange faster than the experts?

# %% tags=["picture"]
from course_lib.expert_parallel.explorer import expert_explorer

expert_explorer()

# %% [markdown]
# **Expert parallelism sends $k/p$ of the bytes of splitting each expert. Across nodes, send a token
# to each node once, and let the router choose few nodes.**
#
# ## 5 Whose gradients are averaged with whom
#
# Expert parallelism reuses the ranks of data parallelism: each rank has its own tokens, a copy of
# attention, norms and router, and $E/p$ experts. With 4 ranks, $p = 2$ and 8 experts:
#
# | rank 0 | rank 1 | rank 2 | rank 3 |
# |---|---|---|---|
# | experts 0 to 3 | experts 4 to 7 | experts 0 to 3 | experts 4 to 7 |
#
# Ranks 0 and 1 exchange tokens, and so do ranks 2 and 3. *Dense* parameters are on all ranks, so
# their gradients are averaged over all 4, as in lesson 05. An expert is on only 2 of them. Over
# which ranks should its gradient be summed, and what should it be divided by?
#
# Go back to what we want: the gradient of the mean of all ranks' losses,
# $L = \frac{1}{\text{dp}} \sum_r L_r$. For a dense parameter $w$, each rank computes
# $\partial L_r / \partial w$, and
#
# $$ \frac{\partial L}{\partial w} = \frac{1}{\text{dp}} \sum_r \frac{\partial L_r}{\partial w} . $$
#
# For an expert the same formula holds. But its rank has received tokens from all $p$ ranks of its
# group, and backward has brought the gradients of all their losses. So its local gradient is
# *already* a sum over $p$ ranks. What is missing is the sum over the ranks that hold the same
# expert. Then divide by dp, the number of losses, *not* by the number of terms in this last sum.
#
# ### Exercise 3 (core): average the gradients
#
# *Difficulty 3 of 5, importance 5 of 5, about 8 minutes.*
#
# Average this rank's gradients in place. `dense` and `experts` are lists of tensors. All ranks hold
# the dense parameters; ranks with the same `rank % ep` hold the same experts. Each rank's loss is
# the mean over its own tokens; we want the gradient of the mean over all ranks. `group_of(ranks)`
# returns the process group of a list of ranks. Example: of 4 ranks with ep = 2, ranks 1 and 3 sum
# their experts. Budget: at most one `all_reduce` per gradient. About 6 lines.


# %% tags=["exercise"] exercise="experts-3"
def average_gradients(dense, experts, ep, group_of):
    """Average the gradients of dense parameters and of experts, in place."""
    rank, dp = dist.get_rank(), dist.get_world_size()
    ### BEGIN SOLUTION: sum over the ranks that hold the same parameter; divide by what?
    same = group_of([other for other in range(dp) if other % ep == rank % ep])
    for grads, group in ((dense, None), (experts, same)):
        for grad in grads:
            dist.all_reduce(grad, group=group)
            grad /= dp
    ### END SOLUTION


# %% tags=["check"] exercise="experts-3"
check("experts-3", average_gradients)

# %% [markdown]
# ### Break it
#
# DeepSpeed's ZeRO divided by the wrong number until 2024: gradients of experts were ep times too
# large (issue 6545), and so they were in MegaBlocks (pull request 20, 2023). `parallelize_experts`
# divides the gradients of experts by $p$ in backward, so that whoever averages them only needs to
# know which ranks hold the same expert. A hook undoes this division: experts have gradients $p = 2$
# times too large, and all other parameters are right. What is the last loss, divided by the correct
# one? (`expert_groups` forms such groups from a `Mesh`, lesson 11: here, with 2 ranks and ep = 2,
# each expert is on one rank only. `finish`, lesson 06, waits for the averages.)

# %%
from course_lib.ddp import DDP
from course_lib.expert_parallel import expert_groups
from course_lib.mesh import Mesh, RankMesh
from course_lib.models import GPT, next_tokens, token_batch
from course_lib.models.gpt import token_loss

drawn = [token_batch(n, batch=4, seq=32, vocab=tiny.vocab) for n in range(30)]
BATCHES = [next_tokens(tokens) for tokens in drawn]


# %%
def experts_of(model):
    return [param for name, param in model.named_parameters() if ".experts." in name]


def gpt_on_ranks(too_large):
    """Return a GPT whose experts are divided over all ranks, and have gradients too large."""
    torch.manual_seed(0)
    p = dist.get_world_size()
    groups = expert_groups(RankMesh(Mesh(dp=p)), ep=p)
    model = parallelize_experts(GPT(tiny).double(), groups)
    for param in experts_of(model):
        param.register_hook(lambda grad: too_large * grad)
    return DDP(model)


# %%
def train(rank, too_large=1, optimizer=torch.optim.SGD, lr=0.2):
    """Train on this rank's part of each batch; return the mean losses, and the first gradients."""
    model, p, losses, first = gpt_on_ranks(too_large), dist.get_world_size(), [], {}
    steps = optimizer(model.parameters(), lr=lr)
    for whole in BATCHES:
        tokens, targets = (x.chunk(p)[rank] for x in whole)
        steps.zero_grad()
        loss = token_loss(model(tokens), targets)
        loss.backward()
        model.finish()
        first = first or {name: w.grad.clone() for name, w in model.module.named_parameters()}
        steps.step()
        losses.append(loss.detach())
    dist.all_reduce(total := torch.stack(losses))
    return (total / p).tolist(), first


# %% tags=["predict"]
guess_loss = predict(
    "last loss with experts' gradients 2 times too large, divided by the right one"
)
### GUESS guess_loss.commit(1.3)

# %% tags=["picture", "failure"]
from course_lib.display.losses import losses

(alone, grads), (right, own) = (on.run(train)[0] for on in (one, pair))
broken, wrong = pair.run(train, 2)[0]
reveal(guess_loss, round(broken[-1] / right[-1], 3))
apart = max(abs(a - b) for a, b in zip(alone, right, strict=True))
print("without the mistake, the losses are those of one process:", apart < 1e-9)
runs = {"one process": alone, "experts' gradients 2 times too large": broken}
show(losses(runs, "With experts' gradients 2 times too large, the loss still falls"), "Loss curves")

# %% [markdown]
# The loss falls as it should: for experts the learning rate is 2 times too large, and nothing else
# happens. (That it is a little lower here is only this larger learning rate.) With Adam one sees
# even less, because it divides the mean gradient by the root of the mean square, where a constant
# factor cancels.

# %% tags=["failure"]
right_adam, broken_adam = (
    pair.run(train, factor, torch.optim.Adam, 1e-3)[0][0] for factor in (1, 2)
)
apart = max(abs(a / b - 1) for a, b in zip(right_adam, broken_adam, strict=True))
print("with Adam, the losses differ by less than 0.1 %:", apart < 1e-3)


def largest_ratio(found, experts):
    """Return the largest ratio of a gradient's norm to that of one process."""
    names = [name for name in found if (".experts." in name) == experts]
    return max((found[name].norm() / grads[name].norm()).item() for name in names)


for words, found in {"correct": own, "broken": wrong}.items():
    ratios = [round(largest_ratio(found, experts), 6) for experts in (True, False)]
    print(f"{words}: gradients / those of one process: experts {ratios[0]}, others {ratios[1]}")

# %% [markdown]
# But the mistake matters. Clipping by the global norm (lesson 11) makes everything but the experts
# too small. The weight decay of SGD is too weak for experts, compared with their gradients. And the
# same settings train differently on another number of ranks. What finds it is the comparison with
# one process: of *gradients*, in float64, for several ep.
#
# **Sum an expert's gradient over the ranks that hold this expert, and divide by the number of all
# ranks whose losses are in it. A falling loss does not test the scale; gradients beside those of
# one process do.**
#
# *This is a good place for a break.*
#
# ## 6 Balance
#
# So far experts were chosen about equally often, but nothing makes a router do so. On the contrary:
# an expert that gets more tokens learns faster, becomes better, and gets even more. In a step, all
# ranks wait for the one with the most tokens:
#
# $$ \text{time of the experts} \propto
# \frac{\text{tokens of the fullest rank}}{\text{mean over ranks}} . $$
#
# The next picture shows one layer on 4 real ranks. Its messages are real. Its experts only sleep,
# 0.4 ms per copy in forward and twice as long in backward, so that they need no cores; the fastest
# of three runs is drawn.

# %% tags=["picture", "measured"]
routings = {
    "balanced": lab.even_choices(64, 8, 2),
    "skewed": lab.skewed_choices(64, 8, 2),
}
layer = lab.layer_runs(four, routings, experts=8)
show(*pictures.layer_on_the_clock(layer))

# %% [markdown]
# In the skewed run rank 0 has the popular experts, and all others wait for its results: most of
# their long green boxes is waiting. (The button
# below the picture saves the events for Perfetto, lesson 06.)
#
# ### Capacity: drop what does not fit
#
# The oldest remedy is a limit. With a *capacity factor* $c$, an expert takes at most $\lceil c\,T k
# / E \rceil$ copies of $T$ tokens, and drops the others (Lepikhin et al. 2020; Fedus et al. 2021,
# section 2.2); the residual connection carries a dropped token past the layer. No rank is then more
# than $c$ times as busy as the mean before dropping. And if experts with fewer copies are filled up
# with zeros, all messages and matrices have fixed sizes. The price is tokens that get less
# computation than others, and zeros that are moved and computed.

# %% tags=["picture"]
from course_lib.expert_parallel.simulation import count_experts, draw_choices

drawn = {
    name: draw_choices(1024, 8, 2, skew=skew) for name, skew in (("balanced", 0), ("skewed", 1))
}
factors = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0)
dropped = {name: [lab.dropped_by_layer(one, 8, c) for c in factors] for name, one in drawn.items()}
loads = {name: count_experts(one, 8) for name, one in drawn.items()}
show(*pictures.dropped_picture(loads, dropped, factors))

# %% [markdown]
# With a balanced load, a factor of 1.25 drops almost nothing. With a skewed one, even a factor of 2
# drops tokens. So a capacity does not replace balance. Newer models have none: they are *dropless*,
# and use kernels for groups of unequal size (MegaBlocks, Gale et al. 2022).
#
# ### Two rules that balance
#
# **An auxiliary loss.** Let $f_e$ be the share of expert $e$ in all copies, and $P_e$ the mean of
# its probability over all tokens. Add to the loss $\alpha$ times
#
# $$ E \sum_e f_e\, P_e . $$
#
# At balance both are $1/E$, so the sum is 1. The shares $f_e$ come from the choice, and have no
# gradient. The derivative by $P_e$ is $E f_e$: the more tokens an expert has, the more its
# probability is pushed down (Fedus et al. 2021, equations 4 to 6, for $k = 1$). But this gradient
# also pushes a router away from experts that are right for a token.
#
# **A bias that is moved.** DeepSeek-V3 balances mostly without this gradient (DeepSeek-AI 2024,
# section 2.1.2; it keeps an auxiliary loss inside each sequence, with a very small $\alpha$). Each
# expert has a score $s_e$, a sigmoid, and a bias $b_e$. Experts are chosen by $s_e + b_e$, but
# weighted by their $s_e$, divided by its sum over those chosen. After each step, the bias of an
# expert with fewer tokens than the mean grows by a small constant, and that of an expert with more
# falls.
#
# ### Exercise 4 (core): two rules
#
# *Difficulty 2 of 5, importance 4 of 5, about 8 minutes.*
#
# Write both. `auxiliary_loss` returns $E \sum f_e P_e$ for `probabilities`, `[tokens, E]`, whose
# rows add up to 1, and the chosen `experts`, `[tokens, k]`. `moved_bias` returns the bias after a
# step: `step` more for experts with fewer tokens than the mean, `step` less for those with more.
# Example: 4 tokens that all choose expert 0 of 2, with probability 0.75, give a loss of 1.5, and
# the bias 0, 0 becomes -0.1, 0.1 with step 0.1. The check follows a skewed stream. About 3 lines
# each.


# %% tags=["exercise"] exercise="experts-4"
def auxiliary_loss(probabilities, experts):
    """E times the sum of f_e P_e, [], with a gradient for the probabilities."""
    ### BEGIN SOLUTION: shares of the copies, mean probabilities
    num_experts = probabilities.shape[1]
    shares = torch.bincount(experts.flatten(), minlength=num_experts) / experts.numel()
    return num_experts * (shares * probabilities.mean(0)).sum()
    ### END SOLUTION


def moved_bias(bias, experts, step):
    """The bias of each expert after a step in which tokens chose these experts: [E]."""
    ### BEGIN SOLUTION: up for experts with too few tokens, down for those with too many
    load = torch.bincount(experts.flatten(), minlength=len(bias)).to(bias.dtype)
    return bias + step * (load.mean() - load).sign()
    ### END SOLUTION


def follow(stream, top_k, step):
    """Let tokens choose by score + bias; return the load, loss and bias of each batch."""
    bias, found = torch.zeros_like(stream[0][0]), []
    for scores in stream:
        experts = (scores + bias).topk(top_k, dim=-1).indices
        probabilities = scores / scores.sum(-1, keepdim=True)
        bias = moved_bias(bias, experts, step)
        load = torch.bincount(experts.flatten(), minlength=len(bias))
        found.append((load, auxiliary_loss(probabilities, experts), bias))
    return found


# %% tags=["check"] exercise="experts-4"
check("experts-4", follow)

# %% [markdown]
# Do they work in training? The next cell trains the same small model three times, on a stream in
# which a few tokens are very frequent.

# %% tags=["picture", "measured"]
from course_lib.expert_parallel.cost import load_imbalance

by_rule = {rule: lab.train_loads(rule) for rule in lab.RULES}
last = {
    rule: load_imbalance(torch.tensor(loads[-30:]).sum(0).tolist(), 4)
    for rule, loads in by_rule.items()
}
claim("with a moved bias, the fullest rank has at most 10 % more", last["moved bias"] < 1.1)
show(*pictures.loads_picture(by_rule, 4))

# %% [markdown]
# Without a rule the router collapses: at the end, the fullest rank has more than twice the mean.
# With either rule, the load of the last 30 steps together stays near 1; a single step, for which
# ranks wait, may be further away. Both rules have a number to choose. If $\alpha$ is too small, it
# does not balance; if it is too large, the router cares for balance more than for the text. If the
# router changes faster than the bias moves, it may never be balanced.
#
# <details><summary>On several ranks: whose load?</summary>
# The load that counts is that of <i>all</i> ranks together. If each rank balances its own few
# tokens, it enforces more than is needed: a rank whose texts are all of one kind may then not send
# them to the same experts (Qiu et al. 2025).
# </details>
#
# **Experts without balancing end up with unequal loads, and everyone waits for the fullest rank. A
# capacity limits the damage by dropping tokens; an auxiliary loss or a moved bias prevents it.**
#
# ## 7 Choose
#
# Now put everything together, for 8 GPUs and one layer. Some ranks share the experts (ep), some
# split each expert (tp). Which division is fastest, and does it fit?
#
# ### Exercise 5 (further): seconds of each plan
#
# *Difficulty 3 of 5, importance 4 of 5, about 12 minutes.*
#
# Return a dict with the seconds of each plan `(ep, tp, capacity)` that fits. The three matrices
# (hidden x ffn) of all experts take 16 bytes per parameter, divided by ep tp: at most `room_bytes`.
# The fullest rank has $n$ = `fullest[ep]` T k copies, but at most `capacity` T k; a `capacity` of
# `None` is no limit. Add up three durations, with 2 bytes per value:
#
# 1. dispatch and combine: the formula of section 4 with $n$ instead of $T k$, since that rank
#    receives $n$ copies and sends $n$ results;
# 2. with tp > 1, an all-gather and a reduce-scatter, each (tp - 1) times $n$ rows of `hidden`
#    values, or (tp - 1) times T rows if ep = 1;
# 3. 6 hidden ffn FLOP per copy, for $n$ copies.
#
# Example: plan (2, 1, None), layer (100, 10, 20, 8, 2), fullest[2] = 1.5, 1e9 FLOP and 1e6 bytes
# per second: n = 300; 6,000 bytes and 360,000 FLOP take 6.36 ms. About 10 lines.
#
# <details><summary>Hint: the frame of the function</summary>
# Begin with <code>tokens, hidden, ffn, num_experts, k = layer</code>. Leave a plan out if
# <code>16 * 3 * hidden * ffn * num_experts / (ep * tp) &gt; room_bytes</code>.
# </details>
# <details><summary>Hint: what tp changes in the FLOP</summary>
# Nothing: a rank computes the copies of tp ranks, but of each expert only 1/tp.
# </details>


# %% tags=["exercise"] exercise="experts-5"
def seconds_by_plan(plans, layer, fullest, room_bytes, flop_per_s, bytes_per_s):
    """Seconds of a forward by (ep, tp, capacity); layer: tokens T, hidden, ffn, experts, k."""
    ### BEGIN SOLUTION FROM course_lib.expert_parallel.cost:seconds_by_plan: fits? send, compute
    ### END SOLUTION


# %% tags=["check"] exercise="experts-5"
check("experts-5", seconds_by_plan)

# %% [markdown]
# Use it for two published models on two pipeline stages of 8 H100: a stage has half of the layers,
# and 60 of 80 GB for experts. "NVLink" is for 8 GPUs of one node, "InfiniBand" for 8 GPUs of
# different nodes. We assume that the fullest rank has 1.4 times the mean with 8 ranks, and 1.2
# times with 2 or 4.

# %%
from course_lib.cost.hardware import H100
from course_lib.expert_parallel.cost import seconds_by_plan as seconds_of

fullest = {1: 1.0, 2: 1.2, 4: 1.2, 8: 1.4}
plans = [(8, 1, None), (8, 1, 1.25), (4, 2, None), (2, 4, None), (1, 8, None)]
for name in ("mixtral-8x7b", "qwen3-30b-a3b"):
    spec, experts = MODELS[name], MODELS[name].experts
    layer = 4096, spec.hidden, experts.ffn_hidden, experts.count, experts.active
    for link in ("NVLink", "InfiniBand NDR"):
        room, rate = 60e9 / (spec.num_layers / 2), H100.links[link]
        found = seconds_of(plans, layer, fullest, room, 0.4 * H100.peak(), rate)
        words = [f"{plan} {1e3 * s:.2f}" for plan, s in sorted(found.items(), key=lambda x: x[1])]
        print(f"{name}, {link}, ms: {', '.join(words) or 'nothing fits'}")

# %% [markdown]
# Inside a node, splitting each expert is not bad at all: for Mixtral it sends more bytes, but no
# rank is fuller than another. Over a slow link, bytes decide: Mixtral with its 2 copies should not
# be split, while Qwen3 has as many copies as there are ranks. For Qwen3, mixed divisions send most:
# copies between the groups, and again inside them. (8, 1, 1.25) wins over (8, 1) only by dropping
# copies. All depends on the balance: with a fullest rank below 1.1, whole experts would win for
# Mixtral on NVLink, too. (There, (4, 2) is second only because we
# assumed 1.2 instead of 1.4 for its fullest rank.)
#
# The model leaves out two things that speak against splitting. An eighth of one of Qwen3's experts,
# which are 768 wide, is a narrow matrix that a GPU computes inefficiently. And a gather grows with
# the group: with 64 ranks, each sends its tokens 63 times. So large models use expert parallelism,
# with whole experts.
#
# How much does balance matter in practice? Megatron-Core's developers publish pairs of runs that
# differ only in this: a router that is forced to be balanced, and one that has learned.

# %%
from course_lib.cost.published import rows

rates = {
    (row["seq"], row["balance"]): float(row["model_TFLOPs_per_GPU"])
    for row in rows("moe")
    if "Long Context" in row["source"]
}
for seq in sorted({int(seq) for seq, _ in rates}):
    forced, learned = (rates[f"{seq}", balance] for balance in ("forced", "learned"))
    words = f"{forced:.0f} TFLOP/s per GPU forced, {learned:.0f} learned"
    print(f"Qwen3-235B, {seq:7,} tokens: {words}: {100 * (1 - learned / forced):.0f} % less")

# %% [markdown]
# A benchmark with a forced balance is faster than the training that it stands for. So look for
# this word whenever you read a throughput.
#
# ### The real thing
#
# | | experts over ranks | each expert split |
# |---|---|---|
# | this course | `parallelize_experts(model, groups)` | `expert_tp=` |
# | Megatron-Core | `--expert-model-parallel-size` | `--expert-tensor-parallel-size` |
# | DeepSpeed | `MoE(..., num_experts, ep_size=8)` | `enable_expert_tensor_parallelism=True` |
#
# `python -m course_lib.train --model moe-tiny --ranks 4 --mesh dp=4,ep=2` trains a model with
# experts; the run's record has the tokens of each expert, step by step.
#
# Tests of the course compare its layer with these, weight for weight: outputs and all gradients are
# equal, up to rounding, to those of transformers' Mixtral block, of Megatron-Core's all-to-all
# dispatcher, and of DeepSpeed's layer and engine on two groups of gloo ranks. DeepSpeed gives every
# expert a capacity by default (`drop_tokens=False` takes it away); its auxiliary loss for $k = 2$
# counts first choices only. DeepSeek's DeepEP replaces the all-to-all by kernels that send a token
# to each node once.
#
# On your cluster, one command times the layer for balanced and for skewed routing:
#
# `torchrun --nproc-per-node 8 cluster/exercises/16_experts.py`
#
# **Over slow links divide experts, not each expert, if $k$ is much smaller than the number of
# ranks, and always once the group is larger than a node; then balance decides how fast the layer
# is. Inside a node, splitting each expert can be faster: no rank is fuller than another.**
#
# ## What to keep
#
# - FLOP follow the active parameters, memory follows all of them.
# - A router learns only through the weights of the experts that it chose.
# - Dispatch and combine are uneven all-to-alls; counts are exchanged first.
# - An expert's gradient is summed over the ranks that hold it, and divided by all ranks whose
#   losses are in it.
# - The fullest rank decides. A router that nobody balances collapses to few experts.
#
# **Read on**
#
# - Shazeer et al. 2017, *Outrageously Large Neural Networks*, section 2: the sparsely-gated layer.
# - Lepikhin et al. 2020, *GShard*, sections 2.2 and 3.2: capacity, and the two all-to-alls.
# - Fedus et al. 2021, *Switch Transformers*, section 2: one expert per token, and the auxiliary
#   loss.
# - Gale et al. 2022, *MegaBlocks*, section 4: no dropped tokens.
# - DeepSeek-AI 2024, *DeepSeek-V3*, sections 2.1.2 and 3.2: the bias, nodes per token, overlap.
# - Qiu et al. 2025, *Demons in the Detail*: balance over the whole batch, not over each rank.
