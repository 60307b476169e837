"""YAML 1.2 as configurations are written in it, with the line of every key for the errors."""

import io
import math
from pathlib import Path
from typing import Any, Self

from ruamel.yaml import YAML
from ruamel.yaml.constructor import ConstructorError, SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import CollectionNode, MappingNode, Node, SequenceNode

from raypd.errors import ConfigError, did_you_mean, in_words

# Values that aliases may stand for; ten times the rest of a file, if that is more.
_MOST_ALIASED = 1_000_000


class _Constructor(SafeConstructor):
    """Tells the line of a value that looks like a date or a number and is none."""

    def construct_object(self, node: Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except ValueError as error:
            raise ConstructorError(None, None, in_words(error), node.start_mark) from None


def dump(value: Any, flow: bool = False, width: int = 100) -> str:
    """YAML of plain values, keys in their order. flow: on one line, as `{a: [1, 2]}`."""
    yaml: Any = YAML(typ="safe", pure=True)
    yaml.default_flow_style, yaml.width, yaml.sort_base_mapping_type_on_output = flow, width, False
    out = io.StringIO()
    yaml.dump(value, out)
    return out.getvalue().removesuffix("...\n").rstrip("\n") + "\n"


def parse(text: str) -> Any:
    """Raises YAMLError."""
    return _construct(_compose(text))


def _compose(text: str) -> Node | None:
    """The nodes of YAML.

    Raises YAMLError, also where aliases of aliases make more than anybody wrote.
    """
    node: Node | None = YAML(typ="safe", pure=True).compose(text)
    # node -> how many nodes it stands for; infinite while it is looked at: it holds itself
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
    """A mapping and where each of its keys was set.

    Attributes:
        path: The file that the mapping was read from; None if it was not read from a file.
        tree: The mapping.
        lines: The line of each key in the file.
        overrides: The keys that an override set, and where it was given.
        included: The keys whose content was read from another file, with that file.
    """

    def __init__(self, path: Path | None, tree: dict[str, Any]) -> None:
        self.path = path
        self.tree = tree
        self.lines: dict[tuple[str | int, ...], int] = {}
        self.overrides: dict[tuple[str | int, ...], str] = {}
        self.included: dict[tuple[str | int, ...], YamlFile] = {}

    def include(self, key: tuple[str | int, ...], path: str) -> None:
        """Note that a key has the content of another YAML file, whose lines `where` then names.

        Args:
            key: The key, as messages name it.
            path: The file; it was read before without an error.
        """
        other = YamlFile(Path(path), {})
        other._number(_compose(Path(path).read_text(encoding="utf-8")), ())
        self.included[key] = other

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads a file. Raises ConfigError with the line of what is wrong."""
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

        An override replaces all that the file has under its key, so its position is that of every
        key below. For a key that stands nowhere, the result is the position of the nearest key
        above it.
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
        # What is wrong with a whole section may be wrong with a key that an override set in it.
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
