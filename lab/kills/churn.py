#!/usr/bin/env python3
"""Pods come and go while what serves them is killed. Run by `node` beside it; `lab/churn` has the options."""

import argparse
import collections
import random
import signal
import sys
import threading
import time

import kills
import load
import machine
import stress
import truth

# Seconds between two quiet points.
BETWEEN = 120
# Seconds in which states agree, and in which what was removed is gone.
SETTLE = 90


def say(text):
    print(f"churn: {time.strftime('%H:%M:%S')} {text}", flush=True)


class Node:
    """What workers share, and what is counted."""

    def __init__(self, options):
        self.options = options
        self.say = say
        self.lock, self.counters = threading.Lock(), collections.Counter()
        self.failures = []
        self.alive, self.interrupted = set(), []
        self.shared = 0.2 if "slipway-fs" in options.victims else 0
        self.ending, self.draining, self.comparing = threading.Event(), threading.Event(), threading.Event()
        self.programs = {"daemon": machine.daemon(), "containerd": machine.containerd()}
        self.killer = kills.Killer(options.seed, options.every, options.victims, self.programs, say)
        self.workers = [load.Worker(n, options.seed, self) for n in range(options.workers)]
        self.before, self.keeper_before = set(), 0

    def known(self):
        return set(self.alive)

    def count(self, what, number=1):
        with self.lock:
            self.counters[what] += number

    def fail(self, kind, text):
        with self.lock:
            self.failures.append((kind, text))
        say(f"FAILED ({kind}): {text}")

    def begin(self):
        for program in self.programs.values():
            program.start()
        # What the first ones make for all that follow stays: the image, its snapshots, a network.
        say("the first pod and the first sandbox")
        warm = load.Worker(99, self.options.seed, self)
        load.Pod(warm, "warm").live()
        load.Shared(warm, "warm-shared").live()
        self.before, self.keeper_before = self.leftovers(set())[0], truth.kept()
        self.counters.clear()

    def leftovers(self, before):
        there = truth.there()
        return there, there - before

    def compare(self):
        """Stops all calls for a moment, and compares the states that are told."""
        self.comparing.set()
        deadline = time.monotonic() + load.LONG
        while not all(one.at_gate or one.idle for one in self.workers) and time.monotonic() < deadline:
            time.sleep(0.1)
        found, looked, deadline = ["nothing was compared"], 0, time.monotonic() + SETTLE
        while found and time.monotonic() < deadline:
            time.sleep(1)
            try:
                found, looked = truth.lies()
            except machine.Failed as failed:
                found = [f"a list is not given: {failed}"]
        self.comparing.clear()
        for lie in found:
            self.fail("states", lie)
        self.count("compared", looked)

    def drain(self):
        """Lets all workers remove what they have made, and looks at what is left."""
        self.draining.set()
        deadline = time.monotonic() + 2 * load.LONG
        while not all(one.idle for one in self.workers) and time.monotonic() < deadline:
            time.sleep(0.2)
        if not all(one.idle for one in self.workers):
            self.fail("calls", "a worker does not end")
        left, deadline = {"?"}, time.monotonic() + SETTLE
        while left and time.monotonic() < deadline:
            try:
                _, left = self.leftovers(self.before)
            except machine.Failed as failed:
                left = {f"a list is not given: {failed}"}
            left = self.without_containerds(left)
            time.sleep(1)
        for one in sorted(left):
            self.fail("leaks", one)
        self.before |= left
        held = truth.kept()
        if held > self.keeper_before:
            self.fail("leaks", f"the keeper holds {held} descriptors and not {self.keeper_before}")
            self.keeper_before = held
        self.draining.clear()

    def without_containerds(self, left):
        """Takes away what containerd leaves when it is killed before it has written anything of a pod that it makes."""
        kills_of = [kill for kill in self.killer.kills if kill.victim == "containerd"]
        cut = [span for span in self.interrupted if any(kill.overlaps(*span) for kill in kills_of)]
        its = {one for one in left if truth.CONTAINERDS.match(one)}
        namespaces = [one for one in its if one.startswith("file /run/netns/")]
        if len(namespaces) > len(cut):
            return left
        if left == its and its:
            self.counters["containerd's"] = len(its)
            return set()
        return left - its if namespaces else left

    def quiet(self):
        """A quiet point."""
        self.killer.quiet.set()
        self.killer.paused.wait(load.LONG)
        for program in self.programs.values():
            program.wait_ready(120)
        # A pod whose part was killed a moment ago ends first.
        time.sleep(3)
        self.compare()
        self.drain()
        say(f"quiet: {self.counters['pods']} pods, {self.counters['containers']} containers,"
            f" {len(self.killer.kills)} kills, {len(self.failures)} failures")
        self.killer.quiet.clear()

    def churn(self):
        end = time.monotonic() + 60 * self.options.minutes
        self.killer.start()
        for worker in self.workers:
            worker.start()
        while time.monotonic() < end and not self.ending.is_set():
            next_point = min(time.monotonic() + BETWEEN, end)
            while time.monotonic() < next_point and not self.ending.is_set():
                time.sleep(0.2)
            self.quiet()
        self.ending.set()
        self.killer.ended.set()
        self.failures += [("restarts", text) for text in self.killer.failures]

    def table(self):
        seconds = 60 * self.options.minutes
        counts, by = self.counters, self.killer.counts()
        rows = [("pods started", counts["pods"]), ("containers started", counts["containers"]),
                ("sandboxes with a share", counts["sandboxes"]), ("commands in containers", counts["commands"]),
                ("containers that no kill hit", counts["unhit"]), ("containers that one hit", counts["hit"]),
                ("calls that a kill interrupted", counts["interrupted"]),
                ("states compared", counts["compared"]),
                ("lines that containerd lost when it was killed", counts["lost"]),
                ("files that containerd left when it was killed", counts["containerd's"]),
                ("exits that containerd missed when it started", counts["missed"])]
        rows += [(f"kills of {victim}", by[victim]) for victim in kills.VICTIMS]
        kinds = ("calls", "status", "output", "states", "leaks", "restarts", "checks")
        rows += [(f"failures: {kind}", sum(1 for one, _ in self.failures if one == kind)) for kind in kinds]
        width = max(len(name) for name, _ in rows)
        print(f"\nseed {self.options.seed}, {seconds:.0f} s, {self.options.workers} workers")
        for name, number in rows:
            print(f"{name:{width}}  {number:6}")
        for kind, text in self.failures:
            print(f"{kind}: {text}")


def options():
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--every", type=float, default=10)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--victims", type=lambda text: text.split(","), default=list(kills.VICTIMS))
    parser.add_argument("--volumes", action="store_true")
    parser.add_argument("--stress", action="store_true")
    found = parser.parse_args()
    if not set(found.victims) <= set(kills.VICTIMS):
        parser.error(f"victims are {', '.join(kills.VICTIMS)}")
    return found


def main():
    chosen = options()
    node = Node(chosen)
    say(f"seed {chosen.seed}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        node.begin()
        if chosen.stress:
            stress.run(node, say)
        else:
            node.churn()
            node.table()
    finally:
        for program in reversed(list(node.programs.values())):
            program.end()
    return 1 if node.failures else 0


if __name__ == "__main__":
    sys.exit(main())
