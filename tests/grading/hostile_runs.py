"""Answers that never end, end others, or take what they can get, by kind, and what they get."""

from collections.abc import Mapping

from tests.grading.hostile_class import LEFT_OVER, NOTHING, statuses

# what the answer to toy-1 does, by its kind and the student; why it is wrong
ENDS = {
    "ends": {
        "exits": ("import os\nos._exit(0)\n", "ended the Python process"),
        "system-exit": ("raise SystemExit\n", "SystemExit"),
        "interrupts": ("raise KeyboardInterrupt\n", "KeyboardInterrupt"),
        "shuts-down": ("get_ipython().kernel.do_shutdown(False)\nget_ipython().ask_exit()\n", ""),
        "asks": ("name = input()\n", "StdinNotImplementedError"),
        "kills-parent": ("import os\nos.kill(os.getppid(), 9)\n", "ended the Python process"),
        "kills-all": ("import os\nos.kill(-1, 9)\n", "ended the Python process"),
    },
    "takes": {
        "forks": (
            "import os\nwhile True:\n    try:\n        os.fork()\n"
            "    except OSError:\n        pass\n",
            "more processes",
        ),
        "takes-memory": (
            "kept = []\nwhile True:\n    kept.append(bytearray(b'x' * 2**28))\n",
            "memory",
        ),
        "prints": ("while True:\n    print('x' * 1000)\n", "It printed without end"),
        "fills-disk": (
            "import itertools\nfor place in ('/out', '/tmp', '/dev/shm', '/home/learner'):\n"
            "    try:\n        with open(f'{place}/full', 'wb') as file:\n"
            "            for _ in range(200):\n                file.write(bytes(2**20))\n"
            "    except OSError:\n        pass\nimport os\nos._exit(1)\n",
            "",
        ),
    },
    "hangs": {
        "loops": (
            "while True:\n    try:\n        while True:\n            pass\n"
            "    except KeyboardInterrupt:\n        pass\n",
            "",
        ),
        "waits": (
            "import time\nwhile True:\n    try:\n        time.sleep(10**6)\n"
            "    except KeyboardInterrupt:\n        pass\n",
            "",
        ),
        "stops-parent": (
            "import os, signal, time\nos.kill(os.getppid(), signal.SIGSTOP)\ntime.sleep(10**6)\n",
            "the whole run was ended",
        ),
    },
}
LEAVES = {  # what stays behind, or would harm the next: each answer is right but for that
    "left-over": (
        "import subprocess\n"
        f"subprocess.Popen(['sleep', '{LEFT_OVER}'], start_new_session=True)\n"
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(10**6,)).start()\n"
    ),
    "start-up": (
        "import os\nfrom pathlib import Path\n"
        "for home in (Path.home(), Path('/root')):\n"
        "    try:\n        place = home / '.ipython/profile_default/startup'\n"
        "        place.mkdir(parents=True, exist_ok=True)\n"
        "        (place / '00.py').write_text('raise SystemExit')\n"
        "    except OSError:\n        pass\n"
    ),
    "rewrites": (
        "import course_lib.checks\nfrom pathlib import Path\n"
        "for path in [*Path('/course').rglob('*.py'), *Path('/work').rglob('*')]:\n"
        "    try:\n        path.write_text('raise SystemExit')\n"
        "    except OSError:\n        continue\n    raise RuntimeError(path)\n"
    ),
}


def hand_in_all(small_class, mine: Mapping[str, tuple[str, str]]) -> None:
    for student, (text, _) in mine.items():
        small_class.hand_in(f"{student}.ipynb", **{**NOTHING, "toy_1": text})


def are_ended(found, mine: Mapping[str, tuple[str, str]]) -> None:
    """Hold that each of these has no points for this exercise, and is told why."""
    for student, (_, says) in mine.items():
        status = "not judged" if student in ENDS["hangs"] else "wrong"  # it may be the machine
        assert statuses(found[student]) == [status, "not done", "not done"], found[student]
        assert says in found[student].verdicts[0].detail, found[student]
