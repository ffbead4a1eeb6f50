"""A site's own privacy: it clips the site's update and adds noise before it is sent, and counts what that has cost.

This protects a site from everybody, the server included, and needs nobody's word; the noise of a configuration
(``run.noise``) is added by the server, which must be trusted. See docs/privacy.md.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

from torch.utils._pytree import tree_map

from bpfed._util.errors import UserError
from bpfed._util.files import to_json, write_whole
from bpfed.aggregation.privacy import gaussian_epsilon, noised, secret_normal
from bpfed.deploy.protocol.state_schema import Upload
from bpfed.deploy.site.limits import when_full
from bpfed.methods.base import Method, State

FILE = "released.json"


class LocalPrivacy:
    """Changes every upload before it is sent (a `bpfed.deploy.site.site.UploadTransform`).

    What is counted is answers, not rounds: a server that asks for a round twice gets two noisy updates, and pays for
    two. The count outlives runs, as the examples do. It is on the disk before the upload is sent.

    Args:
        folder: Where the count is kept.
        method: Whose uploads they are.
        clip: C, the norm that an update may have.
        noise: z, the noise in units of C.
        delta: δ of the ε that is told.
        epsilon: The site takes part until this is spent; 0: always.
        say: Called with a message on what has been spent.
    """

    def __init__(
        self,
        folder: Path,
        method: Method,
        clip: float,
        noise: float,
        delta: float,
        epsilon: float,
        say: Callable[[str], None],
    ) -> None:
        self.path, self.method, self.clip, self.noise = folder / FILE, method, clip, noise
        self.delta, self.epsilon, self.say = delta, epsilon, say

    def __call__(self, upload: Upload, shared: State, round_: int) -> Upload:
        count, squares = self._released()
        # Releases of noise z1, z2, ... are together one of sensitivity over noise sqrt(sum of 1/z^2).
        squares += self.noise**-2
        spent = gaussian_epsilon(1.0 / math.sqrt(squares), 1, self.delta)
        if 0.0 < self.epsilon < spent:
            raise UserError(
                f"Round {round_} would spend epsilon {spent:.3f} of this site's {self.epsilon:g}, so it does not take "
                "part; raise epsilon in its deploy.toml to go on."
            )
        with when_full(self.path, "and the site rejoins by itself"):
            write_whole(self.path, to_json({"releases": count + 1, "squares": squares}))
        stacked = tree_map(lambda leaf: leaf[None], upload.state)
        sent = noised(self.method, shared, stacked, self.clip, self.noise, secret_normal)
        self.say(f"Round {round_}: epsilon of what this site has sent is {spent:.3f} now, delta {self.delta:g}.")
        return Upload(tree_map(lambda leaf: leaf[0], sent))

    def _released(self) -> tuple[int, float]:
        """Uploads sent so far, and the sum of their 1/z²."""
        if not self.path.exists():
            return 0, 0.0
        try:
            found = json.loads(self.path.read_text())
            return int(found["releases"]), float(found["squares"])
        except (OSError, ValueError, KeyError, TypeError):
            raise UserError(
                f"'{self.path}' counts what this site has sent, and cannot be read; restore it from a backup."
            ) from None
