#!/usr/bin/env python3
"""report.py DIR [--list FILE] [--known FILE]...: one line for each spec while critest runs, and the sum at its end.

Standard input is critest's output, which is kept in DIR/critest.log. The sum is of DIR/report.json, which critest
writes at its end; DIR/specs.tsv has the state, the seconds, the name and the failure of each spec. A list has the name
of a spec in each line: each of them has to pass. A file of known failures has a name, a tab and the reason in each
line. Lines that begin with # are comments. Status: 0 if critest ended, everything passed that had to, and of the specs
that ran exactly the known ones failed.
"""

import argparse
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
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


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


def entries(file):
    """The lines of a list, without comments."""
    return [line for line in map(str.strip, file.read_text().splitlines()) if line and not line.startswith("#")]


def known_failures(files):
    """Why specs fail, by their names."""
    found = {}
    for line in (line for file in files for line in entries(file)):
        name, _, reason = line.partition("\t")
        found[name] = reason
    return found


def line_of(block, known):
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
    result = (state["state"] or PASSED).lower()
    reason = known.get(block[0].removesuffix(LABEL)) if result == FAILED else None
    why = f" [known: {reason}]" if reason else ""
    return one_line(result, float(state["seconds"]), block[0], message) + why


def follow(output, log, known):
    """Prints a line for each spec that ends."""
    block = []
    for line in output:
        log.write(line)
        line = line.rstrip("\n")
        if not RULE.match(line):
            block.append(line)
            continue
        text, block = line_of(block, known), []
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
    for name in listed:
        state, message = states.get(name, ("unknown", ""))
        if state != PASSED:
            yield "listed, and not passed: " + one_line(state, 0, name, message)


def not_as_known(found, known):
    """Lines for the known failures that have passed, and for those that critest does not have."""
    states = {name: state for state, _, name, _ in found}
    for name, reason in known.items():
        if name not in states:
            yield f"known, and not there: {name}"
        elif states[name] == PASSED:
            yield f"a known failure passed: {name}: {reason}"


def beside_specs(report):
    """Lines for what went wrong with critest itself, such as its time limit."""
    for suite in json.loads(report.read_text()):
        for reason in suite.get("SpecialSuiteFailureReasons") or []:
            yield f"critest failed: {reason}"
        for node in suite["SpecReports"] or []:
            if node["LeafNodeType"] != "It" and node["State"] not in (PASSED, SKIPPED):
                yield f"critest's {node['LeafNodeType']} {node['State']}"


def total(found, known):
    """Prints the sum, and returns how many specs failed that are not known to."""
    counts = collections.Counter(state for state, *_ in found)
    failed = sum(counts.values()) - counts[PASSED] - counts[SKIPPED]
    expected = sum(state == FAILED and name in known for state, _, name, _ in found)
    print(f"{counts[PASSED]} passed, {failed} failed ({expected} known), {counts[SKIPPED]} skipped")
    return failed - expected


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--list", type=pathlib.Path)
    parser.add_argument("--known", type=pathlib.Path, action="append", default=[])
    return parser.parse_args()


def main():
    given = arguments()
    folder, known = given.folder, known_failures(given.known)
    with open(folder / "critest.log", "w") as log:
        follow(sys.stdin, log, known)
    if not (folder / "report.json").exists():
        print(f"cri: critest ended early: {folder}/critest.log", file=sys.stderr)
        return 1
    found = sorted(specs(folder / "report.json"))
    (folder / "specs.tsv").write_text("".join(f"{s}\t{t:.3f}\t{n}\t{m}\n" for s, t, n, m in found))
    wrong = [*not_passed(found, entries(given.list) if given.list else []), *not_as_known(found, known),
             *beside_specs(folder / "report.json")]
    for line in wrong:
        print(f"cri: {line}")
    return 1 if total(found, known) or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
