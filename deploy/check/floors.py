#!/usr/bin/env python3
"""The floor rule: a crate uses crates of its own floor and of the floors below it, never above.

Beside the floors there are tighter rules for some crates and one exception, each with its reason,
in the tables below. Development dependencies obey the floors too, but no tighter rule: a test may
play the other party.
"""

import json
import pathlib
import subprocess
import sys

FLOORS = ["base", "spec", "backend", "device", "host", "sandbox", "front"]

# crate: (what it may use instead of all that its floor allows, why). A name that ends with "/" is a
# whole floor. Names of crates that do not exist yet do no harm.
ONLY = {
    "slipway-agent": (
        ["base/", "spec/", "slipway-agent-protocol"],
        "it runs in the guest and must not carry the host's code there",
    ),
    "slipway-agent-protocol": (["base/", "spec/"], "both the guest and the host use it"),
    "slipway-port": (["base/", "spec/"], "it runs in other people's programs"),
    "slipway-socket": (["base/", "spec/"], "it runs in other people's programs"),
    "slipway-guest-sockets": (
        ["base/", "spec/", "slipway-sgiov"],
        "it runs in the guest: the engine, and nothing else of the host's",
    ),
    "slipway-load": (
        ["base/", "spec/", "slipway-nvme"],
        "it runs in guests: a driver, and nothing of the host's",
    ),
    "slipway-socket-tokio": (
        ["base/", "spec/", "slipway-socket"],
        "it runs in other people's programs",
    ),
    "slipway-shim": (
        ["base/", "spec/", "slipway-sandbox-api", "slipway-seccomp", "slipway-keeper"],
        "one runs for each container: it must stay small (of the keeper it has the question whether one is there)",
    ),
    "slipway-cni": (
        ["base/", "spec/", "slipway-plane-api"],
        "one runs for each interface of a container, hundreds at once: it must stay small",
    ),
    "slipway-preload": (
        ["base/", "spec/", "slipway-socket"],
        "it runs in other people's programs",
    ),
    "slipway-disks": (
        ["base/", "spec/", "slipway-block", "slipway-keeper", "slipway-plane-api"],
        "it opens disks and must not know a device that has them (the keeper knows none either)",
    ),
    "slipway-vfio-user": (
        [
            "base/",
            "spec/",
            "slipway-pci",
            "slipway-doorbells",
            "slipway-keeper",
            "slipway-vfio-user-wire",
        ],
        "it serves any PCI function and must not know one of them (the keeper knows none either)",
    ),
    "slipway-vfio-user-wire": (["base/", "spec/"], "a VMM links it, and nothing of the server"),
    "slipway-vfio-user-client": (
        ["base/", "spec/", "slipway-pci", "slipway-vfio-user-wire"],
        "a VMM links it, and nothing of the server",
    ),
}

# Crate that only some may see: (who may, why).
SEEN_BY = {
    "slipway-plane": (
        ["host/", "slipway-cli"],
        "sandbox/ and front/ reach the plane through slipway-plane-api, since it may be another "
        "process; slipway-cli is that process (slipway daemon)",
    ),
    "slipway-vfio": (
        ["host/"],
        "sandbox/ and front/ have hardware of the plane's pools, and touch none themselves",
    ),
    "slipway-network": (
        ["slipway-cli"],
        "sandbox/ and front/ reach networks through slipway-plane-api as well",
    ),
}


def workspace(root):
    """The workspace's packages by name, each with its floor."""
    command = ["cargo", "metadata", "--no-deps", "--locked", "--format-version", "1"]
    text = subprocess.run(command, cwd=root, check=True, stdout=subprocess.PIPE).stdout
    packages = {}
    for package in json.loads(text)["packages"]:
        folder = pathlib.Path(package["manifest_path"]).relative_to(root).parts[0]
        packages[package["name"]] = (folder, package["dependencies"])
    return packages


def admits(allowed, name, floor):
    return name in allowed or f"{floor}/" in allowed


def complaints(packages):
    """Every dependency that breaks a rule, as one line each."""
    for name, (floor, dependencies) in sorted(packages.items()):
        if floor not in FLOORS:
            yield f"{name} lies in {floor}/, which is no floor"
            continue
        for dependency in dependencies:
            used = dependency["name"]
            if used not in packages or used == name:
                continue
            used_floor = packages[used][0]
            if used_floor not in FLOORS:
                continue
            if FLOORS.index(used_floor) > FLOORS.index(floor):
                yield f"{name} ({floor}) uses {used} ({used_floor}), a floor above its own"
            if dependency["kind"] == "dev":
                continue
            allowed, why = ONLY.get(name, (None, None))
            if allowed is not None and not admits(allowed, used, used_floor):
                yield f"{name} uses {used}, and may not: {why}"
            seers, why = SEEN_BY.get(used, (None, None))
            if seers is not None and not admits(seers, name, floor):
                yield f"{name} uses {used}, and may not: {why}"


def self_test():
    """A check that cannot fail is no check."""

    def uses(*names, kind=None):
        return [{"name": name, "kind": kind} for name in names]

    packages = {
        "slipway-ram": ("base", uses("serde")),
        "slipway-agent-protocol": ("sandbox", uses("slipway-ram")),
        "slipway-agent": ("sandbox", uses("slipway-agent-protocol")),
        "slipway-nvme": ("device", uses("slipway-ram")),
        "slipway-vfio-user": ("host", uses("slipway-nvme", kind="dev")),
        "slipway-plane": ("host", uses("slipway-nvme")),
        "slipway-cli": ("front", uses("slipway-plane")),
    }
    assert not list(complaints(packages)), list(complaints(packages))
    for name, broken in {
        "slipway-ram": ("base", uses("slipway-nvme")),
        "slipway-agent": ("sandbox", uses("slipway-plane")),
        "slipway-vfio-user": ("host", uses("slipway-nvme")),
        "slipway-runtime": ("sandbox", uses("slipway-plane")),
        "slipway-nvme": ("device", uses("slipway-cli", kind="dev")),
        "slipway-odd": ("misc", []),
    }.items():
        assert list(complaints({**packages, name: broken})), name


def main():
    self_test()
    found = list(complaints(workspace(pathlib.Path(__file__).resolve().parents[2])))
    for line in found:
        print(f"floors: {line}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
