"""Sentences beside predicted plans: whose constants, how far to trust them, what short words mean.

`table_notes` for a list of plans, `plan_notes` for one. Notebook 12_planner.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from course_lib.core.parallelism import ZERO_STAGES
from course_lib.core.units import format_bytes, format_seconds
from course_lib.cost.roofline import data_parallel_tokens, fsdp_tokens, matmul_intensity, roof_of
from course_lib.planner.communication import context_bytes, context_s
from course_lib.planner.compute import large_products
from course_lib.planner.constants import MEASURED, SOFTWARE, Software
from course_lib.planner.predicting import predict
from course_lib.planner.prediction import PredictedStep

ROOMY = 0.9  # of the usable memory: a plan that needs more leaves little room
ZERO_WORDS = {
    1: "ZeRO stage 1 shards the optimizer state",
    2: "ZeRO stage 2 shards gradients and optimizer state",
    3: "ZeRO stage 3 or FSDP shards parameters, gradients and optimizer state",
}
SCHEDULE_WORDS = {
    "1f1b": "one forward, one backward",
    "interleaved": "1F1B with several model chunks per rank",
    "zb-h1": "zero-bubble schedule H1 (Qi et al. 2024), which Megatron-LM has only in forks",
}


def table_notes(steps: Sequence[PredictedStep], others: Iterable[PredictedStep] = ()) -> list[str]:
    """Return the sentences under a table of plans, numbered from 1 and the fastest first.

    others   more plans that fit, the fastest first
    """
    notes = [legend(steps), software_note(steps), trust_note(steps), room_note(steps, others)]
    return [note for note in notes if note]


def plan_notes(step: PredictedStep) -> list[str]:
    """Return the sentences under the bill of one plan."""
    notes = [roofline_note(step), software_note([step]), trust_note([step]), context_note(step)]
    return [note for note in notes if note]


def roofline_note(step: PredictedStep) -> str:
    """Return what limits this plan by the roofline of lesson 01b: its products, and its gradients.

    The link is the one between the ranks that share parameters, in one direction; what the links
    and the products reach of their bandwidth and peak is in the bill.
    """
    plan, cluster = step.plan, step.cluster
    number_bytes = 4 if plan.precision == "fp32" else 2
    roof = roof_of(cluster.device, "fp32" if plan.precision == "fp32" else "bf16")
    sizes = [one[:3] for one in large_products(step.model, plan)]
    intensity, (m, depth, n) = min((matmul_intensity(*one, number_bytes), one) for one in sizes)
    said = (
        f"By the roofline (lesson 01b): the product of lowest intensity, [{m}, {depth}] @ "
        f"[{depth}, {n}], has {intensity:,.0f} FLOP per byte, and the ridge is {roof.ridge:.0f}: "
        f"bound by {roof.bound(intensity)}."
    )
    axes = plan.parallelism
    size = axes.dp * axes.cp
    if size == 1:
        return said
    link = cluster.link(size, axes.tp)
    if axes.zero == 3:
        needed = fsdp_tokens(size, roof.flop_per_s, link.bytes_per_s, number_bytes)
        hidden = "forward hides the gathers of parameters"
    else:
        grad_bytes = max(cluster.software.recipe.grad_bytes, 4) // (2 if axes.zero else 1)
        needed = data_parallel_tokens(size, roof.flop_per_s, link.bytes_per_s, grad_bytes)
        hidden = "backward hides the reduction of gradients"
    tokens = plan.micro_batch * plan.seq // axes.cp
    return (
        f"{said} At the peak, {hidden} from {needed:,.0f} tokens per rank and micro-batch on; "
        f"here are {tokens:,}."
    )


def context_note(step: PredictedStep) -> str:
    """Return what a ring of context parallelism sends and attention hides; "" without cp.

    The bill has what is not hidden among the messages of tensor parallelism.
    """
    plan, cluster = step.plan, step.cluster
    if plan.parallelism.cp == 1:
        return ""
    sent = " and ".join(map(format_bytes, context_bytes(step.model, plan)))
    exposed_s = sum(context_s(step.model, cluster, plan))
    hides = f"all but {format_seconds(exposed_s)}" if exposed_s else "all of it"
    return (
        f"Context parallelism (lesson 15), as a ring in zigzag: for a layer of a micro-batch a "
        f"rank sends {sent} in forward and backward; computing attention hides {hides}."
    )


def legend(steps: Sequence[PredictedStep]) -> str:
    """Return what the short words in these plans mean."""
    plan = steps[0].plan
    words = [
        f"{plan.num_micro_batches} x {plan.micro_batch}: per step, each of the dp replicas "
        f"computes {plan.num_micro_batches} micro-batch{'es' * (plan.num_micro_batches > 1)} of "
        f"{plan.micro_batch}"
    ]
    plans = [step.plan for step in steps]
    stages = sorted({plan.parallelism.zero for plan in plans} - {0})
    words += [f"zero{stage}: {ZERO_WORDS[stage]}" for stage in stages]
    if any(plan.parallelism.sequence_parallel for plan in plans):
        words.append("sp: sequence parallelism beside tp")
    if any(plan.parallelism.cp > 1 for plan in plans):
        words.append("cp: ranks that split every sequence")
    if any(plan.parallelism.ep > 1 for plan in plans):
        words.append("ep: ranks that share the experts of a layer, out of those of dp and tp")
    if any(plan.parallelism.expert_tensor != plan.parallelism.tp for plan in plans):
        words.append("etp: ranks that split each expert, in place of tp")
    if any(plan.num_model_chunks > 1 for plan in plans):
        words.append("chunks: model chunks per rank")
    if any(plan.recompute == "full" for plan in plans):
        words.append("recompute full: every layer computes its forward again in backward")
    schedules = {plan.schedule for plan in plans if plan.parallelism.pp > 1}
    words += [f"{name}: {said}" for name, said in SCHEDULE_WORDS.items() if name in schedules]
    words.append("besides compute: what takes most of the step after computing")
    return "; ".join(words) + "."


def software_note(steps: Sequence[PredictedStep]) -> str:
    """Return whose constants the times assume, and what plans it cannot run take elsewhere."""
    software = steps[0].cluster.software
    said = f"Times assume the constants of {software.title}"
    strange = [
        number
        for number, step in enumerate(steps, 1)
        if step.plan.parallelism.zero not in software.zero
    ]
    if not strange:
        alone = len(steps) == 1 and not _runs(software, steps[0])
        return said + (f", which has no schedule {steps[0].plan.schedule}." if alone else ".")
    lacks = " or ".join(
        "ZeRO-3 (FSDP)" if stage == 3 else f"ZeRO-{stage}"
        for stage in ZERO_STAGES
        if stage not in software.zero
    )
    which = _numbered(strange) if len(steps) > 1 else "this plan"
    said += f", which has no {lacks}, so it cannot run {which}. "
    said += _elsewhere(steps[strange[0] - 1], f"plan {strange[0]}" if len(steps) > 1 else which)
    runs = [number for number, step in enumerate(steps, 1) if _runs(software, step)]
    return said + (f" The first plan that {software.title} runs is plan {runs[0]}." if runs else "")


def _elsewhere(step: PredictedStep, name: str) -> str:
    """Return what a plan takes with the constants of a program that runs it."""
    zero = step.plan.parallelism.zero
    routed = step.model.experts is not None
    programs = [one for one in SOFTWARE.values() if zero in one.zero]
    other = min(programs, key=lambda one: (one.host_routed_s > 0) != routed)  # for such models
    elsewhere = replace(step.cluster, software=other)
    simulated = step.plan.schedule != "zb-h2"  # which is a formula only
    other_s = predict(step.model, elsewhere, step.plan, simulated=simulated).step_s
    bias = "optimistic" if other_s > step.step_s else "pessimistic"
    of = "FSDP" if zero == 3 else f"ZeRO-{zero}"
    if f"{other_s:.2f}" == f"{step.step_s:.2f}":
        return f"With the constants of {other.title}, which has {of}, {name} takes as long."
    return (
        f"The time of {name} is {bias} for {of}: with the constants of {other.title} it takes "
        f"{other_s:.2f} s instead of {step.step_s:.2f} s "
        f"({100 * (other_s / step.step_s - 1):+.1f} %)."
    )


def _runs(software: Software, step: PredictedStep) -> bool:
    axes = step.plan.parallelism
    return axes.zero in software.zero and (axes.pp == 1 or step.plan.schedule in software.schedules)


def trust_note(steps: Sequence[PredictedStep]) -> str:
    """Return how far measured runs were from their predictions, and what that means here."""
    first = steps[0]
    measured = MEASURED.get(first.cluster.name)
    if not measured:
        return (
            f"No measured runs score the profile {first.cluster.name}: its times give an order of "
            "plans at best (docs/planner.md)."
        )
    beyond = f"; {measured.beyond}" if measured.beyond else ""
    said = (
        f"Measured: the median error of the predicted step is {100 * measured.error:.1f} % on "
        f"{measured.count} runs ({measured.runs}{beyond}; docs/planner.md). Constants were fitted "
        f"on {measured.fitted}: expect more elsewhere."
    )
    if measured.experts != (first.model.experts is not None):
        with_them = "all" if measured.experts else "none"
        said += f" Of these runs, {with_them} are of models with experts."
    if len(steps) == 1:
        error_s = format_seconds(measured.error * first.step_s)
        return f"{said} Here {100 * measured.error:.1f} % is {error_s}."
    near = sum(step.step_s <= first.step_s * (1 + measured.error) for step in steps)
    if near == 1:
        return f"{said} None of the other {len(steps) - 1} plans here is within that of plan 1."
    which = f"The first {near} of these" if near < len(steps) else "All"
    return (
        f"{said} {which} {len(steps)} plans are within that of plan 1: take them as equally fast."
    )


def room_note(steps: Sequence[PredictedStep], others: Iterable[PredictedStep] = ()) -> str:
    """Return the next plan with more room, where the first fills its GPU; else nothing."""
    first = steps[0]
    usable = first.cluster.usable_bytes
    if first.memory_bytes <= ROOMY * usable:
        return ""
    said = f"Plan 1 needs {100 * first.memory_bytes / usable:.0f} % of the usable memory; "
    for number, step in enumerate([*steps, *others], 1):
        if step.memory_bytes <= ROOMY * usable:
            name = f"plan {number}" if number <= len(steps) else str(step.plan)
            return (
                f"{said}the next with more room is {name}: {format_bytes(step.memory_bytes)} "
                f"({100 * step.memory_bytes / usable:.0f} %), {step.step_s:.2f} s per step "
                f"({100 * (step.step_s / first.step_s - 1):+.1f} %)."
            )
    return f"{said}no plan that fits leaves more than {100 * (1 - ROOMY):.0f} % of it."


def _numbered(numbers: Sequence[int]) -> str:
    *most, last = map(str, numbers)
    return f"plans {', '.join(most)} and {last}" if most else f"plan {last}"
