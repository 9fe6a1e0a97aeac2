"""The streaming objective of hand-written training loops, with its terms."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import Likelihood
from gpytorch.mlls import VariationalELBO
from gpytorch.models import ApproximateGP
from torch import Tensor

from torch_ssgp import validation as check
from torch_ssgp.exceptions import ArgumentError
from torch_ssgp.variational.watch import check_absorbed


class StreamingELBOTerms(NamedTuple):
    r"""The terms of a streaming bound, in nats for the whole new batch.

    Attributes:
        expected_log_likelihood: ``(*batch,)``, :math:`\sum_i E_q \log p(y_i | f_i)`,
            scaled up from a minibatch to the batch.
        kl_prior: ``(*batch,)``, :math:`KL(q(b) \| p(b))`.
        old_data: ``(*batch,)``,
            :math:`KL(q(a) \| q_{old}(a)) - KL(q(a) \| p_{old}(a))`, zero in the first
            update.
        elbo: ``(*batch,)``, the first minus :math:`\beta` times the other two.
    """

    expected_log_likelihood: Tensor
    kl_prior: Tensor
    old_data: Tensor
    elbo: Tensor


class StreamingELBO(VariationalELBO):
    r"""GPyTorch's ``VariationalELBO`` with named terms and a check of ``absorb``.

    For a model with a :class:`~torch_ssgp.variational.StreamingVariationalStrategy`
    the value is, divided by ``num_data``, the paper's online bound

    .. math::
        \sum_i E_q \log p(y_i | f_i) - \beta \big[ KL(q(b) \| p(b))
            + KL(q(a) \| q_{old}(a)) - KL(q(a) \| p_{old}(a)) \big].

    A :class:`~torch_ssgp.exceptions.ForgottenAbsorbWarning` is issued if you train on a
    second batch without calling ``absorb`` first. It is detected by more than
    ``num_data`` different data since the last ``absorb``.

    Args:
        likelihood: The likelihood.
        model: A model whose strategy keeps the past.
        num_data: Size of the **new** batch, not of all data seen: the past has its
            own term. Set the attribute ``num_data`` when the next batch has another
            size.
        beta: Weight of the divergences.
        combine_terms: As in GPyTorch: one value (default), or the parts.

    Example:
        >>> import gpytorch, torch
        >>> from torch_ssgp.mlls import StreamingELBO
        >>> from torch_ssgp.variational import StreamingVariationalStrategy
        >>> class Model(gpytorch.models.ApproximateGP):
        ...     def __init__(self, z):
        ...         q = gpytorch.variational.CholeskyVariationalDistribution(len(z))
        ...         super().__init__(StreamingVariationalStrategy(self, z, q))
        ...         self.covar_module = gpytorch.kernels.RBFKernel()
        ...     def forward(self, x):
        ...         return gpytorch.distributions.MultivariateNormal(
        ...             torch.zeros(x.shape[:-1]), self.covar_module(x))
        >>> model = Model(torch.linspace(0, 1, 5).unsqueeze(-1))
        >>> likelihood = gpytorch.likelihoods.GaussianLikelihood()
        >>> x, y = torch.rand(20, 1), torch.zeros(20)
        >>> mll = StreamingELBO(likelihood, model, num_data=20)
        >>> terms = mll.terms(model(x), y)
        >>> torch.allclose(terms.elbo / 20, mll(model(x), y))
        True
        >>> terms.old_data  # there is no past yet
        tensor(0.)
    """

    def __init__(
        self,
        likelihood: Any,
        model: Any,
        num_data: int,
        beta: float = 1.0,
        combine_terms: bool = True,
    ) -> None:
        check.check_module(likelihood, "likelihood", Likelihood, "GaussianLikelihood()")
        example = "one with a StreamingVariationalStrategy"
        check.check_module(model, "model", ApproximateGP, example)
        check.check_positive_int(num_data, "num_data")
        check.check_positive(beta, "beta", or_zero=True)
        if not hasattr(model.variational_strategy, "kl_terms"):
            raise ArgumentError(
                f"The model has a {type(model.variational_strategy).__name__}, which "
                "keeps no past. Use StreamingVariationalStrategy (inside "
                "IndependentMultitaskStreamingStrategy or LMCStreamingStrategy for "
                "several tasks), or GPyTorch's VariationalELBO."
            )
        super().__init__(
            likelihood, model, num_data, beta=beta, combine_terms=combine_terms
        )

    def forward(
        self, variational_dist_f: MultivariateNormal, target: Tensor, **kwargs: Any
    ) -> Any:
        """The bound, divided by ``num_data``."""
        if self.model.training and torch.is_grad_enabled():
            strategy = self.model.variational_strategy
            check_absorbed(strategy, variational_dist_f, target, self.num_data)
        return super().forward(variational_dist_f, target, **kwargs)

    def terms(
        self,
        variational_dist_f: MultivariateNormal,
        target: Tensor,
        **kwargs: Any,
    ) -> StreamingELBOTerms:
        """The terms of the bound at the outputs of the model, for the whole batch.

        Without priors on hyperparameters and added losses, which GPyTorch puts into the
        value as well.
        """
        scale = self.num_data / variational_dist_f.event_shape[0]
        log_likelihood = scale * self._log_likelihood_term(
            variational_dist_f, target, **kwargs
        )
        kl = self.model.variational_strategy.kl_terms()
        elbo = log_likelihood - self.beta * (kl.prior + kl.old_data)
        return StreamingELBOTerms(log_likelihood, kl.prior, kl.old_data, elbo)
