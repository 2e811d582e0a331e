"""The table of rooms in jaxcb/README.md is true: each imports only what stands below it."""

import ast
import re
from pathlib import Path

import jaxcb

ROOT = Path(jaxcb.__file__).parent
ROW = re.compile(r"^\| (`[^|]*) \|", re.MULTILINE)


def rows_of_table() -> list[set[str]]:
    """Names in each row, from top to bottom: "engine" for ``engine/`` and for ``engine.py``."""
    table = (ROOT / "README.md").read_text().split("## Rooms")[1].split("\n\n")
    cells = ROW.findall("\n".join(table))
    return [{name.removesuffix("/").removesuffix(".py") for name in re.findall(r"`([^`]+)`", cell)} for cell in cells]


def imports(file: Path) -> set[str]:
    """Rooms that a module imports, inside functions and for types too."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            whole = [alias.name for alias in node.names]
        else:
            continue
        names.update(name.split(".")[1] for name in whole if name.startswith("jaxcb."))
    return names


def test_each_room_imports_only_what_stands_below_it():
    level = {name: i for i, row in enumerate(rows_of_table()) for name in row}
    upward = [
        f"{file.relative_to(ROOT)} imports jaxcb.{name}"
        for file in sorted(ROOT.rglob("*.py"))
        if (room := file.relative_to(ROOT).parts[0].removesuffix(".py")) != "__init__"
        for name in imports(file)
        if name in level and level[name] < level[room]
    ]
    assert not upward


def test_every_room_is_in_the_table():
    listed = set().union(*rows_of_table())
    rooms = {
        path.name.removesuffix(".py")
        for path in ROOT.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    assert rooms - {"__init__"} <= listed
