"""Lessons' scripts as modules, or run as torchrun runs them, on ranks forked from one process.

Under the real torchrun, which starts Python and imports torch for every rank, test_ranks.py runs a
script: what they share, `launch`, is the same.
"""

import importlib.util
import os
import runpy
import sys
import tempfile
from functools import cache
from multiprocessing import connection
from pathlib import Path
from types import ModuleType

import cloudpickle

from course_lib.ranks.fork_server import start_method, without_main_script

SCRIPTS = Path(__file__).parents[2] / "cluster/exercises"


@cache
def script_of(name: str) -> ModuleType:
    """A lesson's script as a module, which ranks get by value."""
    spec = importlib.util.spec_from_file_location(f"script_of_{name}", SCRIPTS / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)
    return module


def said_by(name: str, options: str, world_size: int = 2) -> str:
    """What the script's ranks print; it is an error if one of them does not end well."""
    context, argv = start_method(), [str(SCRIPTS / f"{name}.py"), *options.split()]
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(n, world_size, folder, argv) for n in range(world_size)]
        ranks = [context.Process(target=_be_rank, args=given) for given in arguments]
        try:
            with without_main_script():
                for rank in ranks:
                    rank.start()
            while running := [rank.sentinel for rank in ranks if rank.exitcode is None]:
                connection.wait(running)
                if any(rank.exitcode for rank in ranks):
                    break  # the others would wait for it
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
        said = Path(folder, "said").read_text()
    assert [rank.exitcode for rank in ranks] == [0] * world_size, said
    return said


def _be_rank(rank: int, world_size: int, folder: str, argv: list[str]) -> None:
    said = os.open(os.path.join(folder, "said"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(said, 1)
    os.dup2(said, 2)
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in places.items()})
    os.environ.update(LOCAL_WORLD_SIZE=str(world_size), COURSE_RANKS_FOLDER=folder)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    sys.argv = argv
    runpy.run_path(argv[0], run_name="__main__")
