"""Reads YAML 1.2 configurations and records the line of every key for error messages."""

import io
import math
from pathlib import Path
from typing import Any, Self

from ruamel.yaml import YAML
from ruamel.yaml.constructor import ConstructorError, SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import CollectionNode, MappingNode, Node, SequenceNode

from raypd.errors import ConfigError, did_you_mean, in_words

# The limit on the values that aliases expand to, in addition to ten times the rest of the file.
_MOST_ALIASED = 1_000_000


class _Constructor(SafeConstructor):
    """Reports the line of a value that looks like a date or a number but is not one."""

    def construct_object(self, node: Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except ValueError as error:
            raise ConstructorError(None, None, in_words(error), node.start_mark) from None


def dump(value: Any, flow: bool = False, width: int = 100) -> str:
    """Return the YAML of plain values, with keys in their order.

    Args:
        value: The values.
        flow: Whether to write them on one line, such as `{a: [1, 2]}`.
        width: The maximum length of a line, in characters.
    """
    yaml: Any = YAML(typ="safe", pure=True)
    yaml.default_flow_style, yaml.width, yaml.sort_base_mapping_type_on_output = flow, width, False
    out = io.StringIO()
    yaml.dump(value, out)
    return out.getvalue().removesuffix("...\n").rstrip("\n") + "\n"


def parse(text: str) -> Any:
    """Return the values in a YAML text.

    Raises:
        YAMLError: The text is not valid YAML, or its aliases expand too much.
    """
    return _construct(_compose(text))


def _compose(text: str) -> Node | None:
    """Return the nodes of a YAML text.

    Raises:
        YAMLError: The text is not valid YAML, or aliases of aliases expand to more than anybody
            would write.
    """
    node: Node | None = YAML(typ="safe", pure=True).compose(text)
    # The number of nodes that each node expands to. It is infinite while the node is being visited,
    # because a node may contain itself.
    sizes: dict[int, float] = {}

    def size(of: Node) -> float:
        if id(of) not in sizes:
            sizes[id(of)] = math.inf
            parts = of.value if isinstance(of, CollectionNode) else []
            inner = (
                part for pair in parts for part in (pair if isinstance(pair, tuple) else (pair,))
            )
            sizes[id(of)] = 1 + sum(map(size, inner))
        return sizes[id(of)]

    if node is not None and size(node) > _MOST_ALIASED + 10 * len(sizes):
        raise MarkedYAMLError(
            problem="its aliases (*name) expand to more than is allowed",
            problem_mark=node.start_mark,
        )
    return node


def _construct(node: Node | None) -> Any:
    yaml = YAML(typ="safe", pure=True)
    yaml.Constructor = _Constructor
    return None if node is None else yaml.constructor.construct_document(node)


class YamlFile:
    """A mapping and the places where its keys were set.

    Attributes:
        path: The file that the mapping was read from; None if it was not read from a file.
        tree: The mapping.
        lines: The line of each key in the file.
        overrides: The keys that overrides set, and where each was given.
        included: The keys whose content was read from another file, each with that file.
    """

    def __init__(self, path: Path | None, tree: dict[str, Any]) -> None:
        self.path = path
        self.tree = tree
        self.lines: dict[tuple[str | int, ...], int] = {}
        self.overrides: dict[tuple[str | int, ...], str] = {}
        self.included: dict[tuple[str | int, ...], YamlFile] = {}

    def include(self, key: tuple[str | int, ...], path: str) -> None:
        """Record that a key has the content of another YAML file, whose lines `where` then names.

        Args:
            key: The key, in the form that messages use.
            path: The file, which has already been read without an error.
        """
        other = YamlFile(Path(path), {})
        other._number(_compose(Path(path).read_text(encoding="utf-8")), ())
        self.included[key] = other

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file.

        Raises:
            ConfigError: The file cannot be read or is wrong; the message has the line.
        """
        try:
            node = _compose(path.read_text(encoding="utf-8"))
            source = cls(path, {})
            source._number(node, ())
            source.tree = _construct(node) or {}
        except FileNotFoundError:
            names = [other.name for other in path.parent.glob("*.y*ml")]
            hint = did_you_mean(path.name, names, lambda name: path.parent / name)
            raise ConfigError(
                "; ".join(filter(None, [f"{path}: no such configuration file", hint]))
            ) from None
        except IsADirectoryError:
            raise ConfigError(f"{path}: is a folder; give the YAML file in it") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: cannot be read: {error}") from None
        except RecursionError:
            raise ConfigError(f"{path}: is nested too deeply") from None
        except YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            where = f"{path}:{mark.line + 1}" if mark else str(path)
            raise ConfigError(
                f"{where}: not valid YAML: {getattr(error, 'problem', None) or error}"
            ) from None
        if not isinstance(source.tree, dict):
            raise ConfigError(
                f"{path}: expected a mapping of keys at the top, found {type(source.tree).__name__}"
            )
        return source

    def _number(self, node: Node | None, key_path: tuple[str | int, ...]) -> None:
        if isinstance(node, MappingNode):
            for key, value in node.value:
                where = f"{self.path}:{key.start_mark.line + 1}"
                if isinstance(key, CollectionNode):
                    raise ConfigError(f"{where}: a key is a word, not a list or a mapping")
                if (*key_path, key.value) in self.lines:
                    raise ConfigError(f"{where}: the key {key.value!r} occurs twice")
                self.lines[(*key_path, key.value)] = key.start_mark.line + 1
                self._number(value, (*key_path, key.value))
        elif isinstance(node, SequenceNode):
            for i, value in enumerate(node.value):
                self.lines[(*key_path, i)] = value.start_mark.line + 1
                self._number(value, (*key_path, i))

    def where(self, key: tuple[str | int, ...]) -> str:
        """Return where a key was set; "" if that is not known.

        An override replaces everything under its key, so every key below has the override's
        position. A key that does not occur has the position of the nearest key above it.
        """
        for prefix, other in self.included.items():
            if key[: len(prefix)] == prefix:
                return other._file_line(key[len(prefix) :])
        for length in range(len(key), 0, -1):
            if key[:length] in self.overrides:
                return self.overrides[key[:length]]
        line = self._file_line(key)
        if not key:
            return line
        # A mistake in a whole section may be in a key that an override set inside it.
        inner = [text for other, text in self.overrides.items() if other[: len(key)] == key]
        if not inner:
            return line
        overrides = " and ".join(inner)
        if key not in self.lines:
            return overrides
        return f"{line}, with {overrides}"

    def _file_line(self, key: tuple[str | int, ...]) -> str:
        """Return `file:line` of a key, or of the nearest key above it; "" without a file."""
        if self.path is None:
            return ""
        while key and key not in self.lines:
            key = key[:-1]
        return f"{self.path}:{self.lines[key]}" if key else str(self.path)
