# %% [markdown]
# # 03 Recompute: trade compute for memory, and precision
#
# Even one micro-batch may be too large. Two ways out: *forget* activations and compute them again
# in backward, or write every number with 16 bits in place of 32. Both are easy to get almost right.
# You **predict** bytes and seconds, **run**, and **compare**.
#
# | symbol | in code | meaning |
# |---|---|---|
# | $L$ | `num_layers` | blocks of the model |
# | $k$ | `k` | blocks in a segment that is recomputed together |
# | $i$ | `input_bytes` | bytes of what enters a block |
# | $A$ | `block_bytes` | bytes a block keeps for its backward |
# | $S$ | `scale` | factor on the loss |

# %%
import time

import torch
from torch import nn
from torch.nn import functional as F

from course_lib.checks import check
from course_lib.core import Ledger
from course_lib.core.specs import ModelSpec
from course_lib.display import YES_NO, Voices, compare, memory, predict, reveal, show
from course_lib.memory.saved_tensors import activation_ledger
from course_lib.models import GPT, next_tokens, token_batch, token_loss

torch.set_num_threads(1)  # quiet measurements

# %% [markdown]
# ## 1 Forget, and do it again
#
# A chain of 64 thin layers; each keeps one tensor for backward. Suppose we keep only what *enters*
# each piece of the chain, and run the piece again when backward gets there. This is all of it:


# %%
class Forgets(torch.autograd.Function):
    @staticmethod
    def forward(ctx, fn, x):  # autograd records nothing in here
        ctx.fn = fn
        ctx.save_for_backward(x)
        return fn(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.fn(x)  # again, and this time recorded
        torch.autograd.backward(y, grad)  # parameters get theirs on the way
        return None, x.grad


# %% [markdown]
# Does `Forgets.apply(layer, x)` give the gradients of `layer(x)` for *every* layer?

# %% tags=["predict"]
guess = predict("the same gradients for a linear layer and for dropout?", choices=YES_NO)


# %% tags=["failure"]
def gradient_of_x(layer, run):
    torch.manual_seed(0)
    x = torch.ones(8, requires_grad=True)
    y = run(layer, x)
    y.sum().backward()
    return y.tolist(), x.grad.tolist()


linear, drop = nn.Linear(8, 8), nn.Dropout(0.5)
same = gradient_of_x(linear, nn.Linear.forward) == gradient_of_x(linear, Forgets.apply)
print("linear: the same gradient:", same)
print("dropout, output and gradient:", *gradient_of_x(drop, Forgets.apply), sep="\n")
reveal(guess, "no")

# %% [markdown]
# Dropout drew *another mask* the second time: numbers that were dropped get a gradient. Nothing
# fails, training just gets worse. The random state belongs to the inputs of a function.
#
# ### Exercise 1: backward, done right
#
# Write `backward` again, as a function. `random_state` is what `torch.get_rng_state()` gave before
# the first run; `torch.set_rng_state` restores it. The random numbers *after* backward have to go
# on as if nothing had happened: the end of `with torch.random.fork_rng():` puts the state back as
# it was. Autograd is off when `redo` is called. Run `fn` once, in the training or eval mode that it
# is in, and leave nothing in memory but gradients. About 6 lines, 10 minutes.


# %% tags=["exercise"] exercise="recompute-1"
def redo(fn, x, random_state, grad):
    """Run fn(x) again, go back through it from grad; return the gradient of x."""
    ### BEGIN SOLUTION: restore the random state, run, go back
    x = x.detach().requires_grad_()
    with torch.random.fork_rng(), torch.enable_grad():
        torch.set_rng_state(random_state)
        y = fn(x)
    torch.autograd.backward(y, grad)
    return x.grad
    ### END SOLUTION


# %% tags=["check"] exercise="recompute-1"
check("recompute-1", redo)

# %% [markdown]
# From here on we use the course's `recompute(fn, *args)`: the same idea for any arguments, several
# outputs, and autocast (section 5). PyTorch's own is `torch.utils.checkpoint` ("activation
# checkpointing"). Do all agree to the last bit?

# %% tags=["check"]
from torch.utils.checkpoint import checkpoint

from course_lib.recompute import recompute


def gradients(wrap):
    torch.manual_seed(0)
    layer, x = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.GELU()), torch.ones(4, 8)
    wrap(layer, x).square().sum().backward()
    return torch.cat([param.grad.flatten() for param in layer.parameters()])


plain, ours = gradients(lambda fn, x: fn(x)), gradients(recompute)
theirs = gradients(lambda fn, x: checkpoint(fn, x, use_reentrant=False))
print("recompute:", torch.equal(ours, plain))
print("torch.utils.checkpoint:", torch.equal(theirs, plain))

# %% [markdown]
# **Keep the inputs and the random state; everything else can be had again.**
#
# ## 2 The root of L
#
# With one segment of all 64 layers, forward keeps 1 tensor, and backward needs 64 at once: nothing
# won. With 64 segments of one layer forward keeps 64: nothing won either. In between, the peak is
# $\lceil L/k\rceil + k$ tensors: the inputs of all segments, and the one that is redone. How low
# can it get?

# %% tags=["predict"]
guess = predict("lowest peak of 64 thin layers", unit="tensors")


# %%
def peak_of(L, k, i=1, A=1):
    return -(-L // k) * i + k * A


reveal(guess, min(peak_of(64, k) for k in range(1, 65)))

# %%
chain = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(64)]
x = torch.ones(256, 64)
there = [param for layer in chain for param in layer.parameters()]


def run_all(layers, x):
    for layer in layers:
        x = layer(x)
    return x


def in_segments(k):
    y = x
    for start in range(0, 64, k):
        y = recompute(run_all, chain[start : start + k], y)
    y.sum().backward()


# %% tags=["picture"]
ks = [1, 2, 4, 8, 16, 32, 64]
measured = [activation_ledger(lambda k=k: in_segments(k), given=there).peak_bytes() for k in ks]
tensors = [num_bytes / x.nbytes for num_bytes in measured]
voices = Voices(formula=[peak_of(64, k) for k in ks], measurement=tensors)
best = ks[tensors.index(min(tensors))]
title = f"Segments of {best} need {min(tensors):.0f} tensors in place of 64"
labels = {"x_label": "layers in a segment, k", "y_label": "peak (tensors)", "log": True}
show(compare(ks, voices, title, **labels), alt=f"{title}: the valley lies at the root of 64")

# %% [markdown]
# ### Exercise 2: the best segment
#
# A real block keeps more than its input: $A > i$. Which $k$ has the lowest peak
# $\lceil L/k\rceil\, i + k A$? Try them all. About 4 lines.


# %% tags=["exercise"] exercise="recompute-2"
def best_segment(num_layers, input_bytes, block_bytes):
    """The number of blocks a segment for which the peak is lowest (the smallest such number)."""
    ### BEGIN SOLUTION: the peak of each k
    ks = range(1, num_layers + 1)
    peaks = [-(-num_layers // k) * input_bytes + k * block_bytes for k in ks]
    return ks[peaks.index(min(peaks))]
    ### END SOLUTION


# %% tags=["check"] exercise="recompute-2"
check("recompute-2", best_segment)

# %% [markdown]
# A transformer's block keeps $34/2 = 17$ times its input (lesson 01). Up to 34 layers the best
# segment is *one* block. That is what "full recompute" does, and why hardly anybody uses the root.
#
# ### Exercise 3: every k-th input
#
# Now for any number of blocks, where the last segment may be shorter: run `blocks` on x and keep
# the input of every k-th block only. `recompute(fn, *args)` takes any arguments, lists of blocks
# too. Can you do it without looking above? About 3 lines.
#
# <details><summary>Hint: backward runs the wrong blocks</summary>
# A lambda looks up its names when it runs, and yours runs in backward, after the loop has ended.
# </details>


# %% tags=["exercise"] exercise="recompute-3"
def run_segments(blocks, k, x):
    """Run all blocks on x, recomputing segments of k."""
    ### BEGIN SOLUTION: one recompute for each k blocks
    for start in range(0, len(blocks), k):
        x = recompute(run_all, blocks[start : start + k], x)
    ### END SOLUTION
    return x


# %% tags=["check"] exercise="recompute-3"
check("recompute-3", run_segments)

# %% [markdown]
# **Thin layers: segments of $\sqrt L$. Thick blocks: each by itself.**
#
# ## 3 A GPT: peak and time
#
# Attention written out, with dropout: the scores are large to keep and cheap to redo. *Selective*
# recompute forgets only them; *full* forgets all but the input of each block. Full recompute runs
# forward twice, and backward costs two forwards. How much longer does a step take?

# %% tags=["predict"]
guess = predict("time of a step with full recompute, as a multiple of one without (like 3/2)")

# %%
from course_lib import recompute as strategies
from course_lib.cost.flops import train_step_flop
from course_lib.memory.layer_bytes import TORCH_CPU, Pass, total

spec = ModelSpec(hidden=128, num_layers=6, num_heads=8, ffn_hidden=512, vocab=128, max_seq=128)
torch.manual_seed(0)
gpt = GPT(spec, flash=False, dropout=0.1)
batch = next_tokens(token_batch(0, batch=4, seq=128, vocab=128))
choose = {
    "none": strategies.recompute_none,
    "selective": strategies.recompute_selective,
    "full": strategies.recompute_full,
}


def step():
    token_loss(gpt(batch[0]), batch[1]).backward()


# %% [markdown]
# First the formula, from the rows of lesson 01: what all layers keep, and what comes back while the
# last one is redone. The peak is that moment, or the end of forward. (The lines for *selective* are
# bookkeeping: which rows are there twice, which have gone. Skip them at first.)


# %%
one = Pass(
    spec=spec, batch=4, seq=128, number_bytes=4, flash=False, dropout=True, kernels=TORCH_CPU
)


def peak_bytes(how):
    rows, kept = one.layer(), total(one.kept_layer(how))
    again = total(rows) - kept
    if how == "selective":  # attention alone comes back, with q, k, v twice; what follows has gone
        again += total(rows[3:5]) - total(rows[8:])
    return kept * spec.num_layers + total(one.embedding()) + max(total(one.head()), again)


def measure(how):
    choose[how](gpt)
    return activation_ledger(step, given=[*gpt.parameters(), *batch])


# %% tags=["picture"]
def bar(num_bytes):
    ledger = Ledger()
    ledger.add(0.0, activations=num_bytes)
    return ledger


held = {how: measure(how) for how in choose}
bars = {}
for how, ledger in held.items():
    bars[f"{how}: formula"] = bar(peak_bytes(how))
    bars[f"{how}: measured"] = bar(ledger.peak_bytes())
saved = held["none"].peak_bytes() / held["full"].peak_bytes()
title = f"Full recompute holds {saved:.1f} times less than none, as the formula says"
show(memory(bars, title), alt=title)

# %% tags=["check"]
for how in choose:
    print(f"{how:9} formula minus measurement: {peak_bytes(how) - held[how].peak_bytes()} bytes")

# %% [markdown]
# Over time one sees what happens: full recompute climbs by a block input at a time, and in backward
# every block is a short spike.

# %% tags=["picture"]
title = f"Full recompute: steps up, then {spec.num_layers} spikes in backward"
show(memory(held["full"], title), alt=f"{title}; peak {held['full'].peak_bytes() / 2**20:.1f} MiB")

# %% [markdown]
# And the price. On paper it is counted in FLOPs; here it is measured, on the same axes.


# %%
def seconds(how):
    choose[how](gpt)
    start_s = time.process_time()  # the CPU's seconds, whoever else is there
    step()
    return time.process_time() - start_s


rounds = [{how: seconds(how) for how in choose} for _ in range(10)]
fastest = {how: min(times[how] for times in rounds) for how in choose}
ratio = {how: fastest[how] / fastest["none"] for how in choose}
reveal(guess, ratio["full"])

# %% tags=["picture"]
flop = [train_step_flop(spec, 4, 128, recompute=how) for how in choose]
more_flop = [each / flop[0] for each in flop]
title = f"Full recompute: {more_flop[-1]:.2f} times the FLOPs, {ratio['full']:.2f} times the time"
voices = Voices(formula=lambda flop: flop, measurement=list(ratio.values()))
labels = {"x_label": "FLOPs, as a multiple of none", "y_label": "time, as a multiple of none"}
note = "from left to right: none, selective, full; the fastest of 10 steps"
show(compare(more_flop, voices, title, note=note, **labels), alt=f"{title}; selective lies between")

# %% [markdown]
# Where dots lie above the line, time goes into what FLOPs do not count: softmax and dropout are
# next to nothing on paper, but they move the largest tensors of all. (Fused attention does the same
# trick inside its kernel.)
#
# Every choice leaves the numbers alone, dropout included:


# %% tags=["check"]
def gradient(how):
    choose[how](gpt)
    gpt.zero_grad()
    torch.manual_seed(0)
    step()
    return torch.cat([param.grad.flatten() for param in gpt.parameters()])


print("same bits as none:", [torch.equal(gradient("none"), gradient(how)) for how in choose])

# %% [markdown]
# **Full recompute: one more forward, at most 4/3 of the FLOPs, and one tensor a block.**
#
# ## 4 Sixteen bits
#
# The other way to save: smaller numbers. 16 bits have to be shared between digits and range: bf16
# keeps the range of fp32 and gives up digits, fp16 keeps more digits and gives up range.

# %%
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    info = torch.finfo(dtype)
    smallest = info.smallest_normal * info.eps
    print(f"{dtype!s:15} largest {info.max:.3g}, smallest {smallest:.3g}, after 1: {1 + info.eps}")

# %% [markdown]
# A bf16 weight of 1 takes 100 steps of -0.001. Where does it end?

# %% tags=["predict"]
guess = predict("the bf16 weight after 100 steps of -0.001")


# %% tags=["failure"]
def hundred_steps(dtype):
    weight = torch.ones((), dtype=dtype)
    for _ in range(100):
        weight -= 0.001
    return weight.item()


print("in fp32:", round(hundred_steps(torch.float32), 4))
reveal(guess, hundred_steps(torch.bfloat16))

# %% [markdown]
# Every step is less than half the way to the next bf16 number below 1, so it is rounded away. The
# cure: **master weights**. The model computes with 16-bit copies; an fp32 master takes the steps.
#
# fp16 has a second trouble. Its smallest number is about $6\cdot10^{-8}$, and many gradients are
# smaller. Multiply the *loss* by a scale $S$, and every gradient is $S$ times larger:


# %% tags=["check"]
def fp16_gradient(scale):
    weight = torch.ones((), dtype=torch.float16, requires_grad=True)
    (weight * 2.0**-13).float().mul(2.0**-13 * scale).backward()
    return weight.grad.item() / scale


print(f"the true gradient is {2.0**-26:.3g}")
for scale in (1.0, 2.0**16, 2.0**44):
    print(f"with a scale of {scale:.3g} it comes out as {fp16_gradient(scale):.3g}")

# %% [markdown]
# Too little vanishes, too much overflows. Whatever comes back has to be divided by $S$ before
# anybody looks at it, and clipping looks at it.
#
# ### Exercise 4: a step in mixed precision
#
# `param` is fp16; `param.grad` is the gradient of a loss times `scale`. `optimizer` steps `master`,
# its fp32 copy, by `master.grad`, which is yours to set. Unscale, leave the step out if anything is
# not finite, clip `master.grad` as in lesson 02, step, copy `master` back into `param` (in place,
# under `torch.no_grad()`). About 9 lines.


# %% tags=["exercise"] exercise="recompute-4"
def half_step(param, master, optimizer, scale, max_norm):
    """Step the master with param's gradient; param follows. Return True if it stepped."""
    ### BEGIN SOLUTION: in fp32: unscale, look, clip, step, round into param
    master.grad = param.grad.float() / scale
    if not master.grad.isfinite().all():
        return False
    nn.utils.clip_grad_norm_([master], max_norm)
    optimizer.step()
    with torch.no_grad():
        param.copy_(master)
    return True
    ### END SOLUTION


# %% tags=["check"] exercise="recompute-4"
check("recompute-4", half_step)

# %% [markdown]
# ### Exercise 5: which scale?
#
# As large as possible, and found while training: an overflow halves it, 3 good steps *in a row*
# double it (in practice 2,000), and after either the count begins anew. `num_good` is how many
# there were before this step. Return both, scale first. About 4 lines.


# %% tags=["exercise"] exercise="recompute-5"
def next_scale(scale, num_good, finite):
    """The scale and the number of good steps in a row, after a step that was finite or not."""
    ### BEGIN SOLUTION: what does an overflow do to both? and the third good step?
    if not finite:
        return scale / 2, 0
    if num_good + 1 == 3:
        return scale * 2, 0
    return scale, num_good + 1
    ### END SOLUTION


# %% tags=["check"] exercise="recompute-5"
check("recompute-5", next_scale)

# %% [markdown]
# ## 5 The real thing: autocast and GradScaler
#
# PyTorch does it the other way round: parameters stay fp32, `torch.autocast` casts them on the way
# into each matrix product, and `GradScaler` minds the scale. Our `MixedPrecisionOptimizer` keeps a
# 16-bit model and fp32 masters. Train both in fp16, with an overflow in the third step:

# %%
from functools import partial

from course_lib.recompute import LossScale, MixedPrecisionOptimizer

adamw = partial(torch.optim.AdamW, lr=1e-2)
data = [(torch.randn(8, 6).half().float(), torch.randn(8, 3)) for _ in range(6)]
factors = [1.0, 1.0, 1e6, 1.0, 1.0, 1.0]


def mlp():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    return model.half().float()  # start from weights that fp16 has


# %%
def by_hand():
    model, scale = mlp().half(), LossScale(scale=2.0**8, interval=2)
    optimizer = MixedPrecisionOptimizer(model.parameters(), adamw, loss_scale=scale)
    for (x, y), factor in zip(data, factors, strict=True):
        loss = F.mse_loss(model(x.half()).float(), y) * factor
        optimizer.scale(loss).backward()
        optimizer.step(max_norm=0.3)
        optimizer.zero_grad()
        yield scale.scale, optimizer.masters


# %%
def with_torch():
    model = mlp()
    optimizer, scaler = adamw(model.parameters()), torch.amp.GradScaler("cpu", 256.0, 2.0, 0.5, 2)
    for (x, y), factor in zip(data, factors, strict=True):
        with torch.autocast("cpu", dtype=torch.float16):
            output = model(x)
        scaler.scale(F.mse_loss(output.float(), y) * factor).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        yield scaler.get_scale(), model.parameters()


# %% tags=["check"]
for ours, theirs in zip(by_hand(), with_torch(), strict=True):
    equal = all(torch.equal(a, b) for a, b in zip(ours[1], theirs[1], strict=True))
    print(f"scale {ours[0]:g}, GradScaler's {theirs[0]:g}; same bits: {equal}")

# %% [markdown]
# Bit for bit. Where they differ is memory: autocast keeps the cast copies *and* whatever it did in
# fp32. How many times the bytes of a bf16 model does an fp32 model under autocast hold for
# backward?

# %% tags=["predict"]
guess = predict("activations under autocast, as a multiple of those of a bf16 model")


# %%
def held_by(dtype, autocast):
    model = GPT(spec).to(dtype)

    def forward_backward():
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = token_loss(model(batch[0]), batch[1])
        loss.backward()

    return activation_ledger(forward_backward, given=[*model.parameters(), *batch])


# %% tags=["picture"]
fp32, bf16 = torch.float32, torch.bfloat16
kinds = {
    "fp32": held_by(fp32, False),
    "autocast": held_by(fp32, True),
    "bf16": held_by(bf16, False),
}
more = kinds["autocast"].peak_bytes() / kinds["bf16"].peak_bytes()
reveal(guess, more)
title = f"bf16 halves the activations; under autocast they are {more:.2f} times those of bf16"
show(memory(kinds, title), alt=title)

# %% [markdown]
# ## What to keep
#
# - Keep inputs and random state, redo the rest: the same bits for one more forward.
# - Recompute what is large to keep and cheap to redo: the scores first.
# - Thin layers: segments of $\sqrt L$. Transformer blocks: one by one.
# - Small steps need fp32 masters; small fp16 gradients need a loss scale; unscale before you clip.
#
# Next: `04_collectives`. One device has given all it can.
