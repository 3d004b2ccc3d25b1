# %% [markdown]
# # 03 Recompute and low precision: save memory
#
# **Question.** Even one micro-batch may not fit into memory. Which intermediate results can a
# training step drop and *recompute* in backward, and at what price? And what is lost if a number
# has only 16, 8 or 4 bits?
#
# After lesson 02, the activations of a single micro-batch are the smallest unit that we cannot
# split further. This lesson reduces them in two ways that you can combine. Sections 1 to 3 keep
# fewer tensors and compute the others again. Sections 4 to 6 store and multiply numbers with fewer
# bits.
#
# *After this lesson you can*
#
# - write the backward of a recomputed function, with dropout and all parameters;
# - choose what to recompute, and predict the bytes that it saves and the time that it costs;
# - say what bf16, fp16, FP8 and MX formats lose;
# - write a step with master weights and loss scaling, and round blocks of numbers with a scale;
# - say what `torch.utils.checkpoint`, `torch.autocast` and `GradScaler` do for you.
#
# **Prerequisites:** lessons 01 (what a layer keeps) and 02 (clipping). **Time:** about 50 minutes
# of reading and running, and 55 minutes for six exercises. A break fits before section 4.
#
# | symbol | in code | meaning |
# |---|---|---|
# | $L$ | `num_layers` | blocks (layers) of the model |
# | $k$ | `k` | blocks in a segment that is recomputed as a whole |
# | $i$ | `input_bytes` | bytes of a block's input |
# | $A$ | `block_bytes` | bytes that a block keeps for its backward |
# | $S$ | `scale` | loss scale: the factor by which the loss is multiplied |
# | $X$ | `scales` | scale of several numbers: each is its stored element times $X$ |

# %%
import time

import torch
from torch import nn
from torch.nn import functional as F

from course_lib.checks import check
from course_lib.core import MODELS, ModelSpec
from course_lib.display import YES_NO, claim, predict, reveal, show
from course_lib.memory.saved_tensors import activation_ledger
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from course_lib.recompute import pictures

torch.set_num_threads(1)  # steadier measurements

# %% [markdown]
# ## 1 Forget, and compute again
#
# During forward, autograd keeps the intermediate results that backward will need. Between forward
# and backward they only occupy memory. Since each of them was computed from the input of its
# function, we could keep only this *input*, and run the function a second time when backward
# arrives:


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
        torch.autograd.backward(y, grad)  # the parameters get their gradients, too
        return None, x.grad


# %% [markdown]
# This costs one more forward of the function. It should not change the result, because the second
# run computes the same intermediate results as the first one. Does `Forgets.apply(layer, x)` give
# the same gradients as `layer(x)` for *every* layer?

# %% tags=["predict"]
guess = predict("the same gradients for a linear layer and for dropout?", choices=YES_NO)
### GUESS guess.commit("yes")


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
# In the second run, dropout drew *another mask*. So backward went through a mask that forward had
# not used: some elements that were dropped in forward get a gradient. No error is raised; the
# gradient is simply wrong. The output of a function with dropout depends on its inputs and on the
# state of the random number generator, so we have to save this state together with the inputs.
#
# ### Exercise 1 (core): backward, done right
# *Difficulty 3 of 5, importance 5 of 5, about 10 minutes and 6 lines.*
#
# Write the backward of `Forgets` as a function that returns the gradient of `x`; for `fn(x)` $=
# x^2$ at $x=3$ and `grad` = 1, it is 6. The parameters of `fn` get their gradients, too.
# `torch.set_rng_state` restores `random_state`, the state before the first run. Afterwards, the
# random numbers have to continue as if nothing had happened: `torch.random.fork_rng()` restores the
# state when its `with` block ends. Autograd is off when `redo` is called; run `fn` with autograd
# on. Every recompute method needs this function.


# %% tags=["exercise"] exercise="recompute-1"
def redo(fn, x, random_state, grad):
    """Run fn(x) again, backward from grad (the gradient of its output); return that of x."""
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
# From here on we use the course's `recompute(fn, *args)`, which takes any arguments. PyTorch's
# version is `torch.utils.checkpoint`, and many papers call the method *activation checkpointing*.
# If the second run repeats exactly the same operations, the gradients should agree with those of a
# run without recompute not only approximately, but to the last bit. Do they, for both versions?

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
# **Keep the inputs and the random state. Everything else can be computed again if forward depends
# on no other state, and changes none.** (Two counterexamples: autocast, which section 5 uses, is a
# state that the second run needs, too; batch norm updates its running statistics, and would do so
# twice.)
#
# ## 2 How long should a segment be?
#
# We can now recompute any function: a single layer, or a *segment* of several layers that is
# recomputed as a whole. Which length of a segment saves the most memory?
#
# Take a chain of $L=64$ thin layers, each of which keeps one tensor for backward. If the whole
# chain is one segment, forward keeps only 1 tensor, but backward first recomputes the whole chain
# and then needs all 64 tensors at once. If each layer is a segment, forward keeps 64 inputs.
# Neither saves anything.
#
# In between, there are $\lceil L/k\rceil$ segments of $k$ layers. During backward, the inputs of
# all segments are in memory, and in addition the $k$ tensors of the one segment that is being
# recomputed. So the peak is at most $\lceil L/k\rceil + k$ tensors (exactly that if $k$ divides
# $L$). How low can it get?

# %% tags=["predict"]
guess = predict("lowest peak of 64 thin layers", unit="tensors")
### GUESS guess.commit(8)


# %%
def peak_of(L, k, i=1, A=1):
    return -(-L // k) * i + k * A


reveal(guess, min(peak_of(64, k) for k in range(1, 65)))
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
peaks = {k: activation_ledger(lambda k=k: in_segments(k), given=there).peak_bytes() for k in ks}
tensors = {k: num_bytes / x.nbytes for k, num_bytes in peaks.items()}
show(*pictures.segment_peaks(64, {k: peak_of(64, k) for k in ks}, tensors))

# %% [markdown]
# The number of inputs falls with $k$, the length of the recomputed segment grows with it. The sum
# $L/k + k$ is lowest where its derivative, $-L/k^2+1$, is 0. So the best $k$ is $\sqrt L$ here
# (Chen et al. 2016): one more forward lowers the peak from $L$ to $2\sqrt L$ tensors.
#
# ### Exercise 2 (further): the best segment
# *Difficulty 1 of 5, importance 3 of 5, about 5 minutes and 4 lines.*
#
# A real block keeps more than its input: $A > i$. Which $k$ from 1 to $L$ minimizes the peak
# $\lceil L/k\rceil\, i + k A$? For 100 blocks with $A = 4i$, the best $k$ is 5: its peak is
# $40\,i$. If several $k$ have the lowest peak, return the smallest one. With this function you can
# choose Megatron-LM's `--recompute-num-layers` for a model.


# %% tags=["exercise"] exercise="recompute-2"
def best_segment(num_layers, input_bytes, block_bytes):
    """Return the blocks per segment with the lowest peak (the smallest, if there are several)."""
    ### BEGIN SOLUTION: the peak of each k
    ks = range(1, num_layers + 1)
    peaks = [-(-num_layers // k) * input_bytes + k * block_bytes for k in ks]
    return ks[peaks.index(min(peaks))]
    ### END SOLUTION


# %% tags=["check"] exercise="recompute-2"
check("recompute-2", best_segment)

# %% [markdown]
# What is the best segment of a real model? That depends on how much a transformer block keeps. With
# fused attention, a GPT block with dropout keeps 34 bytes for every 2 bytes of its bf16 input
# (lesson 01), so $A = 17\,i$. (This $A$ contains the input, so the formula counts one $i$ twice.)
# The next cell computes the best $k$ of four models.

# %%
from course_lib.memory.layer_bytes import TORCH_CPU, Pass, total

for name in ("gpt2", "megatron-175b", "llama-70b", "llama-405b"):
    model = MODELS[name]
    block = Pass(spec=model, batch=1, seq=1024, dropout=not model.gated)
    A, L = total(block.layer()) / total(block.layer_input()), model.num_layers
    peaks = {k: peak_of(L, k, A=A) for k in range(1, L + 1)}
    best = min(peaks, key=peaks.get)
    print(f"{name:13} L = {L:<3} A = {A:<5.4g} i: {peaks[1]:5.1f} i with k = 1", end="; ")
    print(f"the lowest is {peaks[best]:5.1f} i, with k = {best}")
print("A = 17 i, L = 80, k = 1, 2, 3:", *(f"{peak_of(80, k, A=17)} i" for k in (1, 2, 3)))
thin = max(L for L in range(2, 81) if peak_of(L, 1, A=17) <= peak_of(L, 2, A=17))
print(f"A = 17 i: by the formula, k = 1 is best up to L = {thin}")

# %% [markdown]
# With $A$ and $i$, the function to minimize is $L\,i/k + kA$ (without rounding up). Its derivative,
# $-L\,i/k^2 + A$, is 0 for $k = \sqrt{L\,i/A}$. Narayanan et al. (2021, section 3.5) derive the
# same, and find that 1 or 2 layers are best in most cases. The larger $A$ is, the more a long
# segment costs while it is recomputed, and the smaller is the best $k$.
#
# For $A = 17\,i$, the best $k$ is 1 up to about $L = 35$. For the three deeper models above,
# segments of 2 or 3 blocks lower the peak by a fifth to a third. They cost no more FLOPs than
# $k=1$, because every block still runs forward twice. From here on, *full recompute* means $k = 1$
# (as in Korthikanti et al. 2022, section 5).
#
# ### Exercise 3 (further): every k-th input
# *Difficulty 2 of 5, importance 4 of 5, about 5 minutes and 3 lines.*
#
# Run `blocks` on `x`, and keep only the input of each segment of `k` blocks. The last segment may
# be shorter: 5 blocks with `k = 2` are segments of 2, 2 and 1. `run_all` above runs a list of
# blocks, and `recompute` takes lists as arguments, too. This is Megatron-LM's `--recompute-method
# uniform`.
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
# **The segment with the lowest peak has about $\sqrt{L\,i/A}$ blocks: 8 of 64 thin layers, but
# often only 1 to 3 transformer blocks.**
#
# ## 3 A GPT: peak and time
#
# Section 2 recomputed whole blocks. But a block consists of operations that differ very much in
# what they keep and in what they cost, so perhaps we can recompute only some of them.
#
# If attention is computed operation by operation, its scores, their softmax and their dropout have
# one number for each pair of tokens. They are large to keep, but cheap to recompute compared with
# the block's large matrix products. *Selective* recompute drops only these. *Full* recompute drops
# everything but the input of each block, and so runs every block forward twice.
#
# For each matrix product of forward, backward computes two products of the same size: one gives the
# gradient of the input, and one the gradient of the weight. So backward costs about as much as two
# forwards. How long does a step with full recompute take?

# %% tags=["predict"]
guess = predict("time of a step with full recompute, as a multiple of one without (like 3/2)")
### GUESS guess.commit("3/2")

# %%
from course_lib import recompute as strategies
from course_lib.cost.flops import train_step_flop
from course_lib.recompute.peak import predicted_peak_bytes

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
# First the memory. The formula adds up the tensors that a layer saves (lesson 01). With recompute,
# there are two candidates for the peak: the end of forward, when all inputs are there, and the time
# when backward has recomputed the model's last layer. The peak is the larger of these two sums.


# %% tags=["picture"]
def measure(how):
    choose[how](gpt)
    return activation_ledger(step, given=[*gpt.parameters(), *batch])


one = Pass(
    spec=spec, batch=4, seq=128, number_bytes=4, flash=False, dropout=True, kernels=TORCH_CPU
)
held = {how: measure(how) for how in choose}
predicted = {how: predicted_peak_bytes(one, how) for how in choose}
show(*pictures.strategies(predicted, held))
print("formula - measurement:", [predicted[how] - held[how].peak_bytes() for how in choose], "B")

# %% [markdown]
# Does selective recompute save as much in large models? The scores add $5as/h$ to the 34 bytes
# above, with $a$ heads, $s$ tokens and hidden size $h$ (lesson 01). At a fixed $s$, wider heads
# ($h/a$) make their share smaller, so selective recompute saves a smaller part. The next picture
# shows four large models on 8 tensor-parallel GPUs. The published values are calculated, too
# (Korthikanti et al. 2022):

# %% tags=["picture"]
show(*pictures.published_memory())

# %% [markdown]
# Now the price. What does each strategy cost in FLOPs and in time?


# %% tags=["measured"]
def seconds(how):
    choose[how](gpt)
    start_s = time.process_time()  # CPU seconds of this process alone
    step()
    return time.process_time() - start_s


rounds = [{how: seconds(how) for how in choose} for _ in range(10)]
fastest = {how: min(times[how] for times in rounds) for how in choose}
ratio = {how: fastest[how] / fastest["none"] for how in choose}
reveal(guess, ratio["full"])

# %% tags=["picture", "measured"]
flop = {how: train_step_flop(spec, 4, 128, recompute=how) for how in choose}
more_flop = {how: count / flop["none"] for how, count in flop.items()}
claim("selective recompute is cheaper than full", ratio["selective"] < ratio["full"])
claim("selective takes more time than its FLOPs say", ratio["selective"] > more_flop["selective"])
show(*pictures.price(more_flop, ratio))

# %% [markdown]
# If full recompute runs everything forward twice, a step costs $1 + 1 + 2 = 4$ forwards instead of
# $1 + 2 = 3$. So the FLOPs grow by a factor of at most 4/3. It is a little less, because layers
# outside the blocks, such as the output layer, are not recomputed.
#
# The time need not follow the FLOPs. Here and in a published layer of a 22B model (time +7 %),
# selective recompute takes more time than its FLOPs suggest. A likely reason, which we did not
# measure, is that softmax and dropout read and write very large tensors with few FLOPs. Full
# recompute of the published layer takes 39 % longer, not 33 %. The reason is that the backward of
# this layer takes less time than two forwards, because it communicates while it computes weight
# gradients. So one more forward adds more than a third (Korthikanti et al. 2022, section 6.2).
#
# FlashAttention (Dao et al. 2022, section 3.1) applies the same idea inside one kernel: it
# recomputes the scores in backward, and never writes them to the GPU's main memory. With
# FlashAttention, selective recompute is useful for other cheap operations, such as norms and
# activation functions (Megatron-LM: `--recompute-modules`).
#
# **Recompute first what is large to keep and cheap to compute. Full recompute of every block keeps
# one tensor per block and costs one more forward: at most 4/3 of the FLOPs.**
#
# ## 4 Sixteen bits
#
# Recompute reduces the number of tensors. The other way to save memory is to store each number in
# fewer bits. Which numbers can stand that?
#
# The bits of a floating-point number are shared between its exponent, which determines the *range*,
# and its mantissa, which determines the *precision*. bf16 has the exponent bits of fp32, hence its
# range, but less precision. fp16 has more precision than bf16, but less range. The next cell prints
# the largest and the smallest positive number of each format, and the next number after 1.
#
# A bf16 weight of 1 takes 100 steps of -0.001. What is its value in the end?

# %% tags=["predict"]
eight = torch.float8_e4m3fn, torch.float8_e5m2
for dtype in (torch.float32, torch.bfloat16, torch.float16, *eight):
    info = torch.finfo(dtype)
    smallest = info.smallest_normal * info.eps
    print(f"{dtype!s:19} largest {info.max:.3g}, smallest {smallest:.3g}, after 1: {1 + info.eps}")
guess = predict("the bf16 weight after 100 steps of -0.001")
### GUESS guess.commit(0.9)


# %% tags=["failure"]
def hundred_steps(dtype):
    weight = torch.ones((), dtype=dtype)
    for _ in range(100):
        weight -= 0.001
    return weight.item()


print("in fp32:", round(hundred_steps(torch.float32), 4))
reveal(guess, hundred_steps(torch.bfloat16))
scaled = torch.tensor([2.0**-26, 2.0**-26 * 2.0**16, 2.0**-26 * 2.0**44])
print("a gradient of 2**-26 in fp16, times 1, 2**16, 2**44:", scaled.half().tolist())

# %% [markdown]
# The next bf16 number below 1 is $1-2^{-8}\approx0.996$. A step of 0.001 is less than half of this
# distance, so the result is rounded back to 1. The same happens in each of the 100 steps. The usual
# solution is **master weights** (Micikevicius et al. 2018, section 3.1): the model computes with
# 16-bit copies, and the optimizer updates fp32 masters, in which small steps add up.
#
# The last printed line shows another problem, which concerns the range of fp16: small gradients
# underflow to 0. Backward is linear in the gradient that it starts from. So if we multiply the
# *loss* by a scale $S$, every gradient becomes $S$ times as large and can move into the range of
# fp16 (section 3.2 of the same paper). If $S$ is too large, gradients overflow to inf. Afterwards,
# divide the gradient by $S$ in fp32. Do this before you clip, because `max_norm` is meant for the
# true gradient. bf16 has the range of fp32 and usually needs no loss scale (Kalamkar et al. 2019).
#
# ### Exercise 4 (core): a step in mixed precision
# *Difficulty 3 of 5, importance 5 of 5, about 15 minutes and 9 lines.*
#
# `param` is fp16, and `param.grad` is the gradient of the loss times `scale`: with `scale = 1024`,
# a stored 2 means 1/512. `optimizer` updates `master`, the fp32 copy of `param`, from
# `master.grad`, which you have to set. Unscale in fp32. If any gradient is not finite, change no
# weight and return False. Otherwise clip `master.grad` to `max_norm` (lesson 02), step, copy
# `master` into `param` (in place, under `torch.no_grad()`), and return True. Training in fp16 takes
# this step.


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
# ### Exercise 5 (further): which scale?
# *Difficulty 1 of 5, importance 3 of 5, about 5 minutes and 4 lines.*
#
# The scale should be as large as possible without overflow, and gradients change during training.
# So an overflow halves the scale, and 3 good steps *in a row* double it (PyTorch's `GradScaler`
# waits for 2,000). After each change, the count of good steps restarts from 0. `num_good` is the
# count before this step. Return the new scale and the new count: after a third good step, `(1024,
# 2)` becomes `(2048, 0)`; after an overflow, it becomes `(512, 0)`.


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
# **If steps are small compared with the weights, keep fp32 masters. If gradients are small in fp16,
# scale the loss, and unscale before you clip.**
#
# ## 5 The real thing: autocast and GradScaler
#
# You have written the step for one parameter. Frameworks do it for a whole model, in one of two
# ways. Our `MixedPrecisionOptimizer` keeps a 16-bit model and fp32 masters, as Megatron-LM and
# DeepSpeed do. With PyTorch's `torch.autocast`, the parameters stay in fp32 and thus are their own
# masters; they are cast to 16 bits at the input of each matrix product. `GradScaler` adapts the
# scale. Do both ways compute the same? We train both in fp16, with an overflow in the third step:

# %%
from functools import partial

from course_lib.recompute import LossScale, MixedPrecisionOptimizer

adamw = partial(torch.optim.AdamW, lr=1e-2)
data = [(torch.randn(8, 6).half().float(), torch.randn(8, 3)) for _ in range(6)]
factors = [1.0, 1.0, 1e6, 1.0, 1.0, 1.0]


def mlp():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    return model.half().float()  # start from weights that fp16 can represent


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
# The weights agree bit for bit, but the memory differs. With autocast, backward needs the 16-bit
# inputs of the matrix products: copies of the activations *and of the weights*. In addition, some
# operations compute in fp32 and keep fp32 tensors (in our GPT, the loss's log-softmax and the
# inputs of the norms).
#
# So for backward, the fp32 GPT under autocast keeps more bytes than a bf16 GPT. How many times as
# many?

# %% tags=["predict"]
from course_lib.recompute.lab import FORMATS, activations_in, losses_behind, product_error, train

guess = predict("activations under autocast, as a multiple of those of a bf16 model")
### GUESS guess.commit(1)


# %% tags=["picture"]
kinds = {
    "fp32": activations_in(torch.float32, spec, batch),
    "autocast": activations_in(torch.float32, spec, batch, autocast=True),
    "bf16": activations_in(torch.bfloat16, spec, batch),
}
reveal(guess, kinds["autocast"].peak_bytes() / kinds["bf16"].peak_bytes())
show(*pictures.number_formats(kinds))

# %% [markdown]
# **Compared with fp32, a 16-bit model halves the floating-point activations. Autocast saves less,
# because it also keeps fp32 tensors and 16-bit copies of the weights.**
#
# ## 6 Eight bits, and four
#
# Sixteen bits work well. Can we go on to 8 bits, or to 4? Speed is a reason to try: in FP8, the
# peak speed of the H100's tensor cores is twice that in bf16 (NVIDIA's datasheet). Usually only the
# operands of matrix products are in FP8, and masters stay in fp32.
#
# With 8 bits, a format cannot have enough precision and enough range for everything. So there are
# two formats (Micikevicius et al. 2022, section 3). E4M3, with 4 bits of exponent and 3 of
# mantissa, is usual for weights and activations. E5M2, with more range and less precision, is usual
# for gradients.
#
# Even so, neither of them has the range that all tensors need. So each tensor is divided by a scale
# $X$ that maps its largest number to the format's largest. *Current scaling* has to read the tensor
# twice: once to find its largest number, and again to round. *Delayed scaling* avoids this and uses
# the largest number of earlier steps. If a number is now too large for this scale, it *saturates*:
# it becomes the format's largest.
#
# With one scale per tensor, a single outlier determines the scale of all numbers. **Microscaling**
# (MX; Open Compute Project, MX v1.0, 2023) has a scale for each *block* of 32 consecutive numbers
# instead. The scale is a power of two, so dividing by it only changes exponents and is exact. MXFP8
# has elements in E4M3 or E5M2. MXFP4 has elements in E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and their
# negatives.
#
# How much precision is left? E4M3 rounds a number by up to 6 % (numbers near its smallest by more).
# What is the error of a product of two random matrices?

# %% tags=["predict"]
guess = predict("norm of the error / of the product: E4M3, one scale per matrix", unit="%")
### GUESS guess.commit(6)

# %% tags=["picture"]
names = ("bf16", "E4M3, one scale", "MXFP8", "MXFP8, scales rounded up", "E5M2, one scale", "MXFP4")
print(*(f"{name}: {100 * product_error(name):.2g} %" for name in names), sep="; ")
reveal(guess, 100 * product_error("E4M3, one scale"))
show(*pictures.product_errors())

# %% [markdown]
# Why does the error of the product not exceed that of a single number, although it sums over many?
# The 6 % is the largest rounding error, and most are smaller. Moreover, for random matrices the
# terms of a sum and their errors have random signs. Both sums then grow like the square root of the
# number of terms, so their ratio does not grow.
#
# Now look at outliers. In E4M3, one scale tolerates outliers of up to about 10,000 standard
# deviations here. Beyond that, the scale is so large that more and more of the other numbers
# underflow to zero. With blocks, an outlier harms at most the 31 other numbers of its block.
# Without outliers, MXFP8 is a little worse than one scale: the scales of its blocks are rounded
# *down* to a power of two, so the largest numbers of many blocks saturate. Scales rounded up
# (Mishra et al. 2025) repair that.
#
# ### Exercise 6 (further): blocks with a shared scale
# *Difficulty 4 of 5, importance 3 of 5, about 15 minutes and 6 lines.*
#
# Round fp32 `x` [rows, n] in blocks of `block` numbers along each row; a row's last block may be
# shorter. A block's scale is the largest power of two $\le$ its largest $|x|$, divided by the
# format's largest power of two ($2^8$ for E4M3, $2^{15}$ for E5M2). An element is x / scale,
# clamped to $\pm$`torch.finfo(dtype).max`, then `.to(dtype)`. In E4M3, a largest number of 7.5
# gives the scale 4/256, and 7.5 becomes 480, clamped to 448. Return elements [rows, n] as `dtype`,
# and fp32 scales [rows, number of blocks].
#
# <details><summary>Hint: tools</summary>
# <code>F.pad</code> fills up the last block. <code>torch.frexp</code> returns a mantissa from 0.5
# to 1, and an exponent. The scale of a block of zeros may be any power of two.
# </details>
#
# <details><summary>Hint: if a scale is two times what it should be</summary>
# <code>torch.log2</code> rounds: for the largest fp32 number below 8 it returns 3.
# <code>torch.frexp</code> is exact.
# </details>


# %% tags=["exercise"] exercise="recompute-6"
def in_blocks(x, dtype, block=32):
    """Round x to dtype in blocks along its rows; return elements and scales."""
    ### BEGIN SOLUTION: pad, cut into blocks, find the scales, saturate and cast
    n, largest = x.shape[1], torch.finfo(dtype).max
    blocks = F.pad(x, (0, -n % block)).unflatten(1, (-1, block))
    exponents = torch.frexp(blocks.abs().amax(-1)).exponent
    scales = torch.exp2(exponents - torch.frexp(torch.tensor(largest)).exponent)
    elements = (blocks / scales.unsqueeze(-1)).clamp(-largest, largest).to(dtype)
    return elements.flatten(1)[:, :n], scales
    ### END SOLUTION


# %% tags=["check"] exercise="recompute-6"
check("recompute-6", in_blocks)

# %% [markdown]
# In which direction of a matrix should blocks lie? A product sums over one dim of each operand. If
# the blocks lie along this dim, all 32 terms of a block have the same scale, and the hardware can
# multiply their partial sum by it once. But the three products of a layer sum over different dims:
# forward over the layer's inputs, and backward over its outputs and over the tokens. So each tensor
# needs two rounded copies, with blocks along rows and along columns.
#
# A small error of a product does not yet say what happens to training. So now we train a small GPT.
# Its blocks' linear layers compute in each format, the rest in fp32. The FP8 runs use E5M2 for
# gradients, the MXFP8 runs E4M3. The MXFP4 run uses MXFP8 in backward.

# %% tags=["picture", "measured"]
losses = {name: train(name) for name in FORMATS}
behind = losses_behind(losses)  # the mean of the last 10 steps, minus that of fp32
print("loss above that of fp32:", *(f"{n} {loss:+.4f}" for n, loss in behind.items()), sep="\n")
claim("MXFP4 loses most", max(behind, key=behind.get) == "MXFP4 in forward")
eight_bits = max(abs(loss) for name, loss in behind.items() if "FP8" in name)
claim("in 8 bits the loss is within 1 % of fp32's", eight_bits < 0.01 * losses["fp32"][-1])
show(*pictures.format_losses(losses))

# %% [markdown]
# After these 100 steps, the losses rank like the errors of the forward product without outliers:
# bf16, FP8, MXFP8 with scales rounded down, MXFP4.
#
# A hundred steps say little about a long training. Published runs had losses close to those in 16
# bits: emulated FP8, up to 175B parameters (Micikevicius et al. 2022, section 4.1); FP8 in blocks
# with fp32 scales, up to 230B (DeepSeek-AI 2024, *DeepSeek-V3*, appendix B.1); MXFP8, 8B parameters
# and 15T tokens (Mishra et al. 2025). A 12B model in FP4 needed extra methods, such as stochastic
# rounding (NVIDIA 2025, NVFP4).
#
# **A scale for each block confines an outlier's damage to the block. This matters most for 4-bit
# elements, whose range is the smallest.**
#
# ## What to keep
#
# - Keep inputs and random state, and recompute the rest: the same gradients for one more forward.
# - Recompute first what is large to keep and cheap to compute.
# - The best segment has about $\sqrt{L\,i/A}$ blocks, often 1 to 3 in a transformer.
# - Small steps usually need fp32 masters. Small fp16 gradients need a loss scale; unscale before
#   you clip.
# - A scale for each block confines outliers, which matters most in FP4.
#
# ## Read on
#
# - Chen et al. 2016, *Training Deep Nets with Sublinear Memory Cost*: the square root.
# - Korthikanti et al. 2022, *Reducing Activation Recomputation in Large Transformer Models*:
#   selective recompute, and its price on real GPUs.
# - Dao et al. 2022, *FlashAttention*: recompute inside a kernel.
# - Micikevicius et al. 2018, *Mixed Precision Training*: master weights and loss scaling.
# - Micikevicius et al. 2022, *FP8 Formats for Deep Learning*: E4M3 and E5M2, and why two.
# - Rouhani et al. 2023, *Microscaling Data Formats for Deep Learning*: MX formats in training.
#
# Next: lesson `04_collectives` uses several ranks.
