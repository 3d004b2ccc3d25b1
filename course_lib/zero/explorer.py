"""The explorers of notebook 09_zero: shards of a flat parameter; memory and traffic of a stage."""

from matplotlib.figure import Figure

from course_lib.core.parallelism import Parallelism
from course_lib.core.presets import MODELS
from course_lib.core.recipes import RECIPES, find_recipe
from course_lib.core.records import Ledger
from course_lib.core.units import format_seconds
from course_lib.cost.hardware import find_device, links_of_rings
from course_lib.cost.params import count_params
from course_lib.cost.traffic import traffic_s
from course_lib.display.explore import Explore, explore
from course_lib.display.memory import memory
from course_lib.memory.formulas import model_states
from course_lib.zero.cost import ParamTraffic, zero_traffic
from course_lib.zero.pictures import four_tensors

_MODELS = ["gpt2-xl", "llama-3b", "llama-8b", "llama-70b"]
_DEVICE = find_device("h100")
_LINKS = links_of_rings(_DEVICE)


def shards_explorer() -> Explore:
    """Return a flat parameter of four tensors, with a slider for the number of ranks."""
    return explore(lambda p: four_tensors(p)[0], lambda p: four_tensors(p)[1], p=(1, 6, 4))


def zero_explorer() -> Explore:
    """Return bars by stage, with sliders for model, recipe, ranks, link and micro-batches."""
    return explore(
        draw_stages,
        stages_alt,
        model=(_MODELS, "llama-8b"),
        recipe=([*RECIPES], "bf16"),
        p=([2**n for n in range(11)], 8),
        link=([*_LINKS], "NVLink"),
        micro_batches=([1, 2, 4, 8, 16], 1),
    )


def draw_stages(model: str, recipe: str, p: int, link: str, micro_batches: int) -> Figure:
    """Draw a bar for plain data parallelism and for each stage, beside the device's memory."""
    named = {}
    for zero, ledger in _ledgers(model, recipe, p).items():
        num_bytes = count_params(MODELS[model]) * find_recipe(recipe).weight_bytes
        calls = zero_traffic(zero, [ParamTraffic(num_bytes=num_bytes)], micro_batches)
        communication_s = traffic_s(calls, p, _LINKS[link])
        named[f"{_name(zero)}, sends {format_seconds(communication_s)}"] = ledger
    return memory(named, stages_alt(model, recipe, p), limit_bytes=_DEVICE.memory_bytes)


def stages_alt(model: str, recipe: str, p: int, **_others: object) -> str:
    """Return the finding as a sentence: the lowest stage that fits."""
    ledgers = _ledgers(model, recipe, p).items()
    fitting = [zero for zero, one in ledgers if one.peak_bytes() <= _DEVICE.memory_bytes]
    who = f"The states of {model} on {p} rank{'s' * (p > 1)}"
    if not fitting:
        return f"{who} fit into an {_DEVICE.name.upper()} at no stage"
    return f"{who} fit into an {_DEVICE.name.upper()} with {_name(fitting[0])}"


def _name(zero: int) -> str:
    return f"stage {zero}" if zero else "DDP"


def _ledgers(model: str, recipe: str, p: int) -> dict[int, Ledger]:
    found = {}
    for zero in range(4):
        found[zero] = Ledger()
        states = model_states(
            count_params(MODELS[model]), recipe, parallelism=Parallelism(dp=p, zero=zero)
        )
        found[zero].add(0.0, **states)
    return found
