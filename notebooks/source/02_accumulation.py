# %% [markdown]
# # 02 Accumulation: one big batch from small ones
#
# **Question.** The batch you want does not fit into memory. Can you still train on it, and does the
# optimizer get exactly the gradient of the whole batch?
#
# The method is *gradient accumulation*. We split the batch into micro-batches, run forward and
# backward on one after the other, let their gradients add up, and take one optimizer step at the
# end. This takes only a few lines of code, but several mistakes in them raise no error, and some do
# not even show in the loss. So this lesson compares gradients with those of the full batch.
#
# *After this lesson you can*
#
# - compute how many micro-batches a global batch needs on any number of ranks;
# - write an accumulated step that equals a step on the full batch, also with padded sequences;
# - say where to clip, and for which layers and losses accumulation gives a different result;
# - predict what accumulation does to memory and to the time of a step;
# - measure the gradient noise scale, and say roughly up to which size a larger batch helps.
#
# **Prerequisites:** lesson 01. **Time:** about 45 minutes of reading and running, and 35 minutes
# for five exercises (15 for the optional sixth). A break fits before section 8.
#
# | symbol | in code | meaning |
# |---|---|---|
# | $B$ | `batch` | items in one optimizer step (sections 2 to 7: on one rank) |
# | $m$ | `num_micro_batches` | micro-batches per step and rank: the parts of the batch |
# | $n_i$ | `len(part)` | items in part $i$; $\sum_i n_i = B$ |
# | $p$ | `dp` | data-parallel ranks: they share a global batch |
# | $\ell_i$ | `loss` | mean loss of the items in part $i$ |
# | $g$ | `param.grad` | gradient of the mean loss over all $B$ items |
# | $G$, $\Sigma$ | | mean and covariance of the gradient of one item (section 8) |

# %%
import time
from statistics import fmean, median

import torch
from torch import nn
from torch.nn import functional as F

from course_lib.accumulation import pictures, split_micro_batches
from course_lib.checks import check
from course_lib.core.specs import ModelSpec
from course_lib.display import YES_NO, claim, predict, reveal, show
from course_lib.models import GPT, IGNORED, next_tokens, padded_batch, token_batch, token_loss

torch.set_num_threads(1)  # steadier measurements

# %% [markdown]
# ## 1 The arithmetic of a batch
#
# Lesson 01 showed that the activations of a step grow with the number of sequences that go through
# the model at once. Large language models are nevertheless trained on batches of 4 to 60 million
# tokens (Tazi et al. 2025), far more than fits into one GPU. Two things bridge the gap: many ranks
# share the batch, and each rank processes its share in several micro-batches.
#
# Take the batch of $4\cdot2^{20}$ tokens from that source, in sequences of $4\cdot2^{10}$ tokens.
# There are 128 ranks, and each of them can process 2 sequences at a time. How many micro-batches
# does a rank run before the optimizer steps? Divide the number of sequences in a step by the number
# that all ranks process at once:

# %%
sequences = 4 * 2**20 // (4 * 2**10)
at_once = 2 * 128
print(f"{sequences} sequences per step, {at_once} at once")
print(f"{sequences // at_once} micro-batches per step on each rank")

# %% [markdown]
# ### Exercise 1 (further): how many micro-batches
# *Difficulty 1 of 5, importance 3 of 5, about 5 minutes and 3 lines.*
#
# Write this calculation as a function for any sizes, and return an int. For example, 64 tokens in
# sequences of 8 tokens are 8 sequences; if each of 4 ranks processes 2 of them at a time, each rank
# runs 1 micro-batch. If the sizes do not divide evenly, raise a `ValueError`: a rounded result
# would silently train on another batch than the one you asked for.


# %% tags=["exercise"] exercise="accumulation-1"
def num_micro_batches_of(num_tokens, seq, micro_batch, dp):
    """Return how many micro-batches (micro_batch sequences each) a rank runs for num_tokens."""
    ### BEGIN SOLUTION: tokens to sequences to micro-batches
    if num_tokens % (seq * micro_batch * dp):
        raise ValueError(f"{num_tokens} is no multiple of {seq} * {micro_batch} * {dp}")
    return num_tokens // (seq * micro_batch * dp)
    ### END SOLUTION


# %% tags=["check"] exercise="accumulation-1"
check("accumulation-1", num_micro_batches_of)

# %% [markdown]
# **`global_batch = micro_batch * num_micro_batches * dp`. For a fixed global batch and micro-batch
# size, more ranks mean fewer micro-batches on each rank.**
#
# ## 2 What backward does with the old gradient
#
# Now a rank knows how many micro-batches it has to run, and it calls `backward` on each of them.
# But each parameter has only one place for a gradient, `param.grad`. What happens to the gradient
# of the first micro-batch when the second one arrives?
#
# Take one neuron with three parameters, $y = x_1 w_1 + x_2 w_2 + b$, and two items (an example of
# Jamil, *pytorch-transformer-distributed*). The loss of an item is $(y - \text{target})^2$.

# %%
w1, w2, b = (torch.tensor(value, requires_grad=True) for value in (0.773, 0.321, 0.067))


def item_loss(x1, x2, target):
    y_pred = x1 * w1 + x2 * w2 + b
    return (y_pred - target) ** 2


item_loss(6, 2, target=15).backward()
print(f"after item 1: gradient of w1 {w1.grad:.3f}")

# %% [markdown]
# Item 2 is $x = (5, 2)$ with target 12. The gradient of its loss with respect to $w_1$ is about
# $-74$. We call `backward` on this loss and do nothing else. Does `w1.grad` then contain $-74$?

# %%
item_loss(5, 2, target=12).backward()
print(f"after item 2: gradient of w1 {w1.grad:.3f}")

# %% [markdown]
# It does not. `backward` *adds* the new gradient to the one that is already there. Accumulation
# uses this addition. The same addition is why a training loop calls `zero_grad`: without it, every
# step would also contain the gradients of all earlier steps.
#
# Is it important that the optimizer waits until both gradients are there? Compare two ways to train
# on these two items with SGD and a learning rate of 0.001: one optimizer step after both items, or
# one step after each item. Choose a way, move the slider, and watch $w_1$.

# %% tags=["picture"]
from course_lib.accumulation.explorer import graph_explorer
from course_lib.accumulation.worked_graph import graph_states

one_step = graph_states(items_per_step=2)
graph_explorer({"add up, then step": one_step, "step after each": graph_states()})

# %% [markdown]
# The final weights differ. If the optimizer steps after item 1, the gradient of item 2 is computed
# at *other weights*, so two small steps are not the same as one big step.
#
# **Autograd adds up the gradients of all backward calls since they were last zeroed. If you want
# their mean, you have to divide.**
#
# ## 3 The sum is not the mean
#
# The loss of the full batch is a mean over its items, but backward only adds. So the accumulated
# gradient cannot simply be the one that we want. By how much is it wrong?
#
# The next cell splits a batch of 8 items into 4 micro-batches and calls `backward` on the mean loss
# of each one. Then it divides each element of the accumulated gradient by the same element of the
# full batch's gradient. Is the ratio 8, for the items, or 4, for the micro-batches?


# %%
def line():
    torch.manual_seed(0)
    return nn.Linear(3, 1).double()


x, y = torch.randn(8, 3).double(), torch.randn(8, 1).double()
full, summed = line(), line()
F.mse_loss(full(x), y).backward()
for part_x, part_y in split_micro_batches((x, y), 4):
    F.mse_loss(summed(part_x), part_y).backward()
ratios = summed.weight.grad / full.weight.grad
print(f"accumulated: {ratios.min():.6f} to {ratios.max():.6f} times the full batch's gradient")

# %% [markdown]
# The ratio is 4, the number of micro-batches: each mean loss is already divided by its 2 items.
# Each $\ell_i$ is the mean over the $B/m$ items of one part. If all parts have the same size, the
# mean over all items is the mean of these means:
#
# $$ \frac1B \sum_{i=1}^m \frac{B}{m}\,\ell_i = \frac1m\sum_{i=1}^m \ell_i $$
#
# Backward adds up the gradients of the $\ell_i$, which gives $m$ times the gradient of this mean.
# So divide each loss by $m$ before you call `backward`.
#
# **Break it.** Suppose that you forget the division. Would you notice it in training? We leave it
# out and train, once with SGD and once with AdamW. The argument `share` sets the factor that
# multiplies the loss of each part. It is either the part's share of the items (`by_items`, here
# 1/8), or 1 (`as_sum`, which means no division). So without the division, every gradient is 8 times
# too large. With SGD, so is every step. Does the loss of AdamW show the mistake, too?

# %% tags=["predict"]
guess = predict("does AdamW's loss show that the division is missing?", choices=YES_NO)
### GUESS guess.commit("yes")


# %% tags=["failure"]
from course_lib.accumulation import accumulated_step, as_sum, by_items

tiny = ModelSpec(hidden=32, num_layers=1, num_heads=2, ffn_hidden=64, vocab=32, max_seq=16)


def losses(optimizer_of, lr, share, steps=40):
    torch.manual_seed(0)
    model, curve = GPT(tiny), []
    optimizer = optimizer_of(model.parameters(), lr=lr)
    for n in range(steps):
        batch = next_tokens(token_batch(n, batch=16, seq=16, vocab=32))
        loss = accumulated_step(model, token_loss, optimizer, batch, 8, share=share)
        curve.append(loss.item() / (8 if share is as_sum else 1))
    return curve


# %% tags=["picture", "measured"]
sgd, adamw = (torch.optim.SGD, 1.0), (torch.optim.AdamW, 1e-2)
curves = [losses(*how, share) for how in (sgd, adamw) for share in (by_items, as_sum)]
gap = max(abs(a - b) for a, b in zip(curves[2], curves[3], strict=True))
claim("AdamW's loss hides the missing division", gap < 1e-3)
claim("SGD's loss shows the missing division", not all(loss < 8 for loss in curves[1]))
show(*pictures.without_division(*curves))
reveal(guess, "no")

# %% [markdown]
# Adam's update is, roughly, a running mean of the gradients divided by the root of a running mean
# of their squares. If every gradient is $m$ times too large, so are the numerator and the
# denominator, and the factor cancels (Kingma & Ba 2015, section 2.1). Two conditions apply: Adam's
# small $\epsilon$ in the denominator has to be negligible, and the gradient must not contain an L2
# penalty, which would not be scaled.
#
# The factor still does harm if you clip gradients, compare their norms between runs, or change $m$
# in the middle of a run. So a falling loss does not prove that the gradient is right.
#
# ### Exercise 2 (core): the whole step
# *Difficulty 2 of 5, importance 5 of 5, about 10 minutes and 7 lines.*
#
# Write one optimizer step on the full batch while only one micro-batch has its activations in
# memory. All parts have the same size, and `split_micro_batches(batch, num_micro_batches)` yields
# them as pairs `(x, y)`. Call the model once on each part. Return the mean loss of the whole batch
# as a detached tensor: if two parts have the losses 1 and 3, return 2. Lessons 05 and 08 build on
# this step.
#
# <details><summary>Hint: memory grows with the number of micro-batches</summary>
# Until backward has run, a loss holds its activations. Call backward in the loop, and add up
# <code>loss.detach()</code>.
# </details>


# %% tags=["exercise"] exercise="accumulation-2"
def my_accumulated_step(model, loss_fn, optimizer, batch, num_micro_batches):
    """One step on batch = (inputs, targets), in equal micro-batches; return its mean loss."""
    total = 0.0
    ### BEGIN SOLUTION: clear, add up over the micro-batches, step
    optimizer.zero_grad()
    for x, y in split_micro_batches(batch, num_micro_batches):
        loss = loss_fn(model(x), y) / num_micro_batches
        loss.backward()
        total += loss.detach()
    optimizer.step()
    ### END SOLUTION
    return total


# %% tags=["check"] exercise="accumulation-2"
check("accumulation-2", my_accumulated_step)

# %% [markdown]
# **For equal parts: zero the gradients once, divide each loss by the number of parts, call backward
# in the loop, and step once. A falling loss does not prove that you did.**
#
# ## 4 Parts of different sizes
#
# Dividing by $m$ was right because all parts had the same size. What if they do not? Split seven
# items into parts of 3, 2 and 2. If the mean loss of each part has the weight 1/3, an item of the
# first part has the weight $\frac13\cdot\frac13 = \frac19$. An item of another part has the weight
# $\frac13\cdot\frac12 = \frac16$, which is 1.5 times as much. Such a *mean of means* counts an item
# more only because it happens to be in a small part.
#
# In the mean over all $B$ items, every item has the weight $1/B$. A part has $n_i$ items, and
# $\ell_i$ already contains the division by $n_i$. So the weight of $\ell_i$ has to be the part's
# share of the items:
#
# $$ \frac1B\sum_{\text{items}} \text{loss} = \sum_i \frac{n_i}{B}\, \ell_i $$
#
# ### Exercise 3 (further): uneven parts
# *Difficulty 1 of 5, importance 4 of 5, about 5 minutes and 3 lines.*
#
# Add the gradient of the mean over *all* items to `param.grad`, with one part in memory at a time.
# `loss_fn(outputs, targets)` returns the mean over the items that it gets. For parts of 3, 2 and 2
# items, the weights of the three losses are 3/7, 2/7 and 2/7. You need this whenever the last part
# of an epoch is smaller than the others.


# %% tags=["exercise"] exercise="accumulation-3"
def add_gradients(model, loss_fn, parts):
    """Add up the gradient of the mean over all items; parts is a list of (inputs, targets)."""
    ### BEGIN SOLUTION: what share of the items has each part?
    num_items = sum(len(targets) for _, targets in parts)
    for inputs, targets in parts:
        (loss_fn(model(inputs), targets) * len(targets) / num_items).backward()
    ### END SOLUTION


# %% tags=["check"] exercise="accumulation-3"
check("accumulation-3", add_gradients)

# %% [markdown]
# In language models, uneven parts are common, because sequences have different lengths. Shorter
# sequences are padded to the length of the longest one. A padding token has no loss: its target is
# -100 (`IGNORED`), and `cross_entropy` takes the mean over the other tokens only. So parts with
# *equal* numbers of sequences can have *unequal* numbers of tokens that count.
#
# Take 8 sequences of 8 to 14 tokens, one per micro-batch. How far is the gradient of the mean of
# means from the right gradient?

# %% tags=["predict"]
guess = predict("wrong gradient: its distance from the right one", unit="% of the right one's norm")
### GUESS guess.commit(5)

# %%
from course_lib.accumulation import accumulate_gradients, by_tokens

batch = padded_batch(0, batch=8, seq=16, vocab=32)


def token_gradient(share, m=8):
    torch.manual_seed(0)
    model = GPT(tiny).double()
    loss = accumulate_gradients(model, token_loss, batch, m, share=share)
    return loss, torch.cat([param.grad.flatten() for param in model.parameters()])


(_, right), (_, wrong) = token_gradient(by_tokens), token_gradient(by_items)
_, one = token_gradient(by_tokens, 1)
reveal(guess, 100 * ((wrong - right).norm() / right.norm()).item())
exact = (right - one).abs().max() < 1e-12 * one.abs().max()
print("weighted by tokens: equal to the full batch, up to float64 rounding:", exact.item())

# %% [markdown]
# The error is large, although every micro-batch has exactly one sequence: the *tokens* of short
# sequences count too much. This mistake is easy to make in good code. The `Trainer` of Hugging Face
# Transformers used a mean of means until October 2024 (Hugging Face 2024).
#
# ### Exercise 4 (core): tokens that count
# *Difficulty 3 of 5, importance 5 of 5, about 10 minutes and 7 lines.*
#
# Solve exercise 3 for the mean over all tokens whose target is not `IGNORED`, and return this mean,
# detached. `token_loss(logits, targets)` is the mean over the tokens of one part that count. For
# parts with 3 and 5 such tokens, the weights are 3/8 and 5/8. If a part has no such token, its
# `token_loss` would be 0/0: skip the part before you call the model. Training on padded text needs
# exactly this weighting.


# %% tags=["exercise"] exercise="accumulation-4"
def add_token_gradients(model, parts):
    """Add up the gradient of the mean over all tokens that count; return that mean."""
    total = 0.0
    ### BEGIN SOLUTION: count the tokens of each part, and of all parts
    counts = [int((targets != IGNORED).sum()) for _, targets in parts]
    for (inputs, targets), count in zip(parts, counts, strict=True):
        if count:
            loss = token_loss(model(inputs), targets) * count / sum(counts)
            loss.backward()
            total += loss.detach()
    ### END SOLUTION
    return total


# %% tags=["check"] exercise="accumulation-4"
check("accumulation-4", add_token_gradients)

# %% [markdown]
# With data parallelism, the share refers to the tokens of *all* ranks, so the ranks have to
# exchange their counts first (lesson 05).
#
# **The weight of a part is its share of whatever the loss averages over: items, or tokens.**
#
# ## 5 What it saves, and what it costs
#
# The gradient is now right. But was it worth the effort: how much memory does accumulation save,
# and how much time does it cost?
#
# Take a GPT and split a batch of 16 sequences into 1, 2, 4, 8 or 16 micro-batches. The formula of
# lesson 01 predicts the bytes of the activations. They are proportional to the number of sequences
# in a micro-batch, so 8 micro-batches should need 1/8 of the full batch's peak. To test this,
# `activation_ledger` records over time what autograd really holds.

# %%
from course_lib.memory import TORCH_CPU, activations
from course_lib.memory.saved_tensors import activation_ledger

spec = ModelSpec(hidden=128, num_layers=4, num_heads=4, ffn_hidden=512, vocab=256, max_seq=128)
gpt, big = GPT(spec), next_tokens(token_batch(0, batch=16, seq=128, vocab=256))


def run(m):
    accumulate_gradients(gpt, token_loss, big, m)


def held(m):
    return activation_ledger(lambda: run(m), given=[*gpt.parameters(), *big])


def seconds(m):
    start_s = time.process_time()  # CPU seconds of this process alone
    run(m)
    return time.process_time() - start_s


# %% tags=["picture"]
def formula(m):
    return sum(activations(spec, 16 // m, 128, number_bytes=4, kernels=TORCH_CPU).values())


parts = [1, 2, 4, 8, 16]
predicted, measured = [formula(m) for m in parts], [held(m).peak_bytes() for m in parts]
print(f"peak of 8 micro-batches: {measured[3] / measured[0]:.3f} of the full batch's")
print("formula and measurement agree to the byte:", predicted == measured)
show(*pictures.peak_by_parts(parts, predicted, measured))

# %% [markdown]
# Backward frees the activations of a micro-batch before the next one begins, so only one
# micro-batch's activations exist at a time. If you keep the micro-batch size and make the *batch*
# larger, the activations have more peaks over time, but no higher ones. (The memory in total is a
# little higher from the second peak on, because the gradients are then in memory, too.)
#
# What about time? The number of FLOPs is the same for every $m$. Is the time the same, too? We
# measure it.

# %% tags=["picture", "measured"]
rounds = [[seconds(m) for m in parts] for _ in range(6)][1:]  # the first one warms up
one_s = median(times[0] for times in rounds)
ratios = [[each[n] / one_s for each in rounds] for n in range(len(parts))]
print(f"16 micro-batches take {median(ratios[-1]):.2f} times as long as the full batch")
claim("16 micro-batches take longer than the whole batch at once", median(ratios[-1]) > 1.05)
show(*pictures.part_times(parts, ratios))

# %% [markdown]
# Two costs grow with $m$. First, every micro-batch launches all operations again. Second, each
# operation works on smaller matrices, which often use the hardware less efficiently. (On one core,
# a few parts may even be faster than the full batch.)
#
# The stars in the picture show published runs of a 1.3B model on H100s (Tazi et al. 2025). If each
# GPU holds the whole model, a step with one sequence at a time takes 2 % longer than a step with
# two, because even one sequence gives large matrices. The other runs split each matrix over four
# GPUs, which communicate in every micro-batch (lesson 07). There, a step with one sequence at a
# time takes 2.4 times as long as with 16.
#
# So choose a micro-batch that fits into memory and is large enough to keep the device busy.
#
# **The micro-batch determines the memory of the activations; the whole batch determines the
# gradient, except with the layers and losses of section 6.**
#
# ## 6 What looks across the batch
#
# Section 5 ends with an exception. So far we have assumed that the loss of an item does not depend
# on the other items in its batch. Then the gradient of the full batch is a sum over items, and it
# does not matter how we group them. For which layers is this true?
#
# We compare three kinds of layers. Layer norm normalizes each item by itself. Batch norm uses the
# mean and the variance of *what it sees*, and with accumulation it sees only one micro-batch.
# Dropout draws a random mask for each item. Our model has two dropout layers, and we set the same
# seed before the full batch and before the four micro-batches. Do both then have the same gradient?

# %% tags=["predict"]
guess = predict("two dropout layers, same seed: is the gradient the same?", choices=YES_NO)
### GUESS guess.commit("yes")


# %%
def distance(layer, m=4):
    grads = []
    for parts in (1, m):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 8), layer(), nn.Linear(8, 1)).double()
        accumulate_gradients(model, F.mse_loss, (x, y), parts)
        grads.append(torch.cat([param.grad.flatten() for param in model.parameters()]))
    return ((grads[1] - grads[0]).norm() / grads[0].norm()).item()


# %% tags=["check"]
layers = {
    "layer norm": lambda: nn.LayerNorm(8),
    "batch norm": lambda: nn.BatchNorm1d(8),
    "dropout": lambda: nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)),
}
for name, layer in layers.items():
    print(f"{name:10} differs from the full batch:", distance(layer) > 1e-9)
reveal(guess, distance(layers["dropout"]) < 1e-9)

# %% [markdown]
# Why does dropout differ? The random numbers are the same, but the order in which they are drawn is
# not. The full batch draws all masks of the first layer, and then those of the second.
# Micro-batches alternate between the layers. So an item gets other masks, even from the same seed.
#
# Batch norm differs, too, but this is a worse difference. Dropout draws its other masks from the
# same distribution, so the *expected* gradient is unchanged, and accumulation does no harm. Batch
# norm computes a different function for every $m$, so even the expected gradient differs. Layer
# norm and RMSNorm normalize each token by itself, so accumulation changes nothing for them.
#
# Some losses look across the batch, too. In a contrastive loss, the other items serve as negatives,
# and a micro-batch has fewer of them. The load-balancing loss of a mixture of experts uses the
# fraction of the batch's tokens that each expert gets. If it is computed in each micro-batch, it
# demands that the experts are balanced in every single micro-batch, not only over the whole batch
# (Qiu et al. 2025).
#
# **Accumulation reproduces the full batch's gradient only if the loss of each item is independent
# of the other items. Random masks change the gradient, but not its expected value.**
#
# ## 7 Clip the accumulated gradient
#
# Section 6 was about layers and losses. But many training loops also do something with the gradient
# itself: they clip it. If the norm of a gradient exceeds `max_norm`, clipping scales the gradient
# so that its norm becomes `max_norm`. In an accumulated step there are two places where you could
# do this: after each backward, or once after the last one. Does the place matter?
#
# Two micro-batches, whose losses are already divided by $m$, have the gradients $(3, 0)$ and $(-3,
# 4)$; `max_norm` is 2. If you clip their sum, its norm becomes 2. What is the norm of the sum if
# you clip each gradient *before* you add them?

# %% tags=["predict"]
guess = predict("norm, if each part is clipped by itself")
### GUESS guess.commit(2)


# %%
def clip(g, max_norm=2.0):
    return g * min(1.0, max_norm / g.norm())


first, second = torch.tensor([3.0, 0.0]), torch.tensor([-3.0, 4.0])
each, once = clip(first) + clip(second), clip(first + second)
reveal(guess, each.norm().item())
print("each by itself:", [round(number, 3) for number in each.tolist()], " once:", once.tolist())

# %% [markdown]
# The first gradient has norm 3 and the second has norm 5, so clipping each part scales them by
# different factors, 2/3 and 2/5. Their first components no longer cancel. So clipping each part
# changes the norm *and the direction* of the result.
#
# ### Exercise 5 (further): clip once
# *Difficulty 2 of 5, importance 4 of 5, about 5 minutes and 6 lines.*
#
# Write the step of exercise 2 again, but clip the gradient of the whole batch: call
# `torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)` in the right place. No return value
# is needed. With the two gradients above and `max_norm = 2`, the optimizer has to get $(0, 2)$.
# Recipes for large language models usually clip like this (GPT-3 at a norm of 1: Brown et al. 2020,
# appendix B).


# %% tags=["exercise"] exercise="accumulation-5"
def clipped_step(model, loss_fn, optimizer, batch, num_micro_batches, max_norm):
    """One step on the batch in equal micro-batches, with its whole gradient clipped to max_norm."""
    ### BEGIN SOLUTION: clip when everything is in, before the step
    optimizer.zero_grad()
    for x, y in split_micro_batches(batch, num_micro_batches):
        (loss_fn(model(x), y) / num_micro_batches).backward()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    ### END SOLUTION


# %% tags=["check"] exercise="accumulation-5"
check("accumulation-5", clipped_step)

# %% [markdown]
# **Clip once per step: after the last backward, before the optimizer steps.**
#
# ## 8 When a larger batch stops helping
#
# With accumulation, memory no longer limits the batch. Then what does? A larger batch costs more
# FLOPs per step, so it is worth its price only if training needs fewer steps. The reason why it may
# need fewer is that a larger batch has a less noisy gradient.
#
# If the $B$ items are drawn independently, their mean gradient $g_B$ is the true gradient $G$ plus
# noise. The covariance of one item's gradient is $\Sigma$, so that of the mean of $B$ items is
# $\Sigma/B$. An SGD step with learning rate $\epsilon$ moves the weights by $-\epsilon g_B$. To
# second order, with the Hessian $H$, the loss changes by $-\epsilon\,G^\top g_B +
# \tfrac12\epsilon^2\,g_B^\top H g_B$. Take the average of both terms. On average, $g_B$ is $G$, and
# $g_B^\top H g_B$ is $G^\top H G$ plus $\mathrm{tr}(H\Sigma)/B$, which comes from the noise. So the
# loss changes on average by
#
# $$ -\epsilon\,|G|^2 + \tfrac12\epsilon^2
# \left(G^\top H G + \mathrm{tr}(H\Sigma)/B\right) $$
#
# This is a parabola in $\epsilon$. It is lowest if $\epsilon$ is $|G|^2$ divided by the bracket.
# With this learning rate, the loss falls by $\tfrac12|G|^4$ divided by the bracket. We call this
# the gain of a step, and factor $G^\top HG$ out of the bracket:
#
# $$ \text{gain} = \frac{|G|^4}{2\,G^\top HG}\cdot\frac{1}{1+B_\text{noise}/B} \qquad
# B_\text{noise}=\frac{\mathrm{tr}(H\Sigma)}{G^\top HG} $$
#
# Only the second fraction depends on $B$ (McCandlish et al. 2018, section 2.2).
#
# Far below $B_\text{noise}$, the gain grows in proportion to $B$: twice the batch needs about half
# the steps. Far above it, the gain hardly grows: twice the batch saves hardly any steps and doubles
# the work. But $H$ is expensive to compute. If we replace it by a multiple of the identity, the
# multiple cancels, and $B_\text{noise}$ becomes the **gradient noise scale**
# $B_\text{simple}=\mathrm{tr}\,\Sigma/|G|^2$.
#
# How can we measure it without knowing $G$? Accumulation computes gradients of two batch sizes
# anyway: $g_B$ of the whole batch, and $g_b$ of each micro-batch of $b$ items. We average $|g_b|^2$
# over the micro-batches. Noise makes a squared norm larger on average: the variances of all
# elements are added to $|G|^2$. Their sum is $\mathrm{tr}\,\Sigma$ for one item, so the expected
# values are
#
# $$ \mathrm{E}\,|g_B|^2 = |G|^2+\mathrm{tr}\,\Sigma/B \qquad
# \mathrm{E}\,|g_b|^2 = |G|^2+\mathrm{tr}\,\Sigma/b $$
#
# These are two equations with two unknowns. Multiply the first by $B$ and the second by $b$, and
# subtract: $\mathrm{tr}\,\Sigma$ cancels. Subtract one from the other as they are: $|G|^2$ cancels.
# Two unbiased estimates follow (McCandlish et al. 2018, appendix A.1):
#
# $$ |G|^2 \approx \frac{B\,|g_B|^2 - b\,|g_b|^2}{B - b} \qquad
# \mathrm{tr}\,\Sigma \approx \frac{|g_b|^2 - |g_B|^2}{1/b - 1/B} $$
#
# The estimates from one step are noisy, and a ratio of two noisy numbers is biased. So average each
# of them over many steps, and only then divide.
#
# ### Exercise 6 (further): the noise scale
# *Difficulty 4 of 5, importance 3 of 5, about 15 minutes and 7 lines; optional.*
#
# Return the noise scale in items. `steps` is a list with one tensor $[m, d]$ for each step: the
# *mean* gradients of its $m$ micro-batches of `micro_batch` items, for $d$ parameters. Each step
# has the same weight, even if their $m$ differ. For one step with the gradients 3 and 1 of one item
# each, $|g_b|^2=5$ and $|g_B|^2=4$; so $|G|^2\approx3$, $\mathrm{tr}\,\Sigma\approx2$, and the
# result is 2/3. It helps to choose a batch.


# %% tags=["exercise"] exercise="accumulation-6"
def my_noise_scale(steps, micro_batch):
    """Estimate tr(Sigma) / |G|^2 from the micro-batches' mean gradients of each step."""
    ### BEGIN SOLUTION: two batch sizes, two unknowns; sums over steps before the ratio
    grad_sq, noise = 0.0, 0.0
    for grads in steps:
        big = len(grads) * micro_batch
        small_sq, big_sq = grads.pow(2).sum(1).mean(), grads.mean(0).pow(2).sum()
        grad_sq += (big * big_sq - micro_batch * small_sq) / (big - micro_batch)
        noise += (small_sq - big_sq) / (1 / micro_batch - 1 / big)
    return (noise / grad_sq).item()
    ### END SOLUTION


# %% tags=["check"] exercise="accumulation-6"
check("accumulation-6", my_noise_scale)

# %% [markdown]
# Now we measure the noise scale on a bigram language model: from one token it predicts the next,
# with an embedding and an output matrix for 64 tokens. An item is a token and its successor. They
# are drawn from a known distribution, which also gives us the exact noise scale for comparison. We
# train from a loss of 4.2 to 2.2, with 256 items in 16 micro-batches per step, and 5 seeds.

# %% tags=["picture", "measured"]
from course_lib.accumulation import batch_sizes as sizes
from course_lib.accumulation.noise_scale import fit_tradeoff, noise_scale

runs = {r: [sizes.noise_on_the_way(2.2, seed=n, rate=r) for n in range(5)] for r in (8, 4)}
for rate in (4, 8):
    scales = [noise_scale(point.estimate for point in one) for one in runs[rate]]
    span = f"{min(scales):.0f} to {max(scales):.0f}"
    print(f"learning rate {rate}: {fmean(scales):.0f} items, mean of 5 runs ({span})")
show(*pictures.noise_growth(runs))

# %% [markdown]
# As the loss falls, the true gradient $G$ becomes small, while the items still disagree. So the
# noise grows relative to $G$, and larger batches become useful late in training. The noise scale
# also depends on the learning rate (McCandlish et al. 2018, appendix C): over a whole run, it is
# smaller here at the larger rate.
#
# Does the noise scale really tell when a larger batch stops helping? To test this, we count the
# steps to a loss of 2.2 for $B$ = 1, 2, 4, ..., 512 with 5 seeds, each $B$ with the best learning
# rate out of 1/8, 1/4, ..., 16. The theory says that the gain of a step is proportional to
# $1/(1+B_\text{noise}/B)$. If each step gains less, training needs more steps, so the number of
# steps $S$ is proportional to $1+B_\text{noise}/B$. But $B_\text{noise}$ changes during training.
# We replace it by one constant for the whole run, $B_\text{crit}$:
#
# $$ S = S_\text{min}\,(1 + B_\text{crit}/B) $$
#
# Here $S_\text{min}$ is the number of steps with a huge batch. A run uses $E = BS$ items. Multiply
# the equation by $B$: $E = E_\text{min}\,(1 + B/B_\text{crit})$, where $E_\text{min} = S_\text{min}
# B_\text{crit}$ is the number of items with a tiny batch. The two fractions $B_\text{crit}/B$ and
# $B/B_\text{crit}$ multiply to 1, which gives the law of McCandlish et al. (2018, section 2.3):
#
# $$ (S/S_\text{min} - 1)\,(E/E_\text{min} - 1) = 1 $$
#
# At the **critical batch size** $B = B_\text{crit}$, a run takes $2S_\text{min}$ steps and
# $2E_\text{min}$ items, twice the minimum of both. $B_\text{crit}$ should be close to the noise
# scale.
#
# From $B=1$ to 16, the batch becomes 16 times as large, and the number of steps falls to about
# 1/16. From 32 to 512, the batch becomes 16 times as large again. What happens to the steps?

# %% tags=["predict"]
guess = predict("steps at B = 32, as a multiple of those at B = 512")
### GUESS guess.commit(16)

# %% tags=["picture", "measured"]
sweep = sizes.steps_to_loss(2.2, [2**n for n in range(10)])
steps = sweep.mean_steps()
reveal(guess, steps[5] / steps[9])
print(f"steps at B = 1, as a multiple of those at B = 16: {steps[0] / steps[4]:.1f}")
print("best learning rates:", *sweep.rates)
scale = fmean(scales)  # at learning rate 8
fit = fit_tradeoff(sweep.batches, steps)
claim("the noise scale is within a factor of 3 of B_crit", 1 / 3 < scale / fit.critical_batch < 3)
show(*pictures.batch_tradeoff(sweep, scale))

# %% [markdown]
# For small batches, the best learning rate doubles with the batch. For large ones it stops growing,
# because the curvature $G^\top HG$ limits it. The noise scale predicts only the order of magnitude
# of $B_\text{crit}$. This is no surprise, because its theory assumes that $H$ is a multiple of the
# identity, and that the noise scale is constant during the run.
#
# The critical batch size also limits how many GPUs are useful: each data-parallel rank needs at
# least one sequence per step, so more ranks need a larger batch. For language models, published
# measurements say:
#
# - Kaplan et al. 2020, section 5.1: $B_\text{crit}\approx2\cdot10^8$ tokens$/L^{4.8}$ at a loss $L$
#   (1 million at $L=3$), whatever the size of the model.
# - Zhang et al. 2024: $B_\text{crit}$ grows with the data, hardly with the model (85M to 1.2B
#   parameters).
# - Merrill et al. 2025: in OLMo's training, $B_\text{crit}$ rises from near 0 and then flattens.
#
# **Up to about the critical batch size, a larger batch saves many steps. Beyond that size, it saves
# few steps and costs more items.**
#
# ## 9 The real thing
#
# You now know what an accumulated step has to do. Who does it in practice? PyTorch leaves this loop
# to you, except in its pipeline schedules. In Hugging Face Accelerate, `accelerator.backward`
# divides the loss by `gradient_accumulation_steps` (with DeepSpeed, its engine does this). Inside
# `accelerator.accumulate(model)`, the optimizer's `step` and `zero_grad` do nothing until the last
# micro-batch. So the loop below looks like one without accumulation. Does it give the same weights
# as our step?


# %%
theirs = line()
try:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, sgd = accelerator.prepare(theirs, torch.optim.SGD(theirs.parameters(), lr=0.1))
    for part_x, part_y in split_micro_batches((x, y), 4):
        with accelerator.accumulate(model):
            accelerator.backward(F.mse_loss(model(part_x), part_y))
            sgd.step()
            sgd.zero_grad()
    accumulated_step(ours := line(), F.mse_loss, torch.optim.SGD(ours.parameters(), 0.1), (x, y), 4)
    print("largest difference:", (theirs.weight - ours.weight).abs().max().item())
except ImportError:
    print("Accelerate is not installed here; with it this cell compares the weights.")

# %% [markdown]
# Accelerate always divides by `gradient_accumulation_steps`. If the parts have different numbers of
# tokens, this is the mean of means of section 4. If the last step of an epoch has fewer
# micro-batches, the divisor is too large. Transformers' `Trainer` counts the tokens instead
# (`num_items_in_batch`).
#
# **A framework's accumulation is right if its divisor matches what your loss averages over: check
# that before you trust it.**
#
# ## What to keep
#
# - `backward` adds: for a mean, weight each part by its *share* of the items or tokens.
# - Zero the gradients once, call backward in the loop, clip once, step once.
# - The micro-batch determines the memory of the activations; the whole batch determines the
#   gradient, unless a layer or a loss looks across the batch.
# - The gradient noise scale tells roughly up to which size a larger batch saves steps.
# - Compare gradients, not losses, with the full batch: Adam (without an L2 penalty) hides a
#   constant factor.
#
# ## Read on
#
# - Kingma & Ba 2015, *Adam*: why rescaled gradients give the same steps.
# - Hugging Face 2024, *Fixing Gradient Accumulation*; Unsloth 2024, *Bugs in LLM Training*: the
#   mistake of section 4 in a widely used library.
# - McCandlish et al. 2018, *An Empirical Model of Large-Batch Training*: the noise scale in full.
# - Merrill et al. 2025, *Critical Batch Size Revisited*: why the noise scale may mislead.
# - Qiu et al. 2025, *Demons in the Detail*: a loss that needs the global batch.
# - Tazi et al. 2025, *The Ultra-Scale Playbook*: measurements of large runs.
#
# Next: lesson `03_recompute` reduces the memory that a single micro-batch needs.
