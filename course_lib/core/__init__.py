"""The words of the course, in pure Python: events, ledgers, model specs, links, units, errors.

records       `Event`, `Ledger`, `RunRecord`: what ranks do and hold, and the file of a run
specs         `ModelSpec`: the sizes of a transformer
layers        the matrices of its layers, from which all counts follow
presets       named models: GPT-2, Llama, those of the papers, published files, and small ones
parallelism   `Parallelism`: the sizes of the parallel axes (dp, tp, pp, cp) and the ZeRO stage
recipes       precision recipes: bytes per parameter for weights, gradients, optimizer state
links         `Link`: latency and bandwidth; NVLink, PCIe, InfiniBand, Ethernet
cycles        the shortest cycle of ranks that wait for each other
call_names    what a collective is for, for the tracer that compares the ranks' calls
chrome_trace  runs as traces for Perfetto, TensorBoard and Chrome
units         bytes, seconds and rates in words
html_page     one page that needs nothing else: its style, tables, and every text escaped
files         write a file whole or not at all
course_files  where the lessons lie, in a clone and where a wheel was installed
errors        `CourseError`, `ShapeError`, `MeshError`
"""

from course_lib.core.errors import CourseError, MeshError, ShapeError
from course_lib.core.links import ETHERNET, INFINIBAND, NVLINK, PCIE, Link, TwoLevelLink
from course_lib.core.parallelism import Parallelism
from course_lib.core.presets import MODELS, find_model
from course_lib.core.records import (
    COMMUNICATION_KINDS,
    COMPUTE_KINDS,
    KINDS,
    Event,
    Ledger,
    RunRecord,
)
from course_lib.core.specs import ModelSpec
from course_lib.hub.config import read_config

__all__ = [
    "COMMUNICATION_KINDS",
    "COMPUTE_KINDS",
    "ETHERNET",
    "INFINIBAND",
    "KINDS",
    "MODELS",
    "NVLINK",
    "PCIE",
    "CourseError",
    "Event",
    "Ledger",
    "Link",
    "MeshError",
    "ModelSpec",
    "Parallelism",
    "RunRecord",
    "ShapeError",
    "TwoLevelLink",
    "find_model",
    "read_config",
]
