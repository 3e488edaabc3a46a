"""Configuration file of a real silo: server, credentials, and the owner's permissions. Omitted means denied."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar

from pydantic import Discriminator, Field, PrivateAttr, Tag, model_validator

from fedsync.common.errors import ConfigError
from fedsync.common.names import SILO_NAME, near_miss
from fedsync.common.proxies import DIRECT, Proxy
from fedsync.config.locate import beside
from fedsync.config.sections.presence import PresenceConfig
from fedsync.config.sections.privacy import BudgetConfig
from fedsync.config.sections.section import Section
from fedsync.config.yaml_file import YamlFile

ADDRESS = r"^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+):[0-9]{1,5}$"
"""``host:port``; an IPv6 address in brackets."""

LONGEST_STATE = 60
"""Maximum length of the path of a silo's state folder [bytes]: paths of Unix sockets below it may have about 100."""

Model = TypeVar("Model", bound=Section)


class LogsConfig(Section):
    """Size limits of the logs: each process has a log of at most ``bytes``, and ``keep`` older logs."""

    bytes: Annotated[int, Field(ge=10_000)] = 10_000_000
    """Size at which a process's log is rotated [bytes]."""

    keep: Annotated[int, Field(ge=1, le=1000)] = 5
    """Number of older logs of each process that are kept."""


class SealConfig(Section):
    """Minimum encryption of runs at a silo with keys; a run with less is refused."""

    masks: bool = False
    """Whether updates must carry masks (``cipher: {kind: masked}``). Without masks, the server and one silo together
    can read every update."""

    clear: list[str] = Field(default_factory=list)
    """Name patterns of tensors that may travel in the clear where a run encrypts only some. Empty: none may."""

    members: Annotated[int, Field(ge=1)] = 2
    """Minimum number of updates in a version (``cipher: {members: 2}``). With 1, silos may decrypt sums of a single
    update, and so read each other's updates."""

    work_ratio: Annotated[float, Field(ge=1)] = 4.0
    """Largest allowed ratio between the work of two silos in a sum under masks (``cipher: {kind: masked,
    work_ratio: 4}``). The larger the ratio, the more one update stands out in the sum."""

    colluding: Annotated[int, Field(ge=1)] = 1
    """Minimum number of colluding or lying silos that a run must tolerate (``cipher: {colluding: 1}``)."""

    quorum: Annotated[int, Field(ge=1)] = 2
    """Minimum number of silos in a run's rounds. Metrics are disclosed only for more than half as many silos."""

    metrics: Literal["plain", "sealed"] = "sealed"
    """Whether losses, and the results on the silo's test data, must be ``sealed`` (encrypted with the updates)."""


class LimitsConfig(Section):
    """Limits on the size and the frequency of a run's orders; an order beyond the limits is refused.

    The server receives ``batch_size`` and ``samples``. Its orders are no smaller, unless these exceed an average share.
    """

    batch_size: Annotated[int, Field(ge=1)] = 1
    """Smallest batch of an order [samples]. The default is no limit: data leaves a silo only as a sum over a whole
    order, and balancers give slow silos batches of any size."""

    samples: Annotated[int, Field(ge=1)] = 8
    """Smallest number of samples that an order may process, planned and done. An order that is asked to end early
    continues up to this number. A single sample can be computed from an update on that sample alone; the default is
    less than balanced orders of several steps."""

    orders_per_hour: Annotated[int, Field(ge=1)] = 36_000
    """Maximum number of orders within any hour, over all runs and restarts. The default is ten per second, twice that
    of a run with a round every 0.2 s."""

    evaluations_per_hour: Annotated[int, Field(ge=1)] = 36_000
    """Maximum number of evaluations within any hour, over all runs and restarts, alone or before an order."""

    statistics: Annotated[int, Field(ge=1)] = 5
    """Smallest count of cells that statistics of columns may disclose, and that a column may be standardised by; the
    minimum for ``task.statistics.least``."""

    times: Annotated[int, Field(ge=1)] = 60
    """Largest number of times at which survival analysis may count events and censored persons
    (``task.survival.grid``). Whoever has the keys of a silo can read these counts, of all silos together: the finer the
    grid, the nearer they are to the times of single persons."""

    surveys_per_hour: Annotated[int, Field(ge=1)] = 24
    """Maximum number of survey orders within any hour, over all runs and restarts; a survey takes two or three orders,
    and survival analysis one more than ``survival.steps``. Anyone who reads two surveys of different sets of
    silos can compute the sums of the silos that differ."""


class AuditConfig(Section):
    """Log of all requests to the silo and all data that left the silo; ``fedsync silo audit`` verifies the log."""

    head_to: str | None = None
    """Folder on another machine, such as a mounted share, where the signed head of the log is written once a day. A
    log that someone rewrites at the silo does not match this head."""

    required: bool = False
    """Whether the silo sends nothing while the head of the log cannot be written to ``head_to``."""

    bytes: Annotated[int, Field(ge=100_000)] = 10_000_000
    """Size at which a new file of the log begins [bytes]; the chain of entries continues."""

    keep: Annotated[int, Field(ge=2)] = 1000
    """Number of log files that are kept; the oldest files beyond it are deleted, which the log records."""

    @model_validator(mode="after")
    def _somewhere(self) -> Self:
        if self.required and self.head_to is None:
            raise ValueError("required: true needs a folder; write head_to: FOLDER")
        return self


_Data = Annotated[
    Annotated[list[str], Tag("~folders")] | Annotated[dict[str, str], Tag("~names")],
    Discriminator(lambda given: "~names" if isinstance(given, Mapping) else "~folders"),
]

_Privacy = (
    Annotated[
        Annotated[BudgetConfig, Tag("~budget")] | Annotated[dict[str, BudgetConfig], Tag("~names")],
        Discriminator(lambda given: "~names" if isinstance(given, Mapping) and "epsilon" not in given else "~budget"),
    ]
    | None
)


class SiloStartConfig(Section):
    """Options of ``fedsync silo start``. Paths are relative to the file."""

    name: Annotated[str, Field(pattern=SILO_NAME)]
    """Name of the silo, under which its node key is registered."""

    server: Annotated[str, Field(pattern=ADDRESS)]
    """Address of the SuperLink, ``host:port``; the server's certificate must cover the host."""

    proxy: Annotated[str, Field(min_length=1)] | None = None
    """HTTP proxy for connections to the server, ``http://host:port``, or ``direct`` for none. The proxy must forward
    TLS unchanged (``CONNECT``). Left out, ``HTTPS_PROXY``, ``ALL_PROXY`` and ``NO_PROXY`` of the environment apply.
    """

    hub_hosts: list[str] = Field(default_factory=list)
    """Hosts at which a run's hub may be; the server names the hub's host when a run begins. Left out, only the
    server's own host is allowed."""

    authority: str | None = None
    """Certificate of the federation's authority, ``ca.crt``."""

    node_key: str | None = None
    """Private half of the silo's node key, ``NAME.node``."""

    insecure: bool = False
    """Whether to run without TLS and without a node key, for a trial on one machine."""

    state: str
    """State folder of the silo, which only its owner can enter: trainers, logs, health."""

    keys: str | None = None
    """Folder of the silo's keys for encrypted runs; with keys, the silo sends no update in the clear."""

    passphrase_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] = "FEDSYNC_PASSPHRASE"
    """Environment variable with the passphrase of the keys, if they are encrypted (``fedsync keys encrypt``)."""

    seal: SealConfig | None = None
    """Minimum encryption of runs; left out, every tensor of every update must be encrypted, with any suite."""

    first_model: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """Digest of the model that an encrypted run may begin with, as ``fedsync silo digest`` prints it. Left out, runs
    begin with the task's own model, made from the seed."""

    code: Literal["installed", "reviewed", "shipped"] = "installed"
    """Code that may access keys and data. ``installed``: only FedSync's code as installed here; client code that a run
    brings along is confined, and runs may name files in ``code_files``. ``reviewed``: as ``installed``, but runs may
    name only files in folders that one of ``reviewers`` signed (``fedsync code sign``), unchanged since. ``shipped``:
    also the client of any Flower app that the server sends. This client has all rights of the silo's user, so the
    server can read the keys and everything else that this user can read."""

    code_files: list[str] = Field(default_factory=list)
    """Python files below ``data`` that a run may execute at this silo, as ``task.py``, together with the files beside
    it. ``client.py:Net`` lets a run call this name in the file (``task.model``). Left out, runs execute no file."""

    reviewers: list[str] = Field(default_factory=list)
    """Public keys of reviewers, for ``code: reviewed``: lines such as ``ssh-ed25519 AAAA... alice``, which ``ssh-keygen
    -t ed25519`` writes into a ``.pub`` file."""

    data: _Data = Field(default_factory=list)
    """Data that runs may read: a list of folders, below which the files that a run names must lie; or names, each with
    a file or folder, as in ``{train: /srv/fl/train.csv}``, which a run refers to as ``data:train``. Left out, runs read
    no file. Keys, certificates, state and this file stay closed wherever they lie."""

    privacy: _Privacy = None
    """Privacy budget of all data together, ``{epsilon: 3, delta: 1e-5}``; or a budget for each of the names in
    ``data``, as in ``{train: {epsilon: 3, delta: 1e-5}}``. With a budget, only runs with differential privacy
    (``privacy`` in their strategy) read the data, until the budget is spent. Left out, there is no budget."""

    approve: Literal["never", "ask"] = "never"
    """Whether the owner must approve each run (``ask``) before the silo takes part. The silo waits for ``fedsync silo
    approve``; a run with a changed specification needs a new approval."""

    limits: LimitsConfig = Field(default_factory=LimitsConfig)
    """Limits on the size and the frequency of orders."""

    statistics: Literal["sealed", "plain"] = "sealed"
    """Disclosure of statistics of the columns of the silo's table (``task.standardise: federated`` and
    ``task.statistics``). ``sealed``: only in encrypted sums over several silos, which silos alone can decrypt.
    ``plain``: in a run in the clear, the server may read the silo's own statistics."""

    emulate: bool = False
    """Whether a run may make the silo emulate another machine, under that machine's name."""

    share_local: bool = False
    """Whether the model that this silo trains alone may be sent to the server, and to other silos, which evaluate it
    (``evaluation.cross_site``). Only in runs in the clear: under encryption no silo's own model is sent."""

    errors: Literal["codes", "text"] = "codes"
    """Report of a failure at this silo to the server. ``codes``: one word of a closed list. ``text``: in runs in the
    clear also the error's text, which may contain paths and values of the data. A silo with keys sends codes only."""

    index: Annotated[int, Field(ge=0)] = 0
    """Number of the silo's share of the data, counted from 0, where the task splits data."""

    device: Annotated[str, Field(pattern=r"^[a-z]+(:[0-9]+)?$")] | None = None
    """Device to train on, such as ``cuda:1``; left out, the device of the run."""

    presence: PresenceConfig | None = None
    """Daily availability window of the silo. Outside the window it takes no orders and its processes end; it comes back
    by itself. Left out, the silo is always available."""

    resources: bool = True
    """Whether to report to the server how much of the machine is available to the trainer."""

    declared_speed: Annotated[float, Field(gt=0)] | None = None
    """Speed that runs with ``balancer.speeds: declared`` use [samples/s]; other runs measure the speed."""

    state_bytes: Annotated[int, Field(ge=1_000_000)] = 20_000_000_000
    """Maximum disk space of old trainers [bytes]; the oldest are deleted first."""

    logs: LogsConfig = Field(default_factory=LogsConfig)
    """Limits on the size of the logs."""

    audit: AuditConfig = Field(default_factory=AuditConfig)
    """Options of the silo's audit log."""

    _file: Path | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _secure(self) -> Self:
        if not self.insecure and (self.authority is None or self.node_key is None):
            missing = "authority" if self.authority is None else "node_key"
            raise ValueError(
                f"{missing} is missing; name ca.crt as authority and the file of `fedsync certs silo` as node_key, or "
                "write insecure: true for a trial on one machine"
            )
        if self.insecure and (self.authority or self.node_key):
            raise ValueError("insecure: true leaves out TLS, but authority or node_key is given; remove one of the two")
        if self.insecure and self.proxy not in (None, DIRECT):
            raise ValueError("insecure: true goes through no proxy, but proxy is given; remove one of the two")
        if self.proxy not in (None, DIRECT):
            Proxy.parse(str(self.proxy), "silo.yaml, proxy")
        if (self.code == "reviewed") != bool(self.reviewers):
            raise ValueError("code: reviewed and reviewers go together; write both, or neither")
        if isinstance(self.privacy, dict):
            known = list(self.data) if isinstance(self.data, dict) else []
            for name in self.privacy:
                if name not in known:
                    remedy = near_miss(name, known) if known else f"give data names, as in data: {{{name}: PATH}}"
                    raise ValueError(f"privacy names data {name!r}, which data does not; {remedy}")
        for key in self.reviewers:
            _check_reviewer(key)
        if self.seal is not None and self.keys is None:
            raise ValueError("seal is given, but no keys; name the folder of `fedsync keys` as keys, or remove seal")
        return self

    @classmethod
    def load(cls, path: Path, *, connects: bool = True) -> Self:
        """Read a silo's file with absolute paths. Raises `ConfigError` if it is invalid, or if files and folders in it
        do not exist; with ``connects``, also certificates and keys.
        """
        file = YamlFile.read(path)
        config = absolute(file.validate(cls), path, ("authority", "node_key", "state", "keys"))
        if connects:
            made = {"node_key": "Make it with `fedsync certs silo`", "keys": "Make it with `fedsync keys`"}
            must_exist(file, config, {"authority": "`fedsync certs init` makes it, at the server", **made})
        audit = absolute(config.audit, path, ("head_to",))
        config = config.model_copy(update={"audit": audit})._with_data_beside(file, path)
        config._file = path.resolve()
        check_short(file.place(("state",)), config.state, LONGEST_STATE)
        return config

    @property
    def trusted_hosts(self) -> list[str]:
        return self.hub_hosts or [self.server.rpartition(":")[0].strip("[]")]

    @property
    def paths(self) -> list[str]:
        return list(self.data.values()) if isinstance(self.data, dict) else self.data

    def closed(self) -> list[str]:
        """Files and folders that no run may read, even below ``data``: state, keys, certificates and this file. The
        folders of certificate and node key are closed, too, unless data lie in them.
        """
        files = [Path(name) for name in (self.authority, self.node_key) if name is not None]
        beside_them = [
            file.parent for file in files if not any(Path(each).is_relative_to(file.parent) for each in self.paths)
        ]
        own = [Path(name) for name in (self.state, self.keys, self._file) if name is not None]
        return sorted({str(path) for path in (*own, *files, *beside_them)})

    def _with_data_beside(self, file: YamlFile, path: Path) -> Self:
        named = isinstance(self.data, dict)
        found = {}
        for key, name in self.data.items() if isinstance(self.data, dict) else enumerate(self.data):
            place = file.place(("data", str(key)))
            here = found[key] = beside(path, name, place)
            if not (here.is_dir() or (named and here.is_file())):
                wanted = "file or folder" if named else "folder"
                raise ConfigError(place, f"{here} is no {wanted}", "Make it, or remove it here")
            for closed in (self.state, self.keys):
                if closed is not None and here.is_relative_to(closed):
                    raise ConfigError(place, f"{here} lies in {closed}", "Keep data apart from keys and state")
        paths = {key: str(here) for key, here in found.items()}
        code = []
        for index, text in enumerate(self.code_files):
            place, (name, colon, call) = file.place(("code_files", str(index))), text.partition(":")
            here = beside(path, name, place).resolve()
            if not here.is_file():
                raise ConfigError(place, f"there is no file {here}", "Name a Python file below data")
            code.append(f"{here}{colon}{call}")
        return self.model_copy(update={"data": paths if named else list(paths.values()), "code_files": code})


def _check_reviewer(key: str) -> None:
    from fedsync.common.sandbox.confirmed_code import bare

    try:
        bare(key)
    except ValueError as error:
        raise ValueError(f"reviewers has {key[:40]!r}; write a line as ssh-ed25519 AAAA..., of a file .pub") from error


def check_short(place: str, folder: str, most: int) -> None:
    """Raise `ConfigError` for a folder whose path has more than ``most`` bytes."""
    if (length := len(os.fsencode(folder))) > most:
        problem = f"{folder} has {length} bytes, at most {most}"
        raise ConfigError(place, problem, "Choose a shorter path: sockets are created below it")


def absolute(config: Model, path: Path, fields: Sequence[str]) -> Model:
    """Return the section with paths of ``fields`` relative to the file ``path``; raises `ConfigError` for no path."""
    found = {field: getattr(config, field) for field in fields}
    return config.model_copy(
        update={field: str(beside(path, name, f"{path}, {field}")) for field, name in found.items() if name}
    )


def existing(file: YamlFile, path: Path, key: tuple[str, ...], name: str, remedy: str) -> str:
    found = beside(path, name, file.place(key))
    if not found.is_file():
        raise ConfigError(file.place(key), f"{found} does not exist", remedy)
    return str(found)


def must_exist(file: YamlFile, config: Section, remedies: dict[str, str]) -> None:
    for field, remedy in remedies.items():
        name = getattr(config, field)
        if name and not Path(name).exists():
            raise ConfigError(file.place((field,)), f"{name} does not exist", remedy)
