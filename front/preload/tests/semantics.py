#!/usr/bin/env python3
"""What sockets do, one line each: run with the kernel's sockets and with Slipway's, and compare.

Prints what was seen, never how long it took. Ends with `ours: N` on standard error, N the number of
connections that were eventfds and not sockets.
"""

import array
import errno
import fcntl
import os
import select
import signal
import socket
import struct
import sys
import termios
import threading
import time

OURS = 0


def count(sock):
    global OURS
    OURS += "eventfd" in os.readlink(f"/proc/self/fd/{sock.fileno()}")


def listener(family=socket.AF_INET, backlog=16):
    sock = socket.socket(family)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("::1" if family == socket.AF_INET6 else "127.0.0.1", 0))
    sock.listen(backlog)
    return sock


def pair(family=socket.AF_INET):
    server = listener(family)
    client = socket.socket(family)
    client.connect(server.getsockname())
    accepted, _ = server.accept()
    server.close()
    count(client)
    count(accepted)
    return client, accepted


def attempt(call, *arguments):
    try:
        return call(*arguments)
    except OSError as error:
        return errno.errorcode.get(error.errno, str(error))


def settle(sock, wanted, flag):
    """Poll bits of a socket, when `wanted` are there: what the other side did takes its time in TCP."""
    poller = select.poll()
    poller.register(sock, flag)
    end = time.monotonic() + 100
    while time.monotonic() < end:
        bits = dict(poller.poll(50)).get(sock.fileno(), 0)
        if bits & wanted == wanted:
            break
        time.sleep(0.01)
    names = ["IN", "OUT", "ERR", "HUP", "RDHUP"]
    return [name for name in names if bits & getattr(select, "POLL" + name)]


def promptly(limit, wait):
    """The result of a wait, and whether one of three took less than `limit` seconds: a busy machine may delay each of them, and
    a wake-up that is missing delays all."""
    for _ in range(3):
        began = time.monotonic()
        result = wait()
        if time.monotonic() - began < limit:
            return result, True
    return result, False


def fill(sock):
    """Sends until nothing more fits. Returns the last result, and how many bytes were sent."""
    sent = 0
    while True:
        got = attempt(sock.send, b"z" * 65536)
        if isinstance(got, int):
            sent += got
        # The kernel may still have been moving bytes to the other side.
        elif not settle(sock, 0, select.POLLOUT):
            return got, sent


ALL = select.POLLIN | select.POLLOUT | select.POLLRDHUP


def plain():
    a, b = pair()
    print(a.send(b"hello"), b.recv(100))
    print(b.send(b"world"), a.recv(3), a.recv(100))
    a.sendmsg([b"one", b"two"])
    buffers = [bytearray(2), bytearray(10)]
    time.sleep(0.05)
    print(b.recvmsg_into(buffers)[0], buffers)
    os.write(a.fileno(), b"written")
    print(os.read(b.fileno(), 100))
    a.sendall(b"peeked")
    print(b.recv(3, socket.MSG_PEEK), b.recv(100))
    a.sendall(b"counted")
    settle(b, select.POLLIN, select.POLLIN)
    poller, events = select.poll(), select.epoll()
    poller.register(b, select.POLLRDNORM | select.POLLWRNORM)
    events.register(b, select.EPOLLRDNORM | select.EPOLLET)
    print([bits for _, bits in poller.poll(100_000)], [bits for _, bits in events.poll(100)])
    print(b.recvmsg_into([bytearray(3), bytearray(9)], 0, socket.MSG_PEEK)[0])
    for length in (100, 4):
        print(b.recv_into(bytearray(length), 0, socket.MSG_PEEK | socket.MSG_TRUNC))
    print(b.recv_into(bytearray(5), 0, socket.MSG_TRUNC), b.recv(100))
    threading.Timer(0.1, a.sendall, [b"b" * 5]).start()
    a.sendall(b"a" * 5)
    print(b.recv(10, socket.MSG_WAITALL))
    print(attempt(b.recv, 10, socket.MSG_DONTWAIT))
    print(a.getsockname() == b.getpeername(), b.getsockname() == a.getpeername())


def whole_peeks():
    """MSG_PEEK with MSG_WAITALL waits for all bytes, and leaves them."""
    flags = socket.MSG_PEEK | socket.MSG_WAITALL
    a, b = pair()
    b.sendall(b"abc")
    threading.Timer(0.1, b.sendall, [b"defgh"]).start()
    print(a.recv(6, flags), a.recv(3))
    threading.Timer(0.1, b.sendall, [b"ijk"]).start()
    buffers = [bytearray(2), bytearray(6)]
    print(a.recvmsg_into(buffers, 0, flags)[0], buffers, a.recv(10))
    print(attempt(a.recv, 6, flags | socket.MSG_DONTWAIT))
    a.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 50_000))
    print(attempt(a.recv, 6, flags))
    b.sendall(b"lm")
    print(attempt(a.recv, 6, flags), a.recv(10, flags | socket.MSG_DONTWAIT))
    a.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bytes(16))
    threading.Timer(0.1, b.shutdown, [socket.SHUT_WR]).start()
    print(a.recv(6, flags), a.recv(6, flags), a.recv(10), a.recv(6, flags))


def many_messages():
    """recvmmsg(2) waits for each message, or with MSG_WAITFORONE for the first; the end of the stream is a message, too."""
    import ctypes

    class Piece(ctypes.Structure):
        _fields_ = [("at", ctypes.c_void_p), ("length", ctypes.c_size_t)]

    class Message(ctypes.Structure):
        _fields_ = [("name", ctypes.c_void_p), ("name_length", ctypes.c_uint), ("pieces", ctypes.POINTER(Piece)),
                    ("count", ctypes.c_size_t), ("control", ctypes.c_void_p), ("control_length", ctypes.c_size_t),
                    ("flags", ctypes.c_int), ("_", ctypes.c_int), ("received", ctypes.c_size_t)]

    call = ctypes.CDLL(None, use_errno=True).recvmmsg
    wait_for_one = 0x10000

    def receive(sock, flags=0, timeout=None):
        buffers = [ctypes.create_string_buffer(4) for _ in range(3)]
        pieces = [Piece(ctypes.addressof(buffer), 4) for buffer in buffers]
        messages = (Message * 3)(*[Message(None, 0, ctypes.pointer(piece), 1, None, 0, 0, 0, 99) for piece in pieces])
        left = (ctypes.c_long * 2)(*timeout) if timeout else None
        done = call(sock.fileno(), messages, 3, flags, left)
        return (errno.errorcode[ctypes.get_errno()] if done < 0 else done), [message.received for message in messages]

    def both(data):
        b.sendall(data)
        settle(a, select.POLLIN, select.POLLIN)
    a, b = pair()
    both(b"abcdef")
    threading.Timer(0.1, b.sendall, [b"gh"]).start()
    print(receive(a))
    both(b"abcdef")
    print(receive(a, wait_for_one))
    both(b"ab")
    print(receive(a, socket.MSG_DONTWAIT), receive(a, socket.MSG_DONTWAIT))
    both(b"abcdef")
    threading.Timer(0.2, b.sendall, [b"gh"]).start()
    print(receive(a, 0, (0, 100_000_000)), receive(a, 0, (0, -1)), receive(a, 0, (-1, 0)))
    for _ in range(2):
        threading.Timer(0.1, b.sendall, [b"x"]).start()
        print(receive(a, 0, (0, 1)))
    both(b"abcdef")
    b.close()
    print(receive(a), receive(a))


def nothings():
    """A recv(2) without room waits as others do, and takes nothing; a read(2) does not. No length is negative."""
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)

    def call(function, *arguments):
        done = function(*arguments)
        return errno.errorcode.get(ctypes.get_errno()) if done < 0 else done
    a, b = pair()
    a.setblocking(False)
    buffer, length = ctypes.create_string_buffer(64), ctypes.c_int(-1)
    ways = [lambda: call(libc.recv, a.fileno(), buffer, 0, 0), lambda: call(libc.read, a.fileno(), buffer, 0),
            lambda: attempt(lambda: a.recvmsg_into([bytearray(0)])[0]), lambda: attempt(os.readv, a.fileno(), [bytearray(0)])]
    print([way() for way in ways], call(libc.send, b.fileno(), buffer, 0, 0))
    b.sendall(b"x")
    settle(a, select.POLLIN, select.POLLIN)
    print([way() for way in ways], a.recv(10))
    b.close()
    settle(a, select.POLLRDHUP, ALL)
    print([way() for way in ways])
    a, b = pair()
    for name in (libc.getsockname, libc.getpeername):
        print(call(name, a.fileno(), buffer, ctypes.byref(length)))
    print(call(libc.getsockopt, a.fileno(), socket.SOL_SOCKET, socket.SO_TYPE, buffer, ctypes.byref(length)))


def six():
    a, b = pair(socket.AF_INET6)
    a.sendall(b"six")
    print(b.recv(10), a.family, b.family, b.getsockname()[0], len(a.getpeername()))


def ends():
    a, b = pair()
    a.sendall(b"last")
    a.shutdown(socket.SHUT_WR)
    print(settle(b, select.POLLRDHUP, ALL))
    print(b.recv(10), b.recv(10), b.recv(10))
    print(attempt(a.send, b"x"))
    b.sendall(b"back")
    print(a.recv(10))
    b.shutdown(socket.SHUT_WR)
    print(settle(a, select.POLLHUP, ALL), a.recv(10))
    a.close()
    print(attempt(b.recv, 10))
    a, b = pair()
    a.close()
    print(b.recv(10), settle(b, select.POLLRDHUP, ALL))
    a, b = pair()
    a.shutdown(socket.SHUT_RD)
    print(a.recv(10))
    print(attempt(a.shutdown, 7))


def state(sock):
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232)[0]


def overs():
    """A connection that both sides have ended, or one has reset, has no peer any more."""
    a, b = pair()
    a.shutdown(socket.SHUT_WR)
    settle(b, select.POLLRDHUP, ALL)
    time.sleep(0.1)  # TCP's end is acknowledged late.
    print(state(a), state(b), a.getpeername() == b.getsockname(), attempt(a.shutdown, socket.SHUT_WR))
    b.shutdown(socket.SHUT_WR)
    for sock in (a, b):
        print(settle(sock, select.POLLHUP, ALL), state(sock), attempt(sock.getpeername), attempt(sock.shutdown, socket.SHUT_RDWR),
              attempt(sock.shutdown, 7), sock.recv(1), sock.getsockname()[0])
    a, b = pair()
    a.sendall(b"unread")
    settle(b, select.POLLIN, select.POLLIN)
    b.close()
    print(settle(a, select.POLLERR, ALL), state(a), attempt(a.getpeername), attempt(a.shutdown, socket.SHUT_WR))
    print(attempt(a.recv, 1), attempt(a.getpeername))
    a, b = pair()
    a.shutdown(socket.SHUT_RD)
    print(state(a), state(b))


def shutdowns_by_others():
    """shutdown(2) by another thread ends the waits of a thread, in whatever call it waits."""

    def polls(sock):
        poller = select.poll()
        poller.register(sock, select.POLLRDHUP)
        return [bits for _, bits in poller.poll(10_000)]

    def epolls_for(flags):
        def wait(sock):
            ep = select.epoll()
            ep.register(sock, select.EPOLLIN | select.EPOLLRDHUP | flags)
            return [bits for _, bits in ep.poll(10)]
        return wait
    waits = [lambda sock: sock.recv(1), polls, epolls_for(0), epolls_for(select.EPOLLET),
             lambda sock: select.select([sock], [], [], 10)[0] == [sock]]

    def waited(wait, delay, how):
        a, b = pair()
        timer = threading.Timer(delay, a.shutdown, [how])
        timer.start()
        result = wait(a)
        timer.join()
        b.close()
        return result
    for wait in waits:
        print(*promptly(0.6, lambda: waited(wait, 0.1, socket.SHUT_RD)))
    print(*promptly(0.9, lambda: waited(lambda sock: attempt(sock.sendall, bytes(64 << 20)), 0.3, socket.SHUT_WR)))


def resets():
    a, b = pair()
    a.sendall(b"unread")
    b.recv(1)
    b.close()
    print(settle(a, select.POLLERR, ALL))
    print(attempt(a.recv, 10), attempt(a.recv, 10), attempt(a.send, b"x"))
    a, b = pair()
    b.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    b.close()
    settle(a, select.POLLERR, ALL)
    print(errno.errorcode.get(a.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)))
    print(a.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR), attempt(a.recv, 10))
    # A call that receives something leaves the reset to the next one.
    for receive in (lambda sock: sock.recv(10, socket.MSG_WAITALL),
                    lambda sock: sock.recvmsg_into([bytearray(3), bytearray(9)])[0]):
        a, b = pair()
        b.sendall(b"abc")
        settle(a, select.POLLIN, select.POLLIN)
        b.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        b.close()
        settle(a, select.POLLERR, ALL)
        print(attempt(receive, a), attempt(a.recv, 10), attempt(a.recv, 10))


def pipes():
    seen = []
    before = signal.signal(signal.SIGPIPE, lambda *_: seen.append("SIGPIPE"))
    a, _b = pair()
    a.shutdown(socket.SHUT_WR)
    print(attempt(os.write, a.fileno(), b"x"), seen)
    print(attempt(a.send, b"x", socket.MSG_NOSIGNAL), seen)
    signal.signal(signal.SIGPIPE, before)


def refusals():
    def closed():
        free = listener()
        at = free.getsockname()
        free.close()
        return at
    sock, at = socket.socket(), closed()
    print(attempt(sock.connect, at))
    # An engine looks at a listener's socket, and must not have it open for longer than the program.
    print({attempt(socket.socket().connect, closed()) for _ in range(300)})
    # A name of the other family.
    import ctypes
    connect = ctypes.CDLL(None, use_errno=True).connect
    for family, other in ((socket.AF_INET, socket.AF_INET6), (socket.AF_INET6, socket.AF_INET)):
        server, sock = listener(other), socket.socket(family)
        host, port = server.getsockname()[:2]
        ip = socket.inet_pton(other, host)
        ip = ip + bytes(8) if other == socket.AF_INET else bytes(4) + ip + bytes(4)
        name = struct.pack("=HH", other, socket.htons(port)) + ip
        print(connect(sock.fileno(), name, len(name)), errno.errorcode.get(ctypes.get_errno()))
    a, b = pair()
    print(attempt(a.connect, at), attempt(a.bind, at), attempt(a.listen), attempt(a.accept))
    print(attempt(b.send, b"x", socket.MSG_OOB) in ("EOPNOTSUPP", "ENOTSUP", 1))
    print(attempt(socket.socket().send, b"x") == "EPIPE", attempt(socket.socket().recv, 1))


def nonblocking():
    server = listener()
    server.setblocking(False)
    print(attempt(server.accept))
    client = socket.socket()
    client.setblocking(False)
    print(errno.errorcode.get(client.connect_ex(server.getsockname())))
    print(settle(client, select.POLLOUT, select.POLLOUT))
    print(client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
    print([errno.errorcode.get(client.connect_ex(server.getsockname())) for _ in range(2)])
    select.select([server], [], [], 100)
    accepted, _ = server.accept()
    print(accepted.getblocking(), fcntl.fcntl(client, fcntl.F_GETFL) & os.O_NONBLOCK != 0)
    print(attempt(client.recv, 1))
    got, sent = fill(client)
    print(got, settle(client, 0, select.POLLOUT))
    left = sent
    while left:
        left -= len(accepted.recv(1 << 20))
    print(settle(client, select.POLLOUT, select.POLLOUT), left)


def timeouts():
    a, b = pair()
    a.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 50_000))
    began = time.monotonic()
    print(attempt(a.recv, 1), 0.04 < time.monotonic() - began)
    print(a.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16) == struct.pack("ll", 0, 52_000)
          or a.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16) == struct.pack("ll", 0, 50_000))
    # Each of the two timeouts keeps its value when the other one changes.
    b.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 3, 0))
    b.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 5, 0))
    for name in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        print(struct.unpack("ll", b.getsockopt(socket.SOL_SOCKET, name, 16)))
    print(attempt(b.setsockopt, socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 1_000_000)))
    print(select.select([a], [], [], 0.05), select.select([], [a], [], 100)[1] == [a])


def interruptions():
    a, b = pair()

    class Stop(Exception):
        pass

    def handler(*_):
        raise Stop

    signal.signal(signal.SIGALRM, handler)
    for wait in (lambda: a.recv(1), lambda: select.select([a], [], []), lambda: select.poll().poll):
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            wait()
            time.sleep(1)
        except Stop:
            print("stopped")
    b.close()


def restarts():
    """A handler with SA_RESTART: a call that has moved nothing goes on, and another returns what it has moved."""
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.siginterrupt(signal.SIGALRM, False)
    # Python's own handler has no SA_RESTART.
    interrupt = signal.signal(signal.SIGINT, signal.SIG_DFL)
    a, b = pair()
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    timer = threading.Timer(0.5, b.sendall, [b"late"])
    timer.start()
    print(a.recv(4, socket.MSG_WAITALL))
    timer.join()
    b.sendall(b"abc")
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    timer = threading.Timer(0.5, b.sendall, [b"defg"])
    timer.start()
    print(a.recv(7, socket.MSG_WAITALL))
    timer.join()
    print(a.recv(7))
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    timer = threading.Timer(1, b.close)
    timer.start()
    sent = attempt(a.send, bytes(64 << 20))
    print(isinstance(sent, int) and 0 < sent < 64 << 20)
    timer.join()
    signal.signal(signal.SIGALRM, before)
    signal.signal(signal.SIGINT, interrupt)


def options():
    a, b = pair()
    level = socket.SOL_SOCKET
    for name in ("SO_TYPE", "SO_DOMAIN", "SO_PROTOCOL", "SO_ACCEPTCONN", "SO_ERROR", "SO_KEEPALIVE"):
        print(name, a.getsockopt(level, getattr(socket, name)))
    a.setsockopt(level, socket.SO_KEEPALIVE, 1)
    a.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    print(a.getsockopt(level, socket.SO_KEEPALIVE), a.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
    a.setsockopt(level, socket.SO_SNDBUF, 65536)
    print(a.getsockopt(level, socket.SO_SNDBUF))
    print(attempt(a.getsockopt, level, 9999), attempt(a.setsockopt, level, 9999, 1))
    b.sendall(b"12345")
    settle(a, select.POLLIN, select.POLLIN)
    number = array.array("i", [0])
    fcntl.ioctl(a, termios.FIONREAD, number)
    print(number[0], a.recv(10))
    print(a.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232)[0])
    b.close()
    settle(a, select.POLLRDHUP, select.POLLRDHUP)
    print(a.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232)[0])


def options_before_connect():
    """What was set before connect(2) reads as it was set after it, and the size of the sending buffer counts."""
    level = socket.SOL_SOCKET
    server = listener()
    # Accepted sockets have it from the listener: the kernel's would hold much of what is sent.
    server.setsockopt(level, socket.SO_RCVBUF, 30_000)
    client = socket.socket()
    values = {"SO_SNDBUF": 65536, "SO_RCVBUF": 30_000, "SO_RCVLOWAT": 100, "SO_KEEPALIVE": 1}
    for name, value in values.items():
        client.setsockopt(level, getattr(socket, name), value)
    client.setsockopt(level, socket.SO_SNDTIMEO, struct.pack("ll", 5, 0))
    client.connect(server.getsockname())
    accepted, _ = server.accept()
    count(client)
    count(accepted)
    for name in values:
        print(name, client.getsockopt(level, getattr(socket, name)))
    print(struct.unpack("ll", client.getsockopt(level, socket.SO_SNDTIMEO, 16)))
    client.setblocking(False)
    got, sent = fill(client)
    print(got, sent < 600_000)


def options_of_a_listener():
    """Connections begin with the options of their listener, and not with changes that came after them."""
    level, server = socket.SOL_SOCKET, listener()
    values = {"SO_KEEPALIVE": 1, "SO_OOBINLINE": 1, "SO_SNDBUF": 65536, "SO_RCVBUF": 30_000, "SO_RCVLOWAT": 100}

    def accepted(flag, timeout):
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, flag)
        server.setsockopt(level, socket.SO_RCVTIMEO, struct.pack("ll", timeout, 0))
        server.setsockopt(level, socket.SO_LINGER, struct.pack("ii", flag, 0))
        client = socket.create_connection(server.getsockname())
        sock = server.accept()[0]
        count(sock)
        for name in ("SO_REUSEADDR", *values):
            print(name, sock.getsockopt(level, getattr(socket, name)))
        print(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY),
              struct.unpack("ll", sock.getsockopt(level, socket.SO_RCVTIMEO, 16)))
        sock.close()
        print(attempt(client.recv, 1))
        return sock

    for name, value in values.items():
        server.setsockopt(level, getattr(socket, name), value)
    accepted(1, 3)
    accepted(0, 0)


def copies():
    a, b = pair()
    c = a.dup()
    a.close()
    c.sendall(b"copy")
    print(b.recv(10))
    os.dup2(c.fileno(), 200)
    c.close()
    os.write(200, b"second")
    print(b.recv(10))
    os.close(200)
    print(b.recv(10))


def ranges():
    """close_range(2) closes nothing if the kernel refuses its arguments."""
    import ctypes
    a, b = pair()
    fd = a.fileno()
    call = ctypes.CDLL(None, use_errno=True).close_range

    def close_range(first, last, flags=0):
        done = call(ctypes.c_uint(first), ctypes.c_uint(last), flags)
        return errno.errorcode.get(ctypes.get_errno()) if done < 0 else done
    print(close_range(fd + 1, fd), close_range(fd + 1, fd, 4), close_range(fd, fd, 1))
    a.sendall(b"open")
    print(b.recv(10))
    print(close_range(fd, fd), attempt(os.write, fd, b"x"), b.recv(10))
    a.detach()


def forks():
    a, b = pair()
    child = os.fork()
    if child == 0:
        a.close()
        b.sendall(b"from the child")
        print(b.recv(100))
        sys.stdout.flush()
        os._exit(0)
    b.close()
    print(a.recv(100))
    a.sendall(b"from the parent")
    os.waitpid(child, 0)
    print(a.recv(100))
    server = listener()
    child = os.fork()
    if child == 0:
        c, _ = server.accept()
        count(c)
        c.sendall(c.recv(100)[::-1])
        os._exit(0)
    c = socket.create_connection(server.getsockname())
    c.sendall(b"reverse")
    print(c.recv(100))
    os.waitpid(child, 0)
    print(c.recv(100))


def kills():
    server = listener()
    for how in ("idle", "unread"):
        after, done = os.pipe()
        child = os.fork()
        if child == 0:
            c, _ = server.accept()
            c.sendall(c.recv(1))
            os.write(done, b"x")
            time.sleep(1000)
        c = socket.create_connection(server.getsockname())
        c.sendall(b"a" if how == "idle" else b"aaaa")
        c.recv(1)
        # What came may be there before the other's call is over, in the middle of which it must not be killed.
        os.read(after, 1)
        os.kill(child, signal.SIGKILL)
        print(how, settle(c, select.POLLIN, ALL), attempt(c.recv, 10))
        os.waitpid(child, 0)
        os.close(after)
        os.close(done)


def epolls():
    for edge in (0, select.EPOLLET):
        a, b = pair()
        ep = select.epoll()
        ep.register(a, select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | edge)
        print([e for _, e in ep.poll(1)])
        print([e for _, e in ep.poll(0.05)])
        b.sendall(b"xy")
        time.sleep(0.05)
        print([e for _, e in ep.poll(1)], [e for _, e in ep.poll(0.05)])
        a.recv(1)
        print([e for _, e in ep.poll(0.05)])
        b.sendall(b"z")
        time.sleep(0.05)
        print([e for _, e in ep.poll(1)])
        ep.modify(a, select.EPOLLIN | edge)
        print([e for _, e in ep.poll(1)])
        a.recv(10)
        print([e for _, e in ep.poll(0.05)])
        threading.Timer(0.1, b.sendall, [b"later"]).start()
        print([e for _, e in ep.poll(100)])
        ep.modify(a, select.EPOLLIN | edge | select.EPOLLONESHOT)
        print([e for _, e in ep.poll(1)], [e for _, e in ep.poll(0.05)])
        ep.modify(a, select.EPOLLIN | select.EPOLLRDHUP | edge)
        a.recv(10)
        threading.Timer(0.1, b.close).start()
        print([e for _, e in ep.poll(100)])
        ep.unregister(a)
        try:
            ep.unregister(a)
        except OSError as error:
            print(errno.errorcode[error.errno])
        ep.register(a, select.EPOLLIN)
        a.close()
        print(ep.poll(0.05))


def exclusives():
    a, b = pair()
    ep, exclusive = select.epoll(), 1 << 28
    for events in (select.EPOLLRDHUP, select.EPOLLRDNORM, select.EPOLLONESHOT):
        print(attempt(ep.register, a, select.EPOLLIN | exclusive | events))
    print(attempt(ep.modify, a, select.EPOLLIN), attempt(ep.register, a, select.EPOLLIN | select.EPOLLET | exclusive))
    b.sendall(b"x")
    print([e for _, e in ep.poll(100)])
    for events in (select.EPOLLIN, select.EPOLLIN | exclusive):
        print(attempt(ep.modify, a, events))
    ep.unregister(a)
    ep.register(a, select.EPOLLOUT)
    print(attempt(ep.modify, a, select.EPOLLIN | exclusive), [e for _, e in ep.poll(100)])


def orders():
    """What came first is reported first, whatever the order of descriptors and of earlier events."""
    pairs = [pair() for _ in range(40)]
    for flags in (0, select.EPOLLET):
        for count in (3, 40):
            ends, ep = [a.fileno() for a, _ in pairs[:count]], select.epoll()
            for fd in ends:
                ep.register(fd, select.EPOLLIN | flags)
            right = 0
            for turn in range(20):
                # Nothing is left of the last turn; in every second one the set sleeps.
                ep.poll(0)
                ep.poll(0.01 * (turn % 2))
                chosen = [at * 7 * (turn + 1) % count for at in range(0, count, 1 + turn % 3)]
                chosen = list(dict.fromkeys(chosen))
                for at in chosen:
                    pairs[at][1].sendall(b"x")
                time.sleep(0.001)
                told = [ends.index(fd) for fd, _ in ep.poll(100)]
                right += told == chosen
                for at in told:
                    pairs[at][0].recv(10)
            print(flags, count, right)
    # A vector of many pieces is taken as one of their length, while nobody reads.
    a, b = pairs[0]
    a.setblocking(False)
    print(a.sendmsg([bytes(16 << 10), bytes(20 << 10), bytes(20 << 10)]))


def bound_ports():
    """The port of a socket that was bound before it connected is in use as long as the connection is."""
    server = listener()
    client = socket.socket()
    client.bind(("127.0.0.1", 0))
    at = client.getsockname()
    ep = select.epoll()
    ep.register(client, select.EPOLLIN)
    client.connect(server.getsockname())
    accepted, _ = server.accept()
    count(client)
    print(ep.poll(0.05))
    other = socket.socket()
    print(attempt(other.bind, at))
    accepted.sendall(b"x")
    print([e for _, e in ep.poll(100)], client.recv(10))
    accepted.close()
    print(client.recv(10))
    client.close()
    print(attempt(other.bind, at))


def closed_by_a_parent():
    """A connection that a child held and never closed ends with its parent's close(2), not later."""
    for _ in range(20):
        a, b = pair()
        c, d = pair()
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        # The engine, which takes what came together in any order, knows of the child's end once it has answered two requests.
        more = pair(), pair()
        b.close()
        d.sendall(b"x")
        print(c.recv(10), select.select([a], [], [], 0)[0] == [a], a.recv(10))


def inherited_set():
    """What a child closes stays in its parent's set."""
    a, b = pair()
    ep = select.epoll()
    ep.register(a, select.EPOLLIN)
    print(ep.poll(0.05))
    child = os.fork()
    if child == 0:
        a.close()
        os._exit(0)
    os.waitpid(child, 0)
    threading.Timer(0.1, b.sendall, [b"later"]).start()
    print([e for _, e in ep.poll(100)])


def set_before_connect():
    """As nginx has its upstreams: in the set first, then connected."""
    server = listener()
    ep = select.epoll()
    both = []
    for _ in range(3):
        s = socket.socket()
        s.setblocking(False)
        ep.register(s, select.EPOLLIN | select.EPOLLOUT | select.EPOLLET)
        s.connect_ex(server.getsockname())
        both.append((s, server.accept()[0]))
    count(both[0][0])
    for how in ("edge", "level"):
        for s, c in both:
            while ep.poll(0.05):
                pass
            threading.Timer(0.05, c.sendall, [b"x"]).start()
            got = {fd: events for fd, events in ep.poll(100)}
            print(how, got.get(s.fileno(), 0) & select.EPOLLIN, s.recv(10))
            ep.modify(s, select.EPOLLIN)
    both[0][0].close()
    threading.Timer(0.05, both[1][1].sendall, [b"y"]).start()
    print([fd == both[1][0].fileno() for fd, _ in ep.poll(100)])


def numbers_of_a_listener():
    """A listener is in a set by two numbers; only one of them is to report its connections."""
    server = listener()

    def look(what, change):
        numbers = [os.dup(server.fileno()) for _ in range(2)]
        ep = select.epoll()
        for fd in numbers:
            ep.register(fd, select.EPOLLIN)
        change(ep, numbers)
        client = socket.create_connection(server.getsockname())
        count(client)
        print(what, [numbers.index(fd) for fd, _ in ep.poll(100)])
        accepted = server.accept()[0]
        print(ep.poll(0.05))
        for fd in numbers:
            os.close(fd)
        for one in (client, accepted):
            one.close()

    look("the first is removed", lambda ep, numbers: ep.unregister(numbers[0]))
    look("the second is removed", lambda ep, numbers: ep.unregister(numbers[1]))
    look("the second is silent", lambda ep, numbers: ep.modify(numbers[1], 0))


def events_of_a_listener():
    """A listener is readable while a connection waits, and has no other event."""
    for asked in (select.EPOLLRDNORM, select.EPOLLIN | select.EPOLLRDNORM, select.EPOLLOUT, select.EPOLLIN | select.EPOLLOUT):
        for flags in (0, select.EPOLLET):
            server, ep, poller = listener(), select.epoll(), select.poll()
            ep.register(server, asked | flags)
            poller.register(server, asked)
            before = ep.poll(0.02), poller.poll(0)
            client = socket.create_connection(server.getsockname())
            count(client)
            print(before, [e for _, e in ep.poll(0.1)], [e for _, e in poller.poll(0)])
            ep.modify(server, select.EPOLLIN | flags)
            print([(fd == server.fileno(), e) for fd, e in ep.poll(0.1)])
            server.accept()
            print(ep.poll(0.02), poller.poll(0))


def full_tables():
    """A connection for which no descriptor is free waits until one is."""
    import ctypes
    import resource
    server = listener()
    at = server.getsockname()
    clients = [socket.create_connection(at) for _ in range(2)]
    for client in clients:
        count(client)
    for number, client in enumerate(clients):
        client.sendall(b"client %d" % number)
    ep, poller, spare = select.epoll(), select.poll(), socket.socket()
    ep.register(server, select.EPOLLIN)
    poller.register(server, select.POLLIN)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The numbers above are those that the library has for itself.
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, limits[1]))
    fill = []
    while isinstance(copy := attempt(os.dup, 0), int):
        fill.append(copy)
    for _ in range(3):
        print(attempt(server.accept), [bits for _, bits in ep.poll(0)], [bits for _, bits in poller.poll(0)])
    for number in range(2):
        for _ in range(4):
            os.close(fill.pop())
        accepted, _ = server.accept()
        count(accepted)
        print(accepted.recv(100), accepted.getpeername() == clients[number].getsockname())
        while isinstance(copy := attempt(os.dup, 0), int):
            fill.append(copy)
    print(ep.poll(0), poller.poll(0))
    # connect(2) needs no descriptor.
    print(attempt(spare.connect, at), spare.getpeername() == at)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    for copy in fill:
        os.close(copy)
    spare.sendall(b"spare")
    print(server.accept()[0].recv(100))
    accept4 = ctypes.CDLL(None, use_errno=True).accept4
    client = socket.create_connection(at)
    print(accept4(server.fileno(), None, None, 1), errno.errorcode[ctypes.get_errno()], [bits for _, bits in ep.poll(0.1)])


def unconnect(sock):
    """connect(2) to an address of no family, which Python cannot write."""
    import ctypes
    connect = ctypes.CDLL(None, use_errno=True).connect
    done = connect(sock.fileno(), struct.pack("=H14x", socket.AF_UNSPEC), 16)
    return errno.errorcode.get(ctypes.get_errno()) if done < 0 else done


def stopped_listeners():
    """A listener stops at shutdown(2), but not at one for writing, and may listen again."""
    def stops(how):
        def stop(server):
            return attempt(server.shutdown, how)
        return stop
    ways = [stops(how) for how in (socket.SHUT_RD, socket.SHUT_WR, socket.SHUT_RDWR, 7)] + [unconnect]
    for in_a_set in (False, True):
        for stop in ways:
            server, ep, poller = listener(), select.epoll(), select.poll()
            poller.register(server, select.POLLIN | select.POLLOUT)
            if in_a_set:
                ep.register(server, select.EPOLLIN | select.EPOLLOUT)
            at = server.getsockname()
            waiting = socket.create_connection(at)
            count(waiting)
            print([bits for _, bits in ep.poll(0.05)], stop(server), [bits for _, bits in poller.poll(0)],
                  [bits for _, bits in ep.poll(0.05)],
                  fcntl.fcntl(server, fcntl.F_GETFL) & os.O_NONBLOCK, server.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
            if server.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                print(type(server.accept()[0]))
                continue
            print(attempt(server.accept), attempt(waiting.recv, 1), attempt(socket.create_connection, at))
            print(attempt(server.listen), ep.poll(0.05))
            again = socket.create_connection(server.getsockname())
            count(again)
            print([bits for _, bits in ep.poll(0.05)], [bits for _, bits in poller.poll(1000)])
            again.sendall(b"again")
            print(server.accept()[0].recv(10))
    server, results = listener(), []
    blocked = threading.Thread(target=lambda: results.append(attempt(server.accept)))
    blocked.start()
    time.sleep(0.1)
    server.shutdown(socket.SHUT_RDWR)
    blocked.join(100)
    print(results)


def dissolved_connections():
    """connect(2) to no family resets a connection, and its socket may connect again."""
    for in_a_set in (False, True):
        for accepted in (False, True):
            client, other = pair()
            sock, peer = (other, client) if accepted else (client, other)
            copy, ep = sock.dup(), select.epoll()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 5, 0))
            if in_a_set:
                ep.register(sock, select.EPOLLIN)
            peer.sendall(b"unread")
            settle(sock, select.POLLIN, select.POLLIN)
            print(unconnect(sock), attempt(sock.getpeername), attempt(copy.getpeername), fcntl.fcntl(sock, fcntl.F_GETFL) & os.O_NONBLOCK)
            # The kernel reports the reset at the socket itself, too.
            sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            print(settle(sock, select.POLLHUP, ALL), attempt(sock.recv, 1), attempt(sock.send, b"x", socket.MSG_NOSIGNAL))
            print(sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
                  struct.unpack("ll", sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, 16)))
            print(settle(peer, select.POLLHUP, ALL), attempt(peer.recv, 1), attempt(peer.recv, 1))
            print([bits for _, bits in ep.poll(0.05)], unconnect(sock))
            copy.close()
            server = listener()
            sock.connect(server.getsockname())
            again = server.accept()[0]
            count(sock)
            print(attempt(sock.connect, server.getsockname()), sock.getpeername() == server.getsockname())
            print(ep.poll(0.05))
            threading.Timer(0.05, again.sendall, [b"again"]).start()
            print(sock.recv(10) if not in_a_set else [bits for _, bits in ep.poll(100)])
            sock.close()
            print(again.recv(10) if not in_a_set else attempt(again.recv, 10))

    # A thread that waits for the connection goes on.
    def freed():
        a, b = pair()
        blocked = threading.Thread(target=attempt, args=(a.recv, 1))
        blocked.start()
        time.sleep(0.1)
        result = unconnect(a)
        blocked.join(100)
        b.close()
        return result
    print(*promptly(0.6, freed))


def pools():
    """Two threads wait for one set, an event at a time: none waits for the other's work."""
    ep = select.epoll()
    all_of_them = [pair() for _ in range(4)]
    by_number = {a.fileno(): a for a, _ in all_of_them}
    for a in by_number.values():
        ep.register(a, select.EPOLLIN | select.EPOLLONESHOT)
    taken = []

    def work():
        for fd, _ in ep.poll(100, 1):
            by_number[fd].recv(1)
            # It has not done its work until the other one has begun its own.
            try:
                both.wait(40)
                taken.append(True)
            except threading.BrokenBarrierError:
                taken.append(False)

    for _ in range(3):
        both = threading.Barrier(2)
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(0.1)
        for _, b in all_of_them[:2]:
            b.sendall(b"x")
        for thread in threads:
            thread.join()
        print(len(taken), all(taken))
        taken.clear()
        for a, _ in all_of_them:
            ep.modify(a, select.EPOLLIN | select.EPOLLONESHOT)


def mixtures():
    """A pipe, a datagram socket and a stream in one set of each kind."""
    a, b = pair()
    r, w = os.pipe()
    u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    u.bind(("127.0.0.1", 0))
    names = {a.fileno(): "stream", r: "pipe", u.fileno(): "datagram"}
    ep = select.epoll()
    for fd in names:
        ep.register(fd, select.EPOLLIN)
    poller = select.poll()
    for fd in names:
        poller.register(fd, select.POLLIN)

    def look():
        time.sleep(0.05)
        for found in ([fd for fd, _ in ep.poll(0.05)], [fd for fd, _ in poller.poll(50)],
                      select.select(list(names), [], [], 0.05)[0]):
            print(sorted(names[fd] for fd in found))

    look()
    os.write(w, b"x")
    look()
    b.sendall(b"x")
    settle(a, select.POLLIN, select.POLLIN)
    look()
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", u.getsockname())
    settle(u, select.POLLIN, select.POLLIN)
    look()
    os.read(r, 1)
    look()
    a.recv(1)
    look()
    u.recv(10)
    for wake, empty in ((lambda: os.write(w, b"x"), lambda: os.read(r, 1)),
                        (lambda: b.sendall(b"y"), lambda: a.recv(1))):
        timer = threading.Timer(0.1, wake)
        timer.start()
        print([names[fd] for fd, _ in ep.poll(100)], len(empty()))
        timer.join()


def pointers():
    """Pointers that a call has no use for may be anything: those of empty sets, and of what leaves a set of epoll."""
    import ctypes
    libc = ctypes.CDLL(None)
    nowhere = ctypes.c_void_p(1)
    print(libc.poll(nowhere, ctypes.c_ulong(0), 1))
    print(libc.select(0, nowhere, nowhere, None, (ctypes.c_long * 2)(0, 1000)))
    ep = select.epoll()
    for sock in pair():
        ep.register(sock, select.EPOLLIN)
        delete = 2
        print(libc.epoll_ctl(ep.fileno(), delete, sock.fileno(), nowhere), ep.poll(0))


def threads():
    a, b = pair()
    size = 3_000_000
    data = bytes(range(256)) * (size // 256)
    got = {}

    def reader(sock, name):
        parts = []
        left = len(data)
        while left:
            part = sock.recv(70_000)
            if not part:
                break
            parts.append(part)
            left -= len(part)
        got[name] = b"".join(parts) == data

    all_of = [threading.Thread(target=reader, args=(s, n)) for s, n in ((a, "a"), (b, "b"))]
    all_of += [threading.Thread(target=s.sendall, args=(data,)) for s in (a, b)]
    for thread in all_of:
        thread.start()
    for thread in all_of:
        thread.join(60)
    print(sorted(got.items()))


def files():
    import tempfile
    a, b = pair()
    with tempfile.TemporaryFile() as file:
        file.write(b"0123456789" * 1000)
        file.flush()
        print(os.sendfile(a.fileno(), file.fileno(), 5, 9995))
        file.seek(9990)
        print(os.sendfile(a.fileno(), file.fileno(), None, 100), file.tell())
    left = 10005
    while left:
        left -= len(b.recv(left))
    print(left, attempt(b.recv, 1, socket.MSG_DONTWAIT))


def children():
    """Programs that the program starts go on as ever, and nothing that is open is closed by it."""
    import subprocess
    a, b = pair()
    print(subprocess.run(["echo", "child"], stdout=subprocess.PIPE, check=True).stdout)
    print(subprocess.run(["sh", "-c", "echo shell"], close_fds=False, stdout=subprocess.PIPE, check=True).stdout)
    os.closerange(500, 600)
    a.sendall(b"still here")
    print(b.recv(100))


ECHO = "import os\nwhile (got := os.read(0, 100)): os.write(1, got[::-1])"


def echoes(sock, child):
    """A child that has the other end as its standard input and output, as inetd(8) has it."""
    for text in (b"abc", b"defg"):
        sock.sendall(text)
        print(sock.recv(100))
    sock.shutdown(socket.SHUT_WR)
    print(sock.recv(100), child())


def execs():
    import subprocess
    echo = [sys.executable, "-c", ECHO]
    a, b = pair()
    child = subprocess.Popen(echo, stdin=b, stdout=b)
    b.close()
    echoes(a, child.wait)
    a, b = pair()
    child = subprocess.Popen(["sh", "-c", "read word; echo got $word; exec cat"], stdin=b, stdout=b)
    b.close()
    a.sendall(b"one\n")
    print(a.recv(100))
    a.sendall(b"two\n")
    print(a.recv(100))
    a.close()
    print(child.wait())
    a, b = pair()
    actions = [(os.POSIX_SPAWN_DUP2, b.fileno(), 0), (os.POSIX_SPAWN_DUP2, b.fileno(), 1)]
    child = os.posix_spawn(sys.executable, echo, os.environ, file_actions=actions)
    b.close()
    echoes(a, lambda: os.waitpid(child, 0)[1])
    a, b = pair(socket.AF_INET6)
    child = os.fork()
    if child == 0:
        os.dup2(b.fileno(), 0)
        os.dup2(0, 1)
        os.execvp("env", ["env"] + echo)
    b.close()
    echoes(a, lambda: os.waitpid(child, 0)[1])
    a, b = pair()
    b.setblocking(False)
    b.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    code = """import socket, sys
s = socket.socket(fileno=int(sys.argv[1]), family=socket.AF_INET, type=socket.SOCK_STREAM)
s.sendall(repr((s.getsockname() == ('127.0.0.1', int(sys.argv[2])), s.getpeername()[0],
                s.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))).encode())
import fcntl, os
s.sendall(b" nonblocking" if fcntl.fcntl(s, fcntl.F_GETFL) & os.O_NONBLOCK else b" blocking")
"""
    arguments = [sys.executable, "-c", code, str(b.fileno()), str(b.getsockname()[1])]
    print(subprocess.run(arguments, pass_fds=[b.fileno()], check=False).returncode)
    print(a.recv(1000))
    # The parent has it still.
    print(attempt(b.recv, 1))
    b.setblocking(True)
    for program in ("/nonexistent", "/etc/passwd"):
        print(attempt(subprocess.Popen, [program], 0, None, b, b))
    a.sendall(b"still here")
    print(b.recv(100))
    # Marked to be closed: nobody but the parent has it, whose close is the end.
    child = subprocess.Popen(["sleep", "30"], stdout=subprocess.DEVNULL, close_fds=False)
    b.close()
    print(a.recv(1))
    child.kill()
    child.wait()


def inheritances():
    """A listener, and a connection that waits at it, are the next program's."""
    import subprocess
    for blocking in (True, False):
        server = listener()
        server.setblocking(blocking)
        client = socket.create_connection(server.getsockname())
        code = """import select, socket, sys
s = socket.socket(fileno=int(sys.argv[1]), family=socket.AF_INET, type=socket.SOCK_STREAM)
for _ in range(2):
    select.select([s], [], [], 100)
    c, _ = s.accept()
    c.sendall(b"accepted " + c.recv(100))
try:
    if sys.argv[2] == "False":
        s.accept()
except BlockingIOError:
    c.sendall(b" EAGAIN")
"""
        arguments = [sys.executable, "-c", code, str(server.fileno()), str(blocking)]
        child = subprocess.Popen(arguments, pass_fds=[server.fileno()])
        client.sendall(b"first")
        print(client.recv(100))
        at = server.getsockname()
        server.close()
        second = socket.create_connection(at)
        count(second)
        second.sendall(b"second")
        time.sleep(0.1)
        print(child.wait(), second.recv(100), second.recv(100))


PARTS = [plain, whole_peeks, many_messages, nothings, six, ends, overs, shutdowns_by_others, resets, pipes, refusals,
         nonblocking, timeouts, interruptions, restarts, options, options_before_connect, options_of_a_listener,
         copies, ranges, forks, kills, epolls, exclusives, orders, bound_ports, closed_by_a_parent, inherited_set,
         set_before_connect, numbers_of_a_listener, events_of_a_listener, full_tables, stopped_listeners,
         dissolved_connections, pools, mixtures, pointers, threads, files, children, execs, inheritances]

if __name__ == "__main__":
    wanted = sys.argv[1:]
    for part in PARTS:
        if wanted and part.__name__ not in wanted:
            continue
        print(f"-- {part.__name__}", flush=True)
        try:
            part()
        except Exception as error:  # The comparison shows it.
            print(type(error).__name__, error)
        sys.stdout.flush()
    print(f"ours: {OURS}", file=sys.stderr)
