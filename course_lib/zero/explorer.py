"""The explorers of notebook 09_zero: shards of a flat parameter; memory and traffic of a stage."""

from matplotlib.figure import Figure

from course_lib.core.records import Ledger
from course_lib.display.explore import Explore, explore
from course_lib.display.memory import memory
from course_lib.zero.live import DEVICE, SHARDS, STAGES, states_by_stage
from course_lib.zero.pictures import four_tensors


def shards_explorer() -> Explore:
    """Return a flat parameter of four tensors, with a slider for the number of ranks."""
    return explore(lambda p: four_tensors(p)[0], lambda p: four_tensors(p)[1], **SHARDS.choices)


def zero_explorer() -> Explore:
    """Return bars by stage, with sliders for model, recipe, ranks, link and micro-batches."""
    return explore(draw_stages, STAGES.finding, **STAGES.choices)


def draw_stages(model: str, recipe: str, p: int, link: str, micro_batches: int) -> Figure:
    """Draw a bar for plain data parallelism and for each stage, beside the device's memory."""
    named, values = {}, (model, recipe, p, link, micro_batches)
    for name, states in states_by_stage(*values).items():
        named[name] = Ledger()
        named[name].add(0.0, **states)
    return memory(named, STAGES.compute(*values).finding, limit_bytes=DEVICE.memory_bytes)
