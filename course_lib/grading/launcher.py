"""The first process in a sandbox: it finishes the set-up, gives up its rights, and execs.

It runs as a file of its own, `python -I -S launcher.py PLAN`, with nothing but the standard
library. Inside bubblewrap the file system is ready; in new namespaces the launcher builds it; under
another uid it stays behind as a supervisor that ends what the command started.
"""

import ctypes
import fcntl
import json
import os
import resource
import signal
import socket
import stat
import struct
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
NEW_USER, NEW_OTHERS = 0x10000000, 0x6C020000  # mount, pid, net, ipc and uts namespaces
NO_SUID, NO_DEVICES, BIND, MOVE, RECURSIVE, PRIVATE = 2, 4, 0x1000, 0x2000, 0x4000, 1 << 18
MOUNT_SETATTR, AT_RECURSIVE, READ_ONLY = 442, 0x8000, 1
PDEATHSIG, CHILD_SUBREAPER, NO_NEW_PRIVS, AMBIENT = 1, 36, 38, 47  # for prctl
DEVICES = ("null", "zero", "full", "random", "urandom")
BUILT_AT = "/tmp"  # any folder that every machine has: the new root is mounted over it


def call(function: Callable[..., int], *arguments: object) -> None:
    """Call a function of libc, and raise OSError where it fails."""
    if function(*arguments) < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{function.__name__}{arguments}: {os.strerror(error)}")


def prctl(option: int, *values: int) -> None:
    call(LIBC.prctl, option, *(ctypes.c_ulong(n) for n in (*values, 0, 0, 0, 0)[:4]))


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    call(LIBC.mount, source.encode(), target.encode(), kind.encode(), flags, data.encode())


def restrict(target: str, attributes: int, flags: int = 0) -> None:
    """Set attributes (read-only, no set-uid programs, no devices) of what is mounted there."""
    wanted = struct.pack("QQQQ", attributes, 0, 0, 0)
    call(LIBC.syscall, MOUNT_SETATTR, -1, target.encode(), flags, wanted, len(wanted))


def code_of(status: int) -> int:
    """Return an exit status as a shell does: 128 + n for one that signal n ended."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def wait_for(child: int) -> int:
    """Reap every process that ends until this one does, and return its exit status."""
    while True:
        ended, status = os.wait()
        if ended == child:
            return code_of(status)


def enter_namespaces(plan: dict[str, Any]) -> None:
    """Return in a process of new namespaces; its parent is the first process there (pid 1).

    When pid 1 ends, the kernel ends every process of the namespace. It ends with the command, and
    with the process that waits for it outside.
    """
    uid, gid = os.geteuid(), os.getegid()
    inner = plan["inner_uid"]
    call(LIBC.unshare, NEW_OTHERS if plan["uid"] else NEW_OTHERS | NEW_USER)
    if not plan["uid"]:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{inner} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{inner} {gid} 1")
    prctl(PDEATHSIG, signal.SIGKILL)
    if first := os.fork():
        os._exit(wait_for(first))
    prctl(PDEATHSIG, signal.SIGKILL)
    build_root(plan)
    socket.sethostname("localhost")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sH14x", b"lo", 0x41))  # up and running
    if command := os.fork():
        os._exit(wait_for(command))


def build_root(plan: dict[str, Any]) -> None:
    """Mount a new root: empty but for devices, /proc, scratch space and what is bound read-only."""
    mount("none", "/", flags=RECURSIVE | PRIVATE)
    bound = [(os.open(source, os.O_PATH), target) for source, target in plan["read_only"]]
    devices = [(os.open(f"/dev/{name}", os.O_PATH), f"/dev/{name}") for name in DEVICES]
    mount("tmpfs", BUILT_AT, "tmpfs", NO_SUID | NO_DEVICES, "mode=755,size=1m")
    for target, source in plan["links"]:
        os.symlink(source, BUILT_AT + target)
    for place in ("/proc", "/work", *(place for place, _ in plan["scratch"])):
        os.makedirs(BUILT_AT + place, exist_ok=True)
    mount("proc", BUILT_AT + "/proc", "proc", NO_SUID | NO_DEVICES)
    for fd, target in devices:
        bind(fd, BUILT_AT + target)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"{BUILT_AT}/dev/{name}")
    os.symlink("/proc/self/fd", BUILT_AT + "/dev/fd")
    for place, size in plan["scratch"]:
        data = f"mode=1777,size={size}"
        mount("tmpfs", BUILT_AT + place, "tmpfs", NO_SUID | NO_DEVICES, data)
    for fd, target in bound:
        bind(fd, BUILT_AT + target)
        restrict(BUILT_AT + target, READ_ONLY | NO_SUID | NO_DEVICES, AT_RECURSIVE)
    restrict(BUILT_AT, READ_ONLY)
    os.chdir(BUILT_AT)
    mount(".", "/", flags=MOVE)
    os.chroot(".")


def bind(fd: int, target: str) -> None:
    """Mount a file or folder that is open at a path of the new root, and close it."""
    if stat.S_ISDIR(os.fstat(fd).st_mode):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        Path(target).touch()
    mount(f"/proc/self/fd/{fd}", target, flags=BIND | RECURSIVE)
    os.close(fd)


def supervise(plan: dict[str, Any]) -> None:
    """Return in a child; this process adopts all that it starts, and ends it when the child ends.

    It ends all on SIGTERM, and with the grader, too.
    """
    prctl(CHILD_SUBREAPER, 1)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    if child := os.fork():
        signal.signal(signal.SIGTERM, lambda *_: end_process(child))
        prctl(PDEATHSIG, signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        code = wait_for(child)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if plan["uid"]:
            end_user(plan["uid"])
        end_children()
        os._exit(code)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def end_process(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def end_user(uid: int) -> None:
    """End every process of this uid, at once: what forks in the meantime ends as well."""
    if helper := os.fork():
        os.waitpid(helper, 0)
        return
    os.setresuid(uid, uid, uid)
    with suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    os._exit(0)


def end_children() -> None:
    """End the children, and theirs, which are adopted as soon as their parent has ended."""
    me = os.getpid()
    with suppress(ChildProcessError):
        while True:
            for child in Path(f"/proc/{me}/task/{me}/children").read_text().split():
                end_process(int(child))
            os.waitpid(-1, 0)


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
    """Run the command of a plan (JSON; course_lib.grading.sandbox writes it) in its sandbox."""
    plan = json.loads(words[0])
    channel = socket.socket(fileno=plan["channel"])
    channel.set_inheritable(False)
    if plan["kind"] == "namespaces":
        enter_namespaces(plan)
    elif plan["kind"] != "bubblewrap":
        supervise(plan)
    watched = [os.open(place, os.O_RDONLY | os.O_DIRECTORY) for place in plan["watched"]]
    give_up_rights(plan)
    socket.send_fds(channel, [b"ready"], watched)
    os.chdir(plan["folder"])
    try:
        os.execvpe(plan["command"][0], plan["command"], plan["env"])
    except OSError as error:
        sys.exit(f"{plan['command'][0]}: {error.strerror}")


main(sys.argv[1:])
