"""A fake of the kernel's messages to the browser."""

from __future__ import annotations


class MessageError(Exception):
    """The browser refused the request or answered with an error."""
