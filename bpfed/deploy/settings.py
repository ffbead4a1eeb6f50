"""The settings of a deployment: who belongs to it, where the server is, how long it waits. The file ``deploy.toml``."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import tomllib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from bpfed._util.errors import UserError, hint
from bpfed._util.files import PLAN, SERVER, renamed, to_toml, write_whole

_LABEL = "[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
#: What a host may be called.
HOST = re.compile(rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*")

#: Settings that had another name before 0.12, in folders of deployments that were made then.
RENAMED = {"preparation": "preprocessing", "preparation_sha256": "preprocessing_sha256"}
#: Settings that are lists, each with an example.
LISTS = {"sites": ["a", "b"], "plugins": ["bpfed-scaffold==1.0"]}


@dataclass(frozen=True)
class Limits:
    """A site's own limits; see the attributes of the same names in `Plan`."""

    minimum: int = 10
    classes: int = 100
    asks_per_round: int = 50
    scores_per_day: int = 10_000
    runs_per_day: int = 10
    runs_kept: int = 5
    selection_pilots: bool = True

    def told(self, examples: int) -> int:
        """A number of training examples as it is told: fewer than the minimum are told as that."""
        return max(examples, self.minimum)


@dataclass(frozen=True)
class Plan:
    """Settings of a deployment; what is computed is in ``config.toml``.

    Attributes:
        sites: The sites' names, in order.
        address: Where sites reach the server, ``host:port``.
        site: Whose folder this is; empty: the server's.
        data: A site's file, or the name of a dataset that it has a part of.
        timeout: Seconds that a site has to answer in a round.
        wait: Seconds that the server waits for all sites before the first round; then for enough of them.
        min_replies: Uploads that a round needs; 0: half of the sites drawn, rounded up.
        attempts: How often a round is asked for, the first time included, before the run stops.
        pause: Seconds between attempts.
        telemetry: Whether Flower may report its use to its makers and look for updates.
        clip: Of a site's own: with ``noise``, the norm that its update may have.
        noise: Of a site's own: noise on its update before it is sent, in units of ``clip`` (`bpfed.deploy.site.limits`).
        delta: With noise, the δ that ε is computed for.
        epsilon: With noise, the site takes part until this ε is spent; 0: always.
        bind: Of the server's own: the address of its machine to listen at; empty: that of the host in ``address``.
        preprocessing: File beside this one with the preprocessing that all have agreed on
            (`bpfed.data.tabular.preprocessing`); then no site tells anything of its columns. Empty: it is made of what
            sites tell.
        preprocessing_sha256: SHA-256 of that file.
        minimum: Of a site's own: whatever is told of its rows is of so many at least.
        classes: Of a site's own: most classes that there may be, other sites' included.
        asks_per_round: Of a site's own: how often a day the server may ask for one round, for training or scores.
        scores_per_day: Of a site's own: how often a day it may ask for scores.
        runs_per_day: Of a site's own: how many runs it may begin in a day.
        runs_kept: Of a site's own: of how many runs the site's states are kept.
        selection_pilots: Of a site's own: whether it takes part in selection pilots, where the run has some.
        plugins: Of a site's own: packages whose plug-ins it runs, as in ``bpfed-scaffold==1.0``; no other is imported.
    """

    sites: tuple[str, ...]
    address: str = "127.0.0.1:8000"
    site: str = ""
    data: str = ""
    timeout: float = 600.0
    wait: float = 120.0
    min_replies: int = 0
    attempts: int = 5
    pause: float = 10.0
    telemetry: bool = False
    clip: float = 0.0
    noise: float = 0.0
    delta: float = 1e-5
    epsilon: float = 0.0
    bind: str = ""
    preprocessing: str = ""
    preprocessing_sha256: str = ""
    minimum: int = Limits.minimum
    classes: int = Limits.classes
    asks_per_round: int = Limits.asks_per_round
    scores_per_day: int = Limits.scores_per_day
    runs_per_day: int = Limits.runs_per_day
    runs_kept: int = Limits.runs_kept
    selection_pilots: bool = Limits.selection_pilots
    plugins: tuple[str, ...] = ()

    def check(self, where: str = "The deployment") -> Plan:
        """Return self, or say in one sentence what cannot be."""
        if len(set(self.sites)) != len(self.sites):
            raise UserError(f"{where} names a site twice; give every site its own name.")
        if not self.sites:
            raise UserError(f"{where} names no site; give some, as in --sites a,b,c.")
        for name in self.sites:
            if not name.strip() or not name.isprintable() or len(name) > 64 or "/" in name or name.startswith("."):
                raise UserError(f"{where} has a site called {name!r}; use letters, digits, '-' and '_'.")
        host, _, port = self.address.rpartition(":")
        if not host or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65536:
            raise UserError(f"{where} has the address '{self.address}'; write it as host:port.")
        if why := _no_host(host):
            raise UserError(f"{where} has the address '{self.address}', {why}")
        if self.bind:
            try:
                ipaddress.ip_address(self.bind)
            except ValueError:
                raise UserError(
                    f"{where} has bind = '{self.bind}'; give an IP address of the server's machine, or 0.0.0.0 for all."
                ) from None
        for name, least in (
            ("timeout", 1.0),
            ("wait", 0.0),
            ("min_replies", 0),
            ("attempts", 1),
            ("pause", 0.0),
            ("clip", 0.0),
            ("noise", 0.0),
            ("epsilon", 0.0),
            *((limit.name, 2 if limit.name == "classes" else 1) for limit in fields(Limits) if limit.type != "bool"),
        ):
            if not getattr(self, name) >= least:
                raise UserError(f"{where} has {name} = {getattr(self, name)}, but it must be {least} or more.")
        if self.min_replies > len(self.sites):
            raise UserError(
                f"{where} needs {self.min_replies} replies from {len(self.sites)} sites; lower min_replies."
            )
        if (
            bool(self.preprocessing) is not bool(self.preprocessing_sha256)
            or Path(self.preprocessing).name != self.preprocessing
        ):
            raise UserError(
                f"{where} must name both the preprocessing, a file beside it, and its SHA-256, preprocessing_sha256; set "
                "both or none."
            )
        if not 0.0 < self.delta < 1.0:
            raise UserError(f"{where} has delta = {self.delta}, but it must be above 0 and below 1.")
        if self.noise > 0.0 and not self.site:
            raise UserError(f"{where} has noise, but that is a site's own; the server's is run.noise in config.toml.")
        if self.noise > 0.0 and self.clip == 0.0:
            raise UserError(
                f"{where} has noise = {self.noise}, which is in units of clip, and that is 0; set clip too."
            )
        if self.noise == 0.0 and (self.clip > 0.0 or self.epsilon > 0.0):
            raise UserError(f"{where} has clip or epsilon, but noise = 0, so they would do nothing; set noise too.")
        return self

    @property
    def limits(self) -> Limits:
        """A site's own limits."""
        return Limits(**{limit.name: getattr(self, limit.name) for limit in fields(Limits)})

    @property
    def host(self) -> str:
        """Of its address, the name or number; that of IPv6 without brackets."""
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """Of its address."""
        return int(self.address.rpartition(":")[2])

    def write(self, folder: Path) -> None:
        """Write the file into a folder."""
        write_whole(folder / PLAN, to_toml(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> Plan:
        """Read the file of a folder, or say in one sentence why it cannot be."""
        path = folder / PLAN
        try:
            found: dict[str, Any] = renamed(tomllib.loads(path.read_text()), RENAMED)
        except FileNotFoundError:
            raise no_deployment(folder) from None
        except (OSError, ValueError) as error:
            raise UserError(f"'{path}' cannot be read ({error}); fix it.") from error
        known = {f.name: f for f in fields(cls)}
        for key, value in found.items():
            if key not in known:
                raise UserError(f"'{path}' has an unknown key '{key}'; {hint(key, known)}")
            wanted = type(known[key].default) if key not in LISTS else list
            if type(value) is int and wanted is float:
                found[key] = float(value)
            elif type(value) is not wanted:
                default = LISTS.get(key, known[key].default)
                raise UserError(
                    f"'{path}': {key} is {_in_toml(value)}, but must be a value such as {_in_toml(default)}."
                )
        if "sites" not in found or not all(isinstance(s, str) for s in found["sites"]):
            raise UserError(f'\'{path}\' must list the sites\' names, as in sites = ["a", "b"].')
        if not all(isinstance(p, str) for p in found.get("plugins", ())):
            raise UserError(
                f"'{path}' must list packages with their versions, as in plugins = {_in_toml(LISTS['plugins'])}."
            )
        values: dict[str, Any] = {k: tuple(v) if k in LISTS else v for k, v in found.items()}
        return cls(**values).check(f"'{path}'")


def _no_host(host: str) -> str:
    """Why no address and no certificate can name this host; empty: they can."""
    bare = host.strip("[]")
    try:
        six = ipaddress.ip_address(bare).version == 6
    except ValueError:
        if HOST.fullmatch(host) and not host.rpartition(".")[2].isdigit():
            return ""
        with contextlib.suppress(UnicodeError):
            if HOST.fullmatch(encoded := host.encode("idna").decode()) and not host.isascii():
                return f"whose host is not in ASCII; write it as '{encoded}'."
    else:
        if host == (f"[{bare}]" if six else bare) and "%" not in bare:
            return ""
        if six:
            return "whose host is an IPv6 address; write it in brackets and without a zone, as in [::1]:8000."
    return "whose host is neither a name (letters, digits, '-' and '.') nor an IP address; write it as host:port."


def _in_toml(value: Any) -> str:
    """A value as the file has it."""
    return "a table" if isinstance(value, dict) else to_toml({"": value}).partition(" = ")[2].strip()


def server_folder(folder: Path) -> Path:
    """The server's folder of a deployment's folder, or itself."""
    for place in (folder, folder / SERVER):
        if (place / PLAN).exists():
            return place.resolve()
    raise no_deployment(folder)


def site_folders(folder: Path) -> list[Path]:
    """The sites' folders that are in a deployment's folder, in order."""
    return [place.parent for place in sorted(folder.glob(f"*/{PLAN}")) if Plan.read(place.parent).site]


def no_deployment(folder: Path) -> UserError:
    """What is said of a folder, as it was given, that is no part of a deployment."""
    return UserError(f"'{folder}' is not a folder of a deployment; make one with 'bpfed deploy init'.")
