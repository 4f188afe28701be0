#!/usr/bin/env python3
"""pulled.py DIR IMAGES none|some|all: how many images Slipway's snapshotter pulled lazily, and how many came whole.

DIR has the logs of containerd and of the snapshotter, IMAGES is the registry's storage, and the last word says which
of its images can be pulled lazily. Images count by the digests of their manifests, however often and by whatever name
they were pulled. An image whose layers had all come with others counts as whole: no snapshotter hears of it.
Status: 1 if none was pulled lazily that could have been.
"""

import pathlib
import re
import sys

# Lines of containerd's for each image that it has pulled: of any pull, and (1.6) of pulls that a client asked for.
NAMED = re.compile(r'(?:Pulled image|PullImage) \\"(.+?)\\" (?:with image id|returns image reference)')
# Lines of the snapshotter's: a layer that is not fetched, and the reasons for those that are.
IMAGE = re.compile(r'image="?[^ "]*@(sha256:[0-9a-f]{64})')
HERE = "a layer is not fetched"
NOT_LAZY = ("not an image that can be pulled lazily", "an image is not pulled lazily",
            "a lazily pulled image is unpacked all the same")
# The most warnings that are shown.
MOST = 5


def lines(log):
    return log.read_text(errors="replace").splitlines() if log.exists() else []


def digest(images, name):
    """The digest of an image's manifest: that of its name, or the one that its tag has in the registry."""
    path, _, pinned = name.partition("/")[2].partition("@")
    if pinned:
        return pinned
    repository, _, tag = path.partition(":")
    link = images / "docker/registry/v2/repositories" / repository / "_manifests/tags" / (tag or "latest") / "current/link"
    return link.read_text().strip() if link.exists() else name


def main():
    folder, images = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    pulled = {digest(images, found[1]) for found in map(NAMED.search, lines(folder / "containerd.log")) if found}
    here, not_lazy, warnings = set(), set(), []
    for line in lines(folder / "snapshotter.log"):
        if " WARN " in line:
            warnings.append(line)
        if found := IMAGE.search(line):
            if HERE in line:
                here.add(found[1])
            elif any(text in line for text in NOT_LAZY):
                not_lazy.add(found[1])
    for line in warnings[:MOST]:
        print(f"cri: the snapshotter warns: {line}")
    lazy, by_slipway = here - not_lazy, here & not_lazy
    whole = (pulled | here | not_lazy) - lazy
    print(f"{len(lazy)} images were pulled lazily, {len(whole)} whole, {len(by_slipway)} of these by Slipway")
    return 1 if not lazy and sys.argv[3] != "none" else 0


if __name__ == "__main__":
    sys.exit(main())
