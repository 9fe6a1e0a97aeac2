"""Pictures and pages that are made of files say what is in the files."""

from __future__ import annotations

from pathlib import Path

import pytest

from workbench import example_pages, guide_pictures, picture_page, readme
from workbench.common import DOCS
from workbench.prequential_page import FORGETTING
from workbench.results import Contents, Row

MADE = {"stream": "S", "unit": "m", "length": 3, "inducing": 7}


def rows(**errors: float) -> list[Row]:
    """Three readings, which every model misses by so much."""
    return [
        {"model": model, "k": k, "y": 5.0 + k, "mean": 5.0 + k - error}
        | {"lower": 4.0, "upper": 6.0}
        for model, error in errors.items()
        for k in range(3)
    ]


def models(**errors: float) -> Contents:
    ours = {"StreamingGP": 1.0, "the paper's form": 4.0, "batch": 0.5}
    return Contents(MADE, rows(**ours, **errors))


def test_the_caption_names_the_best_of_river_and_every_error() -> None:
    errors = {"KNN": 3.0, "tree": 2.0, "mean": 9.0, FORGETTING: 0.5}  # the last is ours
    text = picture_page.caption(models(**errors))
    assert "S, a stream of river's: 2 readings" in text
    assert "1.00 (torch_ssgp)," in text and "4.00 (the paper's form)." in text
    assert "2.00 (best of river: tree)" in text and "KNN" not in text


def test_the_picture_is_drawn_while_a_model_is_missing(tmp_path: Path) -> None:
    file = Contents(MADE, rows(StreamingGP=1.0, KNN=3.0))
    assert picture_page.shown(picture_page.errors(file.rows)) == ["KNN", "StreamingGP"]
    picture_page.draw(file, tmp_path / "figures" / "picture.png")
    assert (tmp_path / "figures" / "picture.png").stat().st_size > 1000


def test_running_errors_are_means_of_the_last_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(picture_page, "WINDOW", 2)
    assert picture_page.running([1.0, 3.0, 5.0]) == [1.0, 2.0, 4.0]


def test_a_readme_without_its_marks_is_refused() -> None:
    with pytest.raises(SystemExit, match="one <!-- table -->, not 0"):
        readme.filled("# torch_ssgp\n")


def test_pictures_of_guides_show_every_size(tmp_path: Path) -> None:
    sizes = [
        {
            "version": "1",
            "inducing": m,
            "memory": r,
            "seed": 0,
            "RMSE": 1 / m,
            "used": m,
        }
        for m in guide_pictures.INDUCING
        for r in guide_pictures.MEMORY
    ]
    guide_pictures.draw_sizes(sizes, tmp_path / "sizes.png")
    cost = [
        {"version": "1", "table": "cost", "case": f"{n} evaluations"}
        | {"method": method, "seconds": n}
        for method in ("streaming", "exact refit")
        for n in (200, 2000)
    ]
    guide_pictures.draw_crossover(cost, tmp_path / "crossover.png")
    assert {path.name for path in tmp_path.iterdir()} == {"sizes.png", "crossover.png"}


def test_the_page_of_an_example_has_its_words_its_output_and_its_figure(
    tmp_path: Path,
) -> None:
    ran = example_pages.Ran("a line", [b"figure"], "1.0")
    text = example_pages.page("drift", ran)
    title, about = example_pages.title_and_text("drift")
    assert text.startswith(f"# {title}\n\n{about}\n\n![{title}](drift.png)\n")
    assert "```text\na line\n```" in text and "``python" not in about
    assert all(
        f"({name}.md)" in example_pages.index() for name in example_pages.names()
    )
    (tmp_path / "drift.md").write_text(text, encoding="utf-8")
    (tmp_path / "drift.png").write_bytes(b"figure")
    assert example_pages.ran_before("drift", tmp_path) == ran


@pytest.mark.parametrize("name", example_pages.names())
def test_pages_of_examples_say_what_the_examples_say(name: str) -> None:
    folder = DOCS / "examples"
    page = example_pages.page(name, example_pages.ran_before(name, folder))
    assert (folder / f"{name}.md").read_text(encoding="utf-8") == page
