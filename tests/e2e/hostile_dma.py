#!/usr/bin/env python3
"""A driver that has an NVMe controller of hardware read all memory of its machine, for 69-hardware-memory.sh.

hostile_dma.py DIGEST   runs in a guest, as root. Takes the controller from the kernel's driver, has it write each page of
                        the guest's memory to its namespace, and reads the namespace. Prints the number of pages, of those
                        that begin with 16 bytes whose SHA-256 is DIGEST, and of those that this program has filled itself.

A CPU that reads a page finds zeros in it by a fault that the host serves. The controller's reads make no fault.
"""

import contextlib
import ctypes
import hashlib
import mmap
import os
import pathlib
import struct
import sys
import time

PAGE = 4096
# QEMU's NVMe controller, which is hardware to the host of this guest.
VENDOR = "0x1b36"
NVME_CLASS = "0x010802"
# NVMe Base Specification 2.0, section 3.1.3: registers.
CAP, CC, CSTS, AQA, ASQ, ACQ, DOORBELLS = 0x00, 0x14, 0x1C, 0x24, 0x28, 0x30, 0x1000
# Queue entries of 64 and 16 bytes, enabled.
ENABLED = 6 << 16 | 4 << 20 | 1
ENTRIES = 64
# Sections 5 and NVM Command Set Specification 1.0, section 3.2: opcodes.
CREATE_SQ, CREATE_CQ, IDENTIFY = 0x01, 0x05, 0x06
WRITE, READ = 0x01, 0x02
# The most pages of a command: all but the first are named in one page of the list.
MOST = 128
PATIENCE_S = 600


class Pages:
    """Pages of this process that stay where they are."""

    def __init__(self, count):
        self.bytes = mmap.mmap(-1, count * PAGE)
        self.bytes.write(b"\1" * len(self.bytes))
        view = (ctypes.c_char * len(self.bytes)).from_buffer(self.bytes)
        if ctypes.CDLL(None, use_errno=True).mlock(ctypes.byref(view), ctypes.c_size_t(len(self.bytes))):
            raise OSError(ctypes.get_errno(), "mlock")
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            entries = os.pread(pagemap.fileno(), 8 * count, ctypes.addressof(view) // PAGE * 8)
        # Documentation/admin-guide/mm/pagemap.rst: bit 63 is set if the page is there, bits 0 to 54 are its number.
        numbers = [entry & (1 << 55) - 1 for entry in struct.unpack(f"<{count}Q", entries) if entry >> 63]
        if len(numbers) != count or not all(numbers):
            raise SystemExit("the kernel does not tell where pages are")
        self.addresses = [number * PAGE for number in numbers]


class Queue:
    """A pair of queues."""

    def __init__(self, registers, number, stride):
        self.registers, self.pages, self.tail, self.head = registers, Pages(2), 0, 0
        self.pages.bytes[:] = bytes(2 * PAGE)
        self.submissions, self.completions = self.pages.addresses
        self.bells = [DOORBELLS + (2 * number + which) * stride for which in (0, 1)]

    def run(self, opcode, prps, nsid=0, cdw10=0, cdw11=0, cdw12=0):
        """Runs a command, and raises if it fails."""
        at = self.tail % ENTRIES
        command = struct.pack("<IIQQQQIIIIII", opcode | at << 16, nsid, 0, 0, *prps, cdw10, cdw11, cdw12, 0, 0, 0)
        self.pages.bytes[64 * at : 64 * (at + 1)] = command
        self.tail += 1
        self.registers.write(self.bells[0], self.tail % ENTRIES)
        # The phase changes with each round.
        at, phase = PAGE + 16 * (self.head % ENTRIES), 1 - self.head // ENTRIES % 2
        deadline = time.monotonic() + PATIENCE_S
        while True:
            (status,) = struct.unpack_from("<H", self.pages.bytes, at + 14)
            if status & 1 == phase:
                break
            if time.monotonic() > deadline:
                raise SystemExit(f"command {opcode:#x} does not end")
            time.sleep(0)
        self.head += 1
        self.registers.write(self.bells[1], self.head % ENTRIES)
        if status >> 1:
            raise SystemExit(f"command {opcode:#x} with {prps[0]:#x}: status {status >> 1:#x}")


class Registers:
    """The registers of a function, which no driver has."""

    def __init__(self, function):
        driver = function / "driver"
        if driver.exists():
            (driver / "unbind").write_text(function.name)
        with open(function / "config", "r+b", buffering=0) as config:
            # Memory and bus mastering (PCI Local Bus Specification 3.0, section 6.2.2).
            os.pwrite(config.fileno(), struct.pack("<H", 6), 4)
        with open(function / "resource0", "r+b", buffering=0) as bar:
            self.bar = mmap.mmap(bar.fileno(), 2 * PAGE)

    def _at(self, offset):
        return ctypes.c_uint32.from_buffer(self.bar, offset)

    def read(self, offset):
        return self._at(offset).value

    def write(self, offset, value):
        self._at(offset).value = value

    def write_wide(self, offset, value):
        self.write(offset, value & 0xFFFFFFFF)
        self.write(offset + 4, value >> 32)

    def await_ready(self, ready):
        deadline = time.monotonic() + PATIENCE_S
        while self.read(CSTS) & 1 != ready:
            if time.monotonic() > deadline:
                raise SystemExit("the controller does not answer")
            time.sleep(0.01)


class Drive:
    """A controller of hardware with its lowest namespace."""

    def __init__(self):
        functions = pathlib.Path("/sys/bus/pci/devices").iterdir()
        has = lambda one, name, value: (one / name).read_text().strip() == value  # noqa: E731
        (function,) = [one for one in functions if has(one, "vendor", VENDOR) and has(one, "class", NVME_CLASS)]
        registers = Registers(function)
        registers.write(CC, 0)
        registers.await_ready(0)
        stride = 4 << (registers.read(CAP + 4) & 0xF)
        admin = Queue(registers, 0, stride)
        registers.write(AQA, (ENTRIES - 1) << 16 | ENTRIES - 1)
        registers.write_wide(ASQ, admin.submissions)
        registers.write_wide(ACQ, admin.completions)
        registers.write(CC, ENABLED)
        registers.await_ready(1)
        self.queue = Queue(registers, 1, stride)
        size = (ENTRIES - 1) << 16 | 1
        admin.run(CREATE_CQ, (self.queue.completions, 0), cdw10=size, cdw11=1)
        admin.run(CREATE_SQ, (self.queue.submissions, 0), cdw10=size, cdw11=1 << 16 | 1)
        self.list, told = Pages(1), Pages(1)
        identify = lambda nsid, what: admin.run(IDENTIFY, (told.addresses[0], 0), nsid=nsid, cdw10=what)  # noqa: E731
        identify(0, 1)
        largest = told.bytes[77]
        self.most = min(MOST, 1 << largest) if largest else MOST
        identify(0, 2)
        (self.nsid,) = struct.unpack_from("<I", told.bytes, 0)
        identify(self.nsid, 0)
        self.blocks = PAGE >> told.bytes[128 + 4 * (told.bytes[26] & 0xF) + 2]

    def transfer(self, opcode, pages):
        """Transfers the first blocks of the namespace from or to pages at these addresses."""
        rest = pages[1:]
        self.list.bytes[: 8 * len(rest)] = struct.pack(f"<{len(rest)}Q", *rest)
        second = rest[0] if len(rest) == 1 else self.list.addresses[0]
        self.queue.run(opcode, (pages[0], second), nsid=self.nsid, cdw12=len(pages) * self.blocks - 1)


def memory():
    """The addresses of the pages of the machine's memory."""
    for line in pathlib.Path("/proc/iomem").read_text().splitlines():
        span, _, name = line.partition(" : ")
        if name == "System RAM":
            start, end = (int(text, 16) for text in span.split("-"))
            yield range((start + PAGE - 1) // PAGE * PAGE, (end + 1) // PAGE * PAGE, PAGE)


def main():
    wanted = bytes.fromhex(sys.argv[1])
    with contextlib.suppress(OSError):
        pathlib.Path("/proc/sys/vm/compact_unevictable_allowed").write_text("0")
    drive = Drive()
    mark = os.urandom(16)
    marked = Pages(256)
    marked.bytes[:] = mark * (len(marked.bytes) // 16)
    buffer = Pages(drive.most)
    count = stale = own = 0
    for part in memory():
        for first in range(0, len(part), drive.most):
            pages = list(part[first : first + drive.most])
            drive.transfer(WRITE, pages)
            drive.transfer(READ, buffer.addresses[: len(pages)])
            for at in range(0, len(pages) * PAGE, PAGE):
                head = buffer.bytes[at : at + 16]
                stale += hashlib.sha256(head).digest() == wanted
                own += head == mark
            count += len(pages)
    print(count, stale, own)


main()
