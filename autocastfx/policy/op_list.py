"""Op lists: the category of each op, read from YAML that anyone can edit, and the rule of a list that decides a node.

A list never holds code: parsing constructs no objects, and tags are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache, partial
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, cast

from torch import fx
from torch._ops import OpOverload

from autocastfx.errors import ArgumentTypeError, KeyPath, OpListError, Source, listed
from autocastfx.files import write_whole
from autocastfx.graph.names import arguments, base_name, names_function, op_name, overload_name
from autocastfx.graph.node import enclosing_modules, module_classes
from autocastfx.policy import read_rules, write_list
from autocastfx.policy.float8 import Float8Choice, Float8Rule, chosen
from autocastfx.policy.read_rules import ListKey, Said, laid_over, later_or_earlier, limited, stacked
from autocastfx.policy.rule import ANY_REDUCTION, Category, Condition, Demand, DepthLimit, KeptArgs, ModuleRule, Rule
from autocastfx.policy.saved import SavedRule, saved_rules, written
from autocastfx.policy.write_list import Change
from autocastfx.policy.yaml_tree import Tree, nearest, parse_file, tree_of

# Find the op lists shipped with this package.


def preset_folder() -> Path:
    """Return the folder of the shipped lists: inside the package (a wheel), else beside it (a checkout)."""
    inside = Path(__file__).parents[1] / "op_lists"
    return inside if inside.is_dir() else Path(__file__).parents[2] / "op_lists"


def presets() -> tuple[str, ...]:
    """Return the names of the shipped lists. ``"default"`` stands for the one named after the conversion's dtype."""
    return tuple(sorted(p.stem for p in preset_folder().glob("*.yaml") if p.stem != "kernel_facts"))


def preset_path(name: str) -> Path:
    """Return the path of a shipped list.

    Raises:
        OpListError: no shipped list has this name.
    """
    path = preset_folder() / f"{name}.yaml"
    if name not in presets():
        hint = nearest(name, presets())
        if name == "default":
            hint = ": in op_list=['default', FILE] it stands for the list of the dtype, and FILE needs no 'extends'"
        raise OpListError(f"no preset is named {name!r}{hint}. Presets: {', '.join(presets())}; a path ends in .yaml.")
    return path


def preset_title(name: str) -> str:
    """Return what a shipped list is: the first sentence of its file.

    Raises:
        OpListError: no shipped list has this name.
    """
    comment = takewhile(lambda line: line.startswith("#"), preset_path(name).read_text(encoding="utf-8").splitlines())
    return " ".join(line.removeprefix("#").strip() for line in comment).partition(". ")[0].rstrip(".")


_OpRule = TypeVar("_OpRule", Rule, ModuleRule)
RuleKey = tuple[str, tuple[Condition, ...], str]


def _word(category: Category) -> str:
    return next((word for word, listed_as in read_rules.UNLISTED_CATEGORIES.items() if listed_as is category), "")


def _category(unlisted: object) -> Category | None:
    """The category that a list's word for ``unlisted`` means, or that is given itself."""
    category = read_rules.UNLISTED_CATEGORIES.get(str(unlisted), unlisted)
    if category is None or category in read_rules.UNLISTED_CATEGORIES.values():
        return cast("Category | None", category)
    raise OpListError(f"unlisted is {', '.join(read_rules.UNLISTED_CATEGORIES)} or None, not {unlisted!r}.")


_UNLISTED = ListKey(
    "what to do with an op that has no rule",
    read=read_rules.unlisted,
    write=_word,
    said=lambda category: [("unlisted", _word(category), "")],
    over=later_or_earlier,
)
_PLACEMENT = ListKey(
    "how to choose the precision of `infer`, `clear` and `promote` ops",
    read=read_rules.placement,
    write=str,
    said=lambda placement: [("placement", placement, "")],
    over=later_or_earlier,
)
_MODULES = ListKey(
    "a list of rules for modules: they apply to the ops that run inside",
    read=lambda tree: tuple(read_rules.module_rules(tree)),
    write=write_list.modules,
    said=lambda rules: [(r.subject, f"{r.wanted} at rank {r.rank}" if r.rank else r.wanted, r.reason) for r in rules],
    over=stacked,
)
_KEEP_ARGS = ListKey(
    "for each op, the argument or arguments that stay float32 while the op runs in 16 bits",
    read=lambda tree: dict(read_rules.keep_args(tree)),
    write=lambda kept: {op: list(kept[op].names) for op in sorted(kept)},
    said=lambda kept: [(f"keep_args of {op}", ", ".join(one.names), "") for op, one in kept.items()],
)
_SET_DTYPE = ListKey(
    "with `placement: follow`, the `deny` ops that get float32 through their dtype argument",
    read=lambda tree: frozenset(op.op_name() for op in read_rules.known(tree.child("set_dtype").as_strings())),
    write=sorted,
    said=lambda ops: [(f"set_dtype of {op}", "float32", "") for op in ops],
)
_FLOAT8 = ListKey(
    "a list of entries for matrix products that run in float8; rules for modules have a key of this name, too",
    read=lambda tree: tuple(read_rules.float8_rules(tree)),
    write=write_list.float8,
    said=lambda rules: [(r.subject, f"{r.wanted} at rank {r.rank}" if r.rank else r.wanted, r.reason) for r in rules],
    over=laid_over,
)
_SAVED = ListKey(
    "a list of entries on how values are kept for backward; of those that fit a value, the last one counts",
    read=lambda tree: () if tree.child("saved").is_missing else tuple(saved_rules(tree)),
    write=written,
    said=lambda rules: [(f"{rule.subject} (rule {i})", str(rule.keep), rule.reason) for i, rule in enumerate(rules)],
    over=lambda earlier, later: (*earlier, *later),
)
_REDUCTION_DEPTH = ListKey(
    "for each op, how many elements it may reduce into one in 16 bits; a single number, or `*`, applies to all "
    "reductions, and `null` lifts a limit",
    read=lambda tree: dict(read_rules.reduction_depth(tree)),
    write=write_list.limits,
    said=lambda limits: [(f"reduction_depth of {op}", str(limit), "") for op, limit in limits.items()],
    over=limited,
)
_PRODUCT_DEPTH = ListKey(
    "a product that adds up fewer elements into one is treated as elementwise work (`infer`), and a dot product, "
    "which gives one number, as `sum`; `null` lifts the limit",
    read=lambda tree: read_rules.depth(tree, "product_depth"),
    write=lambda limit: limit.most,
    said=lambda limit: [("product_depth", str(limit), "")],
    over=later_or_earlier,
)
_BACKWARD_DEPTH = ListKey(
    "the most gradients that 16 bits may add up in backward, in a kernel or from the readers of a value; a kernel with "
    "more runs in float32, and readers share further casts; `null` lifts the limit",
    read=lambda tree: read_rules.depth(tree, "backward_depth"),
    write=lambda limit: limit.most,
    said=lambda limit: [("backward_depth", str(limit), "")],
    over=later_or_earlier,
)
_DEMANDS = ListKey(
    "a list of entries for ops that amplify the rounding of their operands",
    read=lambda tree: {demand.op: demand for demand in read_rules.demands(tree)},
    write=lambda demands: write_list.demands(demands.values()),
    said=lambda demands: [(f"demand of {op}", str(d), d.reason) for op, d in demands.items()],
)
_ALIASES = ListKey(
    "for each further name, the listed op whose rules it follows",
    read=read_rules.aliases,
    write=lambda aliases: dict(sorted(aliases.items())),
    said=lambda aliases: [(f"alias {further}", name, "") for further, name in aliases.items()],
)
_EXTENDS = "the preset, or the file beside this one, on which this list builds; or a list of these"

_MOST_NAMED = 8  # of the subjects of a category in a notebook's cell


@dataclass(frozen=True, repr=False)
class OpList:
    """An op list. Immutable; :meth:`merged` returns a new one in which the later list wins, key by key.

    Two lists are equal if their rules and settings are, whatever their names and places.

    Attributes:
        rules: the rules that hold for every call on every device, by op name.
        keep_args: per op, the arguments that stay float32 when it runs in 16 bits (batch_norm's statistics).
        aliases: per further name, the listed name whose rules it takes.
        unlisted: the category of an op without a rule; None: as an earlier merged list says, else ``keep``.
        name: shown in plans and messages.
        placement: the method that chooses the precision of nodes whose category leaves it free: ``cut`` (the fewest
            bytes moved), ``simple`` (TensorFlow's rule) or ``follow`` (torch.autocast's dispatch); None: as an earlier
            merged list says, else ``cut``. Under ``follow`` a rule for an op does not cover its in-place form, and
            overloads may be listed separately (``mm.dtype``).
        set_dtype: the ``deny`` ops that ``follow`` asks for float32 by their dtype argument, not by casts.
        reduction_depth: per op, the most elements that it may reduce into one in 16 bits.
        product_depth: the fewest elements that a contraction must add up to count as a product; with fewer it is
            elementwise work.
        backward_depth: the most gradients of one element that are added up in 16 bits.
        demands: per op that cannot use a rounded operand, its demand on the ops before it.
        conditional: the rules with a ``when`` or for one device type, by op name, conditions and device.
        modules: the rules for module paths, sorted; a later list's have the higher ranks.
        float8: the rules for products in float8, sorted; a later list's have the higher ranks.
        saved: the rules for what is kept for backward; later ones win.
    """

    rules: Mapping[str, Rule] = field(default_factory=dict[str, Rule])
    conditional: Mapping[RuleKey, Rule] = field(default_factory=dict[RuleKey, Rule])
    modules: tuple[ModuleRule, ...] = field(default=(), metadata={"key": _MODULES})
    keep_args: Mapping[str, KeptArgs] = field(default_factory=dict[str, KeptArgs], metadata={"key": _KEEP_ARGS})
    float8: tuple[Float8Rule, ...] = field(default=(), metadata={"key": _FLOAT8})
    saved: tuple[SavedRule, ...] = field(default=(), metadata={"key": _SAVED})
    set_dtype: frozenset[str] = field(default=frozenset(), metadata={"key": _SET_DTYPE})
    reduction_depth: Mapping[str, DepthLimit] = field(
        default_factory=dict[str, DepthLimit], metadata={"key": _REDUCTION_DEPTH}
    )
    product_depth: DepthLimit | None = field(default=None, metadata={"key": _PRODUCT_DEPTH})
    backward_depth: DepthLimit | None = field(default=None, metadata={"key": _BACKWARD_DEPTH})
    demands: Mapping[str, Demand] = field(default_factory=dict[str, Demand], metadata={"key": _DEMANDS})
    aliases: Mapping[str, str] = field(default_factory=dict[str, str], metadata={"key": _ALIASES})
    unlisted: Category | None = field(default=None, metadata={"key": _UNLISTED})
    placement: str | None = field(default=None, metadata={"key": _PLACEMENT})
    name: str = field(default="unnamed", compare=False)

    def __post_init__(self) -> None:
        for name, value in self._values().items():
            if isinstance(value, Mapping):
                object.__setattr__(self, name, MappingProxyType(dict(value)))
        object.__setattr__(self, "unlisted", _category(self.unlisted))
        for name, rules in (("modules", self.modules), ("float8", self.float8)):
            ranks = sorted({rule.rank for rule in rules if rule.path})  # no two of the others fit equally well
            ranked = (replace(rule, rank=ranks.index(rule.rank) if rule.path else 0) for rule in rules)
            object.__setattr__(self, name, tuple(sorted(ranked, key=lambda rule: (rule.rank, rule.key))))

    def _values(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def of(cls, data: Mapping[str, Any], *, name: str = "OpList") -> OpList:
        """Make a list from Python data structured like a YAML file: ``OpList.of({"deny": ["my_lib::op"]})``.

        Args:
            data: mappings, lists, text, numbers, truth values and None.
            name: the list's name in errors and plans; a place in it is printed as ``name:deny[0]``.

        Raises:
            OpListError: the same data would be an error in a YAML file.
        """
        return _from_tree(tree_of(data, name), name, Path.cwd(), ())

    def __repr__(self) -> str:
        counts = ", ".join(f"{len(subjects)} {wanted}" for wanted, subjects in self._by_category().items())
        return f"OpList({self.name!r}, {len(self.every_rule())} rules{f': {counts}' if counts else ''})"

    def _repr_html_(self) -> str:
        from autocastfx.graph.cell import table  # a notebook alone needs it

        settings = {"placement": self.placement, "unlisted": self.unlisted}
        said = [f"{name}: {value}" for name, value in settings.items() if value is not None]
        rows = [("category", "rules", "of")] if self.every_rule() else []
        for wanted, subjects in self._by_category().items():
            rows.append((wanted, str(len(subjects)), listed(subjects, _MOST_NAMED)))
        return table([f"op list {self.name}", *said], rows, most=len(rows), below="")

    def _by_category(self) -> dict[str, list[str]]:
        """Return the subjects of all rules, by what they want for them."""
        found: dict[str, list[str]] = {}
        for rule in self.every_rule():
            found.setdefault(rule.wanted, []).append(rule.subject)
        return found

    def every_rule(self) -> tuple[Rule | ModuleRule | Float8Rule, ...]:
        """Return all rules: for ops, for ops under conditions or on devices, for modules, for products in float8."""
        return (*self.rules.values(), *self.conditional.values(), *self.modules, *self.float8)

    def ops(self) -> frozenset[str]:
        """Return every op name in a rule, and every alias."""
        of_modules = {op for rule in self.modules for op in rule.ops}
        return frozenset({*self.rules, *(op for op, _, _ in self.conditional), *of_modules, *self.aliases})

    def functions(self) -> tuple[str, ...]:
        """Return the dotted paths among the op names; capture keeps the Python functions among them whole."""
        return tuple(sorted(filter(names_function, self.ops())))

    def names_of(self, op: str) -> Iterator[str]:
        """Yield the names that ``op`` may be listed under: its own, its alias, then those of its out-of-place form."""
        for name in dict.fromkeys((op, op if self.placement == "follow" else base_name(op))):
            yield name
            if name in self.aliases:
                yield self.aliases[name]

    def rule(self, op: str, device: str = "") -> Rule | None:
        """Return the rule without conditions for ``op`` on ``device``; None if no name of it is listed."""
        for name in self.names_of(op):
            rule = self.conditional.get((name, (), device)) or self.rules.get(name)
            if rule is not None:
                return rule
        return None

    def keeps(self, op: str) -> KeptArgs:
        """Return the arguments of ``op`` that stay float32, with the place that says so."""
        return next((self.keep_args[name] for name in self.names_of(op) if name in self.keep_args), _NONE_KEPT)

    def kept(self, op: str) -> tuple[str, ...]:
        """Return the names of the arguments of ``op`` that stay float32."""
        return self.keeps(op).names

    def float8_of(self, node: fx.Node, device: str) -> Float8Choice | None:
        """Return what the list says of the float8 products of ``node`` on ``device``; None if it says nothing.

        Raises:
            OpListError: two rules fit equally well and contradict each other.
        """
        if not self.float8:
            return None
        return chosen(self.float8, set(self.names_of(op_name(node))), enclosing_modules(node), device)

    def saved_of(self, node: fx.Node) -> SavedRule | None:
        """Return the rule on how what ``node`` gives is kept for backward; None if there is none."""
        if not self.saved:
            return None
        names, paths = set(self.names_of(op_name(node))), enclosing_modules(node)
        return next((rule for rule in reversed(self.saved) if rule.covers(names, paths)), None)

    def depth_limit(self, op: str, *, of_group: bool) -> DepthLimit | None:
        """Return the limit for ``op``, else the one for all reductions if ``op`` is one (``of_group``), else None."""
        names = (*self.names_of(op), *((ANY_REDUCTION,) if of_group else ()))
        return next((self.reduction_depth[name] for name in names if name in self.reduction_depth), None)

    def demand(self, op: str) -> Demand | None:
        """Return the demand of ``op``; None if it has none, or a later list lifted it."""
        demand = next((self.demands[name] for name in self.names_of(op) if name in self.demands), None)
        return None if demand is None or demand.through == "nothing" else demand

    def merged(self, later: OpList) -> OpList:
        """Return this list merged with ``later``, which wins key by key."""
        return OpList(
            rules={**self.rules, **later.rules},
            conditional={**self.conditional, **later.conditional},
            name=f"{self.name}+{later.name}" if self.every_rule() else later.name,
            **{name: key.over(getattr(self, name), getattr(later, name)) for name, key in _FIELDS.items()},
        )

    def __or__(self, later: OpList) -> OpList:
        return self.merged(later)

    def diff(self, later: OpList) -> tuple[Change, ...]:
        """Compare with ``later``. Each change prints as ``softmax: deny → allow``; equal lists give none."""
        return write_list.changes(self._said(), later._said())

    def _said(self) -> dict[str, tuple[str, str]]:
        """Return each subject's setting and reason, by subject, for comparing two lists."""
        of_ops = (*self.rules.values(), *self.conditional.values())
        said: list[Said] = [(rule.subject, rule.wanted, rule.reason) for rule in of_ops]
        for name, key in _FIELDS.items():
            if (value := getattr(self, name)) != getattr(_NOTHING, name):
                said += key.said(value)
        return {subject: (word, reason) for subject, word, reason in said}

    def text(self) -> str:
        """Write the list as YAML that reads back equal, grouped by category, reason, conditions and devices."""
        values = {name: getattr(self, name) for name in _FIELDS}
        data = {name: _FIELDS[name].write(v) for name, v in values.items() if v != getattr(_NOTHING, name)}
        of_ops = (*self.rules.values(), *self.conditional.values())
        by_category = {c.value: write_list.groups(rule for rule in of_ops if rule.category is c) for c in Category}
        data |= {category: groups for category, groups in by_category.items() if groups}
        if of_modules := write_list.float8_modules(self.float8):
            data["modules"] = [*data.get("modules", ()), *of_modules]
        order = dict.fromkeys(("unlisted", "placement", *KEYS))  # settings of the whole list come first
        return write_list.text({key: data[key] for key in order if key in data and data[key] != []})

    def save(self, path: str | Path) -> None:
        """Write a YAML file that :func:`load_op_list` reads back as an equal list.

        The rules of extended lists are written out; comments and names are not kept. Those of this package's lists are
        marked ``shipped: true``: they decide as they do there, and none of them warns if it matches nothing.

        Raises:
            OSError: the file cannot be written.
        """
        write_whole(Path(path), self.text())

    def __reduce__(self) -> tuple[object, ...]:  # a mapping proxy does not pickle
        values = {n: dict(v) if isinstance(v, Mapping) else v for n, v in self._values().items()}
        return partial(OpList, **values), ()


_FIELDS: Mapping[str, ListKey] = {f.name: f.metadata["key"] for f in fields(OpList) if "key" in f.metadata}
_NOTHING, _NONE_KEPT = OpList(), KeptArgs(())
KEYS: Mapping[str, str] = {  # every key of an op list, with its meaning
    **dict.fromkeys(read_rules.CATEGORIES, "a list of entries for the ops of that category"),
    **{name: key.meaning for name, key in _FIELDS.items()},
    "extends": _EXTENDS,
}


OpListLike = str | Path | OpList | Sequence[str | Path | OpList]


def load_op_list(lists: OpListLike, *, default: str = "float16") -> OpList:
    """Read and merge op lists; later ones win.

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
    if isinstance(lists, Mapping):
        raise ArgumentTypeError("op_list takes no dict: autocastfx.OpList.of(dict) makes a list of one.")
    if not isinstance(lists, Iterable):
        raise ArgumentTypeError(
            f"op_list is a name, a path, an OpList or several of them, not {type(lists).__name__} ({lists!r})."
        )
    merged = OpList()
    for one in lists:
        merged = merged.merged(load_op_list(one, default=default))
    return merged


def _load_file(path: Path, opened: tuple[Path, ...]) -> OpList:
    if path.parent == preset_folder():
        return _load_preset(path, opened, tuple(p.stat().st_mtime_ns for p in sorted(path.parent.glob("*.yaml"))))
    return _from_tree(parse_file(path, shown=str(path), shipped=False), path.stem, path.parent, (*opened, path))


@lru_cache(maxsize=64)  # 10 ms of each conversion
def _load_preset(path: Path, opened: tuple[Path, ...], changed: tuple[int, ...]) -> OpList:
    """Read a shipped list; ``changed`` says when the shipped files were."""
    tree = parse_file(path, shown=f"op_lists/{path.name}", shipped=True)
    return _from_tree(tree, path.stem, path.parent, (*opened, path))


def _from_tree(tree: Tree, name: str, folder: Path, opened: tuple[Path, ...]) -> OpList:
    tree.check_keys(KEYS, what="key of an op list")
    base = OpList()
    for parent in tree.child("extends").as_strings():
        base = base.merged(_load_parent(parent, folder, opened))
    rules = tuple(read_rules.op_rules(tree))
    own = OpList(
        rules={r.op: r for r in rules if not (r.when or r.device)},
        conditional={r.key: r for r in rules if r.when or r.device},
        **{key: kind.read(tree) for key, kind in _FIELDS.items()},
    )
    return replace(base.merged(own), name=name)


def _load_parent(parent: Tree, folder: Path, opened: tuple[Path, ...]) -> OpList:
    is_path = parent.text.endswith((".yaml", ".yml"))
    try:
        path = folder / parent.text if is_path else preset_path(parent.text)
    except OpListError as error:
        raise parent.error(str(error)) from None
    if path.resolve() in {p.resolve() for p in opened}:
        raise parent.error(f"this list extends itself: {' → '.join(p.name for p in (*opened, path))}.")
    if not path.is_file():
        beside = f"beside {opened[-1].name}" if opened else f"in {folder}"
        raise parent.error(f"there is no file {parent.text!r} {beside}.")
    return _load_file(path, opened)


# Find the rule of an op list that decides a node, and the rules that match no node.


@dataclass(frozen=True)
class Matcher:
    """The rules of a list that apply on one device type.

    Rules for module paths win over rules with conditions, and these over rules for an op alone.
    Among module rules: the pattern that matches the innermost module wins, then a rule that names ops, then one that
    names the device, then the higher rank (a later list).
    Among conditional rules: more conditions win, then the op's own name over an alias, then a named device.
    Among rules for an op alone: the class of an enclosing module wins over the op, the innermost class first.
    """

    op_list: OpList
    device: str

    def __call__(self, node: fx.Node) -> Rule | ModuleRule | None:
        """Return the rule that decides ``node``; None if no rule does.

        A module rule that lets ops run in 16 bits skips ops that are unlisted, ``keep`` or ``ban``, unless it names
        them: these ops do not follow the precision of their neighbours.

        Raises:
            OpListError: two rules fit equally well and contradict each other.
        """
        own = self.own(node)
        is_fixed = own is None or own.category in (Category.KEEP, Category.BAN)
        open_to = [(fit, r) for fit, r in self._modules(node) if r.ops or not (is_fixed and r.lowers)]
        return _best(node, open_to) or own

    def own(self, node: fx.Node) -> Rule | None:
        """Return the rule that decides ``node`` where no rule for its module does; None if there is none.

        Raises:
            OpListError: two rules fit equally well and contradict each other.
        """
        if (rule := _best(node, list(self._conditions(node)))) is not None:
            return rule
        rules = (self.op_list.rule(name, self.device) for name in self._names(node))
        return next((rule for rule in rules if rule is not None), None)

    def matching(self, node: fx.Node) -> Iterator[Rule | ModuleRule]:
        """Yield every rule that applies to ``node``, also those that lose to another."""
        for name in self._names(node):
            for alias in self.op_list.names_of(name):
                rules = (self.op_list.rules.get(alias), self.op_list.conditional.get((alias, (), self.device)))
                yield from (rule for rule in rules if rule is not None)
        yield from (rule for _, rule in self._conditions(node))
        yield from (rule for _, rule in self._modules(node))

    def _names(self, node: fx.Node) -> tuple[str, ...]:
        """Return the names that a rule for ``node`` may have: enclosing module classes, its overload, its op.

        Under ``placement: follow`` rules for an op do not apply to its overloads that write into an argument
        (``addmm.out``).
        """
        name = op_name(node)
        writes = isinstance(node.target, OpOverload) and node.target._schema.is_mutable and not name.endswith("_")
        own = () if writes and self.op_list.placement == "follow" else (name,)
        return tuple(n for n in (*module_classes(node), overload_name(node), *own) if n)

    def _conditions(self, node: fx.Node) -> Iterator[tuple[tuple[int, ...], Rule]]:
        """Yield the conditional rules that hold for ``node``, each with its rank of fit."""
        names = list(self.op_list.names_of(op_name(node)))
        given: Mapping[str, Any] | None = None
        for rule in self.op_list.conditional.values():
            if rule.when and rule.op in names and rule.device in ("", self.device):
                given = arguments(node) if given is None else given
                if all(condition.holds(given) for condition in rule.when):
                    yield (len(rule.when), -names.index(rule.op), len(rule.device)), rule

    def _modules(self, node: fx.Node) -> Iterator[tuple[tuple[int, ...], ModuleRule]]:
        if not self.op_list.modules:
            return
        paths = enclosing_modules(node)
        names = set(self.op_list.names_of(op_name(node)))
        for rule in self.op_list.modules:
            if rule.device in ("", self.device) and (not rule.ops or names.intersection(rule.ops)):
                depth = max((i for i, path in enumerate(paths) if rule.covers(path)), default=None)
                if depth is not None:
                    yield (depth, bool(rule.ops), bool(rule.device), rule.rank), rule


def _best(node: fx.Node, matches: Sequence[tuple[tuple[int, ...], _OpRule]]) -> _OpRule | None:
    """Return the best fitting rule, whatever the order of the list; None if there is none.

    Raises:
        OpListError: two fit equally well and contradict each other.
    """
    most = max((fit for fit, _ in matches), default=None)
    best = sorted((rule for fit, rule in matches if fit == most), key=_place)
    for other in best:
        first = best[0]
        if other.wanted != first.wanted:
            way_out = "a further condition" if isinstance(first, Rule) else "a narrower path, or a higher 'rank'"
            raise OpListError(
                f"{first.subject!r} is {first.wanted} here, and {other.subject!r} is {other.wanted} at "
                f"{other.source}: both fit node {node.name!r} equally well. Give one of the two {way_out}.",
                first.source,
            )
    return best[0] if best else None


def _place(rule: Rule | ModuleRule | Float8Rule | Demand | SavedRule) -> tuple[str, int, int, str, str]:
    """Sort key: by file, then by line."""
    subject = rule.op if isinstance(rule, Demand) else rule.subject
    match rule.source:
        case Source(file, line, column):
            return (file, line, column, "", subject)
        case KeyPath(name, path):
            return (name, 0, 0, path, subject)
        case _:
            return ("", 0, 0, "", subject)


class MatchedRules:
    """Which of a list's own rules and demands match nodes, of any number of graphs."""

    def __init__(self, op_list: OpList) -> None:
        self.op_list = op_list
        self._matched: set[int] = set()
        self._decided: set[object] = set()
        self._devices: set[str] = {""}
        self._ops: set[str] = set()
        self._classes: set[str] = set()
        self._paths: set[str] = set()

    def add(self, device: str, nodes: Iterable[fx.Node], decided: Set[object] = frozenset()) -> None:
        """Look at the nodes of a graph.

        Args:
            device: the type that it runs on.
            nodes: its nodes.
            decided: places of rules that decided an op of another name, as the rule of ``square`` decides ``x * x``.
        """
        matcher = Matcher(self.op_list, device)
        self._devices.add(device)
        self._decided |= decided
        for node in nodes:
            self._matched |= {id(rule) for rule in matcher.matching(node)}
            if self.op_list.float8:
                names, paths = set(self.op_list.names_of(op_name(node))), enclosing_modules(node)
                self._matched |= {id(rule) for rule in self.op_list.float8 if rule.covers(names, paths, device)}
            self._ops.add(op_name(node))
            self._classes.update(module_classes(node))
            self._paths.update(enclosing_modules(node))

    def add_saved(self, nodes: Iterable[fx.Node]) -> None:
        """Look at the nodes of a converted graph, whose values rules under ``saved`` are on."""
        for node in nodes if self.op_list.saved else ():
            names, paths = set(self.op_list.names_of(op_name(node))), enclosing_modules(node)
            self._matched |= {id(rule) for rule in self.op_list.saved if rule.covers(names, paths)}

    def unmatched(self) -> tuple[str, ...]:
        """Write a sentence on each of the user's own rules and demands that matches no node, sorted by place.

        Shipped rules and rules for other device types are left out.
        """
        own = [r for r in self.op_list.every_rule() if not r.shipped and r.device in self._devices]
        left = [r for r in own if id(r) not in self._matched and r.source not in self._decided]
        names = {name for op in self._ops for name in self.op_list.names_of(op)}
        demands = [d for d in self.op_list.demands.values() if not d.shipped and d.op not in names]
        saved = [r for r in self.op_list.saved if not r.shipped and id(r) not in self._matched]
        return tuple(self._said(rule) for rule in sorted((*left, *demands, *saved), key=_place))

    def _said(self, rule: Rule | ModuleRule | Float8Rule | Demand | SavedRule) -> str:
        place = f"{rule.source}: " if rule.source else ""
        if isinstance(rule, ModuleRule) or (isinstance(rule, (Float8Rule, SavedRule)) and rule.path):
            if any(ModuleRule(rule.path, "keep").covers(path) for path in self._paths):
                ops = rule.ops if isinstance(rule, ModuleRule) else (rule.op,)
                return f"{place}none of {', '.join(ops)} runs in the modules {rule.path!r}."
            return f"{place}no module of the model matches {rule.path!r}{nearest(rule.path, self._paths)}."
        ops = self._ops | self._classes
        if isinstance(rule, Rule) and any(rule.op in self.op_list.names_of(op) for op in ops):
            on = f" runs on {rule.device}" if rule.device else ""
            has = f" has {' and '.join(map(str, rule.when))}" if rule.when else ""
            return f"{place}no {rule.op} of the model{' and'.join(filter(None, (on, has)))}."
        return f"{place}no node of the model is {rule.op!r}{nearest(rule.op, ops)}."
