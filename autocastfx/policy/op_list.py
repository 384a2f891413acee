"""Op lists: the rules on each op, read from YAML that anyone can edit.

A list never holds code: parsing constructs no objects, and tags are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache, partial
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from autocastfx.errors import ArgumentTypeError, OpListError, listed
from autocastfx.files import write_whole
from autocastfx.graph.names import base_name, names_function
from autocastfx.policy import read_rules, write_list
from autocastfx.policy.float8 import Float8Settings
from autocastfx.policy.read_rules import ListKey, Said, merge_limits, merge_ranked, merge_settings
from autocastfx.policy.rule import ANY_REDUCTION, Category, Demand, DepthLimit, Effect, KeptArgs, Rule, RuleKey, Runs
from autocastfx.policy.saved import Keep
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
    over=merge_settings,
)
_PLACEMENT = ListKey(
    "how to choose the precision of `infer`, `clear` and `promote` ops",
    read=read_rules.placement,
    write=str,
    said=lambda placement: [("placement", placement, "")],
    over=merge_settings,
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
_REDUCTION_DEPTH = ListKey(
    "for each op, how many elements it may reduce into one in 16 bits; a single number, or `*`, applies to all "
    "reductions, and `null` lifts a limit",
    read=lambda tree: dict(read_rules.reduction_depth(tree)),
    write=write_list.limits,
    said=lambda limits: [(f"reduction_depth of {op}", str(limit), "") for op, limit in limits.items()],
    over=merge_limits,
)
_PRODUCT_DEPTH = ListKey(
    "a product that adds up fewer elements into one is treated as elementwise work (`infer`), and a dot product, "
    "which gives one number, as `sum`; `null` lifts the limit",
    read=lambda tree: read_rules.depth(tree, "product_depth"),
    write=lambda limit: limit.most,
    said=lambda limit: [("product_depth", str(limit), "")],
    over=merge_settings,
)
_BACKWARD_DEPTH = ListKey(
    "the most gradients that 16 bits may add up in backward, in a kernel or from the readers of a value; a kernel with "
    "more runs in float32, and readers share further casts; `null` lifts the limit",
    read=lambda tree: read_rules.depth(tree, "backward_depth"),
    write=lambda limit: limit.most,
    said=lambda limit: [("backward_depth", str(limit), "")],
    over=merge_settings,
)
_ALIASES = ListKey(
    "for each further name, the listed op whose rules it follows",
    read=read_rules.aliases,
    write=lambda aliases: dict(sorted(aliases.items())),
    said=lambda aliases: [(f"alias {further}", name, "") for further, name in aliases.items()],
)

_MOST_NAMED = 8  # of the subjects of a category in a notebook's cell


@dataclass(frozen=True, repr=False)
class OpList:
    """An op list. Immutable; :meth:`merged` returns a new one in which the later list wins, key by key.

    Two lists are equal if their rules and settings are, whatever their names and places.

    Attributes:
        lines: the rules, each by its key; a later list's have the higher ranks.
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
    """

    lines: Mapping[RuleKey, Rule[Any]] = field(default_factory=dict[RuleKey, Rule[Any]])
    keep_args: Mapping[str, KeptArgs] = field(default_factory=dict[str, KeptArgs], metadata={"key": _KEEP_ARGS})
    set_dtype: frozenset[str] = field(default=frozenset(), metadata={"key": _SET_DTYPE})
    reduction_depth: Mapping[str, DepthLimit] = field(
        default_factory=dict[str, DepthLimit], metadata={"key": _REDUCTION_DEPTH}
    )
    product_depth: DepthLimit | None = field(default=None, metadata={"key": _PRODUCT_DEPTH})
    backward_depth: DepthLimit | None = field(default=None, metadata={"key": _BACKWARD_DEPTH})
    aliases: Mapping[str, str] = field(default_factory=dict[str, str], metadata={"key": _ALIASES})
    unlisted: Category | None = field(default=None, metadata={"key": _UNLISTED})
    placement: str | None = field(default=None, metadata={"key": _PLACEMENT})
    name: str = field(default="unnamed", compare=False)

    def __post_init__(self) -> None:
        for name, value in self._values().items():
            if isinstance(value, Mapping):
                object.__setattr__(self, name, MappingProxyType(dict(value)))
        object.__setattr__(self, "unlisted", _category(self.unlisted))
        dense: dict[RuleKey, Rule[Any]] = {}
        for kind in (Runs, Float8Settings, Keep):
            # no others fit equally well
            inside = [r for r in self.lines.values() if r.path and isinstance(r.effect, kind)]
            ranks = sorted({rule.rank for rule in inside})
            dense |= {rule.key: replace(rule, rank=ranks.index(rule.rank)) for rule in inside}
        object.__setattr__(self, "lines", MappingProxyType({**self.lines, **dense}))

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

    @cached_property
    def modules(self) -> tuple[Rule[Runs], ...]:
        """The rules on the precisions of modules, sorted by rank."""
        return tuple(rule for rule in self._every(Runs) if rule.path)

    @cached_property
    def float8(self) -> tuple[Rule[Float8Settings], ...]:
        """The rules on products in float8, sorted by rank."""
        return self._every(Float8Settings)

    @cached_property
    def saved(self) -> tuple[Rule[Keep], ...]:
        """The rules on what is kept for backward, sorted by rank."""
        return self._every(Keep)

    @cached_property
    def demands(self) -> tuple[Rule[Demand], ...]:
        """The demands of ops that cannot use a rounded operand."""
        return self._every(Demand)

    def _every(self, kind: type[Effect]) -> tuple[Rule[Effect], ...]:
        """Return the rules with an effect of this kind, those outside of modules first, then by rank."""
        own = (rule for rule in self.lines.values() if isinstance(rule.effect, kind))
        return tuple(sorted(own, key=lambda r: (bool(r.path), r.rank, *((r.path, r.ops, r.device) if r.path else ()))))

    def without_saved(self) -> OpList:
        """Return the list without the rules on what is kept for backward."""
        return replace(self, lines={key: r for key, r in self.lines.items() if not isinstance(r.effect, Keep)})

    def every_rule(self) -> tuple[Rule[Runs] | Rule[Float8Settings], ...]:
        """Return all rules on precisions: for ops, for modules, for products in float8."""
        return (*self._every(Runs), *self.float8)

    @cached_property
    def rules(self) -> Mapping[str, Rule[Runs]]:
        """The rules that hold for every call on every device, by op name."""
        plain = (rule for rule in self._every(Runs) if not (rule.path or rule.when or rule.device))
        return MappingProxyType({rule.ops[0]: rule for rule in plain})

    @cached_property
    def by_op(self) -> Mapping[tuple[type, str], Sequence[Rule[Any]]]:
        """The rules by the kind of their effect and by op, which is empty for those on any op."""
        table: dict[tuple[type, str], list[Rule[Any]]] = {}
        for rule in self.lines.values():
            for op in rule.ops or ("",):
                table.setdefault((type(rule.effect), op), []).append(rule)
        return table

    def ops(self) -> frozenset[str]:
        """Return every op name in a rule on precisions, and every alias."""
        return frozenset({*(op for rule in self._every(Runs) for op in rule.ops), *self.aliases})

    def functions(self) -> tuple[str, ...]:
        """Return the dotted paths among the op names; capture keeps the Python functions among them whole."""
        return tuple(sorted(filter(names_function, self.ops())))

    def names_of(self, op: str) -> Iterator[str]:
        """Yield the names that ``op`` may be listed under: its own, its alias, then those of its out-of-place form."""
        for name in dict.fromkeys((op, op if self.placement == "follow" else base_name(op))):
            yield name
            if name in self.aliases:
                yield self.aliases[name]

    def rule(self, op: str, device: str = "") -> Rule[Runs] | None:
        """Return the rule without conditions for ``op`` on ``device``; None if no name of it is listed."""
        keys = ((Runs, (name,), "", (), on) for name in self.names_of(op) for on in (device, ""))
        return next((self.lines[key] for key in keys if key in self.lines), None)

    def keeps(self, op: str) -> KeptArgs:
        """Return the arguments of ``op`` that stay float32, with the place that says so."""
        return next((self.keep_args[name] for name in self.names_of(op) if name in self.keep_args), _NONE_KEPT)

    def kept(self, op: str) -> tuple[str, ...]:
        """Return the names of the arguments of ``op`` that stay float32."""
        return self.keeps(op).names

    def depth_limit(self, op: str, *, of_group: bool) -> DepthLimit | None:
        """Return the limit for ``op``, else the one for all reductions if ``op`` is one (``of_group``), else None."""
        names = (*self.names_of(op), *((ANY_REDUCTION,) if of_group else ()))
        return next((self.reduction_depth[name] for name in names if name in self.reduction_depth), None)

    def demand(self, op: str) -> Rule[Demand] | None:
        """Return the demand of ``op``; None if it has none, or a later list lifted it."""
        keys = ((Demand, (name,), "", (), "") for name in self.names_of(op))
        rule = next((self.lines[key] for key in keys if key in self.lines), None)
        return None if rule is None or rule.effect.through == "nothing" else rule

    def merged(self, later: OpList) -> OpList:
        """Return this list merged with ``later``, which wins key by key."""
        return OpList(
            lines=merge_ranked(self.lines, later.lines),
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
        said: list[Said] = [
            (rule.subject, f"{rule.wanted} at rank {rule.rank}" if rule.rank else rule.wanted, rule.reason)
            for rule in self.lines.values()
        ]
        for name, key in _FIELDS.items():
            if (value := getattr(self, name)) != getattr(_NOTHING, name):
                said += key.said(value)
        return {subject: (word, reason) for subject, word, reason in said}

    def text(self) -> str:
        """Write the list as YAML that reads back equal, grouped by category, reason, conditions and devices."""
        values = {name: getattr(self, name) for name in _FIELDS}
        data = {name: _FIELDS[name].write(v) for name, v in values.items() if v != getattr(_NOTHING, name)}
        by_key: dict[str, list[Rule[Any]]] = {}
        for rule in self.lines.values():
            by_key.setdefault(rule.heading, []).append(rule)
        data |= {heading: write_list.entries(rules) for heading, rules in by_key.items()}
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
_DEPTHS = ("reduction_depth", "product_depth", "backward_depth")
KEYS: Mapping[str, str] = {  # every key of an op list, with its meaning
    **dict.fromkeys(read_rules.CATEGORIES, "a list of entries for the ops of that category"),
    **dict.fromkeys(("modules", "keep_args", "float8", "saved", "set_dtype", *_DEPTHS, "demands"), ""),  # their order
    "modules": "a list of rules for modules: they apply to the ops that run inside",
    "float8": "a list of entries for matrix products that run in float8; rules for modules have a key of this name, "
    "too",
    "saved": "a list of entries on how values are kept for backward; of two that fit equally well, the last one counts",
    "demands": "a list of entries for ops that amplify the rounding of their operands",
    **{name: key.meaning for name, key in _FIELDS.items()},
    "extends": "the preset, or the file beside this one, on which this list builds; or a list of these",
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
    lines = {rule.key: rule for rule in read_rules.rules(tree)}
    own = OpList(lines=lines, **{key: kind.read(tree) for key, kind in _FIELDS.items()})
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
