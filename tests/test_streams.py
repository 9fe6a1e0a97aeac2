"""The streams have the sizes, order and scaling that the benchmarks rely on."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest
import torch

from workbench import change_streams, hard_streams, streams


def assert_first_batch_is_standardised(stream: streams.Stream) -> None:
    y = stream.batches[0][1]
    assert abs(y.mean()) < 1e-10
    assert abs(y.std(correction=0) - 1) < 1e-10


def assert_sorted_by_first_input(stream: streams.Stream) -> None:
    assert (stream.x_train[:, 0].diff() >= 0).all()


def sizes(stream: streams.Stream) -> list[int]:
    return [len(y) for _, y in stream.batches]


MADE_UP = [
    streams.growing_range,
    streams.revisiting,
    streams.repeated_iid,
]


def test_pseudo_periodic_formula_gives_the_rows_of_the_file():
    # First rows of column 1 of UCI data set 136, 8 digits as in the file.
    rows = np.loadtxt(
        Path(__file__).parent / "data" / "pseudo_periodic_column1_first_100.csv"
    )
    values = streams.pseudo_periodic_values(column=1, steps=len(rows))
    torch.testing.assert_close(values, torch.from_numpy(rows), rtol=0, atol=1e-8)


def test_pseudo_periodic_is_split_as_in_the_paper():
    stream = streams.pseudo_periodic()
    assert sizes(stream)[:2] == [1000, 300] and sum(sizes(stream)) == 12_000
    assert stream.y_test.shape == (12_000,)
    assert stream.x_train.min() == 0 and stream.x_test.max() == 10
    assert_first_batch_is_standardised(stream)
    assert_sorted_by_first_input(stream)
    # Train and test interleave.
    assert (stream.x_test > stream.x_train).all()
    assert (stream.x_test[:-1] < stream.x_train[1:]).all()


def test_audio_is_split_as_in_the_paper():
    stream = streams.audio()
    assert sizes(stream)[:2] == [1000, 300] and sum(sizes(stream)) == 9_000
    assert stream.y_test.shape == (9_000,)
    assert stream.x_train.min() == 0 and stream.x_test.max() == 10
    assert_first_batch_is_standardised(stream)
    assert_sorted_by_first_input(stream)


def test_terrain_is_split_as_in_the_paper():
    pytest.importorskip("matplotlib")
    stream = streams.terrain()
    assert sizes(stream) == [1000] + 12 * [750]
    assert stream.x_test.shape == (30_000, 2)
    assert_first_batch_is_standardised(stream)
    x = torch.cat([stream.x_train, stream.x_test])
    assert x.min() == 0 and x.max() == 10 and len(x.unique(dim=0)) == 40_000
    # By the first coordinate, then the second.
    key = stream.x_train[:, 0] * 1000 + stream.x_train[:, 1]
    assert (key.diff() > 0).all()


def test_terrain_os_cuts_a_tile_the_same_way(tmp_path):
    heights = np.add.outer(np.arange(20.0), 0.1 * np.arange(20.0))
    np.savez(tmp_path / "terrain_os_NT26.npz", z=heights)
    stream = streams.terrain_os(tmp_path, first=40, batch=30)
    assert sizes(stream) == [40, 30, 30]
    assert len(stream.y_test) == 300
    # The heights are a plane; undoing the scaling must give one back.
    A = torch.cat([stream.x_train, torch.ones(100, 1).double()], dim=1)
    plane = torch.linalg.lstsq(A, stream.y_train.unsqueeze(-1)).solution
    B = torch.cat([stream.x_test, torch.ones(300, 1).double()], dim=1)
    torch.testing.assert_close((B @ plane).squeeze(-1), stream.y_test)


@pytest.mark.parametrize("name", sorted(streams.UCI_SOURCES))
def test_uci_order_and_scaling(tmp_path, name):
    gen = np.random.default_rng(0)
    x = gen.normal(3, 5, (200, 3))
    x[:, 2] = 7  # a constant column must not divide by zero
    order = gen.permutation(200)
    if name == "bike_noleak":
        y = np.empty(200)
        y[order] = np.arange(200)  # y counts time
    else:
        y = np.sin(x[:, 0])
    mask = np.zeros((200, 2), dtype=bool)
    mask[::10, 0] = True
    np.savez(tmp_path / f"uci_{name}.npz", X=x, y=y, test_mask=mask, time_order=order)
    stream = streams.uci(name, tmp_path, batch=50)
    assert sizes(stream) == [50, 50, 50, 30]
    assert stream.x_test.shape == (20, 3)
    x_train = stream.x_train
    assert x_train.mean(0).abs().max() < 1e-10
    assert (x_train[:, :2].std(0, correction=0) - 1).abs().max() < 1e-10
    assert_first_batch_is_standardised(stream)
    if name == "bike_noleak":
        assert (stream.y_train.diff() > 0).all()
    else:
        assert_sorted_by_first_input(stream)


def test_missing_file_names_the_file_and_how_to_get_it(tmp_path):
    with pytest.raises(FileNotFoundError, match="uci_elevators.npz.*fetch_openml"):
        streams.uci("elevators", tmp_path)
    with pytest.raises(FileNotFoundError, match="uci_kin40k.npz.*data_dir"):
        streams.uci("kin40k")
    with pytest.raises(FileNotFoundError, match="terrain_os_NT26.npz.*OS Terrain 50"):
        streams.terrain_os()
    with pytest.raises(ValueError, match="'iris'.*kin40k"):
        streams.uci("iris", tmp_path)


@pytest.mark.parametrize(
    "make, package", [(streams.terrain, "matplotlib"), (streams.banana, "river")]
)
def test_missing_package_says_what_to_install(monkeypatch, make, package):
    def no_import(name: str):
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", no_import)
    with pytest.raises(ImportError, match=f"pip install {package}"):
        make()


def test_banana_orders_hold_the_same_points():
    pytest.importorskip("river")
    left = streams.banana()
    right = streams.banana("right_to_left")
    random = streams.banana("random", seed=3)
    assert sizes(left) == 10 * [40]
    assert left.x_test.shape == (4900, 2)
    assert set(left.y_train.tolist()) == {0.0, 1.0}
    assert_sorted_by_first_input(left)
    assert (right.x_train[:, 0].diff() <= 0).all()
    for other in (right, random):
        torch.testing.assert_close(
            other.x_train.sort(dim=0).values, left.x_train.sort(dim=0).values
        )
    # Standardised over all rows.
    x = torch.cat([left.x_train, left.x_test])
    assert x.mean(0).abs().max() < 1e-6 and (x.std(0) - 1).abs().max() < 1e-3
    with pytest.raises(ValueError, match="'sideways'"):
        streams.banana("sideways")


def test_growing_range_grows_fifty_fold():
    stream = streams.growing_range()
    assert sizes(stream) == 50 * [100]
    for k, (x, _) in enumerate(stream.batches):
        assert x.min() >= 2.0 * k and x.max() < 2.0 * (k + 1)
    assert stream.x_test.max() > 95
    assert abs(stream.y_train.std() - 1) < 0.3


def test_revisiting_covers_the_range_in_every_pass():
    stream = streams.revisiting(passes=5)
    assert sizes(stream) == 10 * [100]
    for k in range(5):
        x = torch.cat([x for x, _ in stream.batches[2 * k : 2 * k + 2]])
        assert x.min() < 0.5 and x.max() > 9.5


def test_repeated_iid_has_200_batches():
    stream = streams.repeated_iid()
    assert len(stream) == 200
    assert all(x.max() - x.min() > 8 for x, _ in stream.batches)


@pytest.mark.parametrize("make", MADE_UP)
def test_seed_decides_and_the_global_generator_is_left_alone(make):
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
    kinds = {(case.batch, case.inputs, case.arrival) for case in found}
    assert len(kinds) == 4 * 4 * 2
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
