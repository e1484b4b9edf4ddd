"""Readability of the project's text: flagged sentences never increase, and introductory pages have none."""

from __future__ import annotations

import json
from pathlib import Path

import prose
import pytest

FOR_NEWCOMERS = ("README.md", "docs/index.md", "docs/quickstart.md")
SOURCE = '''"""Return what it holds."""

import argparse

LIMIT = 3  # of so many values
# A comment that continues
# on a second line.


def load(path):
    """Load a file from a path.

    Args:
        path: Path of the file
            to be loaded.

    Raises:
        OSError: If it is not there.
    """
    raise OSError(f"cannot read {path}, " "the file is missing")  # noqa: EM102


argparse.ArgumentParser(description="Compare two or more files.").add_argument("--all", help="print all of the files")
'''
MARKDOWN = """---
title: Not a sentence of the page
---
# A heading is not a sentence

A paragraph with `code` continues
on the next line. It has e.g. two sentences.

- An item of a list.
| a row | of a table |

```text
Text in a code block is ignored.
```
"""


@pytest.mark.parametrize("rule", prose.RULES, ids=lambda rule: rule.name)
def test_rule_matches_its_example_and_not_the_rewrite(rule):
    assert rule.name in prose.matches(rule.example)
    assert prose.matches(rule.rewrite) == []


def test_code_and_links_are_not_matched():
    assert prose.matches("See [the page](docs/what-stands-alone.md) about `go on` and `alone`.") == []


def test_sentences_of_python_are_docstrings_comments_messages_and_help():
    found = {(kind, text) for _, kind, paragraph in prose.of_python(SOURCE) for text in prose.split(paragraph)}
    assert found == {
        ("docstring", "Return what it holds."),
        ("docstring", "Load a file from a path."),
        ("docstring", "path: Path of the file to be loaded."),
        ("docstring", "OSError: If it is not there."),
        ("comment", "of so many values"),
        ("comment", "A comment that continues on a second line."),
        ("message", "cannot read X, the file is missing"),
        ("help", "Compare two or more files."),
        ("help", "print all of the files"),
    }


def test_sentences_of_markdown_exclude_code_tables_and_headings():
    found = [(line, text) for line, paragraph in prose.of_markdown(MARKDOWN) for text in prose.split(paragraph)]
    assert found == [
        (6, "A paragraph with `code` continues on the next line."),
        (6, "It has e.g. two sentences."),
        (9, "An item of a list."),
    ]


def test_flagged_sentences_match_the_baseline():
    allowed, counts = json.loads(prose.BASELINE.read_text("utf-8")), prose.count()
    risen = {name: (allowed.get(name, 0), now) for name, now in counts.items() if now > allowed.get(name, 0)}
    assert not risen, f"{risen}: run `python tests/prose.py {' '.join(risen)}`, and rewrite the new sentences"
    fallen = {name: (before, counts.get(name, 0)) for name, before in allowed.items() if before > counts.get(name, 0)}
    assert not fallen, f"{fallen}: run `python tests/prose.py --update` to keep the lower counts"


@pytest.mark.parametrize("page", FOR_NEWCOMERS)
def test_pages_for_newcomers_have_no_flagged_sentence(page):
    found = [sentence for sentence in prose.sentences(prose.ROOT / page) if prose.matches(sentence.text)]
    assert found == []


@pytest.mark.parametrize("kind", ["help", "message"])
def test_help_and_error_messages_have_no_flagged_sentence(kind):
    texts = [sentence for name in prose.PACKAGES for sentence in prose.sentences(prose.ROOT / name)]
    of_kind = [sentence for sentence in texts if sentence.kind == kind]
    assert len(of_kind) > 100, "the extraction must find the texts"
    assert [sentence for sentence in of_kind if prose.matches(sentence.text)] == []


def test_checked_text_files_exist():
    assert all(Path(prose.ROOT / name).exists() for name in (*prose.TEXTS, *FOR_NEWCOMERS))
