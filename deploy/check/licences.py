#!/usr/bin/env python3
"""Every crate that Slipway is built from has a licence that Apache-2.0 code may be shipped with."""

import json
import pathlib
import re
import subprocess
import sys

ALLOWED = {
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-1-Clause",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    # Data of certificate authorities and of time zones.
    "CDLA-Permissive-2.0",
    "ISC",
    "MIT",
    "MIT-0",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
}


def acceptable(expression):
    """Whether an SPDX expression leaves a choice of allowed licences only. "/" is an old OR."""
    tokens = re.findall(r"\(|\)|[^\s()]+", expression.replace("/", " OR "))
    position = 0

    def take():
        nonlocal position
        position += 1
        return tokens[position - 1] if position <= len(tokens) else ""

    def peek():
        return tokens[position] if position < len(tokens) else ""

    def term():
        token = take()
        if token == "(":
            inside = alternatives()
            return take() == ")" and inside
        if peek() == "WITH":
            take()
            token = f"{token} WITH {take()}"
        return token in ALLOWED

    def sequence(operand, operator, join):
        result = operand()
        while peek() == operator:
            take()
            result = join(result, operand())
        return result

    def all_of():
        return sequence(term, "AND", lambda a, b: a and b)

    def alternatives():
        return sequence(all_of, "OR", lambda a, b: a or b)

    return alternatives() and position == len(tokens)


def self_test():
    for good in ["MIT", "MIT/Apache-2.0", "GPL-3.0 OR MIT", "(MIT OR GPL-2.0) AND Unicode-3.0",
                 "Apache-2.0 WITH LLVM-exception OR MIT"]:
        assert acceptable(good), good
    for bad in ["", "GPL-3.0", "MIT AND GPL-3.0", "MIT AND", "(MIT", "MIT MIT",
                "GPL-2.0 WITH Classpath-exception-2.0"]:
        assert not acceptable(bad), bad


def main():
    self_test()
    root = pathlib.Path(__file__).resolve().parents[2]
    command = ["cargo", "metadata", "--locked", "--format-version", "1",
               "--filter-platform", "x86_64-unknown-linux-gnu"]
    text = subprocess.run(command, cwd=root, check=True, stdout=subprocess.PIPE).stdout
    packages = json.loads(text)["packages"]
    bad = [p for p in packages if not acceptable(p["license"] or "")]
    for package in bad:
        licence = package["license"] or f"none stated ({package['license_file']})"
        print(f"licences: {package['name']} {package['version']}: {licence}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
