"""Waits for a step of the start of a sandbox, by what the host shows of it.

usage: moments.py DATA_DIR RUN_DIR POOL NAME STEP CLIENT

The steps of the sandbox NAME, which takes a function of POOL, are in `STEPS`. Prints the process id of its VMM, or 0.
The status is 1 if the process CLIENT, which asked for the start, ended before the step was seen.
"""

import json
import pathlib
import sys
import time

LISTENS = "00010000"


class Sandbox:
    def __init__(self, data, run, pool, name):
        self.records = pathlib.Path(data) / "sandboxes"
        self.run, self.pool, self.name = pathlib.Path(run), pool, name

    def record(self):
        """The record on disk, or an empty one."""
        for path in self.records.glob("*/record.json"):
            try:
                record = json.loads(path.read_text())
            except FileNotFoundError:
                continue
            if record["name"] == self.name:
                return record
        return {}

    def has_directory(self):
        record = self.record()
        return bool(record) and (self.run / "s" / record["id"]).is_dir()

    def has_function(self):
        """A function of the pool listens, as those do that are taken."""
        for line in pathlib.Path("/proc/net/unix").read_text().splitlines():
            words = line.split()
            path = pathlib.Path(words[-1])
            if LISTENS in words and self.run in path.parents and path.name.startswith(f"{self.pool}."):
                return True
        return False

    def vmm(self):
        """The process of the record's user id that prints into a file of this node, or 0."""
        uid = self.record().get("vmm_uid")
        if uid is None:
            return 0
        for process in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                if f"\nUid:\t{uid}\t" not in (process / "status").read_text():
                    continue
                printed = (process / "fd/1").readlink()
            except OSError:
                continue
            if self.run in printed.parents:
                return int(process.name)
        return 0


STEPS = {
    # It is on disk, and `ps` shows it.
    "created": lambda sandbox: sandbox.record(),
    # It has a user id and a control group.
    "starting": lambda sandbox: sandbox.record().get("state") == "starting",
    "directory": Sandbox.has_directory,
    "function": Sandbox.has_function,
    # Its VMM is a process; the record does not say so yet.
    "process": Sandbox.vmm,
    "launched": lambda sandbox: sandbox.record().get("vm"),
    "running": lambda sandbox: sandbox.record().get("state") == "running",
}


def runs(process):
    """Whether a process is there and no zombie."""
    try:
        stat = pathlib.Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(") ")[2][0] not in "ZX"


def main():
    *of, step, client = sys.argv[1:]
    sandbox = Sandbox(*of)
    while not STEPS[step](sandbox):
        if not runs(client):
            # The last step may have been passed between the two looks.
            print(sandbox.vmm())
            sys.exit(1)
        time.sleep(0.001)
    print(sandbox.vmm())


main()
