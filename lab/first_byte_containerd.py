"""The way through containerd of lab/first-byte: crictl pulls the image, and ctr runs a container of it by Slipway's shim.

Two containerds are beside each other, alike but for the snapshotter of their images: Slipway's (`lazy`), and overlayfs (`whole`).
"""

import json
import os
import pathlib
import signal
import subprocess
import time

RUNTIME = "io.containerd.slipway.v2"
SNAPSHOTTERS = {"lazy": "slipway", "whole": "overlayfs"}
# The processes of a shim, by the names of their programs.
SHIMS = (b"containerd-shim-slipway-v2", b"slipway-shim-holder")
SETTINGS = """version = 2
root = "{top}/root"
state = "{top}/state"
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.snapshotter.v1.aufs",
  "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs"]
[grpc]
  address = "{address}"
[ttrpc]
  address = "{address}.ttrpc"
[plugins."io.containerd.grpc.v1.cri".containerd]
  snapshotter = "{snapshotter}"
  disable_snapshot_annotations = false
[plugins."io.containerd.grpc.v1.cri".cni]
  conf_dir = "{top}/cni"
[proxy_plugins.slipway]
  type = "snapshot"
  address = "{socket}"
"""


class Containerds:
    """Two containerds and a snapshotter beside the daemon of a node."""

    def __init__(self, node, options):
        self.node, self.options = node, options
        self.programs = pathlib.Path(options.containerd)
        self.tops = {way: node.work / f"containerd-{way}" for way in SNAPSHOTTERS}
        self.crictl_settings = node.work / "crictl.yaml"

    def address(self, way):
        return self.tops[way] / "containerd.sock"

    def start(self):
        """Starts all of it. The node's daemon serves."""
        shims = self.node.work / "bin"
        shims.mkdir()
        (shims / SHIMS[0].decode()).symlink_to(self.options.shim)
        self.crictl_settings.touch()
        self.node.environment |= {
            "PATH": f"{shims}:{self.programs}:{os.environ['PATH']}",
            "SLIPWAY_PROGRAM": self.options.slipway,
        }
        socket = self.node.run_dir / "snapshotter.sock"
        self.node.spawn("snapshotter", [self.options.snapshotter])
        self.node.wait_while(lambda: not socket.exists(), "the snapshotter does not answer")
        for way, snapshotter in SNAPSHOTTERS.items():
            top, settings = self.tops[way], self.tops[way] / "containerd.toml"
            (top / "fifos").mkdir(parents=True)
            address = self.address(way)
            settings.write_text(SETTINGS.format(top=top, address=address, snapshotter=snapshotter, socket=socket))
            self.node.spawn(top.name, [self.programs / "containerd", "--config", settings])
            self.node.wait_while(lambda: not self.serves(way), "containerd does not answer")

    def serves(self, way):
        """Returns whether the CRI plugin answers, which does so later than containerd itself."""
        return self.address(way).exists() and not self.ask(way, 60, "images").returncode

    def end(self):
        """Ends what is left of an interrupted run. The node has ended its programs."""
        addresses = [os.fsencode(self.address(way)) for way in SNAPSHOTTERS]
        left = [pid for pid, words in processes() if is_shim(words, addresses)]
        # A shim and its holder start each other again, unless both are stopped.
        for sign in (signal.SIGSTOP, signal.SIGKILL):
            for pid in left:
                try:
                    os.kill(pid, sign)
                except ProcessLookupError:
                    pass
        for line in reversed(pathlib.Path("/proc/self/mounts").read_text().splitlines()):
            if line.split()[1].startswith(f"{self.node.work}/"):
                subprocess.run(["umount", "--lazy", line.split()[1]], check=False)

    def ask(self, way, limit, *words):
        """Runs crictl, whose calls may take so many seconds."""
        endpoint = f"unix://{self.address(way)}"
        command = [self.options.crictl, "--config", self.crictl_settings, "--runtime-endpoint", endpoint]
        command += ["--image-endpoint", endpoint, "--timeout", f"{limit}s", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=limit + 60, check=False)

    def crictl(self, way, *words):
        done = self.ask(way, self.options.limit, *words)
        if done.returncode:
            self.node.fail(f"crictl {' '.join(words)}: {done.stderr}", self.tops[way].name, "snapshotter")

    def pull(self, way):
        image, before, begun = self.node.image("big"), self.node.sent(), time.monotonic()
        self.crictl(way, "pull", image)
        took, sent = time.monotonic() - begun, self.node.sent() - before
        self.forget(way, image)
        return {"seconds": took, "sent": sent}

    def run(self, way):
        """Times the first byte of a container's output, from before the pull of its image."""
        image, before, begun = self.node.image("big"), self.node.sent(), time.monotonic()
        self.crictl(way, "pull", image)
        pulled = time.monotonic() - begun
        command = [self.programs / "ctr", "--address", self.address(way), "--namespace", "k8s.io", "run", "--rm"]
        command += ["--snapshotter", SNAPSHOTTERS[way], "--runtime", RUNTIME, "--fifo-dir", self.tops[way] / "fifos"]
        command += [image, "first", "head", "-c", "1", "/big/file"]
        found = self.node.first_byte(command, begun, before)
        if way == "lazy":
            self.node.wait_while(lambda: self.cached(image, lazy=True), "the image is not whole")
        whole, all_sent = time.monotonic() - begun, self.node.sent() - before
        self.forget(way, image)
        return found | {"pull_s": pulled, "whole_s": whole if way == "lazy" else None, "sent_in_all": all_sent}

    def cached(self, image, lazy=False):
        """Returns whether Slipway's cache has the image by its name and digest, with `lazy` as one that is not whole."""
        name = image.rpartition(":")[0] + "@"
        for one in json.loads(self.node.slipway("image", "ls", "--json")):
            if any(reference.startswith(name) for reference in one["references"]):
                return one["lazy"] or not lazy
        return False

    def forget(self, way, image):
        """Removes the image, and what the shim has made of it. Nothing is left to be written to the disk afterwards."""
        self.node.wait_while(lambda: json.loads(self.node.slipway("ps", "--json")), "a sandbox is still there")
        self.crictl(way, "rmi", image)
        # The snapshotter removes what it has pulled; what the shim has made of layers stays.
        if way == "whole":
            self.node.slipway("image", "prune", "--all")
        self.node.wait_while(lambda: self.cached(image), "the image stays in Slipway's cache")
        self.node.end_fetchers()
        os.sync()


def processes():
    """The id and the command line of each process."""
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield int(path.parent.name), path.read_bytes().split(b"\0")
        except OSError:
            continue


def is_shim(words, addresses):
    of_ours = any(word.endswith(address) for word in words for address in addresses)
    return os.path.basename(words[0]) in SHIMS and of_ours
