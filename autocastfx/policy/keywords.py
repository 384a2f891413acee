"""The keys and values of an op list's YAML, with their meanings. The parser accepts no others."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = [
    "CATEGORIES",
    "DEMANDS",
    "DEMAND_KEYS",
    "DEVICES",
    "ENTRY_KEYS",
    "MODULE_CATEGORIES",
    "MODULE_KEYS",
    "PLACEMENTS",
    "UNLISTED",
    "VALUES",
]

CATEGORIES: Mapping[str, str] = {
    "allow": "runs in 16 bits",
    "deny": "runs in float32, and pulls the `infer` and `clear` ops that follow it into float32",
    "infer": "safe in 16 bits: runs there if all its floating-point inputs have 16 bits and it moves fewer bytes; "
    "after a `deny` op it is float32",
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
    "path": "a glob of module paths (`*` and `?` inside a name, `**` for any number of names), or `re:` and a regular "
    "expression; it must match the whole path, and covers everything that runs inside the module",
    "category": "a category, `low` or `float32`",
    "reason": "text that plans, dumps and errors show",
    "ops": "only these ops; by default all",
    "devices": "the device type or types that the rule is for; by default all",
    "rank": "an integer: if two rules match a node equally well, the higher rank wins",
}
MODULE_CATEGORIES: Mapping[str, str] = {
    "low": "16 bits, even for ops that the list denies; a node whose numbers 16 bits cannot hold stays float32",
    "float32": "the same as `deny`",
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
