"""`make gpu`: try every path of the course that computes on a GPU, and record the findings.

Each proof is a process of its own: one that fails, hangs or runs out of memory stops no other.
"""

import argparse
import json
import math
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.gpu.findings import NeedsGPUError, Proof
from tests.gpu.processes import MARK, end, environment

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 540.0
NO_GPU = "make gpu: no CUDA GPU was found here, so nothing was tried, and nothing counts as passed."
CTRL_C, BAD_INPUT = 130, 2
REHEARSAL_LIMIT_S = 300.0  # a rehearsal says nothing about time, and the machine may be busy
LEFT_OUT = "left out: it needs "


def all_proofs() -> list[Proof]:
    """Return the proofs, the short ones first. Imported late: torch is slow to import."""
    from tests.gpu import lessons, memory, ranks, speed

    return [
        Proof(name="collectives", run=ranks.prove_collectives, limit_s=60),
        Proof(name="roofline", run=speed.prove_roofline),
        Proof(name="memory", run=memory.prove_memory, limit_s=90, on_cpu=False),
        Proof(name="step", run=speed.prove_step),
        Proof(name="fp8", run=speed.prove_fp8, limit_s=30, on_cpu=False),
        Proof(name="shared-gpu", run=ranks.prove_shared_gpu, limit_s=150),
        Proof(name="bf16", run=ranks.prove_bf16),
        Proof(name="context-parallel", run=ranks.prove_context_parallel, on_cpu=False),
        Proof(name="profiler", run=lessons.prove_profiler),
        Proof(name="lessons", run=lessons.prove_lessons, limit_s=400),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code.

    0     each proof has held (or was rehearsed), or was left out for want of a GPU
    1     a proof has failed, has proven nothing, or was not reached in time
    2     bad arguments
    130   Ctrl-C
    """
    options = _options(arguments)
    if options.child:
        return _child(options.child, Path(options.result), options.rehearse)
    try:
        deadline_s, proofs = _deadline(options.deadline), _chosen(options.only, options.rehearse)
    except ValueError as problem:
        print(problem)
        return BAD_INPUT
    import torch

    if not torch.cuda.is_available() and not options.rehearse:
        print(NO_GPU)
        return 0
    try:
        results = run_all(proofs, options.rehearse, deadline_s)
    except KeyboardInterrupt:
        print("Stopped.")
        return CTRL_C
    record = {"about": about(options.rehearse), "proofs": results}
    path = Path(options.out) / f"{_name_of(record)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    word = "rehearsed" if options.rehearse else "held"
    held = sum(one["verdict"] == word for one in results)
    print(f"{held} of {len(results)} proofs {word}; the record: {path}")
    needed_gpu = sum(one["verdict"].startswith(LEFT_OUT) for one in results)
    return 0 if held + needed_gpu == len(results) else 1


def _deadline(text: str) -> float:
    """Return the deadline in seconds. Raises: ValueError for what is no positive number"""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(f"--deadline: need a number of seconds above 0; got {text}.")
    return seconds


def _chosen(names: Sequence[str] | None, rehearse: bool) -> list[Proof]:
    """Return the proofs with these names, or all. Raises: ValueError for an unknown name"""
    proofs = all_proofs()
    if unknown := set(names or ()) - {proof.name for proof in proofs}:
        known = ", ".join(proof.name for proof in proofs)
        raise ValueError(f"--only: need names out of {known}; got {', '.join(sorted(unknown))}.")
    proofs = [proof for proof in proofs if not names or proof.name in names]
    return [replace(one, limit_s=REHEARSAL_LIMIT_S) for one in proofs] if rehearse else proofs


def run_all(proofs: Sequence[Proof], rehearse: bool, deadline_s: float) -> list[dict[str, Any]]:
    """Run the proofs one after the other; return for each its verdict and what it found."""
    give_up_s, results = time.monotonic() + deadline_s, []
    for proof in proofs:
        left_s = give_up_s - time.monotonic()
        if rehearse and not proof.on_cpu:
            results.append(_result(proof, LEFT_OUT + "a GPU", 0.0, []))
        elif left_s < 1:
            results.append(_result(proof, "not reached before the deadline", 0.0, []))
        else:
            results.append(_run(proof, rehearse, min(proof.limit_s, left_s)))
        _print_result(results[-1])
    return results


def _run(proof: Proof, rehearse: bool, limit_s: float) -> dict[str, Any]:
    """Run one proof in a process of its own; what it has started does not outlive it."""
    start_s, variables = time.monotonic(), environment(rehearse)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.jsonl")
        command = [sys.executable, "-m", "tests.gpu", "--child", proof.name]
        command += ["--result", str(result), *(["--rehearse"] if rehearse else [])]
        process = subprocess.Popen(command, cwd=ROOT, env=variables, start_new_session=True)
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(process, variables[MARK])
        lines = result.read_text().splitlines() if result.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("}")]  # the last may be cut short
    if code is None:
        verdict, why = "failed", f"stopped after {limit_s:.0f} s"
    elif code:
        verdict, why = "failed", f"exit code {code}"
    else:
        (verdict, why), found = _verdict(found, rehearse), [one for one in found if "what" in one]
    return _result(proof, verdict, time.monotonic() - start_s, found, why)


def _verdict(found: list[dict[str, Any]], rehearse: bool) -> tuple[str, str]:
    """Return the verdict on a proof that has ended well, and why."""
    if needs := [one["needs"] for one in found if "needs" in one]:
        return LEFT_OUT + needs[0], ""
    if not found:
        return "failed", "nothing was found"
    if not all(one["holds"] for one in found):
        return "failed", ""
    if not any(one["is_bounded"] for one in found):
        return "measured, nothing to prove", ""
    return ("rehearsed" if rehearse else "held"), ""


def _child(name: str, result: Path, rehearse: bool) -> int:
    """Run one proof in this process; write each finding as a line."""
    (proof,) = [one for one in all_proofs() if one.name == name]
    try:
        with result.open("w", buffering=1) as file:
            try:
                for finding in proof.run(rehearse):
                    file.write(json.dumps(finding.as_dict()) + "\n")
            except NeedsGPUError as problem:
                file.write(json.dumps({"needs": str(problem)}) + "\n")
    except Exception:
        traceback.print_exc(limit=-3)
        return 1
    return 0


def _result(
    proof: Proof, verdict: str, seconds: float, found: list[dict[str, Any]], why: str = ""
) -> dict[str, Any]:
    return {
        "name": proof.name,
        "verdict": verdict,
        "why": why,
        "seconds": round(seconds, 1),
        "found": found,
    }


def _print_result(result: dict[str, Any]) -> None:
    why = f" ({result['why']})" if result["why"] else ""
    print(f"{result['name']:12} {result['verdict']}{why}, {result['seconds']:.0f} s", flush=True)
    for one in result["found"]:
        print(f"    {'' if one['holds'] else 'FAILED: '}{one['text']}", flush=True)


def about(rehearse: bool) -> dict[str, Any]:
    """Return the GPU and the versions with which the proofs ran."""
    import torch

    on_gpu = torch.cuda.is_available() and not rehearse
    return {
        "gpu": torch.cuda.get_device_name() if on_gpu else "none: rehearsed on the CPU",
        "num_gpus": torch.cuda.device_count(),
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "course": version("distributed-training-course"),
    }


def _name_of(record: dict[str, Any]) -> str:
    words = record["about"]["gpu"].partition(":")[0].lower().split()
    return "-".join([*words, record["about"]["date"]])


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these proofs")
    rehearse = "small sizes on the CPU: tries the proofs themselves, and proves nothing"
    parser.add_argument("--rehearse", action="store_true", help=rehearse)
    parser.add_argument("--out", default="runs/gpu", help="folder of the record")
    parser.add_argument("--deadline", default=str(DEADLINE_S), help="seconds for all proofs")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
