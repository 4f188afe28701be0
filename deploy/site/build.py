#!/usr/bin/python3
"""Makes a site of the repository's Markdown pages: build.py DIRECTORY.

Links between pages stay links between pages. The pages at the left are those of docs/README.md and the root. It uses
Python-Markdown, which Debian has, with its own extensions for tables and fenced code.
"""

import html
import pathlib
import re
import shutil
import subprocess
import sys

import markdown

ROOT = pathlib.Path(__file__).resolve().parents[2]
HERE = pathlib.Path(__file__).resolve().parent
FIRST = ["README.md", "ARCHITECTURE.md", "SECURITY.md", "SPECIFICATION.md", "CONTRIBUTING.md", "CHANGELOG.md"]
# README becomes the page that a directory shows.
INDEX = "index.html"


def pages():
    """Paths of the pages, relative to the root: those of the root first, then docs/."""
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "docs/*.md"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.split()
    return FIRST + sorted(names)


def target_of(page):
    path = pathlib.PurePosixPath(page)
    return str(path.with_name(INDEX) if path.name == "README.md" else path.with_suffix(".html"))


def title_of(text, page):
    heading = re.search(r"^# (.*)$", text, flags=re.M)
    return heading[1] if heading else page


def to_root(target):
    return "../" * target.count("/")


def with_links(body, page, known):
    """Has links to pages lead to what is made of them; files that are no pages are named without a link."""
    folder = pathlib.PurePosixPath(page).parent

    def link(match):
        name, _, anchor = match[1].partition("#")
        if re.match(r"[a-z]+:", name) or not name:
            return match[0]
        steps = []
        for part in (folder / name).parts:
            steps = steps[:-1] if part == ".." else steps + [part]
        page_there = "/".join(steps)
        if page_there not in known:
            return "" if (ROOT / page_there).exists() else match[0]
        there = to_root(target_of(page)) + target_of(page_there)
        return f'href="{there}{"#" + anchor if anchor else ""}"'

    return re.sub(r'href="([^"]*)"', link, body)


def slug(value, separator):
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", value.lower()).replace(" ", separator)


def render(page, text, titles):
    convert = markdown.Markdown(
        extensions=["tables", "fenced_code", "sane_lists", "toc"],
        extension_configs={"toc": {"slugify": slug}},
    )
    target = target_of(page)
    body = with_links(convert.convert(text), page, titles)
    menu = "\n".join(
        f'<a href="{to_root(target)}{target_of(other)}"{" class=here" if other == page else ""}>{html.escape(title)}</a>'
        for other, title in titles.items()
        if "/results/" not in other
    )
    return (HERE / "page.html").read_text().format(
        title=html.escape(titles[page]), root=to_root(target), menu=menu, body=body
    )


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__.splitlines()[0])
    site = pathlib.Path(sys.argv[1])
    texts = {page: (ROOT / page).read_text() for page in pages()}
    titles = {page: title_of(text, page) for page, text in texts.items()}
    for page, text in texts.items():
        path = site / target_of(page)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render(page, text, titles))
    shutil.copy(HERE / "style.css", site / "style.css")
    print(f"{len(texts)} pages: {site / INDEX}")


if __name__ == "__main__":
    main()
