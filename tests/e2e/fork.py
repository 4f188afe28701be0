"""A program in a sandbox that looks for bytes of other sandboxes, and leaves its own wherever it can.

    python3 -c PROGRAM digest                              prints the digest of the root's files and of the volume `before`
    python3 -c PROGRAM fill                                fills the volume `before`
    python3 -c PROGRAM fork NAME PEER DIGEST               a fork: checks, marks, says "ready: JSON", waits for a line of
                                                           input, checks again, says "done: JSON" and waits for another

A mark is PREFIX and a digest of the sandbox's name and of the kind of place: `memory`, `disk` or `frame`. Neither is
written anywhere as it is, so that only what carries a mark has it.
"""

import hashlib
import json
import os
import re
import socket
import ssl
import subprocess
import sys
import threading
import time

PREFIX = hashlib.sha256(b"a mark of a sandbox").digest()
PORT = 7000
PAGE = 4096
# Bytes that a fork fills with its mark, of each kind of place.
FILLED = 1 << 20
# Bytes of the start of the device below the root's writable layer that are searched.
SEARCHED = 1 << 20
ROOT_FILES = ["/usr/lib/x86_64-linux-gnu/libc.so.6", "/etc/passwd", "/usr/sbin/nvme"]


def mark(name, kind):
    return PREFIX + hashlib.sha256(f"{kind} {name}".encode()).digest()


def page(name, kind):
    return mark(name, kind) * (PAGE // 64)


def marks_in(data):
    """The marks in some bytes, as hexadecimal digits of their digests."""
    found, at = set(), data.find(PREFIX)
    while at >= 0:
        found.add(data[at + 32:at + 64].hex())
        at = data.find(PREFIX, at + 32)
    return found


def read(path, size=-1):
    with open(path, "rb") as file:
        return file.read(size)


def first_line(path):
    try:
        return read(path, 4096).decode(errors="replace").strip()
    except OSError as error:
        return f"none ({error.strerror})"


def digest():
    sum = hashlib.sha256()
    for path in ROOT_FILES:
        sum.update(read(path))
    for folder in ("/usr/bin", "/usr/sbin", "/etc"):
        sum.update("\n".join(sorted(os.listdir(folder))).encode())
    sum.update(read("/dev/slipway/before.img"))
    return sum.hexdigest()


def write(path, data):
    with open(path, "r+b" if os.path.exists(path) else "w+b") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        # The next reader asks the disk.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def fill():
    write("/dev/slipway/before.img", bytes(n * 131 % 251 for n in range(PAGE)) * (FILLED // PAGE))


class Frames:
    """All frames that reach the sandbox, and an answer to each datagram: a mark for a mark."""

    def __init__(self, name):
        self.name, self.seen, self.count = name, set(), 0
        sniffer = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        server.bind(("0.0.0.0", PORT))
        for work, one in ((self.sniff, sniffer), (self.serve, server)):
            threading.Thread(target=work, args=(one,), daemon=True).start()

    def sniff(self, sniffer):
        outgoing = 4  # PACKET_OUTGOING: packet(7)
        while True:
            frame, address = sniffer.recvfrom(65536)
            if address[2] != outgoing:
                self.count += 1
                self.seen |= marks_in(frame)

    def serve(self, server):
        while True:
            _, address = server.recvfrom(65536)
            server.sendto(mark(self.name, "frame") * 16, address)

    def ask(self, peer):
        """Sends marks to a sandbox by its name, until it has answered with its own."""
        client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        client.settimeout(1)
        wanted = {mark(peer, "frame")[32:].hex()}
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            try:
                client.sendto(mark(self.name, "frame") * 16, (peer, PORT))
                answer, _ = client.recvfrom(65536)
                assert marks_in(answer) == wanted, f"{peer} answers with marks {marks_in(answer)}"
                return
            except OSError:
                time.sleep(0.2)
        raise AssertionError(f"{peer} does not answer")


def random_of_start():
    """The 16 random bytes that the kernel gave this process (AT_RANDOM of getauxval(3))."""
    words = memoryview(read("/proc/self/auxv")).cast("Q")
    at = next(words[n + 1] for n in range(0, len(words), 2) if words[n] == 25)
    with open("/proc/self/mem", "rb") as file:
        file.seek(at)
        return file.read(16).hex()


def printed(*command):
    return subprocess.run(command, capture_output=True, text=True, timeout=120).stdout.strip() or "none"


def identity():
    """What tells this sandbox from others, and what it may have in common with them."""
    controller = next(iter(sorted(os.listdir("/sys/class/nvme"))), "none")
    stack = re.search(r"^([0-9a-f]+)-.*\[stack\]", read("/proc/self/maps").decode(), re.M)
    return {
        "hostname": socket.gethostname(),
        "mac": first_line("/sys/class/net/eth0/address"),
        "addresses": re.findall(r"inet6? ([0-9a-f.:]+)", printed("ip", "-o", "address", "show", "dev", "eth0")),
        "urandom": read("/dev/urandom", 16).hex(),
        "getrandom": os.getrandom(16).hex(),
        "openssl": ssl.RAND_bytes(16).hex(),
        "start": random_of_start(),
        "uuid": first_line("/proc/sys/kernel/random/uuid"),
        "stack": stack[1],
        "key": printed("nvme", "gen-dhchap-key"),
        "serial": printed("sh", "-c", f"nvme id-ctrl /dev/{controller} | sed -n 's/^sn *: *//p'"),
        "serial_of_driver": first_line(f"/sys/class/nvme/{controller}/serial"),
        "boot_id": first_line("/proc/sys/kernel/random/boot_id"),
        "machine_id": first_line("/etc/machine-id"),
        "time": time.time(),
    }


def check_disks(expected):
    assert digest() == expected, "the root's files or the volume from before differ"
    try:
        write("/dev/slipway/before.img", b"x")
        raise AssertionError("the volume from before can be written to")
    except OSError:
        pass
    assert not os.path.exists("/mark"), "another's file is in the root"
    own = read("/dev/slipway/own")
    assert not own.strip(b"\0"), f"a new volume has bytes, with marks {marks_in(own)}"
    # The whole start of the device below, used by a file or not.
    layer = next(f"/dev/{name}" for name in sorted(os.listdir("/dev")) if re.fullmatch(r"nvme\d+n2", name))
    found = marks_in(read(layer, SEARCHED))
    assert not found, f"the writable layer has marks {found}"


def check_marks(name, held):
    disk, memory = page(name, "disk"), page(name, "memory")
    for path in ("/mark", "/dev/slipway/own"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            for _ in range(FILLED // PAGE):
                assert file.read(PAGE) == disk, f"{path} has other bytes"
    view = memoryview(held)
    for at in range(0, FILLED, PAGE):
        assert view[at:at + PAGE] == memory, "memory has other bytes"


def fork(name, peer, expected):
    frames = Frames(name)
    check_disks(expected)
    for path in ("/mark", "/dev/slipway/own"):
        write(path, page(name, "disk") * (FILLED // PAGE))
    held = bytearray(page(name, "memory") * (FILLED // PAGE))
    frames.ask(peer)
    print("ready:", json.dumps(identity()), flush=True)
    sys.stdin.readline()
    check_marks(name, held)
    frames.ask(peer)
    print("done:", json.dumps({"frames": sorted(frames.seen), "count": frames.count}), flush=True)
    # Its peers may not be done yet.
    sys.stdin.readline()


if __name__ == "__main__":
    what, words = sys.argv[1], sys.argv[2:]
    try:
        if what == "digest":
            print(digest())
        else:
            {"fill": fill, "fork": fork}[what](*words)
    except AssertionError as error:
        sys.exit(f"FAILED: {error}")
