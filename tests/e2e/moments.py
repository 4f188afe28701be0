"""Waits for a step of the start of a sandbox, of a change of its size, or of its save, by what the host shows of it.

usage: moments.py DATA_DIR RUN_DIR OTHER NAME STEP CLIENT

The steps of the sandbox NAME are in `STEPS`. OTHER is the pool of which it takes a function, or the template or snapshot that
is made of it: the sandbox that is made for the template OTHER is found by that name too. The container that comes to a pod or
goes from it is named "victim". Prints the process id of its VMM, or 0.
The status is 1 if the process CLIENT, which asked for it, ended before the step was seen.
"""

import json
import pathlib
import sys
import time

LISTENS = "00010000"


class Sandbox:
    def __init__(self, data, run, other, name):
        self.records = pathlib.Path(data) / "sandboxes"
        self.templates = pathlib.Path(data) / "templates"
        self.run, self.other, self.name = pathlib.Path(run), other, name

    def record(self):
        """The record on disk, or an empty one."""
        for path in self.records.glob("*/record.json"):
            try:
                record = json.loads(path.read_text())
            except FileNotFoundError:
                continue
            if self.name in (record["name"], record.get("saves")):
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
            if LISTENS in words and self.run in path.parents and path.name.startswith(f"{self.other}."):
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

    def has_room(self):
        """The control group is to have room for memory that the guest does not have yet."""
        record = self.record()
        return bool(record) and record["memory"]["granted_bytes"] > record["memory_bytes"]

    def has_grown(self):
        record = self.record()
        return bool(record) and record["memory_bytes"] > record["memory"]["boot_bytes"]

    def has_more_cpus(self):
        record = self.record()
        return bool(record) and record["cpus"] > record["boot_cpus"]

    def container(self):
        """The record of the container that comes or goes, or an empty one."""
        return next((one for one in self.record().get("added", []) if one["name"] == "victim"), {})

    def has_region(self):
        return self.container().get("region") is not None

    def has_bound(self):
        """The control group is to have room for memory in the container's region."""
        region = self.container().get("region")
        return region is not None and self.record()["bound"]["granted_bytes"][region] > 0

    def has_saved(self, file):
        """A file of the template or snapshot is there, and is not empty. The directory gets its name at the end."""
        for end in (".unfinished", ""):
            try:
                if (self.templates / (self.other + end) / file).stat().st_blocks > 0:
                    return True
            except FileNotFoundError:
                pass
        return False

    def has_template(self):
        return (self.templates / self.other).is_dir()

    def is_being_saved(self):
        """The template or snapshot has a directory, whole or not."""
        return self.has_template() or (self.templates / f"{self.other}.unfinished").is_dir()


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
    # `slipway update --memory`.
    "granted": Sandbox.has_room,
    "grown": Sandbox.has_grown,
    # A container of a pod comes with its memory and CPUs, and goes.
    "added": Sandbox.container,
    "region": Sandbox.has_region,
    "bound": Sandbox.has_bound,
    "cpus": Sandbox.has_more_cpus,
    "begun": lambda sandbox: sandbox.container().get("state") == "running",
    "ending": lambda sandbox: sandbox.container().get("state") == "stopping",
    # A template or a snapshot is made. A sandbox stands still for a snapshot, from the copy of the rest of its memory on.
    "unfinished": Sandbox.is_being_saved,
    "memory": lambda sandbox: sandbox.has_saved("memory"),
    "stands": lambda sandbox: sandbox.record().get("saving"),
    "layer": lambda sandbox: sandbox.has_saved("layer"),
    "machine": lambda sandbox: sandbox.has_saved("machine"),
    "described": lambda sandbox: sandbox.has_saved("template.json"),
    "whole": Sandbox.has_template,
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
