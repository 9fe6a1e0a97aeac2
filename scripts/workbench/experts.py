"""A tree of exact local models, point by point, hyperparameters given.

The published algorithm of LoG-GP (Lederer, Ordonez Conejo, Maier, Xiao, Umlauft and
Hirche, 2021, "Gaussian Process-Based Real-Time Learning for Safety Critical
Applications"), written for this comparison: a leaf that is full is cut at the mean of
its widest input; near the cut, data go to either side at random, with a probability
that grows linearly over the overlap. A prediction is the mixture of all leaves that the
input reaches, each with the probability to come there.
"""

from __future__ import annotations

import torch
from gpytorch.kernels import Kernel
from torch import Tensor, nn

from torch_ssgp.modules import gram, variances

OVERLAP = 0.05  # of the width of the data in a leaf


class Leaf:
    """An exact model of few data ``(n, d)``, residuals ``(n,)``: rows of a factor."""

    def __init__(
        self, kernel: Kernel, noise: Tensor, x: Tensor, y: Tensor, capacity: int
    ) -> None:
        self.kernel, self.noise, self.num = kernel, noise, len(y)
        self.x = x.new_zeros(capacity, x.size(-1))
        self.y, self.e = x.new_zeros(capacity), x.new_zeros(capacity)
        self.L = x.new_zeros(capacity, capacity)
        self.x[: self.num], self.y[: self.num] = x, y
        if self.num:
            eye = torch.eye(self.num, dtype=x.dtype)
            L = torch.linalg.cholesky(gram(kernel, x, x) + noise * eye)
            self.L[: self.num, : self.num] = L
            e = torch.linalg.solve_triangular(L, y.unsqueeze(-1), upper=False)
            self.e[: self.num] = e.squeeze(-1)

    def white(self, x: Tensor) -> Tensor:
        """``L^-1 K(data, x)``, ``(n, s)``."""
        n = self.num
        K = gram(self.kernel, self.x[:n], x)
        return torch.linalg.solve_triangular(self.L[:n, :n], K, upper=False)

    def append(self, x: Tensor, y: Tensor) -> None:
        """One datum more, ``(1, d)`` and ``(1,)``: a row of the factor."""
        n, v = self.num, self.white(x).squeeze(-1)
        d = (variances(self.kernel, x)[0] + self.noise - v @ v).clamp_min(1e-12).sqrt()
        self.L[n, :n], self.L[n, n] = v, d
        self.e[n] = (y[0] - v @ self.e[:n]) / d
        self.x[n], self.y[n], self.num = x[0], y[0], n + 1

    def predict(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of the function, ``(s,)``."""
        v = self.white(x)
        variance = variances(self.kernel, x) - v.square().sum(0)
        return v.mT @ self.e[: self.num], variance.clamp_min(0)


class Node:
    """A leaf, or a cut with two nodes below it."""

    def __init__(self, leaf: Leaf) -> None:
        self.leaf: Leaf | None = leaf
        self.below: tuple[Node, Node] | None = None

    def right(self, x: Tensor) -> Tensor:
        """Probability of the second node, ``(s,)``."""
        return ((x[:, self.dim] - self.place) / self.overlap + 0.5).clamp(0, 1)

    def cut(self, gen: torch.Generator) -> None:
        """Make two of a full leaf."""
        assert self.leaf is not None
        full = self.leaf
        low, high = full.x.aminmax(dim=0)
        self.dim = int((high - low).argmax())
        self.place = full.x[:, self.dim].mean()
        self.overlap = (OVERLAP * (high - low)[self.dim]).clamp_min(1e-12)
        chance = torch.rand(full.num, generator=gen, dtype=full.x.dtype)
        goes = chance < self.right(full.x)
        parts = [
            Leaf(full.kernel, full.noise, full.x[some], full.y[some], full.num)
            for some in (~goes, goes)
        ]
        self.leaf, self.below = None, (Node(parts[0]), Node(parts[1]))

    def shares(self, x: Tensor, chance: Tensor) -> list[tuple[Leaf, Tensor]]:
        """All leaves below, with the probabilities that inputs reach them."""
        if self.leaf is not None:
            return [(self.leaf, chance)]
        right, (first, second) = self.right(x), self.below
        found = first.shares(x, chance * (1 - right))
        return found + second.shares(x, chance * right)


class LocalExperts:
    """LoG-GP with the hyperparameters of ``prior``; a leaf has ``capacity`` data."""

    def __init__(self, prior: nn.Module, capacity: int = 200, seed: int = 0) -> None:
        self.prior, self.capacity = prior, capacity
        self.gen = torch.Generator().manual_seed(seed)
        self.root: Node | None = None

    @torch.no_grad()
    def update(self, x: Tensor, y: Tensor) -> None:
        """Learn from data ``(n, d)`` and ``(n,)``, point by point."""
        kernel, noise = self.prior.covar_module, self.prior.likelihood.noise[0]
        if self.root is None:
            self.root = Node(Leaf(kernel, noise, x[:0], y[:0], self.capacity))
        r = y - self.prior.mean_module(x)
        for one, target in zip(x.split(1), r.split(1), strict=True):
            node = self.root
            while node.leaf is None or node.leaf.num == self.capacity:
                if node.leaf is not None:
                    node.cut(self.gen)
                side = torch.rand((), generator=self.gen) < node.right(one)[0]
                node = node.below[int(side)]
            node.leaf.append(one, target)

    @torch.no_grad()
    def predict(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of targets at ``x`` ``(s, d)``, of the mixture."""
        first, second = x.new_zeros(len(x)), x.new_zeros(len(x))
        assert self.root is not None
        for leaf, chance in self.root.shares(x, x.new_ones(len(x))):
            near = chance.nonzero().squeeze(-1)
            if len(near) and leaf.num:
                mean, variance = leaf.predict(x[near])
                first[near] += chance[near] * mean
                second[near] += chance[near] * (variance + mean.square())
        variance = second - first.square()
        noise = self.prior.likelihood.noise
        return first + self.prior.mean_module(x), variance.clamp_min(0) + noise

    def num_bytes(self) -> int:
        """Data and factors of all leaves, as far as they are filled."""
        assert self.root is not None
        nodes, total = [self.root], 0
        while nodes:
            node = nodes.pop()
            nodes += node.below or ()
            if node.leaf is not None:
                n = node.leaf.num
                total += 8 * (n * (node.leaf.x.size(-1) + 2) + n * (n + 1) // 2)
        return total
