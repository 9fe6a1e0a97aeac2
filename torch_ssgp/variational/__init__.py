r"""Streaming for hand-written GPyTorch training loops.

Keep the model, the likelihood, the loop and the optimiser, and replace one class: use
:class:`StreamingVariationalStrategy` instead of GPyTorch's ``VariationalStrategy``. Its
``kl_divergence`` includes the past, so the stock ``VariationalELBO`` and
``PredictiveLogLikelihood`` become streaming objectives. ``absorb`` ends an update.

==================  ===================================================================
``strategy.py``     ``StreamingVariationalStrategy``, and the same for several tasks
``sites.py``        the mathematics, as pure functions of tensors
``parameters.py``   parameters that change their size, and optimisers that hold them
``watch.py``        detects a forgotten ``absorb``
==================  ===================================================================

The past is kept in site form: pseudo-observations :math:`(U, g)` with unit noise of
the function at the old inducing points, :math:`a = f(Z_a)`,

.. math::
    \log \frac{q_{old}(a)}{p_{old}(a)} = -\tfrac12 \|g - U a\|^2 - \log E, \qquad
    E = \int p_{old}(a)\, e^{-\frac12 \|g - U a\|^2} da,

so the two terms that the paper adds to the usual objective are one expected square,
positive semi-definite by construction:

.. math::
    KL(q(a) \| q_{old}(a)) - KL(q(a) \| p_{old}(a))
        = \tfrac12 \big( \|g - U \mu_a\|^2 + \mathrm{tr}\, U \Sigma_a U^\top \big)
          + \log E .

Letters: ``a`` old inducing points, ``b`` current ones, ``c`` those of the next update;
:math:`b = m_b + L v` with :math:`L L^\top = K_{bb}` and
:math:`q(v) = N(\mu, S)`, the whitened variational distribution.
"""

from torch_ssgp.variational.parameters import replace_parameter, whitened_parameters
from torch_ssgp.variational.sites import (
    KLTerms,
    SitePast,
    divide_by_prior,
    expected_misfit,
    predict_whitened,
)
from torch_ssgp.variational.strategy import (
    AbsorbResult,
    IndependentMultitaskStreamingStrategy,
    LMCStreamingStrategy,
    StreamingVariationalStrategy,
)

__all__ = [
    "AbsorbResult",
    "IndependentMultitaskStreamingStrategy",
    "KLTerms",
    "LMCStreamingStrategy",
    "SitePast",
    "StreamingVariationalStrategy",
    "divide_by_prior",
    "expected_misfit",
    "predict_whitened",
    "replace_parameter",
    "whitened_parameters",
]
