#!/usr/bin/env python3
"""stress.py RUNTIME SECONDS DIR: containerd-stress with a runtime, and what it leaves in the node.

LAB_ADDRESS is containerd's socket, LAB_ROOTS has its directories. DIR/stress.log has what containerd-stress printed.
What the first container of a runtime makes for all that follow stays, so one second of it comes before. Status: 0 if no
container failed and nothing is left.
"""

import os
import pathlib
import re
import subprocess
import sys
import time

import left

IMAGE = "ghcr.io/containerd/alpine:3.14.0"
# Containers at once.
WORKERS = 2
# The time after the last container that its shim has to end in.
AFTER = 60
RESULT = re.compile(r"create/start/delete (\d+) containers in ([0-9.]+) seconds.*failures=(\d+)")
FAILURE = re.compile(r'level=error msg="running container \S+" error="?(.*?)"?$')


def run(runtime, seconds, log):
    """Runs containerd-stress, and returns how many containers there were, seconds, failures, and their errors."""
    command = ["containerd-stress", "--address", os.environ["LAB_ADDRESS"], "--runtime", runtime, "--image", IMAGE,
               "--concurrent", str(WORKERS), "--duration", f"{seconds}s"]
    done = subprocess.run(command, check=False, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=seconds + 300)
    log.write(done.stdout)
    found = RESULT.search(done.stdout)
    if not found:
        sys.exit(f"suites: containerd-stress ended with status {done.returncode}: {done.stdout[-500:]}")
    errors = [match[1] for match in map(FAILURE.search, done.stdout.splitlines()) if match]
    return int(found[1]), float(found[2]), int(found[3]), errors


def groups():
    """The control groups of containers and of VMMs in every hierarchy, without those that wait for a VMM."""
    return [path for path, _, _ in os.walk("/sys/fs/cgroup")
            if "/stress/" in path or "/slipway/" in path and "/pool-" not in path]


def seen():
    """What there is, by kinds."""
    names = [f"{name} {pid}" for pid, (_, name) in left.processes().items()
             if name.startswith(("containerd-shim", "slipway-", "qemu-", "runc"))]
    files = [str(path) for state in left.ROOTS for path in state.glob("io.containerd.runtime.v2.task/*/*")]
    return {"processes": names, "mounts": left.mounts(), "sandboxes and containers": left.sandboxes(),
            "control groups": groups(), "directories": files}


def main():
    runtime, seconds, folder = sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3])
    if not left.wait(120, lambda: left.serves(os.environ["LAB_ADDRESS"])):
        sys.exit("suites: containerd does not answer")
    with open(folder / "stress.log", "w") as log:
        run(runtime, 1, log)
        time.sleep(5)
        before = seen()
        total, took, failures, errors = run(runtime, seconds, log)

    def more():
        found = {kind: sorted(set(there) - set(before[kind])) for kind, there in seen().items()}
        return {kind: there for kind, there in found.items() if there}

    left.wait(AFTER, lambda: not more())
    leaks = more()
    for error in sorted(set(errors)):
        print(f"suites: {errors.count(error)} containers: {error}")
    for kind, there in leaks.items():
        print(f"suites: left: {len(there)} {kind}: {' '.join(there[:3])}")
    print(f"{total} containers in {took:.1f} s with {WORKERS} at once, {total / took:.3f} a second, {failures} failed;"
          f" {'something' if leaks else 'nothing'} is left")
    return 1 if failures or leaks or not total else 0


if __name__ == "__main__":
    sys.exit(main())
