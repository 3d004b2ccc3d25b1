"""What a method does not train as one process does: one table, each row with its reason."""

from dataclasses import dataclass

from tests.law.modules import HARD


@dataclass(frozen=True)
class Refused:
    """The method says so in a sentence with these words, a regular expression, on every rank."""

    words: str


DATA_PARALLEL = (
    "DDP",
    "NaiveDDP",
    "LocalSGD",
    "DiLoCo",
    "DataParallel",
    "ZeRO1",
    "ZeRO2",
    "ZeRO3",
    "ShardedOptimizer",
    "FSDP",
)

# methods, hard modules, and the reason why they are left out, or the refusal that is looked for
ROWS: list[tuple[tuple[str, ...], tuple[str, ...], str | Refused]] = [
    (DATA_PARALLEL, ("dropout", "GPT, dropout"), "each replica draws masks for its own part"),
    (
        ("ZeRO3",),
        ("choice",),
        "a module gathers its parameters when it is called, so all ranks have to call the same",
    ),
]
NOT_GPT = tuple(name for name in HARD if not name.startswith("GPT"))
ROWS.append((("tensor parallel",), NOT_GPT, Refused("need an unsplit GPT; got ")))
EXCEPTIONS = {(method, hard): why for methods, modules, why in ROWS
              for method in methods for hard in modules}  # fmt: skip
