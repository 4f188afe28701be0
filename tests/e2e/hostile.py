# Attackers, and the victims beside them; for tests/e2e/61-hostile-neighbours.sh.
#
#   hostile.py ROLE STOP ARGUMENT...      plays ROLE until the file STOP exists
#
# Victims print one line when they end: how many answers they had, and how long they waited for them.
#   endpoint SOCKET PID      reads a register of a vfio-user function, which process PID serves
#   stream ADDRESS PORT PID  verifies what an echo server, process PID, returns over a TCP socket
#   echo PORT                the echo server
# Attackers:
#   descriptors SOCKET       sends sockets whose closing takes an hour, to a vfio-user endpoint
#   parcels SOCKET           the same to a socket that takes messages (engine, memory port)
#   eventfds SOCKET          full and blocking eventfds as interrupts, each triggered at once
#   punch SOCKET MIB         an NVMe driver that punches holes into the memory that its controller uses
#   unmap SOCKET MIB         maps and touches memory, and goes
#   contexts                 takes all asynchronous I/O contexts of the node
#   attach SOCKET            attaches to a socket engine as often as it can
#   locks FILE...            takes locks on what it can open
#   vmm PID                  speaks for a VMM on the VMM's own connections, which it stops
import array, ctypes, fcntl, glob, mmap, os, random, select, signal, socket, struct, sys, threading, time

role, stop, words = sys.argv[1], sys.argv[2], sys.argv[3:]
libc = ctypes.CDLL(None, use_errno=True)
random.seed(61)
PAGE = 4096
HOUR = 3600


def stopped():
    return os.path.exists(stop)


# --- pauses --------------------------------------------------------------------------------------

class Processors:
    """How long threads were ready to run and had no processor. That is the machine's doing, and the scheduler's: it
    is no wait that an attacker's request causes."""
    # Threads of the daemon that have no part in an answer.
    BESIDE = ("disposal", "files-", "networks", "guests", "iou-", "tokio", "slipway")

    def __init__(self, *pids):
        self.pids, self.threads, self.listed = pids, [], 0.0

    def list(self):
        self.listed = time.monotonic()
        self.threads = []
        for pid in self.pids:
            for path in glob.glob("/proc/%d/task/*" % pid):
                try:
                    with open(path + "/comm") as name:
                        if not name.read().startswith(self.BESIDE):
                            self.threads.append(path + "/schedstat")
                except OSError:
                    pass                                                 # the thread has ended

    def waits(self, anew):
        """Seconds in all, by thread."""
        if anew or time.monotonic() > self.listed + 1:
            self.list()
        waits = {}
        for path in self.threads:
            try:
                with open(path) as file:
                    waits[path] = int(file.read().split()[1]) / 1e9
            except OSError:
                pass
        return waits


def victim(name, server, ask):
    """Asks until it is told to stop. SERVER: the process that answers."""
    processors, whole, own = Processors(os.getpid(), int(server)), [], []
    while not stopped():
        before = processors.waits(False)
        begin = time.monotonic()
        ask()
        wait = time.monotonic() - begin
        whole.append(wait)
        if wait > 0.01:
            after = processors.waits(True)
            wait -= sum(total - before.get(thread, total) for thread, total in after.items())
        own.append(max(wait, 0))
        time.sleep(0.002)
    whole.sort()
    own.sort()
    at = lambda sorted_waits, percent: sorted_waits[len(sorted_waits) * percent // 100] * 1e3
    print("%s: %d answers, p50 %.2f ms, p99 %.2f ms, longest %.1f ms; without waits for a processor p99 %.2f ms, longest %.1f ms" % (
        name, len(whole), at(whole, 50), at(whole, 99), whole[-1] * 1e3, at(own, 99), own[-1] * 1e3), flush=True)
    print("verdict %.1f %.1f %d" % (at(own, 99), own[-1] * 1e3, len(whole)), flush=True)


# --- vfio-user -----------------------------------------------------------------------------------

class Client:
    def __init__(self, path, patience=60):
        end = time.monotonic() + patience
        while True:
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.settimeout(patience)
            self.number = 0
            try:
                self.socket.connect(path)
                self.call(1, struct.pack("<HH", 0, 1) + b'{"capabilities":{"max_msg_fds":16}}\0')
                return
            except OSError:
                # The last client is being cleared away.
                self.socket.close()
                if time.monotonic() > end or stopped():
                    raise
                time.sleep(0.005)

    def send(self, command, payload, files=()):
        self.number = (self.number + 1) & 0xffff
        head = struct.pack("<HHIII", self.number, command, 16 + len(payload), 0, 0)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
        self.socket.sendmsg([head + payload], rights)

    def exactly(self, count):
        data = b""
        while len(data) < count:
            more = self.socket.recv(count - len(data))
            if not more:
                raise OSError("hung up on")
            data += more
        return data

    def call(self, command, payload, files=()):
        """The reply's payload, or an OSError."""
        self.send(command, payload, files)
        number, _, size, flags, error = struct.unpack("<HHIII", self.exactly(16))
        payload = self.exactly(size - 16)
        assert number == self.number, "a reply to another request"
        if flags & 0x20:
            raise OSError(error, os.strerror(error))
        return payload

    def read(self, offset, count=8):
        return self.call(9, struct.pack("<QII", offset, 0, count))[16:]

    def write(self, offset, value, form="<I"):
        data = struct.pack(form, value)
        self.call(10, struct.pack("<QII", offset, 0, len(data)) + data)

    def map(self, file, address, size):
        self.call(2, struct.pack("<IIQQQ", 32, 3, 0, address, size), [file])

    def close(self):
        self.socket.close()


def endpoint(path, server):
    client = Client(path)
    first = client.read(0)

    def ask():
        assert client.read(0) == first, "the register changed"
    victim("a client of the same reactor", server, ask)


def memory(size):
    file = os.memfd_create("hostile", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(file, size)
    fcntl.fcntl(file, 1033, 2)                                           # F_ADD_SEALS, F_SEAL_SHRINK
    return file


def lingering():
    """A socket whose last close waits an hour, and the other end."""
    listener = socket.create_server(("127.0.0.1", 0))
    one = socket.create_connection(listener.getsockname())
    other, _ = listener.accept()
    listener.close()
    one.setblocking(False)
    try:
        while True:
            one.send(b"\0" * 65536)
    except BlockingIOError:
        pass
    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, HOUR))
    return one, other


def descriptors(path):
    held = []
    while not stopped():
        one, other = lingering()
        held = held[-20:] + [other]
        try:
            client = Client(path, 10)
            for command in (2, 8, 99):
                payload = struct.pack("<IIQQQ", 32, 3, 0, 0, PAGE) if command == 2 else struct.pack("<IIIII", 20, 0x24, 2, 0, 1)
                for count in (1, 16, 200):
                    client.send(command, payload, [one.fileno()] * count)
                    client.socket.settimeout(0.05)
                    try:
                        client.socket.recv(65536)
                    except socket.timeout:
                        pass
            # Unread when it hangs up.
            client.send(2, b"", [one.fileno()] * 10)
            one.close()
            client.close()
        except OSError:
            one.close()


def parcels(path):
    held = []
    while not stopped():
        one, other = lingering()
        held = held[-20:] + [other]
        for kind in (socket.SOCK_SEQPACKET, socket.SOCK_STREAM):
            try:
                with socket.socket(socket.AF_UNIX, kind) as sock:
                    sock.settimeout(1)
                    sock.connect(path)
                    for count in (1, 4, 5, 253):
                        sock.sendmsg([random.randbytes(64)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [one.fileno()] * count))])
            except OSError:
                pass
        one.close()
        time.sleep(0.02)


def eventfds(path):
    while not stopped():
        try:
            client = Client(path, 10)
            event = libc.eventfd(0, 0)                                   # blocking
            os.write(event, struct.pack("Q", 2**64 - 2))                 # and full
            client.call(8, struct.pack("<IIIII", 20, 0x24, 2, 0, 1), [event])
            for _ in range(200):
                client.call(8, struct.pack("<IIIII", 20, 0x21, 2, 0, 1)) # trigger
                fcntl.fcntl(event, fcntl.F_SETFL, 0)
            os.close(event)
            client.close()
        except OSError:
            pass


class Driver:
    """As much of an NVMe driver as an admin queue takes, in one mapped file."""
    QUEUE = 32

    def __init__(self, path, size):
        self.client, self.file, self.size = Client(path, 20), memory(size), size
        self.client.map(self.file, 0, size)
        self.head = mmap.mmap(self.file, 64 * PAGE)
        self.client.write(0x14, 0)                                       # CC
        self.client.write(0x24, (self.QUEUE - 1) << 16 | (self.QUEUE - 1))
        self.client.write(0x28, 0, "<Q")                                 # submission queue at 0
        self.client.write(0x30, PAGE, "<Q")                              # completion queue
        self.client.write(0x14, 6 << 16 | 4 << 20 | 1)
        while not struct.unpack("<I", self.client.read(0x1c, 4))[0] & 1:
            time.sleep(0.001)
        self.tail = 0

    def identify(self, address):
        command = struct.pack("<BBHIQQQQIIIIII", 6, 0, self.tail, 0, 0, 0, address, 0, 1, 0, 0, 0, 0, 0)
        self.head[self.tail * 64:self.tail * 64 + 64] = command
        self.tail = (self.tail + 1) % self.QUEUE
        self.client.write(0x1000, self.tail)
        self.client.write(0x1004, (self.tail - 1) % self.QUEUE)          # and takes the one before


def punch(path, mib):
    size = int(mib) << 20
    while not stopped():
        driver = None
        try:
            driver = Driver(path, size)
            over = threading.Event()

            def punching():
                while not over.is_set():
                    libc.fallocate(driver.file, 0, ctypes.c_long(64 * PAGE), ctypes.c_long(size - 64 * PAGE))
                    libc.fallocate(driver.file, 3, ctypes.c_long(64 * PAGE), ctypes.c_long(size - 64 * PAGE))
            thread = threading.Thread(target=punching)
            thread.start()
            try:
                end = time.monotonic() + 10
                while time.monotonic() < end and not stopped():
                    driver.identify(random.randrange(64, size // PAGE - 1) * PAGE)
                    driver.client.read(0x1c, 4)
            finally:
                over.set()
                thread.join()
        except OSError:
            pass
        if driver:
            os.close(driver.file)
            driver.head.close()
            driver.client.close()


def unmap(path, mib):
    size = int(mib) << 20
    while not stopped():
        try:
            file = memory(size)
            libc.fallocate(file, 0, ctypes.c_long(0), ctypes.c_long(size))
            client = Client(path, 20)
            client.map(file, 0, size)
            # The last descriptor goes with the endpoint's.
            os.close(file)
            client.close()
        except OSError:
            pass
        time.sleep(0.05)


# --- the node ------------------------------------------------------------------------------------

def contexts():
    held = []
    while not stopped():
        context = ctypes.c_ulong(0)
        for size in (8192, 1024, 64, 1):
            context = ctypes.c_ulong(0)
            if libc.syscall(206, size, ctypes.byref(context)) == 0:
                held.append(context)
                break
        else:
            time.sleep(0.01)


def attach(path):
    request = struct.pack("<IIQ", 1, 0, 2).ljust(64, b"\0")
    held = []
    while not stopped():
        try:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sock.settimeout(1)
            sock.connect(path)
            held.append(sock)
            if random.random() < 0.9:                                    # some say nothing
                sock.send(request)
                sock.recvmsg(256, 1024)
        except OSError:
            time.sleep(0.001)
            if len(held) > 900:
                held.clear()


def locks(*files):
    held = []
    while not stopped():
        for file in files:
            try:
                held.append(open(file, "rb"))
                fcntl.flock(held[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                pass
        time.sleep(0.2)
        held = held[-100:]


def vmm(pid):
    """Speaks on the connections of a VMM that it stops, as one that was taken over could."""
    pid = int(pid)
    handle = os.pidfd_open(pid)
    found = []
    for name in os.listdir("/proc/%d/fd" % pid):
        try:
            if os.readlink("/proc/%d/fd/%s" % (pid, name)).startswith("socket:"):
                file = libc.syscall(438, handle, int(name), 0)           # pidfd_getfd
                sock = socket.socket(fileno=file)
                sock.getpeername()
                sock.setblocking(False)
                found.append(sock)
        except OSError:
            pass
    print("speaks on %d connections" % len(found), flush=True)
    os.kill(pid, signal.SIGSTOP)
    one, other = lingering()
    frames = [
        b"\0\0\0\x04\x01\0\0\0\0", b"\0\0\x08\x06\0\0\0\0\0" + b"ping0000",  # HTTP/2: SETTINGS, PING
        b"\0\0\0\0\0\0\0\0\1", b"\0\0\x04\x03\0\0\0\0\1\0\0\0\0",            # DATA without data, RST_STREAM
        b'{"return": {}}\r\n', b'{"event": "STOP"}\r\n',
    ]
    while found and not stopped():
        for sock in list(found):
            try:
                sock.recv(65536)
            except BlockingIOError:
                pass
            except OSError:
                found.remove(sock)
                continue
            try:
                noise = random.choice(frames) * random.randrange(1, 200) if random.random() < 0.95 else random.randbytes(4096)
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [one.fileno()] * 3))] if random.random() < 0.3 else []
                sock.sendmsg([noise], rights)
            except BlockingIOError:
                pass
            except PermissionError:
                pass                                                     # descriptors are refused there
            except OSError:
                found.remove(sock)
        time.sleep(0.002)
    while not stopped():
        time.sleep(0.1)


# --- a pair of programs --------------------------------------------------------------------------

def echo(port):
    listener = socket.create_server(("127.0.0.1", int(port)))
    print("serves", flush=True)

    def serve(sock):
        while True:
            data = sock.recv(65536)
            if not data:
                return
            sock.sendall(data)
    while True:
        threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()


def stream(address, port, server):
    sock = socket.create_connection((address, int(port)))
    sock.settimeout(60)

    def ask():
        sent, got = random.randbytes(random.choice([1, 64, 20000])), b""
        sock.sendall(sent)
        while len(got) < len(sent):
            more = sock.recv(65536)
            assert more, "the stream ended"
            got += more
        assert got == sent, "wrong bytes in the stream"
    victim("a pair of programs", server, ask)


roles = dict(endpoint=endpoint, stream=stream, echo=echo, descriptors=descriptors, parcels=parcels, eventfds=eventfds,
             punch=punch, unmap=unmap, contexts=contexts, attach=attach, locks=locks, vmm=vmm)
roles[role](*words)
os._exit(0)
