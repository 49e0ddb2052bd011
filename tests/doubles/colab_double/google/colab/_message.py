"""A fake of the messages that the kernel sends to the browser."""

from __future__ import annotations


class MessageError(Exception):
    """The browser refused the request or answered with an error."""
