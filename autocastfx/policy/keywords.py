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
    "deny": "float32, and what follows it through `infer` and `clear` ops is drawn to float32 as well",
    "infer": "safe in 16 bits: where all its floating inputs already are and that moves fewer bytes; float32 after a "
    "`deny` op",
    "clear": "moves, selects or compares values: as its neighbours",
    "promote": "in 16 bits only if all its floating inputs already are",
    "keep": "runs exactly as captured",
    "ban": "the conversion is refused, with the reason",
}
ENTRY_KEYS: Mapping[str, str] = {
    "reason": "text that plans, dumps and errors show",
    "when": "the rule holds for calls whose arguments have these values: for each argument a value, or a list of which "
    "one must fit",
    "devices": "the type, or types, of device that the rule is for; all if it is left out",
}
DEMAND_KEYS: Mapping[str, str] = {
    "ops": "the ops: they run in float32, and so does what leads to them",
    "through": "how far back float32 is asked for",
    "arguments": "only what leads to these arguments; to any if it is left out",
    "of": "only where one of these ops makes such an argument; any if it is left out",
    "at": "the arguments that `of` is about, if not all that are asked for",
    "reason": "text that plans, dumps and errors show",
}
DEMANDS: Mapping[str, str] = {
    "free": "to the last `allow` op: the `infer`, `clear` and `promote` ops after it, but for those that another "
    "`allow` op reads",
    "products": "all of those, and the products of two computed values that they read",
    "both": "as `products`, and the products of two computed values that read the result",
    "nothing": "the demand of an earlier list is lifted",
}
MODULE_KEYS: Mapping[str, str] = {
    "path": "a glob of module paths (`*` and `?` inside a name, `**` for any number of names), or `re:` and a regular "
    "expression; it has to match the whole path, and covers all that runs inside the module",
    "category": "a category, `low` or `float32`",
    "reason": "text that plans, dumps and errors show",
    "ops": "only these ops; all if it is left out",
    "devices": "the type, or types, of device that the rule is for; all if it is left out",
    "rank": "a whole number: of two rules that fit a node equally well, the higher rank wins",
}
MODULE_CATEGORIES: Mapping[str, str] = {
    "low": "16 bits, even for ops that the list denies; what 16 bits cannot hold stays float32",
    "float32": "the same as `deny`",
}
UNLISTED: Mapping[str, str] = {
    "keep": "it runs as captured",
    "deny": "it runs in float32",
    "error": "the conversion is refused",
}
PLACEMENTS: Mapping[str, str] = {
    "cut": "so that the fewest bytes are moved",
    "simple": "by TensorFlow's rule: float32 spreads forwards from `deny` ops, then 16 bits between `allow` ops",
    "follow": "as torch.autocast dispatches: each call by the dtypes that its inputs have",
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
