"""The first process of a run: it sets the limits, gives up its rights, and execs the command.

It runs as a file of its own, `python -I -S launcher.py PLAN`, with nothing but the standard
library: inside bubblewrap, which has made the file system ready, or without isolation.
"""

import ctypes
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PDEATHSIG, NO_NEW_PRIVS, AMBIENT = 1, 38, 47


def prctl(option: int, *values: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, *(ctypes.c_ulong(n) for n in (*values, 0, 0, 0, 0)[:4])) < 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}: {os.strerror(ctypes.get_errno())}")


def give_up_rights(plan: dict[str, Any]) -> None:
    """Set the limits, and become a user without any right; the first that memory runs out for."""
    Path("/proc/self/oom_score_adj").write_text("1000")
    for name, wanted in plan["rlimits"].items():
        which = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(which)[1]
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(which, (limit, limit))
    if uid := plan["uid"]:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    prctl(AMBIENT, 4)  # clear all; the other capabilities end with exec
    prctl(NO_NEW_PRIVS, 1)
    prctl(PDEATHSIG, signal.SIGKILL)


def main(words: Sequence[str]) -> None:
    """Run the command of a plan (JSON; course_tools.grading.sandbox writes it)."""
    plan = json.loads(words[0])
    channel = socket.socket(fileno=plan["channel"])
    channel.set_inheritable(False)
    watched = [os.open(place, os.O_RDONLY | os.O_DIRECTORY) for place in plan["watched"]]
    give_up_rights(plan)
    socket.send_fds(channel, [b"ready"], watched)
    os.chdir(plan["folder"])
    try:
        os.execvpe(plan["command"][0], plan["command"], plan["env"])
    except OSError as error:
        sys.exit(f"{plan['command'][0]}: {error.strerror}")


main(sys.argv[1:])
