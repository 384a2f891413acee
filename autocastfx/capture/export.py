"""Capture a model's graph from inputs with torch.export: non-strict, not decomposed, with every size dynamic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.fx.experimental import _config as fx_config
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import _pytree as pytree

from autocastfx.capture import rewrites
from autocastfx.capture.call import Call, CallSignature, CallStructure, device_among
from autocastfx.capture.failure import AgainError, asks_for_values, capture_error, quiet
from autocastfx.capture.function import FunctionModule, refuse_constants
from autocastfx.capture.leave_intact import capturing, intact
from autocastfx.capture.masks import drop_settled
from autocastfx.capture.python_state import (
    PythonState,
    StateGuard,
    buffers_written_back,
    refuse_backward_hooks,
    unfollowed,
    watched_state,
)
from autocastfx.capture.shape_guard import ShapeGuard, shape_guard
from autocastfx.capture.tidy import tidy
from autocastfx.capture.whole_calls import padding_noted, whole_calls
from autocastfx.errors import CaptureError
from autocastfx.graph.names import op_name
from autocastfx.graph.sizes import any_size

# Refuse at capture what a table cannot be asked for: torch 2.11 looks any dtype up in an abstract one.


def _embedding(input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if input.dtype not in (torch.int64, torch.int32):
        raise RuntimeError(f"embedding: 'indices' are int64 or int32, not {input.dtype}")
    return F.embedding(input, weight, *args, **kwargs)


INTEGER_INDICES: Mapping[Any, rewrites.Rule] = {F.embedding: _embedding}


# Refuse derivatives that a model's forward takes itself: a graph captured by torch.export cannot hold them.


def _refuse(take: Any, *args: Any, **kwargs: Any) -> Any:
    if get_proxy_mode() is None:  # inside a call that stays whole
        return take(*args, **kwargs)
    raise CaptureError(
        "the model's forward takes a derivative (torch.autograd.grad, torch.autograd.backward, Tensor.backward, or "
        "torch.func.grad, vjp, jacrev or hessian), which a graph of torch.export cannot hold. Convert in place, with "
        "autocastfx.enable, or convert the part whose derivative it takes."
    )


DERIVATIVES: Mapping[Any, rewrites.Rule] = {
    take: partial(_refuse, take) for take in (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)
}


# Capture with every size dynamic is slow for a few models (Swin: 41 s against 0.7 s). After this many seconds of thread
# time it starts again with only the first dimension of each input dynamic.
SLOW = 20.0


@dataclass(frozen=True)
class Captured:
    """A model's graph for one mode and one call structure.

    Attributes:
        graph: takes the call's tensors as placeholders and returns a flat tuple; ``get_attr`` nodes read parameters and
            buffers by their names in the model.
        attributes: other values of ``get_attr`` nodes, by target: constants, and graphs of higher-order operators.
        out_spec: the nesting of the output.
        structure: the call structure that it was captured for.
        guard: the conditions on sizes under which it holds.
        training: mode of each module, in the order of ``model.modules()``.
        device: the model's device at capture.
        sizes: the dynamic sizes: ``"all"``, ``"first"`` or ``"none"``.
        guesses: in a draft, the nodes that are assumed to be float32; None for a graph captured from inputs.
        state: the attributes that forward reads.
        changes: the attributes that forward changes, and the graph does not.
        pads: whether an encoder of torch's is in it, which may leave 0 where the graph has values (see ``padding``).
    """

    graph: fx.Graph
    attributes: Mapping[str, Any]
    out_spec: pytree.TreeSpec
    structure: CallStructure
    guard: ShapeGuard
    training: tuple[bool, ...]
    device: torch.device
    sizes: str = field(default="all", compare=False)
    guesses: frozenset[str] | None = None
    state: StateGuard = field(default_factory=StateGuard)
    changes: tuple[str, ...] = ()
    pads: bool = False


class _FlatCall(nn.Module):
    """Wraps a model so that it takes only the tensors of a call."""

    def __init__(
        self, module: nn.Module, signature: CallSignature, structure: CallStructure, rebound: set[str]
    ) -> None:
        super().__init__()
        self.rebound = rebound
        self.module = module
        self._signature, self._structure = signature, structure
        self.state = PythonState(module)

    def forward(self, *tensors: torch.Tensor) -> Any:
        arguments = self._structure.arguments(tensors)
        given = {name: pytree.tree_flatten(argument) for name, argument in arguments.items()}
        args, kwargs = self._signature.split(arguments, in_order=unfollowed(self.module))
        with buffers_written_back(self.module, self.rebound), watched_state(self.state):
            result = self.module(*args, **kwargs)
        changed = [name for name, argument in arguments.items() if not _is_as_given(argument, *given[name])]
        self.state.changes += tuple(f"argument {name}" for name in changed)
        return result


def _is_as_given(argument: Any, leaves: Sequence[Any], spec: pytree.TreeSpec) -> bool:
    now, as_now = pytree.tree_flatten(argument)
    return as_now == spec and all(leaf is was for leaf, was in zip(now, leaves, strict=True))


def capture(
    model: nn.Module,
    signature: CallSignature,
    call: Call,
    *,
    training: Sequence[bool],
    held: Mapping[str, torch.Tensor],
    leaves: Sequence[str] = (),
    sizes: str = "all",
    follows: bool = False,
) -> Captured:
    """Capture ``model`` as it runs ``call``. The model is unchanged afterwards.

    Args:
        model: the caller's model.
        signature: the signature of its forward.
        call: example inputs; their values are not read.
        training: mode of each module, in the order of ``model.modules()``.
        held: parameters and buffers by name that replace the model's own (they may have moved to a device).
        leaves: dotted paths of Python functions that stay whole.
        sizes: the first attempt: ``"all"`` sizes dynamic, only the ``"first"`` of each input, or ``"none"``.
        follows: keep casts to the dtype of another value (``x.to(y.dtype)``) that change nothing in the present model.

    Raises:
        CaptureError: torch.export cannot capture the model, or it has backward hooks; the message says why and what
            would help.
    """
    refuse_backward_hooks(model)
    call = replace(call, tensors=_apart(call.tensors, model, held))
    failures: list[Exception] = []
    numbers, rebound = rewrites.CarriedNumbers(), set[str]()
    attempts = list(_ATTEMPTS[_ATTEMPTS.index(sizes) :])
    while attempts:
        attempt = attempts.pop(0)
        flat = _FlatCall(model, signature, call.structure, rebound)
        with capturing():
            with intact(model, training, held), quiet(), whole_calls(leaves) as called, padding_noted() as padded:
                try:
                    program = _export(flat, call.tensors, attempt, numbers, called)
                except CaptureError:
                    raise
                except AgainError:
                    attempts.insert(0, attempt)
                    continue
                except Exception as error:  # torch.export raises whatever the model's own code or a tracer raises
                    failures.append(error)
                    if asks_for_values(error):
                        break
                    continue
            if isinstance(model, FunctionModule):
                refuse_constants(model, program.constants)
            captured = _captured(
                program,
                set(held),
                called,
                call,
                tuple(training),
                device_among((*held.values(), *call.tensors)),
                attempt,
                follows,
            )
            by_compiler = any(op_name(node) in _BRANCHING for node in captured.graph.nodes)
            state = flat.state.guard(everything=by_compiler)
            return replace(captured, state=state, changes=flat.state.changes, pads=bool(padded))
    raise capture_error(model, failures, training=any(training), called=str(call))


def _apart(
    tensors: tuple[torch.Tensor, ...], model: nn.Module, replacements: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Return the tensors, each an object of its own, for a graph knows its inputs by identity.

    A tensor that is given twice (``model(ids, labels=ids)``) would be one input, read in both places ever after; and
    one that the model holds would be no input at all.
    """
    seen = {id(tensor) for tensor in replacements.values()}
    seen.update(id(one) for m in model.modules() for one in m.__dict__.values() if isinstance(one, torch.Tensor))
    apart: list[torch.Tensor] = []
    for tensor in tensors:
        is_repeated = id(tensor) in seen
        seen.add(id(tensor))
        apart.append(tensor.detach().clone().requires_grad_(tensor.requires_grad) if is_repeated else tensor)
    return tuple(apart)


_ATTEMPTS = ("all", "first", "none")
_BRANCHING = ("cond", "while_loop", "map_impl", "scan")  # whose functions torch.compile traces


def _export(
    flat: _FlatCall,
    tensors: tuple[torch.Tensor, ...],
    attempt: str,
    numbers: rewrites.CarriedNumbers,
    called: list[Any],
) -> ExportedProgram:
    shapes = (tuple(_dynamic(t, attempt) for t in tensors),)
    rules = {
        **rewrites.Casts().rules(),
        **rewrites.COMPARISONS,
        **rewrites.REPAIRS,
        **rewrites.set_data_rule(flat.module),
        **rewrites.CUMULATIVE_NORMS,
        **INTEGER_INDICES,
        **DERIVATIVES,
        **numbers.rules(),
        **rewrites.tensor_hook_rules(flat.module, called),
    }
    with (
        torch.enable_grad(),  # without gradients some modules take fused paths
        cast("Any", fx_config).patch(backed_size_oblivious=True),  # do not specialize on a size of 1
        torch._C._DisableAutocast(),
        rewrites.masks_taken_as_given(),
        any_size(),
        numbers.carried(),
        rewrites.CallRules(rules, SLOW if attempt == "all" else float("inf")),
    ):
        return torch.export.export(flat, tensors, dynamic_shapes=shapes, strict=False)


def _dynamic(tensor: torch.Tensor, attempt: str) -> dict[int, Any]:
    return dict.fromkeys(range({"all": tensor.ndim, "first": min(1, tensor.ndim), "none": 0}[attempt]), Dim.AUTO)


def _captured(
    program: ExportedProgram,
    names: set[str],
    called: list[Any],
    call: Call,
    training: tuple[bool, ...],
    device: torch.device,
    sizes: str,
    follows: bool,
) -> Captured:
    module: Any = program.module(check_guards=False)
    attributes: dict[str, Any] = {}
    graph = tidy(module, names, called, attributes, call.structure.tensor_names(), follows=follows)
    rewrites.detach_unwritten(graph)
    drop_settled(graph, attributes)
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    out_spec = program.call_spec.out_spec
    if out_spec is None:
        raise CaptureError("torch.export gave a program without the structure of its output: please report the model")
    return Captured(graph, attributes, out_spec, call.structure, shape_guard(inputs), training, device, sizes)
