"""Random numbers of samples: even, independent, and a pure function of seed, epoch, position and stream."""

from __future__ import annotations

import numpy as np
import pytest

from colabkit.augment import Draws


def draws(seed: int = 0, epoch: int = 0, count: int = 1000, start: int = 0) -> Draws:
    return Draws(seed, epoch, np.arange(start, start + count))


def test_the_numbers_never_change():
    got = Draws(42, 3, np.array([0, 1, 10**9])).uniforms(3)
    assert got.tolist() == [
        [0.8535083202918115, 0.24115099865972345, 0.41343160531676093],
        [0.5031822392936144, 0.8886761414456131, 0.1851990224150325],
        [0.15853276488075885, 0.5796160998417645, 0.7726301939111212],
    ]
    assert Draws(42, 3, np.array([7])).of(2).of(0).uniforms(1)[0, 0] == 0.6964409847966117


def test_the_numbers_of_a_sample_are_those_of_splitmix64():
    mask, step = (1 << 64) - 1, 0x9E3779B97F4A7C15

    def hashed(state: int) -> int:
        state = (state + step) & mask
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        return state ^ (state >> 31)

    assert hashed(1234567) == 6457827717110365317, "the first number that the published SplitMix64 gives for this seed"
    state = hashed((hashed(hashed(hashed(5) + 2) + 0) + 8 * step) & mask)  # position 9, which steps once by itself
    row = draws(5, 2, 1, start=9).uniforms(4)[0]
    assert row.tolist() == [(hashed((state + column * step) & mask) >> 11) / 2**53 for column in range(4)]


def test_the_first_columns_do_not_depend_on_how_many_are_asked_for():
    assert np.array_equal(draws().uniforms(9)[:, :4], draws().uniforms(4))
    assert draws().uniforms(0).shape == (1000, 0)


def test_a_sample_gets_the_same_numbers_in_any_company():
    whole = draws(3, 1).uniforms(5)
    mixed = np.random.default_rng(0).permutation(1000)
    assert np.array_equal(Draws(3, 1, mixed).uniforms(5), whole[mixed])
    assert np.array_equal(draws(3, 1).part(100, 107).uniforms(5), whole[100:107])
    assert np.array_equal(draws(3, 1).of(2).part(5, 6).uniforms(5), draws(3, 1).part(5, 6).of(2).uniforms(5))


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63, 2**64 - 1, np.int64(7)])
def test_numbers_are_even_for_any_seed(seed):
    values = draws(seed, 4, 20_000).uniforms(5)
    assert values.dtype == np.float64
    assert values.min() >= 0
    assert values.max() < 1
    for column in values.T:
        counts = np.bincount((column * 64).astype(int), minlength=64)
        # 63 degrees of freedom: chi-square beyond 128 has a probability of 3e-6.
        assert ((counts - 312.5) ** 2 / 312.5).sum() < 128


def test_only_64_bits_of_the_seed_count():
    assert np.array_equal(draws(5).uniforms(2), draws(5 + 2**64).uniforms(2))


def test_neighbouring_seeds_epochs_streams_positions_and_columns_are_independent():
    base = draws(10, 10, 40_000)
    first = base.uniforms(2)
    others = {
        "column": first[:, 1],
        "next position": draws(10, 10, 40_000, start=1).uniforms(1)[:, 0],
        "next epoch": draws(10, 11, 40_000).uniforms(1)[:, 0],
        "next seed": draws(11, 10, 40_000).uniforms(1)[:, 0],
        "seed and epoch swapped": draws(11, 9, 40_000).uniforms(1)[:, 0],
        "first transform": base.of(0).uniforms(1)[:, 0],
        "second transform": base.of(1).uniforms(1)[:, 0],
    }
    series = np.stack([first[:, 0], *others.values()])
    correlations = np.corrcoef(series)[np.triu_indices(len(series), 1)]
    assert np.abs(correlations).max() < 5 / np.sqrt(40_000)
    for name, other in others.items():
        pairs = np.bincount((first[:, 0] * 8).astype(int) * 8 + (other * 8).astype(int), minlength=64)
        assert ((pairs - 625) ** 2 / 625).sum() < 128, name


def test_transforms_of_a_compose_never_share_numbers():
    streams = [draws().of(first).of(second) for first in range(20) for second in range(20)]
    streams += [draws()] + [draws().of(number) for number in range(20)]
    assert len({stream.stream for stream in streams}) == len(streams)
    assert len({stream.uniforms(1)[0, 0] for stream in streams}) == len(streams)
