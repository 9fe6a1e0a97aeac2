"""Streaming sparse Gaussian processes on GPyTorch."""

from torch_ssgp.fit import UpdateResult
from torch_ssgp.models import StreamingGP
from torch_ssgp.summary import PosteriorSummary

__all__ = ["PosteriorSummary", "StreamingGP", "UpdateResult"]
