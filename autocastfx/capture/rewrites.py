"""Rewrite calls of torch functions in the model's code that a graph cannot hold as they are, each by a rule."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import sys
import time
import types
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import CodeType, FrameType
from typing import Any, NoReturn, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._guards import TracingContext
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.modules import transformer
from torch.overrides import TorchFunctionMode

from autocastfx.capture.failure import AgainError, TooSlowError, calling_frame, frame_outside, place
from autocastfx.capture.leave_intact import patched_here
from autocastfx.capture.python_state import is_plain, said
from autocastfx.capture.whole_calls import record_call
from autocastfx.errors import CaptureError, UnsupportedError
from autocastfx.graph.alias import alias_sets
from autocastfx.graph.names import op_name

# Rewrite the model's calls of torch functions during a capture, each by the rule for its function.

Rule = Callable[..., Any]  # takes the arguments of the call, and gives its result


class CallRules(TorchFunctionMode):
    """While open, a call of a function that has a rule is a call of the rule; other calls are as they were.

    One mode for all rules, because each call of torch in the model passes through each mode.

    Raises:
        TooSlowError: this thread has worked for more than ``seconds`` since this was made.
    """

    def __init__(self, rules: Mapping[Any, Rule], seconds: float) -> None:
        super().__init__()
        self.rules, self.end = rules, time.thread_time() + seconds

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():  # it traces the bodies of cond and while_loop, and modes with them
            return func(*args, **kwargs)
        if time.thread_time() > self.end:
            raise TooSlowError("capturing every size as dynamic takes too long")
        return self.rules.get(func, func)(*args, **kwargs)


# Rewrite comparisons that return a Python bool for torch.export, which refuses the original functions.


def _equal(input: Tensor, other: Tensor) -> Any:
    """Compare as torch does: the shapes are equal, and so are all elements after promotion to one dtype."""
    if input.shape != other.shape:
        return False
    return input.eq(other).all().item()


def _allclose(input: Tensor, other: Tensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> Any:
    """Compare as torch does, with broadcasting."""
    return input.isclose(other, rtol, atol, equal_nan).all().item()


# torch.export refuses these functions, because their result depends on values, but captures elementwise comparison,
# ``all`` and ``item`` as long as no code branches on the result.
COMPARISONS: Mapping[Any, Rule] = {
    torch.equal: _equal,
    Tensor.equal: _equal,
    torch.allclose: _allclose,
    Tensor.allclose: _allclose,
}


# Replace torch's own Python code that reads tensor values by code that gives the same result without.


@contextmanager
def masks_taken_as_given() -> Generator[None, None, None]:
    """While open, ``nn.TransformerEncoder`` and ``nn.TransformerDecoder`` do not compare a mask with the causal one.

    The comparison only selects a faster kernel that needs no mask; with the mask the result is the same.
    """
    with patched_here(transformer, "_detect_is_causal_mask", _is_said_causal):
        yield


def _is_said_causal(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    return is_causal is True


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: Any = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    factor: Any = momentum
    if not isinstance(momentum, torch.SymFloat) or not training or running_mean is None or running_var is None:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, factor, eps)
    mean, var = torch.zeros_like(running_mean), torch.zeros_like(running_var)
    result = F.batch_norm(input, mean, var, weight, bias, training, 1.0, eps)  # the statistics of this batch
    with torch.no_grad():
        for average, of_batch in ((running_mean, mean), (running_var, var)):
            average.mul_(1 - factor).add_(of_batch * factor)
    return result


# Batch norms whose momentum is read from a tensor, because torch's operator takes a plain number: with
# ``momentum=None`` it is one over the number of batches.
CUMULATIVE_NORMS: Mapping[Any, Rule] = {F.batch_norm: _batch_norm}


# The operators ``autocastfx::data`` and ``autocastfx::set_data``: ``x.data`` and ``x.data = new`` as nodes of a
# graph.
#
# ``data`` returns a tensor's values with their own version counter, so that autograd does not see writes into them.
# ``set_data`` gives a tensor the storage of another; views of the old storage, and values saved for backward, keep
# it. Both use PyTorch's own attribute, so that a graph does what the model does.
# :mod:`autocastfx.runtime.operators.norms` says how these operators are made.

_LIBRARY = torch.library.Library("autocastfx", "FRAGMENT")
_LIBRARY.define("data(Tensor(a) self) -> Tensor(a)")
_LIBRARY.define("set_data(Tensor(a!) self, Tensor(a) new_data) -> Tensor(a!)")


def _data(x: Tensor) -> Tensor:
    return x.data


def _set_data(x: Tensor, new_data: Tensor) -> Tensor:
    if TracingContext.try_get() is None:  # is_compiling() is false in kernels that torch 2.11 traces
        x.data = new_data
    elif torch.compiler.is_exporting() or not isinstance(x, FunctionalTensor):  # on abstract tensors
        x.data.copy_(new_data.data)
    else:
        raise UnsupportedError(
            "the model assigns to the .data of a tensor, which torch.compile cannot reproduce exactly. Run the "
            'converted model without torch.compile (enable: inner="eager"), or write into the tensor: '
            "p.data.copy_(new)."
        )
    return x


_LIBRARY.impl("data", _data, "CompositeImplicitAutograd")
_LIBRARY.impl("set_data", _set_data, "CompositeImplicitAutograd")

data = torch.ops.autocastfx.data.default
set_data = torch.ops.autocastfx.set_data.default


# Capture ``x.data`` and ``x.data = new`` in a model's code as nodes; torch.export alone sees neither.

_DATA = cast("Any", torch.Tensor.data)
_GET, _SET = _DATA.__get__, _DATA.__set__
_DYNAMOS_GET = cast("Any", torch._C)._autograd._get_data_attr  # what Dynamo writes for x.data

# Rules that both ways of capture apply: to the calls in the model's code, and to those in a graph of Dynamo.
REPAIRS: Mapping[Any, Rule] = {_GET: data, _DYNAMOS_GET: data}


def set_data_rule(model: nn.Module) -> Mapping[Any, Rule]:
    """Return the rule that records ``x.data = new`` as the operator ``autocastfx::set_data``.

    It raises CaptureError where a tensor gets data of another size, dtype or device: a graph cannot hold that.
    """
    return {_SET: partial(_set, model)}


def keeps_form(old: torch.Tensor, new: torch.Tensor) -> bool:
    """True if a graph can hold ``old.data = new``: dtype, device and size stay."""
    return (old.dtype, old.device, old.shape) == (new.dtype, new.device, new.shape)


def _set(model: nn.Module, old: torch.Tensor, new: torch.Tensor) -> None:
    if not keeps_form(old, new):
        named = (*model.named_parameters(), *model.named_buffers())
        name = next((repr(name) for name, tensor in named if tensor is old), "a tensor")
        frame = calling_frame()
        raise CaptureError(
            f"forward gives {name} other data: {said(old)} on {old.device} becomes {said(new)} on {new.device}, at "
            f"{place(frame.f_code.co_filename, frame.f_lineno)}. A graph holds tensors of fixed sizes and dtypes: "
            "change it before the conversion."
        )
    set_data(old, new)


def detach_unwritten(graph: fx.Graph) -> None:
    """Replace ``x.data`` by ``x.detach()``, which lists know, if nothing writes into the storage."""
    reads = [node for node in graph.nodes if node.target is data]
    written = alias_sets(graph) if reads else {}
    for node in reads:
        if node not in written and graph.output_node() not in node.users:
            node.target = torch.ops.aten.detach.default


# Capture ``int(tensor)`` and ``float(tensor)`` in a model's code as numbers that the graph computes in each call.

_READS = {Tensor.__int__: "int", Tensor.__float__: "float"}


class CarriedNumbers:
    """The places where ``int`` and ``float`` read tensors: the globals of the functions that call them.

    Python's own return a plain number, which a tracer cannot follow. During a capture the names there stand for classes
    that return the symbol of ``tensor.item()``, and behave as Python's own with other arguments.
    """

    def __init__(self) -> None:
        self.places: dict[tuple[int, str], dict[str, Any]] = {}

    @contextmanager
    def carried(self) -> Generator[None, None, None]:
        """While open, ``int`` and ``float`` stand for these classes in all places."""
        with ExitStack() as stack:
            for (_, name), table in self.places.items():
                table[name] = _STAND_INS[name]
                stack.callback(table.pop, name, None)
            yield

    def rules(self) -> Mapping[Any, Rule]:
        """Return rules that add the places where ``int`` or ``float`` reads a tensor, and raise AgainError there.

        None is added where it is known, the code defines the name itself, or it compares types by identity.
        """
        return {read: partial(self._read, read) for read in _READS}

    def _read(self, read: Any, x: Tensor) -> Any:
        if get_proxy_mode() is None:
            return read(x)
        frame, name = calling_frame(), _READS[read]
        key = (id(frame.f_globals), name)
        if key in self.places or name in frame.f_globals or _compares(frame.f_code, name):
            return read(x)
        self.places[key] = frame.f_globals
        raise AgainError


def _compares(code: CodeType, name: str) -> bool:
    """True if the module of ``code`` has a comparison such as ``type(x) is int``, or no readable source."""
    try:
        lines, _ = inspect.findsource(code)
        tree = ast.parse("".join(lines))
    except (OSError, SyntaxError, ValueError):
        return True
    comparisons = (node for node in ast.walk(tree) if isinstance(node, ast.Compare))
    by_identity = (c for c in comparisons if any(isinstance(op, (ast.Is, ast.IsNot)) for op in c.ops))
    return any(isinstance(side, ast.Name) and side.id == name for c in by_identity for side in (c.left, *c.comparators))


class _Alike(type):
    """Metaclass of stand-ins for ``int`` and ``float``: only calls with a traced tensor or number differ."""

    builtin: type
    carry: Any

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        symbolic = (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
        if len(args) == 1 and not kwargs and isinstance(args[0], symbolic) and get_proxy_mode() is not None:
            return cls.carry(args[0])
        return cls.builtin(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.builtin)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.builtin)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.builtin

    def __hash__(cls) -> int:
        return hash(cls.builtin)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.builtin, name)


def _whole(value: Any) -> Any:
    """Return the value rounded toward 0, as Python does."""
    if isinstance(value, Tensor):
        return (value if value.dtype in _INTEGERS else value.to(torch.int64)).item()
    return torch.sym_int(value)


def _real(value: Any) -> Any:
    return torch.sym_float(value.item() if isinstance(value, Tensor) else value)


_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
_STAND_INS = {
    "int": _Alike("int", (), {"builtin": int, "carry": staticmethod(_whole)}),
    "float": _Alike("float", (), {"builtin": float, "carry": staticmethod(_real)}),
}


# Rules for casts in the model's code whose meaning a traced graph would lose.

_DTYPE = cast("Any", torch.Tensor.dtype).__get__
_CASTS = frozenset({torch.Tensor.to, torch.Tensor.float, torch.Tensor.type, torch.Tensor.type_as})
_FACTORIES = frozenset({torch.zeros, torch.ones, torch.full, torch.arange, torch.linspace})


class Casts:
    """Rules that keep casts which change nothing in the float32 model.

    ``x.float()`` of a float32 ``x`` returns ``x``, so the tracer would make later readers of ``x`` read the cast.
    Applied to an alias of ``x``, the cast stays in its place. ``x.to(y.dtype)`` and ``x.type_as(y)`` ask for the dtype
    of ``y``, not for float32, which a graph would bake in. They become ``type_as`` nodes, or aliases if ``y`` is
    unknown; so do tensors made with ``dtype=y.dtype``. ``tidy`` removes these nodes, unless dtypes are to be followed.
    """

    def __init__(self) -> None:
        self.asked: torch.Tensor | None = None  # the tensor whose dtype was read last

    def rules(self) -> Mapping[Any, Rule]:
        """Return a rule for each function that casts or makes tensors, and for reading a dtype."""
        return {
            _DTYPE: self._dtype,
            **{func: partial(self._cast, func) for func in _CASTS},
            **{func: partial(self._made, func) for func in _FACTORIES},
        }

    def _dtype(self, x: torch.Tensor) -> torch.dtype:
        self.asked = x
        return x.dtype

    def _cast(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(args[0], torch.Tensor):
            return func(*args, **kwargs)
        alias = torch.ops.aten.alias.default(args[0])
        if _changes_nothing(func, args, kwargs) and _follows(func, args, kwargs):
            other = self._followed(args, kwargs)
            return alias if other is None else torch.ops.aten.type_as.default(alias, other)
        return func(alias, *args[1:], **kwargs)

    def _made(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """A tensor of the dtype that was read last, as in ``zeros(n, dtype=x.dtype)``, becomes a ``type_as``."""
        made = func(*args, **kwargs)
        if self.asked is None or kwargs.get("dtype") != self.asked.dtype or not _follows(func, args, {}):
            return made
        return torch.ops.aten.type_as.default(torch.ops.aten.alias.default(made), self.asked)

    def _followed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        """Return the tensor whose dtype the cast asks for, if known."""
        given = (*args[1:], *kwargs.values())
        named = next((arg for arg in given if isinstance(arg, torch.Tensor)), None)
        read = self.asked if self.asked is not None and self.asked.dtype in given else None
        return named if named is not None else read


def _changes_nothing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    given = (*args[1:], *kwargs.values())
    if len(given) != 1 or set(kwargs) - {"dtype", "other"}:
        return False
    (target,) = given
    if isinstance(target, torch.Tensor):
        return (target.dtype, target.device) == (args[0].dtype, args[0].device)
    if isinstance(target, (str, torch.device)) and func is torch.Tensor.to:
        return torch.device(target) == args[0].device
    return target == args[0].dtype


def _follows(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if the model's source asks for a device, or for the dtype of another value, and not for float32."""
    others = (torch.Tensor, torch.device, str)
    if func in (torch.Tensor.type_as, torch.Tensor.to) and any(
        isinstance(a, others) for a in (*args[1:], *kwargs.values())
    ):
        return True
    return follows_dtype(calling_frame())


def follows_dtype(frame: FrameType) -> bool:
    """True if the source of the cast that ``frame`` is in asks for the dtype of another value."""
    source = _source(frame)
    return ".dtype" in source and "float" not in source


def _source(frame: FrameType) -> str:
    """Return the source of the call that ``frame`` is in; before Python 3.11, the whole line."""
    code = frame.f_code
    line = linecache.getline(code.co_filename, frame.f_lineno)
    if sys.version_info < (3, 11):
        return line
    first, last, start, end = list(code.co_positions())[frame.f_lasti // 2]
    if first is None or last is None or start is None or end is None:
        return line
    lines = [linecache.getline(code.co_filename, number) for number in range(first, last + 1)]
    lines[-1] = lines[-1].encode()[:end].decode(errors="ignore")
    lines[0] = lines[0].encode()[start:].decode(errors="ignore")
    text = "".join(lines)
    return text[text.rfind(".to(") :] if ".to(" in text else text  # the text before is the receiver of the call


# Hooks that a forward registers on tensors: a graph registers them in each call, or capture refuses them by name.

_GRAD_FN = cast("Any", torch.Tensor.grad_fn).__get__
_NO_READERS = ("detach", "sym_size", "output")  # no gradient comes through them
_HELP = "autocastfx.enable converts in place, and keeps hooks."


class HookCall:
    """``tensor.register_hook(hook)`` as a function that gives the tensor back."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook = hook
        self.__module__ = "autocastfx"
        self.__name__ = self.__qualname__ = "register_hook"

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Register the hook, if there will be a gradient."""
        if tensor.requires_grad:
            tensor.register_hook(self.hook)
        return tensor

    def __reduce__(self) -> tuple[Any, ...]:
        if isinstance(getattr(self.hook, "__self__", None), nn.Module):
            raise UnsupportedError(
                f"{self.hook.__qualname__}, a hook that forward registers, belongs to the original, which is not saved "
                "with a converted model: let it be a function of a module of Python."
            )
        return HookCall, (self.hook,)


def tensor_hook_rules(model: nn.Module, called: list[Callable[..., Any]]) -> Mapping[Any, Rule]:
    """Return rules that record ``h.register_hook(hook)`` as a node, and refuse what a graph cannot repeat.

    Args:
        model: the model that is captured.
        called: where functions that become nodes are added.
    """
    return {
        torch.Tensor.register_hook: partial(_register, model, called),
        torch.Tensor.register_post_accumulate_grad_hook: partial(_refuse, "register_post_accumulate_grad_hook"),
        torch.Tensor.retain_grad: partial(_refuse, "retain_grad"),
        _GRAD_FN: _grad_fn,
    }


def used_before(hooked: fx.Node, at: fx.Node | None = None) -> bool:
    """True if a node, before ``at``, reads ``hooked``: its gradient would not pass the hook."""
    readers = (user for user in hooked.users if op_name(user).partition(".")[0] not in _NO_READERS)
    return any(user.target is not _DYNAMOS_GET and (at is None or user < at) for user in readers)


def _register(
    model: nn.Module, called: list[Callable[..., Any]], tensor: torch.Tensor, hook: Callable[..., Any]
) -> Any:
    mode = get_proxy_mode()
    if any(tensor is registered for registered in (*model.parameters(), *model.buffers())):
        _raise("register_hook", "on a parameter: each call would add another. Register it once, outside of forward")
    if (name := _not_repeated(hook)) is not None:
        _raise("register_hook", f"whose function holds {name}, which a graph would keep from this call for ever")
    if mode is not None:
        proxy: Any = mode.tracer.unwrap_proxy(tensor)
        node = getattr(proxy, "node", None) or getattr(getattr(proxy, "proxy", None), "node", None)
        if isinstance(node, fx.Node) and used_before(node):
            _raise("register_hook", "after the tensor was used. Register it on the line that follows its making")
        record_call(HookCall(hook), lambda: tensor, (tensor,), {}, called)
    return _Handle()


def _refuse(name: str, *_: Any, **__: Any) -> NoReturn:
    _raise(name, "which a graph does not hold")


def _raise(name: str, why: str) -> NoReturn:
    frame = frame_outside()
    at = place(frame.f_code.co_filename, frame.f_lineno)
    raise CaptureError(f"forward calls {name}, {why}, at {at}. {_HELP}")


class _Handle:
    """The handle of a recorded hook, which stays."""

    def remove(self) -> NoReturn:
        """Refuse to remove the hook in forward."""
        raise CaptureError(f"forward removes a hook that it has registered, which a graph does not hold. {_HELP}")


def _grad_fn(tensor: torch.Tensor) -> Any:
    function = tensor.grad_fn
    return None if function is None else _GradFn(function)


class _GradFn:
    """A node of autograd as forward sees it, which takes no hooks."""

    def __init__(self, node: Any) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        if name in ("register_hook", "register_prehook"):
            _raise(f"{name} of a grad_fn", "which a graph does not hold")
        return getattr(self._node, name)


def _not_repeated(hook: Any, seen: tuple[Any, ...] = ()) -> str | None:
    """Name what ``hook`` holds besides plain values, modules and functions: it may be made anew in each forward."""
    if any(hook is one for one in seen) or isinstance(hook, (nn.Module, type, types.ModuleType, CodeType)):
        return None
    seen = (*seen, hook)
    if isinstance(hook, functools.partial):
        contents = {**{f"argument {i}": one for i, one in enumerate(hook.args)}, **hook.keywords, "func": hook.func}
    elif isinstance(hook, types.MethodType):
        contents = {"self": hook.__self__, "func": hook.__func__}
    elif isinstance(hook, types.FunctionType):
        contents = {**inspect.getclosurevars(hook).nonlocals, **(hook.__kwdefaults__ or {})}
        contents.update({f"default {i}": one for i, one in enumerate(hook.__defaults__ or ())})
    else:
        is_bare = isinstance(hook, types.BuiltinFunctionType) and hook.__self__ is None
        return None if is_bare else str(type(hook).__name__)
    for name, one in contents.items():
        if not is_plain(one) and (inner := _not_repeated(one, seen)) is not None:
            return repr(name) if not callable(one) else inner
    return None
