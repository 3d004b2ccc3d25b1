"""The words of the course: units, errors, events, ledgers, run records, links. Pure Python."""

from course_lib.core.errors import CourseError, MeshError, ShapeError
from course_lib.core.links import ETHERNET, INFINIBAND, NVLINK, PCIE, Link, TwoLevelLink
from course_lib.core.presets import MODELS, find_model
from course_lib.core.records import COMMUNICATION_KINDS, KINDS, Event, Ledger, RunRecord
from course_lib.core.specs import ModelSpec, read_config

__all__ = [
    "COMMUNICATION_KINDS",
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
    "RunRecord",
    "ShapeError",
    "TwoLevelLink",
    "find_model",
    "read_config",
]
