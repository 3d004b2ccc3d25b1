"""Exercise 1 of 14_checkpoint: publish a checkpoint whole or not at all."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from course_lib.checkpoint.manifest import MANIFEST
from course_lib.checkpoint.power_cut import Cut, DiskFiles, EmulatedDisk, Operation, cuts
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise, described, failed
from course_lib.checks.limits import little_memory

KEPT = "other run/manifest.json"  # of another run: the answer has to leave it

IN_PLACE = Cause(
    "Written in place: a cut now leaves neither the old checkpoint nor the new one. Leave what is "
    "published as it is, and write beside it."
)
MANIFEST_FIRST = Cause(
    "The manifest says that all files are there, so it comes last: publish it when they are."
)
MANIFEST_TORN = Cause(
    "A write can be cut in the middle. Write the manifest under another name, then rename it: a "
    "rename happens wholly or not at all."
)
DATA_NOT_SYNCED = Cause(
    "A file that was written is in the cache of the operating system: after a power cut the "
    "manifest may be there, and the data not. sync() each file before you publish."
)
MANIFEST_NOT_SYNCED = Cause(
    "The rename reached the disk before the content of the manifest: sync() the manifest, then "
    "rename it."
)
NAMES_NOT_SYNCED = Cause(
    "A power cut may undo the rename: call sync_names() after it, before you remove anything of "
    "the old checkpoint, and before you return."
)
OLD_TOO_EARLY = Cause(
    "The old checkpoint is changed before the new one is published: publish first, then remove."
)
OLD_NOT_HIDDEN = Cause(
    "While you remove the old checkpoint, it still has its manifest, but not all of its data: "
    "remove the manifest first. Without it, the folder does not count as a checkpoint."
)
OLD_STAYS = Cause("When the new checkpoint is safe, remove every file of the old one.")
LEFT = Cause(
    "A file stays that does not belong there: your temporary file, or a file of a killed save."
)
TRUSTED = Cause("A file that a killed save left may be cut in the middle: write it again.")
REMOVED = Cause("You remove a file of your own: remove what a killed save left before you write.")
ANOTHER_FOLDER = Cause(
    "Every folder with a manifest.json counts as a checkpoint: publish only when all is in `new`."
)
NOT_ALL = Cause("Write every file of `files` and the manifest into `new`, under their names.")
NO_OLD = Cause("At the first save there is no older checkpoint: old is None.")
NOT_OURS = Cause("Remove only files of the folders `old` and `new`.")
OTHER_CONTENT = Cause("Write the bytes that you were given.")


@dataclass(frozen=True)
class RecordedSave:
    """One call: what was there, what it did, and what should be there; `raised`: its error."""

    text: str
    before: DiskFiles
    new: str
    old: str | None
    need: DiskFiles
    operations: tuple[Operation, ...]
    raised: str = ""


def checkpoint_of(step: int, num_files: int) -> tuple[DiskFiles, bytes]:
    """Return the files of a small checkpoint, and its manifest, which holds their contents.

    Of several files, the first sorts before `manifest.json`, the others behind it.
    """
    names = ["adam", *(f"rank{number}" for number in range(1, num_files))]
    names = names[:num_files] if num_files > 1 else ["rank1"] * num_files
    files = {name: f"{name} of step {step}".encode() for name in names}
    return files, json.dumps({name: each.decode() for name, each in files.items()}).encode()


def is_whole(files: DiskFiles, folder: str) -> bool:
    """Return whether all that a folder's manifest promises is there."""
    try:
        promised = json.loads(files[f"{folder}/{MANIFEST}"])
    except ValueError:
        return False
    return all(files.get(f"{folder}/{name}") == each.encode() for name, each in promised.items())


class SurvivesCuts:
    """Records what an answer does to an emulated disk; judges what every cut leaves of it."""

    def observe(self, answer: Callable[..., Any]) -> Iterator[RecordedSave]:
        """Let the answer save: over an old checkpoint, the first one, after a killed save."""
        for text, num_files, num_older, folder, left in (
            ("4 files, over an older checkpoint", 4, 4, "step-", ()),
            ("the first checkpoint, 2 files", 2, 0, "step-", ()),
            ("1 file, where a save was killed before; the older one has 3", 1, 3, "step-",
             ("rank0", "rank1", "manifest.new")),
            ("the first checkpoint, where a save was killed before", 2, 0, "run a/at ",
             ("adam", "manifest.tmp", "x.tmp", "zz")),
            ("3 files, over an older one in another folder", 3, 2, "run b/at ", ("notes.txt",)),
        ):  # fmt: skip
            new, old = f"{folder}2", f"{folder}1" if num_older else None
            files, manifest = checkpoint_of(2, num_files)
            older, promised = checkpoint_of(1, num_older)
            before = {f"{old}/{name}": each for name, each in older.items()} if old else {}
            before |= {f"{old}/{MANIFEST}": promised} if old else {}
            before |= {KEPT: b"{}", **{f"{new}/{name}": b"st" for name in left}}
            need = {f"{new}/{name}": each for name, each in files.items()}
            need |= {f"{new}/{MANIFEST}": manifest, KEPT: b"{}"}
            disk, raised = EmulatedDisk(before), ""
            try:
                with little_memory():
                    answer(disk, dict(files), manifest, new, old)
            except (NotImplementedError, MemoryError):
                raise
            except Exception as error:
                raised = described(error)
            yield RecordedSave(text, before, new, old, need, tuple(disk.operations), raised)

    def judge(self, observed: Iterable[RecordedSave], exercise: Exercise) -> str:
        """Demand old or new after every cut, and the new one alone at the end."""
        del exercise
        number = 0
        for saved in observed:
            if saved.raised:
                cause = NO_OLD if saved.old is None else None
                raise failed(f"{saved.text}: your code raised {saved.raised}", cause)
            for cut in cuts(saved.before, saved.operations):
                _judge_cut(saved, cut)
                number += 1
            _judge_end(saved)
        return f"Cut at every moment, {number} times: old or new, never a mix."


def _judge_cut(saved: RecordedSave, cut: Cut) -> None:
    where = f"{saved.text}: {cut.how}{_place(saved, cut)}"
    manifests = [name for name in cut.files if name.endswith(f"/{MANIFEST}")]
    for folder in (name.removesuffix(f"/{MANIFEST}") for name in manifests):
        if not is_whole(cut.files, folder):
            cause = _why_broken(saved, cut, folder)
            raise failed(f"{where}: {folder} is published, and not whole", cause)
    if not any(f"{one}/{MANIFEST}" in cut.files for one in (saved.new, saved.old)) and saved.old:
        in_place = _touches(saved, cut.done, saved.old, "write")
        cause = NAMES_NOT_SYNCED if _is_renamed(saved, cut) else OLD_TOO_EARLY
        raise failed(f"{where}: no checkpoint is there", IN_PLACE if in_place else cause)


def _is_renamed(saved: RecordedSave, cut: Cut) -> bool:
    """Return whether the new manifest had its name when the cut came, synced or not."""
    return any(one.to == f"{saved.new}/{MANIFEST}" for one in saved.operations[: cut.done])


def _why_broken(saved: RecordedSave, cut: Cut, folder: str) -> Cause:
    if folder == saved.old:
        if _touches(saved, cut.done, folder, "write"):
            return IN_PLACE
        return OLD_NOT_HIDDEN if _is_renamed(saved, cut) else OLD_TOO_EARLY
    if folder != saved.new:
        return ANOTHER_FOLDER
    manifest = f"{folder}/{MANIFEST}"
    whole_manifest = cut.files[manifest] == saved.need[manifest]
    if not whole_manifest:
        directly = _touches(saved, cut.done, manifest, "write")
        return MANIFEST_TORN if directly else MANIFEST_NOT_SYNCED
    data = [name for name in saved.need if name.startswith(f"{folder}/") and name != manifest]
    written = {one.name: one.content for one in saved.operations if one.kind == "write"}
    if any(name not in written and name in saved.before for name in data):
        return TRUSTED
    if not all(name in written for name in data):
        return NOT_ALL
    if any(written[name] != saved.need[name] for name in data):
        return OTHER_CONTENT
    if any(one.kind == "remove" and one.name in data for one in saved.operations[: cut.done]):
        return REMOVED if _touches_last(saved, data) else DATA_NOT_SYNCED
    later = any(one.kind == "write" for one in saved.operations[cut.done :])
    return MANIFEST_FIRST if later else DATA_NOT_SYNCED


def _touches_last(saved: RecordedSave, names: Iterable[str]) -> bool:
    """Return whether one of these files was removed after it had been written."""
    last = {one.to or one.name: one.kind for one in saved.operations if one.kind != "sync"}
    return any(last.get(name) == "remove" for name in names)


def _touches(saved: RecordedSave, done: int, name: str, kind: str) -> bool:
    """Return whether an operation up to the cut is of this kind, on this file or in this folder."""
    return any(
        one.kind == kind and (one.name == name or one.name.startswith(f"{name}/"))
        for one in saved.operations[: done + 1]
    )


def _judge_end(saved: RecordedSave) -> None:
    disk = EmulatedDisk(saved.before)
    for one in saved.operations:
        disk.do(one)
    for name, content in saved.need.items():
        if disk.files.get(name) != content:
            raise failed(*_why_missing(saved, name, name in disk.files))
    *_, last = cuts(saved.before, saved.operations)
    after_a_cut = [cut for cut in cuts(saved.before, saved.operations) if cut.done == last.done]
    manifest = f"{saved.new}/{MANIFEST}"
    if _touches_last(saved, saved.need):
        raise failed(f"{saved.text}: a new file is gone at the end", REMOVED)
    if any(manifest not in cut.files for cut in after_a_cut):
        raise failed(f"{saved.text}: power cut after the save: it is not there", NAMES_NOT_SYNCED)
    more = sorted(disk.files.keys() - saved.need.keys())
    if more:
        cause = OLD_STAYS if saved.old and more[0].startswith(f"{saved.old}/") else LEFT
        raise failed(f"{saved.text}: {more[0]} is still there at the end", cause)


def _why_missing(saved: RecordedSave, name: str, there: bool) -> tuple[str, Cause]:
    if _touches_last(saved, [name]) and name != KEPT:
        return f"{saved.text}: {name} is gone at the end", REMOVED
    if name == KEPT:
        return f"{saved.text}: {name} is gone", NOT_OURS
    if there:
        return f"{saved.text}: {name} has other bytes at the end", OTHER_CONTENT
    return f"{saved.text}: {name} is not there at the end", NOT_ALL


def _place(saved: RecordedSave, cut: Cut) -> str:
    if cut.done == len(saved.operations):
        return " after the last call"
    before = "" if cut.how.endswith("middle") else " before"
    return f"{before} `{saved.operations[cut.done]}`"


CLEANS, WRITE = "for left in", 'disk.write(f"{new}/{name}", content)'
DATA = f"""\
    for name, content in files.items():
        {WRITE}
        disk.sync(f"{{new}}/{{name}}")
"""
RENAME = 'disk.rename(f"{new}/manifest.tmp", f"{new}/manifest.json")'
OLD_LOOP = 'for name in sorted(disk.names(old), key=lambda name: name != "manifest.json"):'
OLD_FIRST = "for name in disk.names(old or ''):\n    disk.remove(f'{old}/{name}')"
LATE = """\
disk.sync_names()
for name in {*there} & {*disk.names(new)}:
    disk.remove(f"{new}/{name}")"""
MOVES = """\
disk.sync_names()
for name in disk.names(new):
    disk.rename(f"{new}/{name}", f"{final}/{name}")
disk.sync_names()"""
STAYS, NO_CLEANING = ("if old:", "if False:"), ("disk.remove(left)", "pass")

PUBLISH = Exercise(
    key="checkpoint-1",
    title="publish whole or not at all",
    check=SurvivesCuts(),
    wrong=(
        Edit(CLEANS, f"new = old or new\n{CLEANS}", IN_PLACE, also=(STAYS, NO_CLEANING)),
        Edit(RENAME, 'disk.write(f"{new}/manifest.json", manifest)', MANIFEST_TORN),
        Edit(DATA, "", MANIFEST_FIRST, also=((f"    {RENAME}\n", f"    {RENAME}\n{DATA}"),)),
        Edit(CLEANS, f"{OLD_FIRST}\n{CLEANS}", OLD_TOO_EARLY, also=(STAYS,)),
        Edit('disk.sync(f"{new}/{name}")', "pass", DATA_NOT_SYNCED),
        Edit('disk.sync(f"{new}/manifest.tmp")', "pass", MANIFEST_NOT_SYNCED),
        Edit("disk.sync_names()", "pass", NAMES_NOT_SYNCED),
        Edit(OLD_LOOP, "for name in disk.names(old):", OLD_NOT_HIDDEN),
        Edit(OLD_LOOP, 'for name in ("manifest.json", *files):', OLD_STAYS),
        Edit(*NO_CLEANING, LEFT),
        Edit("disk.names(new)]", "disk.names(new) if old]", LEFT),
        Edit(
            CLEANS,
            f"there = {{*disk.names(new)}} & {{*files}}\n{CLEANS}",
            TRUSTED,
            also=(
                ("disk.names(new)]", "disk.names(new) if name not in files]"),
                (WRITE, f"if name not in there:\n    {WRITE}"),
            ),
        ),
        Edit(
            CLEANS,
            f"there = disk.names(new)\n{CLEANS}",
            REMOVED,
            also=(NO_CLEANING, ("disk.sync_names()", LATE)),
        ),
        Edit(
            CLEANS,
            f"final, new = new, f'tmp {{new}}'\n{CLEANS}",
            ANOTHER_FOLDER,
            also=(("disk.sync_names()", MOVES),),
        ),
        Edit("if old:", "if True:", NO_OLD),
        Edit("in files.items():", "in list(files.items())[:1]:", NOT_ALL),
    ),
)
