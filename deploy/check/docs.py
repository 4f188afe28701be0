#!/usr/bin/env python3
"""The documents: links lead somewhere, named tests exist, sizes stay readable, no crate is missing in
ARCHITECTURE and in the table of its floor.

The table of causes of drops in docs/networks.md has those of the switch, and no others.

README fits one screen and ARCHITECTURE 10 KB, so that both are read. The glossary has at most 25 words: a
longer list means that the code speaks a language of its own.
"""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
README_LINES = 60
ARCHITECTURE_BYTES = 10_000
GLOSSARY_WORDS = 25
FLOORS = ["base", "spec", "backend", "device", "host", "sandbox", "front"]


def documents():
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.split()
    return {ROOT / name: (ROOT / name).read_text() for name in names if (ROOT / name).exists()}


def without_code(text):
    return re.sub(r"^(```.*?^```|    .*?$)", "", text, flags=re.M | re.S)


def anchors(text):
    """The anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def broken_links(pages):
    for path, text in pages.items():
        for link in re.findall(r"\]\(([^)\s]+)\)", without_code(text)):
            if re.match(r"[a-z]+:", link):
                continue
            name, _, anchor = link.partition("#")
            target = (path.parent / name).resolve() if name else path
            if not target.exists():
                yield f"{path.relative_to(ROOT)}: {link} does not exist"
            elif anchor and target in pages and anchor not in anchors(pages[target]):
                yield f"{path.relative_to(ROOT)}: {link} has no such heading"


def missing_tests(pages):
    for path, text in pages.items():
        for name in re.findall(r"tests/e2e/[\w-]+\.(?:sh|py)", text):
            if not (ROOT / name).exists():
                yield f"{path.relative_to(ROOT)}: {name} does not exist"


def oversized(pages):
    lines = len(pages[ROOT / "README.md"].splitlines())
    if lines > README_LINES:
        yield f"README.md has {lines} lines; {README_LINES} are one screen"
    size = len(pages[ROOT / "ARCHITECTURE.md"].encode())
    if size > ARCHITECTURE_BYTES:
        yield f"ARCHITECTURE.md has {size} bytes, of {ARCHITECTURE_BYTES}"
    rows = re.findall(r"^\| ([^|]+) \|", pages[ROOT / "docs/glossary.md"], flags=re.M)
    words = [row for row in rows if row != "word"]
    if len(words) > GLOSSARY_WORDS:
        yield f"docs/glossary.md has {len(words)} words, of {GLOSSARY_WORDS}"
    if words != sorted(words):
        yield "docs/glossary.md is not in alphabetical order"


def missing_crates(pages):
    """Crates that the table of floors does not name. `*-spec` stands for all of `spec/`."""
    named = set(re.findall(r"`([\w*-]+)`", pages[ROOT / "ARCHITECTURE.md"]))
    for floor in ["base", "backend", "device", "host", "sandbox", "front"]:
        for manifest in sorted((ROOT / floor).glob("*/Cargo.toml")):
            if manifest.parent.name not in named:
                yield f"ARCHITECTURE.md does not name {floor}/{manifest.parent.name}"


def unlisted_crates(pages):
    """Crates that the table of their floor's README does not have, and rows without a crate."""
    for floor in FLOORS:
        folders = {manifest.parent.name for manifest in (ROOT / floor).glob("*/Cargo.toml")}
        rows = re.findall(r"^\| `([\w-]+)` \|", pages[ROOT / floor / "README.md"], flags=re.M)
        for name in sorted(folders.symmetric_difference(rows)):
            problem = "lacks a row for" if name in folders else "has a row for a crate that is not there:"
            yield f"{floor}/README.md {problem} {name}"
        for name in sorted({name for name in rows if rows.count(name) > 1}):
            yield f"{floor}/README.md has two rows for {name}"


def causes_of_drops(pages):
    """Causes of drops that the table in docs/networks.md lacks, or that the switch does not have."""
    source = (ROOT / "backend/switch/src/stats.rs").read_text()
    declared = set(re.findall(r'^    [A-Z]\w+ = "([\w-]+)",$', source, flags=re.M))
    page = pages[ROOT / "docs/networks.md"]
    table = re.search(r"^\| cause \| \|\n(?:\|.*\n)*", page, flags=re.M)
    cells = re.findall(r"^\| (`[^|]+) \|", table[0] if table else "", flags=re.M)
    written = {name for cell in cells for name in re.findall(r"`([\w-]+)`", cell)}
    for name in sorted(declared.symmetric_difference(written)):
        problem = "lacks the cause" if name in declared else "has a cause that is not there:"
        yield f"docs/networks.md {problem} {name}"


def main():
    pages = documents()
    checks = [broken_links, missing_tests, oversized, missing_crates, unlisted_crates, causes_of_drops]
    found = [line for check in checks for line in check(pages)]
    for line in found:
        print(f"docs: {line}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
