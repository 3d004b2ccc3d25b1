"""FP8 and MX by hand: PyTorch's casts, the nearest of all codes, exact scales, exact products."""

import copy
import math

import pytest
import torch
from torch import nn

from course_lib.core import CourseError
from course_lib.recompute.block_scaling import (
    E2M1,
    BlockScaling,
    dequantize_blocks,
    quantize_blocks,
)
from course_lib.recompute.float8 import (
    E4M3,
    E5M2,
    CurrentScaling,
    DelayedScaling,
    NumberFormat,
    current_scale,
)
from course_lib.recompute.quantized_linear import (
    Operands,
    QuantizedLinear,
    quantize_linears,
    to_bf16,
)

FP8 = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
ALL = pytest.mark.parametrize("fmt", [E4M3, E5M2, E2M1], ids=lambda fmt: fmt.name)
FP4_NUMBERS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # OCP MX v1.0, section 5.3.3


def codes(fmt):
    """The numbers of a format that are not negative, in order: a code is an index."""
    if fmt is E2M1:
        return torch.tensor(FP4_NUMBERS, dtype=torch.float64)
    numbers = torch.arange(128, dtype=torch.uint8).view(fmt.dtype).double()
    return numbers[numbers.isfinite()]


def searched(x, fmt):
    """The nearest of all codes; of two that are equally near, the even one."""
    numbers = codes(fmt)
    apart = (x.double().abs().unsqueeze(-1) - numbers).abs()
    even = torch.arange(len(numbers)) % 2 == 0
    nearest = (apart == apart.amin(-1, keepdim=True)).double() * (1 + even.double())
    return torch.copysign(numbers[nearest.argmax(-1)], x.double()).float()


def around(fmt):
    """All numbers, all middles, their neighbors in fp32, and what lies beyond."""
    numbers = codes(fmt).float()
    middles = (numbers[1:] + numbers[:-1]) / 2
    points = torch.cat([numbers, middles, fmt.largest * torch.tensor([1.01, 1.07, 2.0, 1e3])])
    up, down = (torch.nextafter(points, torch.tensor(to)) for to in (math.inf, -math.inf))
    points = torch.cat([points, up, down, torch.randn(2000, generator=seeded()) * fmt.largest / 3])
    return torch.cat([points, -points])


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def numbers_of(*shape, seed=0, spread=2.0):
    """Normal numbers of different sizes."""
    random = seeded(seed)
    sizes = torch.exp2(spread * torch.randn(*shape, generator=random))
    return torch.randn(*shape, generator=random) * sizes


@ALL
def test_every_number_of_a_format_is_kept(fmt):
    numbers = codes(fmt).float()
    for x in (numbers, -numbers):
        assert torch.equal(fmt.nearest(x), x)
    assert numbers.max() == fmt.largest
    assert 2.0**fmt.largest_exponent <= fmt.largest < 2.0 ** (fmt.largest_exponent + 1)


@ALL
def test_rounding_finds_the_nearest_of_all_codes_and_ties_go_to_even(fmt):
    x = around(fmt)
    assert torch.equal(fmt.nearest(x), searched(x, fmt))


@FP8
def test_rounding_by_hand_has_the_bits_of_torchs_cast(fmt):
    x = around(fmt).clamp(-fmt.largest, fmt.largest)
    assert torch.equal(fmt.nearest(x), x.to(fmt.dtype).float())


@pytest.mark.parametrize(
    ("dtype", "bits", "lowest"), [(torch.bfloat16, 7, -126), (torch.float16, 10, -14)]
)
def test_the_same_rule_rounds_to_16_bits(dtype, bits, lowest):
    largest = torch.finfo(dtype).max
    fmt = NumberFormat(name="16", mantissa_bits=bits, lowest_exponent=lowest, largest=largest)
    x = numbers_of(10_000, spread=6.0).clamp(-largest, largest)
    assert torch.equal(fmt.nearest(x), x.to(dtype).float())


@FP8
def test_one_scale_brings_the_largest_number_to_the_largest_of_the_format(fmt):
    x = numbers_of(40, 50)
    scale = current_scale(x, fmt)
    assert (x / scale).abs().max().item() == pytest.approx(fmt.largest, rel=1e-6)
    rows, columns = CurrentScaling(fmt)(x)
    assert torch.equal(rows, columns)
    assert rows.abs().max().item() == pytest.approx(x.abs().max().item(), rel=1e-6)
    assert torch.equal(CurrentScaling(fmt)(torch.zeros(3))[0], torch.zeros(3))


def test_delayed_scaling_uses_earlier_steps_and_saturates_what_grows():
    delayed = DelayedScaling(E4M3, history=2)
    assert delayed.scale == 1
    steps = [numbers_of(64, seed=seed) for seed in range(4)]
    for step, x in enumerate(steps):
        seen = steps[max(0, step - 2) : step]
        scale = delayed.scale
        if seen:
            assert scale == max(each.abs().max() for each in seen) / 448
        assert torch.equal(delayed(x)[0], E4M3.nearest(x / scale) * scale)
    grown = delayed(1000 * steps[3])[0]
    assert grown.abs().max() < 500 * steps[3].abs().max()
    assert not DelayedScaling(E4M3, 1)(torch.full((2,), 1e6))[0].gt(448).any()


def test_delayed_scaling_equals_current_scaling_where_nothing_changes():
    delayed, x = DelayedScaling(E5M2), numbers_of(8, 8)
    delayed(x)
    assert torch.equal(delayed(x)[0], CurrentScaling(E5M2)(x)[0])


@ALL
def test_scales_are_powers_of_two_that_the_definition_gives(fmt):
    x = numbers_of(7, 100)
    _, scales = quantize_blocks(x, fmt)
    assert scales.shape == (7, 4)
    assert (torch.frexp(scales).mantissa == 0.5).all()
    for row in range(7):
        for index, part in enumerate(x[row].split(32)):
            power = 2.0 ** math.floor(math.log2(part.abs().max().item()))
            assert scales[row, index] == power / 2.0**fmt.largest_exponent


@ALL
@pytest.mark.parametrize("block", [1, 4, 32, 1000])
def test_each_block_is_rounded_by_itself_to_the_nearest_numbers(fmt, block):
    x = numbers_of(3, 70)
    elements, scales = quantize_blocks(x, fmt, block=block)
    assert elements.shape == x.shape
    for index, part in enumerate(x.split(block, 1)):
        own, scale = quantize_blocks(part, fmt, block=block)
        assert torch.equal(scale, scales[:, index : index + 1])
        assert torch.equal(own, elements.split(block, 1)[index])
        assert torch.equal(own, searched(part / scale, fmt))


@ALL
def test_a_power_of_two_scales_without_rounding(fmt):
    x = numbers_of(5, 64)
    elements, scales = quantize_blocks(x, fmt)
    once = dequantize_blocks(elements, scales)
    assert torch.equal(once.double(), elements.double() * scales.double().repeat_interleave(32, 1))
    for factor in (2.0**-30, 2.0, 2.0**40):
        again, other = quantize_blocks(factor * x, fmt)
        assert torch.equal(again, elements)
        assert torch.equal(other, factor * scales)


@ALL
def test_rounding_a_second_time_changes_nothing(fmt):
    once = dequantize_blocks(*quantize_blocks(numbers_of(5, 70), fmt))
    assert torch.equal(dequantize_blocks(*quantize_blocks(once, fmt)), once)


def test_an_outlier_costs_its_block_and_no_other():
    x = torch.randn(2, 96, generator=seeded())
    before = dequantize_blocks(*quantize_blocks(x))
    x[0, 40] = 1e8
    after = dequantize_blocks(*quantize_blocks(x))
    same = before == after
    assert same[1].all()
    assert same[0, :32].all()
    assert same[0, 64:].all()
    assert (after[0, 32:40] == 0).all()
    assert (after[0, 41:64] == 0).all()
    one_scale = CurrentScaling(E4M3)(x)[0]
    assert one_scale.count_nonzero() == 1


@ALL
def test_rounded_up_scales_let_nothing_saturate_and_are_the_smallest_that_do(fmt):
    x = numbers_of(9, 64)
    x[0, 0] = fmt.largest * 2.0**20  # fits without rest: its scale is 2**20
    _, scales = quantize_blocks(x, fmt, round_up=True)
    largest = x.unflatten(1, (-1, 32)).abs().amax(-1)
    assert (largest <= fmt.largest * scales).all()
    assert (largest > fmt.largest * scales / 2).all()
    assert (torch.frexp(scales).mantissa == 0.5).all()


def test_zeros_tiny_numbers_and_what_is_not_finite():
    elements, scales = quantize_blocks(torch.zeros(2, 40))
    assert not elements.any()
    assert (scales > 0).all()
    tiny = torch.full((32,), 2.0**-140)
    assert torch.equal(quantize_blocks(tiny)[1], torch.tensor([2.0**-127]))
    for bad in (math.inf, math.nan):
        x = torch.ones(64)
        x[3] = bad
        numbers = dequantize_blocks(*quantize_blocks(x))
        assert numbers[:32].isnan().all()
        assert torch.equal(numbers[32:], torch.ones(32))


def test_blocks_lie_along_the_dim_that_a_product_sums_over():
    x = torch.randn(64, 96, generator=seeded())
    x[5, 7] = 1e8
    rows, columns = BlockScaling()(x)
    assert (rows == 0).nonzero().tolist() == [[5, other] for other in range(32) if other != 7]
    assert (columns == 0).nonzero().tolist() == [[other, 7] for other in range(32) if other != 5]


@FP8
def test_blocks_are_those_of_torchao(fmt):
    to_mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor").to_mx
    x = numbers_of(16, 128)
    scales, elements = to_mx(x, fmt.dtype, 32)
    own, own_scales = quantize_blocks(x, fmt)
    assert torch.equal(own, elements.float())
    assert torch.equal(own_scales, scales.float())


# --- linear layers


def run(layer, x):
    """Output and gradients for the loss sum(y * weights)."""
    x = x.clone().requires_grad_()
    y = layer(x)
    (y * torch.arange(float(y.numel())).view_as(y)).sum().backward()
    grads = [x.grad, *(param.grad for param in layer.parameters())]
    layer.zero_grad()
    return [y.detach(), *grads]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(6,), (5, 6), (2, 3, 6)])
def test_without_rounding_it_is_nn_linear(shape, bias):
    torch.manual_seed(0)
    linear, x = nn.Linear(6, 4, bias=bias), torch.randn(shape)
    for one, other in zip(run(QuantizedLinear(linear, Operands()), x), run(linear, x), strict=True):
        torch.testing.assert_close(one, other)


def test_each_operand_is_rounded_along_the_dim_of_its_product():
    torch.manual_seed(0)
    linear, x = nn.Linear(70, 40, bias=False), torch.randn(50, 70)
    rounder = BlockScaling()
    y, grad_x, grad_weight = run(
        QuantizedLinear(linear, Operands(x=rounder, weight=rounder, grad=rounder)), x
    )
    weight, grad = linear.weight.detach(), torch.arange(2000.0).view(50, 40)
    along = lambda tensor: dequantize_blocks(*quantize_blocks(tensor))  # noqa: E731
    torch.testing.assert_close(y, along(x) @ along(weight).T)
    torch.testing.assert_close(grad_x, along(grad) @ along(weight.T).T)
    torch.testing.assert_close(grad_weight, along(grad.T) @ along(x.T).T)


def test_in_bf16_it_is_a_bf16_product_summed_in_fp32():
    torch.manual_seed(0)
    linear, x = nn.Linear(64, 32, bias=False), torch.randn(16, 64)
    operands = Operands(x=to_bf16, weight=to_bf16, grad=to_bf16)
    y, *_ = run(QuantizedLinear(linear, operands), x)
    exact = x.bfloat16().double() @ linear.weight.detach().bfloat16().double().T
    torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-5)


def test_all_linear_layers_of_a_module_are_replaced_and_keep_their_parameters():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))
    params, names = list(model.parameters()), [name for name, _ in model.named_parameters()]
    plain, made = copy.deepcopy(model), []
    quantize_linears(model, lambda: made.append(1) or Operands())
    assert len(made) == 2
    assert all(one is other for one, other in zip(model.parameters(), params, strict=True))
    assert [name for name, _ in model.named_parameters()] == names
    x = torch.randn(3, 4)
    torch.testing.assert_close(model(x), plain(x))


def test_bad_use_is_told():
    with pytest.raises(CourseError, match="need a history of 1 step or more; got 0"):
        DelayedScaling(E4M3, 0)
    with pytest.raises(CourseError, match="need blocks of 1 number or more; got 0"):
        quantize_blocks(torch.ones(3), block=0)
