#!/usr/bin/env python3
"""foreign.py OUT: makes the archive of the image localhost/foreign:1, whose program is for aarch64.

The image says that it is for this machine, as images that were built wrongly do. The program is the header of an ELF
file (elf(5)) and nothing else.
"""

import io
import pathlib
import struct
import sys
import tarfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "critest"))
from images import CONFIG, LAYER, MANIFEST, PLATFORM, Layer, as_json, digest  # noqa: E402

NAME = "localhost/foreign:1"
ET_EXEC, EM_AARCH64 = 2, 0xB7
HEADER = b"\x7fELF" + bytes([2, 1, 1]) + bytes(9) + struct.pack(
    "<HHIQQQIHHHHHH", ET_EXEC, EM_AARCH64, 1, 0x400000, 64, 0, 0, 64, 56, 0, 64, 0, 0)


def main():
    blobs = {}

    def blob(data, kind):
        blobs[digest(data)] = data
        return {"mediaType": kind, "digest": digest(data), "size": len(data)}

    # The sandbox's own mounts need these places.
    layer = Layer().add("program", HEADER)
    for directory in ("dev", "etc", "proc", "sys"):
        layer.add(directory)
    packed, plain, _ = layer.packed(False)
    config = {**PLATFORM, "config": {"Entrypoint": ["/program"]}, "rootfs": {"type": "layers", "diff_ids": [plain]}}
    manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "config": blob(as_json(config), CONFIG),
                "layers": [blob(packed, LAYER)]}
    described = blob(as_json(manifest), MANIFEST) | {"annotations": {"io.containerd.image.name": NAME}}
    files = {"oci-layout": as_json({"imageLayoutVersion": "1.0.0"}),
             "index.json": as_json({"schemaVersion": 2, "manifests": [described]})}
    files |= {f"blobs/{name.replace(':', '/')}": data for name, data in blobs.items()}
    with tarfile.open(sys.argv[1], "w") as archive:
        for path, data in files.items():
            info = tarfile.TarInfo(path)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


main()
