#!/usr/bin/env python3
"""The layout of Rust files: lines of at most 100 columns, and files that fit in the head.

A file over 500 lines says why in its head, in a line that begins with "Over 500 lines:". Columns are characters, comments and
strings included, which rustfmt leaves alone; a row of a table in a doc comment cannot be broken, and may be longer.

The words of the glossary are the sources' own: each is in use, or it is deleted from the glossary.
"""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
COLUMNS, LINES = 100, 500
REASON = re.compile(r"^//! Over 500 lines: \S", re.M)
TABLE = re.compile(r"\s*//[/!] \|")


def head(text):
    """The inner doc comment at the beginning of a file."""
    return re.match(r"(?:(?://!.*|)\n)*", text)[0]


def problems(name, text):
    """One line for each thing that is wrong with a file."""
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > COLUMNS and not TABLE.match(line):
            yield f"{name}:{number}: {len(line)} columns, of {COLUMNS}"
    lines = text.count("\n")
    reason = REASON.search(head(text))
    if lines > LINES and not reason:
        yield f"{name}: {lines} lines, and the head has no line `//! Over 500 lines: REASON`"
    if lines <= LINES and reason:
        yield f"{name}: {lines} lines: delete `Over 500 lines` from the head"


def unused(texts):
    """Words of the glossary that no source uses."""
    glossary = (ROOT / "docs/glossary.md").read_text()
    everything = "\n".join(texts).lower()
    for words in re.findall(r"^\| ([^|]+) \|", glossary, flags=re.M)[1:]:
        for word in words.split(","):
            word = word.strip().lower()
            if not re.search(rf"(?<![a-z]){re.escape(word)}s?(?![a-z])", everything):
                yield f"docs/glossary.md: no source uses the word `{word}`"


def main():
    names = subprocess.run(["git", "ls-files", "*.rs"], cwd=ROOT, check=True, capture_output=True, text=True)
    texts = {name: (ROOT / name).read_text() for name in names.stdout.split()}
    found = [problem for name, text in texts.items() for problem in problems(name, text)]
    found += unused(texts.values())
    for problem in found:
        print(f"layout: {problem}")
    return bool(found)


sys.exit(main())
