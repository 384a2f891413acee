"""Op lists: which category an op belongs to, read from YAML that anyone can edit.

A list never holds code: it is parsed without constructing objects, and tags are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from types import MappingProxyType

from autocastfx.errors import OpListError, Source
from autocastfx.op_name import base_name
from autocastfx.yaml_tree import Tree, nearest, parse_file

__all__ = ["Category", "OpList", "Rule", "load_op_list", "preset_path", "presets"]


class Category(str, Enum):
    """What a list says of an op."""

    ALLOW = "allow"  # runs in 16 bits
    DENY = "deny"  # float32, and it taints what follows
    INFER = "infer"  # safe in 16 bits, but follows its neighbours; float32 after a deny
    CLEAR = "clear"  # moves or selects values; precision-neutral
    PROMOTE = "promote"  # 16 bits only if all its floating inputs already are
    KEEP = "keep"  # exactly as captured
    BAN = "ban"  # refused

    def __str__(self) -> str:
        return self.value


_UNLISTED = {"keep": Category.KEEP, "deny": Category.DENY, "error": Category.BAN}
_PLACEMENTS = ("cut", "simple", "follow")
_KEYS = (*(c.value for c in Category), "keep_args", "aliases", "unlisted", "extends", "placement")


@dataclass(frozen=True)
class Rule:
    """One op's line in a list: its category, the reason of its group, and where it stands."""

    op: str
    category: Category
    reason: str = ""
    source: Source | None = field(default=None, compare=False)


@dataclass(frozen=True)
class OpList:
    """Rules by op name. Immutable; :meth:`merged` gives a new one in which the later list wins.

    ``keep_args`` names, per op, the arguments that stay float32 when the op runs in 16 bits (batch_norm's statistics).
    ``aliases`` maps further names onto listed ones. ``unlisted`` is the category of an op without a rule; None leaves
    it to the lists merged before, and ``keep`` if none says anything. ``placement`` is how the precision of what the
    categories leave free is chosen: ``cut`` (the fewest bytes moved), ``simple`` (TensorFlow's rule) or ``follow``
    (torch.autocast's dispatch); None leaves it to the lists merged before, and ``cut`` if none says anything.
    """

    rules: Mapping[str, Rule] = field(default_factory=lambda: MappingProxyType({}))
    keep_args: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    aliases: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    unlisted: Category | None = None
    name: str = "unnamed"
    placement: str | None = None

    def names_of(self, op: str) -> Iterator[str]:
        """The names under which ``op`` may be listed: its own, its alias, then the same of its out-of-place form."""
        for name in dict.fromkeys((op, base_name(op))):
            yield name
            if name in self.aliases:
                yield self.aliases[name]

    def rule(self, op: str) -> Rule | None:
        """The rule for ``op``, or None if no name of it is listed."""
        return next((self.rules[name] for name in self.names_of(op) if name in self.rules), None)

    def kept(self, op: str) -> tuple[str, ...]:
        """Names of the arguments of ``op`` that stay float32."""
        return next((self.keep_args[name] for name in self.names_of(op) if name in self.keep_args), ())

    def merged(self, later: OpList) -> OpList:
        """This list with ``later`` laid over it, key by key."""
        return replace(
            self,
            rules=MappingProxyType({**self.rules, **later.rules}),
            keep_args=MappingProxyType({**self.keep_args, **later.keep_args}),
            aliases=MappingProxyType({**self.aliases, **later.aliases}),
            unlisted=self.unlisted if later.unlisted is None else later.unlisted,
            name=f"{self.name}+{later.name}" if self.rules else later.name,
            placement=later.placement or self.placement,
        )

    def lenient(self) -> OpList:
        """This list without a ban of unlisted ops: a draft holds ops that a graph with known sizes does not."""
        return replace(self, unlisted=None) if self.unlisted is Category.BAN else self

    def __reduce__(self) -> tuple[object, ...]:  # a mapping proxy does not pickle
        parts = (dict(self.rules), dict(self.keep_args), dict(self.aliases), self.unlisted, self.name, self.placement)
        return (_restore, parts)


def _restore(
    rules: dict[str, Rule],
    keep_args: dict[str, tuple[str, ...]],
    aliases: dict[str, str],
    unlisted: Category | None,
    name: str,
    placement: str | None,
) -> OpList:
    frozen = (MappingProxyType(rules), MappingProxyType(keep_args), MappingProxyType(aliases))
    return OpList(*frozen, unlisted=unlisted, name=name, placement=placement)


OpListLike = str | Path | OpList | Sequence[str | Path | OpList]


def preset_folder() -> Path:
    """Folder of the shipped lists: inside the package (a wheel), else beside it (a checkout)."""
    inside = Path(__file__).parent / "op_lists"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "op_lists"


def presets() -> tuple[str, ...]:
    """Names of the shipped lists. ``"default"`` stands for the one of the conversion's dtype."""
    return tuple(sorted(p.stem for p in preset_folder().glob("*.yaml") if p.stem != "kernel_facts"))


def preset_path(name: str) -> Path:
    """Path of a shipped list.

    Raises:
        OpListError: there is none of that name.
    """
    path = preset_folder() / f"{name}.yaml"
    if name not in presets():
        hint = nearest(name, presets())
        raise OpListError(f"no preset is named {name!r}{hint}. Presets: {', '.join(presets())}; a path ends in .yaml.")
    return path


def load_op_list(lists: OpListLike, *, default: str = "float16") -> OpList:
    """Read and merge op lists, the later winning.

    Args:
        lists: a preset's name, a path to a YAML file, an :class:`OpList`, or a sequence of these.
        default: the preset that the name ``"default"`` stands for: ``"float16"`` or ``"bfloat16"``.

    Raises:
        OpListError: a list cannot be found or read; the message starts with file:line:column.
    """
    if isinstance(lists, OpList):
        return lists
    if isinstance(lists, (str, Path)):
        if str(lists) == "default":
            return _load_file(preset_path(default), ())
        is_path = isinstance(lists, Path) or str(lists).endswith((".yaml", ".yml")) or "/" in str(lists)
        return _load_file(Path(lists) if is_path else preset_path(str(lists)), ())
    merged = OpList()
    for one in lists:
        merged = merged.merged(load_op_list(one, default=default))
    return merged


def _load_file(path: Path, opened: tuple[Path, ...]) -> OpList:
    tree = parse_file(path, shown=f"op_lists/{path.name}" if path.parent == preset_folder() else str(path))
    tree.check_keys(_KEYS, what="key of an op list")
    base = OpList()
    for parent in tree.child("extends").as_strings():
        base = base.merged(_load_parent(parent, (*opened, path)))
    own = OpList(
        rules=MappingProxyType({r.op: r for r in _rules(tree)}),
        keep_args=MappingProxyType(dict(_keep_args(tree))),
        aliases=MappingProxyType({k.op_name(): v.op_name() for k, v in tree.child("aliases").items()}),
        unlisted=_unlisted(tree),
        name=path.stem,
        placement=_placement(tree),
    )
    return replace(base.merged(own), name=path.stem)


def _load_parent(parent: Tree, opened: tuple[Path, ...]) -> OpList:
    is_path = parent.text.endswith((".yaml", ".yml"))
    try:
        path = opened[-1].parent / parent.text if is_path else preset_path(parent.text)
    except OpListError as error:
        raise parent.error(str(error)) from error
    if path.resolve() in {p.resolve() for p in opened}:
        raise parent.error(f"this list extends itself: {' → '.join(p.name for p in (*opened, path))}.")
    if not path.is_file():
        raise parent.error(f"there is no file {parent.text!r} beside {opened[-1].name}.")
    return _load_file(path, opened)


def _rules(tree: Tree) -> Iterator[Rule]:
    seen: dict[str, Rule] = {}
    for category in Category:
        for entry in tree.child(category.value).entries():
            if entry.is_mapping:
                entry.check_keys(("ops", "reason"), what="key of a group")
                ops, reason = entry.child("ops").as_strings(), entry.child("reason").as_text(default="")
                if not ops:
                    raise entry.error("this group lists no op: give it 'ops: [...]'")
            else:
                ops, reason = (entry,), ""
            for op in ops:
                rule = Rule(op.op_name(), category, reason, op.source)
                if rule.op in seen:
                    other = seen[rule.op]
                    raise op.error(
                        f"op {rule.op!r} is listed twice: as {other.category} at {other.source} and as {category} "
                        "here. Keep one of the two."
                    )
                seen[rule.op] = rule
                yield rule


def _keep_args(tree: Tree) -> Iterator[tuple[str, tuple[str, ...]]]:
    for op, names in tree.child("keep_args").items():
        yield op.op_name(), tuple(name.argument_of(op.op_name()) for name in names.as_strings())


def _unlisted(tree: Tree) -> Category | None:
    word = tree.child("unlisted")
    if word.is_missing:
        return None
    if word.as_text() not in _UNLISTED:
        raise word.error(f"'unlisted' is {' or '.join(_UNLISTED)}, not {word.as_text()!r}")
    return _UNLISTED[word.as_text()]


def _placement(tree: Tree) -> str | None:
    word = tree.child("placement")
    if word.is_missing:
        return None
    if word.as_text() not in _PLACEMENTS:
        raise word.error(f"'placement' is {' or '.join(_PLACEMENTS)}, not {word.as_text()!r}")
    return word.as_text()
