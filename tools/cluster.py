"""Keep a throw-away Slurm cluster on this machine until Ctrl-C, and say how to use it.

make cluster CLUSTER_ARGS="--nodes 4 --gpus 4"
"""

import argparse
import shutil
import signal
import sys

from tests.cluster.slurmbox import DEVICES, MISSING, SlurmBox

ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
UP = """\
Slurm is up. Nodes: {nodes}. Pretended GPUs on each: {gpus}.
It stays until Ctrl-C here, which ends its jobs too. In a second terminal, in the course's folder:

    export SLURM_CONF={conf}
    source .venv/bin/activate
    sinfo
    course submit 04 --nodes 2 --profile test

The profile `test` uses two nodes with two GPUs; course cluster init writes one for all there is."""


def main() -> None:
    """Start the cluster, keep it, and end it whatever asks for the end."""
    parser = argparse.ArgumentParser(prog="make cluster", description=__doc__)
    parser.add_argument("--nodes", type=int, default=2, choices=range(1, 17), metavar="1-16")
    most = len(DEVICES)
    gpus = {"choices": range(1, most + 1), "metavar": f"1-{most}"}
    parser.add_argument("--gpus", type=int, default=2, **gpus)
    asked = parser.parse_args()
    if shutil.which("slurmctld", path="/usr/sbin:/usr/local/sbin") is None:
        sys.exit(MISSING)
    for ending in ENDINGS:
        signal.signal(ending, leave)
    with SlurmBox(nodes=asked.nodes, gpus=asked.gpus) as box:
        conf = box.env["SLURM_CONF"]
        print(UP.format(nodes=asked.nodes, gpus=asked.gpus, conf=conf), flush=True)
        signal.pause()


def leave(*_: object) -> None:
    """Leave, and let nothing disturb the cleaning up."""
    for ending in ENDINGS:
        signal.signal(ending, signal.SIG_IGN)
    print("\nThe cluster and its jobs are ended.", flush=True)
    sys.exit()


if __name__ == "__main__":
    main()
