"""The input contract: every bad input, its error and its message.

    python scripts/input_contract.py        # writes docs/inputs.md

The calls below are the only list of the contract. The page shows what they raise, and
the tests compare the page with what they raise now.
"""

from __future__ import annotations

import warnings
from typing import Any

from workbench.common import DOCS, new_parser

PAGE = DOCS / "inputs.md"

SETUP = """\
import torch
from gpytorch import distributions, kernels, likelihoods, means, models, variational
from torch_ssgp import AdaptiveBudget, AllocatorPolicy, GreedyInformation
from torch_ssgp import KeepOld, RandomReplace
from torch_ssgp import MultiOutputGP, StreamingELBO, StreamingGP
from torch_ssgp import IndependentMultitaskStreamingStrategy
from torch_ssgp import StreamingVariationalStrategy
from torch_ssgp.surrogates import SingleTaskStreamingGP

x, y = torch.linspace(0, 1, 10).unsqueeze(-1), torch.linspace(0, 1, 10)
nan, two, three = float("nan"), torch.Size([2]), torch.Size([3])
kernel = kernels.ScaleKernel(kernels.RBFKernel())

model = StreamingGP(kernel, num_inducing=5)
model.update(x, y, num_steps=2)
fresh = StreamingGP(kernel)  # has seen nothing
plane = StreamingGP(kernel, num_inducing=5)  # has seen two inputs
plane.update(x.expand(10, 2), y, num_steps=0)
batch = StreamingGP(kernel, num_inducing=5, batch_shape=two)
batch.update(x, y.expand(2, 10), num_steps=0)
outputs = MultiOutputGP(batch)
heavy = StreamingGP(kernel, likelihoods.StudentTLikelihood(), batch_shape=two)
labels = StreamingGP(kernel, likelihoods.BernoulliLikelihood(), num_inducing=5)
labels.update(x, y > 0.5, num_steps=0)
softmax = likelihoods.SoftmaxLikelihood(num_classes=3, mixing_weights=False)
classes = StreamingGP(kernel, softmax, batch_shape=three)
fixed_noise = likelihoods.FixedNoiseGaussianLikelihood(torch.ones(1))
fixed = StreamingGP(kernel, fixed_noise, num_inducing=5)
fixed.update(x, y, torch.ones(10), num_steps=0)
X, Y = x.double(), y.double().unsqueeze(-1).sin()
surrogate = SingleTaskStreamingGP(X, Y, num_inducing=5)


class Variational(models.ApproximateGP):
    def __init__(self, z, q=None, strategy=StreamingVariationalStrategy, **options):
        q = variational.CholeskyVariationalDistribution(5) if q is None else q
        super().__init__(strategy(self, z, q, **options))
        self.covar_module = kernels.RBFKernel()

    def forward(self, x):
        zeros = torch.zeros(x.shape[:-1])
        return distributions.MultivariateNormal(zeros, self.covar_module(x))


loop = Variational(x[:5])
loop(x)  # the first call starts its q
strategy = loop.variational_strategy
likelihood = likelihoods.GaussianLikelihood()
"""

# Section, the objects that must stay as they are, and the calls.
CONTRACT: dict[str, tuple[tuple[str, ...], list[str]]] = {
    "StreamingGP": (
        (),
        [
            "StreamingGP(None)",
            "StreamingGP(kernels.RBFKernel)",
            "StreamingGP(lambda a, b: a)",
            "StreamingGP(kernel, likelihoods.GaussianLikelihood)",
            "StreamingGP(kernel, 'gaussian')",
            "StreamingGP(kernel, likelihoods.MultitaskGaussianLikelihood(num_tasks=2))",
            "StreamingGP(kernel, likelihoods.BernoulliLikelihood(), alpha=0.5)",
            "StreamingGP(kernel, softmax)",
            "StreamingGP(kernel, mean_module=means.ZeroMean)",
            "StreamingGP(kernel, mean_module=0.0)",
            "StreamingGP(kernel, num_inducing=0)",
            "StreamingGP(kernel, num_inducing=2.5)",
            "StreamingGP(kernel, num_inducing=None)",
            "StreamingGP(kernel, num_inducing=10, memory_size=5)",
            "StreamingGP(kernel, memory_size=2.5)",
            'StreamingGP(kernel, share_noise="no")',
            "StreamingGP(kernel, alpha=1.5)",
            "StreamingGP(kernel, alpha=nan)",
            "StreamingGP(kernel, alpha='EP')",
            "StreamingGP(kernel, inducing_policy='greedy')",
            "StreamingGP(kernel, inducing_policy=GreedyInformation)",
            "StreamingGP(kernel, batch_shape=2)",
            "StreamingGP(kernel, batch_shape=(0,))",
            "StreamingGP(kernel, batch_shape=(2.5,))",
            "StreamingGP(kernels.RBFKernel(batch_shape=three))",
            "StreamingGP(kernels.RBFKernel(batch_shape=three), batch_shape=two)",
            "StreamingGP(kernel, mean_module=means.ConstantMean(batch_shape=three))",
            "StreamingGP(kernel, likelihoods.GaussianLikelihood(batch_shape=three))",
            "StreamingGP(kernel, likelihoods.GaussianLikelihood().to('meta'))",
        ],
    ),
    "Inducing policies": (
        (),
        [
            "AdaptiveBudget(tolerance=0.0)",
            "AdaptiveBudget(tolerance='a')",
            "AdaptiveBudget(min_inducing=0)",
            "AdaptiveBudget(min_inducing=5, max_inducing=3)",
            "AdaptiveBudget(policy=KeepOld())",
            "AdaptiveBudget(policy=GreedyInformation)",
            "GreedyInformation(max_candidates=1.5)",
            "RandomReplace(fraction=1.5)",
            "RandomReplace(fraction='a')",
            "RandomReplace(seed=-1)",
            "RandomReplace(seed=1.5)",
            "AllocatorPolicy(None)",
            "AllocatorPolicy(KeepOld)",
        ],
    ),
    "StreamingGP.update": (
        ("model", "plane", "batch", "labels", "fixed", "fresh", "classes", "heavy"),
        [
            "model.update(x.numpy(), y)",
            "model.update([0.0, 1.0], y)",
            "model.update(None, y)",
            "model.update(x, y.tolist())",
            "model.update(x, None)",
            "model.update(x.double(), y)",
            "model.update(x.long(), y)",
            "model.update(x, y.double())",
            "model.update(x, y.long())",
            "model.update(x, y > 0)",
            "model.update(x.to('meta'), y)",
            "model.update(x, y.to('meta'))",
            "model.update(x[0, 0], y)",
            "model.update(x[:, :0], y)",
            "model.update(x.expand(10, 3), y)",
            "plane.update(y[:2], y[:1])",
            "model.update(x, y[:5])",
            "model.update(x, y[:, None])",
            "model.update(x.expand(4, 10, 1), y.expand(4, 10))",
            "batch.update(x, y)",
            "batch.update(x.expand(3, 10, 1), y.expand(2, 10))",
            "model.update(x[:0], y[:0])",
            "model.update(nan * x, y)",
            "model.update(x, nan * y)",
            "model.update(x, y / 0)",
            "batch.update(x, nan * y.expand(2, 10))",
            "batch.update(x, y.expand(2, 10) / 0)",
            "heavy.update(x, torch.stack([y, nan * y]))",
            "classes.update(x, nan * y)",
            "model.update(x, y, noise=0.1)",
            "model.update(x, y, noise=y[:3])",
            "model.update(x, y, noise=y.double())",
            "model.update(x, y, noise=0 * y)",
            "model.update(x, y, noise=-1 - y)",
            "model.update(x, y, noise=nan * y)",
            "fixed.update(x, y)",
            "labels.update(x, y > 0.5, noise=y + 1)",
            "labels.update(x, y)",
            "labels.update(x, 2 * (y > 0.5) - 1)",
            "labels.update(x, [0, 1] * 5)",
            "labels.update(x, (y > 0.5).to('meta'))",
            "labels.update(x, y[:5] > 0.5)",
            "classes.update(x, torch.arange(10))",
            "classes.update(x, y[:5].long())",
            "model.update(x, y, num_steps=-1)",
            "model.update(x, y, num_steps=1.5)",
            "model.update(x, y, num_steps=None)",
            "model.update(x, y, lr=0)",
            "model.update(x, y, lr=-1.0)",
            "model.update(x, y, lr=nan)",
            "model.update(x, y, lr='fast')",
            "model.update(x, y, optimizer='sgd')",
            "model.update(x, y, optimizer=torch.optim.Adam)",
            "model.update(x, y, forget=0.0)",
            "model.update(x, y, forget=1.5)",
            "model.update(x, y, forget=nan)",
            "model.update(x, y, forget='never')",
            "model.update(x, y, learn_hyperparameters=-1)",
            "model.update(x, y, learn_hyperparameters='yes')",
            "model.update(x, y, trust_region=0.0)",
            'model.update(x, y, learn_inducing_points="no")',
            "model.update(x, y, callback=3)",
            "model.update(x, y, inducing_points=[0.0, 1.0])",
            "model.update(x, y, inducing_points=x[:0])",
            "model.update(x, y, inducing_points=x.expand(10, 2))",
            "model.update(x, y, inducing_points=x.expand(3, 10, 1))",
            "batch.update(x, y.expand(2, 10), inducing_points=x.expand(3, 10, 1))",
            "model.update(x, y, inducing_points=x.double())",
            "model.update(x, y, inducing_points=nan * x)",
            "StreamingGP(kernels.RBFKernel(ard_num_dims=3)).update(x, y)",
            "StreamingGP(kernels.RBFKernel(active_dims=0)).update(x, y)",
            "StreamingGP(kernels.RFFKernel(5)).update(x, y)",
            "StreamingGP(kernels.RBFKernel(active_dims=[2])).update(x, y)",
            "StreamingGP(kernels.RBFKernelGrad()).update(x, y)",
            "StreamingGP(kernel, mean_module=means.LinearMean(3)).update(x, y)",
        ],
    ),
    "StreamingGP.condition_on_observations": (
        ("model", "fixed", "labels"),
        [
            "model.condition_on_observations(x.numpy(), y)",
            "model.condition_on_observations(x, y.tolist())",
            "model.condition_on_observations(x, None)",
            "model.condition_on_observations(x.double(), y)",
            "model.condition_on_observations(x, y.long())",
            "model.condition_on_observations(x.expand(10, 3), y)",
            "model.condition_on_observations(x, y[:5])",
            "model.condition_on_observations(x.expand(3, 10, 1), y.expand(2, 10))",
            "model.condition_on_observations(x[:0], y[:0])",
            "model.condition_on_observations(x, nan * y)",
            "model.condition_on_observations(x, y, noise=-1 - y)",
            "model.condition_on_observations(x, y, inducing_points=x[:0])",
            "model.condition_on_observations(x, y, inducing_points=x.expand(3, 10, 1))",
            "fixed.condition_on_observations(x, y)",
            "labels.condition_on_observations(x, y)",
            "labels.condition_on_observations(x, y > 0.5, noise=y + 1)",
        ],
    ),
    "StreamingGP: one stream of a batch": (
        ("model", "batch", "classes"),
        ["model[0]", "batch[1.5]", "batch[None]", "batch[2:]", "classes[0]"],
    ),
    "StreamingGP: predictions": (
        ("model", "batch", "fixed", "labels"),
        [
            "model(x.numpy())",
            "model([0.0, 1.0])",
            "model(None)",
            "model(x.double())",
            "model(x.to('meta'))",
            "model(x.expand(10, 3))",
            "model(nan * x)",
            "batch(x.expand(3, 10, 1))",
            "StreamingGP(kernels.RBFKernel(ard_num_dims=3))(x)",
            "model.predict(x.double())",
            "model.predict(x, noise=0.1)",
            "model.predict(x, noise=torch.ones(3))",
            "model.predict(x, noise=-1 - y)",
            "fixed.predict(x)",
            "labels.predict(x, noise=y + 1)",
        ],
    ),
    "MultiOutputGP": (
        ("batch",),
        [
            "MultiOutputGP(None)",
            "MultiOutputGP(model)",
            "MultiOutputGP(classes)",
            "outputs.update(x, y)",
            "outputs.update(x, y.tolist())",
            "outputs.update(x, y.expand(3, 10).mT)",
            "outputs.update(x, y[:5].expand(2, 5).mT)",
            "outputs.update(x.numpy(), y.expand(2, 10).mT)",
            "outputs.update(x, nan * y.expand(2, 10).mT)",
            "outputs.update(x, y.expand(2, 10).mT, noise=y)",
            "outputs.update(x, y.expand(2, 10).mT, lr=0)",
            "outputs.condition_on_observations(x, y)",
            "outputs([0.0, 1.0])",
            "outputs.predict(x, noise=y)",
            "outputs.predict(x, noise=-1 - y.expand(2, 10).mT)",
        ],
    ),
    "StreamingVariationalStrategy": (
        ("loop",),
        [
            "Variational(x.numpy())",
            "Variational(x[:0])",
            "Variational(nan * x[:5])",
            "Variational(x[:4])",
            "Variational(x[:5], q='cholesky')",
            "Variational(x[:5], jitter_val=-1.0)",
            "strategy.absorb(x.numpy())",
            "strategy.absorb(x[:0])",
            "strategy.absorb(x.expand(10, 2))",
            "strategy.absorb(x.expand(3, 10, 1))",
            "strategy.absorb(x.double())",
            "strategy.absorb(x.to('meta'))",
            "strategy.absorb(nan * x)",
            "strategy.absorb(x, optimizer='adam')",
            "strategy.absorb(x, optimizer=torch.optim.Adam)",
            "strategy.absorb(max_surprise=0)",
            "strategy.absorb(max_surprise=None)",
            "IndependentMultitaskStreamingStrategy(None, num_tasks=2)",
            "IndependentMultitaskStreamingStrategy(strategy, num_tasks=0)",
        ],
    ),
    "StreamingELBO": (
        ("loop",),
        [
            "StreamingELBO(None, loop, num_data=10)",
            "StreamingELBO(likelihood, model, num_data=10)",
            "StreamingELBO(likelihood, Variational(x[:5], "
            "strategy=variational.VariationalStrategy), num_data=10)",
            "StreamingELBO(likelihood, loop, num_data=0)",
            "StreamingELBO(likelihood, loop, num_data=None)",
            "StreamingELBO(likelihood, loop, num_data=10, beta=-1.0)",
        ],
    ),
    "SingleTaskStreamingGP": (
        ("surrogate",),
        [
            "SingleTaskStreamingGP(X.numpy(), Y)",
            "SingleTaskStreamingGP(X, None)",
            "SingleTaskStreamingGP(X.long(), Y.long())",
            "SingleTaskStreamingGP(X, Y.float())",
            "SingleTaskStreamingGP(X, Y.to('meta'))",
            "SingleTaskStreamingGP(X[:, 0], Y)",
            "SingleTaskStreamingGP(X, Y[:, 0])",
            "SingleTaskStreamingGP(X, Y[:5])",
            "SingleTaskStreamingGP(X.expand(2, 10, 1), Y)",
            "SingleTaskStreamingGP(X[:0], Y[:0])",
            "SingleTaskStreamingGP(X, nan * Y)",
            "SingleTaskStreamingGP(X, Y, Y[:5] + 1)",
            "SingleTaskStreamingGP(X, Y, 0 * Y)",
            "SingleTaskStreamingGP(X, Y, covar_module='rbf')",
            "SingleTaskStreamingGP(X, Y, num_inducing=0)",
            "SingleTaskStreamingGP(X, Y, alpha=2)",
            "SingleTaskStreamingGP(X, Y, outcome_transform='standardize')",
            "surrogate.update(X.numpy(), Y)",
            "surrogate.update(X.float(), Y.float())",
            "surrogate.update(X.to('meta'), Y.to('meta'))",
            "surrogate.update(X.expand(10, 3), Y)",
            "surrogate.update(X, Y.expand(10, 2))",
            "surrogate.update(X, Y, 0 * Y)",
            "surrogate.update(X, Y, num_steps=None)",
            "surrogate.update(X, Y, num_step=3)",
            "surrogate.update(X, Y, lr=0)",
            "surrogate.update(X, Y, forget=0)",
            "surrogate.update(X, Y, inducing_points=X.expand(10, 3))",
            "surrogate.condition_on_observations(X, Y.tolist())",
            "surrogate.posterior(X.expand(10, 3))",
            "surrogate.posterior(None)",
            "surrogate.posterior(X, observation_noise=-Y - 1)",
        ],
    ),
}

INTRODUCTION = """\
# Bad input

All arguments are checked once, before anything changes. An error says what was passed,
what was expected and what to do. All errors are in `torch_ssgp.exceptions`. Errors
about data and arguments are `InputError`s, and therefore `ValueError`s. An unsupported
likelihood is a `TypeError`. `SingleTaskStreamingGP` raises BoTorch's errors where
BoTorch's own models would.

There is one exception: in a batch of streams, NaN in `y_new` marks a missing reading,
which the update ignores. With fixed hyperparameters and inducing points, each stream
gives the same result as with its own readings alone. A stream may have no reading at
all in an update. All streams share two things: inputs of missing readings take up room
in the memory until it is compressed, and a `forget` below 1 fades the past of every
stream. `noise` may be NaN where `y_new` is. This holds for Gaussian and Bernoulli
likelihoods and for the outputs of a `MultiOutputGP`. With a single stream, leave such
rows out.

`scripts/input_contract.py` writes this page, with these objects:
"""

CLOSING = """\
## Accepted, with a warning

Each warning is issued once per model, before the model changes. All are in
`torch_ssgp.exceptions`.

| what came | warning | what to do |
|---|---|---|
| Streams of a batch that learn, with a kernel or likelihood without a `batch_shape` | \
`SharedHyperparametersWarning` | Give the part the `batch_shape` of the model. To \
share hyperparameters on purpose, give it `torch.Size([1])`. Classes of one target may \
share. |
| Inputs too large for their spacing, such as Unix time in float32 | \
`PrecisionWarning` | Subtract the first value before the inputs become float32, or use \
`model.to(torch.float64)` and float64 inputs. |
| Targets too small for the noise that GPyTorch allows by default | \
`PrecisionWarning` | Rescale the targets, or pass \
`GaussianLikelihood(noise_constraint=Positive())`. |
| A stream that needs more inducing points or a larger memory | `BudgetWarning` | \
What the warning says: it names the limit that was met. |

## What the first batch sets

The first batch that is learned from sets learnable hyperparameters that still have
GPyTorch's default. Values that you set or froze stay. A constant mean of 0.0 is an
exception: it cannot be told from the default. To keep it, use `ZeroMean()` or freeze it
(`mean_module.raw_constant.requires_grad_(False)`). To learn from there, give it a prior
(`ConstantMean(constant_prior=...)`).
"""


def objects() -> dict[str, Any]:
    """What the calls are made on."""
    namespace: dict[str, Any] = {"__name__": "input_contract_objects"}
    exec(SETUP, namespace)
    return namespace


def error_of(call: str, namespace: dict[str, Any]) -> Exception | None:
    """What a call raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is wrong may be warned of, too
        try:
            eval(call, namespace)
        except Exception as error:
            return error
    return None


def page() -> str:
    """The text of the page."""
    namespace = objects()
    parts = [INTRODUCTION, f"```python\n{SETUP}```\n"]
    for section, (_, calls) in CONTRACT.items():
        rows = ["| call | error | message |", "|---|---|---|"]
        for call in calls:
            error = error_of(call, namespace)
            message = " ".join(str(error).split()).replace("|", "\\|")
            rows.append(f"| `{call}` | `{type(error).__name__}` | {message} |")
        parts.append(f"## {section}\n\n" + "\n".join(rows) + "\n")
    return "\n".join([*parts, CLOSING])


def main(arguments: list[str] | None = None) -> None:
    """Write the page."""
    new_parser(__doc__).parse_args(arguments)
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
