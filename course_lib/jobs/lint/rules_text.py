"""Rules about the text itself: what sbatch refuses or, worse, silently ignores."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from difflib import get_close_matches

from course_lib.jobs.lint.directives import NAMES, PREFIX, head_lines, options_of, split_words
from course_lib.jobs.lint.script import LintFinding, Script

NOT_QUITE = re.compile(
    r"(\s+#\s*SBATCH|#\s+SBATCH|#\s*(?!SBATCH)(?i:sbatch)|#(SBACTH|SBTACH|SBATHC|BATCH))\s+-"
)
LOOK_ALIKES = {
    "–": "an en dash for -", "—": "an em dash for --", "‑": "a typographic hyphen for -",
    "−": "a minus sign for -", "“": 'a curly quote for "', "”": 'a curly quote for "',
    "‘": "a curly quote for '", "’": "a curly quote for '", "\u00a0": "a no-break space",
}  # fmt: skip


def carriage_returns(script: Script) -> Iterator[LintFinding]:
    """Find lines with Windows line ends."""
    if "\r\n" in script.text:
        yield LintFinding(
            script.text[: script.text.index("\r\n")].count("\n") + 1,
            "crlf",
            "lines end with a carriage return, as Windows writes them",
            "sbatch refuses the script, and bash reads the invisible sign as part of each word",
            "Take it out: sed -i 's/\\r$//' FILE, and set your editor to Unix line ends.",
        )


def shebang(script: Script) -> Iterator[LintFinding]:
    """Find a first line that names no shell, or a shell that lacks what the script uses."""
    first = script.lines[0]
    if script.text.startswith("\ufeff") or not first.startswith("#!"):
        marked = "an invisible mark stands before #!, as some editors put it there"
        yield LintFinding(
            1,
            "no-shebang",
            marked if script.text.startswith("\ufeff#!") else "the first line names no shell",
            "sbatch refuses a script whose first line does not begin with #! and a shell",
            "Put #!/bin/bash into the first line, with nothing before it.",
        )
    elif not re.match(r"#!\s*/", first):
        yield LintFinding(
            1,
            "no-shell",
            f"{first[:30]} is no path from the root: a / is missing",
            "sbatch accepts the script; the job fails at once, because nobody finds its shell",
            "Write #!/bin/bash.",
        )
    elif re.match(r"#!\s*/bin/(sh|dash)\b|#!.*env sh\b", first):
        for command in script.commands:
            if command.name in ("[[", "mapfile", "declare") or "pipefail" in command.text.split():
                yield LintFinding(
                    command.line,
                    "not-bash",
                    f"{command.text.split()[0]!r} needs bash; line 1 says {first}",
                    "on many systems /bin/sh is a smaller shell, which ends here with an error",
                    "Write #!/bin/bash in the first line.",
                )
                return


def unknown_options(script: Script) -> Iterator[LintFinding]:
    """Find directives that sbatch cannot read; of several in a line, the first."""
    unknown = {
        one.line: one.option
        for one in reversed(script.directives)
        if not one.is_known and not set(one.option) & set(LOOK_ALIKES)
    }
    for line, option in unknown.items():
        near = get_close_matches(option.lstrip("-").partition("=")[0], sorted(NAMES), n=1)
        is_option = option.startswith("-") or "=" in option
        meant = f"Write --{near[0]}, if that is meant." if near else "See sbatch --help."
        yield LintFinding(
            line,
            "unknown-option",
            f"sbatch knows no option {option!r}" if is_option else f"{option!r} is no option",
            "sbatch refuses the script",
            meant if is_option else "Quote a value that has blanks, and put # before a remark.",
        )


def short_equals(script: Script) -> Iterator[LintFinding]:
    """Find `-t=1:00:00`: the = after a long name is part of the value after a short one."""
    for number, line in head_lines("\n".join(script.lines)):
        if line.startswith(PREFIX) and (found := re.search(r"\s(-[A-Za-z])=(\S*)", line)):
            yield LintFinding(
                number,
                "short-equals",
                f"{found[0].strip()} asks for the value '={found[2]}'",
                "a short option takes no =: sbatch refuses the script, or a log is called =log",
                f"Write {found[1]} {found[2]}, or the option's long name with =.",
            )


def continued_directives(script: Script) -> Iterator[LintFinding]:
    """Find directives that should continue in the next line."""
    for number, line in head_lines("\n".join(script.lines)):
        following = "".join(script.lines[number : number + 1])
        is_cut = line.startswith(PREFIX) and line.rstrip().endswith("\\")
        if is_cut and following.strip() and not following.startswith("#"):
            yield LintFinding(
                number,
                "one-line",
                "a backslash, as if the directive went on in the next line",
                "sbatch reads directives line by line; bash runs the next line as a command",
                f"Begin each line with {PREFIX}, and take the backslash away.",
            )


def look_alikes(script: Script) -> Iterator[LintFinding]:
    """Find characters that look like others, as text copied from a web page has."""
    for number, line in enumerate(script.lines, start=1):
        if line.lstrip().startswith("#") and not line.startswith(PREFIX):
            continue
        found = [sign for sign in LOOK_ALIKES if _stands_in_for(sign, line)]
        if found:
            yield LintFinding(
                number,
                "look-alike",
                f"{LOOK_ALIKES[found[0]]} in {line.strip()[:50]!r}",
                "it looks right but is another sign, so the option is not understood",
                "Type it again on the keyboard.",
            )


def _stands_in_for(sign: str, line: str) -> bool:
    """Return whether bash would read the character that it looks like in this place."""
    is_there = re.search(rf"(^|[\s=#H]){sign}|{sign}\s*$|{sign}\w", line)
    return bool(is_there) and not _is_quoted(line, sign)


def _is_quoted(line: str, sign: str) -> bool:
    """Return whether it is in quotes or in a comment, where any character may be."""
    before = line[: line.index(sign)]
    return before.count('"') % 2 == 1 or before.count("'") % 2 == 1 or " #" in before


def almost_directives(script: Script) -> Iterator[LintFinding]:
    """Find comments that were meant as directives."""
    for number, line in head_lines("\n".join(script.lines)):
        if (found := NOT_QUITE.match(line)) and not _is_on_purpose(script, line[found.end() - 1 :]):
            yield LintFinding(
                number,
                "no-directive",
                f"{line.strip()[:50]!r} is a comment for sbatch",
                "sbatch ignores it silently, and the job gets the default instead",
                f"Write {PREFIX} in capitals at the first column, without a blank after the #; to "
                "switch a directive off, write ##SBATCH.",
            )


def _is_on_purpose(script: Script, text: str) -> bool:
    """Return whether it shows how to call sbatch, or is an alternative directive."""
    options = [one.option for one in options_of(0, split_words(text))]
    return bool(re.fullmatch(r"\S+\.\w+", options[-1])) or all(map(script.option, options))


def late_directives(script: Script) -> Iterator[LintFinding]:
    """Find directives after the first command."""
    head = head_lines("\n".join(script.lines))
    if not script.commands:
        return
    first = script.commands[0].line
    for number, line in enumerate(script.lines[len(head) :], start=len(head) + 1):
        if re.match(rf"\s*{PREFIX}\s+-", line):
            yield LintFinding(
                number,
                "late-directive",
                f"a directive after the first command, which is in line {first}",
                "sbatch stops reading there, and ignores it silently",
                f"Move it up, before line {first}.",
            )


def blank_after_backslash(script: Script) -> Iterator[LintFinding]:
    """Find lines that only seem to continue."""
    for number, line in enumerate(script.lines, start=1):
        if re.search(r"(?<!\\)\\[ \t]+$", line) and not line.lstrip().startswith("#"):
            yield LintFinding(
                number,
                "blank-after-backslash",
                "a blank stands after the backslash at the end of the line",
                "the command ends here, and the next line is run as a command of its own",
                "Delete what stands after the backslash.",
            )


def bash_syntax(script: Script) -> Iterator[LintFinding]:
    """Find syntax errors that bash reports."""
    bash = shutil.which("bash")
    if not bash or not script.is_bash or "\r\n" in script.text:
        return
    done = subprocess.run(
        [bash, "-n", "-s"],
        input=script.text,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=10,
    )
    found = re.search(r"line (\d+): (.+)", done.stderr)
    if done.returncode and found:
        number = min(int(found[1]), script.text.rstrip().count("\n") + 1)
        blank = re.search(r"<[A-Za-z][\w -]*>", script.lines[number - 1])
        yield LintFinding(
            number,
            "bash-syntax",
            f"bash cannot read it: {found[2]}",
            "sbatch accepts the script; the job fails after it has waited in the queue",
            f"Put what you want in place of {blank[0]}."
            if blank
            else "Look at this line and above it for an if, loop or quote that is not closed.",
        )


RULES = (
    carriage_returns,
    shebang,
    unknown_options,
    short_equals,
    continued_directives,
    look_alikes,
    almost_directives,
    late_directives,
    blank_after_backslash,
    bash_syntax,
)
