"""Find sentences that native technical writers would phrase differently, in documentation, docstrings, and messages.

    python tests/prose.py [PATH ...]     print each such sentence with advice
    python tests/prose.py --update       write the counts that tests/test_prose.py allows

A match is a candidate, not a proven error. Rewrite the sentence; don't replace the matched word with a synonym.
"""

from __future__ import annotations

import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
BASELINE = ROOT / "tests" / "data" / "prose_baseline.json"
PACKAGES = ("reference_numpy", *(f"transformer_{name}" for name in ("bench", "jax", "parity", "spec", "tf", "torch")))
TEXTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs", "benchmarks", *PACKAGES, "tests")


class Rule(NamedTuple):
    """A construct that readers stumble over, with the advice for a rewrite."""

    name: str
    advice: str
    pattern: str
    example: str  # a sentence that the pattern matches
    rewrite: str  # the example as a native writer would phrase it
    flags: int  # flags for re.compile


class Sentence(NamedTuple):
    """A sentence that someone reads, and its location."""

    path: str  # relative to the root of the repository
    line: int
    kind: str  # markdown, docstring, comment, help, or message
    text: str


RULES = (
    Rule(
        "what clause",
        "Name the thing with a noun: 'Return the factor that ...', not 'Return what scales ...'.",
        r"(?:^|(?<=[.:;,(] )|(?<=and )|(?<=Return )|(?<=Yield )|(?<=is )|(?<=than )|(?<=of )|"
        r"(?<=from )|(?<=by )|(?<=with )|(?<=as ))[Ww]hat(?:ever)? (?!to\b|if\b|follows\b|happens\b|"
        r"version|kind|is wrong)[a-z`](?!.*\?\s*$)",
        "Return what scales a gradient to a norm of one.",
        "Return the factor that scales a gradient.",
        0,
    ),
    Rule(
        "fronted 'of'",
        "Start with the subject: 'If an implementation has several modes, ...'.",
        r"^(?:[\w*]+: )?(?:Of (?!course)|Behind |Likewise)|[,;:] of (?:which|each|the|several|equal|"
        r"those|these|all)\b",
        "Of our forms as of the others', the best counts.",
        "If an implementation has several modes, the best one is used.",
        0,
    ),
    Rule(
        "headless comment",
        "Start the comment with a noun or a full clause.",
        r"^(?:of|by|which|whose|that|those|likewise|behind) ",
        "of so many, int32 has the numbers",
        "maximum length in tokens; positions are int32",
        0,
    ),
    Rule(
        "pronoun for a noun",
        "Repeat the noun instead of 'that of' or 'those of'.",
        r"\b(?:[Tt]hat|[Tt]hose) of\b|\b(?:is|are|as|not|has|have|with) (?:that|those) (?:of|in|that|"
        r"which|by|with|on|at)\b|^Those\b|: Those\b",
        "That of PyTorch and of Optax is the same.",
        "PyTorch's and Optax's Adam are identical.",
        0,
    ),
    Rule(
        "inverted tail",
        "Write 'X is also ...' instead of 'so is X'.",
        r"(?:^|, and |; |, )(?:[Ss]o|[Nn]or|[Nn]either) (?:is|are|does|do|did|has|have|may|can|must|"
        r"was|were)\b",
        "A missing file is an error, and so is another version.",
        "A missing file or an unknown version is an error.",
        0,
    ),
    Rule(
        "'where' for 'if'",
        "Use 'if', 'when' or 'because'; 'where' is for places.",
        r"(?:^|: )Where \w|\bwhere (?:it|there|that|they|this|nothing|none|no|nobody|asked|several|"
        r"both|all|one|tied|a (?:port|file|block|case|model|search|run|checkpoint|process|framework|"
        r"text|source|format))\b",
        "Where none does, the port runs twice.",
        "If none of them does, the port runs twice.",
        0,
    ),
    Rule(
        "no actor",
        "Name who acts, and use 'requested' or 'specified'.",
        r"\b(?:was|were|is|are|be|been|not|it) asked (?:for|of)\b|\basks for\b|\basked for\b|"
        r"\basked of\b|\bis wanted\b",
        "Numbers were compared for everything that was asked for.",
        "`parity` compared every stage that you requested.",
        re.IGNORECASE,
    ),
    Rule(
        "things that speak",
        "Files and values contain or specify; people say and know.",
        r"\b(?:says?|said|tells?|knows?) (?:so|what|that|which|where|how|nothing|why|otherwise|more|"
        r"of)\b",
        "The file knows nothing of JAX.",
        "The file contains nothing specific to JAX.",
        re.IGNORECASE,
    ),
    Rule(
        "things that stand",
        "Use 'is', 'contains' or 'declares'.",
        r"\b(?:stands?|stood|lies?|lying)\b(?! for\b| out\b| in for\b)",
        "Shapes stand in the signature.",
        "Signatures declare shapes.",
        re.IGNORECASE,
    ),
    Rule(
        "'alone' for 'only'",
        "Use 'only' or 'by itself'.",
        r"(?<!let )\balone\b(?! or\b)",
        "The reference needs NumPy alone.",
        "The reference depends only on NumPy.",
        re.IGNORECASE,
    ),
    Rule(
        "quaint 'counts'",
        "Use 'ignores', 'includes' or 'applies'.",
        r"\bcounts?\b(?= (?:for nothing|too|once|as\b|only)|[.,;]| alone)|"
        r"\btakes? (?:no )?(?:further )?part\b|\bhas no part\b",
        "Rows of padding count for nothing here.",
        "The loss ignores padding rows.",
        re.IGNORECASE,
    ),
    Rule(
        "'another' for 'different'",
        "Use 'different', or name the difference.",
        r"\b(?:another|other) (?:\w+ )?than\b|\b(?:is|are|has|have|had|got|finds?|found|computes?|"
        r"generates?|returns?) (?:another|others?|something else|anything else)\b(?! \w+ (?:of|that))|"
        r"\bgot others\b|\bin another (?:order|way|form|dtype|shape)\b|\bof another (?:shape|dtype|"
        r"kind|order|config|model|version)\b",
        "The process has got others in its batch.",
        "The process has a different batch.",
        re.IGNORECASE,
    ),
    Rule(
        "'of its own'",
        "Use 'your', 'its own' or 'separate' before the noun.",
        r"\bof (?:its|their|one's|your|our|his) own\b|\ba \w+(?: \w+)? of (?:yours|ours|one's)\b|"
        r"\bof ours\b",
        "Each port runs in a process of its own.",
        "Each port runs in a separate process.",
        re.IGNORECASE,
    ),
    Rule(
        "'is no X'",
        "Negate the verb: 'isn't a', 'has not been', 'doesn't'.",
        r"(?<!there )(?<!There )\b(?:is|are|be|was|were) (?:no|none)\b(?! longer| need| guarantee|"
        r" way| such| difference)|\bhas none\b|\bis none of\b|(?:^|[.;:,] |and |that )(?:nothing|"
        r"nobody|none)\b (?:is|are|was|were|in|of|that|else|has|lies|goes|here|there|reaches|drops)\b",
        "A skip is no comparison.",
        "A skipped tensor has not been compared.",
        re.IGNORECASE,
    ),
    Rule(
        "'go on'",
        "Use 'continue', 'resume' or 'keep'.",
        r"\b(?:go(?:es|ing)?|went|gone) on\b",
        "Go on with the value that it returns.",
        "Use its return value.",
        re.IGNORECASE,
    ),
    Rule(
        "'behind' for 'after'",
        "Use 'after', 'before' or 'followed by'.",
        r"\bbehind\b(?! the scenes)|\bin front\b",
        "a layer norm behind the sum",
        "a sum followed by layer norm",
        re.IGNORECASE,
    ),
    Rule(
        "'again' and 'as it is'",
        "Use 'recompute', 'rerun', 'reload' or 'unchanged'.",
        r"\b(?:comput\w+|run|runs|ran|writt?en|writes?|read|reads|built|load\w*|draw\w*|execut\w*|"
        r"trac\w+|saved?) (?:\w+ ){0,3}again\b|\banew\b|\bas (?:it|they) (?:is|are|was|were)\b(?! not)",
        "The rest of a layer is computed again.",
        "The rest of the layer is recomputed.",
        re.IGNORECASE,
    ),
    Rule(
        "riddle ratio",
        "Give the comparison and a percentage or a factor.",
        r"\btimes as (?:long|fast|much|many|large|far|slow|wide)\b|\b0\.\d+ of\b|\ba (?:third|fourth|"
        r"quarter|fifth|sixth|seventh|eighth|tenth|twentieth|fiftieth|hundredth) of\b|\bso (?:many|"
        r"much|long)\b(?! as| that)",
        "It takes 0.93 of the time.",
        "It takes 7% less time.",
        re.IGNORECASE,
    ),
    Rule(
        "quaint word",
        "Use an ordinary word: 'fix', 'resume', 'return', 'instead of', 'also', 'except'.",
        r"\bbe it\b|\bbut for\b|\ball but\b|\bfor ever\b|\blikewise\b|\bin place of\b|\bin (?:its|"
        r"their) place\b|\b(?:mend(?:s|ed)?|thaw\w*|stranger|forges?|heard of|whatever else|"
        r"hands? (?:on|over)|brings? along|came? (?:back|along|out of)|comes? (?:back|along|out of|"
        r"in front)|so-manieth)\b",
        "Mend it, or declare it.",
        "Fix it, or declare it.",
        re.IGNORECASE,
    ),
)
PATTERNS = {rule.name: re.compile(rule.pattern, rule.flags) for rule in RULES}
CODE, LINK = re.compile(r"`+[^`]*`+"), re.compile(r"\[([^\]]*)\]\([^)]*\)")
ABBREVIATION = re.compile(r"(e\.g|i\.e|et al|vs|cf|Fig|Eq|approx)\.$")
SECTION = re.compile(r"(Args|Returns|Raises|Attributes|Taps|Yields|Examples?|Note):")
ENTRY = re.compile(r"(- |[a-z_*]+( \(.*?\))?: |[A-Z][A-Za-z]+(Error|Iteration): )")
DIRECTIVE = re.compile(r"(type: ignore(\[.*?\])?|noqa(: \w+)?)\s*#?\s*")  # comments for tools


def matches(text: str) -> list[str]:
    """Return the names of the rules that a sentence matches."""
    plain = LINK.sub(r"\1", CODE.sub("X", text))
    return [name for name, pattern in PATTERNS.items() if pattern.search(plain)]


def split(paragraph: str) -> list[str]:
    """Split a paragraph into its sentences of at least four words."""
    sentences, current = [], ""
    for part in re.split(r"(?<=[.!?])\s+(?=[A-Z`\[*(0-9\"$])", " ".join(paragraph.split())):
        current = f"{current} {part}".strip()
        if not ABBREVIATION.search(current):
            sentences.append(current)
            current = ""
    sentences.append(current)
    return [sentence for sentence in sentences if len(re.findall(r"[A-Za-z]{2,}", sentence)) >= 4]


def of_markdown(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each paragraph, without front matter, code, tables, and headings."""
    fence, in_front_matter, lines, start = "", text.startswith("---"), [], 0
    for number, raw in enumerate([*text.splitlines(), ""], 1):
        line = raw.strip()
        if in_front_matter:
            in_front_matter = number == 1 or line != "---"
        elif fence:
            if line.startswith(fence) and not line.strip("`:"):
                fence = ""
        else:
            opening = re.match("`{3,}", line)
            fence = opening.group() if opening else ""
            is_item = re.match(r"([-*+]|\d+\.)\s|: |!\[", line)
            if opening or is_item or not line or line.startswith(("|", "#", "$$", ":::")):
                if lines:
                    yield start, " ".join(lines)
                lines = []
                if not is_item:
                    continue
            start = start if lines else number
            lines.append(re.sub(r"^([-*+:]|\d+\.)\s+", "", line))


def of_docstring(text: str) -> Iterator[str]:
    """Yield each paragraph and each entry of a docstring."""
    lines: list[str] = []
    for line in [*text.splitlines(), ""]:
        stripped = line.strip()
        is_break = not stripped or SECTION.fullmatch(stripped)
        is_entry = line.startswith((" ", "-")) and ENTRY.match(stripped)
        if is_break or is_entry:
            yield " ".join(lines)
            lines = []
        if not is_break:
            lines.append(stripped)


def of_string(node: ast.expr) -> str:
    """Return the text of a literal string, with X for each formatted value. Other expressions have none."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(of_string(part) if isinstance(part, ast.Constant) else "X" for part in node.values)
    if isinstance(node, ast.BinOp):
        return of_string(node.left) + of_string(node.right)
    return ""


def of_comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each comment. Comments on consecutive lines are one comment."""
    text, start, end = "", 0, 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comment = DIRECTIVE.sub("", token.string.lstrip("#").strip())
            if token.line.strip().startswith("#") and end == token.start[0] - 1:
                text, end = f"{text} {comment}", token.start[0]
                continue
            yield start, text
            text, start = comment, token.start[0]
            end = start if token.line.strip().startswith("#") else 0
    yield start, text


def of_python(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line, kind, and text of each docstring, comment, help text, and raised message."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for paragraph in of_docstring(ast.get_docstring(node) or ""):
                yield node.body[0].lineno, "docstring", paragraph
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            yield node.lineno, "message", of_string(node.exc.args[0])
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                if keyword.arg in ("help", "description", "epilog"):
                    yield keyword.value.lineno, "help", of_string(keyword.value)
    for line, comment in of_comments(source):
        yield line, "comment", comment


def sentences(path: Path) -> Iterator[Sentence]:
    """Yield the sentences of a file, or of the Markdown and Python files in a directory."""
    files = [path] if path.is_file() else sorted([*path.rglob("*.md"), *path.rglob("*.py")])
    for file in files:
        relative, text = file.relative_to(ROOT).as_posix(), file.read_text("utf-8")
        if file.suffix == ".md":
            paragraphs = ((line, "markdown", paragraph) for line, paragraph in of_markdown(text))
        else:
            paragraphs = of_python(text)
        for line, kind, paragraph in paragraphs:
            for sentence in split(paragraph):
                yield Sentence(relative, line, kind, sentence)


def directory_of(path: str) -> str:
    """Return the first two parts of a path, by which flagged sentences are grouped."""
    return "/".join(path.split("/")[:2]) if path.count("/") > 1 else path.partition("/")[0]


def count() -> dict[str, int]:
    """Return the number of flagged sentences in each directory."""
    flagged: Counter[str] = Counter()
    for name in TEXTS:
        for sentence in sentences(ROOT / name):
            flagged[directory_of(sentence.path)] += bool(matches(sentence.text))
    return dict(sorted(flagged.items()))


def main() -> None:
    """Print flagged sentences, or write the baseline."""
    if sys.argv[1:] == ["--update"]:
        BASELINE.write_text(json.dumps(count(), indent=2) + "\n", "utf-8")
        return
    advice = {rule.name: rule.advice for rule in RULES}
    for name in sys.argv[1:] or TEXTS:
        for sentence in sentences(ROOT / name):
            for rule in matches(sentence.text):
                print(f"{sentence.path}:{sentence.line}: {sentence.text}\n    {rule}: {advice[rule]}")


if __name__ == "__main__":
    main()
