"""The directive ``facts``, which generates tables from the source code and from committed results."""

from __future__ import annotations

import ast
import dataclasses
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from marian_results import marian
from pair_results import port_bugs, wild
from panes import PACKAGES, ROOT, TITLES
from results import conformance, devices, mutation, selftest, speed, tolerances, verdict
from speeds import compared, fractions_of_peak, goals, kept, translated
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective
from transformers_results import transformers

from transformer_spec import config as configs
from transformer_spec import training_config
from transformer_spec.names import parameter_shapes, tap_shapes
from transformer_spec.presets import IMPLEMENTATIONS, TABLE_3

DATACLASSES = {
    "TransformerConfig": configs.TransformerConfig,
    "DropoutRates": configs.DropoutRates,
    "TrainingConfig": training_config.TrainingConfig,
}
DEFAULTS = {field.name: field.default for field in dataclasses.fields(configs.TransformerConfig)}
DEFAULTS["dropout"] = configs.DropoutRates()
MEANINGS = {  # descriptions of fields whose definitions have no comment
    "source_vocab_size": "size of the source vocabulary",
    "target_vocab_size": "size of the target vocabulary",
    "d_model": "width of the vector at each position",
    "num_heads": "number of attention heads per layer",
    "d_ff": "width of the hidden layer in the feed-forward network",
    "num_encoder_layers": "number of encoder layers, N in the paper",
    "num_decoder_layers": "number of decoder layers, N in the paper",
    "position_encoding": "positional encoding: sinusoids (section 3.5), learned (Table 3, row E), or relative (T5)",
    "output_bias": "whether the output projection has a bias",
    "activation": "activation function of the feed-forward network, section 3.3",
    "dropout": "dropout rates, as a `DropoutRates`",
    "pad_id": "ID of the padding token",
    "bos_id": "ID of the BOS token, the first input of the decoder",
    "eos_id": "ID of the EOS token, which ends a sentence",
    "label_smoothing": "probability that label smoothing takes from the correct label, section 5.4",
    "warmup_steps": "number of steps during which the learning rate increases, section 5.3",
    "beta1": "decay rate of Adam's first moment, section 5.3",
    "beta2": "decay rate of Adam's second moment, section 5.3",
    "epsilon": "Adam's epsilon, section 5.3",
    "activation_checkpointing": "whether the backward pass recomputes each layer from its inputs, to save memory",
}
# All sizes are different, so that ``symbolic`` can determine the symbol for each number in a shape.
SIZES = {"d_model": 110, "d_ff": 170, "source_vocab_size": 190, "max_length": 230}
HEADS, D_K, D_V = 11, 7, 13
SYMBOLS = {
    110: "d_model",
    170: "d_ff",
    190: "V",
    230: "max_length",
    30: "relative_buckets",
    11: "H",
    7: "d_k",
    13: "d_v",
    77: "H·d_k",
    143: "H·d_v",
    3: "B",
    5: "S",
    6: "T",
}


def comments(cls: type) -> dict[str, str]:
    """Return the comment on each field of a dataclass, from the same line or the line above in its source code."""
    path = Path(str(__import__(cls.__module__, fromlist=[""]).__file__))
    text = path.read_text("utf-8")
    owner = next(node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == cls.__name__)
    fields = {node.lineno: node.target.id for node in owner.body if isinstance(node, ast.AnnAssign)}
    found: dict[str, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            words = re.sub(r"^type: ignore\S*\s*#?", "", token.string.lstrip("# ")).lstrip("# ")
            line, alone = token.start[0], not token.line[: token.start[1]].strip()
            name = fields.get(line + alone)
            if name and words:
                found[name] = words
    return found


def code(value: Any) -> str:
    """Return the content of a table cell that shows a default value."""
    return f"`{value!r}`" if not isinstance(value, configs.DropoutRates) else "see below"


def default(field: dataclasses.Field[Any]) -> str:
    """Return the content of a table cell that shows a field's default value, or ``required``."""
    if field.default is not dataclasses.MISSING:
        return code(field.default)
    return "required" if field.default_factory is dataclasses.MISSING else "see below"


def users(name: str) -> str:
    """Return the non-default values of a ``TransformerConfig`` field, and the presets that use each value."""
    by: dict[str, list[str]] = {}
    for preset, fields in configs.PRESETS.items():
        value = fields.get(name, DEFAULTS.get(name))
        if name == "dropout" and not isinstance(value, configs.DropoutRates):
            value = configs.DropoutRates(**value)
        if value != DEFAULTS.get(name):
            shown = ", ".join(f"{k} {v}" for k, v in dataclasses.asdict(value).items()) if name == "dropout" else value
            by.setdefault(str(shown), []).append(preset)
    return "; ".join(f"`{value}`: {', '.join(presets)}" for value, presets in by.items())


def field_table(cls: type) -> Iterator[str]:
    """Yield the lines of a Markdown table that describes the fields of a dataclass."""
    model = cls is configs.TransformerConfig
    said = comments(cls)
    yield "| field | default | choices and meaning |" + " presets that set it |" * model
    yield "|---|---|---|" + "---|" * model
    for field in dataclasses.fields(cls):
        choices = ", ".join(f"`{choice}`" for choice in configs.CHOICES.get(field.name, ())) if model else ""
        meaning = "; ".join(part for part in (choices, said.get(field.name, MEANINGS.get(field.name, ""))) if part)
        yield f"| `{field.name}` | {default(field)} | {meaning} |" + f" {users(field.name)} |" * model


def symbolic(shape: tuple[int, ...]) -> str:
    """Return a shape as text, with the symbols in ``SYMBOLS`` instead of numbers."""
    return "[" + ", ".join(SYMBOLS.get(size, str(size)) for size in shape) + "]"


def name_tables() -> Iterator[str]:
    """Yield the lines of two Markdown tables, with the parameters and the taps of a model with one layer per stack."""
    config = configs.TransformerConfig(
        **SIZES,
        target_vocab_size=190,
        num_heads=HEADS,
        d_k=D_K,
        d_v=D_V,
        num_encoder_layers=1,
        num_decoder_layers=1,
        final_norm=True,
        attention_bias=True,
        output_bias=True,
        embedding_norm=True,
        position_encoding="learned",
    )
    relative = config.replace(position_encoding="relative", gated_feed_forward=True, relative_buckets=30)
    parameters = {**parameter_shapes(config), **parameter_shapes(relative)}
    taps = {**tap_shapes(config, 3, 5, 6), **tap_shapes(relative, 3, 5, 6)}
    for title, shapes in (("Parameters", parameters), ("Taps", taps)):
        yield from (f"## {title}", "", "| name | shape |", "|---|---|")
        yield from (f"| `{name}` | {symbolic(shape)} |" for name, shape in shapes.items())
        yield ""


def exit_codes() -> Iterator[str]:
    """Yield the lines of a Markdown table of the exit codes that the help text of each command lists."""
    yield from ("| source file of the command | exit codes |", "|---|---|")
    cli = sorted((ROOT / "transformer_parity" / "cli").glob("*.py"))
    for path in (*cli, ROOT / "transformer_bench" / "options.py"):
        for found in re.findall(r"^exit code: (.+(?:\n(?!\"\"\"|\n).+)*)", path.read_text("utf-8"), re.MULTILINE):
            yield f"| `{path.parent.name}/{path.name}` | {' '.join(found.split())} |"


def paper_section(summary: str) -> tuple[str, str]:
    """Return the section of the paper that a summary line cites, or an empty string, and the rest of the summary."""
    found = re.fullmatch(r"(.+?) \(Vaswani et al., 2017, (?:sections? )?(.+?)\)(.*)", summary)
    return (found[2], (found[1] + found[3]).rstrip(".")) if found else ("", summary.rstrip("."))


def summary(package: str, module: str) -> str:
    """Return the first line of a module's docstring."""
    docstring = ast.get_docstring(ast.parse((ROOT / package / f"{module}.py").read_text("utf-8")))
    return str(docstring).partition("\n")[0]


def shared() -> list[str]:
    """Return the names of the modules that all four packages contain, sorted by the section that they cite."""
    by_package = [{path.stem for path in (ROOT / package).glob("*.py")} for package in PACKAGES.values()]
    found = sorted(set.intersection(*by_package) - {"__init__"})
    return sorted(found, key=lambda name: (paper_section(summary(PACKAGES["numpy"], name))[0] or "no section", name))


def modules() -> Iterator[str]:
    """Yield the lines of a Markdown table of the modules that all four packages contain, with links to their API."""
    yield f"| paper | content | {' | '.join(TITLES[backend] for backend in PACKAGES)} |"
    yield "|---|---|" + "---|" * len(PACKAGES)
    for name in shared():
        section, what = paper_section(summary(PACKAGES["numpy"], name))
        links = " | ".join(f"[{name}](api/{package}/{name}/index.rst)" for package in PACKAGES.values())
        yield f"| {section} | {what} | {links} |"


def other_modules() -> Iterator[str]:
    """Yield the lines of a Markdown table of the modules that some packages don't contain."""
    yield from ("| package | module | content |", "|---|---|---|")
    for backend, package in PACKAGES.items():
        for path in sorted((ROOT / package).glob("*.py")):
            if path.stem not in ("__init__", *shared()):
                link = f"[{path.stem}](api/{package}/{path.stem}/index.rst)"
                yield f"| {TITLES[backend]} | {link} | {summary(package, path.stem).rstrip('.')} |"


def spec_modules() -> Iterator[str]:
    """Yield the lines of a Markdown table of the modules of ``transformer_spec``, with links to their API."""
    yield from ("| module | content |", "|---|---|")
    for path in sorted((ROOT / "transformer_spec").glob("*.py")):
        if path.stem != "__init__":
            link = f"[{path.stem}](api/transformer_spec/{path.stem}/index.rst)"
            yield f"| {link} | {summary('transformer_spec', path.stem).rstrip('.')} |"


def presets() -> Iterator[str]:
    """Yield the lines of a Markdown list of the presets."""
    for title, names in (("Table 3", TABLE_3), ("Implementations", IMPLEMENTATIONS)):
        yield f"- {title}: {', '.join(f'`{name}`' for name in names)}"


TABLES = {
    "modules": modules,
    "other-modules": other_modules,
    "spec-modules": spec_modules,
    "presets": presets,
    "names": name_tables,
    "exit-codes": exit_codes,
    "devices": devices,
    "verdict": verdict,
    "selftest": selftest,
    "tolerances": tolerances,
    "port-bugs": port_bugs,
    "wild": wild,
    "fractions_of_peak": fractions_of_peak,
    "goals": goals,
    "kept": kept,
    "translated": translated,
}


class Facts(SphinxDirective):
    """Show a table: one of ``TABLES``, or a table of a kind that requires a second argument, such as ``fields``."""

    required_arguments = 1
    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the table."""
        kind, *of = self.arguments
        if kind == "fields":
            lines = field_table(DATACLASSES[of[0]])
        elif kind == "speed":
            lines = speed(of[0])
        elif kind == "compared":
            lines = compared(of[0])
        elif kind == "mutation":
            lines = mutation(of[0])
        elif kind == "conformance":
            lines = conformance(of[0])
        elif kind == "marian":
            lines = marian(of[0])
        elif kind == "transformers":
            lines = transformers(of[0])
        elif kind in TABLES:
            lines = TABLES[kind]()
        else:
            raise ExtensionError(f"facts: unknown table {kind!r}")
        return self.parse_text_to_nodes("\n".join(lines), allow_section_headings=True)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("facts", Facts)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
