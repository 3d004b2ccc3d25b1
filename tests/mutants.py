"""Mutants: small faults in the files of the methods, and how many of them the tests notice.

`python -m tests.mutants 400` writes tests/mutation_baseline.json: the killed, survived and
late (ended at the time limit) per package, and each survivor. The sample is seeded. A mutant is
tried in a checkout of the last commit, with the tests of its package that its file reaches.
"""

import ast
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BASELINE = ROOT / "tests/mutation_baseline.json"
LIMIT_S = 300  # for the tests of one mutant in one tier
MARKS = ("not ci and not nightly", "ci and not nightly")  # the second tries what the first leaves
PACKAGES = ("accumulation", "recompute", "collectives", "data_parallel", "ddp", "tensor_parallel")
PACKAGES += ("pipeline", "zero", "fsdp", "mesh")
NO_METHOD = ("__init__", "cost", "lab", "pictures", "explorer", "beside_frameworks")
PAIRS = (  # each is replaced by the other
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot)),
    *((ast.In, ast.NotIn), ("all_reduce", "broadcast"), ("isend", "irecv"), ("send", "recv")),
    *(("all_gather_single", "reduce_scatter_single"), ("all_gather", "reduce_scatter")),
    *(("SUM", "MAX"), ("copy_to_region", "reduce_from_region")),
)
OTHER = {one: other for pair in PAIRS for one, other in (pair, pair[::-1])}


def changed(node: ast.AST) -> str:
    """Return what a node becomes in a mutant, or an empty text."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in OTHER:
        return ast.unparse(ast.Compare(node.left, [OTHER[type(node.ops[0])]()], node.comparators))
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return str(node.value + (-1 if node.lineno % 2 else 1))
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return "pass"
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        return OTHER.get(node.id, "")
    if isinstance(node, ast.Attribute) and node.attr in OTHER:
        return f"{ast.unparse(node.value)}.{OTHER[node.attr]}"
    return ""


def mutants() -> Iterator[tuple[str, str, bytes]]:
    """Yield file, fault and text of every mutant of the methods; none in the words of a message."""
    files = [
        path for name in PACKAGES for path in sorted((ROOT / "course_lib" / name).glob("*.py"))
    ]
    for path in (path for path in files if path.stem not in NO_METHOD):
        text = path.read_bytes()
        lines, nodes = text.splitlines(keepends=True), list(ast.walk(ast.parse(text)))
        before = [sum(map(len, lines[:number])) for number in range(len(lines))]
        messages = [node for node in nodes if isinstance(node, ast.JoinedStr)]
        words = {part for message in messages for part in ast.walk(message)}
        for node in nodes:
            if node not in words and (new := changed(node)):
                start = before[node.lineno - 1] + node.col_offset
                end = before[node.end_lineno - 1] + node.end_col_offset
                file = path.relative_to(ROOT).as_posix()
                yield file, f"{file}:{node.lineno} {new}", text[:start] + new.encode() + text[end:]


def verdict(tree: Path, file: str, text: bytes) -> str:
    """Run the tests of a file with another text, the quick ones first: killed, survived or late."""
    old = (tree / file).read_bytes()
    (tree / file).write_bytes(text)
    try:
        said = (outcome(tree, file, marks) for marks in MARKS)
        return next((one for one in said if one != "survived"), "survived")
    finally:
        (tree / file).write_bytes(old)


def outcome(tree: Path, file: str, marks: str) -> str:
    """Run the tests of one tier that a changed file reaches, in a session of their own."""
    chosen = ("-m", marks, f"tests/{package_of(file)}", "tests/law")
    command = (sys.executable, "-m", "pytest", "-x", "-q", "--changed=HEAD", *chosen)
    here, no = {**os.environ, "PYTHONPATH": str(tree)}, subprocess.DEVNULL
    tests = subprocess.Popen(command, cwd=tree, env=here, stdout=no, start_new_session=True)
    try:
        return "survived" if tests.wait(LIMIT_S) in (0, 5) else "killed"  # 5: no test reached
    except subprocess.TimeoutExpired:
        os.killpg(tests.pid, signal.SIGKILL)
        return "late"


def package_of(file: str) -> str:
    return file.split("/")[1]


def try_all(sample: list[tuple[str, str, bytes]], tree: Path) -> dict[str, Any]:
    """Return how many mutants of each package were killed, survived or late; and the survivors."""
    found, survivors = dict[str, dict[str, int]](), list[str]()
    for file, fault, text in sample:
        if package_of(file) not in found:
            found[package_of(file)] = {"killed": 0, "survived": 0, "late": 0}
            if verdict(tree, file, (tree / file).read_bytes() + b"\n") != "survived":
                sys.exit(f"{file}: need tests that pass where nothing is changed; they do not.")
        said = verdict(tree, file, text)
        found[package_of(file)][said] += 1
        print(f"{said:9} {fault}", flush=True)
        survivors += [fault] * (said == "survived")
    return {"packages": dict(sorted(found.items())), "survivors": sorted(survivors)}


def main() -> None:
    count = int(sys.argv[1]) if sys.argv[1:] else 400
    sample = random.Random(0).sample(list(mutants()), count)
    git = ("git", "-C", str(ROOT), "worktree")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*git, "add", "-q", "--detach", f"{folder}/tree", "HEAD"], check=True)
        try:
            found = try_all(sample, Path(folder, "tree"))
        finally:
            subprocess.run([*git, "remove", "--force", f"{folder}/tree"], check=True)
    BASELINE.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
