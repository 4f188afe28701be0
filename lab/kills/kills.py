"""Kills programs of the node under test at random times. The seed decides the pauses and the order of the victims.

A call that fails is excused by a kill that explains the failure (`Killer.excuse`); others are failures of the test.
"""

import collections
import os
import random
import signal
import threading
import time

import machine

VICTIMS = ("containerd", "shim", "holder", "daemon", "vmm", "slipway-fs")
# The victims whose death ends no container.
HARMLESS = ("shim", "holder", "slipway-fs")
# Seconds before a kill in which the end of a failed call still counts as an effect of the kill.
BEFORE = 0.5
# Seconds for which calls may still fail after a program that was killed serves again: their connections broke.
AFTER = 5


class Kill:
    """A kill of the process `pid`. `target` is the owner of the sandbox that was hit, and None for containerd and the
    daemon, which all sandboxes share. `over` is the time of the kill, but for these two the time when they serve again,
    and None before that."""

    def __init__(self, victim, target, pid):
        self.victim, self.target, self.pid = victim, target, pid
        self.at, self.over = time.time(), None

    def overlaps(self, begun, ended):
        """Returns whether the kill may have an effect on a call between two times."""
        over = self.over if self.over is not None else float("inf")
        return self.at - BEFORE <= ended and begun <= over + AFTER


class Killer(threading.Thread):
    """Kills one victim after another until `ended` is set. `every` is the mean pause between two kills in seconds. The
    thread sets `paused` when it holds because `quiet` is set, and when it ends."""

    def __init__(self, seed, every, victims, programs, say):
        super().__init__(daemon=True)
        self.random, self.every, self.victims = random.Random(seed), every, victims
        self.programs, self.say = programs, say
        self.kills, self.failures, self.lock = [], [], threading.Lock()
        self.quiet, self.paused, self.ended = threading.Event(), threading.Event(), threading.Event()

    def draw(self):
        """Returns the next pause in seconds, the victim, and a number from 0 to below 1 that chooses among processes of
        that kind."""
        pause = self.random.uniform(0.4, 1.6) * self.every
        return pause, self.random.choice(self.victims), self.random.random()

    def run(self):
        while not self.ended.is_set():
            pause, victim, which = self.draw()
            deadline = time.monotonic() + pause
            while time.monotonic() < deadline and not self.ended.is_set():
                self._hold()
                time.sleep(0.1)
            if not self.ended.is_set():
                self._strike(victim, which)
        self.paused.set()

    def _hold(self):
        """Waits while `quiet` is set."""
        if self.quiet.is_set():
            self.paused.set()
            while self.quiet.is_set() and not self.ended.is_set():
                time.sleep(0.1)
            self.paused.clear()

    def _strike(self, victim, which):
        """Kills a process of the kind `victim`, or of the next kind in turn of which there is one."""
        first = VICTIMS.index(victim)
        for kind in VICTIMS[first:] + VICTIMS[:first]:
            if kind in self.victims and self._kill(kind, which):
                return

    def _kill(self, kind, which):
        """Kills a process of this kind. Returns whether there was one."""
        if kind in self.programs:
            self.kill_program(kind)
            return True
        found = {"shim": machine.shims, "holder": machine.holders, "vmm": machine.vmms,
                 "slipway-fs": machine.file_servers}[kind]()
        if not found:
            return False
        target = sorted(found)[int(which * len(found))]
        kill = Kill(kind, target, found[target])
        self.kills.append(kill)
        kill.over = kill.at
        self.say(f"kill -9 {kind} {kill.pid} of {target[:13]}")
        try:
            os.kill(kill.pid, signal.SIGKILL)
        except ProcessLookupError:
            self.kills.remove(kill)
        return True

    def kill_program(self, kind, why=""):
        """Kills containerd or the daemon, and waits until it serves again. `why` ends the line of the log."""
        with self.lock:
            program = self.programs[kind]
            kill = Kill(kind, None, program.child.pid)
            self.kills.append(kill)
            self.say(f"kill -9 {kind} {kill.pid}{why}")
            program.kill()
            try:
                program.wait_ready(120)
            except machine.Failed as late:
                self.failures.append(str(late))
            kill.over = time.time()

    def hits(self, target):
        """Returns the kills of processes that belong to one pod or sandbox."""
        return [kill for kill in list(self.kills) if kill.target == target]

    def excuse(self, begun, ended, known=(), target=None):
        """Returns a kill that explains why a call failed between two times, or None. The call was about `target`, if
        it has an id yet. `known` are the owners of sandboxes that are made: a kill of another one may have hit the
        sandbox that the call was making."""
        for kill in list(self.kills):
            if kill.target is None and kill.overlaps(begun, ended):
                return kill
            if kill.target is not None and kill.target == target:
                return kill
            if kill.target is not None and kill.target not in known and begun <= kill.at <= ended:
                return kill
        return None

    def counts(self):
        """Returns the number of kills of each kind of victim."""
        return collections.Counter(kill.victim for kill in list(self.kills))
