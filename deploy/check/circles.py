#!/usr/bin/env python3
"""Import circles among the modules of each crate.

usage: circles.py [--verbose]

Among the modules that one module declares, each with all that is under it, the imports form no circle: whoever reads them can
begin with the one that imports none of the others. A module may import from its parent, which is its crate's or folder's face.
An import of a name that a module re-exports counts for the module that defines the name. Tests may import everything.

MEANT lists circles that stay, each with the reason. Any other circle is an error, and so is an entry without a circle.
"""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]

# (crate, parent module): {members: reason}. The parent of the crate's top modules is "".
MEANT = {
    ("base/reactor", ""): {
        "context task": "a task is polled with a context, which names tasks",
        "run seat watchdog": "a seat holds a reactor that the watchdog may take and have another thread run",
    },
    ("device/e1000", ""): {
        "access device state": "the device, the effects of its registers and its saved state are one object in three files",
    },
    ("device/sgiov", ""): {
        "channel exchange": "an exchange carries the channel between its two owners",
        "device state": "the device and its saved state are one object in two files",
    },
    ("device/virtio-net", ""): {
        "device state": "the device and its saved state are one object in two files",
    },
    ("front/preload", ""): {
        "epoll fds": "an object is a set, among other kinds, and a set refers to objects",
    },
    ("host/port", ""): {
        "port received": "received frames borrow their port",
    },
    ("host/socket", ""): {
        "endpoint family": "a family holds endpoints, and an endpoint its family",
    },
    ("host/socket-tokio", ""): {
        "split stream": "halves are made of a stream, and become one again",
    },
}

RAW = re.compile(r'b?r(#*)"')
CHAR = re.compile(r"'(\\.[^']*|[^'\\])'")
TEST_ITEM = re.compile(r"#\[cfg\((?:all\()?test\b[^\]]*\]\s*(?:#\[[^\]]*\]\s*)*")
USE = re.compile(r"(pub(?:\([^)]*\))?\s+)?\buse\s+([^;]+);")


def without_text(source):
    """The source without comments, strings and characters."""
    out, at = [], 0
    while at < len(source):
        raw = RAW.match(source, at)
        char = CHAR.match(source, at)
        if source.startswith("//", at):
            end = source.find("\n", at)
            at = len(source) if end < 0 else end
        elif source.startswith("/*", at):
            at = source.find("*/", at) + 2
        elif raw and not (at and re.match(r"\w", source[at - 1])):
            at = source.find('"' + raw[1], raw.end()) + 1 + len(raw[1])
        elif source[at] == '"':
            at += 1
            while source[at] != '"':
                at += 2 if source[at] == "\\" else 1
            at += 1
        elif char:
            at = char.end()
        else:
            out.append(source[at])
            at += 1
    return "".join(out)


def without_tests(source):
    """The source without items that are compiled for tests only."""
    while found := TEST_ITEM.search(source):
        at, depth = found.end(), 0
        while at < len(source):
            depth += {"{": 1, "}": -1}.get(source[at], 0)
            at += 1
            if depth == 0 and source[at - 1] in "};":
                break
        source = source[: found.start()] + source[at:]
    return source


def paths_of(tree):
    """The paths of one `use` tree."""
    group = re.match(r"^((?:\w+::)*)\{(.*)\}$", tree.strip(), re.S)
    if not group:
        return [tree.strip()]
    parts, depth, part = [], 0, ""
    for char in group[2] + ",":
        depth += {"{": 1, "}": -1}.get(char, 0)
        if char == "," and depth == 0:
            parts.append(part)
            part = ""
        else:
            part += char
    return [group[1] + path for part in parts if part.strip() for path in paths_of(part)]


class Crate:
    """The modules of a crate: tuples of names, the root ()."""

    def __init__(self, src):
        files = {}
        for file in sorted(src.rglob("*.rs")):
            names = file.relative_to(src).with_suffix("").parts
            if names[0] == "bin" or (names == ("main",) and (src / "lib.rs").exists()):
                continue
            if names[-1] == "mod" or names in (("lib",), ("main",)):
                names = names[:-1]
            files[names] = without_tests(without_text(file.read_text()))
        self.text = {}
        for module in sorted(files, key=len):
            declared = not module or (
                module[:-1] in self.text
                and re.search(rf"\bmod\s+{module[-1]}\s*;", self.text[module[:-1]])
            )
            if declared:
                self.text[module] = files[module]
        self.again = {module: {} for module in self.text}
        self.paths = {}
        for module, text in self.text.items():
            self.read(module, text)

    def read(self, module, text):
        """Notes the paths that a module names, and what it re-exports."""
        paths = []
        for public, tree in USE.findall(text):
            for path in paths_of(re.sub(r"\s+", " ", tree)):
                path, _, name = path.replace(" ", "" if " as " not in path else " ").partition(" as ")
                if public:
                    self.again[module][name or path.split("::")[-1]] = path
                else:
                    paths.append(path)
        body = USE.sub("", text)
        paths += re.findall(r"\b((?:crate|super|self)(?:::\w+)+)", body)
        for child in (other[-1] for other in self.text if other and other[:-1] == module):
            paths += re.findall(rf"(?<![:\w])({child}(?:::\w+)+)", body)
        self.paths[module] = paths

    def absolute(self, module, path):
        """The names of a path from the crate's root. None for a path into another crate."""
        names = path.split("::")
        if names[0] == "crate":
            return names[1:]
        if names[0] == "self":
            return [*module, *names[1:]]
        base = list(module)
        while names and names[0] == "super" and base:
            base.pop()
            names = names[1:]
        if len(base) < len(module):
            return base + names
        return [*module, *names] if (*module, names[0]) in self.text else None

    def definer(self, names, depth=0):
        """The module that defines what a path from the root names."""
        module = ()
        while len(module) < len(names) and (*module, names[len(module)]) in self.text:
            module = (*module, names[len(module)])
        rest = names[len(module) :]
        source = self.again[module].get(rest[0]) if rest else None
        if source is None or depth > 8:
            return module
        onward = self.absolute(module, source)
        return None if onward is None else self.definer(onward + rest[1:], depth + 1)

    def imports(self):
        """(module, imported module, path) for all imports within the crate."""
        for module, paths in self.paths.items():
            for path in paths:
                names = self.absolute(module, path)
                target = None if names is None else self.definer(names)
                if target is not None and target != module:
                    yield module, target, path


def siblings(crate):
    """parent: {child: {child: [where]}} for all imports between modules of one parent."""
    graphs = {}
    for module, target, path in crate.imports():
        shared = 0
        while shared < min(len(module), len(target)) and module[shared] == target[shared]:
            shared += 1
        if shared < len(module) and shared < len(target):
            graph = graphs.setdefault(module[:shared], {})
            where = f"{'::'.join(module)} uses {path}"
            graph.setdefault(module[shared], {}).setdefault(target[shared], []).append(where)
    return graphs


def reached(graph, start):
    """What can be reached from `start` by one edge or more."""
    seen, todo = set(), list(graph.get(start, ()))
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo += graph.get(node, ())
    return seen


def circles(graph):
    """The sets of modules that reach each other."""
    reach = {node: reached(graph, node) for node in graph}
    groups = {frozenset(b for b in reach[a] if a in reach.get(b, ())) for a in graph if a in reach[a]}
    return sorted(sorted(group) for group in groups)


def main():
    verbose = "--verbose" in sys.argv[1:]
    listed = {(*key, names) for key, group in MEANT.items() for names in group}
    found, bad = set(), False
    files = subprocess.run(["git", "ls-files", "*/Cargo.toml"], cwd=ROOT, check=True, capture_output=True, text=True)
    for crate in sorted(pathlib.Path(file).parent for file in files.stdout.split()):
        if not (ROOT / crate / "src").is_dir():
            continue
        for parent, graph in sorted(siblings(Crate(ROOT / crate / "src")).items()):
            for circle in circles(graph):
                key = (str(crate), "::".join(parent), " ".join(circle))
                found.add(key)
                if key not in listed:
                    bad = True
                    print(f"circles: {key[0]}: {key[1] or 'src'}: import each other: {key[2]}")
                if key not in listed or verbose:
                    for one in circle:
                        for other in sorted(set(circle) & set(graph.get(one, ()))):
                            print(f"    {one} -> {other}: " + "; ".join(sorted(set(graph[one][other]))))
    for key in sorted(listed - found):
        bad = True
        print(f"circles: {key[0]}: {key[1] or 'src'}: {key[2]} is listed and is no circle: delete the entry")
    return bad


sys.exit(main())
