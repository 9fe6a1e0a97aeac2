"""The streams have the sizes, order and scaling that the benchmarks rely on."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest
import torch

from workbench import change_streams, hard_streams, latency, streams
from workbench.streams import recorded


def check(stream: streams.Stream, sizes: list[int], num_test: int) -> None:
    """Sizes, an input that only grows, and targets scaled by the first batch."""
    found = [len(y) for _, y in stream.batches]
    assert found[: len(sizes)] == sizes and len(stream.y_test) == num_test
    y = stream.batches[0][1]
    assert abs(y.mean()) < 1e-10 and abs(y.std(correction=0) - 1) < 1e-10
    if stream.name != "bike_noleak":
        assert (stream.x_train[:, 0].diff() >= 0).all()


def test_pseudo_periodic_formula_gives_the_rows_of_the_file() -> None:
    # First rows of column 1 of UCI data set 136, 8 digits as in the file.
    path = Path(__file__).parent / "data" / "pseudo_periodic_column1_first_100.csv"
    rows = torch.from_numpy(np.loadtxt(path))
    values = streams.pseudo_periodic_values(len(rows))
    torch.testing.assert_close(values, rows, rtol=0, atol=1e-8)


@pytest.mark.parametrize(
    "make, num", [(streams.pseudo_periodic, 12_000), (streams.audio, 9_000)]
)
def test_time_series_are_split_as_in_the_paper(make, num: int) -> None:
    stream = make()
    check(stream, [1000, 300], num)
    assert len(stream.y_train) == num
    assert stream.x_train.min() == 0 and stream.x_test.max() == 10
    # Train and test interleave.
    assert (stream.x_test > stream.x_train).all()
    assert (stream.x_test[:-1] < stream.x_train[1:]).all()


def test_terrain_is_split_as_in_the_paper() -> None:
    pytest.importorskip("matplotlib")
    stream = streams.terrain()
    check(stream, [1000] + 12 * [750], 30_000)
    x = torch.cat([stream.x_train, stream.x_test])
    assert x.min() == 0 and x.max() == 10 and len(x.unique(dim=0)) == 40_000
    # By the first coordinate, then the second.
    assert ((stream.x_train @ torch.tensor([1000.0, 1.0]).double()).diff() > 0).all()


def test_terrain_os_cuts_a_tile_the_same_way(tmp_path: Path) -> None:
    heights = np.add.outer(np.arange(20.0), 0.1 * np.arange(20.0))
    np.savez(tmp_path / "terrain_os_NT26.npz", z=heights)
    stream = streams.terrain_os(tmp_path, first=40, batch=30)
    check(stream, [40, 30, 30], 300)
    # The heights are a plane; undoing the scaling must give one back.
    A, B = (
        torch.cat([x, torch.ones(len(x), 1).double()], 1)
        for x in (stream.x_train, stream.x_test)
    )
    plane = torch.linalg.lstsq(A, stream.y_train.unsqueeze(-1)).solution
    torch.testing.assert_close((B @ plane).squeeze(-1), stream.y_test)


@pytest.mark.parametrize("name", recorded.UCI)
def test_uci_order_and_scaling(tmp_path: Path, name: str) -> None:
    gen = np.random.default_rng(0)
    x = gen.normal(3, 5, (200, 3))
    x[:, 2] = 7  # a constant column must not divide by zero
    order, y = gen.permutation(200), np.sin(x[:, 0])
    if name == "bike_noleak":
        y[order] = np.arange(200)  # y counts time
    mask = np.zeros((200, 2), dtype=bool)
    mask[::10, 0] = True
    np.savez(tmp_path / f"uci_{name}.npz", X=x, y=y, test_mask=mask, time_order=order)
    stream = streams.uci(name, tmp_path, batch=50)
    check(stream, [50, 50, 50, 30], 20)
    x_train = stream.x_train
    assert x_train.mean(0).abs().max() < 1e-10
    assert (x_train[:, :2].std(0, correction=0) - 1).abs().max() < 1e-10
    if name == "bike_noleak":
        assert (stream.y_train.diff() > 0).all()
    # For latency, rows come as they are in the file, scaled by the first of them.
    inputs, targets = latency.points_of(name, tmp_path, 60)
    slope = torch.from_numpy(x[:60, :2]).diff(dim=0) / inputs[:, :2].diff(dim=0)
    torch.testing.assert_close(slope, slope[:1].expand_as(slope))
    assert abs(targets.mean()) < 1e-10


def test_missing_file_is_named_with_how_to_get_it(tmp_path: Path) -> None:
    text = (recorded.SHIPPED / "README.md").read_text(encoding="utf-8")
    assert "fetch_openml" in text and "terrain_os_NT26.npz" in text
    with pytest.raises(FileNotFoundError, match="uci_elevators.npz.*data/README.md"):
        streams.uci("elevators", tmp_path)
    with pytest.raises(FileNotFoundError, match="uci_kin40k.npz.*data_dir"):
        streams.uci("kin40k")
    with pytest.raises(FileNotFoundError, match="terrain_os_NT26.npz.*data/README.md"):
        streams.terrain_os()
    with pytest.raises(ValueError, match="'iris'.*kin40k"):
        streams.uci("iris", tmp_path)


@pytest.mark.parametrize(
    "make, package", [(streams.terrain, "matplotlib"), (streams.banana, "river")]
)
def test_missing_package_says_what_to_install(monkeypatch, make, package) -> None:
    def no_import(name: str):
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", no_import)
    with pytest.raises(ImportError, match=f"pip install {package}"):
        make()


def test_banana_orders_hold_the_same_points() -> None:
    pytest.importorskip("river")
    left, right = streams.banana(), streams.banana("right_to_left")
    assert [len(y) for _, y in left.batches] == 10 * [40]
    assert left.x_test.shape == (4900, 2)
    assert set(left.y_train.tolist()) == {0.0, 1.0}
    assert (left.x_train[:, 0].diff() >= 0).all()
    assert (right.x_train[:, 0].diff() <= 0).all()
    for other in (right, streams.banana("random", seed=3)):
        ours, theirs = (each.x_train.sort(dim=0).values for each in (left, other))
        torch.testing.assert_close(ours, theirs)
    # Standardised over all rows.
    x = torch.cat([left.x_train, left.x_test])
    assert x.mean(0).abs().max() < 1e-6 and (x.std(0) - 1).abs().max() < 1e-3
    with pytest.raises(ValueError, match="'sideways'"):
        streams.banana("sideways")


def test_ranges_grow_come_back_or_stay() -> None:
    stream = streams.growing_range()
    assert [len(y) for _, y in stream.batches] == 50 * [100]
    for k, (x, _) in enumerate(stream.batches):
        assert x.min() >= 2.0 * k and x.max() < 2.0 * (k + 1)
    assert stream.x_test.max() > 95 and abs(stream.y_train.std() - 1) < 0.3
    stream = streams.revisiting(passes=5)
    assert len(stream) == 10
    for x in stream.x_train.split(200):  # every pass covers the range
        assert x.min() < 0.5 and x.max() > 9.5
    stream = streams.repeated_iid()
    assert len(stream) == 200
    assert all(x.max() - x.min() > 8 for x, _ in stream.batches)


def test_an_arm_moves_by_the_equation_of_lagrange() -> None:
    x, torque = streams.arm(4_000)
    assert x.shape == (4_000, 6) and torch.equal(x, streams.arm(4_000)[0])
    # Velocities and accelerations are the rates of angles, at 500 Hz.
    slope = (x[2:, :4] - x[:-2, :4]) * 250
    assert (slope - x[1:-1, 2:]).abs().max() < 1e-3 * x.abs().max()

    def lagrangian(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        angle, spin = q.cumsum(-1), v.cumsum(-1)  # of both links
        along = torch.stack([-angle.sin(), angle.cos()]) * spin  # speeds of their ends
        middles = along[:, 0] / 2, along[:, 0] + along[:, 1] / 2
        kinetic = sum(m.square().sum() for m in middles) / 2 + spin.square().sum() / 24
        return kinetic - 9.81 * (1.5 * angle[0].sin() + 0.5 * angle[1].sin())

    def expected(q: torch.Tensor, v: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        momentum = torch.func.grad(lagrangian, argnums=1)
        _, rate = torch.func.jvp(momentum, (q, v), (v, a))
        return (rate - torch.func.grad(lagrangian)(q, v))[0]

    error = torque - torch.func.vmap(expected)(x[:, :2], x[:, 2:4], x[:, 4:])
    assert error.std() == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize(
    "make", [streams.growing_range, streams.revisiting, streams.repeated_iid]
)
def test_seed_decides_and_the_global_generator_is_left_alone(make) -> None:
    state = torch.get_rng_state()
    one, same, other = make(seed=1), make(seed=1), make(seed=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(one.y_train, same.y_train)
    assert not torch.equal(one.y_train, other.y_train)


def test_roundings_change_targets_and_nothing_else() -> None:
    stream = streams.growing_range(seed=0)
    assert streams.rounded(stream, 0) is stream
    other = streams.rounded(stream, 1)
    assert torch.equal(other.x_train, stream.x_train)
    assert not torch.equal(other.y_train, stream.y_train)
    torch.testing.assert_close(other.y_train, stream.y_train, rtol=1e-11, atol=0)
    assert torch.equal(other.y_test, stream.y_test)


# -------------------------------------------------- hard ones, and ones that change


def test_there_are_sixty_small_streams_of_all_kinds() -> None:
    found = hard_streams.small_streams()
    assert len(set(found)) == len(found) == 60
    assert len({(case.batch, case.inputs, case.arrival) for case in found}) == 4 * 4 * 2
    for case in found[::7]:
        batches, x_test, f_test = hard_streams.small_data(case)
        lengths = [len(y) for _, y in batches]
        assert lengths[0] == case.first and max(lengths) == case.batch
        x = torch.cat([x for x, _ in batches])
        assert bool((x[:, 0].diff() >= 0).all()) == (case.arrival == "sorted")
        assert len(x_test) == len(f_test) == hard_streams.SMALL_TEST


@pytest.mark.parametrize("name", hard_streams.SERIES)
def test_a_series_repeats_apart_from_its_swings(name: str) -> None:
    case = hard_streams.SERIES[name]
    x, _, f = hard_streams.series_data(case, seed=0)
    first, *_, last = f.split(case.per_period)
    assert (first - last).std() < 0.5 * f.std()
    assert x[case.per_period].item() == pytest.approx(max(case.patterns))


@pytest.mark.parametrize("name", change_streams.NAMES)
def test_streams_have_their_changes(name: str) -> None:
    stream = change_streams.make(name, 12, 20, seed=0)
    assert len(list(stream.batches())) == 12
    assert torch.equal(stream.y, change_streams.make(name, 12, 20, seed=0).y)
    assert not torch.equal(stream.y, change_streams.make(name, 12, 20, seed=1).y)
    if stream.is_labels:
        assert set(stream.y.tolist()) == {0.0, 1.0}
    else:
        assert 0.1 < (stream.y / stream.scale).std() < 5


def test_outliers_are_few_and_gross() -> None:
    stream, y = change_streams.with_outliers(100, seed=2, burst=False)
    clean = torch.cat([y for _, y in stream.batches])
    off = (y - clean).abs()
    assert 1 <= int((off > 0).sum()) <= 3 and off.max() > 2
