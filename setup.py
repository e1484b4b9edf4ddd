"""What pyproject.toml cannot say: the README as a package index shows it, where a relative link leads nowhere."""

import re
from pathlib import Path

from setuptools import setup

LINK = re.compile(r"!?\[([^]]+)\]\((?!https?:)([^)]+)\)")


def named(link: re.Match[str]) -> str:
    """Return the text of a link, and the file that it leads to."""
    text, target = link.groups()
    return text if target.startswith("#") else f"{text} ({target})"


setup(
    long_description=LINK.sub(named, Path(__file__).with_name("README.md").read_text("utf-8")),
    long_description_content_type="text/markdown",
)
