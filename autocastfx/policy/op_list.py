"""Op lists: which category an op belongs to, read from YAML that anyone can edit.

A list never holds code: it is parsed without constructing objects, and tags are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from autocastfx.errors import OpListError
from autocastfx.files import write_whole
from autocastfx.graph.op_name import base_name
from autocastfx.policy import read_rules, write_list
from autocastfx.policy.data_tree import tree_of
from autocastfx.policy.rule import ANY_REDUCTION, Category, Condition, Demand, DepthLimit, ModuleRule, Rule
from autocastfx.policy.write_list import Change
from autocastfx.policy.yaml_tree import Tree, nearest, parse_file

__all__ = ["Category", "Change", "DepthLimit", "ModuleRule", "OpList", "Rule", "load_op_list", "preset_path", "presets"]

RuleKey = tuple[str, tuple[Condition, ...], str]


@dataclass(frozen=True)
class OpList:
    """Rules by op name. Immutable; :meth:`merged` gives a new one in which the later list wins, key by key.

    Two lists are equal if they say the same, whatever their names and places.

    Attributes:
        rules: the rules that hold for every call on every device, by op name.
        keep_args: per op, the arguments that stay float32 when it runs in 16 bits (batch_norm's statistics).
        aliases: listed names by further names.
        unlisted: the category of an op without a rule; None leaves it to the lists merged before, and ``keep`` if none
            says anything.
        name: shown in plans and messages.
        placement: how the precision of what the categories leave free is chosen: ``cut`` (the fewest bytes moved),
            ``simple`` (TensorFlow's rule) or ``follow`` (torch.autocast's dispatch); None leaves it to the lists merged
            before, and ``cut`` if none says anything. Under ``follow`` a name stands for that very op and not for its
            in-place form, and an overload may be listed apart (``mm.dtype``).
        set_dtype: the ``deny`` ops that ``follow`` asks for float32 by their dtype argument, not by casts.
        reduction_depth: per op, how many elements it may reduce into one in 16 bits.
        product_depth: how many elements a contraction must add up to be a product; fewer are elementwise work.
        demands: per op that cannot use a rounded operand, what it asks of the ops before it.
        conditional: the rules with a ``when`` or for one device type, by op name, conditions and device.
        modules: the rules for module paths, sorted; a later list's have the higher ranks.
    """

    rules: Mapping[str, Rule] = field(default_factory=dict[str, Rule])
    keep_args: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    unlisted: Category | None = None
    name: str = field(default="unnamed", compare=False)
    placement: str | None = None
    set_dtype: frozenset[str] = frozenset()
    reduction_depth: Mapping[str, DepthLimit] = field(default_factory=dict[str, DepthLimit])
    product_depth: DepthLimit | None = None
    demands: Mapping[str, Demand] = field(default_factory=dict[str, Demand])
    conditional: Mapping[RuleKey, Rule] = field(default_factory=dict[RuleKey, Rule])
    modules: tuple[ModuleRule, ...] = ()

    def __post_init__(self) -> None:
        for name, value in self._values().items():
            if isinstance(value, Mapping):
                object.__setattr__(self, name, MappingProxyType(dict(value)))
        ranks = sorted({rule.rank for rule in self.modules})
        ranked = (replace(rule, rank=ranks.index(rule.rank)) for rule in self.modules)
        object.__setattr__(self, "modules", tuple(sorted(ranked, key=lambda r: (r.rank, r.key))))

    def _values(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def of(cls, data: Mapping[str, Any], *, name: str = "OpList") -> OpList:
        """A list from Python data of the structure of a YAML file: ``OpList.of({"deny": ["my_lib::op"]})``.

        Args:
            data: mappings, lists, text, numbers, truth values and None.
            name: what errors and plans call it; a place in it is printed as ``name:deny[0]``.

        Raises:
            OpListError: it would be wrong in a YAML file, too.
        """
        return _from_tree(tree_of(data, name), name, Path.cwd(), ())

    def every_rule(self) -> tuple[Rule | ModuleRule, ...]:
        """All rules: of ops, of ops under conditions or on devices, of modules."""
        return (*self.rules.values(), *self.conditional.values(), *self.modules)

    def ops(self) -> frozenset[str]:
        """Every op name that a rule or an alias mentions."""
        of_modules = {op for rule in self.modules for op in rule.ops}
        return frozenset({*self.rules, *(op for op, _, _ in self.conditional), *of_modules, *self.aliases})

    def names_of(self, op: str) -> Iterator[str]:
        """The names under which ``op`` may be listed: its own, its alias, then the same of its out-of-place form."""
        for name in dict.fromkeys((op, op if self.placement == "follow" else base_name(op))):
            yield name
            if name in self.aliases:
                yield self.aliases[name]

    def rule(self, op: str, device: str = "") -> Rule | None:
        """The rule without conditions for ``op`` on ``device``, or None if no name of it is listed."""
        for name in self.names_of(op):
            found = self.conditional.get((name, (), device)) or self.rules.get(name)
            if found is not None:
                return found
        return None

    def kept(self, op: str) -> tuple[str, ...]:
        """Names of the arguments of ``op`` that stay float32."""
        return next((self.keep_args[name] for name in self.names_of(op) if name in self.keep_args), ())

    def depth_limit(self, op: str, *, of_group: bool) -> DepthLimit | None:
        """The limit for ``op``, or else the one for all reductions, if it is ``of_group``; None if there is none."""
        names = (*self.names_of(op), *((ANY_REDUCTION,) if of_group else ()))
        return next((self.reduction_depth[name] for name in names if name in self.reduction_depth), None)

    def demand(self, op: str) -> Demand | None:
        """The demand of ``op``; None if it has none, or it was lifted."""
        found = next((self.demands[name] for name in self.names_of(op) if name in self.demands), None)
        return None if found is None or found.through == "nothing" else found

    def merged(self, later: OpList) -> OpList:
        """This list with ``later`` laid over it, key by key."""
        replaced = {rule.key for rule in later.modules}
        above = 1 + max((rule.rank for rule in self.modules), default=-1)
        raised = (replace(rule, rank=rule.rank + above) for rule in later.modules)
        depths = {} if ANY_REDUCTION in later.reduction_depth else self.reduction_depth  # undoes what each op had
        return OpList(
            rules={**self.rules, **later.rules},
            keep_args={**self.keep_args, **later.keep_args},
            aliases={**self.aliases, **later.aliases},
            unlisted=self.unlisted if later.unlisted is None else later.unlisted,
            name=f"{self.name}+{later.name}" if self.every_rule() else later.name,
            placement=later.placement or self.placement,
            set_dtype=self.set_dtype | later.set_dtype,
            reduction_depth={**depths, **later.reduction_depth},
            product_depth=later.product_depth or self.product_depth,
            demands={**self.demands, **later.demands},
            conditional={**self.conditional, **later.conditional},
            modules=(*(rule for rule in self.modules if rule.key not in replaced), *raised),
        )

    def __or__(self, later: OpList) -> OpList:
        return self.merged(later)

    def diff(self, later: OpList) -> tuple[Change, ...]:
        """What ``later`` says otherwise, as values that print as ``softmax: deny → allow``; none if both are equal."""
        return write_list.diff(self, later)

    def save(self, path: str | Path) -> None:
        """Write a YAML file, grouped by category and reason, that :func:`load_op_list` reads back as an equal list.

        What the list extends is written out; comments and names are not kept. With another torch the file may name
        operators that are not there, which is an error then.

        Raises:
            OSError: the file cannot be written.
        """
        write_whole(Path(path), write_list.text(self))

    def lenient(self) -> OpList:
        """This list without a ban of unlisted ops: a draft holds ops that a graph with known sizes does not."""
        return replace(self, unlisted=None) if self.unlisted is Category.BAN else self

    def __reduce__(self) -> tuple[object, ...]:  # a mapping proxy does not pickle
        return (_restore, ({n: dict(v) if isinstance(v, Mapping) else v for n, v in self._values().items()},))


def _restore(values: dict[str, Any]) -> OpList:
    return OpList(**values)


OpListLike = str | Path | OpList | Sequence[str | Path | OpList]


def preset_folder() -> Path:
    """Folder of the shipped lists: inside the package (a wheel), else beside it (a checkout)."""
    inside = Path(__file__).parents[1] / "op_lists"
    return inside if inside.is_dir() else Path(__file__).parents[2] / "op_lists"


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
    shipped = path.parent == preset_folder()
    tree = parse_file(path, shown=f"op_lists/{path.name}" if shipped else str(path), shipped=shipped)
    return _from_tree(tree, path.stem, path.parent, (*opened, path))


def _from_tree(tree: Tree, name: str, folder: Path, opened: tuple[Path, ...]) -> OpList:
    tree.check_keys(read_rules.KEYS, what="key of an op list")
    base = OpList()
    for parent in tree.child("extends").as_strings():
        base = base.merged(_load_parent(parent, folder, opened))
    rules = tuple(read_rules.op_rules(tree))
    own = OpList(
        rules={r.op: r for r in rules if not (r.when or r.device)},
        keep_args=dict(read_rules.keep_args(tree)),
        aliases=read_rules.aliases(tree),
        unlisted=read_rules.unlisted(tree),
        placement=read_rules.placement(tree),
        set_dtype=frozenset(op.op_name() for op in read_rules.known(tree.child("set_dtype").as_strings())),
        reduction_depth=dict(read_rules.reduction_depth(tree)),
        product_depth=read_rules.product_depth(tree),
        demands={demand.op: demand for demand in read_rules.demands(tree)},
        conditional={r.key: r for r in rules if r.when or r.device},
        modules=tuple(read_rules.module_rules(tree)),
    )
    return replace(base.merged(own), name=name)


def _load_parent(parent: Tree, folder: Path, opened: tuple[Path, ...]) -> OpList:
    is_path = parent.text.endswith((".yaml", ".yml"))
    try:
        path = folder / parent.text if is_path else preset_path(parent.text)
    except OpListError as error:
        raise parent.error(str(error)) from error
    if path.resolve() in {p.resolve() for p in opened}:
        raise parent.error(f"this list extends itself: {' → '.join(p.name for p in (*opened, path))}.")
    if not path.is_file():
        beside = f"beside {opened[-1].name}" if opened else f"in {folder}"
        raise parent.error(f"there is no file {parent.text!r} {beside}.")
    return _load_file(path, opened)
