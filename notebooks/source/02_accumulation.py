# %% [markdown]
# # 02 Accumulation: one big batch from small ones
#
# The batch you want does not fit. Cut it into micro-batches, run them one after the other, let the
# gradients add up, and step once. Five lines of code, and at least six ways to get them wrong that
# no error message will ever mention. You **predict** each number, **run** it, and **compare**.
#
# | symbol | in code | meaning |
# |---|---|---|
# | $B$ | `batch` | items (sequences) in one optimizer step |
# | $m$ | `num_micro_batches` | parts the batch is cut into |
# | $n_i$ | `len(part)` | items in part $i$; $\sum_i n_i = B$ |
# | $p$ | `dp` | ranks that share the batch |
# | $\ell_i$ | `loss` | mean loss of part $i$ |
# | $g$ | `param.grad` | gradient of the mean loss over all $B$ items |

# %%
import time

import torch
from torch import nn
from torch.nn import functional as F

from course_lib.accumulation import split_micro_batches
from course_lib.checks import check
from course_lib.core.specs import ModelSpec
from course_lib.display import YES_NO, Voices, compare, explore, memory, predict, reveal, show
from course_lib.models import GPT, IGNORED, next_tokens, padded_batch, token_batch, token_loss

torch.set_num_threads(1)  # quiet measurements

# %% [markdown]
# ## 1 The arithmetic of a batch
#
# Language models are trained on batches of 4 to 60 million tokens. Take 4 Mi tokens
# ($4\cdot2^{20}$) in sequences of 4 Ki ($4\cdot2^{10}$); 2 sequences fit on a rank, and 128 ranks
# share the work. How many micro-batches does each rank run before the optimizer steps?

# %% tags=["predict"]
guess = predict("micro-batches on each of 128 ranks")

# %%
sequences = 4 * 2**20 // (4 * 2**10)
at_once = 2 * 128
reveal(guess, sequences // at_once)
print(f"{sequences} sequences a step, {at_once} at once")

# %% [markdown]
# The law behind it: `global_batch = micro_batch * num_micro_batches * dp`.
#
# ### Exercise 1: the quiz
#
# The same for any numbers, an int; and what about 512 ranks? What does not come out even has to be
# a `ValueError`: rounding would change the batch without a word. About 3 lines.


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
# **`global_batch = micro_batch * num_micro_batches * dp`: more ranks, fewer micro-batches.**
#
# ## 2 What backward does with the old gradient
#
# One neuron, three weights, two items: $y = x_1 w_1 + x_2 w_2 + b$, loss $= (y - \text{target})^2$.

# %%
w1, w2, b = (torch.tensor(value, requires_grad=True) for value in (0.773, 0.321, 0.067))


def item_loss(x1, x2, target):
    y_pred = x1 * w1 + x2 * w2 + b
    return (y_pred - target) ** 2


item_loss(6, 2, target=15).backward()
print(f"after item 1: gradient of w1 {w1.grad:.3f}")

# %% [markdown]
# Item 2 is $x = (5, 2)$ with target 12; on its own its gradient for $w_1$ is about $-74$. You call
# `backward` on it and do nothing else. What is in `w1.grad`?

# %% tags=["predict"]
guess = predict("w1.grad after the second backward")

# %%
item_loss(5, 2, target=12).backward()
reveal(guess, w1.grad.item())

# %% [markdown]
# `backward` **adds** to what is there. That is why loops begin with `zero_grad`, and it is all that
# accumulation needs. Move through both ways of training on these two items, and watch $w_1$.

# %% tags=["picture"]
from course_lib.accumulation.pictures import graph, graph_words
from course_lib.accumulation.worked_graph import moments

ways = {"add up, then step": moments(items_per_step=2), "step at once": moments()}


def at(way, moment):
    return ways[way][min(moment, len(ways[way]) - 1)]


def draw(way, moment):
    return graph(at(way, moment), f"{way}: {at(way, moment).words}")


explore(draw, lambda **where: graph_words(at(**where)), way=list(ways), moment=(0, 6, 4))

# %% tags=["check"]
for way, seen in ways.items():
    print(f"{way:18} item 2 sees", *(f"{seen[-2].values[name]:.4f}" for name in ("w1", "w2", "b")))
    print(f"{way:18} ends with ", *(f"{seen[-1].values[name]:.4f}" for name in ("w1", "w2", "b")))

# %% [markdown]
# Stepping at once, item 2 meets *other weights*: two small steps are not one big one.
#
# **Autograd sums. Whoever wants a mean has to divide.**
#
# ## 3 The sum is not the mean
#
# Now a batch of 8 in 4 micro-batches, with a loss that is a mean, as usual. We call `backward` on
# each micro-batch's loss as it is. How many times too large is the gradient?

# %% tags=["predict"]
guess = predict("accumulated gradient, as a multiple of the full batch's")


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
print(f"every number is {ratios.min():.6f} to {ratios.max():.6f} times that of the full batch")

# %% [markdown]
# The gradient of $\frac1m\sum_i \ell_i$ is what we want, so each loss is divided by $m$.
#
# **Break it.** Leave the division out and train, once with SGD and once with AdamW. In the code,
# `share` is the factor on each part's loss: `by_items` is its share of the items, here 1/8, and
# `as_sum` is 1. Will both losses show that something is wrong?

# %% tags=["predict"]
guess = predict("does AdamW's loss show that the division is missing?", choices=YES_NO)


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


# %% tags=["picture"]
def finite(curve):
    return [min(loss, 8.0) if loss == loss else 8.0 for loss in curve]


curves = {
    "SGD": losses(torch.optim.SGD, 1.0, by_items),
    "SGD, not divided": finite(losses(torch.optim.SGD, 1.0, as_sum)),
    "AdamW": losses(torch.optim.AdamW, 1e-2, by_items),
    "AdamW, not divided": losses(torch.optim.AdamW, 1e-2, as_sum),
}
gap = max(abs(a - b) for a, b in zip(curves["AdamW"], curves["AdamW, not divided"], strict=True))
title = f"SGD breaks without the division; AdamW's loss never differs by more than {gap:.2g}"
voices = {name: Voices(measurement=curve) for name, curve in curves.items()}
figure = compare(range(40), voices, title, x_label="step", y_label="loss", note="8: not a number")
show(figure, alt=f"{title}: the two AdamW curves lie on one another")
reveal(guess, "no")

# %% [markdown]
# Adam divides by the size of the gradient, so a constant factor disappears, and with it the
# symptom. Until you clip gradients, log their norm, or change $m$. A falling loss proves nothing.
#
# ### Exercise 2: the whole step
#
# Gradients as from the full batch (a nan, too), one step, and never more than one micro-batch in
# memory: the model sees each of them once, in the mode in which you get it. Return the mean loss of
# the whole batch, detached, with the losses' digits. $m$ divides the batch here;
# `split_micro_batches` cuts it, as above. About 7 lines, 10 minutes.
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
# ## 4 Parts that are not alike
#
# Seven items in parts of 3, 2 and 2. If every part's mean gets weight 1/3, how much does an item
# of the first part count, compared with one of the last?

# %% tags=["predict"]
guess = predict("weight of an item in the first part, relative to the last part (like 3/4)")

# %%
reveal(guess, (1 / 3 / 3) / (1 / 3 / 2))

# %% [markdown]
# A *mean of means*. The right weight of part $i$ is its share of the items:
# $\frac{1}{B}\sum_i n_i \ell_i$.
#
# ### Exercise 3: uneven parts
#
# Add the gradient of the mean over *all* items to `param.grad`, one part in memory at a time.
# `loss_fn` is a mean over the items of its part. About 3 lines.


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
# With language it happens to everyone: sequences end early, padding has no loss (its target is
# -100), and `cross_entropy` takes the mean over the tokens that are left. *Equal* numbers of
# sequences are then *unequal* numbers of tokens. How far off is the mean of means here?

# %%
batch = padded_batch(0, batch=8, seq=16, vocab=32)
tokens = [int((part != IGNORED).sum()) for part in batch[1].chunk(8)]
print("tokens that count, by sequence:", tokens)

# %% tags=["predict"]
guess = predict("wrong gradient: its distance from the right one", unit="% of its length")

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
print(f"weighed by tokens: off by {(right - one).abs().max() / one.abs().max():.0e} of the largest")

# %% [markdown]
# The most used library for fine-tuning had this mistake until October 2024 (Hugging Face's post
# "Fixing Gradient Accumulation" tells the story). Losses fell all the same.
#
# ### Exercise 4: tokens that count
#
# As exercise 3, but the mean runs over the tokens whose target is not `IGNORED`. Return the loss,
# too, as in exercise 2. A part may hold no such token at all; `token_loss` is then 0/0: skip that
# part, the model too. A nan that the model itself makes has to show in the loss and the gradient.
# About 7 lines.


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
# **The weight of a part is its share of what the loss is a mean over.**
#
# ## 5 What it saves, and what it costs
#
# Why all this? A GPT with a batch of 16 sequences, in 1, 2, 4, 8 or 16 parts. Lesson 01 knows what
# activations need; `activation_ledger` weighs what autograd truly holds, at every moment. At the
# peak, what part of the full batch's bytes do 8 micro-batches need?

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
guess = predict("peak of 8 micro-batches, as a part of the full batch's (like 1/2)")


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

# %% tags=["picture"]
saw = held(4)
title = f"Four micro-batches: four hills of {saw.peak_bytes() / 2**20:.0f} MiB in place of one"
show(memory(saw, title), alt=title)

# %% [markdown]
# And the other way round: keep the micro-batch, and let the *batch* grow. The peak does not move:
# memory is constant in the number of micro-batches, and over time it is a saw. The FLOPs are the
# same for every $m$. Is the time?

# %% tags=["predict"]
guess = predict("time of 16 micro-batches, as a multiple of the full batch's")


# %% tags=["picture"]
def seconds(m):
    start_s = time.process_time()  # the CPU's seconds, whoever else is there
    run(m)
    return time.process_time() - start_s


times = [[seconds(m) for _ in range(6)][1:] for m in parts]
middle = [sorted(each)[2] for each in times]
reveal(guess, middle[-1] / middle[0])
title = f"The same FLOPs take {middle[-1] / middle[0]:.2f} times as long in 16 parts"
voices = Voices(formula=lambda m: middle[0], measurement=times)
labels = {"x_label": "micro-batches m", "y_label": "CPU time (s)", "note": "formula: FLOPs alone"}
show(compare(parts, voices, title, **labels), alt=f"{title} as in one")

# %% [markdown]
# Small matrices keep the cores less busy, and each micro-batch pays for starting every operation.
# On a GPU the effect is larger. So: the *largest* micro-batch that fits, then accumulate.
#
# **Memory belongs to the micro-batch, the gradient to the batch.**
#
# ## 6 What looks across the batch
#
# Is the gradient the same for every model? Batch norm uses the mean and variance of *what it sees*,
# and it sees a micro-batch. Two layers of dropout draw their masks in another order.


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
# Dropout's gradient has the same mean over many steps, so nobody minds. Batch norm's *law* changes
# with $m$; transformers use layer norm, where every token is on its own.
#
# ## 7 Clip what was accumulated
#
# Clipping shortens a gradient that is longer than `max_norm`. Two micro-batches, their losses
# divided already, have the gradients $(3, 0)$ and $(-3, 4)$; `max_norm` is 2. Clip each one, then
# add: how long is the result? And if you add first?

# %% tags=["predict"]
guess = predict("length, if each part is clipped by itself")


# %%
def clip(g, max_norm=2.0):
    return g * min(1.0, max_norm / g.norm())


first, second = torch.tensor([3.0, 0.0]), torch.tensor([-3.0, 4.0])
each, once = clip(first) + clip(second), clip(first + second)
reveal(guess, each.norm().item())
print("each by itself:", each.tolist(), " once:", once.tolist())

# %% [markdown]
# Another length *and another direction*.
#
# ### Exercise 5: clip once
#
# As exercise 2, with `torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)` in the one
# right place, and without the loss. About 6 lines.


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
# ## 8 The real thing
#
# PyTorch has no call for this: the loop is yours. Accelerate wraps it: `accumulate(model)` divides
# the loss and makes `step` and `zero_grad` wait for the last micro-batch. It is not part of the
# course's environment; where it is installed, the next cell compares.


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
# Note what a library cannot know: that your parts hold different numbers of tokens. The share of a
# part is yours to say.
#
# ## What to keep
#
# - `backward` adds; the mean needs a division, by each part's *share* of items or tokens.
# - Zero once, backward in the loop, clip once, step once.
# - The peak is that of one micro-batch, whatever the batch.
# - Adam hides a constant factor: compare gradients with the full batch, not losses.
#
# Next: `03_recompute` makes even one micro-batch smaller.
