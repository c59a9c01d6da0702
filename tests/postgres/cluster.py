"""A real PostgreSQL for tests: a cluster of its own in a folder for temporary files, at a unix socket there.

`Cluster` is started once a session; each test has a schema of its own in it. PostgreSQL refuses to run as root, so
there it runs as the user "postgres". Without its programs there is none: `why_not` says how to install them, and with
HEADRACE_REQUIRE_POSTGRES=1 that is an error.
"""

import importlib.util
import os
import pwd
import shutil
import subprocess
import tempfile
from functools import cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psycopg

START_S, STOP_S = 60, 20
PASSWORD = "hidden-Word-7"
"""Of the user "headrace"; tests look for it where it must not be."""
SETTINGS = {
    "listen_addresses": "",
    "fsync": "off",  # a power failure is not what these tests are about
    "full_page_writes": "off",
    "max_connections": "200",
    "shared_buffers": "16MB",
    "timezone": "Asia/Tokyo",
}


@cache
def programs() -> Path | None:
    """The folder of initdb and pg_ctl; Debian keeps those of each version apart."""
    found = shutil.which("initdb")
    folders = [Path(found).resolve().parent] if found else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in folders if (folder / "initdb").exists() and (folder / "pg_ctl").exists()), None)


def why_not() -> str:
    """Why no PostgreSQL can be started here; empty where one can."""
    if importlib.util.find_spec("psycopg") is None:
        return "no psycopg here: pip install 'headrace[postgres]'"
    if programs() is None:
        return "no initdb and pg_ctl on this machine: apt-get install postgresql"
    return (
        "" if _user() is not None else 'root cannot run it, and there is no user "postgres": apt-get install postgresql'
    )


def required() -> bool:
    """Whether tests must fail, not skip, without PostgreSQL."""
    return os.environ.get("HEADRACE_REQUIRE_POSTGRES") == "1"


def _user() -> pwd.struct_passwd | None:
    """The user that the server runs as; not root."""
    if os.geteuid() != 0:
        return pwd.getpwuid(os.geteuid())
    return next((user for user in pwd.getpwall() if user.pw_name == "postgres"), None)


class Cluster:
    def __init__(self) -> None:
        user, folder = _user(), programs()
        assert user is not None and folder is not None, why_not()
        self._user, self._programs = user, folder
        self.folder = Path(tempfile.mkdtemp(prefix="headrace-postgres-", dir="/tmp"))  # paths of sockets are short
        self._numbers = count()

    def start(self) -> None:
        """Make the cluster, and start it."""
        secret = self.folder / "password"
        secret.write_text(PASSWORD)
        for path in (self.folder, secret):
            os.chown(path, self._user.pw_uid, self._user.pw_gid)
        options = ["--auth=scram-sha-256", f"--pwfile={secret}", "--username=headrace", "--no-sync", "--no-locale"]
        self._run("initdb", *options, "--encoding=UTF8", str(self._data))
        with (self._data / "postgresql.conf").open("a") as settings:
            for name, value in {**SETTINGS, "unix_socket_directories": str(self.folder)}.items():
                settings.write(f"{name} = '{value}'\n")
        self.begin()

    def begin(self) -> None:
        """Start the server."""
        self._run("pg_ctl", "-D", str(self._data), "-w", "-t", str(START_S), "-l", f"{self.folder}/log", "start")

    def end(self) -> None:
        """Stop the server, whoever is connected; it can begin again."""
        self._run("pg_ctl", "-D", str(self._data), "-w", "-t", str(STOP_S), "-m", "immediate", "stop")

    def remove(self) -> None:
        """Stop the server, and remove all that is its own."""
        if (self._data / "postmaster.pid").exists():
            self.end()
        shutil.rmtree(self.folder)

    def database(self) -> str:
        """The URL of a new database: a schema of its own, which is made in a hundredth of the time."""
        name = f"records{next(self._numbers)}"
        with self.connection() as connection:
            connection.execute(f"CREATE SCHEMA {name}")
        return f"{self.url('postgres')}&options=-csearch_path%3D{name}"

    def url(self, name: str, password: str = PASSWORD) -> str:
        """The URL of a database."""
        return f"postgresql+psycopg://headrace:{password}@/{name}?host={self.folder}"

    def connection(self, name: str = "postgres") -> "psycopg.Connection":
        """A connection that commits each statement."""
        import psycopg

        return psycopg.connect(host=str(self.folder), user="headrace", password=PASSWORD, dbname=name, autocommit=True)

    @property
    def _data(self) -> Path:
        return self.folder / "data"

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self._programs / program), *arguments]
        ours = {} if os.geteuid() == self._user.pw_uid else {"user": self._user.pw_uid, "group": self._user.pw_gid}
        done = subprocess.run(command, capture_output=True, text=True, timeout=2 * START_S, cwd=self.folder, **ours)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
