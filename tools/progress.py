"""Run a long command behind one line that says what it is at; standard library, old syntax."""

import queue
import re
import shutil
import subprocess
import sys
import threading
import time


def run_showing(command, title, cwd=None, lines=None, env=None):
    """Run a command, showing one line that moves; return its exit code and its output lines.

    Output is appended to `lines` where given, so that it can be read even after Ctrl-C.
    """
    lines = [] if lines is None else lines
    progress = Progress(title)
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        for line in lines_or_ticks(process.stdout):
            if line:
                lines.append(line)
            progress.show(doing(line))
        process.stdout.close()
        code = process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    progress.end(code)
    return code, lines


def lines_or_ticks(stream):
    """Yield the lines of a stream as they come, and an empty line in every quiet second."""
    arriving = queue.Queue()
    threading.Thread(target=read_lines, args=(stream, arriving), daemon=True).start()
    while True:
        try:
            line = arriving.get(timeout=1)
        except queue.Empty:
            line = ""
        if line is None:
            return
        yield line


def read_lines(stream, arriving):
    """Put each line of a stream in the queue, and None at its end."""
    for line in stream:
        arriving.put(line.decode("utf-8", "replace").rstrip())
    arriving.put(None)


def doing(line):
    """Say in a few words what a line of uv's or pip's output reports; empty if nothing new."""
    found = re.match(r"\s*(Collecting|Downloading) ([^\s;<>=~!]+)(.*)", line)
    if found and found.group(1) == "Collecting":
        return "looking up " + found.group(2)
    if found:
        size = re.search(r"\([\d.]+ ?[kMG]i?B\)", found.group(3))
        name = found.group(2).rsplit("/", 1)[-1].split("-")[0]
        return f"downloading {name} {size.group() if size else ''}".strip()
    found = re.match(r"(Resolved|Prepared) (\d+) packages", line)
    if found:  # of uv
        doing_now = {"Resolved": "downloading", "Prepared": "unpacking"}[found.group(1)]
        return f"{doing_now} {found.group(2)} packages"
    if line.startswith("Installing collected packages"):
        return f"unpacking {line.count(',') + 1} packages, the longest part"
    if "Retrying (" in line:
        return "the registry does not answer, trying again"
    return ""


class Progress:
    """A line that moves on a terminal; in a log file a new line every 15 seconds."""

    def __init__(self, title):
        self.title = title
        self.start_s = self.shown_s = time.time()
        self.detail = ""
        self.moving = sys.stdout.isatty()
        print(title, end="" if self.moving else "\n", flush=True)

    def show(self, detail=""):
        """Say how long it has taken and what it is at, if the last time was long enough ago."""
        self.detail = detail or self.detail
        now_s = time.time()
        if now_s - self.shown_s >= (0.2 if self.moving else 15):
            self.shown_s = now_s
            self.write(f"{now_s - self.start_s:.0f} s {self.detail}")

    def write(self, text):
        """Write over the moving line, or a new line where nothing can move."""
        if self.moving:
            width = shutil.get_terminal_size().columns - 1
            print("\r" + f"{self.title} {text}"[:width].ljust(width), end="", flush=True)
        else:
            print("      " + text, flush=True)

    def end(self, code):
        """Close the line."""
        self.write(f"{'failed' if code else 'done'} after {time.time() - self.start_s:.0f} s")
        if self.moving:
            print(flush=True)
