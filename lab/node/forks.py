"""Measures starts of sandboxes whose first command uses a disk and the network: forks beside boots of the same image.
Forks are of two kinds, in turn: the guest's agent sets the MAC address, or the port on the switch translates it (`fork_port`).
Behind them come forks with a socket function (`fork_sockets`), of a template of their own.

usage: forks.py IMAGE BOOTS FORKS    prints a line `lab: KIND_NAME=MICROSECONDS` for each figure of each start

A start is from the program `slipway` on. Figures: `answer`, the agent's first answer; `ran`, the container's process
runs; `used`, its first line of output has come, which it writes once it has written to its volume and to its root and
the gateway of its network has answered. A figure `stage_NAME` is a stage of the start.
With LAB_TRACE=yes in the environment, trace.py records one more fork (`fork_traced`).
"""
import json, os, subprocess, sys, tempfile, time

import trace

COMMAND = """
set -e
dd if=/dev/urandom of=/dev/slipway/data bs=4k count=4 oflag=direct 2>/dev/null
dd if=/dev/slipway/data of=/written bs=4k count=4 iflag=direct conv=fsync 2>/dev/null
ping -q -n -c 1 -W 20 "$1" >/dev/null
echo used
"""
# Seconds of the server's clock after which a start counts as hung.
PATIENCE = 10
# Seconds between two starts, in which the kernel takes apart what the one before had, and the daemon makes what it keeps ready
# for the next one (`spare_vmms`, `spare_forks`).
BETWEEN = 1


def slipway(*words):
    return subprocess.run(["slipway", *words], check=True, stdout=subprocess.PIPE, text=True).stdout


def start(image, gateway, options):
    """Runs a sandbox to its end. Returns its figures in nanoseconds."""
    with tempfile.NamedTemporaryFile(suffix=".json") as timeline:
        begin = time.monotonic_ns()
        words = ["run", "--rm", "--wait-network", "--volume", "data:16M", "--timeline", timeline.name, *options]
        words += [image, "--", "sh", "-c", COMMAND, "sh", gateway]
        client = subprocess.Popen(["timeout", str(PATIENCE), "slipway", *words], stdout=subprocess.PIPE, text=True)
        line, used = client.stdout.readline(), time.monotonic_ns() - begin
        if client.wait() != 0 or line != "used\n":
            return None
        # Its times are since the client's start.
        stages = json.load(timeline)[0]["stages"]
    ends = {stage["name"]: stage["end_ns"] for stage in stages}
    figures = {"answer": ends.get("resume", ends.get("agent")), "ran": ends["container"], "used": used}
    for stage in stages:
        name = f"stage_{stage['name']}"
        figures[name] = figures.get(name, 0) + stage["end_ns"] - stage["start_ns"]
    return figures


def tell(name, figures):
    if figures is None:
        print(f"lab: {name}_hung=1", flush=True)
        return
    for figure, value in figures.items():
        print(f"lab: {name}_{figure}={value // 1000}", flush=True)


def measure(kinds, image, gateway, count):
    """Starts `count` sandboxes of each kind, and one more at first, in turn. `kinds` has the options of each."""
    for number in range(count + 1):
        for kind, options in kinds.items():
            time.sleep(BETWEEN)
            # The first one makes what all have in common, and tells the daemon what forks touch.
            tell(f"{kind}_first" if number == 0 else kind, start(image, gateway, options))


def record(name, image, gateway, options):
    """Starts one more sandbox, which is slower, since it is recorded."""
    trace.begin()
    begin = time.monotonic_ns()
    tell(name, start(image, gateway, options))
    trace.end(begin, time.monotonic_ns())


def start_engine():
    """Starts the socket engine of sandboxes with `--sockets`, and returns once it serves."""
    with open("/run/policy.toml", "w") as policy:
        policy.write('[[tenant]]\nname = "host"\nnetns = "/proc/self/ns/net"\n')
    os.environ["SLIPWAY_SOCKET"] = "/run/engine.sock"
    words = ["slipway", "socket", "engine", "--policy", "/run/policy.toml", "--links", "/none"]
    with open("/run/engine.log", "w") as log:
        engine = subprocess.Popen(words, stdout=log, stderr=log)
    while not os.path.exists("/run/engine.d/engine.sock"):
        if engine.poll() is not None:
            with open("/run/engine.log") as log:
                sys.exit(f"the socket engine has ended: {log.read()}")
        time.sleep(0.1)
    return engine


image, boots, forks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
slipway("run", "--rm", "--wait-network", image, "--", "true")
gateway = json.loads(slipway("network", "inspect", "default"))[0]["gateway"]
measure({"boot": ()}, image, gateway, boots)
slipway("template", "create", "web")
measure({"fork": ("--from", "web"), "fork_port": ("--from", "web", "--mac-at-port")}, image, gateway, forks)
if os.environ.get("LAB_TRACE"):
    time.sleep(BETWEEN)
    record("fork_traced", image, gateway, ("--from", "web"))
slipway("template", "rm", "web")
engine = start_engine()
slipway("template", "create", "--sockets", "sockets")
measure({"fork_sockets": ("--from", "sockets", "--sockets")}, image, gateway, forks)
slipway("template", "rm", "sockets")
engine.terminate()
