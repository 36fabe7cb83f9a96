"""Core and operator stay houses that one sees at a glance: few rooms, few floors, few arrows.

A room is a folder or a module directly in the package; an arrow, that one room imports another one. A room stands one
floor above the highest of those that it imports. Import-linter holds the order of the rooms, this holds their number.
"""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def rooms_of(package: Path) -> dict[str, set[str]]:
    """Return the rooms of a package, each with those that it imports."""
    rooms: dict[str, set[str]] = {}
    for file in sorted(package.rglob("*.py")):
        if file == package / "__init__.py":
            continue
        room = file.relative_to(package).with_suffix("").parts[0]
        rooms.setdefault(room, set()).update(_imported(file, package.name))
    return {room: (others & rooms.keys()) - {room} for room, others in rooms.items()}


def _imported(file: Path, package: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            if name.startswith(f"{package}."):
                yield name.split(".")[1]


def num_floors(rooms: Mapping[str, set[str]]) -> int:
    """Return how many rooms the longest chain of arrows has. Raises ValueError for rooms that import each other."""
    floors: dict[str, int] = {}
    while len(floors) < len(rooms):
        due = {room for room, others in rooms.items() if room not in floors and others <= floors.keys()}
        if not due:
            raise ValueError(f"rooms that import each other: {sorted(rooms.keys() - floors.keys())}")
        floors |= {room: 1 + max((floors[other] for other in rooms[room]), default=0) for room in due}
    return max(floors.values())


def test_core_has_at_most_twelve_rooms_on_five_floors() -> None:
    rooms = rooms_of(ROOT / "core" / "unbroken_core")
    assert len(rooms) <= 12, sorted(rooms)
    assert num_floors(rooms) <= 5, rooms


def test_the_operator_has_at_most_thirteen_rooms_and_fifty_arrows() -> None:
    rooms = rooms_of(ROOT / "operator" / "unbroken_operator")
    assert len(rooms) <= 13, sorted(rooms)
    assert sum(map(len, rooms.values())) <= 50, rooms
    assert num_floors(rooms) <= len(rooms)


def test_rooms_floors_and_circles_are_found(tmp_path: Path) -> None:
    package = tmp_path / "house"
    (package / "cellar").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "attic.py").write_text("import house.hall\nfrom house.cellar.wine import red\n")
    (package / "hall.py").write_text("def enter():\n    from house import cellar\n")
    (package / "cellar" / "wine.py").write_text("from house.cellar import shelf\nimport os\n")
    (package / "cellar" / "shelf.py").write_text("")
    rooms = rooms_of(package)
    assert rooms == {"attic": {"hall", "cellar"}, "hall": {"cellar"}, "cellar": set()}
    assert num_floors(rooms) == 3
    (package / "cellar" / "shelf.py").write_text("from house.hall import enter\n")
    with pytest.raises(ValueError, match=r"import each other: .*'hall'"):
        num_floors(rooms_of(package))
