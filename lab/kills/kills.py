"""Kills at random times, in an order that a seed gives."""

import collections
import os
import random
import signal
import threading
import time

import machine

VICTIMS = ("containerd", "shim", "holder", "daemon", "vmm", "slipway-fs")
# Those whose death no container notices.
HARMLESS = ("shim", "holder", "slipway-fs")
# Seconds for which a call may still fail after a daemon that was killed serves again: its connections broke.
AFTER = 5


class Kill:
    """A kill. `target` is the owner of the sandbox that was hit, None for containerd and the daemon."""

    def __init__(self, victim, target, pid):
        self.victim, self.target, self.pid = victim, target, pid
        self.at, self.over = time.time(), None

    def overlaps(self, begun, ended):
        over = self.over if self.over is not None else float("inf")
        return self.at - 0.5 <= ended and begun <= over + AFTER


class Killer(threading.Thread):
    """Kills one victim after another until it is told to end. It pauses while `quiet` is set."""

    def __init__(self, seed, every, victims, programs, say):
        super().__init__(daemon=True)
        self.random, self.every, self.victims = random.Random(seed), every, victims
        self.programs, self.say = programs, say
        self.kills, self.failures, self.lock = [], [], threading.Lock()
        self.quiet, self.paused, self.ended = threading.Event(), threading.Event(), threading.Event()

    def draw(self):
        """The next pause in seconds, the victim, and which one of several, as a part of one."""
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
        if self.quiet.is_set():
            self.paused.set()
            while self.quiet.is_set() and not self.ended.is_set():
                time.sleep(0.1)
            self.paused.clear()

    def _strike(self, victim, which):
        # Where there is no such victim now, the next kind in turn is killed.
        first = VICTIMS.index(victim)
        for kind in VICTIMS[first:] + VICTIMS[:first]:
            if kind in self.victims and self._kill(kind, which):
                return

    def _kill(self, kind, which):
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
        """Kills containerd or the daemon, and waits until it serves again."""
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
        """Kills of what belongs to one pod or sandbox."""
        return [kill for kill in list(self.kills) if kill.target == target]

    def excuse(self, begun, ended, known=(), target=None):
        """A kill that explains why a call failed between two times, or None. `known` are the owners of other
        sandboxes; a pod that nobody knows yet may be the caller's."""
        for kill in list(self.kills):
            if kill.target is None and kill.overlaps(begun, ended):
                return kill
            if kill.target is not None and kill.target == target:
                return kill
            if kill.target is not None and kill.target not in known and begun <= kill.at <= ended:
                return kill
        return None

    def counts(self):
        return collections.Counter(kill.victim for kill in list(self.kills))
