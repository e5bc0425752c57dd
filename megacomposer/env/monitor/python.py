"""Python snippets as the monitor reads them: parsed, never run."""

from __future__ import annotations

import ast
import re
import shlex
import warnings
from collections.abc import Iterator


def started_scripts(tree: ast.Module) -> Iterator[str]:
    """Command lines that the code gives to os.system, subprocess and the like."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        name = ast.unparse(node.func) if isinstance(node.func, ast.Attribute | ast.Name) else ""
        if not re.search(r"system|popen|run|call|check_output|Popen|getoutput|exec[lv]", name):
            continue
        words = node.args[0]
        if isinstance(words, ast.List | ast.Tuple):
            texts = [fold_text(item) for item in words.elts]
            yield shlex.join(text if text is not None else "?" for text in texts)
        elif (text := fold_text(words)) is not None:
            yield text


def parse_python(text: str) -> ast.Module | None:
    """The tree, or None where it is no Python that this interpreter parses."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def fold_text(node: ast.expr, depth: int = 0) -> str | None:
    """The text that an expression of constants makes by `+`, an f-string or join; else None."""
    if depth > 50:
        return None
    if isinstance(node, ast.Constant):
        value = node.value
        if isinstance(value, bytes):
            return value.decode("latin-1")
        return value if isinstance(value, str) else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Div):
        left, right = fold_text(node.left, depth + 1), fold_text(node.right, depth + 1)
        if left is None or right is None:
            return None
        return left + ("/" if isinstance(node.op, ast.Div) else "") + right
    if isinstance(node, ast.JoinedStr):
        parts = [fold_text(value, depth + 1) for value in node.values]
        return "".join("{}" if part is None else part for part in parts)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        glue = fold_text(node.func.value, depth + 1) if node.func.attr == "join" else None
        items = node.args[0] if node.args else None
        if glue is not None and isinstance(items, ast.List | ast.Tuple):
            texts = [fold_text(item, depth + 1) for item in items.elts]
            return glue.join(text for text in texts if text is not None)
    return None


def constant_strings(tree: ast.AST) -> tuple[str, ...]:
    """All texts that constants of the tree make."""
    found: dict[str, None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.BinOp | ast.JoinedStr | ast.Call):
            text = fold_text(node)
            if text:
                found[text] = None
    return tuple(found)
