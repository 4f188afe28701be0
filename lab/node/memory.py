"""Measures the memory of sandboxes that ran a small function of Python and are idle: forks beside cold starts.

usage: memory.py IMAGE FORKS BOOTS    prints a line `lab: memory_NAME=NUMBER` for each figure, in bytes
"""
import json, os, subprocess, sys, time

PAGE = 4096
# Seconds in which a sandbox becomes idle.
IDLE = 5
# Forks whose pages are compared with the template's.
COMPARED = 5
FUNCTION = """
import hashlib, re, struct, sys, time
def handler(event):
    words = re.findall(r"[a-z]+", event)
    return {word: hashlib.sha256(word.encode()).hexdigest() for word in words}
print(len(handler("a small function of some words " * 20)), flush=True)
time.sleep(100000)
"""


def slipway(*words):
    return subprocess.run(["slipway", *words], check=True, capture_output=True, text=True).stdout


def inspected(name):
    return json.loads(slipway("inspect", name))[0]


def kib_of(path, *names):
    with open(path) as file:
        return sum(int(line.split()[1]) << 10 for line in file if line.split(":")[0] in names)


def private(pid):
    """Bytes of pages that no other process has, without memory of guests, and of page tables."""
    total, guests = 0, False
    with open(f"/proc/{pid}/smaps") as file:
        for line in file:
            name = line.split(None, 1)[0]
            if not name.endswith(":"):
                guests = "/memfd:" in line and "slipway-granules" not in line
            elif name in ("Private_Clean:", "Private_Dirty:") and not guests:
                total += int(line.split()[1]) << 10
    return total + kib_of(f"/proc/{pid}/status", "VmPTE")


def memory_of(pid):
    """The file of a guest's memory: the largest that its VMM has mapped."""
    best = (0, None)
    with open(f"/proc/{pid}/maps") as maps:
        for line in maps:
            if "/memfd:" in line:
                start, end = (int(word, 16) for word in line.split()[0].split("-"))
                path = f"/proc/{pid}/map_files/{start:x}-{end:x}"
                best = max(best, (os.stat(path).st_size, path))
    return best[1]


def compared(memory, template):
    """Bytes of pages of a fork that differ from its template's, and of those that do not."""
    changed = same = 0
    own, original = os.open(memory, os.O_RDONLY), os.open(template, os.O_RDONLY)
    at = 0
    while True:
        try:
            at = os.lseek(own, at, os.SEEK_DATA)
        except OSError:
            break
        end = os.lseek(own, at, os.SEEK_HOLE)
        while at < end:
            size = min(64 * PAGE, end - at)
            mine, theirs = os.pread(own, size, at), os.pread(original, size, at)
            theirs = theirs.ljust(size, b"\0")
            for place in range(0, size, PAGE):
                if mine[place:place + PAGE] == theirs[place:place + PAGE]:
                    same += PAGE
                else:
                    changed += PAGE
            at += size
    os.close(own)
    os.close(original)
    return changed, same


def figure(name, value):
    print(f"lab: memory_{name}={int(value)}", flush=True)


def daemon():
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            if file.read().split(b"\0")[:2] == [b"slipway", b"daemon"]:
                return int(pid)
    sys.exit("there is no daemon")


def settled():
    subprocess.run(["sync"])
    with open("/proc/sys/vm/drop_caches", "w") as file:
        file.write("3")
    return kib_of("/proc/meminfo", "MemFree")


def run(name, image, *options):
    slipway("run", "--detach", "--name", name, "--wait-network", *options, image, "--", "python3", "-c", FUNCTION)


def measure(kind, image, count, options, template=None):
    # The first one makes what all have in common, and tells the daemon what forks touch.
    run(f"{kind}-0", image, *options)
    time.sleep(IDLE)
    plane, before = daemon(), settled()
    plane_before, begin = private(plane), time.monotonic()
    names = [f"{kind}-{number}" for number in range(1, count + 1)]
    for name in names:
        run(name, image, *options)
    took = time.monotonic() - begin
    # The containers run; their functions end later.
    while any(slipway("logs", name).strip() != "6" for name in names):
        time.sleep(1)
    time.sleep(IDLE)
    vmms = [inspected(name)["vm"]["pid"] for name in names]
    files = [memory_of(pid) for pid in vmms]
    guest = sum(os.stat(path).st_blocks * 512 for path in files) / count
    vmm = sum(private(pid) for pid in vmms) / count
    share = (private(plane) - plane_before) / count
    figure(f"{kind}_count", count)
    figure(f"{kind}_ms", 1000 * took / count)
    figure(f"{kind}_guest", guest)
    figure(f"{kind}_vmm", vmm)
    figure(f"{kind}_plane", share)
    figure(f"{kind}_all", guest + vmm + share)
    figure(f"{kind}_host", (before - settled()) / count)
    if template:
        pairs = [compared(path, template) for path in files[-COMPARED:]]
        figure(f"{kind}_written", sum(changed for changed, _ in pairs) / len(pairs))
        figure(f"{kind}_same", sum(same for _, same in pairs) / len(pairs))
    slipway("rm", "--force", "--all")


image, forks, boots = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
slipway("template", "create", "web")
measure("boot", image, boots, ())
measure("fork", image, forks, ("--from", "web"), "/var/lib/slipway/templates/web/memory")
