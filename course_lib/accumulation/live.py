"""The worked graph, event by event, by the chain rule. Notebook 02_accumulation."""

from course_lib.accumulation.worked_graph import (
    GRAPH,
    ITEMS,
    LR,
    PARAMS,
    START,
    GraphState,
    Item,
    graph_words,
    number_text,
)
from course_lib.core.live import Drawing, Live, Squares

WAYS = {"add up, then step": 2, "step after each": 1}  # items per step
NumberOf = dict[str, float]


def forward(params: NumberOf, item: Item) -> NumberOf:
    """Return the value of each node."""
    values = params | vars(item)
    values["x1 * w1"] = values["x1"] * values["w1"]
    values["x2 * w2"] = values["x2"] * values["w2"]
    values["y_pred"] = values["x1 * w1"] + values["x2 * w2"] + values["b"]
    values["error"] = values["y_pred"] - values["target"]
    values["loss"] = values["error"] ** 2
    return values


def backward(values: NumberOf) -> NumberOf:
    """Return the gradient of the loss by node; inputs and the target have none."""
    slope = 2 * values["error"]
    grads = {"loss": 1.0} | dict.fromkeys(("error", "y_pred", "x1 * w1", "x2 * w2", "b"), slope)
    return grads | {"w1": slope * values["x1"], "w2": slope * values["x2"]}


def chain_rule_states(items_per_step: int) -> list[GraphState]:
    """Return the states that `graph_states` gets from autograd."""
    params, grads = dict(zip(PARAMS, START, strict=True)), NumberOf()
    seen = [GraphState(words="start", values=params, fresh=PARAMS)]
    for number, item in enumerate(ITEMS, 1):
        values, words = forward(params, item), f"item {number}: forward"
        fresh = tuple(name for name in GRAPH if name not in PARAMS)
        seen.append(GraphState(words=words, values=values, grads=grads, fresh=fresh))
        new, added = backward(values), " adds its gradients" if grads else ""
        new |= {name: grads.get(name, 0.0) + new[name] for name in PARAMS}
        words = f"item {number}: backward{added}"
        seen.append(GraphState(words=words, values=values, grads=new, fresh=tuple(new)))
        grads = {name: new[name] for name in PARAMS}
        if number % items_per_step == 0:
            params = {name: params[name] - LR * grads[name] for name in PARAMS}
            grads, words = NumberOf(), f"the optimizer steps after item {number}"
            seen.append(GraphState(words=words, values=params, fresh=PARAMS))
    return seen


def graph_drawing(way: str, event: int) -> Drawing:
    """Return the value and the gradient of each node; what the event changed stands out."""
    states = chain_rule_states(WAYS[way])
    event = min(event, len(states) - 1)
    state, before = states[event], states[event - 1] if event else GraphState(words="nothing")

    def boxes(name: str) -> list[tuple[str, int]]:
        return [
            (number_text(numbers[name]) if name in numbers else "", color)
            for numbers, old, color in (
                (state.values, before.values, 0),
                (state.grads, before.grads, 1),
            )
            for color in [-1 if numbers.get(name) == old.get(name) else color]
        ]

    return Drawing(
        finding=f"{graph_words(state)} ({way})",
        panels=[
            Squares(
                rows={name: boxes(name) for name in GRAPH},
                x_label="left the value, right the gradient of each node; pale: as it was before",
            )
        ],
        note="y_pred = x1 * w1 + x2 * w2 + b, error = y_pred - target, loss = error squared",
    )


WORKED = Live(
    name="graph_explorer",
    lesson="02_accumulation",
    question="Is one step after both items the same as a step after each?",
    choices={"way": [*WAYS], "event": (0, 6, 4)},
    compute=graph_drawing,
)
