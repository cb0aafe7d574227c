"""The forms of a server address that `--url` accepts, made into one."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

from kvtop.errors import UsageError

DEFAULT_PORT = 8000
"""Where vLLM listens when nothing else is said."""

_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252}[A-Za-z0-9_.])?\Z")
_PATH = re.compile(r"[A-Za-z0-9._~!$&'()*+,;=:@%/-]*\Z")
_REMEDY = "give the address of a vLLM server, for example http://127.0.0.1:8000"


def normalize_url(text: str) -> str:
    """Make a server's base URL of what the user typed.

    Accepted: `http://host:port`, `https://host`, `host:port`, `host`, `:port`, `port`, each
    with or without a root path and with or without `/metrics` at the end. Without a scheme
    it is http; without scheme and port the port is 8000; a port alone is on loopback.

    Args:
        text: The value of `--url`.

    Returns:
        Scheme, host, port (where one was given or assumed) and root path; no slash and no
        `/metrics` at the end.

    Raises:
        UsageError: It is none of these.
    """
    given = text.strip()
    if not given or len(given) > 2000 or not given.isprintable() or " " in given:
        raise _bad(text, "is not a URL")
    if re.match(r":?\d+(/|\Z)", given):
        given = f"127.0.0.1:{given.lstrip(':')}"
    has_scheme = "://" in given
    try:
        parts = urlsplit(given if has_scheme else f"http://{given}")
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise _bad(text, "has no valid host and port") from None
    if parts.scheme not in ("http", "https"):
        raise _bad(text, "is neither http nor https")
    if "@" in parts.netloc:
        raise _bad(text, "carries a user name, which kvtop does not send")
    if parts.query or parts.fragment or "?" in given or "#" in given:
        raise _bad(text, "has a ? or # part")
    # Python 3.10 takes anything between brackets for a host name.
    brackets = "[" in parts.netloc and ":" not in host
    if port == 0 or not _is_host(host) or brackets or parts.netloc.endswith(":"):
        raise _bad(text, "has no valid host and port")
    path = parts.path.rstrip("/")
    if path == "/metrics" or path.endswith("/metrics"):
        path = path[: -len("/metrics")].rstrip("/")
    if not _PATH.match(path):
        raise _bad(text, "has a path that is not valid in a URL")
    if port is None and not has_scheme:
        port = DEFAULT_PORT
    shown = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{shown}{'' if port is None else f':{port}'}{path}"


def short_name(url: str) -> str:
    """The base URL without its scheme, as it is shown: `127.0.0.1:8000`."""
    return url.split("://", 1)[-1]


def _is_host(host: str) -> bool:
    if ":" in host:
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            return False
        return True
    return bool(_HOST.match(host)) and ".." not in host


def _bad(text: str, what: str) -> UsageError:
    shown = "".join(c if c.isprintable() else "?" for c in text[:100])
    return UsageError(f"--url {shown!r} {what}", _REMEDY)
