"""Mutants of this project's packages: small code changes that are generated from the syntax trees of the modules.

Mutants never change docstrings, annotations, messages, or checks that only raise exceptions. They also don't
change code that `parity check` deliberately doesn't run, such as dropout, device handling, and distributed training.
"""

from __future__ import annotations

import ast
import copy
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
MODULES = (  # a package may contain only some of these modules
    *("attention", "backward", "backward_trace", "block", "decoder", "embedding", "encoder", "fast", "feed_forward"),
    *("functional", "layers", "masks", "optimizer", "part", "search", "search_loop", "search_rules", "training"),
    "transformer",
)
# Code that contains one of these words handles devices, dropout, or weight initialization.
NOT_COMPARED = re.compile(
    r"(?i)dropout|keep\b|\brngs?\b|seed|mesh|device|shard|replica|autocast|compil|export|annotate"
)
SKIPPED = re.compile(  # names of functions that aren't mutated; some are hooks of torch's load_state_dict
    r"(?i).*dropout.*|draw_keep|extra_repr|from_file|get_config|__getstate__|_.*rng.*|_normal_table|_complete|_follow"
)
CHECKS = re.compile(r"(self\.|\w+\.)*_?(check|assert|warn)_?\w*\(")
BINARY: dict[type, tuple[type, ...]] = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,),
    ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mult, ast.Mod),
    ast.Mod: (ast.FloorDiv,),
    ast.Pow: (ast.Mult,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
}
COMPARISON: dict[type, tuple[type, ...]] = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
PAIRS = (
    *("max min", "amax amin", "maximum minimum", "argmax argmin", "reduce_max reduce_min", "any all", "sum mean"),
    *("sum prod", "zeros ones", "zeros_like ones_like", "floor ceil", "sin cos", "sqrt square", "exp log", "log1p log"),
    *("reduce_sum reduce_mean", "rsqrt sqrt", "reduce_any reduce_all", "logical_and logical_or", "cumsum cumprod"),
    *("full empty", "less less_equal", "greater greater_equal", "fmin fmax", "relu gelu", "range arange"),
)
TWINS = {first: second for pair in PAIRS for first, second in (pair.split(), pair.split()[::-1])}
# If a variable is replaced with a different one, the mutant usually just raises an exception. Therefore, only about
# 1 / NAMES of all uses of variables are mutated.
NAMES = 4
TRANSPOSED = ("T", "mT")
SIMPLE = (ast.Name, ast.Attribute, ast.Call, ast.Subscript)  # expressions that don't need parentheses


@dataclass(frozen=True)
class Mutant:
    """One change to the code of a module.

    Attributes:
        package: The name of the package.
        module: The name of the module.
        where: The names of the class and the function that contain the change, separated by dots.
        line: The line number in the file.
        kind: The mutation operator.
        old: The text to replace.
        new: The replacement.
        start: The offset of the text in the file, in bytes of UTF-8.
        lines: The first and the last line of the changed statement. Only cases that run one of these lines can detect
            the change. None for statements outside functions.
    """

    package: str
    module: str
    where: str
    line: int
    kind: str
    old: str
    new: str
    start: int
    lines: tuple[int, int] | None

    @property
    def key(self) -> str:
        """The name of the mutant, which is unique as long as the source code doesn't change."""
        return f"{self.package}.{self.module}:{self.start} {self.kind}: {self.old} -> {self.new}"

    @property
    def place(self) -> str:
        """The file, the line number, and the function."""
        return f"{self.package}/{self.module}.py:{self.line} {self.where}"

    def edits(self) -> tuple[tuple[str, str, str], ...]:
        """Return an argument for ``edited_package`` that replaces the module's source code with the mutated code."""
        text = source(self.package, self.module)
        data, old = text.encode(), self.old.encode()
        changed = data[: self.start] + self.new.encode() + data[self.start + len(old) :]
        return ((self.module, text, changed.decode()),)


def source(package: str, module: str) -> str:
    """Return the text of a module, or an empty string if the package doesn't contain the module."""
    path = ROOT / package / f"{module}.py"
    return path.read_text("utf-8") if path.is_file() else ""


@cache
def mutants_of(package: str) -> Sequence[Mutant]:
    """Return all mutants of a package in source order."""
    found = [mutant for module in MODULES for mutant in mutants_of_text(package, module, source(package, module))]
    return list({mutant.key: mutant for mutant in found}.values())


def sample(mutants: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """Return a random sample of the mutants, sorted in source order. The sample depends only on the arguments."""
    if count >= len(mutants):
        return list(mutants)
    chosen = sorted(random.Random(seed).sample(range(len(mutants)), count))
    return [mutants[i] for i in chosen]


def mutants_of_text(package: str, module: str, text: str) -> Iterator[Mutant]:
    """Yield the mutants of a module with the given source text."""
    tree = ast.parse(text)
    data, starts = text.encode(), [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    changes = _Changes(tree)
    for where, kind, node, new in changes.of_module():
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        old = data[start:end].decode()
        if new != ast.unparse(node):
            yield Mutant(package, module, where, node.lineno, kind, old, new, start, changes.lines)


Change = tuple[str, str, Any, str]  # where, kind, node to replace, replacement text


class _Changes:
    """Generates every possible mutation of a module."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.lines: tuple[int, int] | None = None  # lines of the statement that contains the last change
        # Header lines of the last visited function that isn't nested in another function.
        self.function: tuple[int, int] | None = None
        # Header lines of the enclosing function while an inner function is mutated, otherwise None.
        self.outer: tuple[int, int] | None = None

    def of_module(self) -> Iterator[Change]:
        yield from self._of_body(self.tree.body, "", [])

    def _of_body(self, body: Sequence[ast.stmt], where: str, names: list[str]) -> Iterator[Change]:
        for statement in body:
            yield from self._of_statement(statement, where, names)

    def _of_statement(self, node: Any, where: str, names: list[str]) -> Iterator[Change]:
        text = ast.unparse(node)
        self.lines = _lines(node) if names or isinstance(node, ast.FunctionDef) else None
        if self.outer is not None:
            self.lines = self.outer
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                if not SKIPPED.fullmatch(node.name):
                    inside = f"{where}.{node.name}".strip(".")
                    yield from self._of_decorators(node, inside)
                    if is_inner := bool(names) and self.outer is None:
                        # TensorFlow runs copies of inner functions, and ``sys.settrace`` can't see the original lines.
                        self.outer = self.function
                    if isinstance(node, ast.FunctionDef) and self.outer is None:
                        self.function = _lines(node)
                    if isinstance(node, ast.FunctionDef):
                        names = [*_names(node), ""]  # a nonempty list means that the code is inside a function
                        for name, default in _defaults(node.args):
                            if name != "dtype":  # models are always built with an explicit dtype
                                yield from self._of_expression(default, inside, names)
                    yield from self._of_body(node.body, inside, names)
                    if is_inner:
                        self.outer = None
                return
            case ast.Import() | ast.ImportFrom() | ast.Raise() | ast.Assert() | ast.Pass():
                return
            case ast.Expr(value=ast.Constant()):
                return
            case ast.Expr() if CHECKS.match(text):
                return
            case ast.If() if all(isinstance(one, ast.Raise) for one in node.body) and not node.orelse:
                return
            case ast.Assign(targets=[ast.Name(id=str() as name)]) if name.startswith("__"):
                return
            case ast.Expr() | ast.AugAssign():
                yield from self._without(node, where)
            case ast.Assign() if where and not all(isinstance(target, ast.Name) for target in node.targets):
                yield from self._without(node, where)
            case ast.Assign(targets=[ast.Name(id=str() as name)]) if names.count(name) > 1:
                yield from self._without(node, where)
            case ast.If():
                if not NOT_COMPARED.search(ast.unparse(node.test)):
                    yield from ((where, "condition", node.test, value) for value in ("True", "False"))
                else:
                    yield from self._of_body(node.orelse, where, names)
                    return
            case ast.Break() | ast.Continue():
                yield where, "statement removed", node, "pass"
        if isinstance(node, ast.AugAssign):
            for operator in BINARY.get(type(node.op), ()):
                changed = copy.deepcopy(node)
                changed.op = operator()
                yield where, "operator", node, ast.unparse(changed)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "targets", "target") and not isinstance(value, list):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.stmt):
                    yield from self._of_statement(child, where, names)
                elif isinstance(child, ast.withitem):
                    yield from self._of_expression(child.context_expr, where, names)
                elif isinstance(child, ast.AST):
                    yield from self._of_expression(child, where, names)

    def _without(self, node: Any, where: str) -> Iterator[Change]:
        if not NOT_COMPARED.search(ast.unparse(node)):
            yield where, "statement removed", node, "pass"

    def _of_decorators(self, node: Any, where: str) -> Iterator[Change]:
        for decorator in node.decorator_list:
            if not NOT_COMPARED.search(ast.unparse(decorator)):
                yield where, "decorator removed", decorator, "(lambda same: same)"

    def _of_expression(self, node: Any, where: str, names: list[str]) -> Iterator[Change]:
        if not isinstance(node, ast.AST) or isinstance(node, ast.JoinedStr):
            return
        if isinstance(node, ast.expr) and not NOT_COMPARED.search(ast.unparse(node)):
            for kind, new in self._instead_of(node, names):
                text = new if isinstance(new, str) else ast.unparse(new)
                # Other expressions need parentheses, for example if an attribute access follows.
                is_simple = isinstance(new, (str, *SIMPLE)) or isinstance(node, ast.Constant)
                yield where, kind, node, text if is_simple else f"({text})"
        if isinstance(node, ast.IfExp) and NOT_COMPARED.search(ast.unparse(node.test)):
            return
        if isinstance(node, ast.Call) and NOT_COMPARED.search(ast.unparse(node.func)):
            if node.args:
                yield from self._of_expression(node.args[0], where, names)
            return
        for child in ast.iter_child_nodes(node):
            if isinstance(node, ast.AnnAssign) and child is node.annotation:
                continue
            yield from self._of_expression(child, where, names)

    def _instead_of(self, node: Any, names: list[str]) -> Iterator[tuple[str, Any]]:
        """Yield (kind, replacement) for each change to a node."""
        match node:
            case ast.BinOp():
                for operator in BINARY.get(type(node.op), ()):
                    yield "operator", ast.BinOp(node.left, operator(), node.right)
                if isinstance(node.op, ast.MatMult | ast.Sub | ast.Div):
                    yield "operands swapped", ast.BinOp(node.right, node.op, node.left)
                yield from (("operand removed", node.left), ("operand removed", node.right))
            case ast.Compare(ops=[operator]):
                for other in COMPARISON.get(type(operator), ()):
                    yield "comparison", ast.Compare(node.left, [other()], node.comparators)
            case ast.BoolOp():
                swapped: ast.boolop = ast.Or() if isinstance(node.op, ast.And) else ast.And()
                yield "boolean operator", ast.BoolOp(swapped, node.values)
                yield from (("operand removed", value) for value in node.values)
            case ast.UnaryOp():
                yield "operator removed", node.operand
            case ast.IfExp():
                yield from (("condition", node.body), ("condition", node.orelse))
            case ast.Constant():
                yield from (("constant", ast.Constant(value)) for value in _constants(node.value))
            case ast.Name(ctx=ast.Load()) if node.id in names and node.id not in ("self", "cls"):
                others = list(dict.fromkeys(name for name in names if name not in (node.id, "self", "cls", "")))
                is_chosen = (node.lineno + node.col_offset) % NAMES == 0
                if is_chosen and others and not NOT_COMPARED.search(other_name := _next(others, node)):
                    yield "name", ast.Name(other_name)
            case ast.Attribute(ctx=ast.Load()):
                yield from self._other_attributes(node)
            case ast.Slice():
                if node.lower is not None:
                    yield "slice", ast.unparse(ast.Slice(None, node.upper, node.step))
                if node.upper is not None:
                    yield "slice", ast.unparse(ast.Slice(node.lower, None, node.step))
            case ast.Call():
                yield from _other_calls(node)

    def _other_attributes(self, node: Any) -> Iterator[tuple[str, Any]]:
        if node.attr in TRANSPOSED:
            yield "transposition removed", node.value
        if node.attr in TWINS:
            yield "attribute", ast.Attribute(node.value, TWINS[node.attr])
        if isinstance(node.value, ast.Name) and node.value.id in ("self", "config", "settings", "plan", "cache"):
            seen = [
                other.attr
                for other in ast.walk(self.tree)
                if isinstance(other, ast.Attribute) and ast.dump(other.value) == ast.dump(node.value)
            ]
            others = [name for name in dict.fromkeys(seen) if name != node.attr and not NOT_COMPARED.search(name)]
            if others:
                yield "attribute", ast.Attribute(node.value, _next(others, node))


def _lines(statement: Any) -> tuple[int, int]:
    """Return the first and the last line of a statement, excluding nested statements."""
    first = min([statement.lineno, *(one.lineno for one in getattr(statement, "decorator_list", []))])
    body = getattr(statement, "body", None)
    return first, max(first, body[0].lineno - 1) if body else statement.end_lineno


def _names(function: ast.FunctionDef) -> list[str]:
    """Return the names of a function's parameters and variables. A variable that is assigned twice is listed twice."""
    arguments = function.args
    found = [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    stored = (node for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    shared = {name for node in ast.walk(function) if isinstance(node, ast.Nonlocal) for name in node.names}
    return [*found, *(node.id for node in stored if node.id not in shared)]


def _defaults(arguments: ast.arguments) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield the names and the defaults of the parameters that have a default."""
    positional = [*arguments.posonlyargs, *arguments.args][-len(arguments.defaults) :] if arguments.defaults else []
    for one, default in (
        *zip(positional, arguments.defaults, strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ):
        yield one.arg, default


def _next(others: list[str], node: Any) -> str:
    """Return the name that the position of the node in the source code selects from the given names."""
    return others[(node.lineno + node.col_offset) % len(others)]


def _constants(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        found: list[Any] = [value + 1, value - 1, 2 * value, 0, 1]
    elif isinstance(value, float):
        found = [2.0 * value, value + 1.0, 0.0, 1.0]
    elif isinstance(value, str):
        found = [value + "_"]
    else:
        return []
    return [other for other in dict.fromkeys(found) if other != value]


def _other_calls(node: Any) -> Iterator[tuple[str, Any]]:
    positional = [one for one in node.args if not isinstance(one, ast.Starred)]
    if len(positional) == len(node.args):
        for i, (first, second) in enumerate(pairwise(node.args)):
            swapped = [*node.args[:i], second, first, *node.args[i + 2 :]]
            yield "arguments swapped", ast.Call(node.func, swapped, node.keywords)
        if node.args:
            yield "call removed", node.args[0]
    if isinstance(node.func, ast.Attribute) and not (
        isinstance(node.func.value, ast.Name) and node.func.value.id in ("self", "np", "torch", "jnp", "tf", "F", "jax")
    ):
        yield "call removed", node.func.value
    for i in range(len(node.keywords)):
        rest = [*node.keywords[:i], *node.keywords[i + 1 :]]
        yield "argument removed", ast.Call(node.func, node.args, rest)
