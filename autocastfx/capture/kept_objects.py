"""Objects that a model keeps and that Dynamo repeats or cannot hold: generators of random numbers, bounded deques."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import wraps
from types import SimpleNamespace
from typing import Any, cast

import torch


def object_mends() -> list[tuple[Any, str, Any]]:
    """Return what takes the place of an attribute of Dynamo's, with the owner and the name.

    - A ``torch.Generator`` is a constant of the graph, which draws from it; guards watch that it is the same object.
    - What is drawn from a ``random.Random`` breaks the graph: Dynamo would give the same numbers in every call.
    - A ``deque`` keeps its bound, which Dynamo loses.
    - Attributes of a ``SimpleNamespace`` may be set, as those of other objects.
    - ``x.data`` that is kept or returned is the one of that line; Dynamo would read it when the graph has run.
    """
    from torch._dynamo.exc import Unsupported
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.variables import ConstantVariable, user_defined
    from torch._dynamo.variables.lists import BaseListVariable
    from torch._dynamo.variables.misc import RandomVariable
    from torch._dynamo.variables.tensor import TensorVariable
    from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

    as_proxy, draw = UserDefinedObjectVariable.as_proxy, cast("Any", RandomVariable.call_method)
    class_for: Any = BaseListVariable.cls_for_instance
    read: Any = TensorVariable.var_getattr

    @wraps(as_proxy)
    def proxy_of(self: Any) -> Any:
        if not isinstance(self.value, torch.Generator) or self.source is None:
            return as_proxy(self)
        install_guard(self.source.make_guard(GuardBuilder.ID_MATCH))
        output = cast("Any", InstructionTranslator.current_tx()).output
        return output.register_static_attr_and_return_proxy("generator", self.value)

    @wraps(draw)
    def call_method(self: Any, tx: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if name in self._supported_fn_names:
            raise cast("Any", Unsupported)(f"a random.Random that the model keeps: {name} draws in Python")
        return draw(self, tx, name, args, kwargs)

    class Bound(ConstantVariable):
        """The bound of a deque, whose contents Dynamo replaces, so that the order of changes is of no matter."""

        def is_constant_none(self) -> bool:
            return True

    def class_of(value: Any) -> Any:
        if type(value) is not deque or value.maxlen is None:
            return class_for(value)

        def bounded(items: Any, *, source: Any) -> Any:
            install_guard(AttrSource(source, "maxlen").make_guard(GuardBuilder.CONSTANT_MATCH))
            return class_for(value)(items, maxlen=Bound(value.maxlen), source=source)

        return bounded

    is_standard: Any = user_defined.is_standard_setattr

    def is_standard_setattr(method: object) -> bool:
        return method is SimpleNamespace.__setattr__ or is_standard(method)

    @wraps(read)
    def read_attribute(self: Any, tx: Any, name: str) -> Any:
        return self.method_attr_data(tx) if name == "data" else read(self, tx, name)

    return [
        (TensorVariable, "var_getattr", read_attribute),
        (user_defined, "is_standard_setattr", is_standard_setattr),
        (UserDefinedObjectVariable, "as_proxy", proxy_of),
        (RandomVariable, "call_method", call_method),
        (BaseListVariable, "cls_for_instance", staticmethod(class_of)),
    ]
