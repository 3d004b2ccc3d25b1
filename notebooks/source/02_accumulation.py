# %% [markdown]
# # 02 Accumulation: one big batch from small ones
#
# **Question.** The batch you want does not fit into memory. Can you still train on it, and does the
# optimizer get exactly the gradient of the whole batch?
#
# The method is *gradient accumulation*: split the batch into micro-batches, run forward and
# backward on one after the other, let their gradients add up, and take one optimizer step. Several
# mistakes in these few lines of code raise no error.
#
# *After this lesson you can*
#
# - compute how many micro-batches a global batch needs on any number of ranks;
# - write an accumulated step that equals a step on the full batch, also with padded sequences;
# - say where to clip, and for which layers and losses accumulation gives a different result;
# - predict what accumulation does to memory and to the time of a step;
# - measure the gradient noise scale, and say roughly up to which size a larger batch helps.
#
# **Prerequisites:** lesson 01. **Time:** about 55 minutes of reading and running, and 35 minutes
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
# Batches of 4 to 60 million tokens are typical for recent large language models (Tazi et al. 2025).
# Take their batch of $4\cdot2^{20}$ tokens in sequences of $4\cdot2^{10}$ tokens. Each of 128
# ranks can process 2 sequences at a time. How many micro-batches does a rank run before the
# optimizer steps?

# %% tags=["predict"]
guess = predict("micro-batches on each of 128 ranks")
### GUESS guess.commit(8)

# %%
sequences = 4 * 2**20 // (4 * 2**10)
at_once = 2 * 128
reveal(guess, sequences // at_once)
print(f"{sequences} sequences per step, {at_once} at once")

# %% [markdown]
# ### Exercise 1: how many micro-batches
#
# Write this calculation as a function for any sizes; return an int. If the sizes do not divide
# evenly, raise a `ValueError`: rounding would silently change the batch. About 3 lines, 5 minutes.


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
# $-74$. You call `backward` on this loss and do nothing else. What is in `w1.grad` afterwards?

# %% tags=["predict"]
guess = predict("w1.grad after the second backward")
### GUESS guess.commit(-74)

# %%
item_loss(5, 2, target=12).backward()
reveal(guess, w1.grad.item())

# %% [markdown]
# `backward` **adds** to the gradient that is already there. Accumulation uses this addition,
# which is also why training loops call `zero_grad`. Compare two ways to train on
# these two items (SGD, learning rate 0.001): one optimizer step after each item, or one after both.
# Choose a way, move the slider, watch $w_1$.

# %% tags=["picture"]
from course_lib.accumulation.explorer import graph_explorer
from course_lib.accumulation.worked_graph import graph_states

one_step = graph_states(items_per_step=2)
graph_explorer({"add up, then step": one_step, "step after each": graph_states()})

# %% [markdown]
# After a step, the gradient of item 2 belongs to *other weights*, so two small steps are not the
# same as one big step.
#
# **Autograd sums gradients. If you want their mean, divide.**
#
# ## 3 The sum is not the mean
#
# Split a batch of 8 items into 4 micro-batches, and call `backward` on the mean loss of each one.
# The accumulated gradient is a multiple of the gradient of the full batch. Which multiple?

# %% tags=["predict"]
guess = predict("accumulated gradient, as a multiple of the full batch's")
### GUESS guess.commit(8)


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
reveal(guess, ratios.mean().item())
print(f"its elements: {ratios.min():.6f} to {ratios.max():.6f} times those of the full batch")

# %% [markdown]
# If all parts have the same size, the loss of the full batch is $\frac1m\sum_i \ell_i$. So divide
# each loss by $m$ before you call `backward`.
#
# **Break it.** Leave out the division and train, once with SGD and once with AdamW. `share` sets
# the factor on the loss of each part: the part's share of the items (`by_items`, here 1/8), or 1
# (`as_sum`, no division). Do the losses of both optimizers show the mistake?

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
# Adam divides a running mean of the gradients by their running root mean square, so a constant
# factor cancels, up to Adam's small $\epsilon$, if the gradient contains no L2 penalty (Kingma & Ba
# 2015, section 2.1). The factor matters again if you clip gradients, compare their norms, or change
# $m$ in the middle of a run. **A falling loss does not prove that the gradient is right.**
#
# ### Exercise 2: the whole step
#
# Write one optimizer step on the full batch, with the activations of only one micro-batch in memory
# at a time. Call the model once on each micro-batch, and do not change its mode (training or eval).
# If the loss of a part is nan, the gradient has to be nan, too. Return the batch's mean loss,
# detached, in the dtype of the losses. Use `split_micro_batches`; all parts have the same size
# here. About 7 lines, 10 minutes.
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
# **Zero the gradients once, divide each loss, call backward in the loop, step once.**
#
# ## 4 Parts of different sizes
#
# Split seven items into parts of 3, 2 and 2. If the mean loss of each part has the weight 1/3, an
# item of the first part has the weight 1/9, and an item of another part 1/6, 1.5 times as much.
# This is a *mean of means*. For the mean over all items, the weight of part $i$ has to be its share
# of the items: $\sum_i \frac{n_i}{B}\, \ell_i$.
#
# ### Exercise 3: uneven parts
#
# Add the gradient of the mean over *all* items to `param.grad`, with one part in memory at a time.
# `loss_fn` returns the mean over the items that it gets. About 3 lines, 5 minutes.


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
# Padded text gives uneven parts. Padding has no loss (its target is -100), and `cross_entropy`
# takes the mean over the other tokens. *Equal* numbers of sequences then have *unequal* numbers of
# tokens. Take 8 sequences of 8 to 14 tokens, one per micro-batch. How far is the gradient of the
# mean of means from the right gradient?

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
# The `Trainer` of Hugging Face Transformers used a mean of means until October 2024 (Hugging Face
# 2024).
#
# ### Exercise 4: tokens that count
#
# Solve exercise 3 for a mean over the tokens whose target is not `IGNORED`, and return this mean,
# detached. If a part has no such token, its `token_loss` is 0/0: skip the part without calling the
# model. If the model itself produces a nan, the loss and the gradient have to be nan. About 7
# lines, 10 minutes.


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
# **The weight of a part is its share of whatever the loss averages over: items, or tokens.**
#
# With data parallelism, count the tokens of *all* ranks (lesson 05).
#
# ## 5 What it saves, and what it costs
#
# Take a GPT and split a batch of 16 sequences into 1, 2, 4, 8 or 16 micro-batches. The formula of
# lesson 01 predicts the bytes of the activations; `activation_ledger` records over time what
# autograd holds. What fraction of the full batch's peak is the peak with 8 micro-batches?

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


# %% tags=["predict"]
guess = predict("peak of 8 micro-batches, as a fraction of the full batch's (like 1/2)")
### GUESS guess.commit("1/8")


# %% tags=["picture"]
def formula(m):
    return sum(activations(spec, 16 // m, 128, number_bytes=4, kernels=TORCH_CPU).values())


parts = [1, 2, 4, 8, 16]
predicted, measured = [formula(m) for m in parts], [held(m).peak_bytes() for m in parts]
reveal(guess, measured[3] / measured[0])
print("formula and measurement agree to the byte:", predicted == measured)
show(*pictures.peak_by_parts(parts, predicted, measured))

# %% [markdown]
# If you keep the micro-batch size and make the *batch* larger, the activations have more peaks over
# time, but no higher ones. (From the second peak on, the gradients are in memory, too.)
#
# The FLOPs are the same for every $m$. Is the time the same, too?

# %% tags=["predict"]
guess = predict("time of 16 micro-batches, as a multiple of the full batch's")
### GUESS guess.commit(1.1)


# %% tags=["picture", "measured"]
rounds = [[seconds(m) for m in parts] for _ in range(6)][1:]  # the first one warms up
one_s = median(times[0] for times in rounds)
ratios = [[each[n] / one_s for each in rounds] for n in range(len(parts))]
reveal(guess, median(ratios[-1]))
claim("16 micro-batches take longer than the whole batch at once", median(ratios[-1]) > 1.05)
show(*pictures.part_times(parts, ratios))

# %% [markdown]
# Two costs grow with $m$: every micro-batch launches all operations again, and smaller matrices
# often use the hardware less efficiently. (On one core, a few parts may still be faster.) The stars
# show published H100 runs of a 1.3B model (Tazi et al. 2025). With the whole model on each GPU, a
# step with one sequence at a time takes 2 % longer than with two. With each matrix split over four
# GPUs, which communicate in every micro-batch (lesson 07), it takes 2.4 times as long as with 16
# sequences.
#
# So choose a micro-batch that fits into memory and keeps the device busy.
#
# **The micro-batch determines the memory of the activations; the whole batch determines the
# gradient**, except for the layers and losses of section 6.
#
# ## 6 What looks across the batch
#
# Does every model get the full batch's gradient? Batch norm uses the mean and the variance of *what
# it sees*: one micro-batch. Two dropout layers draw their random masks in a different order than on
# the full batch.


# %% tags=["check"]
def distance(layer, m=4):
    grads = []
    for parts in (1, m):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 8), layer(), nn.Linear(8, 1)).double()
        accumulate_gradients(model, F.mse_loss, (x, y), parts)
        grads.append(torch.cat([param.grad.flatten() for param in model.parameters()]))
    return ((grads[1] - grads[0]).norm() / grads[0].norm()).item()


layers = {
    "layer norm": lambda: nn.LayerNorm(8),
    "batch norm": lambda: nn.BatchNorm1d(8),
    "dropout": lambda: nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)),
}
for name, layer in layers.items():
    print(f"{name:10} differs from the full batch:", distance(layer) > 1e-9)

# %% [markdown]
# Dropout draws other masks from the same distribution, so the *expected* gradient is unchanged.
# Batch norm computes a different function for every $m$. Layer norm and RMSNorm normalize each
# token by itself, so accumulation changes nothing for them. Some losses look across the batch, too:
# contrastive losses whose negatives are the other items, and the load-balancing loss of a mixture
# of experts (Qiu et al. 2025).
#
# ## 7 Clip the accumulated gradient
#
# If the norm of a gradient exceeds `max_norm`, clipping scales the gradient so that its norm is
# `max_norm`. Two micro-batches, whose losses are already divided by $m$, have the gradients
# $(3, 0)$ and $(-3, 4)$; `max_norm` is 2. What is the norm of their sum if you clip each gradient
# before you add them? And if you clip the sum?

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
# Clipping each part changes the norm *and the direction*.
#
# ### Exercise 5: clip once
#
# Write the step of exercise 2 again, with `torch.nn.utils.clip_grad_norm_(model.parameters(),
# max_norm)` in the right place, and without a return value. About 6 lines, 5 minutes.


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
# Memory no longer limits the batch. What does? If the $B$ items are drawn independently, their mean
# gradient $g_B$ is the true gradient $G$ plus noise of covariance $\Sigma/B$. To second order, with
# the Hessian $H$, an SGD step with learning rate $\epsilon$ changes the loss on average by
#
# $$ -\epsilon\,|G|^2 + \tfrac12\epsilon^2
# \left(G^\top H G + \mathrm{tr}(H\Sigma)/B\right) $$
#
# The best $\epsilon$ is $|G|^2$ divided by the bracket. With it, a step lowers the loss in
# proportion to $1/(1+B_\text{noise}/B)$, where
# $B_\text{noise}=\mathrm{tr}(H\Sigma)/G^\top HG$ (McCandlish et al. 2018, section 2.2). Far below
# $B_\text{noise}$, twice the batch needs about half the steps. Far above it, twice the batch saves
# hardly any steps and doubles the work. $H$ is expensive to compute; if a multiple of the identity
# replaces it, $B_\text{noise}$ becomes the **gradient noise scale**
# $B_\text{simple}=\mathrm{tr}\,\Sigma/|G|^2$.
#
# Accumulation provides $|g_B|^2$ of the whole batch, and $|g_b|^2$ as the mean over its
# micro-batches of $b$ items. Their expected values are $|G|^2+\mathrm{tr}\,\Sigma/B$ and
# $|G|^2+\mathrm{tr}\,\Sigma/b$. Two unbiased estimates follow (McCandlish et al., appendix A.1):
#
# $$ |G|^2 \approx \frac{B\,|g_B|^2 - b\,|g_b|^2}{B - b} \qquad
# \mathrm{tr}\,\Sigma \approx \frac{|g_b|^2 - |g_B|^2}{1/b - 1/B} $$
#
# The estimates from one step are noisy, and their ratio is biased: average each over many steps
# before you divide.
#
# ### Exercise 6: the noise scale
#
# `steps` is a list with one tensor $[m, d]$ for each step: the *mean* gradients of its $m$
# micro-batches of `micro_batch` items, for $d$ parameters. Return the noise scale in items. Every
# step has the same weight, whatever its $m$ is. Optional, 7 lines, 15 minutes.


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
# Measure it on a bigram language model: an embedding and an output matrix for 64 tokens. An item
# is a token and its successor, from a known distribution, which also gives the exact noise scale.
# We train from a loss of 4.2 to 2.2, with 256 items in 16 micro-batches per step, and 5 seeds.

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
# As the loss falls, the noise grows relative to $G$. The noise scale also depends on the learning
# rate (McCandlish et al., appendix C): over a whole run, it is smaller here at the larger rate.
#
# Now count the steps to a loss of 2.2 for $B$ = 1, 2, 4, ..., 512 with 5 seeds, each $B$ with the
# best learning rate out of 1/8, 1/4, ..., 16. McCandlish et al. (section 2.3) predict for $S$ steps
# and $E=BS$ items:
#
# $$ S = S_\text{min}\,(1 + B_\text{crit}/B) \quad\Leftrightarrow\quad
# (S/S_\text{min} - 1)\,(E/E_\text{min} - 1) = 1 $$
#
# $S_\text{min}$ is the smallest number of steps, $E_\text{min}$ the smallest number of items. At
# the **critical batch size** $B_\text{crit}=E_\text{min}/S_\text{min}$, a run takes $2S_\text{min}$
# steps and $2E_\text{min}$ items. $B_\text{crit}$ should be close to the noise scale. From $B=1$
# to 16, the number of steps falls to about 1/16. And from 32 to 512?

# %% tags=["predict"]
guess = predict("steps at B = 32, as a multiple of those at B = 512")
### GUESS guess.commit(16)

# %% tags=["picture", "measured"]
sweep = sizes.steps_to_loss(2.2, [2**n for n in range(10)])
steps = sweep.mean_steps()
reveal(guess, steps[5] / steps[9])
print("best learning rates:", *sweep.rates)
scale = fmean(scales)  # at learning rate 8
fit = fit_tradeoff(sweep.batches, steps)
claim("the noise scale is within a factor of 3 of B_crit", 1 / 3 < scale / fit.critical_batch < 3)
show(*pictures.batch_tradeoff(sweep, scale))

# %% [markdown]
# For small batches the best learning rate doubles with the batch; for large ones, the curvature
# $G^\top HG$ limits it. The noise scale predicts only the order of magnitude of $B_\text{crit}$:
# its theory assumes that $H$ is a multiple of the identity, and that the noise scale is constant.
#
# Each data-parallel rank needs at least one sequence per step, so $B_\text{crit}$ limits how many
# ranks are useful. For language models:
#
# - Kaplan et al. 2020, section 5.1: $B_\text{crit}\approx2\cdot10^8$ tokens$/L^{4.8}$ at a loss $L$
#   (1 million at $L=3$), whatever the size of the model.
# - Zhang et al. 2024: $B_\text{crit}$ grows with the data, hardly with the model (85M to 1.2B
#   parameters).
# - Merrill et al. 2025: in OLMo's training $B_\text{crit}$ rises from near 0 and then flattens.
#
# **Up to about the critical batch size, a larger batch saves many steps. Beyond that size, it saves
# few steps and costs more items.**
#
# ## 9 The real thing
#
# PyTorch leaves this loop to you, except in its pipeline schedules. In Hugging Face Accelerate,
# `accelerator.backward` divides the loss by `gradient_accumulation_steps` (with DeepSpeed, the
# engine does). Inside `accelerator.accumulate(model)`, the optimizer's `step` and `zero_grad` do
# nothing until the last micro-batch.


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
# Accelerate divides by `gradient_accumulation_steps` even if the last step of an epoch has fewer
# micro-batches, or if their numbers of tokens differ. Transformers' `Trainer` counts tokens
# (`num_items_in_batch`).
#
# ## What to keep
#
# - `backward` adds: for a mean, weight each part by its *share* of the items or tokens.
# - Zero the gradients once, call backward in the loop, clip once, step once.
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
