# Traffic whose every byte is checked, between guests and hosts; for tests/e2e/46-guest-network.sh.
#
#   peer.py serve PORT
#   peer.py verify PORT BYTES ADDRESS...     both ways by TCP and UDP to each address
#   peer.py toggle PORT BYTES ADDRESS...     the same after each change of the interface's offloads
#   peer.py flow PORT FILE ADDRESS...        goes on until FILE is there, then once more
#
# Bytes are those of a fixed random text that repeats with a prime period, so that what is lost, doubled
# or out of its place shows like what is changed. Nothing here depends on how fast it is: what is lost is
# sent again, and patience is for minutes.
import os, random, socket, struct, subprocess, sys, threading, time

PERIOD = 65521
# As in lib.sh, whose variable a guest does not have.
PATIENCE = 90 * int(os.environ.get("SLIPWAY_E2E_SLOWER", "5"))
ASK, ANSWER = (random.Random(seed).randbytes(PERIOD) * 2 for seed in (1, 2))
WORD = struct.Struct("!I")


def part(text, at, length):
    at %= PERIOD
    return text[at:at + length]


def exchange(sock, count, mine, theirs):
    """Sends so many bytes of one text while as many of the other come."""
    def send():
        for at in range(0, count, 32768):
            sock.sendall(part(mine, at, min(32768, count - at)))
    sender = threading.Thread(target=send)
    sender.start()
    at = 0
    while at < count:
        data = sock.recv(min(32768, count - at))
        if not data:
            raise AssertionError("the stream ends after %d bytes of %d" % (at, count))
        if data != part(theirs, at, len(data)):
            raise AssertionError("wrong bytes in the stream after %d bytes" % at)
        at += len(data)
    sender.join()


def exactly(sock, length):
    data = b""
    while len(data) < length:
        more = sock.recv(length - len(data))
        if not more:
            return None
        data += more
    return data


def serve_stream(sock):
    sock.settimeout(PATIENCE)
    while True:
        head = exactly(sock, 4)
        if head is None:
            return
        exchange(sock, WORD.unpack(head)[0], ANSWER, ASK)


def datagram(number, size, text):
    return WORD.pack(number) + part(text, number * 977, size)


def serve(port):
    datagrams = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    datagrams.bind(("::", port))
    def echo():
        while True:
            data, whom = datagrams.recvfrom(65536)
            number, size = WORD.unpack(data[:4])[0], len(data) - 4
            right = data == datagram(number, size, ASK)
            try:
                datagrams.sendto(datagram(number, size, ANSWER) if right else b"wrong bytes", whom)
            except OSError:
                pass  # No way back just now: it is asked again.
    threading.Thread(target=echo, daemon=True).start()
    streams = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    streams.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    streams.bind(("::", port))
    streams.listen(16)
    print("serves", flush=True)
    while True:
        threading.Thread(target=serve_stream, args=(streams.accept()[0],), daemon=True).start()


def connect(address, port):
    end = time.monotonic() + PATIENCE
    while True:
        try:
            return socket.create_connection((address, port), PATIENCE)
        except OSError:
            # Its neighbour's address was not found in time, most likely.
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


class Peer:
    def __init__(self, address, port):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.stream = connect(address, port)
        self.datagrams = socket.socket(family, socket.SOCK_DGRAM)
        self.datagrams.connect((address, port))
        self.datagrams.settimeout(0.5)
        self.number = 0

    def by_stream(self, count):
        self.stream.sendall(WORD.pack(count))
        exchange(self.stream, count, ASK, ANSWER)

    def by_datagrams(self, sizes):
        waiting = {}
        for size in sizes:
            waiting[self.number] = size
            self.number += 1
        end = time.monotonic() + PATIENCE
        while waiting:
            if time.monotonic() > end:
                raise AssertionError("no answer to datagrams of %s bytes" % sorted(waiting.values()))
            try:
                for number, size in waiting.items():
                    self.datagrams.send(datagram(number, size, ASK))
                while waiting:
                    data = self.datagrams.recv(65536)
                    number = WORD.unpack(data[:4])[0]
                    # One that came twice was answered twice.
                    size = waiting.pop(number, len(data) - 4)
                    if data != datagram(number, size, ANSWER):
                        raise AssertionError("wrong bytes in datagram %d of %d bytes" % (number, size))
            except OSError:
                time.sleep(0.05)

    def verify(self, count):
        self.by_stream(count)
        # Odd and even, the longest of an MTU of 1500 and one more, fragments.
        self.by_datagrams([0, 1, 511, 1440, 1468, 1469, 8968, 8969, 20000])


def verify(port, count, addresses):
    for address in addresses:
        Peer(address, port).verify(count)


def run(*words):
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def features():
    lines = (line.split() for line in run("ethtool", "-k", "eth0").splitlines()[1:])
    return {line[0].rstrip(":"): line[1:] for line in lines if line}


def toggle(port, count, addresses):
    peers = [Peer(address, port) for address in addresses]
    names = [
        ("gro", "generic-receive-offload"),
        ("gso", "generic-segmentation-offload"),
        ("tx-tcp-segmentation", "tx-tcp-segmentation"),
        ("tx-tcp6-segmentation", "tx-tcp6-segmentation"),
        ("tx-udp-segmentation", "tx-udp-segmentation"),
        ("rx-gro-hw", "rx-gro-hw"),
        ("sg", "scatter-gather"),
        ("tx", "tx-checksumming"),
        ("rx", "rx-checksumming"),
    ]
    changed = []
    def change(option, name, state):
        run("ethtool", "-K", "eth0", option, state)
        if features()[name][0] != state:
            raise AssertionError("%s is not %s" % (name, state))
        for peer in peers:
            peer.verify(count)
    # One after the other off, and what goes with it; then back, the last first.
    for option, name in names:
        now = features().get(name, ["off"])
        if now == ["on"]:
            change(option, name, "off")
            changed.append((option, name))
    for option, name in reversed(changed):
        change(option, name, "on")
    print(" ".join(option for option, _ in changed))


def flow(port, stop, addresses):
    peers = [Peer(address, port) for address in addresses]
    rounds = [0] * len(peers)
    def go(index):
        peer, last = peers[index], False
        while not last:
            last = os.path.exists(stop)
            peer.by_stream(65536)
            peer.by_datagrams([1, 1200, 1468])
            rounds[index] += 1
    def guarded(index):
        try:
            go(index)
        except BaseException as error:
            print("to %s after %d rounds: %r" % (addresses[index], rounds[index], error), flush=True)
            os._exit(1)
    threads = [threading.Thread(target=guarded, args=(index,)) for index in range(len(peers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print("%d rounds" % sum(rounds))


role, port = sys.argv[1], int(sys.argv[2])
try:
    if role == "serve":
        serve(port)
    elif role == "verify":
        verify(port, int(sys.argv[3]), sys.argv[4:])
    elif role == "toggle":
        toggle(port, int(sys.argv[3]), sys.argv[4:])
    elif role == "flow":
        flow(port, sys.argv[3], sys.argv[4:])
except (AssertionError, OSError, subprocess.CalledProcessError) as error:
    sys.exit("%s: %r %s" % (role, error, getattr(error, "stderr", "") or ""))
