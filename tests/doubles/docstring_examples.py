"""An extension of mkdocstrings that shows the section `Example:` of a docstring as code."""

from __future__ import annotations

import re
from typing import Any

import griffe


class ExampleSections(griffe.Extension):
    """Rename the section `Example` to `Examples`, the only name for which griffe shows prompts as code."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
