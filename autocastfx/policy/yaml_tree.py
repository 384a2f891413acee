"""Parse YAML into a tree whose nodes know their place in the file, without constructing any Python object."""

from __future__ import annotations

import difflib
import math
import re
import types
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.overrides
import yaml
from torch import nn

from autocastfx.errors import KeyPath, OpListError, Source, TextPlace, shown
from autocastfx.files import read_whole
from autocastfx.graph.names import argument_types, canonical, located, named, of_function
from autocastfx.policy.rule import Scalar

# Names that people write in lists from habit, with the names that they mean.

_LOW, _WIDE = ("low", "allow"), ("float32", "deny")
_MEANT: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("fp16", "half"), (*_LOW, "float16")),
    "bf16": (*_LOW, "bfloat16"),
    **dict.fromkeys(("float16", "bfloat16", "16", "whitelist", "allowlist"), _LOW),
    **dict.fromkeys(("fp32", "float", "full", "32"), _WIDE),
    **dict.fromkeys(("float32", "blacklist", "blocklist", "denylist"), ("deny",)),
    **dict.fromkeys(("graylist", "greylist"), ("infer",)),
    **dict.fromkeys(("gpu", "nvidia"), ("cuda",)),
    **dict.fromkeys(("attention", "sdpa", "flash_attention"), ("scaled_dot_product_attention",)),
    "batchnorm": ("batch_norm",),
    "layernorm": ("layer_norm",),
}
_SHORT = {"F": "torch.nn.functional", "nn": "torch.nn", "functional": "torch.nn.functional"}


def meant(word: str, legal: Collection[str]) -> str | None:
    """Return the one of ``legal`` that ``word`` is often written for; None if there is none."""
    return next((one for one in _MEANT.get(word.lower(), ()) if one in legal), None)


def of_python(name: str, ops: Collection[str]) -> str | None:
    """Say what a list writes for a name that Python code has by an import, such as ``F.softmax`` or ``LayerNorm``.

    ``ops`` are the names of ATen ops. None if the name is no such name.
    """
    head, _, last = name.rpartition(".")
    first = head.partition(".")[0]
    is_class = isinstance(getattr(nn, last, None), type)
    if first not in _SHORT and (head or not is_class):
        return None
    path = ".".join([_SHORT[first], *name.split(".")[1:]]) if head else f"torch.nn.{name}"
    op = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", last).lower()
    as_path = f"{'the module class' if is_class else 'the function'} {path!r}"
    return f"write the op {op!r}, or {as_path}" if op in ops else f"write {as_path}"


def yaml_advice(problem: str, line: str) -> str:
    """Return what to do about a problem in the YAML parser's words, as a sentence; empty if there is nothing to add."""
    if "\\t" in problem:
        return " Indent by spaces; YAML takes no tabs."
    if "alias" in problem or "anchor" in problem:
        pattern = re.search(r"[*&][^\s,}\]]*", line)
        return f" Put a pattern that begins so in quotes: '{pattern[0]}'." if pattern is not None else ""
    if "mapping values are not allowed" in problem:
        return " Put text with a colon in quotes."
    return ""


STANDARD = "tag:yaml.org,2002:"
_MOST_DIGITS = 1000  # of an integer; Python itself reads a few thousand at most


@lru_cache(maxsize=1)
def legal_op_names() -> frozenset[str]:
    """Return the ATen base names of this torch, and ``getitem`` and ``setitem`` for Python's subscripting."""
    qualified = torch._C._dispatch_get_all_op_names()
    names = (q.partition("::")[2].partition(".")[0] for q in qualified if q.startswith("aten::"))
    return frozenset(names) | {"getitem", "setitem"}


def _overloads(op: str) -> frozenset[str]:
    """Return the names of the overloads of an ATen op; none for any other word."""
    return frozenset(getattr(torch.ops.aten, op).overloads()) if op in legal_op_names() - {"getitem"} else frozenset()


@lru_cache(maxsize=1)
def python_functions() -> Mapping[str, str]:
    """Return, by bare name, the dotted paths of torch's Python functions without an ATen op of the same name."""
    namespaces = (torch, torch.functional, torch.nn.functional, torch.linalg, torch.special, torch.fft)
    overridable = torch.overrides.get_overridable_functions()
    functions = [f for n in namespaces for f in overridable.get(n, ()) if isinstance(f, types.FunctionType)]
    paths = {f.__name__: of_function(f) for f in functions if located(of_function(f)) is f}
    return {name: path for name, path in paths.items() if name not in legal_op_names()}


def is_known(op: str) -> bool:
    """True if this torch has the op that a shipped op list names. Custom operators count as known."""
    head, dot, rest = op.partition(".")
    if head in legal_op_names():
        return not dot or rest in _overloads(head)
    return "::" in op or op in python_functions() or bool(dot and located(op) is not None)


def nearest(word: str, legal: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` with the legal word that is meant by ``word``, or nearest; empty if none is."""
    known = sorted(legal)
    suggestion = meant(word, known) or next(iter(difflib.get_close_matches(word, known, n=1)), None)
    return f" (did you mean {suggestion!r}?)" if suggestion is not None else ""


@dataclass(frozen=True)
class Tree:
    """A node of a YAML file: a mapping, a sequence or a scalar; ``node`` is None if an optional key is missing.

    ``shipped`` files come with this package and serve several versions of torch: they may name ops that this one lacks.
    """

    node: yaml.Node | None
    file: str
    shipped: bool = False
    around: Tree | None = None  # the mapping that lacks the key

    @property
    def source(self) -> TextPlace:
        """The place in the file, or in Python data."""
        if self.node is None:
            return self.around.source if self.around is not None else Source(self.file, 1, 1)
        mark: Any = self.node.start_mark
        return mark if isinstance(mark, KeyPath) else Source(self.file, mark.line + 1, mark.column + 1)

    @property
    def is_missing(self) -> bool:
        """True if the file lacks this key."""
        return self.node is None

    @property
    def is_list(self) -> bool:
        """True for a sequence."""
        return isinstance(self.node, yaml.SequenceNode)

    @property
    def is_mapping(self) -> bool:
        """True for a mapping."""
        return isinstance(self.node, yaml.MappingNode)

    def error(self, message: str) -> OpListError:
        """Make an error at this place."""
        return OpListError(message, self.source)

    def _at(self, node: yaml.Node) -> Tree:
        tree = Tree(node, self.file, self.shipped)
        if not node.tag.startswith(STANDARD) or node.tag.startswith(f"{STANDARD}python"):
            raise tree.error(
                f"the tag {node.tag!r} is not allowed: an op list holds plain text, lists and mappings only"
            )
        if node.tag == f"{STANDARD}int" and len(node.value) > _MOST_DIGITS:
            raise tree.error(f"a number has {len(node.value)} digits. An op list takes {_MOST_DIGITS} at most.")
        return tree

    @property
    def missing(self) -> Tree:
        """The value of a key that is not here."""
        return Tree(None, self.file, self.shipped, self)

    def items(self) -> tuple[tuple[Tree, Tree], ...]:
        """Return key and value nodes of a mapping; none for a missing node."""
        return tuple(self._pairs.values())

    @cached_property
    def _pairs(self) -> Mapping[str, tuple[Tree, Tree]]:
        if self.node is None:
            return {}
        if not isinstance(self.node, yaml.MappingNode):
            raise self.error(f"expected 'key: value' lines, found {_kind(self.node)}")
        pairs: dict[str, tuple[Tree, Tree]] = {}
        for key, value in ((self._at(key), self._at(value)) for key, value in self.node.value):
            if (word := key.text) in pairs:
                raise key.error(f"the key {word!r} stands twice, first at {pairs[word][0].source}. Merge the two.")
            pairs[word] = key, value
        return pairs

    def check_keys(self, legal: Collection[str], what: str) -> None:
        """Raise if a key is not in ``legal``; ``what`` is the kind of key in the message."""
        for key, _ in self.items():
            if key.text not in legal:
                raise key.error(f"{key.text!r} is no {what}{nearest(key.text, legal)}. Known: {', '.join(legal)}.")

    def child(self, name: str) -> Tree:
        """Return the value of a key; a tree that ``is_missing`` if the key is."""
        return self._pairs[name][1] if name in self._pairs else self.missing

    def entries(self) -> tuple[Tree, ...]:
        """Return the members of a sequence; none for a missing or empty node."""
        if self.node is None or self.node.tag == f"{STANDARD}null":
            return ()
        if not isinstance(self.node, yaml.SequenceNode):
            raise self.error(f"expected a list ('- …' lines or [a, b]), found {_kind(self.node)}")
        return tuple(self._at(child)._unmarked() for child in self.node.value)

    def _unmarked(self) -> Tree:
        """Return an entry without ``shipped: true``, by which a written list tells rules of this package's lists."""
        if not isinstance(self.node, yaml.MappingNode) or (mark := self.child("shipped")).is_missing:
            return self
        rest = [(key, value) for key, value in self.node.value if key.value != "shipped"]
        node = yaml.MappingNode(self.node.tag, rest, self.node.start_mark, self.node.end_mark)
        return replace(self, node=node, shipped=self.shipped or mark.as_flag())

    def as_strings(self) -> tuple[Tree, ...]:
        """Return the texts of a sequence, or a single text as a sequence of one."""
        if isinstance(self.node, yaml.ScalarNode) and self.node.tag == f"{STANDARD}str":
            return (self,)
        entries = self.entries()
        for entry in entries:
            entry.as_text()
        return entries

    @property
    def text(self) -> str:
        """The text of this scalar."""
        return self.as_text()

    def as_text(self, default: str | None = None) -> str:
        """Return the text of this scalar; ``default`` if the node is missing."""
        if self.node is None and default is not None:
            return default
        is_text = isinstance(self.node, yaml.ScalarNode) and self.node.tag == f"{STANDARD}str"
        if not isinstance(self.node, yaml.ScalarNode) or not (self.node.value or is_text):
            raise self.error(f"expected a word, found {_kind(self.node)}")
        if not is_text:
            raise self.error(f"{self.found('text')} Put it in quotes.")
        return str(self.node.value)

    def as_limit(self) -> int | None:
        """Return a whole number of at least 1, or None for ``null``."""
        if isinstance(self.node, yaml.ScalarNode) and self.node.value:
            kind = self.node.tag.removeprefix(STANDARD)
            if kind == "null":
                return None
            if kind == "int" and (limit := self.as_integer()) >= 1:
                return limit
        raise self.error(f"expected a whole number of at least 1, or null, found {_kind(self.node)}")

    def found(self, wanted: str) -> str:
        """Describe, for a message, the kind found here in place of the ``wanted`` one."""
        node = self.node
        if not isinstance(node, yaml.ScalarNode):
            return f"expected {wanted}, found {_kind(node)}."
        kind = node.tag.removeprefix(STANDARD).replace("str", "text")
        if isinstance(self.source, Source):
            return f"YAML reads {node.value!r} as {kind}, not as {wanted}."
        return f"expected {wanted}, found {node.value!r} as {kind}."

    def as_scalar(self) -> Scalar:
        """Return the text, number, truth value or null of this scalar."""
        node = self.node
        if not isinstance(node, yaml.ScalarNode) or not (node.value or node.tag == f"{STANDARD}str"):
            raise self.error(f"expected a value, found {_kind(node)}")
        text, kind = str(node.value), node.tag.removeprefix(STANDARD)
        if kind == "str":
            return text
        if kind not in ("null", "bool", "int", "float"):
            raise self.error(f"{self.found('text, a number, a truth value or null')} Put it in quotes.")
        if ":" in text:
            raise self.error(f"YAML reads {text!r} in base 60. Write a decimal number, or put it in quotes.")
        if re.fullmatch(r"[-+]?0[0-7_]+", text):
            raise self.error(f"YAML reads {text!r} in base 8, as {int(text, 8)}. Write a decimal number.")
        value = yaml.SafeLoader("").construct_object(node)
        if isinstance(value, float) and math.isnan(value):
            raise self.error("nothing equals a NaN")
        return value

    def as_number(self) -> int | float:
        """Return the number of this scalar."""
        value = self.as_scalar()
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(self.found("a number") + self.number_hint)
        return value

    def as_integer(self) -> int:
        """Return the whole number of this scalar."""
        value = self.as_number()
        if not isinstance(value, int):
            raise self.error(self.found("a whole number"))
        return value

    def as_flag(self) -> bool:
        """Return the truth value of this scalar."""
        if not isinstance(self.node, yaml.ScalarNode) or self.node.tag != f"{STANDARD}bool":
            raise self.error(self.found("true or false"))
        return bool(yaml.SafeLoader("").construct_object(self.node))

    @property
    def number_hint(self) -> str:
        """A hint how YAML writes this number, if the text is one to Python but not to YAML (``1e-3``); else empty."""
        try:
            return f" Write {yaml.safe_dump(float(self.as_text())).split()[0]}."
        except ValueError:  # an OpListError is one
            return ""

    def op_name(self, *, overloads: bool = False) -> str:
        """Return the text as a checked op name: an ATen base name, ``namespace::op`` or a dotted Python path.

        With ``overloads``, overloads of ATen ops (``mm.dtype``) are allowed too.
        """
        name = self.as_text()
        head = name.partition(".")[0]
        if self.shipped and not is_known(name):
            return name
        if name not in legal_op_names() and (advice := of_python(name, legal_op_names())) is not None:
            raise self.error(f"{name!r} is a name of Python's imports, which a list does not know: {advice}")
        if "::" in name:
            if name.startswith("aten::"):
                raise self.error(f"ATen ops are listed by their base name: write {name[6:].partition('.')[0]!r}")
            return name
        if overloads and name.partition(".")[2] in _overloads(head):
            return name
        if "." in name and head in legal_op_names() and head != "torch":
            raise self.error(f"overloads are not listed apart: write {head!r} instead of {name!r}")
        if "." in name and all(part.isidentifier() for part in name.split(".")):
            owner, _, attribute = name.rpartition(".")
            if head == "torch" and located(owner) is not None and located(name) is None:
                raise self.error(f"{owner} has no {attribute!r}{nearest(attribute, vars(located(owner)))}")
            return canonical(name)
        if name in python_functions():
            return python_functions()[name]
        if name not in legal_op_names():
            hint = nearest(name, {*legal_op_names(), *python_functions()})
            raise self.error(
                f"no ATen op is named {name!r}{hint}. A custom operator is 'namespace::op', a Python function or a "
                "module class its dotted path."
            )
        return name

    def argument_of(self, op: str) -> str:
        """Return the text as the name of an argument of ``op``, checked if the op's arguments are known."""
        name, legal = self.as_text(), argument_types(op)
        if legal is not None and name not in legal:
            raise self.error(f"{op} has no argument {name!r}{nearest(name, legal)}")
        return name

    def one_of(self, words: Collection[str], what: str) -> str:
        """Return the text if it is one of ``words``, else raise; ``what`` is the key in the message."""
        if self.as_text() not in words:
            raise self.error(f"{what!r} is {' or '.join(words)}, not {self.text!r}{nearest(self.text, words)}")
        return self.text


def _kind(node: yaml.Node | None) -> str:
    if isinstance(node, yaml.MappingNode):
        return "'key: value' lines"
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    return "nothing" if node is None or not node.value else f"the word {node.value!r}"


@lru_cache(maxsize=64)
def _composed(text: str, loader: Any) -> yaml.Node | None:
    """Parse YAML. Nothing changes the nodes, and each conversion reads the same shipped files."""
    return yaml.compose(text, Loader=loader)


def parse_file(path: Path, *, shown: str, shipped: bool = False) -> Tree:
    """Parse a YAML file, which messages call ``shown``, and return its root mapping.

    Raises:
        OpListError: the file is missing, is not UTF-8 text, or is not a YAML mapping; the message names the place.
    """
    try:
        text = read_whole(path)
    except OSError as error:
        raise OpListError(f"cannot read the op list {shown}: {error.strerror or error}.") from None
    except UnicodeDecodeError as error:
        before = error.object[: error.start]
        place = Source(shown, before.count(b"\n") + 1, len(before) - before.rfind(b"\n"))
        raise OpListError(f"this is not UTF-8 text: {error.reason}.", place) from None
    start = Source(shown, 1, 1)
    try:
        # The parser in C is faster, and says less of what is wrong.
        node = _composed(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader) if shipped else yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = Source(shown, mark.line + 1, mark.column + 1) if mark else start
        problem = ", ".join(part for part in (error.context, error.problem) if part)
        advice = yaml_advice(problem, text.splitlines()[mark.line]) if mark and mark.line < text.count("\n") else ""
        raise OpListError(f"this is not YAML: {problem}.{advice}", place) from None
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        place = Source(shown, before.count("\n") + 1, len(before) - before.rfind("\n"))
        character = f"#x{ord(text[error.position]):04x}"
        raise OpListError(f"this is not YAML: the character {character} is not allowed.", place) from None
    except RecursionError:
        raise OpListError("this is not an op list: it is nested too deeply.", start) from None
    if node is None:
        raise OpListError(
            "the file is empty. A list has at least one category, such as 'deny: [my_lib::my_op]'.", start
        )
    root = Tree(node, shown, shipped)._at(node)
    root.items()
    return root


# Turn Python mappings and lists into the same tree as parsed YAML, so that the same checks apply.

_WORDS = {type(None): "null", bool: "bool", int: "int", float: "float"}


def tree_of(data: Mapping[str, Any], name: str) -> Tree:
    """Turn Python data into a tree; messages call it ``name``.

    Raises:
        OpListError: the data holds a value that YAML cannot express, or is nested too deeply.
    """
    start = KeyPath(name)
    try:
        root = _node(data, start)
    except RecursionError:
        raise OpListError("this is not an op list: it is nested too deeply.", start) from None
    tree = Tree(root, name)
    tree.items()
    return tree


def _node(data: Any, place: KeyPath) -> yaml.Node:
    mark: Any = place
    if isinstance(data, Mapping):
        pairs = [(_node(key, place.key(key)), _node(value, place.key(key))) for key, value in data.items()]
        return yaml.MappingNode(f"{STANDARD}map", pairs, mark)
    if isinstance(data, (list, tuple)):
        members = [_node(member, place.index(i)) for i, member in enumerate(data)]
        return yaml.SequenceNode(f"{STANDARD}seq", members, mark)
    if isinstance(data, str):
        return yaml.ScalarNode(f"{STANDARD}str", str.__str__(data), mark)
    if type(data) not in _WORDS:
        name = named(data)
        hint = f": write {name!r}" if name is not None and "<" not in name else ""  # a local function has no path
        raise OpListError(f"an op list holds text, numbers, lists and mappings, no {type(data).__name__}{hint}", place)
    try:
        text = yaml.safe_dump(data).split()[0]
    except ValueError:  # Python writes integers of 4,300 digits at most
        raise OpListError(f"an op list takes no {shown(data)}", place) from None
    return yaml.ScalarNode(f"{STANDARD}{_WORDS[type(data)]}", text, mark)
