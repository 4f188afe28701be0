#!/usr/bin/env python3
"""Virtual functions (VFs) of hardware, for hardware.sh.

hardware.py queues PF COUNT    makes COUNT VFs of an NVMe controller, each with queues, vectors and one namespace
hardware.py open ADDRESS       opens a VF by VFIO and resets it, and prints the milliseconds of both together
hardware.py hold ADDRESS       opens a VF by VFIO, says "held", and holds it until standard input ends
"""

import array
import ctypes
import fcntl
import os
import pathlib
import struct
import sys
import time

DEVICES = pathlib.Path("/sys/bus/pci/devices")
# linux/nvme_ioctl.h: _IOWR('N', 0x41, struct nvme_passthru_cmd), of 72 bytes.
NVME_IOCTL_ADMIN_CMD = 0xC0484E41
# NVMe Base Specification 2.0, section 5: opcodes.
NAMESPACE_ATTACHMENT, VIRTUALIZATION_MANAGEMENT = 0x15, 0x1C
# Section 5.30: actions and resource types.
PRIMARY_FLEXIBLE, SECONDARY_ASSIGN, SECONDARY_ONLINE = 1, 8, 9
QUEUES, INTERRUPTS = 0, 1
# The admin queue pair and two for I/O; as many vectors as a guest of one CPU uses.
QUEUES_EACH, INTERRUPTS_EACH = 3, 2
# linux/vfio.h.
VFIO_SET_IOMMU, VFIO_GROUP_SET_CONTAINER, VFIO_GROUP_GET_DEVICE_FD, VFIO_DEVICE_RESET = 0x3B66, 0x3B68, 0x3B6A, 0x3B6F
VFIO_TYPE1V2_IOMMU = 3


def admin(controller, opcode, nsid=0, cdw10=0, cdw11=0, data=b""):
    """Runs an admin command on an open controller; raises if it fails."""
    buffer = ctypes.create_string_buffer(data, len(data)) if data else None
    address = ctypes.addressof(buffer) if data else 0
    command = struct.pack(
        "<BBHIIIQQII6III", opcode, 0, 0, nsid, 0, 0, 0, address, 0, len(data), cdw10, cdw11, 0, 0, 0, 0, 0, 0
    )
    status = fcntl.ioctl(controller, NVME_IOCTL_ADMIN_CMD, bytearray(command))
    if status:
        raise SystemExit(f"admin command {opcode:#x} with {cdw10:#x}: status {status:#x}")


def manage(controller, action, identifier, resource=0, count=0):
    """Runs Virtualization Management."""
    admin(controller, VIRTUALIZATION_MANAGEMENT, cdw10=action | resource << 8 | identifier << 16, cdw11=count)


def wait_live(function):
    """Waits until the controller of a PCI function takes commands, and returns its directory in sysfs."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for controller in function.glob("nvme/nvme*"):
            if (controller / "state").read_text().strip() == "live":
                return controller
        time.sleep(0.1)
    raise SystemExit(f"{function.name}: no controller that takes commands")


def make_queues(physical, count):
    """Takes the flexible resources from the physical function, and gives them to its VFs."""
    function = DEVICES / physical
    directory = wait_live(function)
    first = int((directory / "cntlid").read_text())
    with open(f"/dev/{directory.name}", "rb", buffering=0) as controller:
        for resource in (INTERRUPTS, QUEUES):
            manage(controller, PRIMARY_FLEXIBLE, first, resource, 0)
    # They leave with its reset.
    (function / "reset").write_text("1")
    directory = wait_live(function)
    (function / "sriov_drivers_autoprobe").write_text("0")
    (function / "sriov_numvfs").write_text(str(count))
    with open(f"/dev/{directory.name}", "rb", buffering=0) as controller:
        for number in range(1, count + 1):
            identifier = first + number
            manage(controller, SECONDARY_ASSIGN, identifier, INTERRUPTS, INTERRUPTS_EACH)
            manage(controller, SECONDARY_ASSIGN, identifier, QUEUES, QUEUES_EACH)
            manage(controller, SECONDARY_ONLINE, identifier)
            controllers = struct.pack("<HH", 1, identifier).ljust(4096, b"\0")
            admin(controller, NAMESPACE_ATTACHMENT, nsid=number, data=controllers)


def open_function(address):
    """Opens a function that vfio-pci has. Returns descriptors that must stay open."""
    group_number = os.path.basename(os.readlink(DEVICES / address / "iommu_group"))
    container = os.open("/dev/vfio/vfio", os.O_RDWR)
    group = os.open(f"/dev/vfio/{group_number}", os.O_RDWR)
    fcntl.ioctl(group, VFIO_GROUP_SET_CONTAINER, array.array("i", [container]))
    fcntl.ioctl(container, VFIO_SET_IOMMU, VFIO_TYPE1V2_IOMMU)
    device = fcntl.ioctl(group, VFIO_GROUP_GET_DEVICE_FD, bytearray(address.encode() + b"\0"))
    return container, group, device


def main():
    match sys.argv[1:]:
        case ["queues", physical, count]:
            make_queues(physical, int(count))
        case ["open", address]:
            begin = time.monotonic()
            _, _, device = open_function(address)
            fcntl.ioctl(device, VFIO_DEVICE_RESET)
            print(f"{(time.monotonic() - begin) * 1000:.1f}")
        case ["hold", address]:
            held = open_function(address)
            print("held", flush=True)
            sys.stdin.read()
            del held
        case _:
            raise SystemExit(__doc__)


main()
