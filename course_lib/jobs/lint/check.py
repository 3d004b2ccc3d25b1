"""Check a batch script for mistakes before Slurm finds them, or where Slurm never would.

A job waits in the queue for hours and then fails in its first second, or runs and computes
something else. What can be seen in the script itself is told here: the line, why it bites, the fix.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from course_lib.core.errors import CourseError
from course_lib.jobs.lint import (
    rules_asked,
    rules_environment,
    rules_flow,
    rules_ranks,
    rules_text,
    rules_variables,
)
from course_lib.jobs.lint.directives import Directive
from course_lib.jobs.lint.script import LintFinding, Script
from course_lib.jobs.profile import Profile
from course_lib.jobs.slurm_time import read_time_s

RULES = (
    *rules_text.RULES,
    *rules_variables.RULES,
    *rules_asked.RULES,
    *rules_ranks.RULES,
    *rules_flow.RULES,
    *rules_environment.RULES,
)

GPUS = ("gpus-per-node", "gres", "gpus")  # that say how many a node needs


MEMORY = ("mem", "mem-per-cpu", "mem-per-gpu")


def lint_job(
    text: str,
    folder: str | os.PathLike[str] = ".",
    profile: Profile | None = None,
    partitions: Sequence[str] = (),
) -> list[LintFinding]:
    """Return the findings on a batch script that is submitted from this folder, line by line.

    With a profile, also what asks for more than the site has; with the names of all partitions of
    the site, also one that it does not have.
    """
    script = Script(text, Path(folder))
    found = {finding for rule in RULES for finding in rule(script)}
    if profile:
        found |= set(_beyond(script, profile))
    if partitions:
        found |= set(_unknown_partition(script, partitions))
    return sorted(found, key=lambda one: (one.line, one.rule))


def _beyond(script: Script, profile: Profile) -> Iterator[LintFinding]:
    """Return findings on what the site of this profile does not have."""
    longest_s = read_time_s(profile.time_limit)
    for one in script.directives:
        gpus = rules_asked.gpus_on_a_node(script, one) if one.option in GPUS else None
        if one.option == "time" and _time_s(one.value) > longest_s:
            yield _too_much(one, profile.time_limit, profile)
        elif one.option == "nodes" and script.nodes > profile.max_nodes:
            yield _too_much(one, str(profile.max_nodes), profile)
        elif gpus and gpus > profile.gpus_per_node:
            yield _too_much(one, f"{profile.gpus_per_node} GPUs on a node", profile)
        elif one.option in MEMORY and profile.node_memory_gib:
            asked_gib = rules_asked.memory_on_a_node(script, one) or 0
            if asked_gib > profile.node_memory_gib:
                yield _too_much(one, f"{profile.node_memory_gib} GiB on a node", profile)


def _unknown_partition(script: Script, known: Sequence[str]) -> Iterator[LintFinding]:
    """Return a finding on a partition that the site does not have."""
    one = script.option("partition")
    if one and not script.option("clusters") and not {*one.value.split(",")} <= {*known}:
        yield LintFinding(
            one.line,
            "unknown-partition",
            f"--partition={one.value}, and Slurm has {', '.join(known)}",
            "sbatch refuses the script",
            "Write one of these.",
        )


def _time_s(text: str) -> int:
    try:
        return read_time_s(text)
    except CourseError:
        return 0


def _too_much(asked: Directive, most: str, profile: Profile) -> LintFinding:
    return LintFinding(
        asked.line,
        "too-much",
        f"--{asked.option}={asked.value}, and profile {profile.name} has at most {most}",
        "sbatch refuses it, or the job stays in the queue for ever",
        f"Ask for at most {most}.",
    )


def findings_text(name: str, findings: list[LintFinding]) -> str:
    """Return the findings as text: the place, why it is wrong, and the fix."""
    parts = [
        f"{name}:{one.line}: {one.what}  [{one.rule}]\n    why: {one.why}.\n    fix: {one.fix}"
        for one in findings
    ]
    return "\n\n".join(parts)
