"""The storage server and the measurements of lab/applications, in a network namespace of their own."""

import argparse
import concurrent.futures
import contextlib
import http.server
import itertools
import json
import os
import pathlib
import random
import re
import signal
import socketserver
import statistics
import subprocess
import sys
import threading
import time

import applications_jobs as jobs
import applications_report as report

NETWORK = POOL = "lab"
IMAGE = "lab-applications:1"
# The networks of Slipway's switch, and of the bridge of the other ways; the host is .0.1 in each.
SWITCH, BRIDGE = "10.68", "10.69"
# User ids of the VMMs that no other node of this machine has by default.
UIDS = 1879064576


def say(text):
    print(f"applications: {text}", flush=True)


class Storage(socketserver.ThreadingTCPServer):
    """The storage server: gives inputs, takes results, and notes when."""

    daemon_threads, request_queue_size = True, 1024

    def __init__(self, inputs):
        super().__init__(("", 0), Handler)
        self.inputs, self.asked, self.results = inputs, {}, {}
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request, client_address):
        """A sandbox that is removed leaves its connection; its job is told to have failed."""


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        application, number = self.path[1:].split("/")
        self.server.asked.setdefault(int(number), time.monotonic())
        self.answer(self.server.inputs[application])

    def do_PUT(self):
        length = int(self.headers["Content-Length"])
        body = self.rfile.read(length)
        if len(body) == length:
            number = int(self.path.split("/")[2])
            self.server.results[number] = (time.monotonic(), body)
            self.answer(b"")

    def answer(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


class Node:
    """A daemon with directories of its own, a bridge, and the ways to start a job."""

    def __init__(self, options):
        self.options, self.work = options, pathlib.Path(options.work)
        config = self.work / "config.toml"
        settings = {"boot_timeout_s": options.limit, "vmm_uid_base": UIDS}
        config.write_text("".join(f"{name} = {value}\n" for name, value in settings.items()))
        self.environment = dict(
            os.environ,
            SLIPWAY_RUN_DIR=options.run,
            SLIPWAY_DATA_DIR=str(self.work / "data"),
            SLIPWAY_CONFIG=str(config),
        )
        self.source = pathlib.Path(jobs.__file__).read_text()
        self.serials, self.storage, self.daemon = itertools.count(1), None, None
        self.running, self.stopped, self.namespaces = [], False, []

    def start(self):
        ip("link", "set", "lo", "up")
        # Without an address of its own it takes those of its ports, in turn.
        ip("link", "add", "name", "bridge0", "address", "02:00:00:00:00:01", "type", "bridge")
        ip("addr", "add", f"{BRIDGE}.0.1/16", "dev", "bridge0")
        ip("link", "set", "bridge0", "up")
        with open(self.work / "daemon.log", "ab") as log:
            command = [self.options.slipway, "daemon"]
            self.daemon = subprocess.Popen(command, env=self.environment, stderr=log)
        socket = pathlib.Path(self.options.run) / "slipway.sock"
        self.wait_until(lambda: socket.exists() or self.daemon.poll() is not None, "there is no daemon")
        if self.daemon.poll() is not None:
            raise RuntimeError(f"the daemon does not start: {self.log()[-2000:]}")
        self.slipway("image", "import", f"dir:{self.options.root}", IMAGE)
        self.slipway("network", "create", NETWORK, "--subnet", f"{SWITCH}.0.0/16")
        if "pool" in self.options.arms:
            # Keeps the network's switch, which the pool is on.
            self.slipway("port", "create", "kept", "--network", NETWORK)
            self.slipway("vf", "create", POOL, "--switch", NETWORK, "--count", str(self.options.count))
        if "runc" in self.options.arms:
            subprocess.run(["runc", "spec", "--bundle", self.work], check=True)

    def end(self):
        self.stop()
        if self.daemon and self.daemon.poll() is None:
            with contextlib.suppress(RuntimeError, subprocess.TimeoutExpired):
                self.slipway("rm", "--force", "--all", limit=300)
            if "pool" in self.options.arms:
                with contextlib.suppress(RuntimeError, subprocess.TimeoutExpired):
                    self.slipway("vf", "rm", POOL, limit=60)
            self.daemon.terminate()
            self.daemon.wait()
        self.remove_namespaces()

    def stop(self):
        """Ends the commands, those too that a thread is about to start. Sandboxes are removed at the end."""
        self.stopped = True
        for process in self.running:
            process.kill()
        if "runc" in self.options.arms:
            runc = ["runc", "--root", str(self.work / "runc")]
            listed = subprocess.run([*runc, "list", "-q"], capture_output=True, text=True, check=False)
            for name in listed.stdout.split():
                subprocess.run([*runc, "delete", "--force", name], check=False)

    def remove_namespaces(self):
        for name in self.namespaces:
            subprocess.run(["ip", "netns", "delete", name], check=False)
        self.namespaces = []

    def log(self):
        return (self.work / "daemon.log").read_text(errors="replace")

    def slipway(self, *words, limit=None):
        done = subprocess.run(
            [self.options.slipway, *words],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=limit or self.options.limit,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"slipway {' '.join(words)}: {done.stderr}{self.log()[-2000:]}")
        return done.stdout

    def wait_until(self, is_so, what):
        deadline = time.monotonic() + self.options.limit
        while not is_so():
            if time.monotonic() > deadline:
                raise RuntimeError(f"{what} after {self.options.limit} s: {self.log()[-2000:]}")
            time.sleep(0.02)

    def make_interface(self, number):
        """A network namespace with one end of a veth pair, whose other end is in the bridge. Returns its name."""
        name, link = f"slipway-applications-{os.getpid()}-{number}", f"veth{number}"
        # Before it is there: what fails half way is removed too.
        self.namespaces.append(name)
        ip("netns", "add", name)
        ip("-batch", "-", lines=[
            f"link add {link} type veth peer name eth0 netns {name}",
            f"link set {link} master bridge0 up",
        ])
        ip("-n", name, "-batch", "-", lines=[
            "link set lo up",
            f"addr add {BRIDGE}.{number // 250 % 250 + 1}.{number % 250 + 1}/16 dev eth0",
            "link set eth0 up",
            f"route add default via {BRIDGE}.0.1",
        ])
        return name

    def command(self, arm, application, number):
        """Makes what the way needs in advance, as a runtime's caller does. Returns the command that runs the job."""
        prefix = SWITCH if arm in ("slipway", "pool") else BRIDGE
        port = self.storage.server_address[1]
        job = ["python3", "-c", self.source, f"{prefix}.0.1", str(port), application, str(number)]
        name = f"job-{number}"
        if arm == "runc":
            return self.bundle(name, self.make_interface(number), job)
        network = {
            "slipway": lambda: ["--network", NETWORK],
            "pool": lambda: ["--network", NETWORK, "--vf", POOL],
            "veth": lambda: ["--network-namespace", f"/run/netns/{self.make_interface(number)}"],
        }[arm]()
        machine = ["--memory", self.options.memory, "--cpus", str(self.options.cpus)]
        return [self.options.slipway, "run", "--rm", "--name", name, *machine, *network, IMAGE, "--", *job]

    def bundle(self, name, namespace, job):
        folder = self.work / name
        folder.mkdir()
        spec = json.loads((self.work / "config.json").read_text())
        spec["process"].update(terminal=False, args=job)
        spec["root"] = {"path": self.options.root, "readonly": True}
        for one in spec["linux"]["namespaces"]:
            if one["type"] == "network":
                one["path"] = f"/run/netns/{namespace}"
        (folder / "config.json").write_text(json.dumps(spec))
        return ["runc", "--root", str(self.work / "runc"), "run", "--bundle", str(folder), name]

    def run(self, arm, application, number):
        """Runs a job to its end."""
        command, path = self.command(arm, application, number), self.work / f"job-{number}.log"
        with path.open("wb") as log:
            process = subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self.running.append(process)
        if self.stopped:
            process.kill()
        # A wait with a limit looks at the process again and again, which hundreds of threads would be seen to do.
        limit = threading.Timer(self.options.limit, process.kill)
        limit.daemon = True
        limit.start()
        status = process.wait()
        limit.cancel()
        if status:
            said = path.read_text(errors="replace")[-2000:]
            raise RuntimeError(f"{application}, {arm}: status {status}: {said}{self.log()[-2000:]}")

    def turn(self, arm, application, expected, count):
        """Runs jobs at once. Returns for each the seconds from the common start until it asked for its input, and until
        its result was there."""
        numbers, begun = [next(self.serials) for _ in range(count)], []
        gate = threading.Barrier(count, action=lambda: begun.append(time.monotonic()))

        def one(number):
            gate.wait()
            self.run(arm, application, number)

        with concurrent.futures.ThreadPoolExecutor(count) as executor:
            try:
                list(executor.map(one, numbers))
            except BaseException:
                # The threads end when their commands do.
                gate.abort()
                self.stop()
                raise
        found = [self.result(application, expected, number, begun[0]) for number in numbers]
        self.settle(arm)
        return found

    def result(self, application, expected, number, begun):
        arrived, result = self.storage.results.pop(number, (0, None))
        if result is None:
            raise RuntimeError(f"{application}, job {number}: it ended without a result")
        if jobs.APPLICATIONS[application][2](result) != expected:
            raise RuntimeError(f"{application}, job {number}: {len(result)} bytes, and not those of the host")
        return {"asked_s": self.storage.asked.pop(number) - begun, "done_s": arrived - begun}

    def settle(self, arm):
        """Waits until nothing of a turn is left that the next one would find."""
        self.running = []
        self.wait_until(lambda: not json.loads(self.slipway("ps", "--json")), "a sandbox is still there")
        self.remove_namespaces()
        if arm == "pool":
            self.wait_until(self.all_ready, "a function of the pool is not ready")

    def all_ready(self):
        functions = json.loads(self.slipway("vf", "inspect", POOL))[0]["functions"]
        states = {one["state"] for one in functions}
        if "failed" in states:
            raise RuntimeError(f"a function of the pool failed: {functions}")
        return states == {"ready"}

    def accelerator(self):
        return (re.findall(r"accelerator chosen accel=(\w+)", self.log()) or ["none"])[-1]


def ip(*words, lines=()):
    done = subprocess.run(
        ["ip", *words], input="\n".join(lines), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr}")


@contextlib.contextmanager
def load(wanted):
    """One busy program for each CPU, at normal priority, if that is wanted."""
    busy = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-c", "while True: pass"]
    count = len(os.sched_getaffinity(0)) if wanted else 0
    programs = [subprocess.Popen(busy) for _ in range(count)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def measure(node, expected):
    """Takes all turns, the ways one after the other. Returns the results by application and way."""
    options = node.options
    for arm in options.arms:
        # What a node makes once is made in a turn that is not counted.
        node.turn(arm, "image", expected["image"], 1)
    found = {application: {arm: [] for arm in options.arms} for application in options.applications}
    with load(options.loaded):
        for number in range(1, options.rounds + 1):
            for application, arm in itertools.product(options.applications, options.arms):
                turn = node.turn(arm, application, expected[application], options.count)
                found[application][arm].append(turn)
                mean = statistics.mean(one["done_s"] for one in turn)
                say(f"round {number}: {application}, {arm}: mean {mean:.2f} s")
    return found


def word_list(known):
    def parse(text):
        words = text.split(",")
        if not set(words) <= set(known) or len(set(words)) < len(words):
            raise argparse.ArgumentTypeError(f"of {', '.join(known)}, each once")
        return words

    return parse


def parse():
    parser = argparse.ArgumentParser()
    for name in ("slipway", "work", "run", "root", "memory"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("count", "rounds", "size", "cpus", "limit"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--arms", type=word_list(report.ARMS), required=True)
    parser.add_argument("--applications", type=word_list(jobs.APPLICATIONS), required=True)
    parser.add_argument("--report", type=pathlib.Path)
    parser.add_argument("--loaded", action="store_true")
    return parser.parse_args()


def main():
    options = parse()
    # What ends the script ends the node, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    inputs, expected = {}, {}
    for application in dict.fromkeys(["image", *options.applications]):
        make, compute, compared = jobs.APPLICATIONS[application]
        inputs[application] = make(random.Random(1), options.size)
        expected[application] = compared(compute(inputs[application]))
    node = Node(options)
    try:
        node.storage = Storage(inputs)
        node.start()
        found = measure(node, expected)
    except RuntimeError as error:
        sys.exit(f"applications: error: {error}")
    finally:
        node.end()
    names = ("count", "rounds", "size", "memory", "cpus", "arms", "applications", "loaded")
    known = {name: getattr(options, name) for name in names} | {
        "accelerator": node.accelerator(),
        "input_bytes": {name: len(data) for name, data in inputs.items()},
        "host_cpus": os.cpu_count(),
        "kernel": os.uname().release,
    }
    result = report.summary(found)
    report.show(result, known)
    if options.report:
        content = {"conditions": known, "paper": report.PAPER, "summary": result, "rounds": found}
        path = options.report / "applications.json"
        path.write_text(json.dumps(content, indent=2) + "\n")
        say(f"the report is {path}")


if __name__ == "__main__":
    main()
