"""Reads YAML as its authors mean it: 1e-3 is a number, 12:00 is none, and no key is there twice."""

import re
from collections.abc import Iterator
from typing import Any

import yaml

from unbroken_core.vocabulary.errors import InputError

_NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+")
"""As in YAML 1.2 and JSON; PyYAML reads YAML 1.1, in which a number with an exponent needs a point and a sign."""
_NO_NUMBER = re.compile(r"[-+]?(?:0[0-7_]+|[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?)")
"""Numbers of base 8 and 60, of YAML 1.1 alone: 0100 would be 64, and 24:00 would be 1440."""
_MAX_SHOWN = 40


class _Loader(yaml.SafeLoader):
    """YAML 1.1 with the numbers of YAML 1.2; those of base 8 and 60 are texts."""

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> str:
        """Return the tag of a node."""
        if kind is yaml.ScalarNode and implicit[0] and _NO_NUMBER.fullmatch(value):
            return "tag:yaml.org,2002:str"
        return str(super().resolve(kind, value, implicit))  # type: ignore[no-untyped-call]  # PyYAML types no resolvers


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(f"^{_NUMBER.pattern}$"), list("-+0123456789."))


def read_yaml(text: str) -> Any:
    """Return what a text says; None where it is empty.

    Raises yaml.YAMLError, ValueError or RecursionError for a text that is none, InputError with the field's name for
    one that is there twice.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        for where, first, second in _repeated(node):
            raise InputError(f"{where}: is there twice, in lines {first} and {second}; want it once")
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _repeated(root: yaml.Node) -> Iterator[tuple[str, int, int]]:
    """Yield the path of each key that its mapping has already, and the two lines, from 1."""
    left: list[tuple[yaml.Node, str]] = [(root, "")]
    seen: set[int] = set()
    while left:
        node, where = left.pop()
        if id(node) in seen:  # An alias; it may lead to itself.
            continue
        seen.add(id(node))
        below: list[tuple[yaml.Node, str]] = []
        if isinstance(node, yaml.SequenceNode):
            below = [(item, f"{where}[{index}]") for index, item in enumerate(node.value)]
        elif isinstance(node, yaml.MappingNode):
            lines: dict[str, int] = {}
            for key, value in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    continue  # It is refused as a field that nobody knows.
                name = key.value[:_MAX_SHOWN]
                path, line = f"{where}.{name}" if where else name, key.start_mark.line + 1
                if key.value in lines:
                    yield path, lines[key.value], line
                lines[key.value] = line
                below.append((value, path))
        left += below[::-1]
