"""Parse the addresses that `fetch()` accepts, and remove secrets from addresses in messages and reports."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from colabkit.foundation import InvalidOption, call, cannot, kind_of, printable, user_path

WEB = "web"
DRIVE_FILE = "Drive file"
DRIVE_FOLDER = "Drive folder"
FSSPEC = "fsspec"

_EXPECTED = "a Drive ID or link, an https address or an fsspec URL"
_SHOWN_CHARS = 300
# Maximum length of a name: file systems allow 255 bytes, and programs add suffixes.
_NAME_BYTES = 200
# A Drive ID. Known IDs have 28, 33 or 44 characters; gdown also requires at least 25.
_DRIVE_ID = re.compile(r"[-\w]{25,}", re.ASCII)
_DRIVE_HOSTS = frozenset({"drive.google.com", "docs.google.com", "drive.usercontent.google.com"})
_DRIVE_PATHS = (
    (DRIVE_FOLDER, re.compile(r"/folders/([-\w]+)", re.ASCII)),
    (DRIVE_FILE, re.compile(r"/d/([-\w]+)", re.ASCII)),
)
_DRIVE_FOLDER_PAGES = ("folderview", "embeddedfolderview")
# Links that export a Google document; they count as web addresses, because they download an ordinary file.
_EXPORT = re.compile(r"/(export|pub)$")
_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)(://|::)")
_LOCAL = frozenset({"file", "local"})
# Minimum length of the query values that are removed from messages, since a shorter one, as in `download=1`, may also
# be an ordinary word.
_SECRET_CHARS = 8


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a file or folder to fetch.

    Attributes:
        kind: `WEB`, `DRIVE_FILE`, `DRIVE_FOLDER` or `FSSPEC`.
        text: the complete address, which can hold secrets; for a Drive file or folder, its ID.
        shown: a short form for messages, without userinfo, query and fragment; for Drive, the kind and the ID.
        name: the file name at the end of a web address's path, made safe; otherwise empty.
        resource_key: the key that some older Drive links need besides the ID; empty if there is none.
    """

    kind: str
    text: str = field(repr=False)
    shown: str
    name: str = ""
    resource_key: str = field(default="", repr=False)

    def digest(self, *more: str) -> str:
        """Return a SHA-256 hex digest that identifies this address combined with `more`."""
        return hashlib.sha256(os.fsencode("\0".join([self.kind, self.text, *more]))).hexdigest()

    def scrubbed(self, text: object) -> str:
        """Return another program's message as one short line, without userinfo, queries and fragments of addresses."""
        found = " ".join(str(text).split())
        for secret in sorted(_secrets(self.text), key=len, reverse=True):
            found = found.replace(secret, "...")
        found = re.sub(r"(\w://)[^\s/@'\"]*@", r"\1", found)
        found = re.sub(r"([\w/])[?#][^\s'\"<>)]*", r"\1", found)
        return _limited(printable(found))


def address_of(source: str) -> Address:
    """Parse a source string into an `Address`.

    Raises:
        InvalidOption: if `source` is not an address that can be fetched.
    """
    if not isinstance(source, str) or not source.strip():
        found = "the address is empty" if isinstance(source, str) else f"the address is {kind_of(source)}"
        next_step = "Pass the address of the source" if isinstance(source, str) else "Pass the address as a string"
        raise InvalidOption(cannot("fetch the source", found, _EXPECTED, next_step))
    text = source.strip()
    if text.partition("/")[0] in _DRIVE_HOSTS:
        text = f"https://{text}"
    scheme = begun[1].lower() if (begun := _SCHEME.match(text)) else ""
    if scheme in ("http", "https"):
        return _web(text)
    if scheme and scheme not in _LOCAL:
        return Address(FSSPEC, text, _shown(text))
    if not scheme and _DRIVE_ID.fullmatch(text) and not os.path.lexists(text):
        return Address(DRIVE_FILE, text, f"{DRIVE_FILE} {text}")
    # The text may be an address without its scheme, so it may also contain secrets.
    bare = re.split(r"[?#]", text, maxsplit=1)[0].rpartition("@")[2]
    act = f"fetch {_shown(text) if scheme else _limited(printable(bare))!r}"
    copy_locally = ("Copy local files with ", call("stage"))
    raise InvalidOption(cannot(act, "it is a local path or has no scheme", _EXPECTED, copy_locally))


def _web(text: str) -> Address:
    act = f"fetch {_shown(text)!r}"
    try:
        parts = urlsplit(text)
        _ = parts.port
    except ValueError:
        parts = SplitResult("", "", "", "", "")
    if not parts.hostname:
        found = "its host is missing, or its host or port is invalid"
        raise InvalidOption(cannot(act, found, "a complete address", "Copy it again from the browser"))
    query = dict(parse_qsl(parts.query))
    if parts.hostname not in _DRIVE_HOSTS or _EXPORT.search(parts.path):
        return Address(WEB, text, _shown(text), safe_name(unquote(parts.path.rpartition("/")[2])))
    ids = [(kind, match[1]) for kind, pattern in _DRIVE_PATHS if (match := pattern.search(parts.path))]
    if not ids and "id" in query:
        is_folder = parts.path.rpartition("/")[2] in _DRIVE_FOLDER_PAGES
        ids = [(DRIVE_FOLDER if is_folder else DRIVE_FILE, query["id"])]
    if not ids or not re.fullmatch(r"[-\w]+", ids[0][1], re.ASCII):
        page = "it is a Drive page without the ID of a file or folder"
        next_step = "In the file's menu in Drive, choose Share, then Copy link"
        raise InvalidOption(cannot(act, page, "a link to one file or folder", next_step))
    kind, drive_id = ids[0]
    return Address(kind, drive_id, f"{kind} {drive_id}", resource_key=query.get("resourcekey", ""))


def local_target(to: str | os.PathLike[str], act: str) -> Path:
    """Return the path of a target that must be local or on a mount, expanded by `user_path()`.

    Raises:
        InvalidOption: if the target is the address of a bucket or server, which would become the name of a folder.
    """
    text = str(to)
    if "://" in text and not text.startswith("drive:"):
        found = f"the target {_shown(text)!r} is an address"
        rest = (call("pack"), " writes to addresses")
        next_step = ("Mount the bucket, or copy the files with the bucket's own tool; only ", *rest)
        raise InvalidOption(cannot(act, found, "a local path or a path on a mount", next_step))
    return user_path(to, act)


def safe_name(name: str) -> str:
    """Return an untrusted name as one safe path component, or an empty string if nothing usable is left.

    Only the text after the last slash or backslash counts, shortened to 200 bytes. A leading dot becomes an underscore,
    so that a server cannot create hidden files that programs read as configuration.
    """
    name = "".join(char for char in re.split(r"[/\\]", name)[-1] if char.isprintable()).strip()
    if not name.strip("."):
        return ""
    name = re.sub(r"^\.", "_", name).encode("utf-8", "ignore").decode()
    stem, dot, suffix = name.rpartition(".")
    if len(name.encode()) > _NAME_BYTES:
        kept = _NAME_BYTES - len(f"{dot}{suffix}".encode()) if stem and len(suffix) < 20 else _NAME_BYTES
        tail = f"{dot}{suffix}" if kept < _NAME_BYTES else ""
        name = name.encode()[:kept].decode("utf-8", "ignore") + tail
    return name


def _shown(text: str) -> str:
    """Return a short form of an address or chain (`zip://a::https://...`), without userinfo, queries and fragments."""
    links = []
    for link in text.split("::"):
        scheme, separator, rest = re.split(r"[?#]", link, maxsplit=1)[0].partition("://")
        host, slash, path = rest.partition("/")
        host = host.rpartition("@")[2]
        if not re.fullmatch(r"(\[.*\]|[^:]*)(:\d*)?", host):
            # An unescaped slash in the password ends the host early, so host and path may each hold a part of it.
            host, path = "...", path.rpartition("@")[2]
        links.append(f"{scheme}{separator}{host}{slash}{path}")
    return _limited(printable("::".join(links)))


def _limited(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def _secrets(text: str) -> set[str]:
    """Return the parts of an address, or of each link in a chain, that no message may show."""
    found: set[str] = set()
    for link in text.split("::"):
        # `urlsplit` raises ValueError for an invalid host, for example with an unclosed bracket.
        with contextlib.suppress(ValueError):
            parts = urlsplit(link)
            userinfo = parts.netloc.rpartition("@")[0]
            values = [pair.partition("=")[2] for pair in parts.query.split("&")]
            found |= {userinfo, *userinfo.split(":"), parts.query, parts.fragment}
            found |= {value for value in values if len(value) >= _SECRET_CHARS}
    return {text for one in found if one for text in (one, unquote(one))}
