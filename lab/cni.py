"""The measurements and the random steps of lab/cni, in a network namespace of their own."""

import argparse
import json
import os
import pathlib
import random
import re
import signal
import statistics
import subprocess
import sys
import time

NETWORK = "cni"


class Node:
    """A daemon with directories of its own, and the plugin that calls it."""

    def __init__(self, options):
        self.options = options
        self.work = pathlib.Path(options.work)
        self.environment = dict(
            os.environ,
            SLIPWAY_RUN_DIR=str(self.work / "run"),
            SLIPWAY_DATA_DIR=str(self.work / "data"),
        )
        self.files = self.work / "data/networks/attachments"
        self.daemon = None
        self.config = json.dumps(
            {"cniVersion": "1.1.0", "name": "lab", "type": "slipway-cni", "network": NETWORK}
        ).encode()

    def start(self):
        socket = self.work / "run/slipway.sock"
        socket.unlink(missing_ok=True)
        log = open(self.work / "daemon.log", "ab")
        command = [self.options.slipway, "daemon"]
        self.daemon = subprocess.Popen(command, env=self.environment, stderr=log)
        while not socket.exists():
            if self.daemon.poll() is not None:
                sys.exit((self.work / "daemon.log").read_text())
            time.sleep(0.02)

    def end(self, number=signal.SIGKILL):
        self.daemon.send_signal(number)
        self.daemon.wait()

    def slipway(self, *words):
        done = subprocess.run(
            [self.options.slipway, *words], env=self.environment, capture_output=True, check=True
        )
        return done.stdout

    def cpu(self):
        """Returns the CPU time of the daemon in seconds, that of threads which have ended included."""
        return time.clock_gettime((~self.daemon.pid << 3) | 2)

    def variables(self, command, number):
        return dict(
            self.environment,
            CNI_COMMAND=command,
            CNI_CONTAINERID=name(number),
            CNI_NETNS=f"/run/netns/{name(number)}",
            CNI_IFNAME="eth0",
            CNI_PATH=os.path.dirname(self.options.plugin),
        )

    def spawn(self, command, number, config, output=subprocess.DEVNULL, program=None):
        """Starts the plugin, or `program` in its place. The configuration is a file, so that no caller waits for it."""
        return subprocess.Popen(
            [program or self.options.plugin],
            env=self.variables(command, number),
            stdin=config,
            stdout=output,
            stderr=subprocess.DEVNULL,
        )

    def call(self, command, number, config=None):
        done = subprocess.run(
            [self.options.plugin],
            env=self.variables(command, number),
            input=config or self.config,
            capture_output=True,
        )
        if done.returncode:
            sys.exit(f"{command} {number}: {done.stdout.decode()}{done.stderr.decode()}")
        return done.stdout

    def left(self, containers):
        """Lines that name what is left of containers. `containers` has the inode numbers of their namespaces."""
        network = json.loads(self.slipway("network", "inspect", NETWORK))[0]
        found = [f"an address of {one['name']}" for one in network["sandboxes"]]
        found += [f"the file {path.name}" for path in self.files.iterdir()]
        ports = json.loads(self.slipway("port", "ls", "--json"))
        found += [f"the port {one['name']}" for one in ports if "," in one["name"]]
        return found + self.functions() + self.held(containers)

    def held(self, containers):
        """Lines that name the containers' namespaces that the daemon has open, or has a thread in."""
        process = pathlib.Path(f"/proc/{self.daemon.pid}")
        # Descriptors and threads come and go.
        files = [*process.glob("fd/*"), *process.glob("task/*/ns/net")]
        found = []
        for file in files:
            try:
                target = os.readlink(file)
            except OSError:
                continue
            number = re.fullmatch(r"net:\[(\d+)\]", target)
            if number and (name := containers.get(int(number[1]))):
                found.append(f"the namespace of {name}, by {file}")
        return found

    def restart(self):
        """Kills the daemon, starts the next one, and adds and removes a container. After that a node holds the same things,
        whatever happened before, so that two lists of them can be compared."""
        self.end()
        self.start()
        self.call("ADD", 0)
        self.call("DEL", 0)

    def outside(self):
        """What the daemon has outside of itself, one thing a line."""
        run = self.work / "run"
        found = [f"the file {path.relative_to(run)} in the run directory" for path in run.rglob("*")]
        found += [f"the interface {one['ifname']}" for one in json.loads(ip("-j", "link"))]
        rules = subprocess.run(["nft", "list", "ruleset"], capture_output=True, check=True, text=True)
        return found + [f"the rule {line.strip()}" for line in rules.stdout.splitlines()]

    def settled(self):
        """What the daemon has outside of itself when its functions are ready and nothing changes any more."""
        last = None
        while (found := self.outside()) != last or self.functions():
            last = found
            time.sleep(0.5)
        return found

    def functions(self):
        """Lines that name the functions of pools that are not ready."""
        pools = json.loads(self.slipway("vf", "ls", "--json"))
        busy = [one for pool in pools for one in pool["functions"] if one["state"] != "ready"]
        return [f"VF {one['number']} is {one['state']}: {one['owner']}" for one in busy]


def at_last(look, patience=300):
    """Returns what is left once nothing is, or after so many seconds: what a daemon closes without waiting may be there
    for a moment."""
    until = time.monotonic() + patience
    while (found := look()) and time.monotonic() < until:
        time.sleep(0.1)
    return found


def name(number):
    return f"slipway-lab-{os.getpid()}-{number}"


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, check=True, text=True).stdout


def namespaces(numbers):
    """Names of containers by the inode numbers of their network namespaces."""
    return {os.stat(f"/run/netns/{name(number)}").st_ino: name(number) for number in numbers}


def interfaces(number):
    """Names of the interfaces of a container that are Ethernet's."""
    links = json.loads(ip("-n", name(number), "-j", "link"))
    return [link["ifname"] for link in links if link["link_type"] == "ether"]


def cnitool(node):
    """Each operation by cnitool, the reference program. Returns milliseconds by operation."""
    folder = node.work / "net.d"
    folder.mkdir()
    plugin = {"type": "slipway-cni", "network": NETWORK}
    listed = {"cniVersion": "1.1.0", "name": "tool", "plugins": [plugin]}
    (folder / "10-tool.conflist").write_text(json.dumps(listed))
    variables = dict(
        node.environment, NETCONFPATH=str(folder), CNI_PATH=os.path.dirname(node.options.plugin)
    )
    took = {}
    for word in ["status", "add", "check", "gc", "check", "del", "del", "add", "gc", "del"]:
        begun = time.monotonic()
        # cnitool's gc knows no valid attachment: what it removed, a later check does not find.
        words = [node.options.cnitool, word, "tool", f"/run/netns/{name(0)}"]
        done = subprocess.run(words, env=variables, capture_output=True, text=True)
        took.setdefault(word, (time.monotonic() - begun) * 1000)
        if done.returncode and word != "check":
            sys.exit(f"cnitool {word}: {done.stdout}{done.stderr}")
    return took


def alone(node, rounds=50):
    """One ADD at a time. Returns the median and the most in milliseconds."""
    took = []
    for _ in range(rounds):
        begun = time.monotonic()
        node.call("ADD", 0)
        took.append((time.monotonic() - begun) * 1000)
        node.call("DEL", 0)
    return statistics.median(took), max(took)


def reap(processes):
    """Waits for processes. Returns their CPU time in seconds and the number that failed."""
    used, failed = 0.0, 0
    for process in processes:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        used += usage.ru_utime + usage.ru_stime
        failed += process.returncode != 0
    return used, failed


def many(node, count, command, program=None):
    """Starts the plugin, or `program` in the same way, `count` times at once, and waits. Returns the milliseconds of all,
    the CPU seconds of all, and the number that failed."""
    config = node.work / "config.json"
    config.write_bytes(node.config)
    begun = time.monotonic()
    processes = []
    for number in range(count):
        with open(config, "rb") as file:
            processes.append(node.spawn(command, number, file, program=program))
    used, failed = reap(processes)
    return (time.monotonic() - begun) * 1000, used, failed


def spawns(node, count):
    """Spawns an empty program `count` times at once. Returns the milliseconds of all, and the CPU milliseconds of each."""
    took, used, _ = many(node, count, "ADD", "/bin/true")
    return took, used * 1000 / count


def at_once(node, count, command):
    """As many operations at once. Returns milliseconds, and CPU milliseconds of each in plugin and
    daemon."""
    before = node.cpu()
    took, used, failed = many(node, count, command)
    if failed:
        sys.exit(f"{failed} of {count} {command} failed: {node.call(command, 0)}")
    return took, used * 1000 / count, (node.cpu() - before) * 1000 / count


def published(node, number):
    """Writes the configuration of a container with a published port. Returns the file."""
    mapping = {"hostPort": 40000 + number, "containerPort": 80, "protocol": "tcp"}
    more = {"runtimeConfig": {"portMappings": [mapping]}}
    file = node.work / f"config-{number}.json"
    file.write_text(json.dumps(json.loads(node.config) | more))
    return file


def steps(node, count, seed, containers=8):
    """Random operations of which some are killed, with kills of the daemon. Returns counts."""
    chance = random.Random(seed)
    counts = dict.fromkeys(["ADD", "DEL", "GC", "killed plugins", "killed daemons"], 0)
    configs = [published(node, number) for number in range(containers)]
    for _ in range(count):
        number = chance.randrange(containers)
        command = chance.choice(["ADD", "ADD", "DEL", "DEL", "CHECK"])
        with open(configs[number], "rb") as file:
            process = node.spawn(command, number, file)
        counts[command] = counts.get(command, 0) + 1
        if chance.random() < 0.25:
            time.sleep(chance.random() * 0.008)
            process.kill()
            counts["killed plugins"] += 1
        if chance.random() < 0.04:
            time.sleep(chance.random() * 0.008)
            node.end()
            counts["killed daemons"] += 1
            # Some operations find no daemon.
            process.wait()
            for other in range(chance.randrange(3)):
                with open(configs[other], "rb") as file:
                    node.spawn(chance.choice(["DEL", "ADD"]), other, file).wait()
            node.start()
        process.wait()
        if chance.random() < 0.01:
            valid = {"cni.dev/valid-attachments": []}
            node.call("GC", number, json.dumps(json.loads(node.config) | valid).encode())
            counts["GC"] += 1
    for number in range(containers):
        node.call("DEL", number)
    return counts


def main():
    parser = argparse.ArgumentParser()
    for word in ["work", "cnitool", "slipway", "plugin"]:
        parser.add_argument(f"--{word}", required=True)
    for word in ["at-once", "steps", "seed"]:
        parser.add_argument(f"--{word}", type=int, required=True)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    node, count = Node(options), max(options.at_once, 8)
    ip("link", "set", "lo", "up")
    made = []
    try:
        for number in range(count):
            ip("netns", "add", name(number))
            made.append(number)
        node.start()
        node.slipway("network", "create", NETWORK)
        # Its functions are ready again after each kill of the daemon.
        node.slipway("vf", "create", "lab", "--disk", "ram:1M", "--count", "2")
        found = measure(node, count)
        found["seed"] = options.seed
        node.restart()
        before = node.settled()
        found["steps"] = steps(node, options.steps, options.seed)
        containers = namespaces(made)
        left = at_last(lambda: node.left(containers))
        node.restart()
        left += at_last(lambda: [one for one in node.outside() if one not in before])
        for number in range(count):
            left += [f"{one} in {name(number)}" for one in interfaces(number)]
        found["left"] = left
    finally:
        if node.daemon and node.daemon.poll() is None:
            node.end(signal.SIGTERM)
        for number in made:
            subprocess.run(["ip", "netns", "delete", name(number)], check=False)
    show(found, options.json)
    sys.exit(1 if found["left"] else 0)


def measure(node, count):
    tool = cnitool(node)
    median, most = alone(node)
    spawns(node, count)
    empty, empty_cpu = spawns(node, count)
    added, plugin, daemon = at_once(node, count, "ADD")
    deleted, delete_plugin, delete_daemon = at_once(node, count, "DEL")
    return {
        "cnitool_ms": tool,
        "add_alone_ms": {"median": median, "most": most},
        "at_once": count,
        "empty_ms": empty,
        "empty_cpu_ms": empty_cpu,
        "add_ms": added,
        "add_ratio": added / empty,
        "add_cpu_ms": {"plugin": plugin, "daemon": daemon, "both": plugin + daemon},
        "del_ms": deleted,
        "del_cpu_ms": {"plugin": delete_plugin, "daemon": delete_daemon},
    }


def show(found, as_json):
    if as_json:
        print(json.dumps(found, indent=2))
        return
    tool = ", ".join(f"{word} {took:.1f}" for word, took in found["cnitool_ms"].items())
    print(f"cnitool, ms: {tool}")
    one, cpu = found["add_alone_ms"], found["add_cpu_ms"]
    print(f"one ADD alone: median {one['median']:.2f} ms, most {one['most']:.2f} ms")
    print(
        f"{found['at_once']} at once: ADD {found['add_ms']:.0f} ms, an empty program "
        f"{found['empty_ms']:.0f} ms: {found['add_ratio']:.2f} times"
    )
    print(
        f"CPU of one ADD: plugin {cpu['plugin']:.2f} ms, daemon {cpu['daemon']:.2f} ms, both "
        f"{cpu['both']:.2f} ms; an empty program {found['empty_cpu_ms']:.2f} ms"
    )
    print(f"{found['at_once']} DEL at once: {found['del_ms']:.0f} ms")
    counts = ", ".join(f"{number} {what}" for what, number in found["steps"].items())
    print(f"random steps (seed {found['seed']}): {counts}")
    print("\n".join(f"LEFT: {one}" for one in found["left"]) or "nothing is left")


main()
