#!/usr/bin/env python3
"""report.py DIR [LIST]: one line for each spec while critest runs, and the sum when it has ended.

Standard input is critest's output, which is kept in DIR/critest.log. The sum is of DIR/report.json, which critest
writes at its end; DIR/specs.tsv has the state, the seconds, the name and the failure of each spec. LIST is a file
with names of specs: each of them has to pass. Status: 0 if critest ended, and everything passed that had to.
"""

import collections
import json
import pathlib
import re
import sys

RULE = re.compile(r"-{20,}$")
STATE = re.compile(r"(?:•|S|P|↺)(?: \[(?P<state>[A-Z ]+)\])?.* \[(?P<seconds>[0-9.]+) seconds\]$")
FAILURE = re.compile(r"  \[(?:FAILED|PANICKED|TIMEDOUT|INTERRUPTED|ABORTED|SKIPPED)\] (?!in \[)(.*)$")
LABEL = " [Serial]"
# Columns of a failure that has several lines.
LONGEST = 300
PASSED, SKIPPED = "passed", "skipped"


def summary(lines):
    """A failure in one line: its first, and what that announces, without values as Go prints them."""
    lines = [line.strip() for line in lines]
    if not re.match(r"(Unexpected error:|Expected|Timed out|To satisfy)", lines[0]):
        return lines[0]
    end = next((at for at, line in enumerate(lines) if line == "{" or line.startswith("In [")), len(lines))
    return " ".join(lines[:end])[:LONGEST]


def one_line(state, seconds, name, message):
    name = name.removesuffix(LABEL)
    return f"{state:8} {seconds:6.1f} s  {name}" + (f": {message}" if message else "")


def line_of(block):
    """The line for a spec whose output is `block`, or `None` if it is no spec's."""
    if not block or not block[0].startswith("[k8s.io]"):
        return None
    state = next(filter(None, map(STATE.match, block)), None)
    if not state:
        return None
    message = ""
    for at, line in enumerate(block):
        if failure := FAILURE.match(line):
            message = summary([failure[1], *block[at + 1:]])
    return one_line((state["state"] or PASSED).lower(), float(state["seconds"]), block[0], message)


def follow(output, log):
    """Prints a line for each spec that ends."""
    block = []
    for line in output:
        log.write(line)
        line = line.rstrip("\n")
        if not RULE.match(line):
            block.append(line)
            continue
        text, block = line_of(block), []
        if text:
            print(text, flush=True)


def specs(report):
    """State, seconds, name and failure of each spec in critest's report."""
    for suite in json.loads(report.read_text()):
        for spec in suite["SpecReports"] or []:
            if spec["LeafNodeType"] == "It":
                message = summary(spec.get("Failure", {}).get("Message", "").split("\n"))
                name = " ".join([*(spec["ContainerHierarchyTexts"] or []), spec["LeafNodeText"]])
                yield spec["State"], spec["RunTime"] / 1e9, name, message


def not_passed(found, listed):
    """Lines for the listed specs that have not passed."""
    states = {name: (state, message) for state, _, name, message in found}
    for name in filter(None, map(str.strip, listed.read_text().splitlines())):
        state, message = states.get(name, ("unknown", ""))
        if state != PASSED:
            yield one_line(state, 0, name, message)


def main():
    folder = pathlib.Path(sys.argv[1])
    with open(folder / "critest.log", "w") as log:
        follow(sys.stdin, log)
    if not (folder / "report.json").exists():
        print(f"cri: critest ended early: {folder}/critest.log", file=sys.stderr)
        return 1
    found = sorted(specs(folder / "report.json"))
    (folder / "specs.tsv").write_text("".join(f"{s}\t{t:.3f}\t{n}\t{m}\n" for s, t, n, m in found))
    wrong = list(not_passed(found, pathlib.Path(sys.argv[2]))) if len(sys.argv) > 2 else []
    for line in wrong:
        print(f"cri: listed, and not passed: {line}")
    counts = collections.Counter(state for state, *_ in found)
    failed = sum(counts.values()) - counts[PASSED] - counts[SKIPPED]
    print(f"{counts[PASSED]} passed, {failed} failed, {counts[SKIPPED]} skipped")
    return 1 if failed or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
