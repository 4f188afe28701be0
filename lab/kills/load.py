"""The load: workers that make pods with containers whose output and exit status are known, and look at both."""

import calendar
import json
import random
import re
import shutil
import threading
import time

import kills
import machine
import truth
from machine import Failed

IMAGE = "docker.io/test/busybox:1"
# Seconds in which a pod boots and a container ends on a busy machine.
LONG = 300
# Seconds in which a removal succeeds, however often it has to be asked for.
REMOVAL = 180


class Container:
    """One container: its command, how it is ended, and what it should have printed."""

    KINDS = ("counts", "counts", "bursts", "stopped", "killed")

    def __init__(self, name, chance, pod, scratch, volumes):
        kinds = self.KINDS + (("writes",) if volumes else ())
        self.name, self.kind, self.id = name, chance.choice(kinds), None
        self.scratch = scratch
        self.dir = machine.WORK / "shared" / f"{pod}-{name}"
        self.status, self.lines = chance.randrange(0, 100), None
        if self.kind == "counts":
            self.lines = chance.randrange(5, 40)
            script = f"i=0; while [ $i -lt {self.lines} ]; do i=$((i+1)); echo line $i; sleep 0.2; done; exit {self.status}"
        elif self.kind == "writes":
            self.lines = chance.randrange(5, 40)
            script = (f"i=0; while [ $i -lt {self.lines} ]; do i=$((i+1)); echo line $i; echo line $i >>/data/out;"
                      f" sleep 0.2; done; exit {self.status}")
            self.dir.mkdir(parents=True, exist_ok=True)
        elif self.kind == "bursts":
            self.lines = chance.randrange(1000, 20000)
            script = f"i=0; while [ $i -lt {self.lines} ]; do i=$((i+1)); echo line $i; done; exit {self.status}"
        else:
            # A trap that is set late is not seen by a signal that comes early: the first line says that it is set.
            trap = f"trap 'exit {self.status}' TERM; " if self.kind == "stopped" else "trap : TERM; "
            script = trap + "i=0; while :; do i=$((i+1)); echo line $i; sleep 0.1; done"
            if self.kind == "killed":
                self.status = 137
        # The image has one program: what a shell does by itself is enough.
        self.script = f"echo {name} >/scratch/{name}; {script}"

    def config(self):
        mounts = [{"container_path": "/scratch", "host_path": str(self.scratch)}]
        if self.kind == "writes":
            mounts.append({"container_path": "/data", "host_path": str(self.dir)})
        return {"metadata": {"name": self.name}, "image": {"image": IMAGE}, "log_path": f"{self.name}.log",
                "command": ["sh", "-c", self.script],
                "mounts": mounts,
                "linux": {"security_context": {"namespace_options": {"pid": 1}}}}


def log_lines(path):
    """(time, text) of each line of a log in CRI's form; a line that was cut has parts."""
    found, part = [], ""
    for line in machine.read(path).splitlines():
        fields = line.split(" ", 3)
        if len(fields) < 4:
            found.append((0.0, f"not a line of a log: {line[:80]}"))
            continue
        part += fields[3]
        if fields[2] == "F":
            found.append((stamp(fields[0]), part))
            part = ""
    return found


def stamp(text):
    base, _, rest = text.partition(".")
    zone = re.search(r"(Z|[+-]\d\d:\d\d)$", text)[1]
    fraction = re.match(r"\d*", rest)[0] or "0"
    shift = 0 if zone == "Z" else (int(zone[1:3]) * 3600 + int(zone[4:]) * 60) * (1 if zone[0] == "+" else -1)
    whole = time.strptime(base.rstrip("Z")[:19], "%Y-%m-%dT%H:%M:%S")
    return calendar.timegm(whole) - shift + float(f"0.{fraction}")


# The most bytes of a container's output that containerd holds, and loses when it is killed.
HELD = 40 << 10


def check_log(lines, want, whole, breaks):
    """What is wrong with lines that should be 1, 2, ... `want`, and the number of those that containerd lost: it was
    killed at one of `breaks` with output in its memory. Without `whole` the last ones may be missing."""
    expected, lost, size, before = 1, 0, 0, 0.0
    if whole:
        lines = lines + [(float("inf"), f"line {want + 1}")]
    for at, text in lines:
        broke = any(before - 2 <= kill <= at + 2 for kill in breaks)
        number = re.fullmatch(r"line (\d+)", text)
        if not number:
            # The line that was being written when containerd was killed.
            if broke and text in f"line {expected}line {expected + HELD}":
                continue
            return f"a line is {text[:60]!r} where line {expected} should be", lost
        number = int(number[1])
        if number < expected or (number > expected and not broke):
            return f"line {number} comes where line {expected} should", lost
        if number > expected:
            lost += number - expected
            size += sum(len(f"line {one}\n") for one in range(expected, number))
        expected, before = number + 1, at
    if size > HELD * len(breaks):
        return f"{lost} lines are lost, more than containerd holds", lost
    return None, lost


class Worker(threading.Thread):
    """Makes one pod after another."""

    def __init__(self, number, seed, node):
        super().__init__(daemon=True)
        self.number, self.node, self.random = number, node, random.Random(f"{seed}/{number}")
        self.rounds = 0
        self.at_gate, self.idle = False, False

    def run(self):
        while not self.node.ending.is_set():
            if self.node.draining.is_set():
                self.idle = True
                time.sleep(0.1)
                continue
            self.idle = False
            self.rounds += 1
            name = f"w{self.number}-{self.rounds}"
            try:
                one = Shared(self, name) if self.random.random() < self.node.shared else Pod(self, name)
                one.live()
            except Failed as failed:
                self.node.fail("calls", f"{name}: {failed}")
            except Exception as error:  # a defect of this program ends in the table, not in silence
                self.node.fail("checks", f"{name}: {type(error).__name__}: {error}")
        self.idle = True

    def gate(self):
        """Waits here while states are compared: nothing that this worker does is under way."""
        self.at_gate = True
        while self.node.comparing.is_set():
            time.sleep(0.05)
        self.at_gate = False


class Pod:
    """The life of one pod."""

    def __init__(self, worker, name):
        self.worker, self.node, self.name = worker, worker.node, name
        self.id, self.begun = None, time.time()
        self.logs = machine.WORK / "logs" / name
        volumes = self.node.options.volumes
        # As kubelet names it, so that the volume is the guest's.
        self.kubelet = machine.WORK / "kubelet/pods" / name
        self.scratch = self.kubelet / "volumes/kubernetes.io~empty-dir/scratch"
        self.scratch.mkdir(parents=True)
        count = worker.random.randrange(1, 4)
        self.containers = [Container(f"c{n}", worker.random, name, self.scratch, volumes) for n in range(count)]
        self.pod_file = machine.WORK / "load" / f"{name}.json"
        self.pod_file.parent.mkdir(exist_ok=True)
        self.pod_file.write_text(json.dumps({
            "metadata": {"name": name, "namespace": "default", "uid": name, "attempt": 1}, "hostname": name,
            "log_directory": str(self.logs), "labels": {"churn": name}, "dns_config": {"servers": ["192.0.2.53"]},
            "annotations": {"dev.slipway.memory": "128M"},
            "linux": {"security_context": {"namespace_options": {"pid": 1}}}}))

    def live(self):
        try:
            if self.make():
                self.worker.gate()
                for container in self.containers:
                    self.follow(container)
                    self.worker.gate()
        finally:
            self.remove()

    def call(self, *argv):
        """A call that makes something. Returns None if a kill explains that it failed."""
        begun = time.time()
        try:
            return machine.crictl(*argv).strip()
        except Failed as failed:
            # A kill may be noted a moment after its effect.
            time.sleep(0.5)
            excuse = self.node.killer.excuse(begun, time.time(), self.node.known(), self.id)
            if excuse is None:
                raise Failed(f"{argv[0]}: {failed}") from failed
            self.node.count("interrupted")
            return None

    def make(self):
        """Boots the pod and starts its containers. Returns whether all of that succeeded."""
        begun = time.time()
        self.id = self.call("runp", "--runtime", "slipway", str(self.pod_file))
        if self.id is None:
            self.node.interrupted.append((begun, time.time()))
            return False
        self.node.alive.add(self.id)
        self.node.count("pods")
        for container in self.containers:
            file = self.pod_file.with_suffix(f".{container.name}.json")
            file.write_text(json.dumps(container.config()))
            container.id = self.call("create", self.id, str(file), str(self.pod_file))
            if container.id is None or self.call("start", container.id) is None:
                return False
            self.node.count("containers")
        return True

    def hit(self):
        """Kills of the pod's VMM."""
        return [kill for kill in self.node.killer.hits(self.id) if kill.victim not in kills.HARMLESS]

    def waits(self, container):
        """Whether a container may wait for ever: the server of its share was killed."""
        server = any(kill.victim == "slipway-fs" for kill in self.node.killer.hits(self.id))
        return server and container.kind == "writes"

    def status_of(self, container):
        return machine.crictl_json("inspect", container.id)["status"]

    def ended(self, container, seconds):
        """The status of a container once it has ended. containerd may be away for a while."""
        deadline, last = time.monotonic() + seconds, "it runs"
        look, missed = time.monotonic() + 10, False
        while time.monotonic() < deadline:
            if self.waits(container):
                return None
            try:
                status = self.status_of(container)
                if status["state"] == "CONTAINER_EXITED":
                    return status
                last = status["state"]
                if time.monotonic() > look:
                    look = time.monotonic() + 10
                    missed = self.look_for_missed(container, missed)
            except Failed as failed:
                last = str(failed)
            time.sleep(0.3)
        raise Failed(f"{container.name} ({container.kind}) did not end in {seconds} s: {last}"
                     f"{', after a kill of ' + self.hit()[0].victim if self.hit() else ''}")

    def look_for_missed(self, container, seen_before):
        """containerd misses an exit between its question for a task's state and its own note of the container, when it
        starts (its CRI plugin, restart.go and events.go): ctr shows the task as stopped, crictl the container as
        running, and only the next start ends that. Returns whether it looks like that now."""
        restarted = any(kill.victim == "containerd" and kill.at >= self.begun for kill in list(self.node.killer.kills))
        stopped = restarted and truth.tasks().get(container.id, ("", 0))[0] == "STOPPED"
        if stopped and seen_before:
            self.node.count("missed")
            self.node.killer.kill_program("containerd", f", which has missed the exit of {self.name}/{container.name}")
            return False
        return stopped

    def printed(self, container):
        return bool(log_lines(self.logs / f"{container.name}.log"))

    def follow(self, container):
        """Sees a container to its end, and checks its status and output."""
        asked = False
        if container.kind in ("stopped", "killed"):
            deadline = time.monotonic() + LONG
            while not self.printed(container) and not self.hit() and time.monotonic() < deadline:
                time.sleep(0.2)
            time.sleep(self.worker.random.uniform(0, 3))
            self.look_inside(container)
            asked = True
            self.again("stop", "--timeout", "60" if container.kind == "stopped" else "0", container.id)
        status = self.ended(container, LONG)
        if status is None:
            self.node.count("hit")
            return
        # What is under way towards the log, and a kill that is noted later than its effect.
        time.sleep(1)
        hit, code = self.hit(), status["exitCode"]
        if not hit and code != container.status:
            self.node.fail("status", f"{self.name}/{container.name} ({container.kind}): {code} and not {container.status}"
                           f" {status.get('reason', '')} {status.get('message', '')[:200]}")
        if hit and code != container.status and code == 0:
            self.node.fail("status", f"{self.name}/{container.name}: 0 after a kill of {hit[0].victim}")
        self.node.count("hit" if hit else "unhit")
        breaks = [kill.at for kill in list(self.node.killer.kills) if kill.victim == "containerd" and kill.at >= self.begun]
        whole = not hit and not asked
        if container.kind == "writes" and whole and not self.waits(container):
            text = machine.read(container.dir / "out").splitlines()
            if text != [f"line {n}" for n in range(1, container.lines + 1)]:
                self.node.fail("output", f"{self.name}/{container.name}: the share has {len(text)} of {container.lines} lines")
        wrong, lost = check_log(log_lines(self.logs / f"{container.name}.log"), container.lines, whole, breaks)
        if lost:
            self.node.count("lost", lost)
            self.node.say(f"{self.name}/{container.name} ({container.kind}): {lost} lines lost by containerd")
        if wrong:
            self.node.fail("output", f"{self.name}/{container.name} ({container.kind}): {wrong}"
                           f"{', after a kill of ' + hit[0].victim if hit else ''}")

    def look_inside(self, container):
        """Executes a command in a container that runs: the pod's `emptyDir` has what this container, and those that have
        ended before, wrote there first of all."""
        if self.hit():
            return
        begun = time.time()
        script = f"read name </scratch/{container.name}; echo $name; cd /scratch; echo *"
        printed = self.call("exec", "--sync", container.id, "sh", "-c", script)
        if printed is None:
            return
        self.node.count("commands")
        wrote = {one.name for one in self.containers[:self.containers.index(container) + 1]}
        words = printed.split()
        right = words[:1] == [container.name] and wrote <= set(words[1:])
        time.sleep(0.5)
        if not right and self.node.killer.excuse(begun, time.time(), self.node.known(), self.id) is None:
            self.node.fail("output", f"{self.name}/{container.name}: a command printed {printed[:200]!r}, where the volume has"
                           f" {sorted(wrote)}")

    def again(self, *argv):
        """A call that removes something, until it succeeds. Failures without a kill are failures even so."""
        deadline, told = time.monotonic() + REMOVAL, False
        while True:
            begun = time.time()
            try:
                return machine.crictl(*argv)
            except Failed as failed:
                time.sleep(0.5)
                if "not found" in str(failed).lower() or "NotFound" in str(failed):
                    return ""
                excuse = self.node.killer.excuse(begun, time.time(), self.node.known(), self.id)
                if excuse is None and not told:
                    told = True
                    self.node.fail("calls", f"{self.name}: {argv[0]}: {failed}")
                if time.monotonic() > deadline:
                    raise Failed(f"{argv[0]} does not succeed in {REMOVAL} s: {failed}") from failed

    def remove(self):
        """Removes the pod, or the pods that an interrupted call has left under its name."""
        pods = json.loads(self.again("pods", "-o", "json", "--label", f"churn={self.name}") or "{}")
        for pod in pods.get("items", []):
            self.node.alive.add(pod["id"])
            self.id = self.id or pod["id"]
            self.again("stopp", pod["id"])
            self.again("rmp", pod["id"])
            self.node.alive.discard(pod["id"])
        if self.id:
            self.node.alive.discard(self.id)
        held = sorted(path.name for path in self.scratch.iterdir())
        if held:
            self.node.fail("output", f"{self.name}: the host's directory of the volume has {held}")
        shutil.rmtree(self.kubelet)


class Shared:
    """The life of a sandbox in no pod, with a directory of the host."""

    def __init__(self, worker, name):
        self.node, self.worker, self.name = worker.node, worker, name
        self.dir = machine.WORK / "shared" / name
        self.dir.mkdir(parents=True, exist_ok=True)
        self.begun = time.time()

    def excuse(self, begun):
        time.sleep(0.5)
        return self.node.killer.excuse(begun, time.time(), self.node.known(), self.name)

    def live(self):
        self.node.alive.add(self.name)
        script = "i=0; while [ $i -lt 20 ]; do i=$((i+1)); echo line $i >>/data/out; sleep 0.2; done; exit 9"
        begun = time.time()
        try:
            machine.slipway("run", "-d", "--name", self.name, "--memory", "128M", "-v", f"{self.dir}:/data", "churn:1",
                            "--", "sh", "-c", script, timeout=LONG)
            self.node.count("sandboxes")
            self.worker.gate()
            self.follow(begun)
        except Failed as failed:
            if self.excuse(begun) is None:
                self.node.fail("calls", f"{self.name}: slipway: {failed}")
            else:
                self.node.count("interrupted")
        finally:
            self.remove()

    def follow(self, begun):
        server = any(kill.victim == "slipway-fs" for kill in self.node.killer.hits(self.name))
        if not server:
            # A share whose server was killed is waited for in vain.
            deadline = time.monotonic() + LONG
            while time.monotonic() < deadline:
                if any(kill.victim == "slipway-fs" for kill in self.node.killer.hits(self.name)):
                    server = True
                    break
                try:
                    code = int(machine.slipway("wait", self.name, timeout=5).split()[-1])
                    break
                except Failed:
                    time.sleep(0.3)
            else:
                raise Failed(f"{self.name} did not end in {LONG} s")
        time.sleep(0.5)
        hits = self.node.killer.hits(self.name)
        self.node.count("hit" if hits else "unhit")
        text = machine.read(self.dir / "out").splitlines()
        want = [f"line {n}" for n in range(1, len(text) + 1)]
        if text != want or (not hits and len(text) != 20):
            self.node.fail("output", f"{self.name}: the share has {len(text)} lines, {text[-1:]}")
        if not hits and code != 9:
            self.node.fail("status", f"{self.name}: {code} and not 9")

    def remove(self):
        deadline = time.monotonic() + REMOVAL
        while True:
            begun = time.time()
            try:
                machine.slipway("rm", "--force", self.name)
                break
            except Failed as failed:
                if "no sandbox" in str(failed):
                    break
                if self.excuse(begun) is None or time.monotonic() > deadline:
                    self.node.fail("calls", f"{self.name}: rm: {failed}")
                    break
        self.node.alive.discard(self.name)
