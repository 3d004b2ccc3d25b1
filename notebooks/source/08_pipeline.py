# %% [markdown]
# # 08 Pipeline parallelism: split the layers
#
# **Question.** A model that is too large for one device can be cut between its layers. What do the
# ranks do while one of them computes, and how little waiting is possible?
#
# Each rank holds a *stage*, some consecutive layers, and sends its output to the next rank. Little
# is communicated.
#
# *After this lesson you can*
#
# - write the 1F1B schedule, simulate it, and run it on real ranks;
# - predict bubble and micro-batches in flight of GPipe, 1F1B and today's schedules;
# - recognize a deadlock of sends, and a loss not divided by $m$;
# - choose the number of micro-batches, and balance the stages.
#
# **Prerequisites:** lessons 01, 02 and 04. **Time:** 80 minutes of reading, 125 for seven exercises
# (core: 1, 2, 3; further: 4 to 7). Section 6 ends with a break.
#
# | symbol | in code | meaning |
# |---|---|---|
# | $p$ | `p` | ranks; rank $r$ holds stage $r$ |
# | $m$ | `m` | micro-batches of one batch |
# | $v$ | `num_model_chunks` | model chunks on each rank (interleaved) |
# | $F$, $B$ | `forward_s`, `backward_s` | seconds of a stage, for one micro-batch |
# | $I$, $W$ | `backward_input`, `backward_weight` | the two halves of a backward |

# %%
# %load_ext course_lib.ranks
from itertools import combinations, count, pairwise, product

import torch
import torch.distributed as dist

from course_lib.checks import check
from course_lib.core.presets import MODELS
from course_lib.core.records import COMPUTE_KINDS
from course_lib.display import Voices, claim, compare, predict, reveal, show, timeline, waiting
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from course_lib.pipeline import Action, PipelineTimes, balance, cost, lab, pictures, schedules
from course_lib.pipeline.actions import as_text, placement_of, source_of, target_of
from course_lib.pipeline.cost import BatchCost, step_parts
from course_lib.pipeline.simulation import simulate
from course_lib.ranks import RankError, Ranks

# %% [markdown]
# ## 1 One rank computes, the others wait
#
# A batch goes forward through four stages, then backward. For what part of the time does a rank
# compute?

# %% tags=["predict"]
guess_busy = predict("a rank computes", unit="% of the time")
### GUESS guess_busy.commit(50)

# %% tags=["picture"]
played = simulate(schedules.naive(4, 1))
reveal(guess_busy, 100 * (1 - played.bubble_fraction))
title = f"One batch at a time: four ranks are idle for {played.bubble_fraction:.0%} of their time"
show(timeline(played.events(), title, unit="F"), alt=f"{title}; a backward takes 2 F")

# %% [markdown]
# The next batch cannot fill the gaps: it needs the weights that this step computes (PipeDream,
# Narayanan et al. 2019, uses older ones).
#
# **With an undivided batch, only one rank computes at a time.**
#
# ## 2 Micro-batches
#
# So split the batch: while rank 1 computes micro-batch 0, rank 0 continues with micro-batch 1.
# **GPipe** (Huang et al. 2019) runs all $m$ forwards, then all $m$ backwards. Each rank computes
# for $m(F+B)$, and is idle for $(p-1)(F+B)$, while the pipeline fills and empties. This idle time,
# the *bubble*, is $\frac{p-1}{m}$ of the computation.
#
# Four ranks with emulated layers (lesson 06): gradients are real, computing time is a sleep. How
# large is the bubble with 8 micro-batches?

# %% tags=["predict"]
guess_bubble = predict("bubble for p = 4, m = 8", unit="% of the compute")
### GUESS guess_bubble.commit(50)
batch = BatchCost(forward_s=160e-3, backward_s=320e-3)  # a stage's seconds for the whole batch
ranks, numbers = Ranks(4), [1, 2, 4, 8]


# %% tags=["picture", "measured"]
runs = {m: lab.emulated(schedules.gpipe(4, m), batch.times(m)) for m in numbers}
made, whole_s = lab.measure(ranks, runs, turns=2), batch.forward_s + batch.backward_s
reveal(guess_bubble, 100 * cost.bubble_overhead(4, 8))
measured = {m: [100 * (s / whole_s - 1) for s in made[m].seconds] for m in numbers}
voices = Voices(
    formula=lambda m: 100 * cost.bubble_overhead(4, m),
    simulation=[100 * simulate(schedules.gpipe(4, m)).bubble_overhead for m in numbers],
    measurement=list(measured.values()),
)
title = "Four stages: twice as many micro-batches, about half the bubble"
axes = {"x_label": "micro-batches", "y_label": "bubble (% of compute)", "note": "emulated layers"}
show(compare(numbers, voices, title, **axes), alt=f"{title}; measured: on the line or above")

# %% [markdown]
# The dots lie above the line, since every action has overhead. Huang et al. (2019, section 2.3)
# found the bubble negligible for $m\ge4p$, partly because they recompute while waiting. But smaller
# micro-batches compute less efficiently, and cost messages (section 7).
#
# **GPipe's bubble is $(p-1)/m$ of the computation, if stages take equally long, and messages no
# time.**
#
# ## 3 1F1B: backward as soon as possible
#
# Without recompute, GPipe's price is memory: the activations of all $m$ micro-batches wait for
# their backward. But the last rank could begin backward after its *first* forward. **1F1B**
# (PipeDream-Flush in Narayanan et al. 2021, section 2.2: one forward, one backward) does that. In
# the **warm-up**, each rank runs as many forwards as there are ranks after it. Then it alternates
# one forward and one backward (**steady phase**), and finally runs the remaining backwards
# (**cool-down**).
#
# That is a **schedule**: for each rank the list of its actions, without times. An action starts
# when its rank is free and its input has arrived. Here is GPipe's schedule. A micro-batch is *in
# flight* on a rank from its forward to its backward. With 1F1B, $p=4$ and $m=32$, how many does
# rank 0 hold at most?

# %% tags=["predict"]
print(as_text(schedules.gpipe(4, 4)))
print(schedules.gpipe(4, 4)[1][0])
guess_held = predict("micro-batches in flight on rank 0 with 1F1B")
### GUESS guess_held.commit(8)

# %% [markdown]
# ### Exercise 1 (core): the order of 1F1B
#
# Return lists of `Action(kind, stage, micro_batch)`, of kinds `"forward"` and `"backward"`. It also
# has to work for $m<p$. About 5 lines, 10 minutes.
#
# <details><summary>Hint: how long is the warm-up?</summary>
# The last rank needs none; each rank before it runs one forward more than the next.
# </details>
# <details><summary>Hint: the last backwards are missing</summary>
# Every forward of the warm-up needs its backward in the cool-down.
# </details>


# %% tags=["exercise"] exercise="pipeline-1"
def one_f_one_b(p, m):
    """For each rank the list of its actions, in the order of 1F1B."""
    schedule = []
    for rank in range(p):
        ### BEGIN SOLUTION: warm-up, one forward and one backward in turn, cool-down
        warmup = min(p - 1 - rank, m)
        kinds = ["forward"] * warmup + ["forward", "backward"] * (m - warmup)
        next_of = {"forward": count(), "backward": count()}
        kinds += ["backward"] * warmup
        schedule.append([Action(kind, rank, next(next_of[kind])) for kind in kinds])
        ### END SOLUTION
    return schedule


# %% tags=["check"] exercise="pipeline-1"
check("pipeline-1", one_f_one_b)

# %% tags=["picture", "measured"]
reveal(guess_held, simulate(schedules.one_f_one_b(4, 32)).peak_in_flight()[0])
plans = {"GPipe": schedules.gpipe(3, 4), "1F1B": schedules.one_f_one_b(3, 4)}
runs = {name: lab.emulated(plan, batch.times(4)) for name, plan in plans.items()}
three, shown = Ranks(3), {}
for name, real in lab.measure(three, runs, turns=2).items():
    step_s = simulate(plans[name], batch.times(4)).step_s
    print(f"{name:5}: predicted {1e3 * step_s:.0f} ms, measured {1e3 * real.step_s:.0f} ms")
    shown[f"{name}, measured"] = [event for event in real.events if event.kind in COMPUTE_KINDS]
title = "1F1B: the same bubble, fewer activations"
figure = pictures.pipelines(shown, title, link="emulated layers")
show(figure, alt=f"{title}: rank 0 holds 3 micro-batches, with GPipe all 4")

# %% [markdown]
# Rank $r$ holds at most $\min(p-r,m)$ micro-batches, however large the batch. The bubble is
# GPipe's: each rank still waits for the first micro-batch to arrive and the last to return.
#
# ### Exercise 2 (core): when does each action end?
#
# Write the simulator: an action waits for its rank and its input. `source_of(action, p)` is the
# stage whose action of the same kind and micro-batch sends this input, or None if no message is
# needed; a message takes `message_s`. About 9 lines, 20 minutes.
#
# <details><summary>Hint: the action that produces the input</summary>
# <code>action._replace(stage=source)</code>: a forward needs the forward of the stage before.
# </details>
# <details><summary>Hint: which rank comes next?</summary>
# Go over the ranks repeatedly; let each run what can run.
# </details>


# %% tags=["exercise"] exercise="pipeline-2"
def finish_times(schedule, seconds, message_s):
    """{action: when it ends}; seconds of each kind of action; a message takes message_s."""
    p, ends, free_s = len(schedule), {}, [0.0] * len(schedule)
    left = [list(actions) for actions in schedule]
    while any(left):
        ### BEGIN SOLUTION: run every action whose input has arrived
        for rank, actions in enumerate(left):
            while actions:
                source = source_of(actions[0], p)
                sent = actions[0]._replace(stage=source)
                if source is not None and sent not in ends:
                    break
                input_s = 0.0 if source is None else ends[sent] + message_s
                free_s[rank] = max(free_s[rank], input_s) + seconds[actions[0].kind]
                ends[actions.pop(0)] = free_s[rank]
        ### END SOLUTION
    return ends


# %% tags=["check"] exercise="pipeline-2"
check("pipeline-2", finish_times)

# %% tags=["picture"]
from course_lib.pipeline.explorer import schedule_explorer

schedule_explorer()

# %% [markdown]
# `simulate` does this for every schedule. Move the sliders: which schedule suffers most from slow
# messages, and which gains most from more micro-batches?
#
# **A schedule is a list of actions per rank; their times follow from it.**
#
# ## 4 An engine that runs any schedule
#
# ### Exercise 3 (core): run a schedule
#
# Run one rank's part of a step. Backwards may come in any order; `i` is the micro-batch. `isend`
# returns at once, with a handle; until `handle.wait()` its tensor must not change. `x` is the input
# only on the first rank (it may be integer tokens), and the target is real only on the last;
# elsewhere both are placeholders with a message's shape and dtype. The last micro-batch may be
# smaller. Add to every `param.grad`, as `backward()` does, the gradient of the *mean* of the $m$
# losses; a nan in them stays nan. Do not change lists, batch, stage (modes, hooks, what is frozen)
# or random state. Budget: one message per micro-batch and direction; with 1F1B, memory does not
# grow with $m$. About 17 lines, 25 minutes.
#
# <details><summary>Hint: x.grad is None</summary>
# To autograd, a received tensor is a leaf without gradient. Call <code>x.requires_grad_()</code>
# before the stage computes.
# </details>
# <details><summary>Hint: gradients are too large</summary>
# <code>loss_fn</code> is a mean over one micro-batch. Divide it once, where the loss is.
# </details>
# <details><summary>Hint: memory grows</summary>
# <code>kept.pop(i)</code> removes an entry; send <code>y.detach()</code>, without the graph. A
# handle holds its message, even after <code>wait()</code>: put it into <code>sent</code> only.
# </details>


# %% tags=["exercise"] exercise="pipeline-3"
def run_actions(actions, stage, micro_batches, loss_fn):
    """Run this rank's actions; micro_batches is a list of (x, target)."""
    rank, p, m = dist.get_rank(), dist.get_world_size(), len(micro_batches)
    kept, sent = {}, []
    for kind, _, i, _ in actions:
        x, target = micro_batches[i]
        if kind == "forward":
            ### BEGIN SOLUTION: receive, compute, send, keep
            if rank > 0:
                x = torch.empty_like(x)
                dist.recv(x, rank - 1)
                x.requires_grad_()
            y = stage(x)
            if rank < p - 1:
                sent.append(dist.isend(y.detach(), rank + 1))
            kept[i] = x, y
            ### END SOLUTION
        else:
            ### BEGIN SOLUTION: take out, receive (or start at the loss), backward, send
            x, y = kept.pop(i)
            if rank == p - 1:
                (loss_fn(y, target) / m).backward()
            else:
                grad = torch.empty_like(y)
                dist.recv(grad, rank + 1)
                y.backward(grad)
            if rank > 0:
                sent.append(dist.isend(x.grad, rank - 1))
            ### END SOLUTION
        if len(sent) > 2 * p:  # a handle holds its message; the oldest one has arrived long ago
            sent.pop(0).wait()
    for work in sent:
        work.wait()


# %% tags=["check"] exercise="pipeline-3"
check("pipeline-3", run_actions)

# %% [markdown]
# The course's engine, `Pipeline`, does this with receives started early, messages of any shape, and
# all schedules below. `split_model` leaves each rank its own layers. After 3 steps, do all
# parameters equal those of one process?

# %%
from course_lib.pipeline import Pipeline, split_model


def train(rank, schedule, m):
    torch.manual_seed(0)
    stage = split_model(GPT(MODELS["tiny"]).double(), len(schedule), rank)
    pipeline = Pipeline(stage, token_loss)
    sgd = torch.optim.SGD(stage.parameters(), lr=0.1, momentum=0.9)
    for n in range(3):
        inputs, targets = next_tokens(token_batch(n, batch=8, seq=16, vocab=256))
        sgd.zero_grad()
        pipeline.step(schedule, inputs.chunk(m), targets.chunk(m))
        sgd.step()
    return dict(stage.chunks[0].named_parameters(remove_duplicate=False)), pipeline.peak_in_flight


# %% tags=["check"]
whole = Ranks(1).run(train, schedules.naive(1, 1), 1)[0][0]
for name, make in {"GPipe": schedules.gpipe, "1F1B": schedules.one_f_one_b}.items():
    found = ranks.run(train, make(4, 8), 8)
    near = [(whole[key] - x).abs().max() < 1e-12 for named, _ in found for key, x in named.items()]
    print(f"{name:5} as one process: {all(near)}; held at most {[peak for _, peak in found]}")

# %% [markdown]
# `backward()` frees what autograd saved inside a stage. But a forgotten reference keeps a stage's
# inputs (with gradients) and outputs, and no result shows it.
#
# **Receive, compute, send without waiting; free early, and divide the loss once.**
#
# ## 5 Break it: sends that wait
#
# With gloo's `dist.send` in place of `isend`, a rank waits until the other one receives. Here
# nothing is computed. Which schedule hangs?

# %% tags=["predict"]
guess_hang = predict("which one hangs?", choices=("GPipe", "1F1B", "both", "none"))
### GUESS guess_hang.commit("both")


# %% tags=["failure", "raises-exception"]
def only_messages(rank, schedule):
    x, p = torch.zeros(1), len(schedule)
    for action in schedule[rank]:
        if (source := source_of(action, p)) is not None:
            dist.recv(x, source)
        if (target := target_of(action, p)) is not None:
            dist.send(x, target)


ranks.run(only_messages, schedules.gpipe(4, 8))
try:
    ranks.run(only_messages, schedules.one_f_one_b(4, 8))
except RankError as hang:
    reveal(guess_hang, "1F1B")
    show(waiting(hang.waits, 4), alt="two neighbors wait in a send for each other")
    raise

# %% [markdown]
# In the steady phase one neighbor sends an activation, the other a gradient, and neither receives.
# `check_schedule(schedule, blocking_sends=True)` reports this before anything runs.
#
# **Between neighbors that send in both directions, a send must not block, or must be combined with
# the receive, or one of them receives first.**
#
# ## 6 Break it: the loss that was not divided
#
# Hugging Face's teaching code picotron (commit 12e81c3, `pipeline_parallel.py`) divides the loss
# that it *logs* by $m$, but not the one that it backpropagates: every gradient is $m$ times too
# large. After 30 steps, can you see from the loss that gradients are 8 times too large?


# %% tags=["measured"]
def last_loss(optimizer_cls, lr, times):
    torch.manual_seed(0)
    model = GPT(MODELS["tiny"])
    optimizer = optimizer_cls(model.parameters(), lr=lr)
    for n in range(30):
        inputs, targets = next_tokens(token_batch(n % 4, batch=8, seq=16, vocab=256))
        loss = token_loss(model(inputs), targets)
        optimizer.zero_grad()
        (times * loss).backward()
        optimizer.step()
    return loss.item()


for name, cls, lr in (("SGD", torch.optim.SGD, 0.2), ("Adam", torch.optim.Adam, 3e-3)):
    right, wrong = (last_loss(cls, lr, times) for times in (1, 8))
    print(f"{name:4}: loss {right:.3f}; with gradients 8 times too large {wrong:.3f}")

# %% [markdown]
# SGD's loss shows it. Adam divides by the gradient's size, so a constant factor cancels, up to
# $\epsilon$. The factor returns where the size matters: in clipping, in weight decay that is added
# to the gradient, and when you change $m$. So compare *gradients*.
#
# **A falling loss does not prove that the gradients are right.**
#
# *A good place for a break.*
#
# ## 7 On a slow link, more micro-batches can be slower
#
# More micro-batches mean more messages. Here is section 2's batch over a link with 30 ms latency.
# Which is faster with 1F1B?

# %% tags=["predict"]
from course_lib.core import Link

wire = Link(name="slow link", latency_s=30e-3, bytes_per_s=1e9)
guess_m = predict("faster with 1F1B over the slow link", choices=("m = 4", "m = 16"))
### GUESS guess_m.commit("m = 16")

# %% tags=["picture", "measured"]
numbers, both = [4, 8, 16], {"1F1B": schedules.one_f_one_b, "GPipe": schedules.gpipe}
pairs = {(name, m): make(4, m) for name, make in both.items() for m in numbers}
runs = {key: lab.emulated(plan, batch.times(key[1], wire)) for key, plan in pairs.items()}
made, curves = lab.measure(Ranks(4, link=wire), runs, turns=2), {}
for name, make in both.items():
    played = [step_parts(4, m, batch, wire, make).step_s * 1e3 for m in numbers]
    steps = [[s * 1e3 for s in made[name, m].seconds] for m in numbers]
    curves[name] = Voices(simulation=played, measurement=steps)
few, many = (made["1F1B", m].step_s for m in (4, 16))
claim("1F1B is faster with m = 4 than with m = 16", few < many)

# %% tags=["picture", "measured"]
reveal(guess_m, "m = 4" if few < many else "m = 16")
title = f"1F1B on a slow link: {few * 1e3:.0f} ms with m = 4, {many * 1e3:.0f} ms with m = 16"
axes = {"x_label": "micro-batches", "y_label": "step (ms)", "note": f"emulated {wire} and layers"}
show(compare(numbers, curves, title, **axes), alt=title)
print(cost.parts_table(4, numbers, batch, wire))

# %% [markdown]
# In 1F1B, rank 0's next forward waits for a gradient that waits for an earlier forward. So every
# $p$ micro-batches cost one more round trip of $2(p-1)$ messages, while the bubble shrinks: $m$ can
# be too small or too large. GPipe exposes only the $2(p-1)$ messages with which the pipeline fills
# and empties; it pays with memory.
#
# **More micro-batches help only while the messages they add cost less than the bubble they save.**
#
# ## 8 Stages are not equally long
#
# All stages wait for the slowest. GPT-2 small has 12 blocks. By FLOP, its output layer costs how
# many blocks?

# %% tags=["predict"]
from course_lib.cost.flops import forward_flop

flop = forward_flop(MODELS["gpt2"], 1, 1024)
head = flop.pop("logits")
guess_head = predict("the output layer of GPT-2, in blocks")
### GUESS guess_head.commit(1)

# %% [markdown]
# ### Exercise 4 (further): balance the stages
#
# How many consecutive layers should each of $p$ stages get, none empty, so that the slowest is as
# fast as possible? About 4 lines, 15 minutes.
#
# <details><summary>Hint: all cuts</summary>
# <code>combinations(range(1, n), p - 1)</code> are the places to cut; <code>pairwise</code> of (0,
# *cut, n) gives each stage's begin and end.
# </details>


# %% tags=["exercise"] exercise="pipeline-4"
def cut_layers(layer_times, p):
    """A list of p numbers of layers."""
    n = len(layer_times)
    ### BEGIN SOLUTION: of all cuts, the one whose slowest stage is fastest
    cuts = [[*pairwise((0, *cut, n))] for cut in combinations(range(1, n), p - 1)]
    best = min(cuts, key=lambda cut: max(sum(layer_times[i:j]) for i, j in cut))
    return [j - i for i, j in best]
    ### END SOLUTION


# %% tags=["check"] exercise="pipeline-4"
check("pipeline-4", cut_layers)

# %%
layers = [0.0, *[1.0] * 12, 12 * head / sum(flop.values())]  # embedding, blocks, output layer
reveal(guess_head, layers[-1])
cuts = {"equally many": [4, 3, 3, 4], "balanced": balance.balance_stages(layers, 4)}
for name, cut in cuts.items():
    each = balance.stage_times(layers, cut)
    times = PipelineTimes(forward_s=each, backward_input_s=each, backward_weight_s=each)
    step = simulate(schedules.one_f_one_b(4, 3), times)
    print(f"{name:12} {cut}: {step.step_s:.0f} block times a step, {step.bubble_fraction:.0%} idle")
h100 = cost.h100_stages()
print(
    f"8 H100, output layer {h100.head_layers:.1f} blocks: stages, tokens/s/GPU published, formula"
)
print(*zip(h100.stages, map(round, h100.published), map(round, h100.formula), strict=True))

# %% [markdown]
# On 8 H100 (Tazi et al. 2025), 8 stages wait longer than their bubble: by formula, the last stage,
# the output layer alone, costs 3.2 blocks where the mean is 2.4.
#
# Llama 3 405B has one layer fewer on its first and last stages (Grattafiori et al. 2024, section
# 3.3.2).
#
# Often the output layer *is* the embedding (*tied* weights): first and last stage hold copies of
# one matrix, and in backward each gets the gradient of its own use.
#
# ### Exercise 5 (further): a tied weight
#
# After backward, leave in both copies the gradient of *both* uses. `ends` is the group of first and
# last stage, whatever their ranks; with one stage, it has one member. A frozen weight's `.grad` is
# None; otherwise it may be a transposed view. Budget: one message each way, nothing from middle
# stages. About 2 lines, 10 minutes.
#
# <details><summary>Hint: rank 1 fails</summary>
# In the middle <code>weight</code> is None: these ranks have nothing to do.
# </details>


# %% tags=["exercise"] exercise="pipeline-5"
def sum_tied(weight, ends):
    """weight: this rank's copy, or None; its .grad is summed over the group `ends`."""
    ### BEGIN SOLUTION: ranks with a gradient add it up
    if weight is not None and weight.grad is not None:
        dist.all_reduce(weight.grad, group=ends)
    ### END SOLUTION


# %% tags=["check"] exercise="pipeline-5"
check("pipeline-5", sum_tied)

# %% [markdown]
# **Balance by time, not by layers; a weight that is used twice has one gradient.**
#
# ## 9 Micro-batches inside a sequence
#
# With causal attention a token does not need later ones, so **TeraPipe** (Li et al. 2021) splits
# one long *sequence*: while rank 1 computes the first piece, rank 0 computes the second. The second
# attends to the first's keys and values, which rank 0 kept.

# %%
from course_lib.pipeline.token_pipeline import TokenCost, balanced_cut, even_cut, token_forward_s

token_cost = TokenCost(piece_s=50e-6, token_s=1e-6, pair_s=4e-9)
print("tokens of 8 balanced pieces:", balanced_cut(2048, 8, token_cost))
print("forward (ms), equal and balanced pieces:")
for number in (1, 2, 4, 8, 16, 32):
    cuts = even_cut(2048, number), balanced_cut(2048, number, token_cost)
    print(f"{number:2} pieces:", *(f"{1e3 * token_forward_s(c, 4, token_cost):.1f}" for c in cuts))

# %% [markdown]
# With $k$ pieces of times $t_i$, the forward takes $\sum t_i+(p-1)\max t_i$ (their equation 5): the
# longest piece counts $p$ times. A later token attends to more, so pieces of equal *time* hold ever
# fewer tokens.
#
# **Causal attention lets the pieces of one sequence follow each other through the stages.**
#
# ## 10 Schedules in use today
#
# **Interleaved 1F1B** (Narayanan et al. 2021, section 2.2). Each rank holds $v$ smaller *model
# chunks* (with 8 chunks on 4 ranks, rank 0 has the first and fifth). The pipeline fills with
# chunks, each $v$ times shorter than a stage: a bubble of $\frac{p-1}{vm}$.
#
# ### Exercise 6 (further): the interleaved order
#
# Return lists of `Action(kind, rank, micro_batch, model_chunk)`, for $v\ge2$. Micro-batches run in
# rounds of $p$: each round runs through chunk 0, then chunk 1, ...; backward, from the last chunk
# to the first. The rest is as in 1F1B, but a rank's warm-up has $(v-1)p$ forwards, plus 2 for each
# rank after it (at most $vm$). If $m$ is no multiple of $p$, raise a `ValueError`. About 10 lines,
# 15 minutes.


# %% tags=["exercise"] exercise="pipeline-6"
def interleaved(p, m, v):
    """For each rank the list of its actions, in the order of interleaved 1F1B."""
    schedule = []
    for rank in range(p):
        ### BEGIN SOLUTION: list pairs (micro-batch, chunk), then as in exercise 1
        if m % p:
            raise ValueError(f"{m} micro-batches are no multiple of {p} ranks")
        rounds = [range(first, first + p) for first in range(0, m, p)]
        forwards = [(i, chunk) for each in rounds for chunk in range(v) for i in each]
        backwards = [(i, v - 1 - chunk) for i, chunk in forwards]
        warmup = min((v - 1) * p + 2 * (p - 1 - rank), m * v)
        kinds = ["forward"] * warmup + ["forward", "backward"] * (m * v - warmup)
        next_of = {"forward": iter(forwards), "backward": iter(backwards)}
        kinds += ["backward"] * warmup
        schedule.append([Action(kind, rank, *next(next_of[kind])) for kind in kinds])
        ### END SOLUTION
    return schedule


# %% tags=["check"] exercise="pipeline-6"
check("pipeline-6", interleaved)

# %% [markdown]
# **ZB-H1** (Qi et al. 2024, section 2). A backward computes the input's gradient, $I$, for which
# the previous rank waits, and the weights' gradient, $W$, for which no rank waits. ZB-H1 runs $I$
# at once; rank $r$ defers each $W$ by $r$ micro-batches, so that its last ones fill the bubble.
#
# **ZB-V** (their section 6) adds chunks, in a V: rank $r$ holds chunks $r$ and $2p-1-r$, so the
# first rank has embedding *and* loss.
#
# **DualPipeV**: the same V; in the steady phase a forward is paired with another micro-batch's
# backward. If both run at the same time, each hides the other's messages, such as all-to-alls of a
# mixture of experts.

# %% tags=["predict"]
from course_lib.pipeline import dual_pipe_v, zero_bubble_v

guess_zero = predict("ratio of bubbles, 1F1B to ZB-V, if F = I = W")
### GUESS guess_zero.commit(3)


def five(p, m):
    plain = {"1F1B": schedules.one_f_one_b(p, m), "interleaved": schedules.interleaved(p, m, 2)}
    split = {"ZB-H1": schedules.zero_bubble_h1(p, m), "ZB-V": zero_bubble_v(p, m)}
    return {**plain, **split, "DualPipeV": dual_pipe_v(p, m)}


# %% tags=["picture"]
plans = five(3, 6)
played = {name: simulate(plan) for name, plan in plans.items()}  # F = I = W = 1
reveal(guess_zero, played["1F1B"].idle_s[0] / played["ZB-V"].idle_s[0])
title = "Chunks shorten the bubble, weight gradients fill it"
figure = pictures.pipelines({name: one.events() for name, one in played.items()}, title, unit="F")
show(figure, alt=f"{title}: 1F1B idles most, ZB-V and DualPipeV least")

# %% tags=["measured"]
times = PipelineTimes(forward_s=0.03, backward_input_s=0.03, backward_weight_s=0.03)
made = lab.measure(three, {n: lab.emulated(plan, times) for n, plan in plans.items()}, turns=2)
formula = {"1F1B": 6, "interleaved": 6 / 2, "ZB-H1": 2, "ZB-V": 2 / 2, "DualPipeV": 2 / 2}
for name, real in made.items():
    idle = formula[name] / (18 + formula[name]), played[name].bubble_fraction, real.bubble_fraction
    held = max(real.peak_in_flight) * 3 / len(placement_of(plans[name]))
    sent = sum(event.kind == "send" for event in real.events)
    shown = "idle by formula {:.0%}, simulated {:.0%}, measured {:.0%};".format(*idle)
    print(f"{name:11}", shown, f"{held:g} in flight, {sent} messages")
print(cost.bubble_rate_table())

# %% [markdown]
# | | bubble of a rank | most in flight (one chunk counts $1/v$) | messages | source; used by |
# |---|---|---|---|---|
# | 1F1B | $(p-1)(F+I+W)$ | $p$ | $2(p-1)m$ | Narayanan 2021 |
# | interleaved | $\frac1v(p-1)(F+I+W)$ | $p+\frac{p-1}{v}$ | $2(pv-1)m$ | the same; Llama 3 |
# | ZB-H1 | $(p-1)(F+I-W)$ | $p$ | $2(p-1)m$ | Qi 2024 |
# | ZB-V | $\frac12(p-1)F$ | $p$ | $4(p-1)m$ | Qi 2024 |
# | DualPipeV | $\frac12(p-1)(F+I-W)$ | $p+\frac12$ | $4(p-1)m$ | Sea AI Lab 2025 |
#
# This holds for $m\ge2p$ (interleaved: a multiple of $p$), $W\le F$ and $W\le I$. ZB-V's bubble
# needs $F=I=W$ (Qi et al. count 0, from a rank's first action to its last); DualPipeV's, found by
# simulation, $I\le F\le I+W$. ZB-H1 holds on *every* rank what 1F1B holds on the first. Last lines
# of output: our simulator agrees with Qi et al. 2024 (table 5) for two models.
#
# **A smaller bubble costs memory, at least on later ranks, and with chunks also messages.**
#
# ## 11 An open puzzle
#
# Which order is best for given $p$, $m$, memory and $F:I:W$? No general formula is known.
#
# ### Exercise 7 (further): the shortest step
#
# Return a schedule with a short simulated step and at most `cap` $\ge p$ micro-batches in flight
# (from F until W) on each rank. `seconds` has the times of `"forward"`, `"backward_input"`,
# `"backward_weight"`. It is right if it is never slower than ZB-H1, in seven puzzles (messages take
# no time). The loop is a *list scheduler*: of the actions in `ready` it runs the one that can start
# first; of several, the most urgent (0 first). Fill `ready`, or replace the whole loop.
# About 10 lines, 30 minutes.
#
# <details><summary>Hint: what can run next</summary>
# Count each rank's F, I and W: each kind runs in micro-batch order. I needs its F, W needs its I.
# </details>
# <details><summary>Hint: slower than ZB-H1</summary>
# While fewer than p - r micro-batches wait for their I, F is most urgent. Nobody waits for W.
# </details>


# %% tags=["exercise"] exercise="pipeline-7"
def pack(p, m, seconds, cap):
    """For each rank the list of its actions: a short step, at most `cap` in flight."""
    schedule, ends, free_s = [[] for _ in range(p)], {}, [0.0] * p
    while len(ends) < 3 * p * m:
        ready = []  # (when it can start, how urgent it is, action)
        ### BEGIN SOLUTION: add the next F, I and W of each rank, if they may run
        for rank, actions in enumerate(schedule):
            f, i, w = (sum(one.kind == kind for one in actions) for kind in seconds)
            room, urgent = min(m, w + cap, i + cap - rank), 0 if f - i < p - rank else 2
            nexts = [("forward", f, room, urgent)]
            nexts += [("backward_input", i, f, 1), ("backward_weight", w, i, 3)]
            for kind, number, end, urgency in nexts:
                source = source_of(action := Action(kind, rank, number), p)
                sent = action._replace(stage=source)
                if number < end and (source is None or sent in ends):
                    ready.append((max(free_s[rank], ends.get(sent, 0.0)), urgency, action))
        ### END SOLUTION
        start_s, _, action = min(ready)
        schedule[action.stage].append(action)
        ends[action] = free_s[action.stage] = start_s + seconds[action.kind]
    return schedule


# %% tags=["check"] exercise="pipeline-7"
check("pipeline-7", pack)

# %% tags=["measured"]
from course_lib.checks.pipeline.scores import scores

print(scores(pack))

# %% [markdown]
# The bound adds up a rank's work, the wait for its first input, and what weight gradients cannot
# fill of its last gradient's way back. Two chunks in a V beat the bound for one chunk.
#
# **The best schedule depends on times and memory: simulate, then search.**
#
# ## 12 The real thing
#
# `torch.distributed.pipelining` has all five, with the same order of actions; its
# `ScheduleInterleavedZeroBubble` with one chunk is ZB-H1. Two ranks, equal stages, 8 micro-batches.
# (PyTorch does not sum tied weights: here they are untied.) Are the gradients equal?

# %% tags=["measured"]
from dataclasses import replace

from course_lib.pipeline import beside_frameworks as beside

names = ["1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
pair, spec = Ranks(2), replace(MODELS["small"], tied=False)
for name, plan in zip(names, five(2, 8).values(), strict=True):
    by_rank = pair.run(beside.run_schedule, spec, f"Schedule{name}", plan)
    shown = ", ".join(f"{whose} {1e3 * s:.0f} ms" for whose, s in by_rank[0][1].items())
    print(f"Schedule{name:21} {shown}; equal: {all(equal for equal, _ in by_rank)}")

# %% [markdown]
# Megatron-Core has 1F1B and interleaved: below, 4 steps of the tied model (messages: of the last
# one). (Ours sends the tied gradient as messages, Megatron-Core as an all-reduce.)

# %% tags=["measured"]
from course_lib.frameworks import missing

batches = [next_tokens(token_batch(n, batch=8, seq=32, vocab=2048)) for n in range(4)]
print(missing("megatron.core") or "The last rank knows the loss:")
names = ["ours"] if missing("megatron.core") else ["ours", "Megatron-Core"]
for chunks, name in product((1, 2), names):
    ran = pair.run(beside.run_pipeline, MODELS["small"], batches, 8, name == "ours", chunks)[-1]
    calls = ran.calls().items()
    sent = "; ".join(f"{n} {kind}, together {size} bytes" for kind, (n, size) in calls)
    print(f"{chunks} chunks, {name}: loss {ran.losses[-1]:.5f}, {ran.median_ms:.0f} ms; {sent}")

# %% [markdown]
# ## What to keep
#
# - A schedule is a list of actions per rank; one engine runs any.
# - Bubble $\frac{p-1}{m}$; in flight $m$ with GPipe, $\min(p-r,m)$ with 1F1B. Model chunks shorten
#   the bubble, weight gradients fill it.
# - In 1F1B blocking sends can hang; activations must be freed; the loss is divided once.
#
# **Read on**
#
# - Huang et al. 2019, *GPipe*.
# - Narayanan et al. 2021, *Efficient Large-Scale Language Model Training*, section 2.2.
# - Qi et al. 2024, *Zero Bubble Pipeline Parallelism*: $I$ and $W$, ZB-H1, ZB-V, the search.
# - DeepSeek-AI 2024, *DeepSeek-V3*, section 3.2.1: DualPipe.
