"""Checks between kills: do crictl, ctr and slipway report the same states, do the processes exist, and what was left?

`churn.py` calls `lies` while no call is under way. It calls `there` and `kept` before the first kill, and again each
time that all pods were removed.
"""

import json
import os
import pathlib
import re
import subprocess

import machine


def tasks():
    """Returns ctr's tasks, by their ids: (state, process id)."""
    rows = (line.split() for line in machine.ctr("task", "ls").splitlines()[1:])
    return {row[0]: (row[2], int(row[1])) for row in rows if len(row) == 3}


def lies():
    """Compares the states that crictl, ctr and slipway report, and the processes of the node.

    Returns the contradictions, one line each, and the number of containers and pods that were compared.
    """
    seen = Seen()
    found = [lie for check in CHECKS for lie in check(seen)]
    return found, len(seen.pods) + len(seen.containers)


class Seen:
    """The reports of one moment, fetched one after the other while nothing changes."""

    def __init__(self):
        # crictl's pods and containers, by their ids.
        self.pods = {pod["id"]: pod for pod in machine.crictl_json("pods")["items"]}
        self.containers = {one["id"]: one for one in machine.crictl_json("ps", "--all")["containers"]}
        # slipway's sandboxes by their names, and the names of containers of pods that run for it: containerd's ids.
        self.boxes = machine.sandboxes()
        listed = [one for box in self.boxes.values() for one in box.get("containers", [])]
        self.running = {one["name"] for one in listed if one["state"] == "running"}
        # Processes by the ids of their pods, and the pods' ids by the names of their sandboxes.
        self.shims, self.vmms = machine.shims(), machine.vmms()
        self.owners = {record["name"]: machine.owner(record) for _, record in machine.records()}


def pods_without_processes(seen):
    """A pod that is ready for crictl has a VMM and a shim."""
    for pod in (pod for pod in seen.pods.values() if pod["state"] == "SANDBOX_READY"):
        for what, has in (("VMM", seen.vmms), ("shim", seen.shims)):
            if pod["id"] not in has:
                yield f"pod {pod['metadata']['name']} is ready and has no {what}"


def containers_in_two_states(seen):
    """A container runs for crictl if and only if it runs for slipway."""
    for one in seen.containers.values():
        runs = one["id"] in seen.running
        if (one["state"] == "CONTAINER_RUNNING") != runs:
            name = f"{one['labels'].get('churn', '')}{one['podSandboxId'][:12]}/{one['metadata']['name']}"
            yield f"container {name} is {one['state']} for crictl and {'running' if runs else 'not'} for slipway"


def containers_unknown_to_crictl(seen):
    """A container that runs for slipway is one of crictl's."""
    for name in seen.running - set(seen.containers):
        yield f"container {name[:13]} runs and crictl has none"


def sandboxes_without_pod_or_vmm(seen):
    """A pod of slipway's is one of crictl's, and a sandbox that runs has a VMM."""
    for name, box in seen.boxes.items():
        if box.get("pod") and seen.owners.get(name) not in seen.pods:
            yield f"sandbox {name} ({box['state']}) is of no pod of crictl's"
        if box["state"] == "running" and not machine.alive(box["vmm_pid"]):
            yield f"sandbox {name} runs and has no VMM"


def shims_without_pod(seen):
    """A shim, or a holder that would start one again, is of a pod of crictl's."""
    for id in (set(seen.shims) | set(machine.holders())) - set(seen.pods):
        yield f"a shim of {id[:13]} serves and crictl has no such pod"


def tasks_without_process(_seen):
    """A task that runs for ctr has a process."""
    for id, (state, pid) in tasks().items():
        if state == "RUNNING" and not machine.alive(pid):
            yield f"task {id[:13]} runs for ctr and its process {pid} is gone"


CHECKS = (pods_without_processes, containers_in_two_states, containers_unknown_to_crictl, sandboxes_without_pod_or_vmm,
          shims_without_pod, tasks_without_process)


# Files that may stay after the last pod: the daemon's log and lock, and caches.
STAY = re.compile(r"/(daemon\.log|daemon\.lock|cache/.*)$")


def files(root):
    """Returns the paths of everything below a directory, except those of STAY."""
    return {str(path) for path in pathlib.Path(root).rglob("*") if not STAY.search(str(path))}


def lines(*argv):
    """Returns the lines that a command prints, as a set."""
    return set(machine.run(*argv, timeout=60).splitlines())


def programs():
    """Returns a line for each process, as a set, except this one, its children, process 1 and the keeper."""
    own = os.getpid()
    found = set()
    for pid, argv in machine.processes():
        parent = re.search(r"^PPid:\s*(\d+)", machine.read(f"/proc/{pid}/status"), re.M)
        name = os.path.basename(argv[0])
        # A keeper that holds nothing ends, and the daemon starts another one: it is no trace of a pod.
        if pid != own and not (parent and int(parent[1]) == own) and pid != 1 and argv[1:2] != ["keeper"]:
            found.add(f"process {name} {' '.join(argv[1:])[:120]}")
    return found


def descriptors(pid):
    """Returns the number of open descriptors of a process, 0 if it is gone."""
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0


def there():
    """Returns everything on the node that a pod or a sandbox could leave behind, as a set of lines "KIND NAME".

    Anything that is there when all pods were removed, and was not there before the first kill, is a leak.
    """
    found = set()
    # Lines that begin with /tmp/ are paths of the data directory, whose files are listed below.
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
    # The daemon's pool makes and removes groups of its own at any time.
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
    """Returns the list of lines that a function of tests/e2e/lib.sh prints.

    The script `node` beside this file exports the function, and those that it calls. Fails if one is not exported.
    """
    done = subprocess.run(["bash", "-c", function], capture_output=True, text=True, timeout=60, check=False)
    if "command not found" in done.stderr:
        raise machine.Failed(done.stderr.strip())
    return done.stdout.splitlines()


def kept():
    """Returns the number of open descriptors of the keeper. It grows if the daemon leaves something there for ever."""
    return sum(descriptors(pid) for pid, argv in machine.processes() if argv[1:2] == ["keeper"])


# Lines of `there` that containerd causes if it is killed while it makes a pod. It had not written anything of the pod,
# so it does not know of the pod when it starts again.
CONTAINERDS = re.compile(r"^(file /run/netns/|file .*/ipam/|file /var/lib/cni/|link veth|mount \S+ /run/netns/)")
