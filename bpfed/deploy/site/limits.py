"""What a site lets a server ask of it: limits, a count of what was asked, and a privacy of its own.

No message changes any of it: limits are in the site's ``deploy.toml``, rounds, pilots and what is tested in its
``config.toml``. What goes beyond them is refused in a sentence that names the setting.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils._pytree import tree_map

from bpfed._util.errors import UserError
from bpfed._util.files import to_json, when_full, write_whole, writing
from bpfed.aggregation.privacy import gaussian_epsilon, noised, secret_normal
from bpfed.config.migrations import OLD_PILOT
from bpfed.config.reader import Config
from bpfed.config.settings import MAX_TEMPERATURE, MIN_TEMPERATURE, Settings
from bpfed.deploy.protocol.messages import Request
from bpfed.deploy.protocol.state_schema import RejectedMessage, Upload
from bpfed.deploy.settings import Limits
from bpfed.runs.pilot import FOLDS, candidate_count, offers_choice

if TYPE_CHECKING:
    from bpfed.methods.base import Method, State

#: What was asked of a site, in the folder of its states.
ASKED = "asked.json"


def check_request(request: Request, settings: Settings) -> None:
    """Refuse what the site's own configuration has no place for."""
    rounds, most, temperature = settings.rounds, settings.calibration_pilots, request.calibration_temperature
    if not 0 <= request.pilot <= most:
        raise RejectedMessage(f"it is for calibration pilot {request.pilot}, but there are to be {most}.")
    if not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        raise RejectedMessage(
            f"its calibration temperature is {temperature}, which is not between {MIN_TEMPERATURE:g} and {MAX_TEMPERATURE:g}."
        )
    if temperature != 1.0 and (request.pilot or not most):
        raise RejectedMessage(f"its calibration temperature is {temperature}, but none can have been learnt.")
    if request.round > rounds + 1 or (request.train and request.round > rounds):
        raise RejectedMessage(f"it is for round {request.round}, but 'rounds' of this site's config.toml is {rounds}.")
    if not 0 <= request.counted < max(request.round, 1):
        raise RejectedMessage(f"in round {request.round} it cannot have used an upload of round {request.counted}.")
    if request.evaluate and not request.pilot and not (request.round > 1 and settings.evaluated(request.round - 1)):
        raise RejectedMessage(
            f"it asks for scores of round {request.round - 1}, which 'eval_every' of this site's config.toml leaves out."
        )


def check_candidate(request: Request, config: Config, limits: Limits) -> None:
    """Refuse a selection pilot that this site does not take part in, and settings that its own method does not offer."""
    places, offered = request.candidate, config.method.candidates() if offers_choice(config.method, config.run) else ()
    if request.fold and not limits.selection_pilots:
        raise RejectedMessage(
            "it asks for a selection pilot; 'selection_pilots' of this site's deploy.toml refuses them."
        )
    if not 0 <= request.fold <= (FOLDS if offered else 0):
        raise RejectedMessage(
            f"it is for fold {request.fold} of a selection pilot, which this site's config.toml has not."
        )
    least = 0 if request.round == 0 else 1 if request.fold else len(offered)
    if not least <= len(places) <= len(offered) or not all(
        0 <= at < len(stage) for at, stage in zip(places, offered, strict=False)
    ):
        raise RejectedMessage(
            f"it names the candidate {list(places)}, which is none that {config.method.name} offers here."
        )


def most_pilots(config: Config) -> int:
    """How many pilots of both kinds there are before a run, at most."""
    selection = candidate_count(config.method) * FOLDS if offers_choice(config.method, config.run) else 0
    return config.run.calibration_pilots + selection


class Requests:
    """Counts what is asked of a site, and refuses what is beyond its limits; the count is on the disk before any answer.

    A day is one of the site's clock, in UTC; a clock that is set back starts no new one.

    Args:
        folder: Of the site's states; each run has a folder in it, and the count is a file.
        limits: The site's own.
        pilots: Calibration and selection pilots of each run, at most.
        say: Called with each message for the site's owner.
        today: Gives the day's number.
    """

    def __init__(
        self,
        folder: Path,
        limits: Limits,
        pilots: int,
        say: Callable[[str], None],
        today: Callable[[], int] = lambda: int(time.time() // 86400),
    ) -> None:
        self.folder, self.limits, self.pilots, self.say, self.today = folder, limits, pilots, say, today

    def count(self, request: Request, states: Path) -> None:
        """Count an ask for a round, or refuse it. ``states`` is the folder of its run."""
        kept, limits = self._read(), self.limits
        if (day := self.today()) > kept["day"]:
            kept |= {"day": day, "scores": 0, "runs": 0, "asked": {word: {} for word in kept["asked"]}}
        word = f"pilot {request.run}" if request.of_pilot else request.run
        if word not in kept["asked"]:
            kept["runs"] += 1
            # Each pilot has a word of its own, as the run has.
            if kept["runs"] > limits.runs_per_day * (1 + self.pilots):
                raise _beyond(f"one more run, and this site takes part in {limits.runs_per_day} a day", "runs_per_day")
            kept["asked"][word] = {}
            self._forget(kept["asked"], word, states.parent)
        rounds = kept["asked"][word]
        rounds[str(request.round)] = rounds.get(str(request.round), 0) + 1
        if rounds[str(request.round)] > limits.asks_per_round:
            raise _beyond(f"round {request.round} for the {rounds[str(request.round)]}th time today", "asks_per_round")
        kept["scores"] += request.evaluate
        if kept["scores"] > limits.scores_per_day:
            raise _beyond(f"scores for the {kept['scores']}th time today", "scores_per_day")
        self._write(kept)

    @property
    def model(self) -> dict[str, Any]:
        """Of which run the site's own model is, and from which round the site had its part of it."""
        return dict(self._read()["model"])

    def keep_model(self, run: str, trained: int) -> None:
        """Note of which run the site's own model is now, and after how many trainings of the site in it."""
        self._write({**self._read(), "model": {"run": run, "trained": trained}})

    def trained(self, run: str) -> int:
        """How often this site has trained in a run."""
        return int(self._read()["trained"].get(run, 0))

    def train(self, run: str) -> None:
        """Note that this site has trained in a run."""
        kept = self._read()
        known = {word: n for word, n in kept["trained"].items() if word in kept["asked"]}
        self._write({**kept, "trained": {**known, run: known.get(run, 0) + 1}})

    def _forget(self, asked: dict[str, Any], newest: str, folder: Path) -> None:
        """Of states of earlier runs, keep those of the latest ones."""
        kind = newest.startswith(("pilot ", OLD_PILOT))
        words = [word for word in asked if word.startswith(("pilot ", OLD_PILOT)) is kind]
        for word in words[: -max(self.limits.runs_kept * (1 + self.pilots * kind), 1)]:
            del asked[word]
            if (old := folder / word.rpartition(" ")[2]).is_dir():
                with writing(old):
                    shutil.rmtree(old)
                self.say(
                    f"The states of run {old.name} are deleted: those of the last {self.limits.runs_kept} runs are "
                    "kept (runs_kept in this site's deploy.toml)."
                )

    def _read(self) -> dict[str, Any]:
        path = self.folder / ASKED
        empty: dict[str, Any] = {"day": 0, "scores": 0, "runs": 0, "asked": {}, "trained": {}, "model": {}}
        if not path.exists():
            return empty
        try:
            found = json.loads(path.read_text())
            if {key: type(value) for key, value in found.items()} != {k: type(v) for k, v in empty.items()}:
                raise ValueError("keys")
            return dict(found)
        except (OSError, ValueError, AttributeError, RecursionError):
            raise UserError(
                f"'{path}' counts what this site was asked, and cannot be read; restore it, or delete it to count anew."
            ) from None

    def _write(self, kept: dict[str, Any]) -> None:
        path = self.folder / ASKED
        with when_full(path, "and the site rejoins by itself"):
            write_whole(path, to_json(kept))


def _beyond(what: str, setting: str) -> RejectedMessage:
    return RejectedMessage(f"it asks for {what}; '{setting}' of this site's deploy.toml is the limit.")


# --- A site's own privacy: it clips the site's update and adds noise before it is sent, and counts what that has cost ---


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
