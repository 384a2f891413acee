"""Matrix products in float8: the operators ``autocastfx::quantize`` and ``autocastfx::float8_linear``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from autocastfx.dtypes import LOW_DTYPES
from autocastfx.errors import UnsupportedError
from autocastfx.policy.float8 import RECIPES, Float8Choice, Layout, Product
from autocastfx.runtime.kernels.chosen import is_chosen
from autocastfx.runtime.operators.casts import is_concrete

# The numbers are those of torchao 0.18 to the bit (``torchao/float8``: ``float8_utils.py`` for scales,
# ``float8_linear.py`` for the products, ``float8_ops.py`` for their kernels). What differs is that a value is quantised
# once for all that read it, and that each product may stay in 16 bits.

_aten: Any = torch.ops.aten
_SMALLEST = 1e-12  # of a largest magnitude, so that the scale of zeros is finite
_LIBRARY = torch.library.Library("autocastfx", "FRAGMENT")


def missing_products(device: torch.device, recipe: str = Float8Choice.recipe) -> str:
    """Say why a device has no float8 products by a recipe; empty if it has some, or if this machine cannot tell."""
    capability = RECIPES[recipe].capability
    if capability is None and device.type not in ("cpu", "meta"):
        return f"this package calls none by the recipe {recipe}"
    if device.type == "cuda" and capability is not None:
        if not torch.cuda.is_available() or torch.version.hip is not None:
            return "" if torch.version.hip is None else "torch's products on ROCm have other float8 dtypes"
        found = torch.cuda.get_device_capability(device)
        if found < capability:
            name, (at_least, minor) = torch.cuda.get_device_name(device), capability
            return f"{name} has compute capability {found[0]}.{found[1]}, below {at_least}.{minor}"
        return ""
    return "" if device.type in ("cpu", "meta") else f"torch has none for {device.type}"


def has_fast_products(device: torch.device) -> bool:
    """True where torch's scaled products are faster than float32 ones.

    A CPU has them, too, but as a plain loop: torch 2.13 took 770 times as long for 256 x 256 x 256 numbers on one core.
    """
    return device.type == "cuda"


# Quantise a value for one layout.

_LIBRARY.define("quantize(Tensor self, str layout, ScalarType dtype, bool power_of_two) -> (Tensor data, Tensor scale)")


class Quantized(NamedTuple):
    """A matrix in float8 and what it was multiplied by; the layout says what shares a scale."""

    data: Tensor
    scale: Tensor
    layout: Layout


def _is_empty(x: Tensor) -> bool:
    size = x.numel()
    return isinstance(size, int) and not size  # a symbolic size is none that a graph for others has


def _takes_kernels(x: Tensor) -> bool:
    """True for an eager value where the Triton kernels are chosen; a compiler fuses the operator's parts itself."""
    if not (is_chosen("quantize", x) and is_concrete(x)) or torch._C._are_functorch_transforms_active():
        return False
    return x.dtype in (*LOW_DTYPES, torch.float32) and x.numel() > 0 and not missing_products(x.device)


def _quantized(x: Tensor, layout: str, dtype: torch.dtype, power_of_two: bool) -> tuple[Tensor, Tensor]:
    if layout not in (Layout.ROWS, Layout.COLUMNS) or not _takes_kernels(x):
        return _parts(x, layout, dtype, power_of_two)
    from autocastfx.runtime.kernels import quantize as kernels  # where Triton is

    call = kernels.quantize_rows if layout == Layout.ROWS else kernels.quantize_columns
    return call(x.reshape(-1, x.shape[-1]), dtype, power_of_two)


def _parts(x: Tensor, layout: str, dtype: torch.dtype, power_of_two: bool) -> tuple[Tensor, Tensor]:
    matrix = x.reshape(-1, x.shape[-1])
    matrix = matrix.t() if Layout(layout).is_turned else matrix
    if Layout(layout).block:
        return _by_blocks(matrix, Layout(layout), dtype)
    magnitudes = matrix.abs()
    if _is_empty(x):
        largest = matrix.new_zeros(() if layout == Layout.TENSOR else (len(matrix), 1))
    else:
        largest = magnitudes.amax() if layout == Layout.TENSOR else magnitudes.amax(1, keepdim=True)
    most = torch.finfo(dtype).max
    # In float64, as torchao does, so that a compiler gives the same scale. An Inf makes it 0, and its own product NaN.
    scale = (most / largest.double().clamp(min=_SMALLEST)).float()
    scale = scale.log2().floor().exp2() if power_of_two else scale
    return (matrix.float() * scale).clamp(-most, most).to(dtype).contiguous(), scale


def _by_blocks(matrix: Tensor, layout: Layout, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantise each block of a row by the power of two of its largest magnitude, the last block filled with zeros.

    By section 6.3 of the OCP specification. The numbers are those of torchao's ``to_mx`` with FLOOR to the bit, and so
    are the scales, but for magnitudes below 2 ** -118: there its scale is half of what it divided by. A NaN makes all
    of its block NaN.
    """
    (rows, width), block, most = matrix.shape, layout.block, torch.finfo(dtype).max
    count = -(-width // block)
    blocks = torch.nn.functional.pad(matrix.float(), (0, count * block - width)).reshape(rows, count, block)
    largest = blocks.abs().amax(2, keepdim=True)
    power = (largest.view(torch.int32) & 0x7F800000).view(torch.float32)  # 0 of subnormal numbers
    top = 2.0 ** (math.frexp(most)[1] - 1)
    scale = torch.where(largest.isnan(), largest, (top / power).clamp(top * 2.0**-128, 2.0**126))  # the least of an Inf
    data = (blocks * scale).clamp(-most, most).to(dtype).reshape(rows, count * block)
    return data[:, :width].contiguous(), scale.reshape(rows, count).to(layout.scales)


def _quantized_with_autograd(x: Tensor, layout: str, dtype: torch.dtype, power_of_two: bool) -> tuple[Tensor, Tensor]:
    x = x.detach()  # float8_linear has the gradient
    if x.device.type != "cpu":
        return _quantized(x, layout, dtype, power_of_two)  # a compiler sees its parts, and fuses them
    # Fused on a CPU they may be wrong: Inductor (torch 2.13) lets vectorised kernels that transpose float8 write into
    # what is still read. So there a compiler sees one operator.
    with torch._C._AutoDispatchBelowAutograd():
        made: tuple[Tensor, Tensor] = quantize(x, layout, dtype, power_of_two)
    return made


_LIBRARY.impl("quantize", _quantized_with_autograd, "Autograd")
_LIBRARY.impl("quantize", _quantized, "CompositeExplicitAutograd")

quantize = torch.ops.autocastfx.quantize.default


# Multiply two quantised matrices.


def _product(left: Quantized, right: Quantized, dtype: torch.dtype, call: _Call, *, in_forward: bool) -> Tensor:
    """Return ``left @ right.T`` of [M, C] and [N, C], rounded once to ``dtype``."""
    recipe = RECIPES[call.recipe]
    if call.emulate or recipe.capability is None or not has_fast_products(left.data.device):
        return torch.mm(_restored(left), _restored(right).t()).to(dtype)
    a, b = (_padded(one.data, recipe.multiple) for one in (left, right))
    of_a, of_b = left.scale.reciprocal(), right.scale.reciprocal()
    by_rows = bool(of_a.ndim or of_b.ndim)
    made = torch.bfloat16 if by_rows and dtype in (torch.float16, torch.float32) else dtype
    if not by_rows:
        return _scaled_mm(a, b.t(), of_a, of_b, made, fast=in_forward)
    of_b = of_b.t() if of_b.ndim else of_b
    if in_forward:
        return _scaled_mm(a, b.t(), of_a, of_b.contiguous(), made, fast=True).to(dtype)
    # CUDA's product with scales of rows is slow where it adds up in float32. So the scales, which are powers of two and
    # change no digit, come after.
    one = torch.ones((), device=a.device)
    return (_scaled_mm(a, b.t(), one, one, made) * (of_a * of_b).to(made)).to(dtype)


def _scaled_mm(a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    result: Tensor = _aten._scaled_mm.default(a, b, of_a, of_b, out_dtype=dtype, use_fast_accum=fast)
    return result


def _restored(quantized: Quantized) -> Tensor:
    data, scale = quantized.data.float(), quantized.scale.float()
    if block := quantized.layout.block:
        scale = scale.repeat_interleave(block, 1)[:, : data.shape[1]]
    return data / scale


def _padded(data: Tensor, multiple: int) -> Tensor:
    """Return ``data`` contiguous, with zeros to a multiple of columns: only the number of rows of inputs is none."""
    missing = -data.shape[1] % multiple
    if isinstance(missing, int) and not missing:
        return data.contiguous()
    return torch.nn.functional.pad(data.view(torch.uint8), (0, missing)).view(data.dtype)


# A linear layer whose three products are each in float8 or in 16 bits. ``products`` names those in float8, separated by
# spaces: torch.jit.trace records no operator that takes a list of texts.

_LIBRARY.define(
    "float8_linear(Tensor input, Tensor weight, Tensor? bias, Tensor[] input_forward, Tensor[] weight_forward, "
    "Tensor[] input_backward, Tensor[] weight_backward, str recipe, str products, bool emulate=False) -> Tensor"
)


class _Call(NamedTuple):
    """The arguments of a call after input, weight and bias. An empty operand is quantised when it is read."""

    input_forward: Sequence[Tensor]
    weight_forward: Sequence[Tensor]
    input_backward: Sequence[Tensor]
    weight_backward: Sequence[Tensor]
    recipe: str
    products: str
    emulate: bool = False

    def layouts(self, product: Product) -> tuple[Layout, Layout] | None:
        """The layouts of the left and the right operand; None for a product in 16 bits."""
        return RECIPES[self.recipe].layouts.get(product) if product.value in self.products.split() else None

    def gradients(self, gradient: Tensor) -> dict[Layout, Quantized]:
        """The gradient in each layout that products in backward read, where kernels make two of them at once."""
        recipe = RECIPES[self.recipe]
        read = {at[0] for p in (Product.INPUT_GRADIENT, Product.WEIGHT_GRADIENT) if (at := self.layouts(p)) is not None}
        if read != {Layout.ROWS, Layout.COLUMNS} or not _takes_kernels(gradient):
            return {}
        from autocastfx.runtime.kernels import quantize as kernels  # where Triton is

        rows, columns = kernels.quantize_both(gradient, recipe.gradient, recipe.power_of_two)
        return {Layout.ROWS: Quantized(*rows, Layout.ROWS), Layout.COLUMNS: Quantized(*columns, Layout.COLUMNS)}

    def operand(self, given: Sequence[Tensor], x: Tensor, layout: Layout, *, is_gradient: bool = False) -> Quantized:
        data, scale = given or quantize(x, *RECIPES[self.recipe].quantizing(layout, is_gradient=is_gradient))
        return Quantized(data, scale, layout)


def _output(x: Tensor, weight: Tensor, bias: Tensor | None, call: _Call) -> Tensor:
    layouts = call.layouts(Product.OUTPUT)
    if layouts is None or _is_empty(x):
        result: Tensor = _aten.linear.default(x, weight, bias)
    else:
        left = call.operand(call.input_forward, x, layouts[0])
        right = call.operand(call.weight_forward, weight, layouts[1])
        result = _product(left, right, x.dtype, call, in_forward=True)
        result = result if bias is None else result + bias.to(result.dtype)
    # Not a view to autograd, which lets nobody write into a view that an autograd function returns.
    unviewed: Tensor = _aten._unsafe_view.default(result, (*x.shape[:-1], weight.shape[0]))
    return unviewed


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: _Call) -> Tensor:
        ctx.set_materialize_grads(False)
        of_input, of_weight, *_ = ctx.needs_input_grad
        # Of each operand, only what its product in backward reads: in float8, where that is at hand.
        in_16 = {
            Product.WEIGHT_GRADIENT: not (call.layouts(Product.WEIGHT_GRADIENT) and call.input_backward),
            Product.INPUT_GRADIENT: not (call.layouts(Product.INPUT_GRADIENT) and call.weight_backward),
        }
        kept_input = [x] if in_16[Product.WEIGHT_GRADIENT] or _is_empty(x) else call.input_backward
        kept_weight = [weight] if in_16[Product.INPUT_GRADIENT] or _is_empty(x) else call.weight_backward
        ctx.kept = len(kept_input) if of_weight else 0
        ctx.save_for_backward(*(kept_input if of_weight else ()), *(kept_weight if of_input else ()))
        ctx.shapes = x.shape, weight.shape, None if bias is None else bias.shape
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.call = call._replace(input_forward=(), weight_forward=(), input_backward=(), weight_backward=())
        return _output(x, weight, bias, call)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        _refuse_transforms()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        (gradient,) = gradients
        if gradient is None:
            return None, None, None, None
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "float8_linear has no second derivative, as create_graph=True asks for: leave the layer out of float8, "
                "with modules: - {path: …, float8: false} in an op list."
            )
        saved, call = ctx.saved_tensors, ctx.call
        kept_input, kept_weight = saved[: ctx.kept], saved[ctx.kept :]
        matrix = gradient.reshape(-1, gradient.shape[-1])
        quantized = call.gradients(matrix) if all(ctx.needs_input_grad[:2]) else {}
        of_input = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_input = _in_backward(Product.INPUT_GRADIENT, matrix, kept_weight, ctx.dtypes[0], call, quantized)
            of_input = of_input.reshape(ctx.shapes[0])
        if ctx.needs_input_grad[1]:
            of_weight = _in_backward(Product.WEIGHT_GRADIENT, matrix, kept_input, ctx.dtypes[1], call, quantized)
        if ctx.needs_input_grad[2]:
            of_bias = gradient.sum_to_size(ctx.shapes[2]).to(ctx.dtypes[2])
        return of_input, of_weight, of_bias, None


def _in_backward(
    product: Product,
    gradient: Tensor,
    kept: Sequence[Tensor],
    dtype: torch.dtype,
    call: _Call,
    quantized: dict[Layout, Quantized],
) -> Tensor:
    """Return the product of the gradient, [M, N], and the other operand; ``quantized`` are gradients made before.

    Args:
        product: that of the input's gradient, or of the weight's.
        gradient: of the output.
        kept: the other operand: in 16 bits alone, or in float8 with its scale.
        dtype: of the result.
        call: what the layer was given.
        quantized: the gradient in each layout that it has been quantised for; added to.
    """
    layouts, other = call.layouts(product), kept[0]
    is_of_weight = product is Product.WEIGHT_GRADIENT
    if layouts is None or _is_empty(gradient) or _is_empty(other):
        left = gradient.t() if is_of_weight else gradient
        return torch.mm(left, other.reshape(-1, other.shape[-1])).to(dtype)
    left, right = layouts
    if left not in quantized:
        quantized[left] = call.operand((), gradient, left, is_gradient=True)
    read = quantized[left], call.operand(kept if len(kept) > 1 else (), other, right)
    # By columns the matrix lies transposed already; with one scale, what is to be added up is turned to the rows' end.
    a = _turned(read[0]) if is_of_weight and left is Layout.TENSOR else read[0]
    b = _turned(read[1]) if right is Layout.TENSOR else read[1]
    return _product(a, b, dtype, call, in_forward=False)


def _turned(quantized: Quantized) -> Quantized:
    return quantized._replace(data=quantized.data.t())


def _refuse_transforms(*_: Any, **__: Any) -> NoReturn:
    raise UnsupportedError(
        "float8_linear has no forward-mode derivative, and does not run under the transforms of torch.func: leave the "
        "layer out of float8, with modules: - {path: …, float8: false} in an op list."
    )


def _with_autograd(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any, **named: Any) -> Tensor:
    if torch._C._are_functorch_transforms_active():
        _refuse_transforms()
    return _Float8Linear.apply(x, weight, bias, _Call(*rest, **named))


def _without_autograd(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any, **named: Any) -> Tensor:
    return _output(x, weight, bias, _Call(*rest, **named))


_LIBRARY.impl("float8_linear", _with_autograd, "Autograd")
_LIBRARY.impl("float8_linear", _without_autograd, "CompositeExplicitAutograd")
for _name in ("quantize", "float8_linear"):
    _LIBRARY.impl(_name, _refuse_transforms, "FuncTorchBatched")  # vmap

float8_linear = torch.ops.autocastfx.float8_linear.default
