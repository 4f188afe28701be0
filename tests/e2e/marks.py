"""Searches what belongs to sandboxes on the host for marks of other sandboxes (see fork.py).

    marks.py look STATE NAME=PEER...    each sandbox NAME, which talks with PEER, says what it is in STATE/NAME.ready
    marks.py frames STATE NAME=PEER...  the frames that each has seen, by STATE/NAME.done

`look` compares what the sandboxes are with each other and with all that STATE knows from earlier calls, and searches the
memory of each VMM and each volume of its own. Prints a line for each thing that is not as it has to be.
"""

import json
import os
import re
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from fork import FILLED, PREFIX, mark  # noqa: E402

KINDS = ("memory", "disk", "frame")
# What no two sandboxes have in common, ever.
OWN = ("urandom", "getrandom", "start", "uuid", "key", "hostname", "serial", "openssl", "machine_id")
# What no two sandboxes that run have in common.
OWN_NOW = ("mac", "addresses")
CHUNK = 1 << 20


def inspected(name):
    said = subprocess.run([os.environ["SLIPWAY"], "inspect", name], capture_output=True, text=True, timeout=120)
    return json.loads(said.stdout)[0]


def memory_of(pid):
    """A descriptor of the memory of a VMM's guest: the largest memfd that the VMM has mapped."""
    best = None
    with open(f"/proc/{pid}/maps") as maps:
        for line in maps:
            words = line.split(None, 5)
            if len(words) < 6 or not words[5].startswith("/memfd:"):
                continue
            start, end = (int(word, 16) for word in words[0].split("-"))
            path = f"/proc/{pid}/map_files/{start:x}-{end:x}"
            size = os.stat(path).st_size
            if best is None or size > best[0]:
                best = (size, path)
    return os.open(best[1], os.O_RDONLY)


def marks_of(fd):
    """The digests of all marks in a file, with how often each is there. Holes have none."""
    found, at, end = {}, 0, os.fstat(fd).st_size
    while True:
        try:
            at = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:
            return found
        hole = min(os.lseek(fd, at, os.SEEK_HOLE), end)
        kept = b""
        while at < hole:
            data = os.pread(fd, min(CHUNK, hole - at), at)
            at += len(data)
            data = kept + data
            place = data.find(PREFIX)
            while 0 <= place <= len(data) - 64:
                digest = data[place + 32:place + 64].hex()
                found[digest] = found.get(digest, 0) + 1
                place = data.find(PREFIX, place + 32)
            kept = data[-63:]


class Known:
    """All sandboxes of a test, the earlier ones too."""

    def __init__(self, state):
        self.path = os.path.join(state, "known.json")
        self.boxes = {}
        if os.path.exists(self.path):
            with open(self.path) as file:
                self.boxes = json.load(file)

    def save(self):
        with open(self.path, "w") as file:
            json.dump(self.boxes, file)

    def owner(self, digest):
        """The kind and the sandbox of a mark. None if it is the prefix alone, as programs have it before they add a digest."""
        for name in self.boxes:
            for kind in KINDS:
                if mark(name, kind)[32:].hex() == digest:
                    return kind, name
        return None


def alike(boxes, names):
    """Properties that two sandboxes share and must not."""
    for field in OWN + OWN_NOW:
        seen = {}
        for name, box in boxes.items():
            if field in OWN_NOW and name not in names:
                continue
            value = json.dumps(box[field])
            if value in seen or value in ('"none"', "[]"):
                yield f"{name} and {seen.get(value, 'nobody')} have {field} {value}"
            seen[value] = name
    for name in names:
        if boxes[name]["hostname"] != name:
            yield f"{name} has the host name {boxes[name]['hostname']}"
        if not re.fullmatch("[0-9a-f]{32}", boxes[name]["machine_id"]):
            yield f"{name} has the machine id {boxes[name]['machine_id']}"


def foreign(known, name, peer, found, where, wanted):
    """Marks in `found` that are neither the sandbox's nor of frames that its peers sent it."""
    talks = {name} | {peer} | {one for one, box in known.boxes.items() if box["peer"] == name}
    for digest, count in found.items():
        kind, owner = known.owner(digest) or ("own", name)
        if owner != name and not (kind == "frame" and owner in talks and where == "memory"):
            yield f"{where} of {name} has {count} times the {kind} mark of {owner}"
    for kind, least in wanted.items():
        count = found.get(mark(name, kind)[32:].hex(), 0)
        if count < least:
            yield f"{where} of {name} has its own {kind} mark {count} times: nothing was searched"


def searched(known, name):
    box, peer = inspected(name), known.boxes[name]["peer"]
    all_of_it = FILLED // 64
    fd = memory_of(box["vm"]["pid"])
    yield from foreign(known, name, peer, marks_of(fd), "memory", {"memory": all_of_it})
    os.close(fd)
    for volume in box["volumes"]:
        if volume["name"] == "own":
            fd = os.open(volume["path"], os.O_RDONLY)
            yield from foreign(known, name, peer, marks_of(fd), "the volume", {"disk": all_of_it})
            os.close(fd)


def said(state, name, what):
    with open(os.path.join(state, f"{name}.{what}")) as file:
        return json.load(file)


def look(state, pairs):
    known = Known(state)
    for name, peer in pairs:
        known.boxes[name] = dict(said(state, name, "ready"), peer=peer)
    known.save()
    names = [name for name, _ in pairs]
    yield from alike(known.boxes, names)
    for name in names:
        yield from searched(known, name)


def frames(state, pairs):
    known = Known(state)
    for name, peer in pairs:
        seen = said(state, name, "done")
        # Its own marks come back in ICMP's "port unreachable", from a peer that serves not yet or asks no more.
        talks = {name, peer} | {one for one, box in known.boxes.items() if box["peer"] == name}
        owners = [known.owner(digest) or ("some", "unknown") for digest in seen["frames"]]
        if ("frame", peer) not in owners:
            yield f"{name} has seen no frame of {peer} among {seen['count']}: nothing was searched"
        for kind, owner in owners:
            if kind != "frame" or owner not in talks:
                yield f"a frame to {name} has the {kind} mark of {owner}"


if __name__ == "__main__":
    what, state = sys.argv[1:3]
    pairs = [re.fullmatch(r"([^=]+)=([^=]+)", word).groups() for word in sys.argv[3:]]
    wrong = list({"look": look, "frames": frames}[what](state, pairs))
    print("\n".join(wrong))
    sys.exit(1 if wrong else 0)
