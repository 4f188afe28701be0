#!/usr/bin/env python3
"""The layout of Rust files: lines of at most 100 columns, and files that fit in the head.

A file over 500 lines says why in its head, in a line that begins with "Over 500 lines:". Columns are characters, comments and
strings included, which rustfmt leaves alone; a row of a table in a doc comment cannot be broken, and may be longer.

A crate without examples in its documentation says `doctest = false`, so that rustdoc does not look for them.

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
FENCE = re.compile(r"\s*//[/!] ```(.*)$")
# The words behind a fence that rustdoc compiles.
CODE = {"", "rust", "no_run", "should_panic", "compile_fail"}


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


def has_example(text):
    """Whether the documentation in a file has code that rustdoc compiles."""
    fences = [match[1] for line in text.splitlines() if (match := FENCE.match(line))]
    return any(word in CODE for word in fences[::2])


def examples(texts):
    """One line for each crate whose manifest is wrong about examples."""
    for manifest in sorted(ROOT.glob("*/*/Cargo.toml")):
        crate = manifest.parent.relative_to(ROOT)
        if not (manifest.parent / "src/lib.rs").exists():
            continue
        tested = "doctest = false" not in manifest.read_text()
        found = [name for name, text in texts.items() if name.startswith(f"{crate}/src/") and has_example(text)]
        if found and not tested:
            yield f"{crate}/Cargo.toml: `doctest = false`, and {found[0]} has an example"
        if tested and not found:
            yield f"{crate}/Cargo.toml: no file has an example: say `doctest = false` below [lib]"


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
    found += examples(texts)
    found += unused(texts.values())
    for problem in found:
        print(f"layout: {problem}")
    return bool(found)


sys.exit(main())
