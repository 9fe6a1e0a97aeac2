"""A Gaussian process in scikit-learn: chunks with partial_fit, cross-validation.

Patients arrive in chunks, and the model learns from each. The same estimator is then
cross-validated in a pipeline, next to scikit-learn's exact GP. Run
``python examples/sklearn_pipeline.py``: it prints two tables.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

try:
    from sklearn.datasets import load_diabetes
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
    from sklearn.linear_model import RidgeCV
    from sklearn.model_selection import cross_val_score, train_test_split
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
except ImportError as error:
    raise SystemExit(
        f"{__doc__}\n{error}. Install it: pip install -e '.[sklearn]'"
    ) from None

from torch_ssgp import UpdateOptions
from torch_ssgp.sklearn import StreamingGPRegressor


def main(num_chunks: int = 6, num_steps: int = 100) -> dict[str, list[float]]:
    """Learn in chunks, then cross-validate; the scores of both.

    Args:
        num_chunks: Chunks that the training data arrive in.
        num_steps: Budget of the inner loop of each update.
    """
    X, y = load_diabetes(return_X_y=True, scaled=False)  # ages, pressures, blood sugar
    estimator = StreamingGPRegressor(
        num_inducing=50, options=UpdateOptions(num_steps=num_steps)
    )
    return {
        "chunks": learn_in_chunks(estimator, X, y, num_chunks),
        "folds": cross_validate(estimator, X, y),
    }


def learn_in_chunks(
    estimator: StreamingGPRegressor, X: np.ndarray, y: np.ndarray, num_chunks: int
) -> list[float]:
    """One ``partial_fit`` per chunk; the score on held-out patients after each."""
    X, X_test, y, y_test = train_test_split(X, y, test_size=0.3, random_state=0)
    # The model needs no scaling: it reads the units off the data. Where a scaler is
    # wanted, fit it once: one that goes on learning moves what was learned before.
    scaler = StandardScaler().fit(X[: len(X) // num_chunks])
    print("  data      R2   inside 90 %   M   seconds")
    scores = []
    for rows in np.array_split(np.arange(len(X)), num_chunks):
        start = time.perf_counter()
        estimator.partial_fit(scaler.transform(X[rows]), y[rows])
        seconds = time.perf_counter() - start
        inputs = scaler.transform(X_test)
        mean, std = estimator.predict(inputs, return_std=True, include_noise=True)
        inside = np.mean(np.abs(y_test - mean) < 1.645 * std)
        scores.append(estimator.score(inputs, y_test))
        print(
            f"{rows[-1] + 1:6d} {scores[-1]:7.3f} {100 * inside:12.0f}% "
            f"{estimator.result_.num_inducing:4d} {seconds:9.2f}"
        )
    return scores


def cross_validate(
    estimator: StreamingGPRegressor, X: np.ndarray, y: np.ndarray
) -> list[float]:
    """The estimator in a pipeline, as any other."""
    kernel = ConstantKernel() * RBF() + WhiteKernel()
    models = {
        "StreamingGPRegressor": estimator,
        "GaussianProcessRegressor": GaussianProcessRegressor(kernel, normalize_y=True),
        "RidgeCV": RidgeCV(),
    }
    print("\nfive folds                      R2   seconds")
    means = []
    for name, model in models.items():
        start = time.perf_counter()
        scores = cross_val_score(make_pipeline(StandardScaler(), model), X, y, cv=5)
        means.append(float(scores.mean()))
        print(f"{name:26s} {means[-1]:7.3f} {time.perf_counter() - start:9.2f}")
    return means


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--num-steps",
        type=int,
        default=100,
        help="limit on gradient steps per update (%(default)s)",
    )
    main(**vars(parser.parse_args()))
