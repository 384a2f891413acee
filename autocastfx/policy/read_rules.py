"""The keys of an op list's YAML with their meanings, and the rules that are read and checked by them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from autocastfx.errors import OpListError
from autocastfx.graph.names import ArgumentType, argument_types, located
from autocastfx.policy.float8 import OPERANDS, RECIPES, SIZES, Float8Settings, Product
from autocastfx.policy.rule import (
    ANY_REDUCTION,
    Category,
    Condition,
    Demand,
    DepthLimit,
    Effect,
    KeptArgs,
    Rule,
    RuleKey,
    Runs,
    Scalar,
    module_pattern,
)
from autocastfx.policy.saved import KEEPS, SAVED_KEYS, Keep
from autocastfx.policy.yaml_tree import Tree, is_known, legal_op_names, nearest

# The keys and values of an op list's YAML, with their meanings. The parser accepts no others.

CATEGORIES: Mapping[str, str] = {
    "allow": "runs in 16 bits",
    "deny": "runs in float32, and pulls the `infer` and `clear` ops that follow it into float32",
    "infer": "safe in 16 bits: used when all its floating-point inputs are 16-bit and that moves fewer bytes, but not "
    "after a `deny` op",
    "clear": "moves, selects or compares values: runs in the precision of its neighbours",
    "promote": "runs in 16 bits only if all its floating-point inputs have 16 bits already",
    "keep": "runs exactly as captured",
    "ban": "the conversion is refused, with the reason",
}
ENTRY_KEYS: Mapping[str, str] = {
    "reason": "text that plans, dumps and errors show",
    "when": "the rule applies to calls whose arguments have these values: for each argument one value, or a list of "
    "values of which one has to match",
    "devices": "the device type or types that the rule is for; by default all",
}
DEMAND_KEYS: Mapping[str, str] = {
    "ops": "these ops run in float32, and so do the ops that compute their operands",
    "through": "how far back float32 is required",
    "arguments": "only what computes these arguments; by default all",
    "of": "only if one of these ops computes such an argument; by default any op",
    "at": "the arguments to check for `of`; by default all those of the demand",
    "reason": "text that plans, dumps and errors show",
}
DEMANDS: Mapping[str, str] = {
    "free": "back to the last `allow` op: the `infer`, `clear` and `promote` ops after it, except those that another "
    "`allow` op reads",
    "products": "as `free`, and the products of two computed values that these ops read",
    "both": "as `products`, and also the products of two computed values that read the result",
    "nothing": "removes the demand of an earlier list",
}
MODULE_KEYS: Mapping[str, str] = {
    "path": "a glob of module paths (`*`, `?` and `[0-3]` inside a name, `**` for any number of names), or `re:` and a "
    "regular expression; it must match the whole path, and covers everything that runs inside the module",
    "category": "a category, `low` or `float32`",
    "float8": "`false`: no product runs in float8; `true`: all do; or keys of an entry under `float8`, without `ops`",
    "reason": "text that plans, dumps and errors show",
    "ops": "only these ops; by default all",
    "devices": "the device type or types that the rule is for; by default all",
    "rank": "an integer: if two rules match a node equally well, the higher rank wins",
}
MODULE_CATEGORIES: Mapping[str, str] = {
    "low": "16 bits, even for ops that the list denies; a node whose numbers 16 bits cannot hold stays float32",
    "float32": "the same as `deny`",
    "tf32": "as `deny`, but on CUDA its matrix products run in TF32: the range of float32, the mantissa of float16",
}
FLOAT8_KEYS: Mapping[str, str] = {
    "ops": "these ops run in float8 where they run in 16 bits, and one of their operands is a weight",
    "recipe": "how operands are quantised; by default `rowwise`",
    "products": "the products that run in float8; by default all. The others stay in 16 bits",
    "least": "the smallest sizes, `{M: …, N: …, K: …}`, of the output's product, M x K times K x N; by default none. N "
    "and K are multiples of 16 in any case, or of what the recipe says",
    "last": "whether a product may run in float8 from whose result no other product is computed, as that of an output "
    "layer; by default `true`",
    "emulate": "`true`: compute the products in float32, from the float8 numbers. It is slow, and for devices without "
    "float8 products",
    "reason": "text that plans and dumps show",
    "devices": "the device type or types that the rule is for; by default all",
}
FLOAT8_PRODUCTS: Mapping[str, str] = {
    "output": "the output, in forward",
    "input_gradient": "the gradient of the input, in backward",
    "weight_gradient": "the gradient of the weight, in backward",
}
UNLISTED: Mapping[str, str] = {
    "keep": "run it as captured",
    "deny": "run it in float32",
    "error": "refuse the conversion",
}
PLACEMENTS: Mapping[str, str] = {
    "cut": "choose the precisions that move the fewest bytes",
    "simple": "by TensorFlow's rule: float32 spreads forwards from `deny` ops, then 16 bits between `allow` ops",
    "follow": "dispatch like torch.autocast: decide each call by the dtypes of its inputs",
}
DEVICES = ("cpu", "cuda", "mps", "xpu", "hpu", "mtia", "maia", "xla", "meta")
# The form of a value in a condition, by the argument's type in the op's schema.
VALUES: Mapping[str, str] = {
    "str": "text",
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "number": "a number",
    "Tensor": "a number in place of a tensor",
    "ScalarType": "a dtype",
    "Layout": "text",
    "MemoryFormat": "text",
    "Device": "text",
}


# Read and check the rules in a parsed op list.

UNLISTED_CATEGORIES = {"keep": Category.KEEP, "deny": Category.DENY, "error": Category.BAN}


def known(ops: Iterable[Tree]) -> Iterator[Tree]:
    """Yield ``ops``, except those in a shipped list that this version of torch lacks."""
    return (op for op in ops if not (op.shipped and not is_known(op.text)))


def rules(tree: Tree) -> Iterator[Rule[Any]]:
    """Yield the rules of a list: under categories, ``modules``, ``float8``, ``saved`` and ``demands``.

    Raises:
        OpListError: an entry is wrong, or two have the same key.
    """
    seen: dict[RuleKey, Rule[Any]] = {}
    overloads = placement(tree) == "follow"  # torch.autocast decides by overload
    for category in Category:
        for entry in tree.child(category.value).entries():
            yield from _distinct(_of_category(entry, category, overloads=overloads), seen)
    for entry in tree.child("modules").entries():
        yield from _distinct(_of_modules(entry), seen)
    for entry in tree.child("float8").entries():
        entry.check_keys(FLOAT8_KEYS, what="key of an entry under 'float8'")
        if not entry.child("ops").as_strings():
            raise entry.error("this entry names no op: give it 'ops: [...]'")
        yield from _distinct(_of_float8(entry, entry), seen)
    saved = (rule for entry in tree.child("saved").entries() for rule in _of_saved(entry))
    yield from (replace(rule, rank=rank) for rank, rule in enumerate(saved))  # of two that fit equally well, the last
    for entry in tree.child("demands").entries():
        yield from _distinct(_of_demand(entry), seen)


def _distinct(rules: Iterable[Rule[Any]], seen: dict[RuleKey, Rule[Any]]) -> Iterator[Rule[Any]]:
    """Yield ``rules``, and note them; refuse one whose key another one of this list has."""
    for rule in rules:
        if (other := seen.setdefault(rule.key, rule)) is not rule:
            subject = f"{'' if rule.path else 'op '}{rule.subject!r}"
            told = f"{subject} is listed twice: as {other.wanted} at {other.source} and as {rule.wanted} here"
            if isinstance(rule.effect, Float8Settings):
                told = f"{rule.subject!r} is listed twice, first at {other.source}"
            if isinstance(rule.effect, Demand):
                told = f"{rule.ops[0]!r} has a demand at {other.source} already"
            raise OpListError(f"{told}. Keep one of the two.", rule.source)
        yield rule


def _rules(
    entry: Tree,
    effect: Callable[[str], Effect],
    ops: Sequence[Tree] | None = None,
    *,
    overloads: bool = False,
    as_one: bool = False,
) -> Iterator[Rule[Effect]]:
    """Yield the rules of an entry, for each type of device that it names.

    They are for ``ops``, by default those under its key ``ops``, whose names may be those of ``overloads``: one for
    each, or for all (``as_one``). ``effect`` makes what a rule says of an op's name, which is empty if the entry names
    no op.
    """
    given, rank, when = (entry.child(key) for key in ("ops", "rank", "when"))
    named = given.as_strings() if ops is None else ops
    path = "" if entry.child("path").is_missing else _pattern(entry.child("path"))
    if not named and not given.is_missing:
        raise given.error("an empty list of ops never matches: leave it out")
    listed = [((op.op_name(overloads=overloads),), op) for op in known(named)]
    if named and not listed:
        return  # without its ops the rule would cover all
    if as_one or not named:
        listed = [(tuple(sorted({name for (name,), _ in listed})), entry)]
    reason, of_all = entry.child("reason").as_text(default=""), 0 if rank.is_missing else rank.as_integer()
    for (names, place), device in product(listed, _devices(entry.child("devices"))):
        op = "" if as_one else "".join(names)
        yield Rule(
            ops=names,
            path=path,
            when=_when(op, when),
            device=device,
            effect=effect(op),
            reason=reason,
            rank=of_all,
            source=place.source,
            shipped=place.shipped,
        )


def _of_category(entry: Tree, category: Category, *, overloads: bool) -> Iterator[Rule[Runs]]:
    """Yield the rules of an entry: an op name, ``op: {when: …}``, or a group ``{ops: […], reason: …}``."""
    ops, body = _group(entry) if entry.is_mapping else ((entry,), entry.missing)
    return _rules(body, lambda _: Runs(category.value), ops, overloads=overloads)


def _group(entry: Tree) -> tuple[tuple[Tree, ...], Tree]:
    items = entry.items()
    key, value = items[0] if items else (entry, entry)
    if len(items) == 1 and value.is_mapping and key.text not in ("ops", *ENTRY_KEYS):
        value.check_keys(ENTRY_KEYS, what="key of an op's entry")
        return (key,), value
    if len(items) == 1 and key.text in legal_op_names():
        raise key.error(f"'{key.text}:' is followed by {{when: …}}, {{devices: …}} or {{reason: …}}, or has no colon")
    entry.check_keys(("ops", *ENTRY_KEYS), what="key of a group")
    ops = entry.child("ops").as_strings()
    if not ops:
        raise entry.error("this group lists no op: give it 'ops: [...]'")
    return ops, entry


def _when(op: str, tree: Tree) -> tuple[Condition, ...]:
    if tree.is_missing:
        return ()
    if not tree.items():
        raise tree.error("an empty 'when' is no condition: leave it out, or say {argument: value}")
    conditions = (_condition(op, argument, values) for argument, values in tree.items())
    return tuple(sorted(conditions, key=lambda c: c.argument))


def _condition(op: str, argument: Tree, values: Tree) -> Condition:
    if isinstance(located(op), type):
        raise argument.error(f"a condition is on the arguments of an op, and {op} is a class")
    name = argument.argument_of(op)
    entries = values.entries() if values.is_list else (values,)
    if not entries:
        raise values.error("an empty list of values never holds")
    scalars = {_value(op, name, entry) for entry in entries}
    return Condition(name, tuple(sorted(scalars, key=lambda v: (type(v).__name__, v if v is not None else 0))))


def _value(op: str, argument: str, tree: Tree) -> Scalar:
    value = tree.as_scalar()
    types = (argument_types(op) or {}).get(argument, ())
    if not types or any(_fits(value, t) for t in types):
        return value
    words = dict.fromkeys(VALUES[t.base] for t in types if t.base in VALUES)
    if not words:
        raise tree.error(f"no condition can be on {argument!r} of {op}, whose type is {types[0].name}")
    wanted = " or ".join([*words, *(["null"] if any(t.is_optional for t in types) else [])])
    hint = tree.number_hint if "number" in wanted else ""
    if isinstance(value, str) and "a dtype" in words:
        hint = nearest(value, (n for n, member in vars(torch).items() if isinstance(member, torch.dtype)))
    quotes = " Put it in quotes." if "text" in words and value is not None else ""
    raise tree.error(f"{argument!r} of {op} is {wanted}: {tree.found(wanted)}{hint}{quotes}")


def _fits(value: Scalar, declared: ArgumentType) -> bool:
    if value is None:
        return declared.is_optional
    word = VALUES.get(declared.base)
    if isinstance(value, bool):
        return word == "true or false"
    if isinstance(value, str):
        return word == "text" or (word == "a dtype" and isinstance(getattr(torch, value, None), torch.dtype))
    return word in ("a number", "a number in place of a tensor") or (
        word == "a whole number" and isinstance(value, int)
    )


def _devices(tree: Tree) -> tuple[str, ...]:
    """Return the device types listed; an empty name, which stands for all, if the key is missing."""
    if tree.is_missing:
        return ("",)
    words = tree.as_strings()
    if not words:
        raise tree.error("an empty list of devices never holds: leave it out")
    known = (*DEVICES, torch._C._get_privateuse1_backend_name())
    for word in words:
        kind, colon, _ = word.text.partition(":")
        if colon and kind in known:
            raise word.error(f"devices are listed by their type: write {kind!r}")
        if word.text not in known:
            raise word.error(
                f"no device type is named {word.text!r}{nearest(word.text, known)}. Known: {', '.join(known)}."
            )
    return tuple(dict.fromkeys(word.text for word in words))


def _of_modules(entry: Tree) -> Iterator[Rule[Runs] | Rule[Float8Settings]]:
    entry.check_keys(MODULE_KEYS, what="key of a module's entry")
    category, setting = entry.child("category"), entry.child("float8")
    says = "float8" if category.is_missing and not setting.is_missing else "category"
    for key in ("path", says):
        if entry.child(key).is_missing:
            raise entry.error(f"this entry has no {key!r}: an entry is {{path: …, {says}: …}}")
    if not category.is_missing:
        word = category.one_of((*MODULE_CATEGORIES, *CATEGORIES), "category")
        yield from _rules(entry, lambda _: Runs(word), as_one=True)
    if not setting.is_missing:
        yield from _of_float8(entry, setting)


def _pattern(path: Tree) -> str:
    """Return the text of a pattern of module paths, checked."""
    pattern = path.as_text()
    try:
        module_pattern(pattern)
    except ValueError as error:
        raise path.error(f"{error}") from None
    return pattern


def _of_saved(entry: Tree) -> Iterator[Rule[Keep]]:
    entry.check_keys(tuple(SAVED_KEYS), what="key of an entry under 'saved'")
    if entry.child("keep").is_missing:
        raise entry.error("this entry does not say how values are kept: an entry is {keep: …, ops: […], path: …}")
    keep = Keep(entry.child("keep").one_of(tuple(KEEPS), "keep"))
    return _rules(entry, lambda _: keep)


def _of_demand(entry: Tree) -> Iterator[Rule[Demand]]:
    entry.check_keys(DEMAND_KEYS, what="key of a demand")
    through, makers, at = entry.child("through"), entry.child("of").as_strings(), entry.child("at")
    if not entry.child("ops").as_strings():
        raise entry.error("this demand names no op: give it 'ops: [...]'")
    word = "free" if through.is_missing else through.one_of(DEMANDS, "through")
    of = tuple(op.op_name() for op in known(makers))
    if not makers and not at.is_missing:
        raise at.error("'at' names the arguments that 'of' applies to, but 'of' is missing: add it")

    def demand(op: str) -> Demand:
        named, looked_at = (
            tuple(argument.argument_of(op) for argument in entry.child(key).as_strings()) for key in ("arguments", "at")
        )
        return Demand(word, named, of, looked_at)

    return _rules(entry, demand) if of or not makers else iter(())  # without 'of' the demand would cover more


def _of_float8(entry: Tree, setting: Tree) -> Iterator[Rule[Float8Settings]]:
    """Yield the rules of an ``entry`` whose settings stand in ``setting``, which may be the entry itself."""
    if setting.is_mapping:
        if setting is not entry:
            legal = [key for key in FLOAT8_KEYS if key not in ("ops", "reason", "devices")]
            setting.check_keys(legal, what="key of 'float8' in a module's entry")
        settings = _float8_settings(setting)
    elif not setting.is_list and (recipe := setting.as_scalar()) in RECIPES:
        raise setting.error(f"a recipe is a key of its own: write float8: {{recipe: {recipe}}}.")
    else:
        settings = Float8Settings(products=tuple(Product) if setting.as_flag() else ())
    for op in known(entry.child("ops").as_strings()):
        if op.op_name() not in OPERANDS:
            raise op.error(f"{op.text} has no float8 products. Those that have: {', '.join(OPERANDS)}.")
    return _rules(entry, lambda _: settings, as_one=setting is not entry)


def _float8_settings(tree: Tree) -> Float8Settings:
    settings: dict[str, Any] = {}
    recipe, products, least = (tree.child(key) for key in ("recipe", "products", "least"))
    if not recipe.is_missing:
        settings["recipe"] = recipe.one_of(RECIPES, "recipe")
    if not products.is_missing:
        words = [word.one_of(FLOAT8_PRODUCTS, "products") for word in products.as_strings()]
        settings["products"] = tuple(product for product in Product if product.value in words)
        lacks = [p for p in settings["products"] if p not in RECIPES[settings.get("recipe", "rowwise")].layouts]
        if lacks:
            raise products.error(f"the recipe {settings['recipe']} has no float8 {lacks[0]}: leave it out")
    if not least.is_missing:
        least.check_keys(SIZES, what="size of a product")
        given = {name.text: size.as_limit() for name, size in least.items()}
        settings["least"] = tuple((name, size) for name in SIZES if (size := given.get(name)) is not None)
    for key in ("last", "emulate"):
        if not tree.child(key).is_missing:
            settings[key] = tree.child(key).as_flag()
    return Float8Settings(**settings)


def keep_args(tree: Tree) -> Iterator[tuple[str, KeptArgs]]:
    """Yield, per op, the arguments that stay float32."""
    for op, names in tree.child("keep_args").items():
        if any(known([op])):
            kept = tuple(name.argument_of(op.op_name()) for name in names.as_strings())
            yield op.op_name(), KeptArgs(kept, op.source, op.shipped)


def aliases(tree: Tree) -> dict[str, str]:
    """Return the listed name by further name."""
    pairs = tree.child("aliases").items()
    return {further.op_name(): listed.op_name() for further, listed in pairs if len([*known((further, listed))]) == 2}


def unlisted(tree: Tree) -> Category | None:
    """Return the category of ops without a rule; None if the list gives none."""
    word = tree.child("unlisted")
    return None if word.is_missing else UNLISTED_CATEGORIES[word.one_of(UNLISTED_CATEGORIES, "unlisted")]


def placement(tree: Tree) -> str | None:
    """Return the method that chooses free precisions; None if the list gives none."""
    word = tree.child("placement")
    return None if word.is_missing else word.one_of(PLACEMENTS, "placement")


def reduction_depth(tree: Tree) -> Iterator[tuple[str, DepthLimit]]:
    """Yield a limit per op named; ``*``, or a number alone, is for all reductions."""
    setting = tree.child("reduction_depth")
    if not setting.is_missing and not setting.is_mapping:
        yield ANY_REDUCTION, DepthLimit(setting.as_limit(), setting.source)
        return
    for op, limit in setting.items():
        name = ANY_REDUCTION if op.text == ANY_REDUCTION else op.op_name()
        if op.text == ANY_REDUCTION or any(known([op])):
            yield name, DepthLimit(limit.as_limit(), limit.source)


def depth(tree: Tree, key: str) -> DepthLimit | None:
    """Return the number that ``product_depth`` or ``backward_depth`` gives; None if the list gives none."""
    setting = tree.child(key)
    return None if setting.is_missing else DepthLimit(setting.as_limit(), setting.source)


# Describe a key of op lists: its meaning, and functions to read, merge, write and compare its values.

Said = tuple[str, str, str]  # subject, setting, reason


def merge_settings(earlier: Any, later: Any) -> Any:
    """Return the later value; the earlier one if the later is None."""
    return earlier if later is None else later


def merge_ranked(earlier: Mapping[RuleKey, Rule[Any]], later: Mapping[RuleKey, Rule[Any]]) -> dict[RuleKey, Rule[Any]]:
    """Merge two lists' rules: later ones get higher ranks, and are laid over earlier ones of the same key."""
    above = 1 + max((rule.rank for rule in earlier.values()), default=-1)
    raised = {key: replace(rule, rank=rule.rank + above) if rule.path else rule for key, rule in later.items()}
    return {**earlier, **raised, **{key: raised[key].over(earlier[key]) for key in earlier.keys() & raised.keys()}}


def merge_limits(earlier: Mapping[str, DepthLimit], later: Mapping[str, DepthLimit]) -> Mapping[str, DepthLimit]:
    """Merge two lists' limits; a later limit for all reductions discards the earlier limits of single ops."""
    return {**({} if ANY_REDUCTION in later else earlier), **later}


@dataclass(frozen=True)
class ListKey:
    """A key of an op list: the ``metadata["key"]`` of the list's field of the same name.

    Attributes:
        meaning: the key's line on the reference page, in Markdown.
        read: reads the value from the whole list's tree, in which the key may be missing.
        write: turns the value into data for YAML. Default values are not written.
        said: lists the value's settings as (subject, setting, reason), for comparisons.
        over: merges an earlier list's value with a later one's; by default the union, in which the later wins.
    """

    meaning: str
    read: Callable[[Tree], Any]
    write: Callable[[Any], Any]
    said: Callable[[Any], Iterable[Said]]
    over: Callable[[Any, Any], Any] = operator.or_
