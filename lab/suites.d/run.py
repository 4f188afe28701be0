#!/usr/bin/env python3
"""run.py SUITE DIR PROGRAM ARGUMENT...: runs each test of a suite of containerd's alone, one line each, then the sum.

SUITE is client or cri, PROGRAM the suite's test program with what every test is given. DIR gets SUITE.tsv (state,
seconds, name, whether a shim was started, why a failure is known, the failure in one line) and a folder SUITE with what
each test printed. From the environment: LAB_FOCUS and LAB_SKIP, regular expressions, one a line; LAB_LIMIT, seconds for
a test; LAB_RUNTIME; LAB_ROOTS, the directories that are emptied after a test. What a test leaves is ended
before the next one. Status: 0 if every test that failed is on a list in known/.
"""

import collections
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import left

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "critest"))
from report import LONGEST, PASSED, SKIPPED, one_line  # noqa: E402

HERE = pathlib.Path(__file__).resolve().parent
LIMIT = int(os.environ.get("LAB_LIMIT", "240"))
RESULT = re.compile(r"--- (PASS|FAIL|SKIP): (\S+) \(([0-9.]+)s\)$")
# What a test says of itself. Lines of a logger that tests give to containerd's client are not.
SAID = re.compile(r"    \s*(?!log_hook)\w+\.go:\d+: ?(.*)$")
# A field of testify's report of a failure, and a further line of it.
FIELD = re.compile(r"\s+\t(Error|Messages|Error Trace|Test):\s*\t?(.*)$")
FURTHER = re.compile(r"\s+\t\s+\t(.*)$")
FAILED = "failed"
STATES = {"PASS": PASSED, "FAIL": FAILED, "SKIP": SKIPPED}
SHIM = "connecting to shim "
Row = collections.namedtuple("Row", "state seconds name shim known message")


def known(suite, runtime):
    """Why tests fail, by their names: for every runtime, and for this one."""
    found = {}
    for file in (HERE / "known" / suite, HERE / "known" / f"{suite}-{runtime}"):
        for line in file.read_text().splitlines() if file.exists() else []:
            if line and not line.startswith("#"):
                name, _, reason = line.partition("\t")
                found[name] = reason
    return found


def checks(lines):
    """The failures that testify reports: the error of each, and the test's words for it."""
    error, messages, field = [], [], ""
    for line in [*lines, "        \tError:      \t"]:
        if match := FIELD.match(line):
            field, text = match.groups()
            if field == "Error" and error:
                yield " ".join(filter(None, [*messages, *error]))
                error, messages = [], []
        elif match := FURTHER.match(line):
            text = match[1]
        else:
            field = ""
        if field in ("Error", "Messages"):
            (error if field == "Error" else messages).append(text.strip())


def shortened(text):
    """A long text without its middle: a call's error ends with what it comes from."""
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else f"{text[:LONGEST // 3]} ... {text[-LONGEST * 2 // 3:]}"


def summary(lines):
    """Why a test failed, or was skipped, in one line: a panic, its first failed check, or the last that it said."""
    for line in lines:
        if line.startswith(("panic: ", "fatal error: ")):
            return shortened(line)
    for text in checks(lines):
        return shortened(text)
    said = [match[1] for match in map(SAID.match, lines) if match and match[1].strip()]
    return shortened(said[-1] if said else next((line for line in reversed(lines) if line.strip()), ""))


def result(name, lines, status):
    """State and failure of a test by what its program printed, and by its status (`None` if it took too long)."""
    for at, line in enumerate(lines):
        match = RESULT.match(line)
        if match and match[2] == name:
            state = STATES[match[1]]
            if state == PASSED and status != 0:
                return FAILED, f"the program's status is {status}: " + summary(lines[at + 1:])
            # Where a test has parts, what they said stands above, and some of it below.
            end = next((i for i in range(at + 1, len(lines)) if lines[i] in ("PASS", "FAIL")), len(lines))
            return state, "" if state == PASSED else summary(lines[:end])
    if status is None:
        return FAILED, f"it was killed after {LIMIT} s"
    return FAILED, "its program ended early: " + summary(lines)


class Suite:
    def __init__(self, suite, folder, command):
        self.suite, self.command = suite, command
        self.logs = folder / suite
        self.logs.mkdir(parents=True, exist_ok=True)
        self.daemon_log = folder / "containerd.log"
        # A containerd that is there already, for tests of CRI, is not kept after a failure either.
        self.before = {pid: found for pid, found in left.processes().items() if found[1] != "containerd"}

    def names(self):
        """The tests that were asked for, in the order of the program's sources."""
        listed = subprocess.run([*self.command, "-test.short", "-test.list", "^Test"], check=True, timeout=300,
                                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
        focus, skip = (os.environ.get(name, "").split("\n") for name in ("LAB_FOCUS", "LAB_SKIP"))
        for name in filter(re.compile("Test").match, listed.split()):
            if any(re.search(text, name) for text in focus):
                if not any(text and re.search(text, name) for text in skip):
                    yield name

    def ready(self):
        """Waits for the containerd that all tests of CRI share; a test of the client starts its own."""
        if self.suite == "cri":
            left.wait(120, lambda: left.serves(os.environ["LAB_ADDRESS"]))

    def run(self, name):
        """Runs one test and returns its state, seconds, failure, and whether containerd started a shim for it."""
        self.ready()
        mark = self.daemon_log.stat().st_size if self.daemon_log.exists() else 0
        start, log = time.monotonic(), self.logs / f"{name}.log"
        with open(log, "w") as out:
            command = [*self.command, "-test.v", "-test.run", f"^{name}$", "-test.timeout", f"{LIMIT}s"]
            program = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                                       start_new_session=True)
            try:
                status = program.wait(LIMIT + 60)
            except subprocess.TimeoutExpired:
                os.killpg(program.pid, signal.SIGKILL)
                program.wait()
                status = None
        text = log.read_text(errors="replace")
        state, message = result(name, text.splitlines(), status)
        said = text
        if self.daemon_log.exists():
            with open(self.daemon_log, errors="replace") as daemon:
                daemon.seek(mark)
                said += daemon.read()
        return state, time.monotonic() - start, message, SHIM in said

    def clean(self, state):
        """The containerd of CRI goes on after a test that passed. All else that a test left ends."""
        if self.suite == "client" or state == FAILED:
            for line in left.clean(self.before):
                print(f"suites: left: {line}", file=sys.stderr, flush=True)


def total(rows, reasons):
    """Prints the sum, and returns the status."""
    counts = collections.Counter(row.state for row in rows)
    failed = [row for row in rows if row.state == FAILED]
    for row in rows:
        if row.state == PASSED and row.known:
            print(f"suites: a known failure passed: {row.name}: {row.known}")
    if not os.environ.get("LAB_FOCUS") and not os.environ.get("LAB_SKIP"):
        for name in sorted(set(reasons) - {row.name for row in rows}):
            print(f"suites: known, and not there: {name}")
    unknown = [row for row in failed if not row.known]
    print(f"{counts[PASSED]} passed, {len(failed)} failed, {counts[SKIPPED]} skipped;"
          f" {len(failed) - len(unknown)} of the failures are known")
    started = [row for row in rows if row.shim]
    print(f"containerd started a shim in {len(started)} of these {len(rows)} tests, of which"
          f" {sum(row.state == PASSED for row in started)} passed")
    return 1 if unknown or not rows else 0


def run_all(suite, tests, reasons, rows, table):
    for test in tests:
        state, seconds, message, shim = suite.run(test)
        row = Row(state, seconds, test, shim, reasons.get(test, ""), message)
        rows.append(row)
        why = f" [known: {row.known}]" if row.known and state == FAILED else ""
        print(one_line(state, seconds, test, row.message) + why, flush=True)
        table.write(f"{state}\t{seconds:.3f}\t{test}\t{'shim' if shim else '-'}\t{row.known}\t{row.message}\n")
        table.flush()
        suite.clean(state)


def main():
    name, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    suite, reasons, rows = Suite(name, folder, sys.argv[3:]), known(name, os.environ["LAB_RUNTIME"]), []
    suite.ready()
    tests = list(suite.names())
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with open(folder / f"{name}.tsv", "w") as table:
        try:
            run_all(suite, tests, reasons, rows, table)
        except KeyboardInterrupt:
            print(f"suites: interrupted after {len(rows)} of {len(tests)} tests")
            return total(rows, {}) or 1
    return total(rows, reasons)


if __name__ == "__main__":
    sys.exit(main())
