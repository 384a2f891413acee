"""Products in float8: what is quantised, the three products of a linear layer, and what stays visible."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from autocastfx.errors import UnsupportedError
from autocastfx.policy.float8 import E4M3, E5M2, RECIPES, Layout, Product
from autocastfx.runtime.operators import float8
from autocastfx.runtime.operators.float8 import float8_linear, missing_products, quantize
from tests.helpers import TORCH, relative_error, saved_bytes

# Half a unit in the last place: relative to normal numbers, and between subnormal ones.
HALF = {E4M3: (2**-4, 2**-10), E5M2: (2**-3, 2**-17)}
PRODUCTS = tuple(Product)  # torch 2.11's Dynamo iterates over no enum
NAMES = tuple(product.value for product in PRODUCTS)
LOW = torch.bfloat16


def spread(*size: int, seed: int = 0) -> Tensor:
    """Rows and columns of very different magnitudes."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(size, generator=random) * 2 ** torch.randn(*size[:-1], 1, generator=random).mul(3)
    return (x * 2 ** torch.randn(size[-1], generator=random).mul(3)).to(LOW)


def operand(x: Tensor, layout: Layout, recipe: str) -> list[Tensor]:
    return list(quantize(x, layout.value, E4M3, RECIPES[recipe].power_of_two))


def of_numbers(scale: Tensor, layout: Layout, width: int) -> Tensor:
    """Scales, in float64, each beside what it is of."""
    return scale.double().repeat_interleave(layout.block, 1)[:, :width] if layout.block else scale.double()


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    recipe: str = "rowwise",
    products: tuple[str, ...] = NAMES,
    *,
    prepared: bool = True,
    emulate: bool = False,
) -> Tensor:
    """The layer as a graph calls it; if not ``prepared``, it quantises all operands itself."""
    at = {p: layouts for p, layouts in RECIPES[recipe].layouts.items() if p.value in products and prepared}
    output, of_input, of_weight = (at.get(product) for product in PRODUCTS)
    return float8_linear(
        x,
        weight,
        bias,
        operand(x, output[0], recipe) if output else [],
        operand(weight, output[1], recipe) if output else [],
        operand(x, of_weight[1], recipe) if of_weight else [],
        operand(weight, of_input[1], recipe) if of_input else [],
        recipe,
        " ".join(p for p in products if Product(p) in RECIPES[recipe].layouts),
        emulate,
    )


def gradients(x: Tensor, weight: Tensor, bias: Tensor | None, gradient: Tensor, **options: object) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias) if t is not None]
    result = linear(leaves[0], leaves[1], leaves[2] if bias is not None else None, **options)  # pyright: ignore
    return [result.detach(), *torch.autograd.grad(result, leaves, gradient)]


# -- quantised values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("layout", Layout)
def test_what_is_quantised_is_the_nearest_number(layout: Layout, dtype: torch.dtype, power_of_two: bool) -> None:
    x = spread(3, 16, 80)
    data, scale = quantize(x, layout.value, dtype, power_of_two)
    matrix = x.reshape(48, 80).double()
    given = matrix.t() if layout.is_turned else matrix
    assert (data.dtype, data.shape, scale.dtype) == (dtype, given.shape, layout.scales)
    parts = -(-given.shape[1] // layout.block) if layout.block else 1
    assert scale.shape == (() if layout is Layout.TENSOR else (len(given), parts))
    assert data.is_contiguous()
    relative, between = HALF[dtype]
    most, each = torch.finfo(dtype).max, of_numbers(scale, layout, given.shape[1])
    given = (given * each).clamp(-most, most) / each if layout.block else given  # MX clamps, by its specification
    bound = torch.maximum(relative * given.abs(), between / each)
    assert ((data.double() / each - given).abs() <= bound * (1 + 1e-6)).all()
    blocks = data.double().abs().split(layout.block or given.shape[1], 1)
    largest = data.double().abs().amax() if layout is Layout.TENSOR else torch.stack([b.amax(1) for b in blocks])
    assert ((largest > most / 2 - 1) & (largest <= most)).all(), "nothing overflows, and the range is used"
    if power_of_two or layout.block:
        assert (scale.double().log2() % 1 == 0).all()


def block_by_hand(numbers: list[float]) -> tuple[list[float], float]:
    """What MXFP8 keeps of a block, and its scale, number by number: sections 5.1 and 6.3 of the specification."""
    shared = max(math.frexp(max(map(abs, numbers)))[1] - 1 - 8, -126)
    kept: list[float] = []
    for number in numbers:
        scaled = math.ldexp(number, -shared)  # exact in float64
        digit = 2.0 ** (max(math.frexp(scaled)[1] - 1, -6) - 3)  # the distance of neighbours in e4m3
        kept.append(max(-448.0, min(448.0, round(scaled / digit) * digit)))  # half to even, as Python rounds
    return kept, 2.0**shared


@pytest.mark.parametrize("dtype", [LOW, torch.float16, torch.float32])
def test_blocks_are_those_of_the_specification(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    digits = torch.rand(40, 32, generator=random) + 1
    powers = torch.randint(-9, 9, (40, 32), generator=random) + torch.linspace(-140, 118, 40).round().int()[:, None]
    x = torch.ldexp(digits, powers if dtype is not torch.float16 else powers.clamp(-24, 14)).to(dtype)
    x[::2] *= -1
    x[:, 0] = torch.cat([x[:20, 0], -x[20:, 0]])
    for layout, given in (("blocks", x), ("column_blocks", x.t())):
        data, scale = quantize(given, layout, E4M3, True)
        for row, found, of in zip(x.tolist(), data.double().tolist(), scale[:, 0].double().tolist(), strict=True):
            assert (found, 1 / of) == block_by_hand(row)


SPECIAL: dict[str, tuple[list[float], Callable[[Tensor], bool]]] = {
    "zeros": ([0.0, -0.0], lambda block: not block.any()),
    "subnormal": ([1e-40, -3e-45, 2.0**-130], lambda block: bool(((block - SUBNORMAL).abs() <= 2.0**-136).all())),
    "inf": ([torch.inf, 1.0], lambda block: block[0] == torch.inf and not block[1:].any()),
    "minus inf": ([-torch.inf, 2.0**120], lambda block: block[0] == -torch.inf and block[1] == 2.0**120),
    "nan": ([torch.nan, 1.0], lambda block: bool(block.isnan().all())),
    "nan and inf": ([torch.inf, torch.nan], lambda block: bool(block.isnan().all())),
    "largest": (
        [torch.finfo(torch.float32).max, 2.0**127],
        lambda block: block[:2].tolist() == [1.75 * 2.0**127, 2.0**127],
    ),
}
SUBNORMAL = torch.tensor([1e-40, -3e-45, 2.0**-130, *[0.0] * 29])


@pytest.mark.parametrize(("numbers", "fits"), SPECIAL.values(), ids=list(SPECIAL))
def test_a_block_of_special_numbers_changes_no_other(numbers: list[float], fits: Callable[[Tensor], bool]) -> None:
    plain = spread(4, 96).float()
    x = plain.clone()
    x[1, 32:64] = torch.tensor([*numbers, *[0.0] * (32 - len(numbers))])
    found, untouched = (
        float8._restored(float8.Quantized(*quantize(t, "blocks", E4M3, True), Layout.BLOCKS)) for t in (x, plain)
    )
    assert fits(found[1, 32:64]), found[1, 32:64]
    found[1, 32:64] = untouched[1, 32:64]
    assert torch.equal(found, untouched)


def test_zeros_stay_zeros_and_nothing_is_quantised() -> None:
    for layout in Layout:
        data, scale = quantize(torch.zeros(4, 32, dtype=LOW), layout.value, E4M3, True)
        assert (data.float() == 0).all()
        assert scale.float().isfinite().all()
        data, scale = quantize(torch.zeros(0, 32, dtype=LOW), layout.value, E4M3, True)
        assert data.numel() == 0


def test_a_quantised_value_has_no_gradient() -> None:
    data, scale = quantize(spread(16, 32).requires_grad_(), "rows", E4M3, True)
    assert not data.requires_grad
    assert not scale.requires_grad


@pytest.fixture(params=["float32", "products", "emulated"])
def emulate(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Products in float32, as on a CPU, torch's scaled products, as on a GPU, and products in float32 by request."""
    if request.param == "products":
        if TORCH < (2, 13):
            pytest.skip("torch has no scales of rows on a CPU")
        monkeypatch.setattr(float8, "has_fast_products", lambda _: True)
    return request.param == "emulated"


# -- products ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_product_is_that_of_the_float8_numbers(recipe: str, emulate: bool) -> None:
    x, weight, bias, gradient = spread(4, 16, 64), spread(48, 64, seed=1), spread(48, seed=2), spread(4, 16, 48, seed=3)
    found = gradients(x, weight, bias, gradient, recipe=recipe, emulate=emulate)
    kind = RECIPES[recipe]

    def restored(t: Tensor, layout: Layout | None, dtype: torch.dtype = E4M3) -> Tensor:
        matrix = t.reshape(-1, t.shape[-1])
        if layout is None:
            return matrix.double()
        data, scale = quantize(t, layout.value, dtype, kind.power_of_two)
        plain = data.double() / of_numbers(scale, layout, data.shape[1])
        return plain.t() if layout.is_turned else plain

    output, of_input, of_weight = (kind.layouts.get(product, (None, None)) for product in Product)
    exact = [
        (restored(x, output[0]) @ restored(weight, output[1]).t()).view(4, 16, 48),
        (restored(gradient, of_input[0], kind.gradient) @ restored(weight, of_input[1])).view(4, 16, 64),
        restored(gradient, of_weight[0], kind.gradient).t() @ restored(x, of_weight[1]),
    ]
    # Each product is rounded once, and so is what its bias makes of it.
    assert relative_error(found[0], exact[0] + bias.double()) < torch.finfo(LOW).eps
    for one, expected in zip(found[1:3], exact[1:], strict=True):
        assert one.dtype == LOW
        assert relative_error(one, expected) < torch.finfo(LOW).eps / 2
    assert torch.equal(found[3], gradient.sum_to_size(48))


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_quantised_before_and_in_the_layer_is_the_same(recipe: str) -> None:
    given = spread(32, 64), spread(48, 64, seed=1), None, spread(32, 48, seed=2)
    both = [gradients(*given, recipe=recipe, prepared=prepared) for prepared in (True, False)]
    assert all(a.equal(b) for a, b in zip(*both, strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_product_that_is_not_named_is_that_of_16_bits(recipe: str) -> None:
    x, weight, gradient = spread(32, 64), spread(48, 64, seed=1), spread(32, 48, seed=2)
    plain = [torch.nn.functional.linear(x, weight), gradient @ weight, gradient.t() @ x]
    all_float8 = gradients(x, weight, None, gradient, recipe=recipe)
    for count in range(4):
        for products in itertools.combinations(NAMES, count):
            found = gradients(x, weight, None, gradient, recipe=recipe, products=products)
            for name, one, low, wide in zip(NAMES, found, all_float8, plain, strict=True):
                is_float8 = name in products and Product(name) in RECIPES[recipe].layouts
                assert torch.equal(one, low if is_float8 else wide)
                assert is_float8 != torch.equal(one, wide)


def test_any_number_of_rows_is_taken(emulate: bool) -> None:
    weight = spread(48, 64, seed=1)
    for recipe, rows in itertools.product(RECIPES, (0, 1, 7)):
        x, gradient = spread(rows, 64), spread(rows, 48, seed=2)
        found = gradients(x, weight, None, gradient, recipe=recipe, emulate=emulate)
        more = gradients(
            torch.cat([x, x.new_zeros(16 - rows, 64)]),
            weight,
            None,
            torch.cat([gradient, gradient.new_zeros(16 - rows, 48)]),
            recipe=recipe,
            emulate=emulate,
        )
        for one, other in zip(found, more, strict=True):
            assert torch.equal(one, other[: len(one)]), (recipe, rows)


@pytest.mark.parametrize("number", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("recipe", RECIPES)
def test_an_inf_or_nan_stays_visible(recipe: str, number: float, emulate: bool) -> None:
    clean = spread(32, 64), spread(48, 64, seed=1), None, spread(32, 48, seed=2)
    reads = {0: ("x", 0), 1: ("weight", 1), 3: ("gradient", 3)}
    for place, (name, _) in reads.items():
        given = [None if t is None else t.clone() for t in clean]
        wrong = given[place]
        assert wrong is not None
        wrong[5, 7] = number
        output, of_x, of_weight = gradients(*given, recipe=recipe, emulate=emulate)  # pyright: ignore
        seen = {"x": (output[5], of_weight[:, 7]), "weight": (output[:, 5], of_x[:, 7])}
        for part in seen.get(name, (of_x[5], of_weight[7])):
            if recipe == "rowwise_gw_hp" and part.shape == of_weight[:, 7].shape and name != "weight":
                assert not part.isfinite().any(), "a product in 16 bits may give Inf"
            else:
                assert part.isnan().all() or not part.isfinite().any()
        if name != "gradient":
            may_be_inf = recipe == "mxfp8" and number != torch.nan  # by its specification
            assert (~output.isfinite() if may_be_inf else output.isnan()).any(), "never a number"


def test_backward_keeps_one_byte_for_a_number() -> None:
    x, weight = spread(32, 64).requires_grad_(), spread(48, 64, seed=1).requires_grad_()
    scales = 4 * (64 + 64)
    assert saved_bytes(lambda: linear(x, weight)) == 32 * 64 + 48 * 64 + scales
    assert saved_bytes(lambda: linear(x, weight, products=("output",))) == 2 * (32 * 64 + 48 * 64)
    assert saved_bytes(lambda: linear(x.detach(), weight)) == 32 * 64 + 4 * 64, "no gradient of the input is asked for"
    assert saved_bytes(lambda: linear(x, weight.detach())) == 48 * 64 + 4 * 64
    in_blocks = 32 * 64 + 64 + 48 * 64 + 2 * 64  # a byte for each block of 32, of which 48 rows have two
    assert saved_bytes(lambda: linear(x, weight, recipe="mxfp8")) == in_blocks


def test_a_second_derivative_is_refused_by_name() -> None:
    x, weight = spread(16, 64).requires_grad_(), spread(48, 64, seed=1).requires_grad_()
    with pytest.raises(UnsupportedError, match="float8_linear has no second derivative"):
        torch.autograd.grad(linear(x, weight).sum(), x, create_graph=True)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's forward mode
def test_transforms_are_refused_by_name() -> None:
    x, weight = spread(16, 64), spread(48, 64, seed=1)

    def forward_mode() -> None:
        with forward_ad.dual_level():
            linear(forward_ad.make_dual(x, x), weight)

    calls: list[Callable[[], object]] = [
        lambda: torch.func.grad(lambda x: linear(x, weight).sum())(x),
        lambda: torch.func.jvp(lambda x: linear(x, weight), (x,), (x,)),
        lambda: torch.func.vmap(lambda x: linear(x, weight))(x[None]),
        lambda: torch.func.vmap(lambda x: linear(x, weight, products=()))(x[None]),
        lambda: torch.func.vmap(lambda x: quantize(x, "rows", E4M3, True))(x[None]),
        forward_mode,
    ]
    for call in calls:
        with pytest.raises(
            UnsupportedError, match=r"no forward-mode derivative, and does not run under the transforms"
        ):
            call()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch itself advises against it
@pytest.mark.parametrize("products", [(), ("output",), NAMES])
@pytest.mark.parametrize("size", [(64,), (32, 64), (2, 16, 64)])
def test_its_result_can_be_written_into_and_traced(size: tuple[int, ...], products: tuple[str, ...]) -> None:
    weight, bias = spread(48, 64, seed=1).requires_grad_(), spread(48, seed=2).requires_grad_()
    for given in (None, bias):
        results = [linear(spread(*size), weight, given, products=products) for _ in range(2)]
        whole, clamped = (
            torch.autograd.grad(r.sum(), weight)[0] for r in (results[0].clamp(max=1), results[1].clamp_(max=1))
        )
        assert torch.equal(clamped, whole)
    given, other = (spread(*size), weight.detach()), (spread(*size, seed=3), weight.detach())
    traced: Callable[..., Tensor] = torch.jit.trace(lambda x, weight: linear(x, weight, products=products), given)
    assert torch.equal(traced(*other), linear(*other, products=products))


def test_abstract_tensors_and_compilers_are_served() -> None:
    x, weight = spread(16, 64), spread(48, 64, seed=1)
    for recipe in RECIPES:
        abstract = linear(x.to("meta"), weight.to("meta"), recipe=recipe)
        assert (abstract.shape, abstract.dtype) == (torch.Size([16, 48]), LOW)
    torch._dynamo.reset()
    compiled = torch.compile(linear, backend="aot_eager", fullgraph=True)
    leaves = [[t.clone().requires_grad_() for t in (x, weight)] for _ in range(2)]
    results = [call(*given) for call, given in zip((linear, compiled), leaves, strict=True)]
    assert torch.equal(*results)
    grads = [torch.autograd.grad(r.sum(), given) for r, given in zip(results, leaves, strict=True)]
    assert all(a.equal(b) for a, b in zip(*grads, strict=True))


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing_products(torch.device("cpu")) == ""
    assert missing_products(torch.device("mps")) == "torch has none for mps"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A100")
    for capability, why in (((8, 0), "A100 has compute capability 8.0, below 8.9"), ((8, 9), ""), ((9, 0), "")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        assert missing_products(torch.device("cuda")) == why


def test_recipes_are_plain_values() -> None:
    assert copy.deepcopy(RECIPES["rowwise"]) == RECIPES["rowwise"]
