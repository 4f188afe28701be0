#!/usr/bin/env python3
"""Makes the image of the DaemonSet that installs Slipway on the nodes of a Kubernetes cluster.

usage: image.py [OPTION...] TREE OUT

  TREE              what `make install DESTDIR=TREE` has made
  OUT               the archive: an OCI image layout, which containerd, podman and skopeo take

  --name NAME       the image's name; localhost/slipway-node with the version as its tag
  --kernel DIR      the guest kernel; /var/lib/slipway/kernel
  --tools DIR       the root of tools with mkfs.erofs; /var/lib/slipway/tools
  --busybox FILE    the static busybox that runs slipway-node; /usr/bin/busybox
  --qemu            QEMU too, for nodes without KVM: some 170 MB more
  --level N         gzip's level, 0 to 9; 6. 0: layers are not compressed

The image has three layers: busybox with slipway-node, the guest kernel and tools, which rarely change, and Slipway's
programs. The same files make the same image, byte for byte.
"""

import argparse
import gzip
import hashlib
import io
import json
import os
import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
PARTS = ("options.sh", "files.sh", "containerd.sh", "services.sh")
# Directories that the image has, and the node's own ones with their modes.
EMPTY = ("host", "proc", "sys", "dev", "run", "etc", "tmp", "usr")
# With the node's /usr, programs of the node find their loader and libraries (metrics.yaml).
LINKS = {"lib": "usr/lib", "lib64": "usr/lib64"}
MODES = {"tmp": 0o1777, "slipway/var/lib/slipway": 0o711}
# The place on the node of what is replaced as a whole.
UNITS = "var/lib/slipway/node"
LAYOUT = "application/vnd.oci.image"


def fail(reason):
    sys.exit(f"image: error: {reason}")


class Layer:
    """A tar archive of files in the image, sorted, with root as their owner and without times."""

    def __init__(self):
        self.files = {}

    def add(self, path, source):
        """Adds a file, link or directory of this machine, with what is below it."""
        source = pathlib.Path(source)
        self.files[path] = source
        if source.is_dir() and not source.is_symlink():
            for name in sorted(os.listdir(source)):
                self.add(f"{path}/{name}", source / name)

    def make(self, path, content, mode=0o644):
        """Adds a file with this content; a link if it is a `str`; a directory if it is `None`."""
        self.files[path] = (content, mode)

    def entry(self, path, source):
        info = tarfile.TarInfo(path)
        if isinstance(source, tuple):
            content, info.mode = source
            if content is None:
                info.type = tarfile.DIRTYPE
            elif isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
            else:
                info.size = len(content)
            return info, content if isinstance(content, bytes) else None
        info.mode = source.lstat().st_mode & 0o7777
        if source.is_symlink():
            info.type, info.linkname = tarfile.SYMTYPE, os.readlink(source)
        elif source.is_dir():
            info.type = tarfile.DIRTYPE
        elif source.is_file():
            content = source.read_bytes()
            info.size = len(content)
            return info, content
        else:
            fail(f"{source} is no file, link or directory")
        return info, None

    def write(self, out):
        for path in list(self.files):
            for parent in pathlib.PurePosixPath(path).parents[:-1]:
                self.files.setdefault(str(parent), (None, 0o755))
        with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
            for path in sorted(self.files):
                info, content = self.entry(path, self.files[path])
                info.mode = MODES.get(path, info.mode)
                tar.addfile(info, io.BytesIO(content) if content is not None else None)


class Archive:
    """The blobs of an image layout, in a directory until the archive is written."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)

    def blob(self, data, kind):
        digest = hashlib.sha256(data).hexdigest()
        (self.folder / digest).write_bytes(data)
        return {"mediaType": f"{LAYOUT}.{kind}", "digest": f"sha256:{digest}", "size": len(data)}

    def layer(self, layer, level):
        """Adds a layer. Returns its description, and the digest of what it unpacks to."""
        plain = io.BytesIO()
        layer.write(plain)
        data = plain.getvalue()
        diff = f"sha256:{hashlib.sha256(data).hexdigest()}"
        if not level:
            return self.blob(data, "layer.v1.tar"), diff
        return self.blob(gzip.compress(data, level, mtime=0), "layer.v1.tar+gzip"), diff

    def write(self, out, manifest, name):
        manifest["annotations"] = {
            "io.containerd.image.name": name,
            "org.opencontainers.image.ref.name": name.rpartition(":")[2],
        }
        index = {"schemaVersion": 2, "mediaType": f"{LAYOUT}.index.v1+json", "manifests": [manifest]}
        whole = Layer()
        whole.make("oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
        whole.make("index.json", json.dumps(index).encode())
        for file in self.folder.iterdir():
            whole.add(f"blobs/sha256/{file.name}", file)
        partial = out.with_name(f".{out.name}.partial")
        with partial.open("wb") as file:
            whole.write(file)
        partial.rename(out)


def digest_of(folder):
    """Returns 12 digits that stand for all files below a directory."""
    whole = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        content = content.encode() if isinstance(content, str) else content
        whole.update(f"{path.relative_to(folder)}\0{path.lstat().st_mode}\0{len(content)}\0".encode() + content)
    return whole.hexdigest()[:12]


def is_static(program):
    """Returns whether an ELF program of 64 bits names no interpreter."""
    data = program.read_bytes()
    if data[:5] != b"\x7fELF\x02":
        return False
    start, size, count = (int.from_bytes(data[at : at + n], "little") for at, n in ((32, 8), (54, 2), (56, 2)))
    kinds = [int.from_bytes(data[start + size * i : start + size * i + 4], "little") for i in range(count)]
    return 3 not in kinds


def base(busybox):
    """The layer that runs slipway-node."""
    if not busybox.is_file() or not is_static(busybox):
        fail(f"{busybox} is no static busybox: apt-get install busybox-static")
    layer = Layer()
    layer.add("bin/busybox", busybox)
    names = subprocess.run([busybox, "--list"], check=True, capture_output=True, text=True).stdout.split()
    for name in set(names) - {"busybox"}:
        layer.make(f"bin/{name}", "busybox", 0o777)
    layer.add("bin/slipway-node", HERE / "slipway-node")
    for part in PARTS:
        layer.add(f"bin/{part}", HERE / part)
    for folder in EMPTY:
        layer.make(folder, None, 0o755)
    for name, target in LINKS.items():
        layer.make(name, target, 0o777)
    return layer


def add_kernel(layer, kernel):
    if not (kernel / "vmlinuz").is_file():
        fail(f"{kernel} has no guest kernel: deploy/setup/setup.sh run")
    kernel = kernel.resolve()
    unit = f"kernel-{digest_of(kernel)}"
    layer.add(f"slipway/{UNITS}/{unit}", kernel)
    layer.make("slipway/var/lib/slipway/kernel", f"node/{unit}", 0o777)


def libraries(loader, path, program):
    """The files that the loader takes for a program."""
    shown = subprocess.run([loader, "--library-path", path, "--list", program], capture_output=True, text=True)
    if shown.returncode:
        fail(f"{program} does not run: {shown.stderr.strip()}")
    return [pathlib.Path(name) for name in re.findall(r"=> (/\S+) \(", shown.stdout)]


def add_tools(layer, tools, qemu, scratch):
    """mkfs.erofs with the libraries of its own Debian release, or all of the tool root with QEMU."""
    wrapper = tools / "bin/mkfs.erofs"
    root = re.search(r"(/\S+)/usr/bin/mkfs\.erofs", wrapper.read_text()) if wrapper.is_file() else None
    if not root:
        fail(f"{tools} has no mkfs.erofs: deploy/setup/setup.sh run")
    root = pathlib.Path(root[1])
    names = ["mkfs.erofs"] + (["qemu-system-x86_64"] if qemu else [])
    folder = root if qemu else part_of(root, scratch)
    unit = f"tools-{digest_of(folder)}"
    layer.add(f"slipway/{UNITS}/{unit}", folder)
    for name in names:
        text = (tools / "bin" / name).read_text().replace(str(root), f"/{UNITS}/{unit}")
        layer.make(f"slipway/var/lib/slipway/tools/bin/{name}", text.encode(), 0o755)


def part_of(root, scratch):
    """Copies mkfs.erofs, its libraries and its loader to a directory of the same layout."""
    loader, path = root / "usr/lib64/ld-linux-x86-64.so.2", root / "usr/lib/x86_64-linux-gnu"
    program = root / "usr/bin/mkfs.erofs"
    files = {"usr/lib64/ld-linux-x86-64.so.2": loader, "usr/bin/mkfs.erofs": program}
    files |= {f"usr/lib/x86_64-linux-gnu/{file.name}": file for file in libraries(loader, path, program)}
    for name, file in files.items():
        target = scratch / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.read_bytes())
        target.chmod(0o755)
    return scratch


def programs(tree):
    """The layer of what `make install` made. Its links, if any, are the node's."""
    found = [path for path in tree.rglob("bin/slipway") if path.is_file()]
    if len(found) != 1:
        fail(f"{tree} has no bin/slipway: make install DESTDIR={tree}")
    layer = Layer()
    for name in sorted(os.listdir(tree)):
        layer.add(f"slipway/{name}", tree / name)
    return layer, found[0]


def options():
    parser = argparse.ArgumentParser(usage=__doc__.split("\n\n", 1)[1])
    parser.add_argument("tree", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--name")
    parser.add_argument("--kernel", type=pathlib.Path, default="/var/lib/slipway/kernel")
    parser.add_argument("--tools", type=pathlib.Path, default="/var/lib/slipway/tools")
    parser.add_argument("--busybox", type=pathlib.Path, default="/usr/bin/busybox")
    parser.add_argument("--qemu", action="store_true")
    parser.add_argument("--level", type=int, default=6, choices=range(10))
    return parser.parse_args()


def main():
    args = options()
    top, slipway = programs(args.tree)
    version = subprocess.run([slipway, "--version"], check=True, capture_output=True, text=True).stdout.split()[-1]
    name = args.name or f"localhost/slipway-node:{version}"
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as scratch:
        middle = Layer()
        add_kernel(middle, args.kernel)
        add_tools(middle, args.tools, args.qemu, pathlib.Path(scratch))
        archive = Archive(folder)
        layers = [archive.layer(layer, args.level) for layer in (base(args.busybox), middle, top)]
        config = {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
                       "Entrypoint": ["/bin/slipway-node"], "Cmd": ["install", "--wait"]},
            "rootfs": {"type": "layers", "diff_ids": [diff for _, diff in layers]},
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": f"{LAYOUT}.manifest.v1+json",
            "config": archive.blob(json.dumps(config).encode(), "config.v1+json"),
            "layers": [layer for layer, _ in layers],
        }
        archive.write(args.out, archive.blob(json.dumps(manifest).encode(), "manifest.v1+json"), name)
    print(f"{args.out}: {name}, {args.out.stat().st_size >> 20} MiB")


main()
