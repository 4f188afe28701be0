#!/usr/bin/env python3
"""Checks figures.toml, and makes SPECIFICATION.md of it with `--write`.

A new figure is a [[figure]] in figures.toml and a story under its id in docs/measurements/results/AREA.md; then run this with
`--write`. Checked are: ids, fields and states, the length of claims, that commits exist and commands parse, that each figure has
its story and each story its figure, and that the page is up to date. A new area or machine is a line in AREAS or MACHINES."""

import pathlib
import re
import subprocess
import sys
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / "SPECIFICATION.md"
RESULTS = ROOT / "docs/measurements/results"
CLAIM_LENGTH = 80
# Longer commands are cut in the table; the story has them whole.
COMMAND_LENGTH = 64

AREAS = {
    "start": "Start-up, build and test",
    "containers": "Containers",
    "walls": "Walls between tenants",
    "disks": "Disks",
    "restart": "Restarts",
    "networks": "Networks and packets",
    "sockets": "Sockets",
}
STATES = {"held": "held", "missed": "**missed**", "pending": "*pending*"}
MACHINES = {
    "plain-2": "x86-64 virtual machine, 2 cores, 24 GiB, Debian 12, no VT-x: guests under software emulation"
}
KEYS = {"id", "area", "claim", "command", "bar", "value", "state", "machine", "commit"}
OPTIONAL = {"bar", "value"}

HEAD = """# Specification

<!-- Made of figures.toml by deploy/check/figures.py --write. -->

What Slipway promises, and what was measured: {held} held, {missed} missed, {pending} pending. A *pending*
figure was not measured under the conditions that its bar names; it is an aim and not a claim. Each claim
leads to its story: all runs, peers, conditions, commits.

A figure is a ratio measured side by side in one run wherever a peer can run. Absolute figures are of this
machine unless the story names another:

| name | what |
|---|---|
"""

TAIL = """
How figures are taken: [disks](docs/measurements/disks.md), [start-up](docs/measurements/startup.md),
[packets](docs/bench-packet.md), [sockets](docs/bench-socket.md), [VMMs](docs/bench-vmm.md),
[memory](docs/bench-memory.md), [control groups](docs/bench-cgroups.md). Tests of others' suites that do not apply:
[suites](docs/measurements/suites.md).
"""


def cell(text):
    return text.replace("|", "\\|")


def command_of(figure):
    command = figure["command"][0]
    if len(command) > COMMAND_LENGTH:
        command = command[: COMMAND_LENGTH - 1].rstrip() + "…"
    return f"`{cell(command)}`"


def row(figure):
    link = f"[{cell(figure['claim'])}](docs/measurements/results/{figure['area']}.md#{figure['id']})"
    measured = (cell(figure.get(key, "")) for key in ("bar", "value"))
    return "| " + " | ".join([link, *measured, STATES[figure["state"]], command_of(figure)]) + " |"


def page(figures):
    count = {state: sum(figure["state"] == state for figure in figures) for state in STATES}
    parts = [HEAD.format(**count)]
    parts += [f"| `{name}` | {what} |\n" for name, what in MACHINES.items()]
    for area, title in AREAS.items():
        parts.append(f"\n## {title}\n\n| claim | bar | measured | | shown by |\n|---|---|---|---|---|\n")
        parts += [row(figure) + "\n" for figure in figures if figure["area"] == area]
    return "".join(parts + [TAIL])


def wrong_fields(figure):
    missing = KEYS - OPTIONAL - figure.keys()
    if missing or figure.keys() - KEYS:
        yield f"has unknown keys or lacks some: {sorted(missing | figure.keys() - KEYS)}"
        return
    for key, known in [("area", AREAS), ("state", STATES), ("machine", MACHINES)]:
        if figure[key] not in known:
            yield f"{key} {figure[key]!r} is none of {', '.join(known)}"
    if not re.fullmatch(r"[a-z0-9-]+", figure["id"]):
        yield "has an id with other characters than a-z, 0-9 and hyphens"
    if len(figure["claim"]) > CLAIM_LENGTH:
        yield f"has a claim of {len(figure['claim'])} characters"
    if figure["state"] == "missed" and not figure.get("value"):
        yield "is missed without a value"
    if not figure["command"] or not figure["commit"]:
        yield "has no command, or no commit"


def packages():
    """The workspace's packages by name, each with its folder."""
    manifests = ROOT.glob("*/*/Cargo.toml")
    named = ((re.search(r'^name = "(.*)"', path.read_text(), flags=re.M), path) for path in manifests)
    return {name[1]: path.parent for name, path in named if name}


def wrong_command(command, crates, verbs):
    """Returns why a command cannot be run as it is written, or None."""
    words = [word for word in command.split() if not re.match(r"[A-Z_]+=", word)]
    program = words[0]
    if program == "make":
        return None if f"\n{words[1]}:" in (ROOT / "Makefile").read_text() else "no such target"
    if program == "slipway":
        return None if words[1] in verbs else f"slipway has no command {words[1]}"
    if program != "cargo":
        return None if (ROOT / program).exists() else f"{program} does not exist"
    if "-p" not in words[:-1]:
        return "names no package: -p PACKAGE"
    crate = crates.get(words[words.index("-p") + 1])
    if crate is None:
        return "no such crate"
    for option, folder in [("--test", "tests"), ("--example", "examples")]:
        names = [words[at + 1] for at, word in enumerate(words[:-1]) if word == option]
        for name in names:
            if not (crate / folder / f"{name}.rs").exists() and not (crate / folder / name).is_dir():
                return f"{crate.relative_to(ROOT)} has no {folder}/{name}"
    return None


def verbs_of(source):
    """Returns the commands of slipway: the variants of `Command`, in kebab case as clap names them."""
    body = source.partition("enum Command {")[2].partition("\n}")[0]
    variants = re.findall(r"^    ((?:[A-Z][a-z]+)+)(?:\(| \{|,)", body, flags=re.M)
    return {re.sub(r"\B([A-Z])", r"-\1", name).lower() for name in variants}


def wrong_commands(figures):
    crates = packages()
    verbs = verbs_of((ROOT / "front/cli/src/args.rs").read_text())
    for figure in figures:
        for command in figure["command"]:
            reason = wrong_command(command, crates, verbs)
            if reason:
                yield figure["id"], f"`{command}`: {reason}"


def git(*words):
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)


def missing_commits(figures):
    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        print("SKIPPED: commits of figures.toml: needs the whole history", file=sys.stderr)
        return
    for figure in figures:
        for commit in figure["commit"]:
            # A commit of a branch that was not merged is in no other clone.
            if git("merge-base", "--is-ancestor", commit, "HEAD").returncode:
                yield figure["id"], f"commit {commit} is not in the history"


def wrong_stories(figures):
    ids = {(figure["area"], figure["id"]) for figure in figures}
    told = {
        (area, head)
        for area in AREAS
        for head in re.findall(r"^## (.*)$", (RESULTS / f"{area}.md").read_text(), flags=re.M)
    }
    for area, id_ in sorted(ids - told):
        yield id_, f"has no story in docs/measurements/results/{area}.md"
    for area, id_ in sorted(told - ids):
        yield id_, f"is told in docs/measurements/results/{area}.md and is no figure"


def found(figures):
    ids = [figure.get("id", "?") for figure in figures]
    yield from ((id_, "is there twice") for id_ in sorted({id_ for id_ in ids if ids.count(id_) > 1}))
    fields = [(figure.get("id", "?"), line) for figure in figures for line in wrong_fields(figure)]
    yield from fields
    if fields:
        return
    for check in [wrong_commands, missing_commits, wrong_stories]:
        yield from check(figures)
    if PAGE.read_text() != page(figures):
        yield "SPECIFICATION.md", "is not what figures.toml gives: run deploy/check/figures.py --write"


def main():
    figures = tomllib.loads((ROOT / "figures.toml").read_text())["figure"]
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page(figures))
    lines = [f"figures: {id_}: {line}" for id_, line in found(figures)]
    for line in lines:
        print(line, file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
