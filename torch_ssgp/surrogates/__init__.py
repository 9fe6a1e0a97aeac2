r"""BoTorch models whose cost does not grow with the number of evaluations.

:class:`SingleTaskStreamingGP` is a BoTorch model around a
:class:`~torch_ssgp.StreamingGP`. It learns from evaluations as they arrive, and serves
every acquisition function that needs a posterior, a fantasy or a sample path.

==================  ===================================================================
``model.py``        ``SingleTaskStreamingGP``: learn, predict, condition, save
``checks.py``       validation, with BoTorch's errors
``units.py``        standardisation: the memory in other units
``outputs.py``      outputs as a batch of the streaming model, and back
``paths.py``        sample paths (Matheron's rule)
==================  ===================================================================

This is the only package that needs BoTorch: ``pip install 'torch_ssgp[botorch]'``.
"""

from torch_ssgp.exceptions import MissingDependencyError

try:
    from torch_ssgp.surrogates import paths  # noqa: F401  registers sample paths
    from torch_ssgp.surrogates.model import SingleTaskStreamingGP
except ImportError as error:
    if (error.name or "").partition(".")[0] != "botorch":
        raise
    raise MissingDependencyError(
        "torch_ssgp.surrogates needs BoTorch. Install it with: "
        "pip install 'torch_ssgp[botorch]'"
    ) from error

__all__ = ["SingleTaskStreamingGP"]
