#!/usr/bin/env python3
"""What a program sends on one connection before it sends on another is reported in that order.

    order.py [ROUNDS]

A program sends numbers, each on a connection that was quiet for long or on one that is busy, and another one waits for
them with epoll(7), poll(2) or select(2). Prints a line for each way of waiting, and exits with 1 if an order was
another one. Ends with `ours: N` on standard error, N the number of connections that were eventfds and not sockets.
"""

import os
import random
import select
import socket
import struct
import sys

NUMBER = struct.Struct("!Q")


def connections(count):
    """`count` connections between two processes: the sender's ends, and a function that makes the reader's."""
    server = socket.create_server(("127.0.0.1", 0), backlog=count)
    clients, accepted = [], []
    for _ in range(count):
        clients.append(socket.create_connection(server.getsockname()))
        accepted.append(server.accept()[0])
        clients[-1].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        accepted[-1].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    server.close()
    return clients, accepted


class Epoll:
    """The order of epoll_wait(2)'s report."""

    def __init__(self, ends, flags, most):
        self.set, self.most = select.epoll(), most
        for end in ends:
            self.set.register(end, select.EPOLLIN | flags)

    def wait(self):
        return [fd for fd, _ in self.set.poll(100, self.most)]


class Poll:
    """The descriptors of poll(2), which have no order among them."""

    def __init__(self, ends):
        self.set = select.poll()
        for end in ends:
            self.set.register(end, select.POLLIN)

    def wait(self):
        return {fd for fd, _ in self.set.poll(100_000)}


class Select:
    def __init__(self, ends):
        self.ends = [end.fileno() for end in ends]

    def wait(self):
        return set(select.select(self.ends, [], [], 100)[0])


def read(waiter, ends):
    """Answers each round with the number of its messages that came too early."""
    by_number = {end.fileno(): end for end in ends}
    expected, busy = 0, ends[0]
    busy.sendall(NUMBER.pack(0))
    while True:
        early = 0
        last = expected + 2
        while expected < last:
            ready = waiter.wait()
            numbers = []
            for fd in ready:
                bytes_ = by_number[fd].recv(NUMBER.size)
                if not bytes_:
                    return
                numbers.append(NUMBER.unpack(bytes_)[0])
            if isinstance(ready, set):
                numbers.sort()
            for number in numbers:
                early += number != expected
                expected += 1
        busy.sendall(NUMBER.pack(early))


def send(ends, rounds):
    """Sends two numbers in each round, the second one on the busy connection. Returns how many came too early."""
    chance, number, busy = random.Random(1), 0, ends[0]
    # The reader is ready.
    early = NUMBER.unpack(busy.recv(NUMBER.size))[0]
    for _ in range(rounds):
        quiet = chance.choice(ends[1:])
        first, second = (quiet, busy) if chance.random() < 0.8 else (busy, quiet)
        first.sendall(NUMBER.pack(number))
        second.sendall(NUMBER.pack(number + 1))
        number += 2
        early += NUMBER.unpack(busy.recv(NUMBER.size))[0]
    return early


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5_000
    ways = [("epoll", 3, lambda ends: Epoll(ends, 0, 64)),
            ("epoll, edges", 3, lambda ends: Epoll(ends, select.EPOLLET, 64)),
            ("epoll, an event at a time", 5, lambda ends: Epoll(ends, 0, 1)),
            ("epoll of many", 100, lambda ends: Epoll(ends, 0, 64)),
            ("epoll of many, edges", 100, lambda ends: Epoll(ends, select.EPOLLET, 64)),
            ("poll", 5, Poll), ("select", 5, Select)]
    failed, ours = False, 0
    for name, count, make in ways:
        clients, accepted = connections(count)
        ours += sum("eventfd" in os.readlink(f"/proc/self/fd/{end.fileno()}") for end in clients)
        child = os.fork()
        if child == 0:
            for client in clients:
                client.close()
            read(make(accepted), accepted)
            os._exit(0)
        for end in accepted:
            end.close()
        early = send(clients, rounds)
        for client in clients:
            client.close()
        os.waitpid(child, 0)
        failed |= early > 0
        print(f"{name}: {early} of {2 * rounds} came too early")
    print(f"ours: {ours}", file=sys.stderr)
    sys.exit(failed)


if __name__ == "__main__":
    main()
