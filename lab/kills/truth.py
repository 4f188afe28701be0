"""What is compared at a quiet point: the states that are told with each other and with the processes, and what is left."""

import json
import os
import pathlib
import re
import subprocess

import machine


def tasks():
    """State and process id of each of ctr's tasks, by their ids."""
    rows = (line.split() for line in machine.ctr("task", "ls").splitlines()[1:])
    return {row[0]: (row[2], int(row[1])) for row in rows if len(row) == 3}


def lies():
    """What is told and not true, one thing a line; and the number of containers and pods that were looked at."""
    pods = {pod["id"]: pod for pod in machine.crictl_json("pods")["items"]}
    containers = {one["id"]: one for one in machine.crictl_json("ps", "--all")["containers"]}
    states, shims, vmms = machine.sandboxes(), machine.shims(), machine.vmms()
    owners = {record["name"]: machine.owner(record) for _, record in machine.records()}
    running = {one["name"] for box in states.values() for one in box.get("containers", []) if one["state"] == "running"}
    found = []
    for pod in (pod for pod in pods.values() if pod["state"] == "SANDBOX_READY"):
        for what, has in (("VMM", vmms), ("shim", shims)):
            if pod["id"] not in has:
                found.append(f"pod {pod['metadata']['name']} is ready and has no {what}")
    for one in containers.values():
        told = one["state"] == "CONTAINER_RUNNING"
        if told != (one["id"] in running):
            name = f"{one['labels'].get('churn', '')}{one['podSandboxId'][:12]}/{one['metadata']['name']}"
            found.append(f"container {name} is {one['state']} for crictl and {'running' if one['id'] in running else 'not'}"
                         " for slipway")
    for name in running - set(containers):
        found.append(f"container {name[:13]} runs and crictl has none")
    for name, box in states.items():
        owner = owners.get(name)
        if box.get("pod") and owner not in pods:
            found.append(f"sandbox {name} ({box['state']}) is of no pod of crictl's")
        if box["state"] == "running" and not machine.alive(box["vmm_pid"]):
            found.append(f"sandbox {name} runs and has no VMM")
    for id in (set(shims) | set(machine.holders())) - set(pods):
        found.append(f"a shim of {id[:13]} serves and crictl has no such pod")
    for id, (state, pid) in tasks().items():
        if state == "RUNNING" and not machine.alive(pid):
            found.append(f"task {id[:13]} runs for ctr and its process {pid} is gone")
    return found, len(pods) + len(containers)


# Files that stay, or change at each start of the daemon.
STAY = re.compile(r"/(daemon\.log|daemon\.lock|cache/.*)$")


def files(root):
    return {str(path) for path in pathlib.Path(root).rglob("*") if not STAY.search(str(path))}


def lines(*argv):
    return set(machine.run(*argv, timeout=60).splitlines())


def programs():
    """Command lines of processes that are neither this program's nor its children's, by their ids."""
    own = os.getpid()
    found = set()
    for pid, argv in machine.processes():
        parent = re.search(r"^PPid:\s*(\d+)", machine.read(f"/proc/{pid}/status"), re.M)
        name = os.path.basename(argv[0])
        # The daemon starts a keeper where the last one has ended, which held nothing.
        if pid != own and not (parent and int(parent[1]) == own) and pid != 1 and argv[1:2] != ["keeper"]:
            found.add(f"process {name} {' '.join(argv[1:])[:120]}")
    return found


def descriptors(pid):
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0


def there():
    """All that pods and sandboxes leave traces in, as lines. Compared before the first kill and after the last pod."""
    found = set()
    found |= set(filter(lambda line: not line.startswith("/tmp/"), bash("leftovers")))
    found |= {f"file {path}" for path in files(machine.RUN_DIR) | files(machine.DATA_DIR)}
    found |= {f"file {path}" for path in files("/run/containerd/s") | files("/run/netns") | files("/var/lib/cni")
              | files(machine.WORK / "ipam")}
    state = machine.WORK / "state"
    for plugin in state.iterdir():
        if plugin.name.startswith(("io.containerd.runtime", "io.containerd.grpc.v1.cri")):
            found |= {f"bundle {path}" for path in files(plugin)}
    root = machine.WORK / "root" / "io.containerd.grpc.v1.cri"
    found |= {f"file {path}" for path in files(root)}
    # The daemon's pool of groups makes and removes its own.
    groups = [path for path, _, _ in os.walk("/sys/fs/cgroup") if "/slipway/pool-" not in path]
    found |= {f"group {path}" for path in groups}
    found |= {f"mount {line}" for line in machine.read("/proc/self/mounts").splitlines()}
    found |= {f"link {line.split(': ')[1].split('@')[0]}" for line in lines("ip", "-o", "link")}
    found |= {f"rule {line}" for line in lines("nft", "list", "ruleset")}
    for what in ("endpoint", "disk", "port"):
        found |= {f"{what} {one.get('id') or one['name']}" for one in json.loads(machine.slipway(what, "ls", "--json"))}
    for leases in (machine.DATA_DIR / "networks").glob("*.leases"):
        found |= {f"lease {line}" for line in machine.read(leases).splitlines()}
    found |= {f"sandbox {name}" for name in machine.sandboxes()}
    found |= {f"task {id}" for id in tasks()}
    found |= {f"container {line.split()[0]}" for line in machine.ctr("container", "ls").splitlines()[1:]}
    found |= {f"snapshot {line.split()[0]}" for line in machine.ctr("snapshot", "ls").splitlines()[1:]}
    found |= {f"pod {pod['id']}" for pod in machine.crictl_json("pods")["items"]}
    found |= {f"container {one['id']}" for one in machine.crictl_json("ps", "--all")["containers"]}
    found |= programs()
    return found


def bash(function):
    """Lines that a function of tests/e2e/lib.sh prints. The node exports it with those that it calls."""
    done = subprocess.run(["bash", "-c", function], capture_output=True, text=True, timeout=60, check=False)
    if "command not found" in done.stderr:
        raise machine.Failed(done.stderr.strip())
    return done.stdout.splitlines()


def kept():
    """Open descriptors of the keeper."""
    return sum(descriptors(pid) for pid, argv in machine.processes() if argv[1:2] == ["keeper"])


# What containerd itself leaves when it dies while it makes a pod: it has written nothing of the pod yet.
CONTAINERDS = re.compile(r"^(file /run/netns/|file .*/ipam/|file /var/lib/cni/|link veth|mount \S+ /run/netns/)")
