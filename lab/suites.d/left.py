"""What a test of containerd's leaves in the node: processes, mounts, sandboxes and files. For run.py and stress.py.

From the environment: LAB_ROOTS, the directories of the tests' containerd, which `clean` empties; LAB_HOLD, a file that
keeps the node from starting containerd again; LAB_SLIPWAY.
"""

import os
import pathlib
import shutil
import signal
import subprocess
import time

ROOTS = [pathlib.Path(root) for root in os.environ.get("LAB_ROOTS", "").split(":") if root]
GRACE = 10
SLIPWAY = os.environ.get("LAB_SLIPWAY", "")


def wait(seconds, done):
    """Waits until `done` says so, and returns whether it did."""
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True


def serves(address):
    return subprocess.run(["ctr", "--address", address, "--connect-timeout", "2s", "version"], check=False,
                          stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


def processes():
    """The processes of the node: their parents and names by their ids, without those that have ended."""
    found = {}
    for entry in pathlib.Path("/proc").iterdir():
        try:
            if entry.name.isdigit():
                head, _, rest = (entry / "stat").read_text().rpartition(")")
                state, parent = rest.split()[:2]
                if state not in "ZX":
                    found[int(entry.name)] = (int(parent), head.partition("(")[2])
        except OSError:
            pass
    return found


def strays(before):
    """Processes that are new, and neither this one's nor of what ran before, such as the VMMs of a daemon."""
    now = processes()
    servers = set(before) - {1, os.getpid()}

    def ours(pid):
        while pid in now and pid not in (1, os.getpid()):
            if pid in servers:
                return True
            pid = now[pid][0]
        return False

    # A loop of the node's that waits to start containerd again is no stray, nor is its sleep.
    return {pid: name for pid, (_, name) in now.items()
            if pid not in before and (name == "containerd" or not ours(pid))}


def sandboxes():
    """What Slipway's daemon has: a line each, without a head."""
    if not SLIPWAY:
        return []
    out = subprocess.run([SLIPWAY, "ps", "--all"], check=False, capture_output=True, text=True, timeout=120).stdout
    return out.splitlines()[1:]


def mounts(roots=None):
    """Where something is mounted below the roots, the last one first."""
    found = [line.split()[4] for line in pathlib.Path("/proc/self/mountinfo").read_text().splitlines()]
    roots = [str(root) for root in roots or ROOTS]
    return [at for at in reversed(found) if any(at == root or at.startswith(f"{root}/") for root in roots)]


def end(before):
    """Kills the strays by their ids, and returns their names."""
    ended = []
    deadline = time.monotonic() + 20
    while (found := strays(before)) and time.monotonic() < deadline:
        for pid, name in found.items():
            try:
                os.kill(pid, signal.SIGKILL)
                ended.append(name)
            except OSError:
                pass
        time.sleep(0.1)
    return ended


def clean(before):
    """Ends and removes what is left, and returns a line for each kind of it."""
    hold = pathlib.Path(os.environ["LAB_HOLD"])
    hold.touch()
    # A shim ends a little later than its last container. containerd is there as long as its node starts it.
    wait(GRACE, lambda: not set(strays(before).values()) - {"containerd"})
    lines, ended = [], end(before)
    if ended := sorted(set(ended) - {"containerd"}):
        lines.append("processes: " + " ".join(ended))
    if found := sandboxes():
        lines.append(f"{len(found)} sandboxes or containers")
        subprocess.run([SLIPWAY, "rm", "--force", "--all"], check=False, timeout=300,
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    if found := mounts():
        lines.append(f"{len(found)} mounts")
        for at in found:
            subprocess.run(["umount", "--lazy", at], check=False, stderr=subprocess.DEVNULL)
    for root in ROOTS:
        shutil.rmtree(root, ignore_errors=True)
    hold.unlink()
    return lines
