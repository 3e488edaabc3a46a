"""What more local steps are worth: by how many per cent a commit brings more for one per cent more of them.

Progress of a commit is taken to grow like ``steps^e``. The *elasticity* e lies between 0 and 1: at 1 silos all pull one
way, and twice the steps are as good as twice the commits; at 0 what they do more cancels. Where updates are seen it is

    e = |d| / sqrt(E|d_i|^2),

the length of the mean update over the root mean square of the single ones: the share of the silos' ways that outlasts
averaging. Its inverse square is the gradient diversity of Yin et al. 2018 (arXiv:1706.05699), which bounds how far a
batch may grow before its gradients say the same twice; here it bounds local steps. So, as with the goodput of Cannikin
and of Pollux, throughput times an efficiency that is measured while training:

    progress a second = steps^e / (seconds of an order at so many steps),

and if these seconds are ``a + b steps``, the best number is ``e / (1 - e) x a / b``. What the overhead is to an order's
training, 1 - e is to e.

An update that is ``s`` versions old when it is committed was made without knowing of the ``s`` commits before. These
``1 + s`` together bring what one brings of which each is a part, ``(1 + s)^e`` times as much as one alone, so each
brings ``(1 + s)^(e - 1)`` of a fresh one. With 1 + s in the place of steps that is the same loss as of steps that
cancel. Momentum makes it worse. Where each step goes on with a part b of the last one, a quadratic stands steps of up
to ``2 (1 + b)`` over its curvature, and ``(1 - b) / s`` where of all updates a share s is one version old: then it is
the quotient of the two, ``2 s (1 + b) / (1 - b)``, where that is more than 1 + s.

A server optimizer may make a step of a commit that is as long whether the change is long or short, as Adam does. More
local steps then bring nothing but a better direction. Say that a silo's update is s times the way that all have in
common, and noise of s steps, and drift of s. Of the squared length of the mean of n updates the last two have the share

    q = (1 / e^2 - 1) / (n - 1),        at most 1,

of which more steps lessen the noise and not the drift. What a step brings goes by the cosine between it and the common
way. If all of q is noise, that grows by q / 2 per cent for one per cent more steps; if it is drift, by none. Nobody
knows which, so `of_directions` takes the half of it, q / 4.

Where silos seal their figures they find both norms together. Where nobody tells them, the loss takes their place.
AdaComm (Wang and Joshi 2019, arXiv:1810.08313, equation 17) has the best number of steps fall as ``sqrt(F_j / F_0)``;
with the best number above that is ``e / (1 - e) = sqrt(F_j / F_0)``, so silos begin with as much training as overhead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

UNKNOWN = 0.5
"""Before anything is known: training and overhead take the same time."""

LEAST, MOST = 0.05, 0.9
"""Bounds: at 0 no order would be worth its second step, at 1 none would ever end."""


def progress(steps: float, staleness: float, elasticity: float, inertia: float = 0.0) -> float:
    """What a commit brings, in no unit.

    Args:
        steps: behind each of its updates.
        staleness: mean number of versions that its updates are old.
        elasticity: e.
        inertia: b, part of a step of the server's that the next one goes on with; 0 to below 1.
    """
    split = max(1 + staleness, 2 * staleness * (1 + inertia) / (1 - inertia))
    return float(steps**elasticity * split ** (elasticity - 1))


def of_norms(norms: Sequence[tuple[float, float]]) -> float | None:
    """Elasticity by recent commits: of each the squared norm of the mean and the mean of the squared norms.

    The geometric mean of what each says, for updates become smaller by and by; None where none says anything.
    """
    said = [mean / each for mean, each in norms if 0 < mean < math.inf and 0 < each < math.inf]
    return _bounded(math.exp(sum(map(math.log, said)) / (2 * len(said)))) if said else None


def of_directions(elasticity: float, updates: int) -> float:
    """Elasticity where the server's step is as long whatever the change is.

    Args:
        elasticity: of changes that count by their length.
        updates: in a commit.
    """
    return _bounded(min((elasticity**-2 - 1) / max(updates - 1, 1), 1.0) / 4)


def of_losses(first: float, now: float) -> float | None:
    """Elasticity by the training loss of the first commit and that of the newest; None if they are no such losses."""
    if not (first > 0 and now >= 0):
        return None
    ratio = math.sqrt(now / first)
    return _bounded(ratio / (1 + ratio))


def _bounded(elasticity: float) -> float:
    return min(max(elasticity, LEAST), MOST)
