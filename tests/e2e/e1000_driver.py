"""Traffic whose content is compared, for the tests of e1000 interfaces: the host or a guest serves, a guest asks.

serve ADDRESS…                streams at port 7000, and at each address datagrams that come back at 7001
put|get ADDRESS BYTES         a stream to the server, or from it
reflect INTERFACE VLAN        sends datagrams of a VLAN back, on a host whose kernel has no VLANs
echo ADDRESS COUNT BYTES      datagrams there and back, one after the other
swapped INTERFACE MAC COUNT   frames to MAC, which come back with their MAC addresses swapped
arrived REPORT                whether anything arrived by the report that iperf3 --json has printed
measured REPORT ENDS…         whether everything arrived in a report of `bench packet --guests` on csb, virtio and qemu-sc, with
                              loads between these ends, as gh
work BEFORE AFTER NAME=MOST…  what an e1000 did between two `slipway port inspect`, and what it may at most
"""

import hashlib
import json
import os
import socket
import struct
import sys
import threading

STREAMS, DATAGRAMS = 7000, 7001
# How many times longer than on a machine that does nothing else, as in lib.sh, whose variable a guest does not have.
SLOWER = int(os.environ.get("SLIPWAY_E2E_SLOWER", "5"))


def read_all(peer, size):
    """Returns exactly `size` bytes."""
    parts = []
    while size:
        part = peer.recv(min(size, 1 << 16))
        assert part, "the stream ends early"
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def answer(peer):
    """Serves one stream: its head is the way and the size."""
    with peer:
        way, size = read_all(peer, 16).decode().split()
        if way == "put":
            peer.sendall(hashlib.sha256(read_all(peer, int(size))).digest())
        else:
            data = os.urandom(int(size))
            peer.sendall(data + hashlib.sha256(data).digest())


def reflect(sock):
    while True:
        data, peer = sock.recvfrom(1 << 16)
        sock.sendto(data, peer)


def datagram_socket(address):
    return socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)


def serve(*addresses):
    listener = socket.create_server(("::", STREAMS), family=socket.AF_INET6, dualstack_ipv6=True)
    for address in addresses:
        # A datagram is answered from the address that it was sent to.
        datagrams = datagram_socket(address)
        datagrams.bind((address, DATAGRAMS))
        threading.Thread(target=reflect, args=[datagrams], daemon=True).start()
    print("serves", flush=True)
    while True:
        threading.Thread(target=answer, args=[listener.accept()[0]], daemon=True).start()


def is_right(packet):
    """Returns whether a UDP datagram over IPv4 has the right checksum."""
    head = 4 * (packet[0] & 15)
    datagram = packet[head : int.from_bytes(packet[2:4], "big")]
    covered = packet[12:20] + bytes([0, 17]) + len(datagram).to_bytes(2, "big") + datagram
    covered += bytes(len(covered) % 2)
    total = sum(int.from_bytes(covered[at : at + 2], "big") for at in range(0, len(covered), 2))
    return total % 0xFFFF == 0


def reflect_tagged(interface, vlan):
    # ETH_P_ALL; the kernel moves a tag from the frame to PACKET_AUXDATA.
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    sock.bind((interface, 0))
    sock.setsockopt(263, 8, 1)
    print("reflects", flush=True)
    while True:
        frame, ancillary, _, _ = sock.recvmsg(1 << 16, 256)
        status, *_, tci, _ = struct.unpack("IIIHHHH", ancillary[0][2])
        packet = frame[14:]
        if not status & 16 or tci & 0xFFF != vlan or frame[12:14] != b"\x08\0" or packet[9] != 17:
            continue
        assert status & 8 or is_right(packet), "a datagram's checksum is wrong"
        head = 4 * (packet[0] & 15)
        ports = packet[head + 2 : head + 4] + packet[head : head + 2]
        # Addresses change places, which no checksum notices; the datagram's may not be there yet.
        back = packet[:12] + packet[16:20] + packet[12:16] + packet[20:head] + ports
        back += packet[head + 4 : head + 6] + b"\0\0" + packet[head + 8 :]
        tag = b"\x81\0" + tci.to_bytes(2, "big")
        sock.send(frame[6:12] + frame[:6] + tag + frame[12:14] + back)


def stream(way, address, size):
    with socket.create_connection((address, STREAMS), 60 * SLOWER) as peer:
        peer.sendall(f"{way} {size}".ljust(16).encode())
        if way == "put":
            data = os.urandom(size)
            peer.sendall(data)
        else:
            data = read_all(peer, size)
        assert read_all(peer, 32) == hashlib.sha256(data).digest(), "the content differs"
    print("whole")


def echo(address, count, size):
    """Datagrams may be lost, and are sent again; none may come back changed."""
    sock = datagram_socket(address)
    sock.connect((address, DATAGRAMS))
    sock.settimeout(1)
    for number in range(count):
        data = number.to_bytes(4, "big") + os.urandom(size - 4)
        for _ in range(60 * SLOWER):
            sock.send(data)
            try:
                while (back := sock.recv(1 << 16))[:4] != data[:4]:
                    pass
                break
            except TimeoutError:
                continue
        else:
            sys.exit(f"datagram {number} never comes back")
        assert back == data, f"datagram {number} differs"
    print("whole")


def swapped(interface, mac, count):
    """Sends frames of 60 to 1514 bytes, at most 32 at a time, of which none may get lost."""
    kind = 0x88B5  # for local experiments: no kernel answers
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(kind))
    sock.bind((interface, kind))
    sock.settimeout(120 * SLOWER)
    there, here = bytes.fromhex(mac.replace(":", "")), sock.getsockname()[4]
    waiting = {}
    for number in range(count + 32):
        if number < count:
            key = number.to_bytes(4, "big")
            content = kind.to_bytes(2, "big") + key + os.urandom(60 + number % 1455 - 18)
            sock.send(there + here + content)
            waiting[key] = here + there + content
        if number >= 31 and waiting:
            back = sock.recv(1 << 16)
            assert waiting.pop(back[14:18], None) == back, f"a frame of {len(back)} bytes differs"
    assert not waiting
    print("whole")


def arrived(path):
    end = json.load(open(path))["end"]
    if "sum" in end:  # of UDP only
        return end["sum"]["packets"] > end["sum"]["lost_packets"]
    return end["sum_received"]["bytes"] > 0


def measured(path, ends):
    runs = json.load(open(path))["runs"]
    seen = {(run["subject"], run["load"].split("-")[1]) for run in runs}
    # QEMU's own interface is at no switch, from which the load sg comes.
    assert seen == {(kind, end) for kind in ("csb", "virtio", "qemu-sc") for end in ends} - {("qemu-sc", "sg")}, seen
    for run in runs:
        both = run["measured"]
        assert both["received"]["all"] > 0 and both["sent"]["count"] > 0 and both["cpu_ns"] > 0, run
        assert ("work" in both) == (run["subject"] == "csb"), run


def counts(path):
    work = json.load(open(path))[0]["e1000"]
    registers = work["exits_by_register"]
    return {
        "sent": work["frames_sent"],
        "received": work["frames_received"],
        "exits": work["exits"],
        # With the block, a device that sleeps is woken by CSBK.
        "tdt": sum(registers.get(name, {"writes": 0})["writes"] for name in ("TDT", "CSBK")),
        "rdt": registers["RDT"]["writes"],
        "kicks": work["kicks"],
        "interrupts": work["interrupts"],
    }


def work(before, after, bars):
    old, new = counts(before), counts(after)
    did = {name: new[name] - old[name] for name in new}
    frames = did["sent"] + did["received"]
    each = {
        "tdt_per_sent": did["tdt"] / max(1, did["sent"]),
        "needless_tdt_per_sent": (did["tdt"] - did["kicks"]) / max(1, did["sent"]),
        "interrupts_per_received": did["interrupts"] / max(1, did["received"]),
        "interrupts_per_sent": did["interrupts"] / max(1, did["sent"]),
        "exits_per_frame": did["exits"] / max(1, frames),
    }
    words = [f"{name} {value}" for name, value in did.items()]
    print(", ".join(words + [f"{name} {value:.4f}" for name, value in each.items()]))
    beyond = False
    for name, most in bars:
        if each[name] > float(most):
            print(f"{name} is above {most}")
            beyond = True
    return beyond


def main(role, *words):
    if role == "serve":
        serve(*words)
    elif role == "reflect":
        reflect_tagged(words[0], int(words[1]))
    elif role == "echo":
        echo(words[0], int(words[1]), int(words[2]))
    elif role == "swapped":
        swapped(words[0], words[1], int(words[2]))
    elif role == "arrived":
        sys.exit(not arrived(words[0]))
    elif role == "measured":
        measured(words[0], words[1:])
    elif role == "work":
        sys.exit(work(words[0], words[1], [bar.split("=") for bar in words[2:]]))
    else:
        stream(role, words[0], int(words[1]))


main(*sys.argv[1:])
