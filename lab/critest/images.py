#!/usr/bin/env python3
"""images.py ROOT PROGRAMS REGISTRY [none|some|all]: makes the images that critest asks for, and pushes them.

ROOT has Debian's packages unpacked (busybox, nginx and what they need), PROGRAMS the static programs pause and
nonewprivs, REGISTRY is an address such as 127.0.0.1:5000. Names have no host: a mirror of several hosts has each
image once. Only what the tests look at is as in the images of these names. The last word says which of them have
eStargz layers, and can be pulled lazily: `some` are all but a few.
"""

import gzip
import hashlib
import io
import json
import pathlib
import subprocess
import sys
import tarfile
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tests/e2e"))
import estargz  # noqa: E402

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
PLATFORM = {"architecture": "amd64", "os": "linux"}
# With `some`, the images that cannot be pulled lazily. They share no layer with the others.
PLAIN = {"httpd", "test-image-2", "test-image-user-username"}

# Debian's busybox has no pgrep and no ipcs.
PGREP = b"#!/bin/sh\nexec pidof \"$@\"\n"
IPCS = b"#!/bin/sh\nwhile read -r key id rest; do echo \"$id\"; done </proc/sysvipc/shm\n"
PASSWD = b"""root:x:0:0:root:/root:/bin/sh
www-data:x:33:33:www-data:/var/www:/bin/false
nobody:x:65534:65534:nobody:/nonexistent:/bin/false
"""
GROUP = b"root:x:0:\nwww-data:x:33:\nnogroup:x:65534:\n"
NGINX = b"""user www-data;
pid /run/nginx.pid;
error_log /dev/stderr;
events { worker_connections 64; }
http {
    access_log /dev/stdout;
    server { listen PORT; location / { root /var/www; } }
}
"""
HTTPD = "echo 'httpd: serving port 80'; exec httpd -f -p 80 -h /var/www"


class Layer:
    """A layer: files by their paths. The same files give the same bytes."""

    def __init__(self):
        self.entries = {}

    def add(self, path, data=None, mode=0o755, symlink=None, same=None):
        """Adds a directory, a file with `data`, a symbolic link, or another name for the file `same`."""
        for parent in list(pathlib.PurePosixPath(path).parents)[-2::-1]:
            if str(parent) not in self.entries:
                self.add(str(parent))
        info = tarfile.TarInfo(path)
        info.mode, info.size, info.linkname = mode, len(data or b""), symlink or same or ""
        if symlink is not None:
            info.type = tarfile.SYMTYPE
        elif same is not None:
            info.type = tarfile.LNKTYPE
        elif data is None:
            info.type = tarfile.DIRTYPE
        self.entries[path] = (info, data or b"")
        return self

    def packed(self, lazy):
        """Returns the layer's compressed tar file, the digest of the plain one, and the layer's annotations.

        With `lazy` it is eStargz.
        """
        if lazy:
            made = estargz.Layer()
            made.landmark(estargz.NO_LANDMARK)
            for info, data in self.entries.values():
                made.put(info, data)
            blob, plain, index = made.packed()
            return blob, plain, {estargz.INDEX_DIGEST: index}
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as tar:
            for info, data in self.entries.values():
                tar.addfile(info, io.BytesIO(data))
        plain = out.getvalue()
        return gzip.compress(plain, compresslevel=1, mtime=0), digest(plain), {}


class Registry:
    """The registry's side of a push. Of the images, `none`, `some` or `all` can be pulled lazily."""

    def __init__(self, address, lazy="none"):
        self.url, self.lazy = f"http://{address}/v2", lazy

    def call(self, method, url, data=None, kind="application/octet-stream"):
        request = urllib.request.Request(url, data=data, method=method, headers={"Content-Type": kind})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.headers

    def push_blob(self, name, data):
        """Pushes a blob, and returns its descriptor without a type."""
        where = self.call("POST", f"{self.url}/{name}/blobs/uploads/", b"")["Location"]
        self.call("PUT", f"{where}&digest={digest(data)}", data)
        return {"digest": digest(data), "size": len(data)}

    def push_layer(self, name, data, annotations):
        """Pushes a layer, and returns its descriptor."""
        descriptor = self.push_blob(name, data) | {"mediaType": LAYER}
        return descriptor | {"annotations": annotations} if annotations else descriptor

    def push(self, name, tags, layers, platform=PLATFORM, **settings):
        """Pushes an image with some tags, and returns its descriptor; `settings` are those of a container."""
        settings["Env"] = ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]
        lazy = self.lazy == "all" or self.lazy == "some" and name.rpartition("/")[2] not in PLAIN
        packed = [layer.packed(lazy) for layer in layers]
        config = {**platform, "config": settings,
                  "rootfs": {"type": "layers", "diff_ids": [plain for _, plain, _ in packed]}}
        manifest = {"schemaVersion": 2, "mediaType": MANIFEST,
                    "config": self.push_blob(name, as_json(config)) | {"mediaType": CONFIG},
                    "layers": [self.push_layer(name, data, notes) for data, _, notes in packed]}
        data = as_json(manifest)
        for tag in tags:
            self.call("PUT", f"{self.url}/{name}/manifests/{tag}", data, MANIFEST)
        return {"mediaType": MANIFEST, "digest": digest(data), "size": len(data)}


def digest(data):
    return "sha256:" + hashlib.sha256(data).hexdigest()


def as_json(value):
    return json.dumps(value, sort_keys=True).encode()


def libraries(root, program):
    """The dynamic loader and the libraries of a program in a root, as the root's own loader finds them."""
    loader = root / "lib64/ld-linux-x86-64.so.2"
    paths = ":".join(str(root / path) for path in ("lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu"))
    listed = subprocess.run([loader, "--library-path", paths, "--list", program],
                            check=True, capture_output=True, text=True).stdout
    found = {pathlib.Path(word) for word in listed.split() if word.startswith(f"{root}/")}
    return sorted(found - {loader})


def add_program(layer, root, path):
    """A program and its libraries, all of them in one directory."""
    program = root / path
    layer.add(path, program.read_bytes())
    layer.add("lib64/ld-linux-x86-64.so.2", (root / "lib64/ld-linux-x86-64.so.2").read_bytes())
    for library in libraries(root, program):
        layer.add(f"lib/x86_64-linux-gnu/{library.name}", library.read_bytes(), 0o644)
    return layer


def busybox(root):
    """A small system around Debian's busybox, in which each command is looked up as a file."""
    layer = Layer()
    for directory in ("dev", "proc", "sys", "root", "run", "var/www"):
        layer.add(directory)
    layer.add("tmp", mode=0o1777).add("var/run", symlink="/run").add("usr/bin")
    add_program(layer, root, "bin/busybox")
    applets = subprocess.run([root / "bin/busybox", "--list"], check=True, capture_output=True, text=True).stdout
    for applet in sorted(set(applets.split()) - {"busybox"}):
        # Names of one file, not symbolic links: a test hides /bin/ls alone.
        layer.add(f"bin/{applet}", same="bin/busybox")
    layer.add("bin/pgrep", PGREP).add("bin/ipcs", IPCS)
    layer.add("etc/passwd", PASSWD, 0o644).add("etc/group", GROUP, 0o644)
    return layer.add("var/www/index.html", b"<h1>It works</h1>\n", 0o644)


def push_pods(registry, programs):
    """The pause images. Version 3.9 is another image than the one that containerd is told to use."""
    program = (programs / "pause").read_bytes()
    for version in ("3.6", "3.8", "3.9", "3.10", "3.10.1"):
        layer = Layer().add("pause", program)
        if version == "3.9":
            layer.add("version", version.encode(), 0o644)
        registry.push("pause", [version], [layer], Entrypoint=["/pause"], User="65535:65535")


def push_servers(registry, base, root):
    nginx = Layer().add("var/lib/nginx").add("var/log/nginx")
    add_program(nginx, root, "usr/sbin/nginx")
    serve = ["nginx", "-c", "/etc/nginx/nginx.conf", "-g", "daemon off;"]
    for name, tag, port in (("e2e-test-images/nginx", "1.14-2", b"80"),
                            ("k8s-staging-cri-tools/hostnet-nginx-amd64", "latest", b"12003")):
        settings = Layer().add("etc/nginx/nginx.conf", NGINX.replace(b"PORT", port), 0o644)
        registry.push(name, [tag], [base, nginx, settings], Entrypoint=serve)
    registry.push("e2e-test-images/httpd", ["2.4.39-4"], [base], Entrypoint=["sh", "-c", HTTPD])


def push_users(registry, base):
    for name, user in (("uid", "1002"), ("username", "www-data"), ("uid-group", "1003:1004"),
                       ("username-group", "www-data:1004")):
        registry.push(f"k8s-staging-cri-tools/test-image-user-{name}", ["latest"], [base], Cmd=["sh"], User=user)
    users = Layer()
    users.add("etc/passwd", PASSWD + b"default-user:x:1000:1000::/home/default-user:/bin/sh\n", 0o644)
    users.add("etc/group", GROUP + b"default-user:x:1000:\ngroup-defined-in-image:x:50000:default-user\n", 0o644)
    registry.push("k8s-staging-cri-tools/test-image-predefined-group", ["latest"], [base, users],
                  Cmd=["sh"], User="1000")


def push_names(registry, base):
    """Images that are pulled and removed: each has a file of its own."""
    for name, file, tags in (("1", "1", ["latest"]), ("2", "2", ["latest"]), ("3", "3", ["latest"]),
                             ("latest", "latest", ["latest"]), ("digest", "digest", ["latest"]),
                             ("tags", "same-image", ["1", "2", "3"]),
                             ("tag", "test", ["test"]), ("tag", "all", ["all"])):
        layer = Layer().add(f"test-image-{file}", b"", 0o644)
        registry.push(f"k8s-staging-cri-tools/test-image-{name}", tags, [base, layer], Cmd=["sh"])


def main():
    root, programs, registry = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), Registry(*sys.argv[3:5])
    base = busybox(root)
    push_pods(registry, programs)
    registry.push("e2e-test-images/busybox", ["1.29-2"], [base], Cmd=["sh"])
    push_servers(registry, base, root)
    nonewprivs = Layer().add("nnp", (programs / "nonewprivs").read_bytes(), 0o4755)
    registry.push("e2e-test-images/nonewprivs", ["1.3"], [base, nonewprivs], Entrypoint=["/nnp"])
    push_users(registry, base)
    push_names(registry, base)


if __name__ == "__main__":
    main()
