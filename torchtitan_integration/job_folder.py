"""The folder of a job: whether files can be written there, and what each run leaves in it.

Contract
    Asking leaves nothing behind. Permissions are not read: a file is written, since they know
    nothing of a full disk, a quota, or a file system without files.
    `ranks/latest` is the newest run, with its own copy of the report.
    One run at a time holds the folder: two would write one report, and each other's checkpoints.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from torchtitan_integration.run_output import runs_in

PROBE: Final = bytes(1 << 16)
"""Bytes of the file that is written to see whether one can be."""
LATEST: Final = "latest"
LOCK: Final = ".run"
"""File that a run holds; it has the number of the run's process."""


def why_no_file_in(folder: Path) -> str:
    """Return why no file can be written in a folder that may not exist yet, "" where one can."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        return f"{there} is a file"
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(PROBE)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return f"no file can be written in {there} ({error.strerror})"
    return ""


def why_not_written(path: Path) -> str:
    """Return why a file of this name cannot be written, "" where it can."""
    if path.is_dir():
        return "it is a folder; write the name of a file"
    if path.exists() and not path.is_file():
        return "it is a device or a pipe; write the name of a file"
    return why_no_file_in(path.parent)


@contextlib.contextmanager
def held(folder: Path) -> Iterator[str]:
    """Hold a job's folder; yield the process of another run that holds it, "" where none does.

    A run that was killed holds nothing. Where no file can be locked, nothing is held.
    """
    with contextlib.ExitStack() as stack:
        other = ""
        with contextlib.suppress(OSError):  # what is wrong with the folder is said elsewhere
            folder.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((folder / LOCK).open("a+"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                lock.truncate(0)
                lock.write(str(os.getpid()))
                lock.flush()
            except BlockingIOError:
                lock.seek(0)
                other = lock.read() or "unknown"
        yield other


def linked(lines: Iterable[str], logs: Path) -> Iterator[str]:
    """Yield the lines of a run, once the first has come with its folder as `latest`."""
    for number, line in enumerate(lines):
        if number == 0:
            link_newest(logs)
        yield line


def link_newest(logs: Path) -> None:
    """Have `latest` name the newest run; do nothing where there is none or no link can be made."""
    newest, link = runs_in(logs)[-1:], logs / LATEST
    if not newest or (link.exists() and not link.is_symlink()):
        return
    partial = logs / f".{LATEST}.{os.getpid()}"
    try:
        partial.symlink_to(newest[0].name)
        partial.replace(link)
    except OSError:
        partial.unlink(missing_ok=True)


def keep_report(report: Path, logs: Path) -> str:
    """Copy a run's report into its own folder; return why not, "" where it is done."""
    newest = runs_in(logs)[-1:]
    try:
        for run in newest:
            shutil.copyfile(report, run / report.name)
    except OSError as error:
        return str(error)
    return ""
