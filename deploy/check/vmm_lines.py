#!/usr/bin/env python3
"""Counts the lines of code that `slipway-vmm` links of the floors above `base/` and `spec/`, and fails above the bar.

A tenant's VMM is what stands between the tenant and the host, so it has to stay small enough to be read. Lines that are
blank or comments do not count, nor does what only tests, fuzz targets or other programs compile: items and modules
behind `#[cfg(test)]` or behind a feature that `slipway-vmm` does not ask for.

usage: vmm_lines.py [--verbose]
"""

import re
import subprocess
import sys
from pathlib import Path

MOST = 12_000
PROGRAM = "slipway-vmm-process"
BELOW = {"base", "spec"}

STRING = re.compile(r'"(\\.|[^"\\])*"|\'(\\.|[^\'\\])\'')
COMMENT = re.compile(r"//.*")
MODULE = re.compile(r"^(pub(\([^)]*\))? )?mod (\w+);")


def main():
    root = Path(__file__).resolve().parents[2]
    total = 0
    for name, folder, features in linked(root):
        files = dict(sources(folder, features))
        count = sum(files.values())
        total += count
        print(f"{count:6}  {name}")
        if "--verbose" in sys.argv:
            for path, lines in sorted(files.items(), key=lambda item: -item[1]):
                print(f"        {lines:6}  {path.relative_to(root)}")
    print(f"{total:6}  in all, of {MOST:,} at most")
    if total > MOST:
        sys.exit(f"vmm_lines: slipway-vmm links {total:,} lines of code, more than {MOST:,}")


def linked(root):
    """Yields name, folder and features of each crate of this workspace that the program links."""
    command = ["cargo", "tree", "--package", PROGRAM, "--edges", "normal", "--prefix", "none", "--format", "{p};{f}"]
    lines = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    found = {}
    for line in lines.splitlines():
        crate, features = line.removesuffix(" (*)").split(";")
        here = re.search(r"\((/[^)]*)\)", crate)
        if here:
            found[Path(here[1])] = (crate.split()[0], set(filter(None, features.split(","))))
    for folder, (name, features) in sorted(found.items()):
        if folder.relative_to(root).parts[0] not in BELOW:
            yield name, folder, features


def sources(folder, features):
    """Yields each source file that is compiled, and its lines of code."""
    pending = [file for file in (folder / "src/lib.rs", folder / "src/main.rs") if file.exists()]
    seen = set()
    while pending:
        path = pending.pop()
        if path in seen:
            continue
        seen.add(path)
        code, modules = compiled(path.read_text(), features)
        yield path, code
        own = path.parent if path.name in ("lib.rs", "main.rs", "mod.rs") else path.with_suffix("")
        for module in modules:
            places = [own / f"{module}.rs", own / module / "mod.rs"]
            pending += [place for place in places if place.exists()]


def compiled(text, features):
    """Returns the number of lines of code, and the modules in files of their own."""
    lines = [line.strip() for line in text.splitlines()]
    count, modules, at = 0, [], 0
    while at < len(lines):
        line = lines[at]
        if line.startswith("#[cfg(") and not holds(line, features):
            at = end_of_item(lines, at + 1)
            continue
        if line and not line.startswith("//"):
            count += 1
        module = MODULE.match(line)
        if module:
            modules.append(module[3])
        at += 1
    return count, modules


def holds(attribute, features):
    """Returns whether what `#[cfg(…)]` asks for is so: no test, and one of the features that it names, if any."""
    wanted = re.findall(r'feature = "([^"]+)"', attribute)
    if "not(" in attribute:
        return True
    return any(feature in features for feature in wanted) if wanted else "test" not in attribute


def end_of_item(lines, at):
    """Returns the index behind the item that begins at or after `at`, with its other attributes."""
    while lines[at].startswith(("#[", "//")):
        at += 1
    depth, opened = 0, False
    while at < len(lines):
        line = COMMENT.sub("", STRING.sub("", lines[at]))
        depth += sum(map(line.count, "{([")) - sum(map(line.count, "})]"))
        opened = opened or "{" in line
        at += 1
        if depth <= 0 and (opened or line.endswith((";", ","))):
            break
    return at


if __name__ == "__main__":
    main()
