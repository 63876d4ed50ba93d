"""What setup.py has compiled can be: mypyc takes some statements for less than they say, without a word."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _compiled() -> list[str]:
    """Paths of the modules that setup.py names."""
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "COMPILED":
            folders: dict[str, str] = ast.literal_eval(node.value)
            return [f"{folder}/{name}.py" for folder, names in folders.items() for name in names.split()]
    raise AssertionError("setup.py names no modules")


@pytest.mark.parametrize("path", _compiled())
def test_a_compiled_class_is_what_it_says(path: str) -> None:
    """No keywords of a class statement, which would be lost; no base that a native class cannot have."""
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.ClassDef):
            bases = [ast.unparse(base) for base in node.bases]
            assert not {"asyncio.Protocol", "msgspec.Struct"} & set(bases), node.name
            # ``Frozen`` is never compiled, and what it says of itself its heirs inherit.
            assert not node.keywords or (bases == ["Frozen"] and ast.unparse(node.keywords[0]) == "frozen=True"), (
                node.name
            )
