"""Pages to static HTML, with Sphinx, MyST-NB and the book theme: the engine of Jupyter Book 1.

Jupyter Book 2 was tried first: its command downloads the theme from its makers' server at build time, and no package of
a registry holds that theme, so it builds nothing offline. These three bring all they need: theme, search, dark mode.
Formulas are set by MathJax, which comes as a package too. Its SVG output draws the glyphs itself: browsers load no font
for a page that is opened as a file.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

from nanochat_lib.errors import UserError

CSS = Path(__file__).with_name("site.css")
INSTALL = "NANOCHAT_EXTRAS=site bash scripts/setup.sh"
MATHJAX_FOLDER, MATHJAX = "sphinx-mathjax-offline", "tex-svg.js"
NEEDED = ("sphinx", "myst_nb", "sphinx_book_theme", MATHJAX_FOLDER, "sphinx_revealjs")
MATHJAX_SETTINGS = {
    "tex": {"inlineMath": [["\\(", "\\)"]], "displayMath": [["\\[", "\\]"]], "processEscapes": True},
    "options": {"enableMenu": False},
}
# MyST-NB asks the network for nothing, runs nothing, and takes HTML before pictures and text.
CONF = """\
project = {title!r}
html_title = {title!r}
author = copyright = ""
language = "en"
extensions = ["myst_nb"]
exclude_patterns = []
nb_execution_mode = "off"
nb_merge_streams = True
myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence", "deflist", "attrs_block"]
myst_heading_anchors = 4
myst_update_mathjax = False
mathjax_path = "tex-svg.js"
mathjax3_config = {mathjax!r}
html_theme = "sphinx_book_theme"
html_theme_options = {options!r}
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_use_index = False
html_show_sourcelink = False
html_show_copyright = False
html_show_sphinx = False
html_last_updated_fmt = None
pygments_style = "default"
suppress_warnings = ["misc.highlighting_failure"]
"""
OPTIONS = {
    "use_download_button": False,
    "use_repository_button": False,
    "use_issues_button": False,
    "use_source_button": False,
    "home_page_in_toc": True,
    "show_toc_level": 2,
    "show_navbar_depth": 1,
    "search_bar_text": "Search the course",
    "navbar_start": [],
    "navbar_center": [],
    "navbar_end": [],
    "navbar_persistent": [],
    "article_footer_items": [],
    "content_footer_items": [],
    "footer_content_items": [],
}


def need_packages() -> None:
    """UserError with the command that installs what is missing."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"the site needs {', '.join(missing)}; install the extra site: {INSTALL}")


def package_folder(name: str, inside: str) -> Path:
    """A folder with files that an installed package brings."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"the site needs {name}; install the extra site: {INSTALL}")
    return Path(next(iter(spec.submodule_search_locations))) / inside


def add_mathjax(folder: Path) -> None:
    """Puts MathJax, one file, into a folder."""
    shutil.copy(package_folder(MATHJAX_FOLDER, "static/mathjax") / MATHJAX, folder / MATHJAX)


def write_settings(source: Path, title: str) -> None:
    """conf.py and the files that every page needs."""
    source.mkdir(parents=True, exist_ok=True)
    settings = CONF.format(title=title, mathjax=MATHJAX_SETTINGS, options=OPTIONS)
    (source / "conf.py").write_text(settings, encoding="utf-8")
    (source / "_static").mkdir(exist_ok=True)
    shutil.copy(CSS, source / "_static" / CSS.name)
    add_mathjax(source / "_static")


def make_html(source: Path, target: Path, work: Path) -> None:
    """The pages in `source` as HTML in `target`; what Sphinx keeps for the next time goes to `work`.

    UserError with Sphinx's own words when it warns or fails.
    """
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-q", "-j", "2", "-d", str(work), str(source), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    told = [re.sub(r"^.*?/(?=[^/]*:\d*:? ?(?:WARNING|ERROR))", "", line) for line in done.stderr.splitlines()]
    told = [line for line in told if line.strip()]
    if done.returncode or any("WARNING" in line or "ERROR" in line for line in told):
        raise UserError("site: the pages could not be made:" + "".join(f"\n  {line}" for line in told[-12:]))
    for pattern in ("*macros.html", "**/*.map"):  # the theme's own templates, and what only its makers debug with
        for path in (target / "_static").glob(pattern):
            path.unlink()
    shutil.rmtree(target / "_sources", ignore_errors=True)
