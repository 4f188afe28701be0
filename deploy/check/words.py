#!/usr/bin/env python3
"""Doc comments in plain words: none begins with Who, What, Whether or None.

A doc comment is shown alone on hover. One that begins with a relative clause names no thing, and one that begins
with `None` explains a value before it says what the item is. "Returns `None` if …" and a noun are the remedy.
"""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOC = re.compile(r"\s*//[/!] ?(.*)$")
FIRST = re.compile(r"(Who|Whoever|What|Whatever|Whether|None)\b")
# A value that is explained as "None: …" in the middle of a comment.
VALUE = re.compile(r"(?:^|[.;] )None: ")


def problems(text):
    """Line numbers of doc comments that begin badly, and of values that are explained in passing."""
    before = False
    for number, line in enumerate(text.splitlines(), 1):
        doc = DOC.match(line)
        words = doc[1] if doc and not line.lstrip().startswith("////") else None
        if words is not None and (VALUE.search(words) or (not before and FIRST.match(words))):
            yield number
        # A paragraph of a comment begins after an empty line of it, too.
        before = words is not None and words != ""


def main():
    names = subprocess.run(
        ["git", "ls-files", "-z", "*.rs"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\0")
    under = tuple(sys.argv[1:]) or ("",)
    found = [
        f"{name}:{number}"
        for name in names
        if name and name.startswith(under)
        for number in problems((ROOT / name).read_text())
    ]
    for place in found:
        print(f"words: {place}: a doc comment begins with Who, What, Whether or None", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
