# %% [markdown]
# # 02 Accumulation: one big batch from small ones
#
# **Question.** The batch you want does not fit into memory. Can you still train on it, and does the
# optimizer get exactly the gradient that it would have got from the whole batch?
#
# The method is *gradient accumulation*: split the batch into micro-batches, run forward and
# backward on one after the other, let their gradients add up, and step once. It takes five lines
# of code, and there are at least six ways to get them wrong without an error message. You
# **predict** each number, **run** the code, and **compare**.
#
# *After this lesson you can*
#
# - compute how many micro-batches a global batch needs on any number of ranks;
# - write an accumulated step that equals a step on the full batch, also with padding;
# - say where to clip, and with which layers and losses accumulation gives another result;
# - predict what accumulation does to memory and to the time of a step.
#
# **Prerequisites:** lesson 01. **Time:** about 45 minutes of reading and running, and 35 minutes
# for five exercises.
#
# | symbol | in code | meaning |
# |---|---|---|
# | $B$ | `batch` | items (sequences) in one optimizer step on one rank |
# | $m$ | `num_micro_batches` | micro-batches per step: the parts into which the batch is split |
# | $n_i$ | `len(part)` | items in part $i$; $\sum_i n_i = B$ |
# | $p$ | `dp` | data-parallel ranks: they share a global batch |
# | $\ell_i$ | `loss` | mean loss of part $i$ |
# | $g$ | `param.grad` | gradient of the mean loss over all $B$ items |

# %%
import time

import torch
from torch import nn
from torch.nn import functional as F

from course_lib.accumulation import pictures, split_micro_batches
from course_lib.checks import check
from course_lib.core.specs import ModelSpec
from course_lib.display import YES_NO, Voices, claim, compare, explore
from course_lib.display import memory, predict, reveal, show
from course_lib.models import GPT, IGNORED, next_tokens, padded_batch, token_batch, token_loss

torch.set_num_threads(1)  # quiet measurements

# %% [markdown]
# ## 1 The arithmetic of a batch
#
# Batches of 4 to 60 million tokens are typical for large language models (Ultra-Scale Playbook,
# 2025). Take 4 Mi tokens ($4\cdot2^{20}$) in sequences of 4 Ki ($4\cdot2^{10}$); 2 sequences fit on
# a rank, and 128 ranks share the work. How many micro-batches does each rank run before the
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
# In general: `global_batch = micro_batch * num_micro_batches * dp`.
#
# ### Exercise 1: how many micro-batches
#
# Write this calculation as a function of any sizes; return an int. (Try it for 512 ranks.) If the
# sizes do not divide evenly, raise a `ValueError`: rounding would silently change the batch. About
# 3 lines, 5 minutes.


# %% tags=["exercise"] exercise="accumulation-1"
def num_micro_batches_of(num_tokens, seq, micro_batch, dp):
    """How many micro-batches of micro_batch sequences each of dp ranks runs for num_tokens."""
    ### BEGIN SOLUTION: tokens to sequences to micro-batches
    if num_tokens % (seq * micro_batch * dp):
        raise ValueError(f"{num_tokens} is no multiple of {seq} * {micro_batch} * {dp}")
    return num_tokens // (seq * micro_batch * dp)
    ### END SOLUTION


# %% tags=["check"] exercise="accumulation-1"
check("accumulation-1", num_micro_batches_of)

# %% [markdown]
# **`global_batch = micro_batch * num_micro_batches * dp`: for a fixed global batch and micro-batch
# size, more ranks mean fewer micro-batches on each.**
#
# ## 2 What backward does with the old gradient
#
# One neuron, three parameters, two items: $y = x_1 w_1 + x_2 w_2 + b$,
# loss $= (y - \text{target})^2$.

# %%
w1, w2, b = (torch.tensor(value, requires_grad=True) for value in (0.773, 0.321, 0.067))


def item_loss(x1, x2, target):
    y_pred = x1 * w1 + x2 * w2 + b
    return (y_pred - target) ** 2


item_loss(6, 2, target=15).backward()
print(f"after item 1: gradient of w1 {w1.grad:.3f}")

# %% [markdown]
# Item 2 is $x = (5, 2)$ with target 12; on its own, its gradient for $w_1$ is about $-74$. You call
# `backward` on its loss and do nothing else. What is in `w1.grad`?

# %% tags=["predict"]
guess = predict("w1.grad after the second backward")
### GUESS guess.commit(-74)

# %%
item_loss(5, 2, target=12).backward()
reveal(guess, w1.grad.item())

# %% [markdown]
# `backward` **adds** to the gradient that is already there. That is why training loops call
# `zero_grad`, and this addition is all that accumulation needs. Compare two ways of training on
# these two items, one optimizer step after each or one after both: move the slider, and watch $w_1$
# (SGD, learning rate 0.001).

# %% tags=["picture"]
from course_lib.accumulation.worked_graph import graph_states

ways = {"add up, then step": graph_states(items_per_step=2), "step after each": graph_states()}


def at(way, event):
    return ways[way][min(event, len(ways[way]) - 1)]


def draw(way, event):
    return pictures.graph(at(way, event), f"{way}: {at(way, event).words}")


explore(draw, lambda **where: pictures.graph_words(at(**where)), way=list(ways), event=(0, 6, 4))

# %% tags=["check"]
for way, seen in ways.items():
    print(f"{way:18} item 2 sees", *(f"{seen[-2].values[name]:.4f}" for name in ("w1", "w2", "b")))
    print(f"{way:18} ends with ", *(f"{seen[-1].values[name]:.4f}" for name in ("w1", "w2", "b")))

# %% [markdown]
# If the optimizer steps after each item, item 2 is evaluated at *other weights*, and its gradient
# differs: two small steps are not one big step.
#
# **Autograd sums gradients. If you want their mean, divide.**
#
# ## 3 The sum is not the mean
#
# Now a batch of 8 items in 4 micro-batches, with a loss that is a mean over its items, as usual. We
# call `backward` on each micro-batch's loss as it is. How many times too large is the gradient?

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

# %% tags=["check"]
low, high = ratios.min(), ratios.max()
print(f"its elements are {low:.6f} to {high:.6f} times those of the full batch's gradient")

# %% [markdown]
# The loss of the full batch is $\frac1m\sum_i \ell_i$ when all parts have the same size, so each
# loss has to be divided by $m$ before its `backward`.
#
# **Break it.** Leave out the division and train, once with SGD and once with AdamW. In the code,
# `share` is the factor on each part's loss: `by_items` is its share of the items, here 1/8, and
# `as_sum` is 1. With `as_sum` the division is missing.
# Do the losses of both optimizers show it?

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
claim("SGD's loss shows it", not all(loss < 8 for loss in curves[1]))
title = f"Without the division, SGD diverges; AdamW's loss changes by at most {gap:.0e}"
show(pictures.without_division(*curves, title), alt=title)
reveal(guess, "no")

# %% [markdown]
# Adam divides a running mean of the gradients by their running root mean square, so a constant
# factor cancels (up to $\epsilon$, if the gradient contains no L2 weight decay; Kingma & Ba 2015,
# section 2.1). That is why the loss does not show the mistake. It matters again as soon as you clip
# gradients, compare their norms, or change $m$ in the middle of a run. **A falling loss does not
# prove that the gradient is right.**
#
# ### Exercise 2: the whole step
#
# Write one step: gradients as from the full batch, one optimizer step, and never more than one
# micro-batch in memory. Call the model once on each micro-batch, in the mode (training or eval) in
# which you get it. If a part's loss is nan, the gradient has to be nan, too. Return the mean loss
# of the whole batch, detached, in the precision of the losses. $m$ divides the batch here;
# `split_micro_batches` splits it, as above. About 7 lines, 10 minutes.
#
# <details><summary>Hint: memory grows with the number of micro-batches</summary>
# Every loss that you keep keeps its graph. Call backward in the loop, and keep
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
# **Zero once, divide each loss, backward in the loop, step once.**
#
# ## 4 Parts of different sizes
#
# Seven items in parts of 3, 2 and 2. If every part's mean gets the weight 1/3, how much does an
# item of the first part count, relative to one of the last part?

# %% tags=["predict"]
guess = predict("weight of an item in the first part, relative to the last part (like 3/4)")
### GUESS guess.commit("1/2")

# %%
reveal(guess, (1 / 3 / 3) / (1 / 3 / 2))

# %% [markdown]
# This is a *mean of means*. For the mean over all items, part $i$ needs its share of the items as
# its weight: $\sum_i \frac{n_i}{B}\, \ell_i$.
#
# ### Exercise 3: uneven parts
#
# Add the gradient of the mean over *all* items to `param.grad`, with one part in memory at a time.
# `loss_fn` is a mean over the items of its part. About 3 lines, 5 minutes.


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
# With text this is the usual case: shorter sequences are padded, padding has no loss (its target is
# -100), and `cross_entropy` takes the mean over the remaining tokens. *Equal* numbers of sequences
# are then *unequal* numbers of tokens. With one sequence per micro-batch, how far is the gradient
# of the mean of means from the right gradient, in percent of the right one's norm?

# %%
batch = padded_batch(0, batch=8, seq=16, vocab=32)
tokens = [int((part != IGNORED).sum()) for part in batch[1].chunk(8)]
print("tokens that count, by sequence:", tokens)

# %% tags=["predict"]
guess = predict("wrong gradient: its distance from the right one", unit="% of the right one's norm")
### GUESS guess.commit(5)

# %%
from course_lib.accumulation import accumulate_gradients, by_tokens


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
# Hugging Face Transformers' `Trainer` averaged means in this way until October 2024 (Hugging Face,
# "Fixing Gradient Accumulation"; Unsloth, "Bugs in LLM Training", which says that the mistake was
# known in 2021). The training losses still fell.
#
# ### Exercise 4: tokens that count
#
# As exercise 3, but the mean runs over the tokens whose target is not `IGNORED`. Also return the
# loss, as in exercise 2. A part may have no such token at all; its `token_loss` is 0/0, so skip the
# part without calling the model. A nan that the model itself makes has to show in the loss and the
# gradient. About 7 lines, 10 minutes.


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
# The same rule holds across data-parallel ranks, where the tokens of *all* ranks have to be counted
# (lesson 05).
#
# ## 5 What it saves, and what it costs
#
# Take a GPT and a batch of 16 sequences, in 1, 2, 4, 8 or 16 micro-batches. The formula of lesson
# 01 predicts the bytes of the activations; `activation_ledger` records what autograd truly holds
# over time. What fraction of the full batch's peak do 8 micro-batches need?

# %%
from course_lib.memory import TORCH_CPU, activations
from course_lib.memory.saved_tensors import activation_ledger

spec = ModelSpec(hidden=128, num_layers=4, num_heads=4, ffn_hidden=512, vocab=256, max_seq=128)
gpt, big = GPT(spec), next_tokens(token_batch(0, batch=16, seq=128, vocab=256))


def run(m):
    accumulate_gradients(gpt, token_loss, big, m)


def held(m):
    return activation_ledger(lambda: run(m), given=[*gpt.parameters(), *big])


# %% tags=["predict"]
guess = predict("peak of 8 micro-batches, as a fraction of the full batch's (like 1/2)")
### GUESS guess.commit("1/8")


# %% tags=["picture"]
def formula(m):
    return sum(activations(spec, 16 // m, 128, number_bytes=4, kernels=TORCH_CPU).values()) / 2**20


parts = [1, 2, 4, 8, 16]
measured = [held(m).peak_bytes() / 2**20 for m in parts]
reveal(guess, measured[3] / measured[0])
title = f"16 micro-batches hold {measured[-1]:.1f} MiB, the full batch {measured[0]:.0f} MiB"
voices = Voices(formula=[formula(m) for m in parts], measurement=measured)
labels = {"x_label": "micro-batches m", "y_label": "peak (MiB)", "log": True}
show(compare(parts, voices, title, **labels), alt=f"{title}: the formula of lesson 01 to the byte")

# %% tags=["check"]
print("formula and measurement agree to the byte:", [formula(m) for m in parts] == measured)

# %% tags=["picture", "measured"]
saw = held(4)
peak = f"{saw.peak_bytes() / 2**20:.0f} MiB"
title = f"Four micro-batches: four peaks of {peak} instead of one of {measured[0]:.0f} MiB"
show(memory(saw, title), alt=title)

# %% [markdown]
# Now the other way round: keep the micro-batch size, and let the *batch* grow. The peak stays where
# it is, and the curve over time has more peaks. (The model states of lesson 01 come on top.
# Accumulation does not change their size, but from the second micro-batch on, the gradients already
# exist when the activations reach their peak.)
#
# The FLOPs are the same for every $m$. Is the time?

# %% tags=["predict"]
guess = predict("time of 16 micro-batches, as a multiple of the full batch's")
### GUESS guess.commit(1.1)


# %% tags=["picture", "measured"]
def seconds(m):
    start_s = time.process_time()  # CPU seconds of this process alone
    run(m)
    return time.process_time() - start_s


rounds = [[seconds(m) for m in parts] for _ in range(6)][1:]
one_s = sorted(times[0] for times in rounds)[2]
times = [[each[n] / one_s for each in rounds] for n in range(len(parts))]
ratio = sorted(times[-1])[2]
reveal(guess, ratio)
claim("16 micro-batches take longer than the whole batch at once", ratio > 1.05)
title = f"The same FLOPs take {ratio:.2f} times as long in 16 parts here"
picture = pictures.part_times(parts, times, title)
show(picture, alt=f"{title}; on H100s up to 2.4 times, where each GPU's part of the work is small")

# %% [markdown]
# Here 2 or 4 parts can even be faster than one, probably because smaller tensors fit into the
# cache. But two costs grow with $m$: every micro-batch launches every operation again, and smaller
# matrices use the hardware less well. How much that is depends on the work in one micro-batch. The
# stars in the picture are published H100 runs of a 1.3B model, with 256 sequences of 4,096 tokens
# per step (Ultra-Scale Playbook, 2025). With the whole model on each GPU, going from two sequences
# at a time to one costs 2 %: 4,096 tokens keep the GPU busy. With each matrix split over four GPUs
# (lesson 07) each GPU has a quarter of the work per operation, and has to communicate as well: one
# sequence at a time takes 2.4 times as long as 16 at a time.
#
# So: take the largest micro-batch that fits (a smaller one is enough if it keeps the device busy),
# and accumulate the rest.
#
# **The micro-batch determines the memory of the activations; the whole batch determines the
# gradient.**
#
# ## 6 What looks across the batch
#
# Is the accumulated gradient the same for every model? Batch norm uses the mean and variance of
# *what it sees*, and it sees one micro-batch. With two dropout layers, part 1 draws both masks
# before part 2 draws its first: another order than in the full batch.


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
# Batch norm computes another function for every $m$. Layer norm and RMSNorm, which transformers
# use, look at one token at a time, so accumulation changes nothing for them. Some losses look
# across the batch, too, and need care: contrastive losses, whose negatives are the other items of
# the batch, and the load-balancing loss of a mixture of experts (Qiu et al. 2025).
#
# ## 7 Clip the accumulated gradient
#
# If the norm of a gradient exceeds `max_norm`, clipping scales the gradient down to the norm
# `max_norm`. Two micro-batches, whose losses are already divided by $m$, have the gradients
# $(3, 0)$ and $(-3, 4)$; `max_norm` is 2. Clip each one, then add: what is the norm of the result?
# And if you add first?

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
# Clipping each part gives another norm *and another direction*.
#
# ### Exercise 5: clip once
#
# As exercise 2, with `torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)` in the one
# right place, and without returning the loss. About 6 lines, 5 minutes.


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
# **Clip once per step: after the last backward, before the optimizer.**
#
# ## 8 The real thing
#
# PyTorch has no function for this: you write the loop. Hugging Face Accelerate wraps it:
# `accelerator.backward` divides the loss by `gradient_accumulation_steps`, and inside
# `accelerator.accumulate(model)` the optimizer's `step` and `zero_grad` do nothing until the last
# micro-batch. The course's environment has Accelerate on Linux; where it is missing, the next cell
# says so.


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
# Accelerate divides by `gradient_accumulation_steps`, whatever is in the micro-batches, and even if
# the last step of an epoch has fewer micro-batches. Where your parts have different numbers of
# tokens, you have to weight them yourself, or use a trainer that counts tokens (in Transformers'
# `Trainer`: `num_items_in_batch`).
#
# ## What to keep
#
# - `backward` adds; the mean needs a division, by each part's *share* of items or tokens.
# - Zero once, backward in the loop, clip once, step once.
# - The peak of the activations is that of one micro-batch, however large the batch is.
# - Adam (without an L2 penalty) hides a constant factor: compare gradients with the full batch,
#   not losses.
#
# ## Read on
#
# - Huang et al. 2019, *GPipe*: splits a batch into micro-batches for a pipeline (lesson 08).
# - Kingma & Ba 2015, *Adam*: why rescaled gradients give the same steps (section 2.1).
# - Hugging Face 2024, *Fixing Gradient Accumulation*; Unsloth 2024, *Bugs in LLM Training*: the
#   mistake of section 4 in a widely used library.
# - McCandlish et al. 2018, *An Empirical Model of Large-Batch Training*: up to which size a larger
#   batch is worthwhile.
# - Qiu et al. 2025, *Demons in the Detail*: a loss that needs the global batch.
# - Tazi et al. 2025, *The Ultra-Scale Playbook*: accumulation in large runs, with measurements.
#
# Next: `03_recompute` reduces the memory of even one micro-batch.
