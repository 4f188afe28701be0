#!/usr/bin/env python3
"""Makes an image of eStargz layers in the directory of a registry (registry.py).

usage: estargz.py DIRECTORY NAME:TAG [--volume PATH]... [--first PATH]... [--plain] LAYER...

  DIRECTORY   the registry's; made if it is missing
  LAYER       a folder with a layer's files, the lowest first; devices, pipes and sockets in it are left out
  --volume    a path that the image keeps apart from its root
  --first     a file that comes before the landmark of its layer, to be fetched first
  --plain     layers that are ordinary gzip, without an index

Prints the digest of the image's manifest. The same files make the same image.
"""

import argparse
import hashlib
import json
import os
import pathlib
import stat
import tarfile
import zlib

CHUNK = 4 << 20
INDEX = "stargz.index.json"
LANDMARK, NO_LANDMARK = ".prefetch.landmark", ".no.prefetch.landmark"
# The annotation of a layer with the digest of its index.
INDEX_DIGEST = "containerd.io/snapshot/stargz/toc.digest"
OCI = "application/vnd.oci.image"


def digest(data):
    return "sha256:" + hashlib.sha256(data).hexdigest()


class Layer:
    """A tar archive in gzip members, one for each chunk of a file, and the index of the files."""

    def __init__(self):
        self.out, self.member, self.whole, self.entries = bytearray(), None, hashlib.sha256(), []

    def begin(self):
        """Begins a gzip member, and returns its offset."""
        if self.member:
            self.out += self.member.flush()
        self.member = zlib.compressobj(1, zlib.DEFLATED, 31)
        return len(self.out)

    def write(self, data):
        if not self.member:
            self.begin()
        self.whole.update(data)
        self.out += self.member.compress(data)

    def header(self, info):
        self.write(info.tobuf(tarfile.GNU_FORMAT))

    def content(self, info, data, entry):
        """Writes a file's content, in chunks, and its entries."""
        self.header(info)
        entry |= {"type": "reg", "size": len(data)}
        if not data:
            self.entries.append(entry | {"digest": digest(b"")})
            return
        for at in range(0, len(data), CHUNK):
            chunk = data[at:at + CHUNK]
            this = {"name": entry["name"], "type": "chunk"} if at else entry | {"digest": digest(data)}
            this |= {"offset": self.begin(), "chunkDigest": digest(chunk)}
            if len(data) > CHUNK:
                this |= {"chunkOffset": at, "chunkSize": len(chunk)}
            self.entries.append(this)
            self.write(chunk)
        self.write(bytes(-len(data) % 512))

    def put(self, info, data=b""):
        """Adds what a header of tar describes: a file with `data`, a link or a directory, without times."""
        entry = {"name": info.name, "mode": info.mode, "modtime": "1970-01-01T00:00:00Z",
                 "uid": info.uid, "gid": info.gid}
        if info.issym() or info.islnk():
            kind = "symlink" if info.issym() else "hardlink"
            self.entries.append(entry | {"type": kind, "linkName": info.linkname})
            self.header(info)
        elif info.isdir():
            self.entries.append(entry | {"type": "dir", "name": info.name.rstrip("/") + "/"})
            self.header(info)
        else:
            self.content(info, data, entry)

    def add(self, name, path):
        """Adds a file, link or directory of this machine, with root as its owner."""
        found = path.lstat()
        info = tarfile.TarInfo(name)
        info.mode = stat.S_IMODE(found.st_mode)
        if path.is_symlink():
            info.type, info.linkname = tarfile.SYMTYPE, os.readlink(path)
            self.put(info)
        elif path.is_dir():
            info.type = tarfile.DIRTYPE
            self.put(info)
        elif path.is_file():
            info.size = found.st_size
            self.put(info, path.read_bytes())

    def landmark(self, name):
        info = tarfile.TarInfo(name)
        info.mode, info.size = 0o644, 1
        self.put(info, b"\x0f")

    def finish(self):
        """Ends the layer, and returns the digest of its index."""
        index = json.dumps({"version": 1, "entries": self.entries}).encode()
        at = self.begin()
        info = tarfile.TarInfo(INDEX)
        info.mode, info.size = 0o644, len(index)
        self.header(info)
        self.write(index + bytes(-len(index) % 512) + bytes(1024))
        self.out += self.member.flush()
        field = b"SG" + (22).to_bytes(2, "little") + b"%016xSTARGZ" % at
        head = bytes([0x1f, 0x8b, 8, 4, 0, 0, 0, 0, 0, 0xff]) + len(field).to_bytes(2, "little")
        self.out += head + field + bytes([1, 0, 0, 0xff, 0xff]) + bytes(8)
        return digest(index)

    def packed(self):
        """Ends the layer, and returns its blob, the digest of its uncompressed form, and that of its index."""
        index = self.finish()
        return bytes(self.out), "sha256:" + self.whole.hexdigest(), index


def files(folder):
    """The names below a folder, parents first."""
    for top, dirs, names in os.walk(folder):
        dirs.sort()
        for name in sorted(dirs + names):
            yield str((pathlib.Path(top) / name).relative_to(folder))


def parents(name):
    return [str(parent) for parent in reversed(pathlib.PurePosixPath(name).parents[:-1])]


def layer(folder, first):
    """Returns a layer's blob, the digest of its uncompressed form, and that of its index."""
    folder, made, done = pathlib.Path(folder), Layer(), set()
    first = [name for name in first if (folder / name).exists()]
    early = [name for one in first for name in parents(one) + [one]]
    for name in early:
        if name not in done:
            made.add(name, folder / name)
            done.add(name)
    made.landmark(LANDMARK if first else NO_LANDMARK)
    for name in files(folder):
        if name not in done:
            made.add(name, folder / name)
    return made.packed()


def plain(blob):
    """The same files as one gzip member, without an index that can be found."""
    data, rest = b"", blob
    while rest:
        member = zlib.decompressobj(31)
        data += member.decompress(rest)
        rest = member.unused_data
    member = zlib.compressobj(1, zlib.DEFLATED, 31)
    return member.compress(data) + member.flush()


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("name")
    parser.add_argument("layers", nargs="+")
    parser.add_argument("--volume", action="append", default=[])
    parser.add_argument("--first", action="append", default=[])
    parser.add_argument("--plain", action="store_true")
    args = parser.parse_args()
    name, tag = args.name.rsplit(":", 1)
    blobs = args.directory / "blobs"
    manifests = args.directory / "manifests" / name
    for folder in (blobs, manifests):
        folder.mkdir(parents=True, exist_ok=True)

    def put(data, kind, **more):
        (blobs / digest(data)).write_bytes(data)
        return {"mediaType": kind, "digest": digest(data), "size": len(data)} | more

    layers, diffs = [], []
    for folder in args.layers:
        blob, diff, index = layer(folder, args.first)
        annotations = {INDEX_DIGEST: index}
        if args.plain:
            blob, annotations = plain(blob), {}
        layers.append(put(blob, f"{OCI}.layer.v1.tar+gzip", annotations=annotations))
        diffs.append(diff)
    config = {
        "architecture": "amd64", "os": "linux", "created": "2024-01-01T00:00:00Z",
        "config": {"Env": ["PATH=/bin"], "Cmd": ["/bin/sh"], "Volumes": {path: {} for path in args.volume}},
        "rootfs": {"type": "layers", "diff_ids": diffs},
    }
    manifest = json.dumps({
        "schemaVersion": 2, "mediaType": f"{OCI}.manifest.v1+json",
        "config": put(json.dumps(config).encode(), f"{OCI}.config.v1+json"), "layers": layers,
    }).encode()
    for reference in (tag, digest(manifest)):
        (manifests / reference).write_bytes(manifest)
    print(digest(manifest))


if __name__ == "__main__":
    main()
