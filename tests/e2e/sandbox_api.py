#!/usr/bin/env python3
"""sandbox_api.py SHIM ADDRESS SLIPWAY BUNDLE: a pod by containerd's Sandbox API, with the calls that containerd 2.4 makes.

SHIM is the shim's program, ADDRESS the address of a containerd, of whatever version, SLIPWAY the program that
lists sandboxes, and BUNDLE an empty directory.
"""

import json
import os
import socket
import struct
import subprocess
import sys
import time

SERVICE = b"containerd.runtime.sandbox.v1.Sandbox"
CONFIG = b"runtime.v1.PodSandboxConfig"


def field(number, data):
    """A field of protobuf with bytes."""
    length, size = b"", len(data)
    while size > 127:
        length, size = length + bytes([size & 127 | 128]), size >> 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + data


def fields(message):
    """The fields of a message, by their numbers: bytes, or numbers."""
    found, at = {}, 0

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
        key, value = number(), number()
        if key & 7 == 2:
            value, at = message[at:at + value], at + value
        found[key >> 3] = value
    return found


class Shim:
    """A shim, and the connection to it."""

    def __init__(self, program, address, bundle, name):
        self.bundle, self.name, self.next = bundle.encode(), name.encode(), 1
        command = [program, "-namespace", "default", "-address", address, "-publish-binary", "/bin/false"]
        parameters = field(1, self.name) + field(2, b"default")
        printed = subprocess.run([*command, "-id", name, "start"], input=parameters, cwd=bundle,
                                 stdout=subprocess.PIPE, check=True, timeout=600).stdout
        answer = json.loads(printed)
        assert (answer["version"], answer["protocol"]) == (3, "ttrpc"), answer
        with open(f"{bundle}/shim.pid", encoding="ascii") as file:
            self.pid = int(file.read())
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(600)
        self.socket.connect(answer["address"].removeprefix("unix://"))
        self.stream = self.socket.makefile("rb")

    def call(self, method, more=b""):
        """Calls a method, and returns the fields of the response: 1 is a failure, 2 the payload."""
        message = field(1, SERVICE) + field(2, method.encode()) + field(3, field(1, self.name) + more)
        self.socket.sendall(struct.pack(">IIBB", len(message), self.next, 1, 0) + message)
        self.next += 2
        length, *_ = struct.unpack(">IIBB", self.stream.read(10))
        return fields(self.stream.read(length))

    def answer(self, method, more=b""):
        """Calls a method that succeeds, and returns the fields of its answer."""
        response = self.call(method, more)
        assert 1 not in response, (method, response)
        return fields(response.get(2, b""))

    def create(self, kind, config):
        """Creates the sandbox with options of a type."""
        return self.call("CreateSandbox", field(2, self.bundle) + field(4, field(1, kind) + field(2, config)))

    def is_over(self):
        """Whether the shim's process has ended, in five minutes."""
        for _ in range(3000):
            try:
                with open(f"/proc/{self.pid}/stat", encoding="utf-8") as file:
                    if file.read().rpartition(")")[2].split()[0] == "Z":
                        return True
            except (FileNotFoundError, ProcessLookupError):
                return True
            time.sleep(0.1)
        return False


def vmms(slipway, name):
    """The processes of the VMMs of the sandboxes of a pod."""
    listed = subprocess.run([slipway, "ps", "--json"], stdout=subprocess.PIPE, check=True, timeout=600).stdout
    return [one["vmm_pid"] for one in json.loads(listed) if one["name"].startswith(f"{name}-")]


def main():
    program, address, slipway, bundle = sys.argv[1:]
    refused = Shim(program, address, bundle, "refused")
    failure = refused.create(b"a.b.Other", b"").get(1, b"")
    assert b"a.b.Other" in failure, failure
    refused.answer("ShutdownSandbox")
    assert refused.is_over(), "the shim of a refused sandbox goes on"

    name = "sandboxed"
    shim = Shim(program, address, bundle, name)
    config = field(1, field(1, b"web") + field(3, b"shop")) + field(2, b"web")
    assert shim.create(CONFIG, config) == {}
    assert vmms(slipway, name) == []
    assert fields(shim.answer("Platform")[1])[1] == b"linux"
    started = shim.answer("StartSandbox")
    assert [started[1]] == vmms(slipway, name) and os.path.exists(f"/proc/{started[1]}"), started
    status = shim.answer("SandboxStatus")
    assert (status[3], status[2]) == (b"SANDBOX_READY", started[1]), status
    assert 3 in fields(shim.answer("SandboxMetrics")[1])
    shim.answer("StopSandbox")
    ended = shim.answer("WaitSandbox")
    assert 1 not in ended and 2 in ended, ended
    assert shim.answer("SandboxStatus")[3] == b"SANDBOX_NOTREADY"
    shim.answer("ShutdownSandbox")
    assert shim.is_over(), "the shim goes on"
    assert vmms(slipway, name) == []


main()
