"""Run one command in a sandbox, as the grader would: the request is JSON, and so is the answer."""

import json
import os
import resource
import sys
from dataclasses import asdict
from pathlib import Path

from course_tools.grading.sandbox import RunLimits, Sandbox

request = json.loads(sys.argv[1])
folder = Path(request["folder"])
sandbox = Sandbox(request["trusts"])
command = [word.replace("GRADER", str(os.getpid())) for word in request["command"]]
before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
ended = sandbox.run(
    command,
    work=folder / "work",
    out=folder / "out",
    read_only={Path(path): Path(inner) for path, inner in request["read_only"].items()},
    limits=RunLimits(**request["limits"]),
    env=request["env"],
)
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
print(json.dumps({**asdict(ended), "grown_kib": grown}))
