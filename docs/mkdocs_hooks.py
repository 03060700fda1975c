"""
What mkdocs needs to show pages that also read well in the repository: links out of docs/, and names of the API.

Links to files outside docs/ lead to the repository if `repo_url` is set, and are shown without a link otherwise;
pictures from there are copied into the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
OUTWARD = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?P<target>\.\./[^)#\s]+)(?P<anchor>#[^)]*)?\)")
REFERENCE = re.compile(r"\[<code>([A-Za-z_.~]+)</code>\]")
TYPE = re.compile(r"<code>(?:`([^`<]+)`(?:, )?(\*optional\*)?|(\*optional\*))</code>")
SYMBOL = re.compile(r"^::: (\S+)", re.M)


def _outside(page: str, target: str) -> str | None:
    """Path in the repository of what a page links to, if it is not a part of the docs."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
    return None if path.startswith("docs/") else path


def on_files(files, config):
    for file in list(files.documentation_pages()):
        for match in OUTWARD.finditer(Path(file.abs_src_path).read_text(encoding="utf-8")):
            path = _outside(file.src_uri, match["target"])
            if match["picture"] and path and files.get_file_from_path(path) is None:
                files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown, page, config, files):
    def replaced(match: re.Match) -> str:
        path = _outside(page.file.src_uri, match["target"])
        if path is None:
            return match[0]
        if match["picture"]:
            return f"![{match['text']}]({posixpath.relpath(path, posixpath.dirname(page.file.src_uri) or '.')})"
        if config.repo_url:
            return f"[{match['text']}]({config.repo_url.rstrip('/')}/blob/main/{path}{match['anchor'] or ''})"
        return match["text"]

    return OUTWARD.sub(replaced, markdown)


def on_page_content(html, page, config, files):
    """
    Docstrings follow Hugging Face's style: types are in backticks, and other classes are named as [`Name`], which is
    linked where the API pages have it.
    """
    if not page.file.src_uri.startswith("api/"):
        return html
    symbols = {}
    for file in files.documentation_pages():
        for symbol in SYMBOL.findall(Path(file.abs_src_path).read_text(encoding="utf-8")):
            symbols[symbol.rsplit(".", 1)[1]] = symbol

    def linked(match: re.Match) -> str:
        name = match[1].rsplit(".", 1)[-1] if match[1].startswith("~") else match[1]
        symbol = symbols.get(name.rsplit(".", 1)[-1])
        code = f"<code>{name}</code>"
        return f'<autoref identifier="{symbol}">{code}</autoref>' if symbol else code

    def typed(match: re.Match) -> str:
        parts = [f"<code>{match[1]}</code>"] if match[1] else []
        return ", ".join(parts + ["optional"] * bool(match[2] or match[3]))

    return REFERENCE.sub(linked, TYPE.sub(typed, html))
