"""Wrong answers to exercise 1 of 14_checkpoint, each with one mistake: saves that a cut breaks."""

from collections.abc import Callable
from typing import Any

from course_lib.checkpoint.manifest import MANIFEST


def in_place(disk: Any, files: Any, manifest: bytes, new: str, old: str | None) -> None:
    place = old or new
    for name, content in files.items():
        disk.write(f"{place}/{name}", content)
        disk.sync(f"{place}/{name}")
    disk.write(f"{place}/{MANIFEST}", manifest)
    disk.sync(f"{place}/{MANIFEST}")
    disk.sync_names()


def directly(disk: Any, files: Any, manifest: bytes, new: str, old: str | None) -> None:
    for name, content in {**files, MANIFEST: manifest}.items():
        disk.write(f"{new}/{name}", content)
        disk.sync(f"{new}/{name}")
    disk.sync_names()


def removes_first(disk: Any, files: Any, manifest: bytes, new: str, old: str | None) -> None:
    for name in disk.names(old or ""):
        disk.remove(f"{old}/{name}")
    directly(disk, files, manifest, new, old)


def manifest_first(disk: Any, files: Any, manifest: bytes, new: str, old: str | None) -> None:
    disk.write(f"{new}/manifest.tmp", manifest)
    disk.sync(f"{new}/manifest.tmp")
    disk.rename(f"{new}/manifest.tmp", f"{new}/{MANIFEST}")
    for name, content in files.items():
        disk.write(f"{new}/{name}", content)
        disk.sync(f"{new}/{name}")
    disk.sync_names()


def known_left(names: Callable[[str], bool]) -> Callable[..., None]:
    """Return an answer that removes only left-overs of some names."""

    def answer(disk: Any, files: Any, manifest: bytes, new: str, old: str | None) -> None:
        for name in disk.names(new):
            if names(name):
                disk.remove(f"{new}/{name}")
        _right(disk, files, manifest, new, old)

    answer.__name__ = names.__name__
    return answer


def of_ranks(name: str) -> bool:
    return name.startswith(("rank", "manifest"))


def not_temporary(name: str) -> bool:
    return not name.endswith(".tmp")


def _right(disk: Any, files: Any, manifest: bytes, new: str, old: str | None) -> None:
    """Save, after left-overs were removed."""
    for name, content in files.items():
        disk.write(f"{new}/{name}", content)
        disk.sync(f"{new}/{name}")
    disk.write(f"{new}/manifest.new", manifest)
    disk.sync(f"{new}/manifest.new")
    disk.rename(f"{new}/manifest.new", f"{new}/{MANIFEST}")
    disk.sync_names()
    for name in sorted(disk.names(old), key=lambda name: name != MANIFEST) if old else ():
        disk.remove(f"{old}/{name}")


def only_over_an_old_one(disk: Any, files: Any, manifest: bytes, new: str, old: str | None) -> None:
    for name in disk.names(new) if old else ():
        disk.remove(f"{new}/{name}")
    _right(disk, files, manifest, new, old)


def ranks_of_the_old(disk: Any, files: Any, manifest: bytes, new: str, old: str | None) -> None:
    for name in disk.names(new):
        disk.remove(f"{new}/{name}")
    _right(disk, files, manifest, new, None)
    for name in disk.names(old) if old else ():
        if name == MANIFEST or name.startswith("rank"):
            disk.remove(f"{old}/{name}")


def as_they_come(disk: Any, files: Any, manifest: bytes, new: str, old: str | None) -> None:
    for name in disk.names(new):
        disk.remove(f"{new}/{name}")
    _right(disk, files, manifest, new, None)
    for name in disk.names(old) if old else ():
        disk.remove(f"{old}/{name}")


def resumes(disk: Any, files: Any, manifest: bytes, new: str, old: str | None) -> None:
    there = set(disk.names(new))
    for name in there - set(files):
        disk.remove(f"{new}/{name}")
    _right(disk, {name: files[name] for name in files if name not in there}, manifest, new, old)


def cleans_late(disk: Any, files: Any, manifest: bytes, new: str, old: str | None) -> None:
    there = disk.names(new)
    _right(disk, files, manifest, new, old)
    for name in set(there) & set(disk.names(new)):
        disk.remove(f"{new}/{name}")


def staged(disk: Any, files: Any, manifest: bytes, new: str, old: str | None) -> None:
    for name in disk.names(new):
        disk.remove(f"{new}/{name}")
    _right(disk, files, manifest, f"tmp {new}", None)
    for name in (*files, MANIFEST):
        disk.rename(f"tmp {new}/{name}", f"{new}/{name}")
    disk.sync_names()
    for name in sorted(disk.names(old), key=lambda name: name != MANIFEST) if old else ():
        disk.remove(f"{old}/{name}")
