"""Shards of a flat parameter; memory and traffic of each ZeRO stage. Notebook 09_zero."""

from course_lib.core.live import Bars, Drawing, Live, Squares
from course_lib.core.parallelism import Parallelism
from course_lib.core.presets import MODELS
from course_lib.core.recipes import RECIPES, find_recipe
from course_lib.core.units import GIB, format_seconds
from course_lib.cost.hardware import find_device, links_of_rings
from course_lib.cost.params import count_params
from course_lib.cost.traffic import traffic_s
from course_lib.memory.formulas import model_states
from course_lib.zero.cost import ParamTraffic, zero_traffic
from course_lib.zero.flat_layout import FlatLayout

DEVICE = find_device("h100")
LINKS = links_of_rings(DEVICE)
FOUR = {"weight": (3, 4), "bias": (4,), "scale": (1,), "shift": (6,)}


def states_by_stage(
    model: str, recipe: str, p: int, link: str, micro_batches: int
) -> dict[str, dict[str, int]]:
    """Return bytes by kind of a rank without ZeRO and in each stage, by name and time of sends."""
    num_params, found = count_params(MODELS[model]), {}
    traffic = [ParamTraffic(num_bytes=num_params * find_recipe(recipe).weight_bytes)]
    for zero in range(4):
        sends_s = traffic_s(zero_traffic(zero, traffic, micro_batches), p, LINKS[link])
        states = model_states(num_params, recipe, parallelism=Parallelism(dp=p, zero=zero))
        found[f"{_name(zero)}, sends {format_seconds(sends_s)}"] = states
    return found


def stages_drawing(model: str, recipe: str, p: int, link: str, micro_batches: int) -> Drawing:
    """Return a bar for each stage, and as the finding the lowest stage that fits."""
    stages = states_by_stage(model, recipe, p, link, micro_batches)
    fitting = [
        zero
        for zero, states in enumerate(stages.values())
        if sum(states.values()) <= DEVICE.memory_bytes
    ]
    who, gpu = f"The states of {model} on {p} rank{'s' * (p > 1)}", DEVICE.name.upper()
    how = f"with {_name(fitting[0])}" if fitting else "at no stage"
    rows = {
        name: {kind: num_bytes / GIB for kind, num_bytes in states.items()}
        for name, states in stages.items()
    }
    limit = (DEVICE.memory_bytes / GIB, f"{gpu} holds {DEVICE.memory_bytes / GIB:.0f} GiB")
    bars = Bars(rows=rows, x_label="states of a rank (GiB)", limit=limit)
    return Drawing(finding=f"{who} fit into an {gpu} {how}", panels=[bars])


def _name(zero: int) -> str:
    return f"stage {zero}" if zero else "DDP"


STAGES = Live(
    name="zero_explorer",
    lesson="09_zero",
    question="Which stage is the first that fits, and what does it send for that?",
    choices={
        "model": (["gpt2-xl", "llama-3b", "llama-8b", "llama-70b"], "llama-8b"),
        "recipe": ([*RECIPES], "bf16"),
        "p": ([2**n for n in range(11)], 8),
        "link": ([*LINKS], "NVLink"),
        "micro_batches": ([1, 2, 4, 8, 16], 1),
    },
    compute=stages_drawing,
)


def four_tensors_finding(p: int) -> str:
    """Return how many numbers a rank holds of four tensors, and how many are padding."""
    layout = FlatLayout(tuple(FOUR.values()), p)
    left = layout.padded_numel - layout.numel
    ranks = f"{p} rank{'s' * (p > 1)}"
    return f"{layout.numel} numbers on {ranks}: {layout.shard_numel} each, {left} of padding"


def shards_drawing(p: int) -> Drawing:
    """Return a box for each number: above by its tensor, below by the rank that holds it."""
    layout = FlatLayout(tuple(FOUR.values()), p)
    padding = [("–", -1)] * (layout.padded_numel - layout.numel)
    sizes = zip("wbst", layout.numels, strict=True)
    tensors = [(letter, -1) for letter, numel in sizes for _ in range(numel)]
    shards = [(f"{rank}", rank) for rank in range(p) for _ in range(layout.shard_numel)]
    return Drawing(
        finding=four_tensors_finding(p),
        panels=[
            Squares(
                rows={"tensor": tensors + padding, "rank": shards},
                x_label="the flat parameter: w is a number of weight, b of bias, s of scale, "
                "t of shift; – is padding",
            )
        ],
    )


SHARDS = Live(
    name="shards_explorer",
    lesson="09_zero",
    question="Where are tensors cut, and what is padded?",
    choices={"p": (1, 6, 4)},
    compute=shards_drawing,
)
