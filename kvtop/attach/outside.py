"""Numbers and addresses that others wrote: read by strict rules, None where they do not hold.

Any user of the machine chooses command lines, process titles and file names freely.
"""

from __future__ import annotations

import ipaddress
import re

MAX_PORT = 65_535
"""Highest TCP port."""
_MAX_URL = 2_000
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252}[A-Za-z0-9_.])?")
_PATH = re.compile(r"(/[A-Za-z0-9._~!$&'()*+,;=:@%/-]*)?")
_IPV6 = re.compile(r"[0-9A-Fa-f:.]{2,45}")


def whole(text: str, max_digits: int) -> int | None:
    """A whole number from outside, not negative.

    `int` itself takes digits of every script, blanks and underscores, and raises for very
    long ones.

    Args:
        text: Anything.
        max_digits: Most digits.

    Returns:
        None: it is not written with 1 to `max_digits` of the digits 0 to 9.
    """
    if not (0 < len(text) <= max_digits and text.isascii() and text.isdecimal()):
        return None
    return int(text)


def port_number(text: str | None) -> int | None:
    """A TCP port, 1 to 65535; None where the text is none."""
    port = None if text is None else whole(text, 5)
    return port if port is not None and 0 < port <= MAX_PORT else None


def shown_host(host: str) -> str | None:
    """A host as it stands in a URL, IPv6 in brackets; None where it can be no host."""
    if ":" not in host:
        return host if _HOST.fullmatch(host) and ".." not in host else None
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return None
    return f"[{host}]" if _IPV6.fullmatch(host) else None


def base_url(scheme: str, host: str, port: int, path: str) -> str | None:
    """The base URL of a server.

    Args:
        scheme: `http` or `https`.
        host: From `shown_host`.
        port: 1 to 65535.
        path: Root path, empty or with a slash at its start and none at its end.

    Returns:
        None: the path has something that a URL cannot carry as it is.
    """
    if not 0 < port <= MAX_PORT or not _PATH.fullmatch(path):
        return None
    url = f"{scheme}://{host}:{port}{path}"
    return url if len(url) <= _MAX_URL else None


def visible(text: str, limit: int = 80) -> str:
    """Text from outside for a message: no control characters, bounded."""
    shown = "".join(c if c.isprintable() else "?" for c in text[:limit])
    return shown if len(text) <= limit else f"{shown}..."
