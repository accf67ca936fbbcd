"""Positions: their effect on a score depends on offsets alone, and repeats with the periods."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from regard.errors import ArgumentError, DeviceError, DtypeError, ShapeError
from regard.positions import Rotary, alias_period, aliases, alibi_slopes, decompose, rotary, sinusoidal


def depends_on_offset_alone(products: Tensor) -> bool:
    """Whether a square matrix has equal entries along each of its diagonals."""
    return torch.allclose(products[1:, 1:], products[:-1, :-1], rtol=0, atol=1e-10)


def test_sinusoidal_is_the_papers_formula() -> None:
    found = sinusoidal(50, 8, dtype=torch.float64)
    for i in range(50):
        for k in range(4):
            angle = i / 10000 ** (2 * k / 8)
            assert found[i, 2 * k].item() == pytest.approx(math.sin(angle), abs=1e-12)
            assert found[i, 2 * k + 1].item() == pytest.approx(math.cos(angle), abs=1e-12)


@pytest.mark.parametrize("arguments", [{"dim": 16}, {"periods": [7, 11.5]}])
def test_products_of_sinusoidal_encodings_depend_on_the_offset_alone(arguments: dict[str, object]) -> None:
    p = sinusoidal(40, dtype=torch.float64, **arguments)  # type: ignore[arg-type]
    assert depends_on_offset_alone(p @ p.mT)


def test_their_product_is_the_sum_of_the_cosines_of_the_offset() -> None:
    p = sinusoidal(30, periods=[5, 8], dtype=torch.float64)
    i = torch.arange(30, dtype=torch.float64)
    offset = 2 * math.pi * (i[:, None] - i)
    torch.testing.assert_close(p @ p.mT, (offset / 5).cos() + (offset / 8).cos())


def test_integer_periods_repeat_to_the_bit() -> None:
    p = sinusoidal(50, periods=[3, 4])
    assert torch.equal(p[12:], p[:-12])


def test_sinusoidal_takes_dim_or_periods_and_empty_lengths() -> None:
    assert sinusoidal(0, 4).shape == (0, 4)
    assert sinusoidal(3, 4).dtype == torch.float32
    with pytest.raises(ArgumentError, match="sinusoidal: give dim or periods"):
        sinusoidal(3)
    with pytest.raises(ArgumentError, match="sinusoidal: give dim or periods"):
        sinusoidal(3, 4, periods=[2])
    with pytest.raises(ShapeError, match="sinusoidal: dim must be even"):
        sinusoidal(3, 5)
    with pytest.raises(ArgumentError, match="sinusoidal: periods must be"):
        sinusoidal(3, periods=[2, 0])
    with pytest.raises(ArgumentError, match="sinusoidal: length must be at least 0"):
        sinusoidal(-1, 4)
    with pytest.raises(ArgumentError, match="sinusoidal: base must be"):
        sinusoidal(3, 4, base=0.0)


def test_rotary_rotates_pairs_of_halves() -> None:
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    rotated = torch.complex(x[..., :4], x[..., 4:]) * torch.exp(
        1j * torch.arange(5)[:, None] * 10000 ** (-torch.arange(4, dtype=torch.float64) / 4)
    )
    torch.testing.assert_close(rotary(x), torch.cat([rotated.real, rotated.imag], -1))


def test_the_score_of_rotary_vectors_depends_on_the_offset_alone() -> None:
    query, key = (torch.randn(1, 16, dtype=torch.float64).expand(30, 16) for _ in range(2))
    assert depends_on_offset_alone(rotary(query) @ rotary(key).mT)
    far = torch.arange(30) + 100_000
    torch.testing.assert_close(
        rotary(query, far) @ rotary(key, far).mT, rotary(query) @ rotary(key).mT, rtol=0, atol=1e-9
    )


def test_rotary_keeps_lengths_and_leaves_position_zero_alone() -> None:
    x = torch.randn(4, 10, 6)
    torch.testing.assert_close(rotary(x).norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(rotary(x)[:, 0], x[:, 0])


def test_far_positions_stay_exact_in_float32() -> None:
    x, far = torch.randn(3, 8), torch.tensor([10**5, 10**6, 10**7])
    rotated = rotary(x, far)
    for i in range(3):
        for k in range(4):
            angle = far[i].item() * 10000 ** (-k / 4)
            expected = x[i, k].item() * math.cos(angle) - x[i, k + 4].item() * math.sin(angle)
            assert rotated[i, k].item() == pytest.approx(expected, abs=1e-6)


def test_each_batch_item_may_have_positions_of_its_own() -> None:
    x = torch.randn(2, 3, 4, 6)
    positions = torch.tensor([[0, 1, 2, 3], [7, 0, 1, 9]])
    rotated = rotary(x, positions)
    for b in range(2):
        assert torch.equal(rotated[b], rotary(x[b], positions[b]))
    assert torch.equal(rotary(x[:, 0], positions), rotated[:, 0])


def test_half_inputs_are_rotated_in_float32() -> None:
    x = torch.randn(2, 5, 8).to(torch.float16)
    assert torch.equal(rotary(x), rotary(x.float()).to(torch.float16))


def test_rotary_is_differentiable_and_works_under_vmap() -> None:
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(rotary, (x,), check_forward_ad=True)
    torch.testing.assert_close(torch.func.vmap(rotary)(x), rotary(x))


def test_the_module_has_no_state_and_takes_an_offset() -> None:
    module, x = Rotary(6, base=500.0), torch.randn(2, 4, 6)
    assert not module.state_dict()
    assert torch.equal(module(x), rotary(x, base=500.0))
    assert torch.equal(module(x, offset=2), rotary(x, torch.arange(2, 6), base=500.0))
    assert torch.equal(module.half()(x, torch.arange(4)), rotary(x, base=500.0))
    with pytest.raises(ArgumentError, match="Rotary: give positions or offset"):
        module(x, torch.arange(4), offset=1)
    with pytest.raises(ShapeError, match=r"Rotary: x must be \(…, length, 6\)"):
        module(x[..., :4])


def test_bad_rotary_input_gets_one_clear_error() -> None:
    x = torch.randn(2, 4, 6)
    with pytest.raises(ShapeError, match=r"rotary: x must be .* even dim"):
        rotary(x[..., :5])
    with pytest.raises(ShapeError, match="rotary: positions must be"):
        rotary(x, torch.arange(3))
    with pytest.raises(ShapeError, match="rotary: positions must be"):
        rotary(x[0], torch.zeros(2, 4))
    with pytest.raises(DtypeError, match="rotary: x must be of a floating dtype"):
        rotary(torch.ones(2, 2, dtype=torch.int64))
    with pytest.raises(DeviceError, match="rotary: positions are on meta"):
        rotary(x, torch.arange(4, device="meta"))
    with pytest.raises(ShapeError, match="Rotary: dim must be even"):
        Rotary(3)


def test_alibi_slopes_are_the_papers() -> None:
    assert alibi_slopes(8).tolist() == [2.0**-k for k in range(1, 9)]
    twelve = [2.0**-k for k in range(1, 9)] + [2.0**-k for k in (0.5, 1.5, 2.5, 3.5)]
    torch.testing.assert_close(alibi_slopes(12), torch.tensor(twelve))
    for heads in range(1, 40):
        slopes = alibi_slopes(heads)
        assert slopes.shape == (heads,)
        assert slopes.unique().numel() == heads
        assert 0 < slopes.min() <= slopes.max() < 1
    with pytest.raises(ArgumentError, match="alibi_slopes: heads must be at least 1"):
        alibi_slopes(0)


def test_the_four_terms_add_up_to_the_score() -> None:
    cq, pq, ck, pk = (torch.randn(2, 3, n, 4, dtype=torch.float64) for n in (5, 5, 6, 6))
    terms = decompose(cq, pq[0, 0], ck, pk)
    torch.testing.assert_close(sum(terms), (cq + pq[0, 0]) @ (ck + pk).mT)
    torch.testing.assert_close(terms.content_position, cq @ pk.mT)
    torch.testing.assert_close(terms.position_content, pq[0, 0] @ ck.mT)
    with pytest.raises(ShapeError, match="decompose: all four"):
        decompose(cq, pq, ck, pk[..., :3])
    with pytest.raises(ShapeError, match="decompose: content and position"):
        decompose(cq, pq[..., :4, :], ck, pk)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=3))
def test_encodings_coincide_exactly_at_the_multiples_of_the_alias_period(periods: list[int]) -> None:
    repeat = alias_period(periods)
    length = min(2 * repeat + 3, 150)
    found = {tuple(pair) for pair in aliases(sinusoidal(length, periods=periods, dtype=torch.float64)).tolist()}
    assert found == {(i, j) for j in range(length) for i in range(j) if (j - i) % repeat == 0}


def test_coprime_periods_repeat_last() -> None:
    assert alias_period([8, 9]) == 72
    assert alias_period([8, 12]) == 24
    assert alias_period([5]) == 5
    for wrong, error in (([], ArgumentError), ([0], ArgumentError), ([2.0], DtypeError), ([True], DtypeError)):
        with pytest.raises(error, match="alias_period: "):
            alias_period(wrong)  # type: ignore[arg-type]


def test_aliases_are_found_across_blocks_and_come_sorted() -> None:
    encoding = torch.arange(3000.0)[:, None].repeat(1, 2)
    encoding[2500] = encoding[10]
    encoding[2999] = encoding[1200] + 0.25
    assert aliases(encoding, tolerance=0.0).tolist() == [[10, 2500]]
    assert aliases(encoding, tolerance=0.25).tolist() == [[10, 2500], [1200, 2999]]
    assert aliases(encoding[:0]).shape == (0, 2)
    with pytest.raises(ArgumentError, match="aliases: tolerance"):
        aliases(encoding, tolerance=-1.0)
    with pytest.raises(ShapeError, match="aliases: encoding"):
        aliases(encoding[:, 0])
