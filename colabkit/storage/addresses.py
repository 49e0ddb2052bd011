"""What a source is, told from its text alone, and how it may be shown: without userinfo, query and fragment."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from dataclasses import dataclass, field
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from colabkit.foundation import InvalidOption, cannot, printable

WEB = "web"
DRIVE_FILE = "Drive file"
DRIVE_FOLDER = "Drive folder"
FSSPEC = "fsspec"

_SHOWN_CHARS = 300
_NAME_BYTES = 200  # of the 255 that file systems allow
_DRIVE_ID = re.compile(r"[-\w]{25,}", re.ASCII)  # 28, 33 and 44 characters are seen; gdown asks for 25 as well
_DRIVE_HOSTS = frozenset({"drive.google.com", "docs.google.com", "drive.usercontent.google.com"})
_DRIVE_PATHS = (
    (DRIVE_FOLDER, re.compile(r"/folders/([-\w]+)", re.ASCII)),
    (DRIVE_FILE, re.compile(r"/d/([-\w]+)", re.ASCII)),
)
_DRIVE_FOLDER_PAGES = ("folderview", "embeddedfolderview")
_EXPORT = re.compile(r"/(export|pub)$")  # of a document, in a format that its query names: a file like any other
_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)(://|::)")
_LOCAL = frozenset({"file", "local"})
_SECRET_CHARS = 8  # shorter values of a query, as in download=1, are words that occur elsewhere


@dataclass(frozen=True, slots=True)
class Address:
    """A source.

    Attributes:
        kind: `WEB`, `DRIVE_FILE`, `DRIVE_FOLDER` or `FSSPEC`.
        text: all of it, never to be shown; of a Drive link the id.
        shown: what messages and reports may hold.
        name: the file name that the path of a web address ends with, empty where there is none.
        resource_key: what some older Drive links need beside the id.
    """

    kind: str
    text: str = field(repr=False)
    shown: str
    name: str = ""
    resource_key: str = field(default="", repr=False)

    def digest(self, *more: str) -> str:
        """Return hexadecimal digits that tell this source, and `more`, from any other."""
        return hashlib.sha256(os.fsencode("\0".join([self.kind, self.text, *more]))).hexdigest()

    def scrubbed(self, text: object) -> str:
        """Return what another program said in one line of bounded length, without secrets of any address in it."""
        found = " ".join(str(text).split())
        for secret in sorted(_secrets(self.text), key=len, reverse=True):
            found = found.replace(secret, "...")
        found = re.sub(r"(\w://)[^\s/@'\"]*@", r"\1", found)
        found = re.sub(r"([\w/])[?#][^\s'\"<>)]*", r"\1", found)
        return _limited(printable(found))


def address_of(source: str) -> Address:
    """Return what a source is.

    Raises:
        InvalidOption: if it is none that can be fetched.
    """
    if not isinstance(source, str) or not source.strip():
        found = "an empty text as source" if isinstance(source, str) else f"a source of type {type(source).__name__}"
        needed = "a Drive id or link, an https address or an fsspec URL, as text"
        raise InvalidOption(cannot("fetch it", found, needed, "Pass the address as a text"))
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
    # It may be an address whose beginning was lost, and hold as many secrets.
    bare = re.split(r"[?#]", text, maxsplit=1)[0].rpartition("@")[2]
    act = f"fetch {_shown(text) if scheme else _limited(printable(bare))!r}"
    needed = "a Drive id or link, an https address or an fsspec URL"
    raise InvalidOption(cannot(act, "a path of this machine", needed, "Copy files of a mount with stage()"))


def _web(text: str) -> Address:
    act = f"fetch {_shown(text)!r}"
    try:
        parts = urlsplit(text)
        _ = parts.port
    except ValueError:
        parts = SplitResult("", "", "", "", "")
    if not parts.hostname:
        raise InvalidOption(cannot(act, "no host in it", "a whole address", "Copy it again from the browser"))
    query = dict(parse_qsl(parts.query))
    if parts.hostname not in _DRIVE_HOSTS or _EXPORT.search(parts.path):
        return Address(WEB, text, _shown(text), safe_name(unquote(parts.path.rpartition("/")[2])))
    found = [(kind, match[1]) for kind, pattern in _DRIVE_PATHS if (match := pattern.search(parts.path))]
    if not found and "id" in query:
        is_folder = parts.path.rpartition("/")[2] in _DRIVE_FOLDER_PAGES
        found = [(DRIVE_FOLDER if is_folder else DRIVE_FILE, query["id"])]
    if not found or not re.fullmatch(r"[-\w]+", found[0][1], re.ASCII):
        needed = "the link of one file or folder"
        next_step = "Choose Share, then Copy link, in Drive's menu of the file"
        raise InvalidOption(cannot(act, "a Drive page without the id of a file or folder", needed, next_step))
    kind, drive_id = found[0]
    return Address(kind, drive_id, f"{kind} {drive_id}", resource_key=query.get("resourcekey", ""))


def safe_name(name: str) -> str:
    """Return the one path component that a name from elsewhere may be, empty if there is none in it.

    Only what follows the last slash of either kind counts; a leading dot, with which a server could place a file that
    programs read, becomes an underscore.
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
    """Return an address without userinfo, query and fragment, of each link of a chain (`zip://a::https://...`)."""
    links = []
    for link in text.split("::"):
        scheme, separator, rest = re.split(r"[?#]", link, maxsplit=1)[0].partition("://")
        host, slash, path = rest.partition("/")
        host = host.rpartition("@")[2]
        if not re.fullmatch(r"(\[.*\]|[^:]*)(:\d*)?", host):
            host = "..."  # a password with a character in it that ends the host
        links.append(f"{scheme}{separator}{host}{slash}{path}")
    return _limited(printable("::".join(links)))


def _limited(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def _secrets(text: str) -> set[str]:
    """Return what no message may hold of an address, of each link of a chain."""
    found: set[str] = set()
    for link in text.split("::"):
        with contextlib.suppress(ValueError):  # brackets around what is no address
            parts = urlsplit(link)
            userinfo = parts.netloc.rpartition("@")[0]
            values = [pair.partition("=")[2] for pair in parts.query.split("&")]
            found |= {userinfo, *userinfo.split(":"), parts.query, parts.fragment}
            found |= {value for value in values if len(value) >= _SECRET_CHARS}
    return {text for one in found if one for text in (one, unquote(one))}
