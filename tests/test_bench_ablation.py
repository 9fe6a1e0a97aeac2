"""Constants are changed one at a time, for one run, and compared with the default."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import torch_ssgp
from torch_ssgp.update import UpdateOptions, ascent
from workbench import ablation, benchmark, results
from workbench.ablation import DEFAULT, KNOBS, Knob, Row, Task

PACKAGE = Path(torch_ssgp.__file__).parent


@pytest.mark.parametrize("knob", KNOBS, ids=lambda knob: knob.name)
def test_every_constant_exists_and_has_other_values(knob: Knob) -> None:
    default = knob.default()
    assert default not in knob.alternatives and knob.alternatives
    assert knob.on and set(knob.on) <= set(ablation.STREAMS)


def test_constants_are_read_when_they_are_used() -> None:
    # A name that another module imports, or a default argument, is not patched.
    constants = {(str(k.target()[0].__name__), k.target()[1]) for k in KNOBS}
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        own = {name for place, name in constants if place == module}
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                taken = {(node.module, alias.name) for alias in node.names}
                assert not taken & constants, f"{path}: {taken & constants}"
            if isinstance(node, ast.FunctionDef):
                values = [*node.args.defaults, *node.args.kw_defaults]
                used = {each.id for each in values if isinstance(each, ast.Name)}
                assert not used & own, f"{path}: {used & own}"


def test_a_constant_has_its_value_for_a_run_only() -> None:
    patience, rate = (
        Knob("torch_ssgp.update.ascent.PATIENCE", (7,), ()),
        Knob('torch_ssgp.update.ascent.LEARNING_RATES["adam"]', (0.7,), ()),
    )
    before = ascent.PATIENCE, dict(ascent.LEARNING_RATES)
    with patience.set_to(7) as options:
        assert ascent.PATIENCE == 7 and options == UpdateOptions()
    with rate.set_to(0.7):
        assert ascent.LEARNING_RATES == {**before[1], "adam": 0.7}
    assert (ascent.PATIENCE, ascent.LEARNING_RATES) == before
    with Knob("UpdateOptions.restart", (False,), ()).set_to(False) as options:
        assert options == UpdateOptions(restart=False)
    with pytest.raises(ValueError, match="names no constant"):
        Knob("PATIENCE", (7,), ()).target()


def test_labels_and_numbers_are_judged_by_their_densities() -> None:
    task = ablation.STREAMS["labels"](0)
    x, y = task.batches[0]
    task.model.update(x, y, num_steps=0)
    found = ablation.judged(task.model, x, y)
    p = task.model.predict(x).probs
    assert found["RMSE"] == pytest.approx((p - y).square().mean().sqrt().item())
    wanted = torch.where(y.bool(), p, 1 - p).log().mean().item()
    assert found["MLL"] == pytest.approx(wanted)
    task = ablation.STREAMS["batches of 5, sorted"](0)
    x, y = task.batches[0]
    task.model.update(x, y, num_steps=0)
    at = task.model.predict(x)
    found = ablation.judged(task.model, x, y)
    density = torch.distributions.Normal(at.mean, at.stddev)
    assert found["MLL"] == pytest.approx(density.log_prob(y).mean().item())


def test_runs_resume_and_refuse_other_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, calls = tmp_path / "ablation.json", []

    def one(knob: Knob | None, value: object, stream: str, seed: int) -> Row:
        calls.append((knob and knob.name, value, stream))
        rmse = 2.0 if knob is None else 3.0
        return {"RMSE": rmse, "MLL": -rmse, "cpu_seconds": rmse, "failure": ""}

    monkeypatch.setattr(ablation, "run_one", one)
    options = ["--only", "PATIENCE", "WEIGHT", "--streams", "labels", "deep kernel"]
    benchmark.main(["ablation", *options, "--out", str(out)])
    patience, weight = "update.ascent.PATIENCE", "update.coordinates.WEIGHT"
    assert calls == [
        (None, None, "labels"),
        (patience, 3, "labels"),
        (patience, 20, "labels"),
        (None, None, "deep kernel"),
        (weight, 0.05, "deep kernel"),
        (weight, 1.0, "deep kernel"),
    ]
    text = capsys.readouterr().out
    line = f"| `{patience}` | `5` | `3` | labels 1.500 | -1.000 | 1.50 | 0 |"
    assert line in text
    benchmark.main(["ablation", *options, "--out", str(out)])
    assert len(calls) == 6 and line in capsys.readouterr().out
    header, rows = results.read(out)
    header["defaults"][patience] = "19"
    results.write(out, header, rows)
    with pytest.raises(SystemExit, match=f"other defaults of {patience}"):
        benchmark.main(["ablation", *options, "--out", str(out)])


def test_one_run_follows_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[UpdateOptions] = []

    class Fake:
        """A model that notes how it is asked to learn."""

        likelihood = None

        def check_data(self, x: object, y: object, noise: object) -> object:
            return x, y

        def learn_from(self, data: object, options: UpdateOptions) -> object:
            seen.append(options)
            return SimpleNamespace(num_inducing=1)

    task = Task(Fake(), [(torch.ones(1), torch.ones(1))] * 3, torch.ones(1), None)
    monkeypatch.setitem(ablation.STREAMS, "labels", lambda seed: task)
    monkeypatch.setattr(ablation, "judged", lambda *_: {"RMSE": 1.0})
    row = ablation.run_one(Knob("UpdateOptions.restart", (), ()), False, "labels", 0)
    assert [options.restart for options in seen] == [False] * 3
    assert row["RMSE"] == 1.0 and row["failure"] == ""
    assert DEFAULT not in row


def test_streams_that_change_are_predicted_before_they_are_learned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task = ablation.STREAMS["abrupt"](0)
    batches = task.batches[:3]
    few = task._replace(batches=batches)
    monkeypatch.setitem(ablation.STREAMS, "abrupt", lambda seed: few)
    row = ablation.run_one(None, None, "abrupt", 0)
    model = ablation.STREAMS["gradual"](0).model  # the same kind, and new
    errors = []
    for x, y in batches:
        if errors or model.summary.num_inducing:
            errors.append(float((model.predict(x).mean - y).square().mean().sqrt()))
        model.update(x, y)
    assert row["RMSE"] == pytest.approx(sum(errors) / len(errors), rel=1e-6)
