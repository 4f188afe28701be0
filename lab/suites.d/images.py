#!/usr/bin/env python3
"""images.py ROOT PROGRAMS REGISTRY: makes the images that containerd's own tests ask for, and pushes them.

The arguments are those of `critest/images.py`, which has what these images are made of; ROOT has Debian's stress too.
Only what the tests look at is as in the images of these names. One that they name by the digest of its maker's
cannot be made.
"""

import pathlib
import random
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "critest"))
import images  # noqa: E402
from images import Layer  # noqa: E402

INDEX = "application/vnd.oci.image.index.v1+json"
# Tests pull some of an image's platforms, and expect that others stay away.
PLATFORMS = ({"architecture": "amd64", "os": "linux"}, {"architecture": "arm", "os": "linux", "variant": "v7"},
             {"architecture": "arm64", "os": "linux", "variant": "v8"}, {"architecture": "s390x", "os": "linux"})
WINDOWS = {"architecture": "amd64", "os": "windows", "os.version": "10.0.17763.1"}
# Users and groups that tests name, and that containerd-stress runs as.
PASSWD = images.PASSWD + b"""daemon:x:1:1:daemon:/usr/sbin:/bin/false
bin:x:2:2:bin:/bin:/bin/false
sys:x:3:3:sys:/dev:/bin/false
games:x:5:60:games:/usr/games:/bin/false
"""
GROUP = images.GROUP + b"daemon:x:1:\nbin:x:2:\nsys:x:3:\nwheel:x:10:root\ngames:x:60:\n"
BASH = b"#!/bin/sh\nexec sh \"$@\"\n"
RELEASE = b"NAME=\"Alpine Linux\"\nID=alpine\nVERSION_ID=3.14.0\n"
TEXT = b"test_content\n"
# nc of Debian's busybox has no handler for SIGTERM, and a container's first process ignores what it has none for.
NC = b"#!/bin/sh\ntrap 'kill $!; exit 143' TERM\nbusybox nc \"$@\" &\nwait $!\n"
# Bytes of a layer that is as long as tests need it, which cut its transfer after 3 MiB.
LONG = 6 << 20


def push_index(registry, name, tag, layers, platforms=PLATFORMS, **settings):
    """Pushes an image for several platforms, which differ in a file alone."""
    manifests = []
    for platform in platforms:
        mark = Layer().add("etc/platform", images.as_json(platform), 0o644)
        tags = [f"{tag}-{platform['os']}-{platform['architecture']}"]
        pushed = registry.push(name, tags, [*layers, mark], platform=platform, **settings)
        manifests.append(pushed | {"platform": platform})
    index = images.as_json({"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests})
    registry.call("PUT", f"{registry.url}/{name}/manifests/{tag}", index, INDEX)


def push_volumes(registry, base):
    """Images with volumes, whose files and owners come into them."""
    layer, volumes = Layer(), ("test_dir", "C:/weird_test_dir", ":colon_prefixed")
    for path in ("test_dir/test_file", "C:/weird_test_dir/weird_test_file", ":colon_prefixed/colon_prefixed_file"):
        layer.add(path, TEXT, 0o644)
    named = {"/" * (not volume.startswith("C:")) + volume: {} for volume in volumes}
    for tag in ("2.1", "2.2"):
        push_index(registry, "containerd/volume-copy-up", tag, [base, layer], Cmd=["sh"], Volumes=named)
    owned = Layer().add("bin/bash", BASH).add("usr/bin/passwd", b"", 0o4755).add("test_dir")
    owned.add("var/lib/long", random.Random(1).randbytes(LONG), 0o644)
    info, _ = owned.entries["test_dir"]
    info.uid = info.gid = 65534
    push_index(registry, "containerd/volume-ownership", "2.1", [base, owned], Cmd=["sh"], Volumes={"/test_dir": {}})


def main():
    root, programs, registry = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), images.Registry(sys.argv[3])
    base = images.busybox(root)
    users = Layer().add("etc/passwd", PASSWD, 0o644).add("etc/group", GROUP, 0o644).add("bin/nc", NC)
    push_index(registry, "containerd/busybox", "1.36", [base, users], Cmd=["sh"])
    alpine = Layer().add("etc/os-release", RELEASE, 0o644).add("bin/sh", symlink="/bin/busybox")
    push_index(registry, "containerd/alpine", "3.14.0", [base, users, alpine], Cmd=["/bin/sh"])
    push_index(registry, "containerd/windows/nanoserver", "1809", [base], [WINDOWS], Cmd=["cmd"])
    push_index(registry, "e2e-test-images/busybox", "1.29-2", [base], Cmd=["sh"])
    push_volumes(registry, base)
    pause = Layer().add("pause", (programs / "pause").read_bytes())
    for tag in ("3.6", "3.10", "3.10.2"):
        push_index(registry, "pause", tag, [pause], Entrypoint=["/pause"], User="65535:65535")
    stress = images.add_program(Layer(), root, "usr/bin/stress")
    push_index(registry, "e2e-test-images/resource-consumer", "1.10", [base, stress], Entrypoint=["sleep", "86400"])
    nginx = images.add_program(Layer().add("var/lib/nginx").add("var/log/nginx"), root, "usr/sbin/nginx")
    nginx.add("etc/nginx/nginx.conf", images.NGINX.replace(b"PORT", b"80").replace(b"stderr", b"stderr notice"), 0o644)
    push_index(registry, "containerd/nginx", "1.27.0", [base, nginx],
               Entrypoint=["nginx", "-c", "/etc/nginx/nginx.conf", "-g", "daemon off;"])


if __name__ == "__main__":
    main()
