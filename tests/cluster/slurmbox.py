"""A throw-away Slurm cluster on this machine: several nodes, pretended GPUs, its own munge.

    with SlurmBox() as box:
        box.wait(box.submit("train.sbatch"))

No systemd, no cgroups, nothing in /etc. As root every node has a host name and an address of its
own; else all of them have this machine's. `make cluster` keeps one until Ctrl-C.
"""

import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

PACKAGES = "slurmctld slurmd slurm-client munge"
MISSING = f"Slurm is not installed: apt-get install --no-install-recommends {PACKAGES}"
FINAL = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL"}
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random")  # any character device will do
STARTS = 3
START_S = 60.0
POLL_S = 0.05
CONF = """\
ClusterName=box
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthInfo=cred_expire=6,socket={root}/munge.socket
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PreemptExemptTime=0
EnforcePartLimits=ALL
ReturnToService=2
MinJobAge=86400
MessageTimeout=5
KillWait=5
SlurmdTimeout=10
GresTypes=gpu
NodeName=node[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] \
CPUs={cpus} RealMemory=8000 Gres=gpu:{gpus} State=UNKNOWN
PartitionName=gpu Nodes=node[1-{nodes}] Default=YES MaxTime=60 DefaultTime=5 DefMemPerCPU=500 \
PriorityTier=1 State=UP
PartitionName=urgent Nodes=node[1-{nodes}] MaxTime=60 DefaultTime=5 DefMemPerCPU=500 \
PriorityTier=9 State=UP
"""
MARK = "SLURM_BOX"  # what the daemons have in their environment, and what they start themselves
MUNGE_FILES = {
    "socket": "socket",
    "key-file": "key",
    "log-file": "log",
    "pid-file": "pid",
    "seed-file": "seed",
}
WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")  # else they stay when the tests are killed
IN_A_NAMESPACE = 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"'


class SlurmBox:
    """Nodes `node1`, `node2`, ...; the partition `gpu`, and `urgent`, whose jobs preempt others'.

    `env` is the environment in which Slurm's commands talk to this cluster.
    """

    def __init__(self, *, nodes: int = 2, cpus: int = 4, gpus: int = 2) -> None:
        self.num_nodes, self._cpus, self._gpus = nodes, cpus, gpus
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        try_out = ["unshare", "-m", "-u", "true"]
        self.namespaces = (
            os.getuid() == 0 and subprocess.run(try_out, capture_output=True).returncode == 0
        )

    def __enter__(self) -> "SlurmBox":
        for left in reversed(range(STARTS)):
            self._write_files()
            try:
                self._start()
            except BaseException as problem:
                self.stop()
                if not left or not isinstance(problem, TimeoutError):  # a port is taken, for one
                    raise
            else:
                break
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # -- the cluster ------------------------------------------------------------------------

    def _write_files(self) -> None:
        self.root = root = Path(tempfile.mkdtemp(prefix="slurm-"))  # a socket's path is short
        root.chmod(0o755)
        (root / "state").mkdir()
        host, port = socket.gethostname().split(".")[0], _free_ports(self.num_nodes + 1)
        text = CONF.format(
            host=host,
            user=pwd.getpwuid(os.getuid()).pw_name,
            root=root,
            port=port,
            nodes=self.num_nodes,
            first=port + 1,
            last=port + self.num_nodes,
            cpus=self._cpus,
            gpus=self._gpus,
        )
        (root / "slurm.conf").write_text(text)
        cards = ",".join(DEVICES[: self._gpus])
        (root / "gres.conf").write_text(
            f"NodeName=node[1-{self.num_nodes}] Name=gpu File={cards}\n"
        )
        (root / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # else slurmd looks for one
        (root / "munge.key").write_bytes(os.urandom(1024))
        (root / "munge.key").chmod(0o400)
        nodes = [f"127.0.1.{k} node{k}\n" for k in range(1, self.num_nodes + 1)]
        (root / "hosts").write_text(f"127.0.0.1 localhost {host}\n{''.join(nodes)}")
        self.env = dict(os.environ, SLURM_CONF=str(root / "slurm.conf"))

    def _start(self) -> None:
        files = [f"--{option}={self.root}/munge.{end}" for option, end in MUNGE_FILES.items()]
        self._spawn("munged", "/usr/sbin/munged", "-F", "--force", *files)
        self._until((self.root / "munge.socket").exists, "munged")
        self.start_controller()
        for k in range(1, self.num_nodes + 1):
            self.start_node(k)
        self.wait_idle()

    def start_controller(self) -> None:
        """Start slurmctld, and wait until it answers."""
        self._spawn("slurmctld", "/usr/sbin/slurmctld", "-D")
        ping = ("scontrol", "ping")
        self._until(lambda: self.run(*ping, check=False).returncode == 0, "slurmctld")

    def stop_controller(self) -> None:
        """End slurmctld; jobs go on, and nobody answers questions about them."""
        self._end("slurmctld")

    def start_node(self, k: int) -> None:
        """Start the slurmd of a node."""
        name, command = f"node{k}", ["/usr/sbin/slurmd", "-D", "-N", f"node{k}"]
        if self.namespaces:
            own = ["unshare", "-m", "-u", "--propagation", "private", "sh", "-c", IN_A_NAMESPACE]
            command = [*own, "_", str(self.root / "hosts"), name, *command]
        self._spawn(name, *command)

    def crash_node(self, k: int) -> None:
        """Kill all that runs on a node, as if its power had gone. Needs namespaces."""
        name = f"node{k}"
        its_own = os.readlink(f"/proc/{self._processes[name].pid}/ns/uts")
        for pid in _pids():
            with suppress(OSError):
                if os.readlink(f"/proc/{pid}/ns/uts") == its_own:
                    os.kill(pid, signal.SIGKILL)
        self._processes.pop(name).wait()

    def wait_idle(self) -> None:
        """Wait until every node has nothing to do."""
        asked, idle = ("sinfo", "-h", "-p", "gpu", "-o", "%t %D"), f"idle {self.num_nodes}"
        self._until(lambda: self.run(*asked, check=False).stdout.strip() == idle, idle)

    def _spawn(self, name: str, *command: str) -> None:
        with (self.root / f"{name}.out").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [*WITH_PARENT, *command],
                env=self.env | {MARK: str(self.root)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _until(self, is_so: Callable[[], bool], what: str) -> None:
        give_up = time.monotonic() + START_S
        while not is_so():
            if time.monotonic() > give_up:
                tails = [path.read_text()[-1500:] for path in sorted(self.root.glob("*.out"))]
                raise TimeoutError(f"the cluster: no {what}\n" + "\n".join(tails))
            time.sleep(POLL_S)

    def _end(self, name: str) -> None:
        process = self._processes.pop(name)
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def stop(self) -> None:
        """End the daemons and all jobs, and delete the folder."""
        if "slurmctld" in self._processes:
            self.cancel_all("--full", "--signal=KILL")
        for name in sorted(self._processes, key=lambda name: (name == "munged", name)):
            self._end(name)
        for pid in _pids():
            with suppress(OSError):
                if self._started(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")):
                    os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.root, ignore_errors=True)

    def _started(self, environment: list[bytes]) -> bool:
        """Has it outlived its slurmd? Who only talks to this cluster is left in peace."""
        in_a_job = any(word.startswith(b"SLURM_JOB_ID=") for word in environment)
        talks_to_it = f"SLURM_CONF={self.root}/slurm.conf".encode() in environment
        return f"{MARK}={self.root}".encode() in environment or (talks_to_it and in_a_job)

    # -- jobs -------------------------------------------------------------------------------

    def run(
        self, *command: str, check: bool = True, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """One of Slurm's commands, talking to this cluster."""
        return subprocess.run(
            command, env=self.env, cwd=cwd, check=check, text=True, capture_output=True
        )

    def submit(self, *args: str, cwd: Path | None = None) -> str:
        """Hand a script in with sbatch; return the job's id."""
        return self.run("sbatch", "--parsable", *args, cwd=cwd).stdout.strip().split(";")[0]

    def cancel_all(self, *options: str) -> None:
        """Cancel every job."""
        self.run("scancel", *options, "-u", pwd.getpwuid(os.getuid()).pw_name, check=False)

    def show(self, job_id: str) -> list[dict[str, str]]:
        """What Slurm knows of a job: one dictionary for each of its array tasks."""
        lines = self.run("scontrol", "show", "job", "-o", job_id).stdout.splitlines()
        return [dict(re.findall(r"(\w[\w/:]*)=(\S*)", line)) for line in lines if line.strip()]

    def wait(self, job_id: str, timeout_s: float = 120) -> list[dict[str, str]]:
        """Wait for the end of a job. `sbatch --wait` looks only now and then; this does not."""
        found, give_up = self.show(job_id), time.monotonic() + timeout_s
        while not all(job["JobState"] in FINAL for job in found):
            if time.monotonic() > give_up:
                states = [(job["JobState"], job["Reason"]) for job in found]
                raise TimeoutError(f"job {job_id} did not end within {timeout_s:g} s: {states}")
            time.sleep(POLL_S)
            found = self.show(job_id)
        return found


def _free_ports(count: int) -> int:
    """The first of `count` ports in a row that nobody uses."""
    for base in range(16800 + os.getpid() % 1000 * 10, 30000, 10):
        with ExitStack() as stack, suppress(OSError):
            for port in range(base, base + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return base
    raise RuntimeError(f"need {count} free ports in a row between 16800 and 30000")


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]
