#!/usr/bin/env python3
"""collector.py FILE: a collector of OpenTelemetry's traces at a port of 127.0.0.1, which it prints.

It writes a line for each span to FILE: trace, span and parent in hexadecimal ("-": none), "ok" or "error", name, and the
attributes as KEY=VALUE. Of HTTP/2 (RFC 9113) it does what a gRPC client with one call at a time needs; it reads no headers.
"""

import socket
import struct
import sys
import threading

DATA, HEADERS, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 4, 6, 8
ACK, END_STREAM, END_HEADERS = 1, 1, 4
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def literal(name, value):
    """A header field that is in no table (RFC 7541, section 6.2.2)."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


def fields(message):
    """The fields of a message of Protocol Buffers: number and value, which is bytes or a number."""
    at = 0

    def number():
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        key = number()
        kind = key & 7
        if kind == 0:
            value = number()
        else:
            size = {1: 8, 5: 4}.get(kind) or number()
            value, at = message[at:at + size], at + size
        yield key >> 3, value


def below(message, *path):
    """The values at a path of field numbers."""
    if not path:
        return [message]
    return [found for number, value in fields(message) if number == path[0] for found in below(value, *path[1:])]


def line(span):
    one = dict(fields(span))
    status = dict(fields(one.get(15, b"")))
    attributes = [
        b"%s=%s" % (below(pair, 1)[0], below(pair, 2, 1)[0]) for pair in below(span, 9)
    ]
    words = [one[1].hex(), one[2].hex(), one.get(4, b"").hex() or "-", "error" if status.get(3) == 2 else "ok", one[5].decode()]
    return " ".join(words + [pair.decode() for pair in attributes])


class Connection:
    def __init__(self, stream, file):
        self.stream, self.file, self.bodies = stream, file, {}

    def read(self, size):
        data = b""
        while len(data) < size:
            piece = self.stream.recv(size - len(data))
            if not piece:
                raise ConnectionError
            data += piece
        return data

    def send(self, kind, flags, stream, payload=b""):
        self.stream.sendall(struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload)

    def serve(self):
        if self.read(len(PREFACE)) != PREFACE:
            return
        self.send(SETTINGS, 0, 0)
        while True:
            head = self.read(9)
            size = int.from_bytes(head[:3], "big")
            kind, flags, stream = struct.unpack(">BBI", head[3:])
            payload = self.read(size)
            if kind == SETTINGS and not flags & ACK:
                self.send(SETTINGS, ACK, 0)
            elif kind == PING and not flags & ACK:
                self.send(PING, ACK, 0, payload)
            elif kind == DATA:
                self.bodies[stream] = self.bodies.get(stream, b"") + payload
                if size:
                    for window in (0, stream):
                        self.send(WINDOW_UPDATE, 0, window, struct.pack(">I", size))
                if flags & END_STREAM:
                    self.answer(stream, self.bodies.pop(stream))

    def answer(self, stream, body):
        # A byte and the length come before the message.
        for span in below(body[5:], 1, 2, 2):
            print(line(span), file=self.file, flush=True)
        self.send(HEADERS, END_HEADERS, stream, b"\x88" + literal(b"content-type", b"application/grpc"))
        self.send(DATA, 0, stream, bytes(5))
        self.send(HEADERS, END_HEADERS | END_STREAM, stream, literal(b"grpc-status", b"0"))


def serve(stream, file):
    try:
        Connection(stream, file).serve()
    except OSError:
        pass


def main():
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        while True:
            stream, _ = listener.accept()
            threading.Thread(target=serve, args=(stream, file), daemon=True).start()


if __name__ == "__main__":
    main()
