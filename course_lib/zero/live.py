"""Memory and traffic of each ZeRO stage. Notebook 09_zero."""

from course_lib.core.live import Bars, Drawing, Live
from course_lib.core.parallelism import Parallelism
from course_lib.core.presets import MODELS
from course_lib.core.recipes import RECIPES, find_recipe
from course_lib.core.units import GIB, format_seconds
from course_lib.cost.hardware import find_device, links_of_rings
from course_lib.cost.params import count_params
from course_lib.cost.traffic import traffic_s
from course_lib.memory.formulas import model_states
from course_lib.zero.cost import ParamTraffic, zero_traffic

DEVICE = find_device("h100")
LINKS = links_of_rings(DEVICE)


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
