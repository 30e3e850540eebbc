"""Newton–Schulz: the orthogonal factor of a matrix, computed only with matrix products.

This file knows matrices and coefficients, but no optimizer, no rank and no process group.

For ``G = U S Vᵀ`` the iteration ``X ← aX + (bA + cA²)X`` with ``A = XXᵀ`` maps every singular value ``s``
to ``as + bs³ + cs⁵`` and does not change ``U`` and ``V``. A few iterations bring the singular values near 1,
so the result is close to ``UVᵀ``. For an s×l matrix (s ≤ l) one iteration costs ``4s²l + 2s³`` floating-point
operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, cast

import torch
from torch import Tensor

from .errors import UsageError

Triple: TypeAlias = tuple[float, float, float]
Coefficients: TypeAlias = Triple | Sequence[Triple]

KELLER_JORDAN: Triple = (3.4445, -4.7750, 2.0315)
"""One triple for every step (https://kellerjordan.github.io/posts/muon/), ``torch.optim.Muon``'s default."""

YOU_JIACHENG: tuple[Triple, ...] = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
"""Five triples by YouJiacheng, from the modded-nanogpt speed runs."""

POLAR_EXPRESS: tuple[Triple, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
)
"""Five triples of the Polar Express (arXiv 2505.16932), before ``with_safety``."""

CANS: tuple[Triple, ...] = (
    (8.4703, -25.1081, 18.6293),
    (4.1828, -3.1087, 0.5806),
    (3.9619, -2.9541, 0.5630),
    (3.2866, -2.4647, 0.5074),
    (2.2737, -1.6447, 0.4162),
)
"""Five triples of CANS, Chebyshev-type acceleration of Newton–Schulz."""

DEFAULT_EPS = 1e-7
DEFAULT_STEPS = 5
MAX_STEPS = 99


def zeropower_via_newtonschulz(
    G: Tensor,
    steps: int = DEFAULT_STEPS,
    coefficients: Coefficients = KELLER_JORDAN,
    eps: float = DEFAULT_EPS,
) -> Tensor:
    """Return the approximate orthogonal factor of a matrix, in bfloat16, without gradient tracking.

    ``G`` is a matrix, or a batch of matrices (3-D). Each matrix of a batch gets the same result as it would
    alone. The input is never written to, and the shape is kept. ``coefficients`` is one triple for all steps,
    or a sequence with one triple per step. ``eps`` is the smallest norm that a matrix is divided by. With one
    triple the result is bitwise that of ``torch.optim.Muon``.

    Raises:
        UsageError: ``G`` is not a real matrix or batch, or the coefficients do not fit the steps.

    >>> import torch
    >>> G = torch.diag(torch.tensor([3.0, 2.0, 1.0]))
    >>> X = zeropower_via_newtonschulz(G)
    >>> X.dtype, bool((X.float().diag() - 1).abs().max() < 0.35)
    (torch.bfloat16, True)
    """
    check_matrix(G)
    triples = coefficients_per_step(coefficients, steps)
    if G.ndim == 2:
        return _orthogonalize(G.detach(), triples, eps)
    # One matrix at a time: torch's batched products round one in a hundred small matrices differently.
    members = [_orthogonalize(member, triples, eps) for member in G.detach()]
    return torch.stack(members) if members else G.to(torch.bfloat16)


def _orthogonalize(G: Tensor, coefficients: Sequence[Triple], eps: float) -> Tensor:
    """``X ← aX + (bA + cA²)X`` with ``A = XXᵀ``, for every triple. X is (s, l), the shorter side first.

    From the second step on, each product is written into the memory of a product that is no longer needed,
    which does not change the bits.
    """
    tall = G.size(0) > G.size(1)
    X = G.clone() if G.dtype is torch.bfloat16 else G.bfloat16()
    X, XT = (X.T, X) if tall else (X, X.T)
    X.div_(torch.linalg.vector_norm(X).clamp(min=eps))
    A = B = Y = YT = None
    for step, (a, b, c) in enumerate(coefficients):
        A = torch.mm(X, XT, out=A)  # [s, l] @ [l, s]
        B = torch.addmm(A, A, A, beta=b, alpha=c, out=B)
        Y, X = X, torch.addmm(X, B, X, beta=a, out=Y)  # [s, s] @ [s, l]
        YT, XT = XT, X.T if YT is None else YT
        if step == 0 and not Y.is_contiguous():  # products are row-major
            Y, YT = Y.T.view(Y.shape) if Y.T.is_contiguous() else None, None
    return X.T if tall else X


def coefficients_per_step(coefficients: Coefficients, steps: int) -> tuple[Triple, ...]:
    """Return one triple for each step.

    >>> coefficients_per_step((2.0, -1.5, 0.5), 2)
    ((2.0, -1.5, 0.5), (2.0, -1.5, 0.5))
    """
    if not 0 <= steps <= MAX_STEPS:
        raise UsageError(f"Newton–Schulz takes 0 to {MAX_STEPS} steps, got {steps}")
    given = tuple(coefficients)
    if len(given) == 3 and all(isinstance(value, (int, float)) for value in given):
        return (cast(Triple, given),) * steps
    triples = tuple(_as_triple(triple) for triple in given)
    if len(triples) != steps:
        raise UsageError(
            f"coefficients must be one triple, or one per step: got {len(triples)} for {steps} steps"
        )
    return triples


def with_safety(coefficients: Sequence[Triple], sigma: float) -> tuple[Triple, ...]:
    """Return the coefficients of ``p(x/σ)``, with room for singular values that rounding pushed above 1.

    Common values with ``POLAR_EXPRESS`` are 1.01 and 1.05. The coefficients are divided by σ, σ³ and σ⁵.

    >>> with_safety([(2.0, 8.0, 32.0)], 2.0)
    ((1.0, 1.0, 1.0),)
    """
    if not sigma > 0:
        raise UsageError(f"the safety factor must be positive, got {sigma}")
    return tuple((a / sigma, b / sigma**3, c / sigma**5) for a, b, c in coefficients)


def _as_triple(values: object) -> Triple:
    triple = tuple(values) if isinstance(values, Sequence) else ()
    if len(triple) != 3 or not all(isinstance(value, (int, float)) for value in triple):
        raise UsageError(f"Newton–Schulz coefficients are three numbers (a, b, c), got {values!r}")
    return cast(Triple, triple)


def check_matrix(G: Tensor) -> None:
    """Raise ``UsageError`` for anything but a dense real matrix, or a batch of them."""
    if G.ndim not in (2, 3):
        raise UsageError(f"Newton–Schulz takes a matrix or a batch of matrices, got shape {tuple(G.shape)}")
    if G.is_complex() or G.is_sparse:
        kind = "complex" if G.is_complex() else "sparse"
        raise UsageError(f"Newton–Schulz takes dense real matrices, got a {kind} one")
