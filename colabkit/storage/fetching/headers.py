"""What the headers and first bytes of a reply mean; pure functions."""

from __future__ import annotations

import codecs
import contextlib
import email.utils
import html
import re
import time
from email.message import Message
from urllib.parse import unquote_to_bytes

from colabkit.foundation import printable
from colabkit.storage.addresses import safe_name

HEAD_BYTES = 512
"""Bytes by which a page is recognised; browsers decide by as many (WHATWG, MIME Sniffing)."""

_HTML = re.compile(
    rb"\s*(<!--.*?-->\s*)*<(!doctype\s+html|html[\s>]|head[\s>]|script[\s>]|title>)", re.IGNORECASE | re.DOTALL
)
_HTML_TYPES = ("text/html", "application/xhtml+xml")
_HTML_NAMES = (".html", ".htm", ".xhtml")
_TITLE_CHARS = 80
_COUNT = "[0-9]{1,18}"  # more digits are no number of bytes, and thousands of them no number of Python's


def validator(headers: Message) -> str:
    """Return what tells this version of the bytes from any other, as `If-Range` takes it; empty if there is nothing.

    A strong ETag, else the time of the last change (RFC 9110, 13.1.5).
    """
    tag = headers.get("ETag", "").strip()
    return tag if tag and not tag.startswith("W/") else headers.get("Last-Modified", "").strip()


def total_bytes(headers: Message) -> int | None:
    """Return the announced length, None where there is none."""
    text = headers.get("Content-Length", "").strip()
    is_chunked = "chunked" in headers.get("Transfer-Encoding", "").lower()
    return int(text) if re.fullmatch(_COUNT, text) and not is_chunked else None


def content_range(headers: Message) -> tuple[int | None, int | None, int | None] | None:
    """Return first byte, last byte and total of a `Content-Range`, None for what is unknown or not one."""
    text = headers.get("Content-Range", "").strip()
    if not (found := re.fullmatch(rf"bytes\s+(?:({_COUNT})-({_COUNT})|\*)/({_COUNT}|\*)", text, re.IGNORECASE)):
        return None
    first, last, total = (None if text in (None, "*") else int(text) for text in found.groups())
    return first, last, total


def retry_after_s(headers: Message) -> float | None:
    """Return the seconds that a server asks to wait, from a number or a date; None where it does not."""
    text = headers.get("Retry-After", "").strip()
    if text.isdecimal():
        return float(text)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError):
        return None


def disposition_name(value: str | None) -> str:
    """Return the file name of a `Content-Disposition` (RFC 6266), safe as one path component; empty without one."""
    if not value:
        return ""
    if found := re.search(r"filename\*\s*=\s*\"?([\w.-]+)'[^']*'([^;\s\"]+)", value, re.IGNORECASE):
        try:
            codecs.lookup(found[1])
            return safe_name(unquote_to_bytes(found[2]).decode(found[1], "replace"))
        except (LookupError, ValueError):
            pass  # a character set that nobody knows: the plain form may be there as well
    if found := re.search(r'(?:^|[;\s])filename\s*=\s*(?:"((?:\\.|[^"\\])*)"|([^;]+))', value, re.IGNORECASE):
        name = re.sub(r"\\(.)", r"\1", found[1]) if found[1] is not None else found[2].strip()
        with contextlib.suppress(ValueError):
            name = name.encode("latin-1").decode("utf-8")  # what servers send, whatever the standard says
        return safe_name(name)
    return ""


def is_html(headers: Message | None, head: bytes, name: str) -> bool:
    """Return whether a page came where a file was asked for.

    Args:
        headers: of the reply, if they are known.
        head: the first `HEAD_BYTES`, or all if there are fewer.
        name: of the file; one that ends like a page is meant to be one.
    """
    if name.lower().endswith(_HTML_NAMES) or b"\0" in head:
        return False
    is_typed = headers is not None and headers.get_content_type() in _HTML_TYPES and "Content-Type" in headers
    return is_typed or _HTML.match(head.removeprefix(codecs.BOM_UTF8)) is not None


def html_title(text: bytes) -> str:
    """Return the title of a page as one short line, safe in a message; empty without one."""
    found = re.search(rb"<title[^>]*>(.*?)</title", text, re.IGNORECASE | re.DOTALL)
    title = " ".join(html.unescape(found[1].decode("utf-8", "replace")).split()) if found else ""
    title = printable(title)
    return title if len(title) <= _TITLE_CHARS else f"{title[:_TITLE_CHARS]}..."
