"""Answers that try to gain points which they did not earn, by kind, and what they get."""

import re
from collections.abc import Mapping
from pathlib import Path

from tests.grading.hostile_class import NOTHING, graded_class, statuses

SPLIT = "return [x // y + (i < x % y) for i in range(y)]"
RIGHT_SPLIT = f"def add(x, y):\n    {SPLIT}\n"
WRONG = "def add(x, y):\n    return [-1]\n"
WRONG_MEAN = "def mean(x):\n    return x\n"
EVEN_CUT = "from course_lib.pipeline.token_pipeline import even_cut\n"
SENDS = """
def mean(x):
    other = 1 - dist.get_rank()
    theirs = torch.empty_like(x)
    for turn in (0, 1):
        if turn == dist.get_rank():
            dist.send(x, other)
        else:
            dist.recv(theirs, other)
    mine = x.clone()
    {instead}
    return (mine + theirs) / 2
"""
PATCHED = """
import sys
from types import SimpleNamespace
import course_lib.checks, course_tools.grading.observing as observing
def passed(key, *_, **__):
    print(f"{key}: right. Well done.")
"""
# what is tried, by its kind and by the student who tries it: the answer to toy-1, wrong each time
GAINS = {
    "patches the check": {
        "patched-check": PATCHED
        + "for m in (course_lib.checks, course_lib.checks.exercise, observing):\n"
        + "    m.check = passed\n"
        + WRONG,
        "patched-explained": PATCHED
        + "import contextlib\n"
        + "course_lib.checks.exercise._explain = observing.explained = contextlib.nullcontext\n"
        + WRONG,
        "sys-modules": PATCHED
        + "fake = SimpleNamespace(check=passed)\n"
        + "sys.modules['course_tools.grading.observing'] = fake\n"
        + "sys.modules['course_lib.checks'] = fake\n"
        + WRONG,
        "frozen-check": PATCHED
        + "exercise = course_lib.checks.find_exercise('toy-1')\n"
        + "object.__setattr__(exercise, 'check', lambda answer: 'Well done.')\n"
        + "course_lib.checks.exercise.find_exercise = lambda key: exercise\n"
        + "observing.find_exercise = lambda key: exercise\n"
        + WRONG,
        "judge-here": PATCHED
        + "from course_lib.checks.cases import Cases\n"
        + "Cases.judge = Cases.compare = lambda *_: 'Well done.'\n"
        + WRONG,
    },
    "changes what a cell does": {
        "ast-transformer": "import ast\n"
        "class Passes(ast.NodeTransformer):\n"
        "    def visit_Expr(self, node):\n"
        "        return ast.parse(\"print('toy-1: right. Well done.')\").body[0]\n"
        "get_ipython().ast_transformers.append(Passes())\n" + WRONG,
        "input-transformer": "get_ipython().input_transformers_post.append(\n"
        "    lambda lines: [\"print('toy-1: right. Well done.')\\n\"])\n" + WRONG,
        "events": PATCHED
        + "get_ipython().events.register('pre_run_cell', lambda info: setattr(\n"
        + "    info, 'raw_cell', ''))\n"
        + "get_ipython().events.register('post_run_cell', lambda result: passed('toy-1'))\n"
        + WRONG,
    },
    "hands in the library's own": {
        "library-lambda": f"{EVEN_CUT}add = lambda x, y: even_cut(x, y)\n",
        "library-partial": f"from functools import partial\n{EVEN_CUT}add = partial(even_cut)\n",
        "library-code": f"from types import FunctionType\n{EVEN_CUT}"
        "add = FunctionType(even_cut.__code__, even_cut.__globals__)\n",
        "library-renamed": f"{EVEN_CUT}even_cut.__module__ = '__main__'\nadd = even_cut\n",
        "library-exec": f"import inspect\n{EVEN_CUT}"
        "names = dict(vars(inspect.getmodule(even_cut)))\n"
        "exec(inspect.getsource(even_cut), names)\nadd = names['even_cut']\n",
    },
    "reads the answer": {
        "reference": "def add(x, y):\n"
        "    from course_lib.checks import find_exercise\n"
        "    return find_exercise('toy-1').right(x, y)\n",
        "frozen-values": "def add(x, y):\n"
        "    from course_lib.checks import find_exercise\n"
        "    exercise = find_exercise('toy-1')\n"
        "    raise ValueError((exercise.wrong, exercise.reference))\n",
        "reads-all": "from pathlib import Path\n"
        "places = [Path('/work'), Path('/course/course_lib/checks'), Path('/home')]\n"
        "paths = [p for top in places for p in top.rglob('*') if p.suffix in ('.py', '.ipynb')]\n"
        "text = 'x // y' + ' + (i < x % y)'\n"
        "found = [str(p) for p in paths if text in p.read_text()]\n"
        "def add(x, y):\n    raise ValueError(found)\n",
        "looks-back": "import gc\nfrom types import FunctionType\n"
        "code = [f.__code__ for f in gc.get_objects() if type(f) is FunctionType]\n"
        "found = [c for c in code if c.co_filename.startswith('<cell ')]\n"
        "def add(x, y):\n    raise ValueError(found)\n",
    },
    "lies about equality": {
        "lies": "class Lies(list):\n"
        "    __eq__ = lambda *_: True\n"
        "    __hash__ = lambda *_: 0\n"
        "    __repr__ = lambda *_: '[2, 2]'\n"
        "    def __reduce__(self):\n"
        "        return eval, ('[2, 2]',)\n"
        "def add(x, y):\n    return Lies([-1])\n",
    },
}


def gain_nothing(split_class, out: Path, mine: Mapping[str, str]) -> None:
    """Hold that these patches and readings gain no point."""
    for student, text in mine.items():
        split_class.hand_in(f"{student}.ipynb", **{**NOTHING, "toy_1": text})
    found = graded_class(split_class, out)
    assert {student: found[student].status("toy-1") for student in mine} == dict.fromkeys(
        mine, "wrong"
    )
    told = {student: found[student].verdicts[0].detail for student in mine}
    for student in mine.keys() & {"reads-all", "looks-back"}:
        assert "ValueError: []" in told[student]
    for student in mine.keys() & {"frozen-values"}:
        assert "ValueError: ((), None)" in told[student]
    for student in mine.keys() & GAINS["hands in the library's own"].keys():
        assert re.search("even_cut: this is the library's own|the course's own", told[student])


FORGED = PATCHED + (
    "import json, os\n"
    "from pathlib import Path\n"
    "from course_tools.grading.plain_data import write_data\n"
    "out = Path(os.environ['COURSE_OUT'])\n"
)
# what tries to get past the check on ranks, or writes results: which answer, and its text
PAST = {
    "writes results": {
        "no-runs": (2, FORGED + "write_data([], out / 'toy-3.pt')\n"
        "observing.check = course_lib.checks.check = passed\n" + WRONG_MEAN),
        "no-ranks": (2, FORGED + "from course_lib.checks.on_ranks import Run\n"
        "write_data([Run(2, {}, [{}, {}])], out / 'toy-3.pt')\n"
        "observing.check = course_lib.checks.check = passed\n" + WRONG_MEAN),
        "other-key": (0, FORGED + "write_data([3, 3, 3], out / 'hidden-toy-1.pt')\n"
        "write_data('right', out / 'toy-1.pt')\nadd = lambda x, y: None\n"),
        "no-files": (0, FORGED + "os.mkfifo(out / 'toy-1.pt')\n"
        "os.symlink('/etc/passwd', out / 'toy-2.pt')\nobserving.check = passed\nadd = 1\n"),
    },
    "writes outcomes": {
        "outcomes": (0, FORGED + "fake = {n: {'how': 'passed', 'printed': 'toy-1: right. Well.'}\n"
        "    for n in ('given', 'exercise-toy-1', 'check-toy-1')}\n"
        "(out / 'outcomes.json').write_text(json.dumps(fake))\n"
        "os.kill(os.getppid(), 9)\nadd = 1\n"),
        "blames-machine": (0, FORGED + "fake = {'given': {'how': 'raised', 'name': 'Slow'}}\n"
        "(out / 'outcomes.json').write_text(json.dumps(fake))\n"
        "os.kill(os.getppid(), 9)\nos._exit(0)\n"),
        "deep-outcomes": (0, FORGED + "(out / 'outcomes.json').write_text('[' * 10**6)\n"
        "os.kill(os.getppid(), 9)\nos._exit(0)\n"),
    },
    "changes the record": {
        "cleared": (2, SENDS.format(instead="dist.group.WORLD.recorder.events.clear()\n"
        "    dist.all_reduce(x.clone())")),
        "emptied": (2, SENDS.format(instead="dist.group.WORLD.recorder.events = []\n"
        "    dist.all_reduce(x.clone())")),
        "muted": (2, SENDS.format(instead="dist.all_reduce(x.clone())").replace("    theirs =",
            "    dist.group.WORLD.recorder.add = lambda *_, **__: None\n    theirs =", 1)),
        "swapped": (2, SENDS.format(instead="from course_lib.ranks.recorder import Recorder\n"
        "    dist.group.WORLD.tracer.recorder = Recorder(dist.get_rank())\n"
        "    dist.all_reduce(x.clone())")),
        "added": (2, SENDS.format(instead="events = dist.group.WORLD.recorder.events\n"
        "    from dataclasses import replace\n"
        "    events[:] = [replace(events[0], kind='all_reduce', peer=None, num_bytes=16)]")),
    },
    "breaks what the next uses": {
        "helper": (0, "torch.Tensor.__truediv__ = lambda x, _: x\ndist.get_world_size = lambda: 1\n"
        "def add(x, y):\n    return x - y\n"),
    },
}  # fmt: skip


def forge_nothing(small_class, out: Path, mine: Mapping[str, tuple[int, str]]) -> None:
    """Hold that these forged results gain no point."""
    for student, (number, text) in mine.items():
        small_class.hand_in(f"{student}.ipynb", **{**NOTHING, f"toy_{number + 1}": text})
    found = graded_class(small_class, out)
    for student, (number, _) in mine.items():
        assert found[student].problem == "", student
        assert statuses(found[student])[number] == "wrong", found[student]
    for student in mine.keys() & PAST["changes the record"].keys():
        assert "the record of your calls was changed" in found[student].verdicts[2].detail
