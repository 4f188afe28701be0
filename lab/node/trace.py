"""Records with the kernel's tracefs which thread had the processor, and the system calls in it, for a server of one processor.

Printed are lines `trace: ...`. The first ones have a name of a thread with its time on the processor, the number of times that
it left it, and its system calls as NUMBERxCOUNT (x86-64; of ioctl(2), 16:COMMAND). Behind them comes a line for each time on the
processor, in order: milliseconds since the beginning, the time in microseconds, the thread, and its system calls.
"""
import collections, os, re, subprocess

TRACING = "/sys/kernel/tracing"
EVENTS = ("sched/sched_switch", "raw_syscalls/sys_enter", "workqueue/workqueue_execute_start")
LINE = re.compile(r"^\s*(.{1,16})-(\d+)\s+\[\d+\]\s+\S+\s+([\d.]+): (\w+): (.*)$")
IOCTL = "16"
# Threads, and characters of a line, that are printed.
THREADS, WIDTH = 40, 400


def put(name, value):
    with open(f"{TRACING}/{name}", "w") as file:
        file.write(value)


def begin():
    if not os.path.exists(f"{TRACING}/trace"):
        subprocess.run(["mount", "-t", "tracefs", "none", TRACING], check=True)
    # The clock of time.monotonic_ns().
    put("trace_clock", "mono")
    put("buffer_size_kb", "65536")
    put("trace", "")
    for event in EVENTS:
        put(f"events/{event}/enable", "1")
    put("tracing_on", "1")


def called(event, rest):
    """Names a system call, or the function of a worker of the kernel."""
    if event != "sys_enter":
        return "work:" + rest.split("function ")[-1].split()[0]
    number, arguments = re.match(r"NR (-?\d+) \((.*)\)", rest).groups()
    return f"{number}:{arguments.split(', ')[1]}" if number == IOCTL else number


def end(first_ns, last_ns):
    """Ends the record, and prints what was between two times of time.monotonic_ns()."""
    put("tracing_on", "0")
    spent, left, calls = collections.Counter(), collections.Counter(), collections.defaultdict(collections.Counter)
    order, since, inside = [], first_ns, []
    with open(f"{TRACING}/trace") as trace:
        for comm, pid, seconds, event, rest in (found.groups() for found in map(LINE.match, trace) if found):
            at, thread = int(float(seconds) * 1e9), f"{comm.strip()}-{pid}"
            if not first_ns <= at <= last_ns:
                continue
            if event != "sched_switch":
                calls[thread][called(event, rest)] += 1
                inside.append(called(event, rest))
                continue
            spent[thread] += at - since
            left[thread] += 1
            order.append(f"{(since - first_ns) / 1e6:.3f} {(at - since) / 1e3:.0f} {thread}: {' '.join(inside)}")
            since, inside = at, []
    threads = []
    for thread, time_ns in spent.most_common(THREADS):
        told = " ".join(f"{call}x{count}" for call, count in calls[thread].most_common())
        threads.append(f"{thread}: {time_ns / 1e6:.2f} ms, {left[thread]} times, {told}")
    for line in threads + order:
        print(f"trace: {line}"[:WIDTH])
    print(flush=True)
