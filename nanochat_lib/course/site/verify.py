"""What a finished site must keep: working links, words for every picture, nothing from other hosts, no answer shown.

The files are read as they lie; nothing is fetched. Problems come as lines that name the page.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from nanochat_lib.course.grammar import Cell
from nanochat_lib.course.leaks import answers, shown

TEXT = (".html", ".js", ".css", ".json", ".txt", ".xml", ".svg", ".md", ".ipynb", ".py")
LOADS = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
    "embed": "src",
}
LOADING_LINKS = {"stylesheet", "icon", "shortcut", "preload", "modulepreload", "manifest", "search"}
CSS_URL = re.compile(r"""(?:url\(\s*['"]?|@import\s+['"])([^'")\s]+)""")
SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)
EXTERNAL = re.compile(r"https?://[\w.-]+\.[a-z]{2,}(:\d+)?(/\S*)?|mailto:[^@\s]+@[^@\s]+\.[a-z]+", re.IGNORECASE)
VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}


@dataclass
class Page:
    """What one HTML file links to, loads and shows."""

    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    bare: list[str] = field(default_factory=list)  # pictures without words
    text: list[str] = field(default_factory=list)  # all text and attribute values, in order
    scripts: list[str] = field(default_factory=list)


class Reader(HTMLParser):
    """Fills a Page. The text of a page comes without its tags, so highlighted code reads as code again."""

    def __init__(self, page: Page) -> None:
        super().__init__(convert_charrefs=True)
        self.page, self.svgs, self.inside = page, [], ""

    def handle_starttag(self, tag: str, attrs: list) -> None:
        given = {name: value or "" for name, value in attrs}
        page = self.page
        page.text += [value for name, value in given.items() if name not in ("class", "style", "id")]
        page.ids |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag == "a" and "href" in given or "xlink:href" in given and tag == "a":
            page.links.append(given.get("href", given.get("xlink:href", "")))
        if tag in LOADS and given.get(LOADS[tag]):
            page.loads.append(given[LOADS[tag]])
        if tag == "link" and LOADING_LINKS & set(given.get("rel", "").lower().split()):
            page.loads.append(given.get("href", ""))
        page.loads += CSS_URL.findall(given.get("style", ""))
        self.inside = tag if tag in ("script", "style") else ""
        self._picture(tag, given)

    def _picture(self, tag: str, given: dict[str, str]) -> None:
        """Notes an <img> without alt, or with its own file's name as alt, and an <svg> that says nothing."""
        if tag == "img":
            words = given.get("alt", "").strip()
            if not words or words in (given.get("src"), Path(unquote(given.get("src", ""))).name):
                cell = f"cell {given['data-cell']}: " if "data-cell" in given else ""
                self.page.bare.append(f"{cell}{given.get('src', '')[:80]}")
        if tag == "svg":
            told = given.get("aria-label") or given.get("aria-labelledby") or given.get("aria-hidden") == "true"
            self.svgs.append(bool(told))
        if tag == "title" and self.svgs:
            self.svgs[-1] = True

    def handle_endtag(self, tag: str) -> None:
        if tag == "svg" and self.svgs and not self.svgs.pop():
            self.page.bare.append("an <svg> without aria-label or title")
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside == "style":
            self.page.loads += CSS_URL.findall(data)
        if self.inside == "script":
            self.page.scripts.append(data)
        self.page.text.append(data)

    def handle_comment(self, data: str) -> None:
        self.page.text.append(data)


def read(path: Path) -> Page:
    page = Page()
    reader = Reader(page)
    reader.feed(path.read_text(encoding="utf-8"))
    reader.close()
    return page


def problems(folder: Path) -> list[str]:
    """Lines about every page below `folder`: its links and anchors, the files that it loads, pictures without words."""
    pages = {path.resolve(): read(path) for path in sorted(folder.rglob("*.html"))}
    if not pages:
        return [f"{folder} holds no page"]
    lines = []
    for path, page in pages.items():
        name = path.relative_to(folder.resolve()).as_posix()
        lines += [f"{name}: {line}" for href in page.links for line in link_problem(href, path, pages)]
        lines += [f"{name}: loads {url}, {line}" for url in page.loads for line in load_problem(url, path)]
        lines += [f"{name}: a picture without words for it: {picture}" for picture in page.bare]
    for path in sorted(folder.rglob("*.css")):
        name = path.relative_to(folder).as_posix()
        for url in CSS_URL.findall(path.read_text(encoding="utf-8")):
            lines += [f"{name}: loads {url}, {line}" for line in load_problem(url, path.resolve())]
    return lines


def link_problem(href: str, path: Path, pages: dict[Path, Page]) -> list[str]:
    """[] for a link that leads somewhere, else one line. Other hosts are looked at only for the address's form."""
    if SCHEME.match(href):
        good = EXTERNAL.fullmatch(href) or href.startswith("javascript:void")
        return [] if good else [f"the link {href} is no web address"]
    target = path_of(href, path)
    written = urlsplit(href).fragment
    anchors = {written, unquote(written)}  # a browser looks for the id as it is written, then decoded
    if target.is_dir():
        return [f"the link {href} leads to a folder, which shows nothing when the site is opened as files"]
    if not target.exists():
        return [f"the link {href} leads to no file"]
    if written and target in pages and not anchors & set(pages[target].ids):
        return [f"the link {href} leads to no place on that page"]
    return []


def load_problem(url: str, path: Path) -> list[str]:
    """[] for a file that lies beside the page, else one line."""
    if url.startswith(("data:", "#", "%23")):
        return []
    if SCHEME.match(url) or url.startswith("//"):
        return ["which another host has"]
    return [] if path_of(url, path).exists() else ["which does not exist"]


def path_of(url: str, path: Path) -> Path:
    """The file that a relative address on the page at `path` means."""
    inside = unquote(urlsplit(url).path)
    return (path.parent / inside).resolve() if inside else path


def leaks(folder: Path, chapters: dict[str, list[Cell]]) -> list[str]:
    """Lines naming the files below `folder` that show an answer or hidden text of these chapters."""
    whole, single = answers(chapters)
    wanted, lines = single | whole, []
    for path in sorted(folder.rglob("*")):
        if path.suffix in TEXT and path.is_file():
            page = read(path) if path.suffix == ".html" else None
            text = "".join(page.text) if page else path.read_text(encoding="utf-8", errors="replace")
            lines += shown(path.relative_to(folder).as_posix(), text, wanted)
    return lines
