"""Checks every byte of a disk and of a TCP stream, and prints the longest pause of each.

usage: verify.py serve                   says back what it is told
       verify.py check ADDRESS SECONDS   status 0 if all that was written and said came back
"""
import mmap, os, socket, sys, threading, time

PORT, CHUNK, PACE = 7000, 4096, 0.02
BLOCK, BLOCKS, DISK = 65536, 200, "/dev/slipway/data"


def pattern(number, size):
    return number.to_bytes(8, "little") * (size // 8)


def receive(stream):
    """The next chunk of a stream, or nothing if the stream has ended."""
    data = bytearray()
    while len(data) < CHUNK:
        some = stream.recv(CHUNK - len(data))
        if not some:
            assert not data, "the stream ends within a chunk"
            break
        data += some
    return bytes(data)


def serve():
    listener = socket.create_server(("0.0.0.0", PORT))
    print("serves", flush=True)
    while True:
        stream, _ = listener.accept()
        said_back(stream)
        stream.close()


def said_back(stream):
    number = 0
    while chunk := receive(stream):
        assert chunk == pattern(number, CHUNK), f"chunk {number} is another one"
        stream.sendall(chunk)
        number += 1


class Pauses:
    """The times between two steps that ended, in milliseconds."""

    def __init__(self):
        self.steps, self.all, self.last = 0, [], time.monotonic()

    def step(self):
        now = time.monotonic()
        self.all.append(round((now - self.last) * 1000))
        self.steps, self.last = self.steps + 1, now


def check_disk(pauses, end):
    disk = os.open(DISK, os.O_RDWR | os.O_DIRECT)
    buffer = mmap.mmap(-1, BLOCK)
    written = {}
    while time.monotonic() < end:
        number = pauses.steps
        at = number % BLOCKS
        buffer[:] = pattern(number, BLOCK)
        assert os.pwritev(disk, [buffer], at * BLOCK) == BLOCK
        written[at] = number
        # The block just written, and one of long ago.
        for at in at, (number * 7) % BLOCKS:
            if at in written:
                assert os.preadv(disk, [buffer], at * BLOCK) == BLOCK
                assert buffer[:] == pattern(written[at], BLOCK), f"block {at} is another one"
        pauses.step()
        time.sleep(PACE)


def send(stream, sent, end):
    while time.monotonic() < end:
        stream.sendall(pattern(sent.steps, CHUNK))
        sent.step()
        time.sleep(PACE)
    stream.shutdown(socket.SHUT_WR)


def check_stream(stream, pauses):
    while chunk := receive(stream):
        assert chunk == pattern(pauses.steps, CHUNK), f"chunk {pauses.steps} is another one"
        pauses.step()


def or_die(work, *args):
    try:
        work(*args)
    except BaseException as error:
        print(f"{work.__name__}: {error!r}", flush=True)
        os._exit(1)


def check(address, seconds):
    stream = socket.create_connection((address, PORT), 60)
    stream.settimeout(None)
    print("verifies", flush=True)
    end = time.monotonic() + seconds
    disk, sent, back = Pauses(), Pauses(), Pauses()
    works = [(check_disk, disk, end), (send, stream, sent, end), (check_stream, stream, back)]
    threads = [threading.Thread(target=or_die, args=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sent.steps == back.steps, f"{sent.steps} chunks sent, {back.steps} came back"
    for name, pauses in ("disk", disk), ("stream", back):
        longest = sorted(pauses.all, reverse=True)
        print(f"lab: {name}_steps={pauses.steps}")
        print(f"lab: {name}_pauses_ms={' '.join(map(str, longest[:200]))}")
        print(f"lab: {name}_pause_ms={longest[0]}")


if sys.argv[1] == "serve":
    serve()
else:
    check(sys.argv[2], float(sys.argv[3]))
