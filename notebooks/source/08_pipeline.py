# %% [markdown]
# # 08 Pipeline: split the layers
#
# A model that is too large for one device can be cut between its layers: each rank holds a *stage*,
# some layers in a row, and hands its output to the next rank. Little has to travel, and only
# between neighbours. But what does a rank do while the others compute? As always: **predict**,
# **run**, **compare**.
#
# | symbol | in code | meaning |
# |---|---|---|
# | $p$ | `p` | ranks; rank $r$ holds stage $r$ |
# | $m$ | `m` | micro-batches of one batch |
# | $v$ | `num_model_chunks` | pieces of the model on each rank |
# | $F$, $B$ | `forward_s`, `backward_s` | seconds of a stage, for one micro-batch |
# | $I$, $W$ | `backward_input`, `backward_weight` | the two halves of a backward |

# %%
# %load_ext course_lib.ranks
from itertools import combinations, count, pairwise

import torch
import torch.distributed as dist

from course_lib.checks import check
from course_lib.core.presets import MODELS
from course_lib.core.records import COMPUTE_KINDS
from course_lib.display import Voices, compare, predict, reveal, show, timeline
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from course_lib.pipeline import Action, balance, cost, lab, schedules, simulate
from course_lib.pipeline.actions import as_text, source_of, target_of
from course_lib.pipeline.cost import BatchCost, step_parts
from course_lib.pipeline.pictures import pipelines
from course_lib.ranks import RankError, Ranks

# %% [markdown]
# ## 1 One works, the others wait
#
# Four ranks, four stages. A batch goes forward through all of them, then backward. Which part of
# the time does a rank compute?

# %% tags=["predict"]
guess_busy = predict("a rank computes", unit="% of the time")

# %% tags=["picture"]
played = simulate(schedules.naive(4, 1))
reveal(guess_busy, 100 * (1 - played.bubble_fraction))
title = f"One at a time: {played.bubble_fraction:.0%} of four ranks' time is lost"
show(timeline(played.events(), title, unit="F"), alt=f"{title}; a backward lasts 2 F")

# %% [markdown]
# The next batch cannot fill the gaps: it needs the weights after this step.
#
# **Cut into stages, a batch uses one rank at a time.**
#
# ## 2 Micro-batches
#
# So cut the batch: while rank 1 computes micro-batch 0, rank 0 goes on with micro-batch 1.
# **GPipe** sends all $m$ forward, then all backward. Idle time, the *bubble*, is left at the start
# and at the end: $p - 1$ times $F + B$ on each rank, beside $m (F + B)$ of compute: a bubble of
# $\frac{p-1}{m}$.
#
# Four ranks, as in lesson 06 with emulated layers: gradients are real, compute is slept. How large
# is the bubble with 8 micro-batches?

# %% tags=["predict"]
guess_bubble = predict("bubble for p = 4, m = 8", unit="% of the compute")
batch = BatchCost(forward_s=64e-3, backward_s=128e-3)  # a stage's seconds for the whole batch
ranks, numbers = Ranks(4), [1, 2, 4, 8]


# %% tags=["picture"]
runs = {m: lab.emulated(schedules.gpipe(4, m), batch.times(m)) for m in numbers}
made, whole_s = lab.measure(ranks, runs, turns=3), batch.forward_s + batch.backward_s
reveal(guess_bubble, 100 * cost.bubble_overhead(4, 8))
voices = Voices(
    formula=lambda m: 100 * cost.bubble_overhead(4, m),
    simulation=[100 * simulate(schedules.gpipe(4, m)).bubble_overhead for m in numbers],
    measurement=[[100 * (s / whole_s - 1) for s in made[m].seconds] for m in numbers],
)
title = "The bubble of four stages: twice as many micro-batches, half of it"
axes = {"x_label": "micro-batches", "y_label": "bubble (% of compute)", "note": "emulated layers"}
show(compare(numbers, voices, title, **axes), alt=f"{title}; the dots lie near it")

# %% [markdown]
# The measured dots lie a little above the line: every action starts a bit late, the more so on a
# busy machine, and the more actions there are.
#
# A common rule: $m \ge 4p$. But each micro-batch has its price: small matrices compute less
# efficiently, and memory and messages come below.
#
# **GPipe's bubble is $(p-1)/m$ of the compute.**
#
# ## 3 Go back as soon as you can
#
# GPipe's price is memory: the activations of all $m$ micro-batches wait for their backward. But the
# last rank could begin backward after its *first* forward. **1F1B** does that: a **warm-up** of
# forwards, so many that every rank behind has work; then one forward and one backward in turn; then
# the backwards that are left.
#
# That is an order, a **schedule**: for each rank the list of its actions. It says nothing about
# time: an action starts when its rank is free and its input has come. Here is GPipe's. How many
# micro-batches does rank 0 hold at most with 1F1B, for $p = 4$ and $m = 32$?

# %% tags=["predict"]
print(as_text(schedules.gpipe(4, 4)))
print(schedules.gpipe(4, 4)[1][0])
guess_held = predict("micro-batches in flight on rank 0 with 1F1B")

# %% [markdown]
# ### Exercise 1: the order of 1F1B
#
# Lists of `Action(kind, stage, micro_batch)`, with the kinds `"forward"` and `"backward"`. It has
# to work for $m < p$, too. About 5 lines.
#
# <details><summary>Hint: how long is the warm-up?</summary>
# The last rank needs none; each rank before it one forward more than the next.
# </details>
# <details><summary>Hint: the last backwards are missing</summary>
# Whatever was forwarded in the warm-up has to go backward in the end.
# </details>


# %% tags=["exercise"] exercise="pipeline-1"
def one_f_one_b(p, m):
    """For each rank the list of its actions, in the order of 1F1B."""
    schedule = []
    for rank in range(p):
        ### BEGIN SOLUTION: how many forwards first? then in turn, then what is left
        warmup = min(p - 1 - rank, m)
        kinds = ["forward"] * warmup + ["forward", "backward"] * (m - warmup)
        next_of = {"forward": count(), "backward": count()}
        kinds += ["backward"] * warmup
        schedule.append([Action(kind, rank, next(next_of[kind])) for kind in kinds])
        ### END SOLUTION
    return schedule


# %% tags=["check"] exercise="pipeline-1"
check("pipeline-1", one_f_one_b)

# %% tags=["picture"]
reveal(guess_held, simulate(schedules.one_f_one_b(4, 32)).peak_in_flight()[0])
plans = {"GPipe": schedules.gpipe(4, 6), "1F1B": schedules.one_f_one_b(4, 6)}
runs = {name: lab.emulated(plan, batch.times(6)) for name, plan in plans.items()}
shown = {}
for name, real in lab.measure(ranks, runs, turns=3).items():
    paper_ms, real_ms = 1e3 * simulate(plans[name], batch.times(6)).step_s, 1e3 * real.step_s
    print(f"{name:5}: on paper {paper_ms:.0f} ms, measured {real_ms:.0f} ms")
    shown[f"{name}, measured"] = [event for event in real.events if event.kind in COMPUTE_KINDS]
title = "1F1B: the same bubble, fewer activations"
figure = pipelines(shown, title, link="emulated layers")
show(figure, alt=f"{title}: rank 0 holds 4 micro-batches, with GPipe all 6")

# %% [markdown]
# Rank $r$ holds $\min(p - r, m)$, however large the batch. The bubble is GPipe's: each rank still
# waits until the first micro-batch has come, and for the last one's way back.
#
# ### Exercise 2: when does each action end?
#
# You have played schedules; now write the player. Two clocks: when is the rank free, and when is
# the input there? `source_of(action, p)` is the stage that the input comes from, or None; the same
# action of that stage puts it out, and it travels for `message_s`. About 9 lines.
#
# <details><summary>Hint: the action that makes the input</summary>
# <code>action._replace(stage=source)</code>: a forward needs the forward of the stage before.
# </details>
# <details><summary>Hint: whose turn is it?</summary>
# Go over the ranks again and again, and on each run what can run, until nothing is left.
# </details>


# %% tags=["exercise"] exercise="pipeline-2"
def finish_times(schedule, seconds, message_s):
    """{action: when it ends}; seconds of each kind of action; a message takes message_s."""
    p, ends, free_s = len(schedule), {}, [0.0] * len(schedule)
    left = [list(actions) for actions in schedule]
    while any(left):
        ### BEGIN SOLUTION: on each rank, run what has its input
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
# The course's `simulate` does this for every kind of schedule. Play with it (times are in parts of
# a forward): which schedule does a slow message hurt most, and which one gains most from more
# micro-batches? (Interleaved and ZB-H1 come in section 7.)
#
# **A schedule is a list of actions; time follows from it.**
#
# ## 4 An engine that runs any schedule
#
# ### Exercise 3: run a schedule
#
# One rank's part of a step; backwards may come in any order, `i` says which. `isend` returns at
# once, with a handle to wait for; until then, its tensor has to stay as it is. The batch's `x`
# holds the input on the first rank only (there it may be integer tokens), the target is there on
# the last one; elsewhere they only have the shape and the dtype of a message. The last micro-batch
# may be smaller. Add to every `param.grad`, as `backward()` does, the gradient of the *mean* of the
# $m$ losses, nan where it is nan. Leave lists, batch, stage (modes, hooks, what is frozen) and the
# random state as they are. Budget: one message per micro-batch and direction; with 1F1B, what is
# kept alive does not grow with $m$. About 17 lines, 25 minutes.
#
# <details><summary>Hint: x.grad is None</summary>
# To autograd, what came over the wire is a number like any other: ask for its gradient with
# <code>x.requires_grad_()</code>, before the stage computes.
# </details>
# <details><summary>Hint: gradients are too large</summary>
# <code>loss_fn</code> is a mean over one micro-batch. Divide it once, where the loss is.
# </details>
# <details><summary>Hint: too much is kept alive</summary>
# <code>kept.pop(i)</code> takes out; a message is <code>y.detach()</code>, without the graph. A
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
            ### BEGIN SOLUTION: take out, receive or begin at the loss, backward, send
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
# The course's engine, `Pipeline`, does this with receives posted ahead, any shapes, and everything
# below. `split_model` leaves each rank its own layers. The same numbers as one process?

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
# Activations go when their backward is done; only then is 1F1B's promise kept. A single name that
# still holds them is enough to break it, and no number shows that.
#
# **Receive, compute, send without waiting; keep little, and divide the loss once.**
#
# ## 5 Break it: sends that wait
#
# With `dist.send` in place of `isend`, a rank waits until its message is received. Here all ranks
# do nothing but talk. Which schedule hangs?

# %% tags=["predict"]
from course_lib.display import waiting

guess_hang = predict("which one hangs?", choices=("GPipe", "1F1B", "both", "none"))


# %% tags=["failure", "raises-exception"]
def only_talk(rank, schedule):
    x, p = torch.zeros(1), len(schedule)
    for action in schedule[rank]:
        if (source := source_of(action, p)) is not None:
            dist.recv(x, source)
        if (target := target_of(action, p)) is not None:
            dist.send(x, target)


ranks.run(only_talk, schedules.gpipe(4, 8))
try:
    ranks.run(only_talk, schedules.one_f_one_b(4, 8))
except RankError as hang:
    reveal(guess_hang, "1F1B")
    show(waiting(hang.waits, 4), alt="two neighbours wait in a send for each other")
    raise

# %% [markdown]
# Two neighbours meet in the steady phase: one sends an activation, the other one a gradient, and
# nobody receives. `check_schedule(schedule, blocking_sends=True)` tells so before anything runs.
#
# **Between neighbours that send both ways, a send must not wait.**
#
# ## 6 Break it: the loss that was not divided
#
# A well-known code forgot to divide by $m$: every gradient was $m$ times too large. Its loss fell
# nicely. Four ranks train alone, two with SGD, two with Adam; ranks 1 and 3 forget to divide by 8.
# Does Adam's loss curve show it?

# %% tags=["predict"]
guess_adam = predict("does Adam's loss curve show it?", choices=("yes", "no"))


# %%
def curve(rank):
    torch.manual_seed(0)
    model, losses, times = GPT(MODELS["tiny"]), [], (1, 8)[rank % 2]
    sgd, adam = torch.optim.SGD, torch.optim.Adam
    optimizer = sgd(model.parameters(), lr=0.2) if rank < 2 else adam(model.parameters(), lr=3e-3)
    for n in range(30):
        inputs, targets = next_tokens(token_batch(n % 4, batch=8, seq=16, vocab=256))
        loss = token_loss(model(inputs), targets)
        optimizer.zero_grad()
        (times * loss).backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# %% tags=["picture"]
names = ["SGD", "SGD, 8 times too large", "Adam", "Adam, 8 times too large"]
curves = dict(zip(names, ranks.run(curve), strict=True))
apart = max(abs(a - b) for a, b in zip(curves[names[2]], curves[names[3]], strict=True))
reveal(guess_adam, "yes" if apart > 0.05 else "no")
title = f"Adam hides a gradient that is 8 times too large: the losses are {apart:.0e} apart"
voices = {name: Voices(measurement=losses[::3]) for name, losses in curves.items()}
figure = compare(range(0, 30, 3), voices, title, x_label="step", y_label="loss")
show(figure, alt=f"{title}; with SGD the loss falls more slowly")

# %% [markdown]
# SGD's curve shows it, though it may pass for a bad learning rate. Adam divides by the gradient's
# own size: a constant factor is gone, up to $\epsilon$. It comes back where the size matters: in
# clipping, in weight decay that is added to the gradient, and when you change $m$. So compare
# *gradients* with one process, never loss curves.
#
# **A loss that falls proves nothing.**
#
# ## 7 Smaller bubbles
#
# **Interleaved.** Each rank holds $v$ smaller pieces, from all over the model. A micro-batch comes
# by $v$ times, the pipeline fills with pieces that are $v$ times shorter: $\frac{p-1}{vm}$. How
# many times as many messages?

# %% tags=["predict"]
from course_lib.pipeline import PipelineTimes

guess_messages = predict("messages with v = 2, by those of 1F1B, for p = 4")

# %% tags=["picture"]
plans = {"1F1B": schedules.one_f_one_b(4, 8), "interleaved": schedules.interleaved(4, 8, 2)}
plans["ZB-H1"] = schedules.zero_bubble_h1(4, 8)
times = PipelineTimes(forward_s=0.01, backward_input_s=0.01, backward_weight_s=0.01)
runs = {name: lab.emulated(plan, times) for name, plan in plans.items()}
made = lab.measure(ranks, runs, turns=3)
sent = {name: sum(e.kind == "send" for e in made[name].events) for name in plans}
reveal(guess_messages, sent["interleaved"] / sent["1F1B"])
paper = {name: simulate(plan, times) for name, plan in plans.items()}
for name, real in made.items():
    idle = f"idle {paper[name].bubble_fraction:.0%} on paper, {real.bubble_fraction:.0%} measured"
    print(f"{name:11} {idle}, {sent[name]} messages, in flight {real.peak_in_flight}")

# %% [markdown]
# A micro-batch now crosses $pv - 1$ borders in place of $p - 1$, and every rank holds more (the
# counts above are of halves of a stage).
#
# **Zero bubble.** A backward does two things. The input's gradient, $I$: the rank before waits for
# it. The weights' gradient, $W$: nobody waits for it before the end of the step. ZB-H1 runs $I$ at
# once and puts $W$ where the bubble was: $(p-1)(F+I-W)$ is left. By which factor is the bubble
# smaller if all three take equally long?

# %% tags=["predict"]
from course_lib.pipeline.cost import PUBLISHED

guess_zero = predict("bubble of 1F1B by that of ZB-H1")

# %% tags=["picture"]
before_f = cost.one_f_one_b_bubble_s(4, 1, 1, 1)
after_f = cost.zero_bubble_h1_bubble_s(4, 8, 1, 1, 1)
reveal(guess_zero, before_f / after_f)
title = f"ZB-H1: of a bubble of {before_f:g} F, {after_f:g} are left"
events = [event for event in made["ZB-H1"].events if event.kind in COMPUTE_KINDS]
figure = timeline(events, title, link="emulated layers")
show(figure, alt=f"{title}; weight halves fill the end of the step")
print("model   m   1F1B: paper, simulated   ZB-H1: paper, simulated")
for row in PUBLISHED:
    pair_of = schedules.one_f_one_b, schedules.zero_bubble_h1
    rates = [simulate(make(8, row.num_micro_batches), row.times).bubble_rate for make in pair_of]
    pairs = zip((row.one_f_one_b, row.zero_bubble_h1), rates, strict=True)
    print(f"{row.model:5} {row.num_micro_batches:3}", *(f"{a:13.4f} {b:10.4f}" for a, b in pairs))

# %% [markdown]
# On every rank, $W$ waits with its activations: all hold as much as rank 0 did before. The table
# has the bubble rates of a paper (8 stages) and ours, played with the paper's $F$, $I$, $W$ and
# message times.
#
# **More pieces, or halves of backward: both pay with messages or memory for a smaller bubble.**
#
# ## 8 A slow wire turns the rule round
#
# Four GPUs joined by PCIe trained models of 100M and 300M parameters faster with $m = p$, the
# largest bubble, than with $m = 4p$. Here: the batch of section 2, over a wire with latency. Which
# one is faster?

# %% tags=["predict"]
from course_lib.core import Link

wire = Link(name="slow wire", latency_s=12e-3, bytes_per_s=1e9)
guess_m = predict("faster with 1F1B over the slow wire", choices=("m = 4", "m = 16"))

# %% tags=["picture"]
numbers, both = [4, 8, 16], {"1F1B": schedules.one_f_one_b, "GPipe": schedules.gpipe}
pairs = {(name, m): make(4, m) for name, make in both.items() for m in numbers}
runs = {key: lab.emulated(plan, batch.times(key[1], wire)) for key, plan in pairs.items()}
made, curves = lab.measure(Ranks(4, link=wire), runs, turns=2), {}
for name, make in both.items():
    played = [step_parts(4, m, batch, wire, make).step_s * 1e3 for m in numbers]
    steps = [[s * 1e3 for s in made[name, m].seconds] for m in numbers]
    curves[name] = Voices(simulation=played, measurement=steps)

# %% tags=["picture"]
few, many = (made["1F1B", m].step_s for m in (4, 16))
reveal(guess_m, "m = 4" if few < many else "m = 16")
title = f"1F1B on a slow wire: {few * 1e3:.0f} ms with m = 4, {many * 1e3:.0f} ms with m = 16"
axes = {"x_label": "micro-batches", "y_label": "step (ms)", "note": f"emulated {wire} and layers"}
show(compare(numbers, curves, title, **axes), alt=f"{title}; on paper, GPipe gains from more")
print(" m   compute   bubble     wire   (ms, 1F1B on paper)")
for m in numbers:
    parts = step_parts(4, m, batch, wire)
    shown = (1e3 * second for second in (parts.compute_s, parts.bubble_s, parts.wire_s))
    print(f"{m:2}", *(f"{number:9.1f}" for number in shown))

# %% [markdown]
# 1F1B is a conversation: rank 0's next forward waits for a gradient that waits for a forward. In
# every $p$ micro-batches, $2(p-1)$ messages have nothing to hide behind. GPipe has only the
# $2(p-1)$ with which the pipeline fills and empties; its price is memory. The wire's part grows
# with $m$, the bubble shrinks: where they meet is the best $m$.
#
# **How many micro-batches: as many as the latency allows.**
#
# ## 9 Stages are not equally long
#
# The slowest stage sets the pace of all. GPT-2 small has 12 blocks; its output layer computes as
# much as how many of them?

# %% tags=["predict"]
from course_lib.cost.flops import forward_flop

flop = forward_flop(MODELS["gpt2"], 1, 1024)
head = flop.pop("logits")
guess_head = predict("the output layer of GPT-2, in blocks")

# %% [markdown]
# ### Exercise 4: cut the layers
#
# How many layers in a row does each of $p$ stages get, none empty, so that the slowest is as fast
# as it can be? Trying all cuts is allowed. About 4 lines.
#
# <details><summary>Hint: all cuts</summary>
# <code>combinations(range(1, n), p - 1)</code> are the places to cut; <code>pairwise</code> of
# (0, *cut, n) gives where each stage begins and ends.
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

# %% tags=["picture"]
layers = [0.0, *[1.0] * 12, 12 * head / sum(flop.values())]  # embedding, blocks, output layer
reveal(guess_head, layers[-1])
steps, cuts = {}, {"equally many": [4, 3, 3, 4], "balanced": balance.balance_stages(layers, 4)}
for name, cut in cuts.items():
    each = balance.stage_times(layers, cut)
    times = PipelineTimes(forward_s=each, backward_input_s=each, backward_weight_s=each)
    steps[name] = simulate(schedules.one_f_one_b(4, 3), times)
    print(f"{name:12} {cut}: a step takes {steps[name].step_s:.0f} blocks")
title = f"Equally many layers: {steps['equally many'].bubble_fraction:.0%} of the time is lost"
figure = timeline(steps["equally many"].events(), title, unit="blocks")
show(figure, alt=f"{title}; everybody waits for the output layer")

# %% [markdown]
# And the output layer *is* the embedding: one matrix, used on the first and on the last stage. Both
# hold a copy. In backward each gets the gradient of its own use.
#
# ### Exercise 5: a tied weight
#
# After backward, leave in both copies the gradient of *both* uses. `ends` is the group of first and
# last stage, wherever they are in the world; with one stage, `ends` has one member. A frozen weight
# has no gradient; that of another one may be transposed. Budget: one message each way, nothing from
# the middle. About 2 lines.
#
# <details><summary>Hint: rank 1 fails</summary>
# In the middle <code>weight</code> is None: these ranks have nothing to do.
# </details>


# %% tags=["exercise"] exercise="pipeline-5"
def sum_tied(weight, ends):
    """weight: this rank's copy, or None; its .grad is summed over the group `ends`."""
    ### BEGIN SOLUTION: who has a gradient adds it
    if weight is not None and weight.grad is not None:
        dist.all_reduce(weight.grad, group=ends)
    ### END SOLUTION


# %% tags=["check"] exercise="pipeline-5"
check("pipeline-5", sum_tied)

# %% [markdown]
# With equal gradients and equal optimizer state the copies stay equal by themselves. (Our model in
# section 4 was tied: that is part of why its numbers came out.)
#
# **Balance by time, not by layers; a weight that is used twice has one gradient.**
#
# ## 10 Micro-batches inside a sequence
#
# A batch of one sequence cannot be cut? With causal attention the first tokens do not need the
# later ones: **TeraPipe** cuts the *sequence* into pieces. Is the first piece longer or shorter
# than the last one?

# %% tags=["predict"]
guess_piece = predict("the first piece of the best cut", choices=("longer", "equal", "shorter"))

# %% tags=["picture"]
from course_lib.pipeline import token_pipeline as tokens

cost = tokens.TokenCost(piece_s=50e-6, token_s=1e-6, pair_s=4e-9)
numbers, curves = [1, 2, 4, 8, 16, 32], {}
balanced = tokens.balanced_cut(2048, 8, cost)
reveal(guess_piece, "longer" if balanced[0] > balanced[-1] else "shorter")
cuts = {"equal pieces": tokens.even_cut, "balanced": lambda *of: tokens.balanced_cut(*of, cost)}
for name, cut in cuts.items():
    taken_s = [tokens.token_forward_s(cut(2048, n), 4, cost) for n in numbers]
    curves[name] = Voices(formula=[1e3 * second for second in taken_s])
title = f"Eight pieces of one sequence: {balanced[0]} tokens first, {balanced[-1]} last"
axes = {"x_label": "pieces", "y_label": "forward (ms)"}
show(compare(numbers, curves, title, **axes), alt=f"{title}; later tokens attend to more")

# %% [markdown]
# A later token attends to more, so equally long pieces hold ever fewer of them. Each piece also
# pays a fixed price to start: there the curves end.
#
# ## 11 The real thing
#
# `torch.distributed.pipelining` has the same schedules. Two ranks, the same stages, 1F1B with 8
# micro-batches. (PyTorch does not sum tied weights: here they are untied.) Equal gradients?

# %% tags=["predict"]
from copy import deepcopy

from course_lib.ranks.timing import time_interleaved

guess_equal = predict("gradients equal to the last bit?", choices=("yes", "no"))


# %%
def side_by_side(rank, spec):
    from torch.distributed import pipelining

    torch.manual_seed(0)
    ours = Pipeline(split_model(GPT(spec), 2, rank), token_loss)
    part = deepcopy(ours.stage.chunks[0])
    stage = pipelining.PipelineStage(part, rank, 2, torch.device("cpu"))
    theirs = pipelining.Schedule1F1B(stage, 8, loss_fn=token_loss)
    x, y = next_tokens(token_batch(0, batch=8, seq=32, vocab=2048))
    first, plan = [x] if rank == 0 else [], schedules.one_f_one_b(2, 8)
    steps = {"ours": (ours.stage, lambda: ours.step(plan, x.chunk(8), y.chunk(8)))}
    steps["PyTorch's"] = part, lambda: theirs.step(*first, target=y)
    seconds = time_interleaved(steps)
    pairs = zip(ours.stage.parameters(), part.parameters(), strict=True)
    return all(torch.equal(one.grad, other.grad) for one, other in pairs), seconds


# %%
from dataclasses import replace

by_rank = Ranks(2).run(side_by_side, replace(MODELS["small"], tied=False))
reveal(guess_equal, "yes" if all(equal for equal, _ in by_rank) else "no")
for name, seconds in by_rank[0][1].items():
    print(f"{name:9} {seconds * 1e3:.0f} ms a step")

# %% [markdown]
# ## What to keep
#
# - A schedule is a list of actions for each rank; one engine runs any, one simulator plays any.
# - Bubble $\frac{p-1}{m}$; in flight $m$ with GPipe, $p - r$ with 1F1B. Interleaved divides the
#   bubble by $v$, and multiplies messages; ZB-H1 fills it with weight gradients.
# - Sends must not wait; activations must go; the loss is divided once.
# - On a slow wire, more micro-batches can be slower.
# - Balance stages by time; sum the gradients of a tied weight.
#
# References: Huang et al. 2019 (GPipe); Narayanan et al. 2021 (1F1B, interleaved); Qi et al. 2024
# (zero bubble); Li et al. 2021 (TeraPipe).
#
# You can now split a model over ranks by matrices (07) and by layers. Data parallelism still keeps
# a copy of everything on each rank: lesson 09 stops that.
