"""The node under test: programs that are started again when they die, crictl and ctr, and what the kernel says."""

import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import threading
import time

WORK = pathlib.Path(os.environ["CHURN_NODE"])
LOGS = pathlib.Path(os.environ["CHURN_LOGS"])
ADDRESS = os.environ["CHURN_ADDRESS"]
SLIPWAY = os.environ["SLIPWAY"]
RUN_DIR = pathlib.Path(os.environ["SLIPWAY_RUN_DIR"])
DATA_DIR = pathlib.Path(os.environ["SLIPWAY_DATA_DIR"])
CRICTL = os.environ["CRICTL"]
# Seconds that one call of crictl may take: a pod boots slowly on a busy machine under emulation.
PATIENCE = 120


class Failed(Exception):
    """A command failed; the text is what it said last."""


def run(*argv, timeout=PATIENCE + 20):
    """Runs a command and returns its output."""
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout,
                              errors="replace", check=False)
    except subprocess.TimeoutExpired as late:
        raise Failed(f"{' '.join(argv[-3:])}: no answer in {timeout} s") from late
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines() or [f"status {done.returncode}"]
        raise Failed(lines[-1][-600:])
    return done.stdout


def crictl(*argv, timeout=PATIENCE):
    end = f"unix://{ADDRESS}"
    return run(CRICTL, "--config", str(WORK / "crictl.yaml"), "--runtime-endpoint", end, "--image-endpoint", end,
               "--timeout", f"{timeout}s", *argv, timeout=timeout + 20)


def crictl_json(what, *argv):
    return json.loads(crictl(what, "-o", "json", *argv))


def ctr(*argv):
    return run("ctr", "--address", ADDRESS, "-n", "k8s.io", *argv, timeout=60)


def slipway(*argv, timeout=120):
    return run(SLIPWAY, *argv, timeout=timeout)


def sandboxes():
    """What the daemon says of its sandboxes, by their names."""
    return {one["name"]: one for one in json.loads(slipway("ps", "--all", "--json", timeout=60))}


class Program:
    """A program that is started again when it ends, as systemd's Restart=always does."""

    def __init__(self, name, argv, pause, ready):
        self.name, self.argv, self.pause, self.ready = name, argv, pause, ready
        self.child, self.ending, self.starts = None, False, 0
        self.log = open(LOGS / f"{name}.log", "ab")

    def start(self):
        self._spawn()
        threading.Thread(target=self._keep, daemon=True).start()
        self.wait_ready(120)

    def _spawn(self):
        self.child = subprocess.Popen(self.argv, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)
        self.starts += 1

    def _keep(self):
        while True:
            self.child.wait()
            if self.ending:
                return
            time.sleep(self.pause)
            self._spawn()

    def kill(self):
        """Kills it, and returns its process id."""
        pid = self.child.pid
        os.kill(pid, signal.SIGKILL)
        self.child.wait()
        return pid

    def wait_ready(self, seconds):
        deadline = time.monotonic() + seconds
        while not (self.child.poll() is None and self.ready()):
            if time.monotonic() > deadline:
                raise Failed(f"{self.name} does not answer in {seconds} s")
            time.sleep(0.1)

    def end(self):
        self.ending = True
        self.child.terminate()
        try:
            self.child.wait(60)
        except subprocess.TimeoutExpired:
            self.child.kill()


def connects(path):
    with socket.socket(socket.AF_UNIX) as one:
        try:
            one.connect(str(path))
        except OSError:
            return False
    return True


def containerd_answers():
    try:
        crictl("version", timeout=5)
    except Failed:
        return False
    return True


def containerd():
    return Program("containerd", ["containerd", "--config", str(WORK / "containerd.toml")], 1, containerd_answers)


def daemon():
    # Its socket is asked, and not `slipway ps`, which starts a daemon where none is.
    return Program("daemon", [SLIPWAY, "daemon"], 0.1, lambda: connects(RUN_DIR / "slipway.sock"))


def read(path):
    try:
        return pathlib.Path(path).read_bytes().decode(errors="replace")
    except OSError:
        return ""


def alive(pid):
    state = re.search(r"^State:\s*(\S)", read(f"/proc/{pid}/status"), re.M)
    return bool(state) and state[1] not in "ZX"


def processes():
    """Process ids and command lines of the node; what is dead and not reaped has none."""
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            argv = read(entry / "cmdline").split("\0")
            if argv[0]:
                yield int(entry.name), argv


def shims():
    """Process ids of the shims that serve, by their pods' ids."""
    found = {}
    for pid, argv in processes():
        if "containerd-shim-slipway-v2" in argv[0] and "-id" in argv and "start" not in argv and "delete" not in argv:
            found.setdefault(argv[argv.index("-id") + 1], pid)
        elif argv[0] == "/proc/self/exe" and "-id" in argv:
            found.setdefault(argv[argv.index("-id") + 1], pid)
    return found


def holders():
    """Process ids of the holders, which start shims again, by their pods' ids."""
    found = {}
    for pid, argv in processes():
        if argv[0] == "slipway-shim-holder":
            found.update((word.removeprefix("--id="), pid) for word in argv if word.startswith("--id="))
    return found


def records():
    """The records of sandboxes on disk: (id of the sandbox, record)."""
    for path in (DATA_DIR / "sandboxes").glob("*/record.json"):
        try:
            yield path.parent.name, json.loads(read(path))
        except ValueError:
            pass


def owner(record):
    """The pod's id, or the name of a sandbox that is in no pod."""
    return record.get("labels", {}).get("dev.slipway.containerd.id", record["name"])


def vmms():
    """Process ids of VMMs, by the owners of their sandboxes."""
    found = {}
    for _, record in records():
        pid = (record.get("vm") or {}).get("pid")
        if pid and alive(pid):
            found[owner(record)] = pid
    return found


def file_servers():
    """Process ids of slipway-fs, by the owners of their sandboxes."""
    owners = {sandbox: owner(record) for sandbox, record in records()}
    found = {}
    for pid, argv in processes():
        if os.path.basename(argv[0]) == "slipway-fs":
            try:
                sandbox = pathlib.Path(os.readlink(f"/proc/{pid}/fd/1")).parent.name
            except OSError:
                continue
            found[owners.get(sandbox, sandbox)] = pid
    return found
