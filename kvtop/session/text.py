"""Text from outside, made safe for files that people open."""

from __future__ import annotations

import html


def plain(text: str) -> str:
    r"""One line: what is not printable becomes `\xNN`, `\uNNNN` or `\UNNNNNNNN`."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escape(ord(char)) for char in text)


def _escape(code: int) -> str:
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def html_text(text: str) -> str:
    """`plain`, with HTML's own characters escaped: safe between tags and in attributes."""
    return html.escape(plain(text), quote=True)


def markdown_text(text: str) -> str:
    """`plain`, with what Markdown or HTML would read as markup made literal."""
    safe = html.escape(plain(text), quote=False)
    return "".join(f"\\{char}" if char in r"\`*_[]#|~" else char for char in safe)


def cell(text: str) -> str:
    """`plain`, and nothing that a spreadsheet would run as a formula."""
    safe = plain(text)
    return f"'{safe}" if safe.startswith(("=", "+", "-", "@")) else safe
