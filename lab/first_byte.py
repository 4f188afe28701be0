"""The files and the measurements of lab/first-byte.

usage: first_byte.py files DIRECTORY MIB LAYERS
       first_byte.py measure --slipway PROGRAM --work DIR --registry DIR [OPTION...]
"""

import argparse
import json
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.request

import first_byte_containerd

MIB = 1 << 20
SMALL = 256 << 10
REGISTRY = pathlib.Path(__file__).resolve().parent.parent / "tests/e2e/registry.py"
# User ids of the VMMs that no other node of this machine has by default.
UIDS = 1879062528
WAYS = ("lazy", "whole")


def say(text):
    print(f"first-byte: {text}", flush=True)


def make_files(top, size, layers):
    """Makes folders of layers, `size` MiB in all: half of each is one file, the rest files of 256 KiB.

    The bytes are random, and the same each time.
    """
    source = random.Random(1)
    for number in range(1, layers + 1):
        count = size * number // layers - size * (number - 1) // layers
        folder = top / f"{number:04}"
        small = folder / f"small/{number}"
        small.mkdir(parents=True)
        large = folder / ("big/file" if number == 1 else f"large/{number}")
        large.parent.mkdir()
        with large.open("wb") as file:
            for _ in range((count + 1) // 2):
                file.write(source.randbytes(MIB))
        for one in range(count // 2 * MIB // SMALL):
            (small / str(one)).write_bytes(source.randbytes(SMALL))


class Node:
    """A daemon and a registry, with directories of their own."""

    def __init__(self, options):
        self.options, self.work = options, pathlib.Path(options.work)
        self.run_dir = self.work / "run"
        self.config, self.rate = self.work / "config.toml", self.work / "rate"
        # A guest under software emulation starts slowly.
        settings = {"boot_timeout_s": options.limit, "vmm_uid_base": UIDS, "vmm_uid_count": 64}
        self.config.write_text("".join(f"{name} = {value}\n" for name, value in settings.items()))
        self.environment = dict(
            os.environ,
            SLIPWAY_RUN_DIR=str(self.run_dir),
            SLIPWAY_DATA_DIR=str(self.work / "data"),
            SLIPWAY_CONFIG=str(self.config),
        )
        self.started = []
        self.address = None

    def start(self):
        command = [sys.executable, REGISTRY, self.options.registry, self.rate, str(self.options.delay)]
        registry = self.spawn("registry", command, stdout=subprocess.PIPE)
        port = registry.stdout.readline().decode().strip()
        if not port:
            sys.exit(f"the registry does not start: {self.log('registry')}")
        self.address = f"127.0.0.1:{port}"
        daemon = self.spawn("daemon", [self.options.slipway, "daemon"])
        deadline = time.monotonic() + self.options.limit
        while not (self.run_dir / "slipway.sock").exists():
            if daemon.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"the daemon does not start: {self.log('daemon')}")
            time.sleep(0.02)

    def spawn(self, name, command, **more):
        with open(self.work / f"{name}.log", "ab") as log:
            process = subprocess.Popen(command, env=self.environment, stderr=log, **more)
        self.started.append(process)
        return process

    def log(self, name):
        path = self.work / f"{name}.log"
        return path.read_text(errors="replace")[-4000:] if path.exists() else ""

    def fail(self, why, *logs):
        sys.exit(" ".join([why, *(self.log(name) for name in ("daemon", *logs))]))

    def end(self):
        if len(self.started) >= 2 and self.started[1].poll() is None:
            command = [self.options.slipway, "rm", "--force", "--all"]
            subprocess.run(command, env=self.environment, capture_output=True, check=False)
        for process in reversed(self.started):
            process.terminate()
            process.wait()
        self.end_fetchers()

    def end_fetchers(self):
        for pid in self.fetchers():
            try:
                os.kill(pid, signal.SIGTERM)
            except ProcessLookupError:
                pass
        self.wait_while(lambda: any(self.fetchers()), "a fetcher does not end")

    def fetchers(self):
        """The processes that fetch for this node. They outlive the daemon."""
        for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().split(b"\0")
            except OSError:
                continue
            if words[1:3] == [b"fetch", b"--run-dir"] and words[3:4] == [os.fsencode(self.run_dir)]:
                yield int(path.parent.name)

    def slipway(self, *words):
        done = subprocess.run(
            [self.options.slipway, *words],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=self.options.limit,
            check=False,
        )
        if done.returncode:
            sys.exit(f"slipway {' '.join(words)}: {done.stderr} {self.log('daemon')}")
        return done.stdout

    def sent(self):
        """The bytes of blobs that the registry has sent."""
        with urllib.request.urlopen(f"http://{self.address}/sent") as answer:
            return int(answer.read())

    def image(self, name):
        return f"{self.address}/lab/{name}:1"

    def is_lazy(self, image):
        found = json.loads(self.slipway("image", "ls", "--json"))
        one = next((one for one in found if image in one["references"]), None)
        if one is None:
            sys.exit(f"{image} is not in the cache: {found}")
        return one["lazy"]

    def wait_until_whole(self, image):
        self.wait_while(lambda: self.is_lazy(image), "the image is not whole")

    def wait_while(self, is_so, what):
        deadline = time.monotonic() + self.options.limit
        while is_so():
            if time.monotonic() > deadline:
                sys.exit(f"{what} after {self.options.limit} s: {self.log('daemon')}")
            time.sleep(0.2)

    def forget(self, image):
        """Removes the image and ends its fetcher. Nothing is left to be written to the disk afterwards."""
        self.wait_while(lambda: json.loads(self.slipway("ps", "--json")), "a sandbox is still there")
        self.slipway("image", "rm", image)
        self.end_fetchers()
        os.sync()

    def pull(self, way):
        image, before, begun = self.image("big"), self.sent(), time.monotonic()
        self.slipway("image", "pull", flag(way), image)
        took, sent = time.monotonic() - begun, self.sent() - before
        self.forget(image)
        return {"seconds": took, "sent": sent}

    def run(self, way):
        """Times a container's first byte."""
        image, before = self.image("big"), self.sent()
        timeline = self.work / "timeline.json"
        timeline.unlink(missing_ok=True)
        command = [self.options.slipway, "run", "--rm", flag(way), "--timeline", str(timeline)]
        command += [image, "--", "head", "-c", "1", "/big/file"]
        begun = time.monotonic()
        found = self.first_byte(command, begun, before)
        self.wait_until_whole(image)
        whole, all_sent = time.monotonic() - begun, self.sent() - before
        self.forget(image)
        return found | {
            "whole_s": whole if way == "lazy" else None,
            "sent_in_all": all_sent,
            "stages_ms": stages(timeline),
        }

    def first_byte(self, command, begun, before):
        """Runs a command that prints one byte. Returns the seconds from `begun` to the byte and to the command's end, and
        the bytes that the registry had sent by then, beyond the first `before`."""
        process = subprocess.Popen(
            command, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        limit = threading.Timer(self.options.limit, process.kill)
        limit.daemon = True
        limit.start()
        try:
            errors = Errors(process.stderr)
            byte = os.read(process.stdout.fileno(), 1)
            took, sent = time.monotonic() - begun, self.sent() - before
            process.wait()
            ended = time.monotonic() - begun
        finally:
            process.kill()
            process.wait()
            limit.cancel()
        if len(byte) != 1 or process.returncode:
            self.fail(f"{command[0]}: status {process.returncode}: {errors.text()}")
        return {"seconds": took, "sent": sent, "command_s": ended}


class Errors:
    """Reads what a command prints on standard error."""

    def __init__(self, pipe):
        self.pipe, self.data = pipe, b""
        self.thread = threading.Thread(target=self.read, daemon=True)
        self.thread.start()

    def read(self):
        for line in self.pipe:
            self.data = (self.data + line)[-4000:]

    def text(self):
        self.thread.join()
        return self.data.decode(errors="replace")


def flag(way):
    return "--lazy=true" if way == "lazy" else "--lazy=false"


def stages(path):
    """The milliseconds of each stage of the only start in a timeline, by name."""
    found = {}
    for stage in json.loads(path.read_text())[0]["stages"]:
        took = (stage["end_ns"] - stage["start_ns"]) / 1e6
        found[stage["name"]] = found.get(stage["name"], 0) + took
    return found


def measure(subject, rounds):
    """Returns the results of all rounds: `pull` and `run` of a node or of its containerds, each `lazy` and `whole`."""
    found = {what: {way: [] for way in WAYS} for what in ("pull", "run")}
    for number in range(1, rounds + 1):
        # Each way is as often the first one as the other.
        for way in WAYS if number % 2 else reversed(WAYS):
            for what in found:
                one = getattr(subject, what)(way)
                found[what][way].append(one)
                say(f"round {number}: {what} {way} {one['seconds']:.2f} s, {one['sent'] / MIB:.1f} MiB")
    return found


def spread(values):
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def summary(found):
    """Returns the spreads of times, bytes and stages, and the ratios of lazy to whole."""
    result = {}
    for what, ways in found.items():
        result[what] = {way: spreads(rounds) for way, rounds in ways.items()}
        times = [[one["seconds"] for one in ways[way]] for way in WAYS]
        result[what]["ratio"] = spread([lazy / whole for lazy, whole in zip(*times)]) | {
            "of_medians": statistics.median(times[0]) / statistics.median(times[1])
        }
    return result


def spreads(rounds):
    result = {}
    for name, first in rounds[0].items():
        values = [one[name] for one in rounds]
        if isinstance(first, dict):
            common = [stage for stage in first if all(stage in one for one in values)]
            result[name] = {stage: spread([one[stage] for one in values]) for stage in common}
        elif first is not None:
            result[name] = spread(values)
    return result


def text(one, unit=1.0, digits=2):
    median, least, most = (one[name] / unit for name in ("median", "least", "most"))
    return f"{median:.{digits}f} ({least:.{digits}f} to {most:.{digits}f})"


def show(result, pull):
    for what, title in (("pull", f"{pull} alone"), ("run", "first byte of /big/file")):
        for way in WAYS:
            one = result[what][way]
            say(f"{title}, {way}: {text(one['seconds'])} s; {text(one['sent'], MIB, 1)} MiB sent by then")
        ratio = result[what]["ratio"]
        say(f"{title}: lazy takes {ratio['of_medians']:.3f} of whole, by rounds {text(ratio, digits=3)}")
    for way in WAYS:
        one = result["run"][way]
        rest = f"; whole after {text(one['whole_s'])} s" if "whole_s" in one else ""
        say(f"run, {way}: {text(one['sent_in_all'], MIB, 1)} MiB sent in all{rest}")
        if "pull_s" in one:
            say(f"run, {way}: {text(one['pull_s'])} s of it are the pull")
    if any("stages_ms" not in result["run"][way] for way in WAYS):
        return
    stage_names = dict.fromkeys(name for way in WAYS for name in result["run"][way]["stages_ms"])
    say("stages of the starts, ms, which may overlap:")
    for name in stage_names:
        both = (result["run"][way]["stages_ms"].get(name) for way in WAYS)
        lazy, whole = (text(one, digits=1) if one else "-" for one in both)
        say(f"  {name:<12} lazy {lazy}, whole {whole}")


def conditions(options):
    blobs = pathlib.Path(options.registry) / "blobs"
    return {
        "bandwidth": {"mbit": options.mbit, "limited_by": "registry" if options.mbit else None},
        "delay_ms": options.delay,
        "containerd": options.containerd and pathlib.Path(options.containerd).name,
        "rounds": options.rounds,
        "registry_bytes": sum(path.stat().st_size for path in blobs.iterdir()),
        "cpus": os.cpu_count(),
        "kernel": os.uname().release,
    }


def run_all(options):
    node = Node(options)
    # The registry sends from memory in all rounds.
    for blob in (pathlib.Path(options.registry) / "blobs").iterdir():
        with blob.open("rb") as file:
            while file.read(MIB):
                pass
    containerds = first_byte_containerd.Containerds(node, options) if options.containerd else None
    try:
        node.start()
        if containerds:
            containerds.start()
        node.slipway("run", "--rm", "--lazy=false", node.image("warm"), "--", "head", "-c", "1", "/etc/passwd")
        if options.mbit:
            node.rate.write_text(str(options.mbit * 125_000))
        found = measure(containerds or node, options.rounds)
    finally:
        node.end()
        if containerds:
            containerds.end()
    known, result = conditions(options), summary(found)
    limit = f"limited to {options.mbit:g} Mbit/s by itself" if options.mbit else "without a limit of bandwidth"
    say(f"{options.rounds} rounds; the registry is {limit}, and answers after {options.delay:g} ms")
    show(result, "crictl pull" if containerds else "image pull")
    if options.report:
        path = pathlib.Path(options.report) / "first-byte.json"
        content = {"conditions": known, "summary": result, "rounds": found}
        path.write_text(json.dumps(content, indent=2) + "\n")
        say(f"the report is {path}")


def count(word):
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


def amount(word):
    number = float(word)
    if not 0 <= number < 1e6:
        raise argparse.ArgumentTypeError("0 to 1,000,000")
    return number


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    files = commands.add_parser("files")
    files.add_argument("directory", type=pathlib.Path)
    files.add_argument("size", type=count)
    files.add_argument("layers", type=count)
    measured = commands.add_parser("measure")
    for name in ("slipway", "work", "registry"):
        measured.add_argument(f"--{name}", required=True)
    measured.add_argument("--report")
    # The directory of its programs; then the others are needed.
    for name in ("containerd", "crictl", "shim", "snapshotter"):
        measured.add_argument(f"--{name}")
    measured.add_argument("--rounds", type=count, default=5)
    measured.add_argument("--mbit", type=amount, default=0)
    measured.add_argument("--delay", type=amount, default=0)
    measured.add_argument("--limit", type=count, default=3600)
    options = parser.parse_args()
    if options.command == "files":
        return make_files(options.directory, options.size, options.layers)
    # What ends the script ends the node, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    run_all(options)


main()
