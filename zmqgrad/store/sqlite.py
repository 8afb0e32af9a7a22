"""Opening SQLite files: identification of our own kinds of files, and translation of errors.

Both kinds of file survive SIGKILL at any moment: what a transaction wrote is in the kernel when it ends.
Neither is flushed to the disk at each commit by default: after a power failure the last commits may
be missing.
"""

from __future__ import annotations

import errno
import os
import secrets
import sqlite3
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from zmqgrad import environment
from zmqgrad.errors import ArgumentTypeError, ConfigurationError, StoreError

APPLICATION_ID = 0x7A677374
"""``PRAGMA application_id`` of every file of ours: the letters ``zgst``."""

BESIDE = ("-journal", "-wal")
"""Suffixes of the files beside one whose contents SQLite takes for a part of it, unless they are empty."""

MAX_BUSY_MS = 100
"""How long SQLite itself waits for a lock, in milliseconds: not long, as Ctrl-C does not interrupt it."""

DAMAGE_ERRORS = (sqlite3.DatabaseError, UnicodeDecodeError)
"""What a damaged file raises. SQLite's message may quote bytes of the file that are no text."""

_T = TypeVar("_T")

_NETWORK_FILE_SYSTEMS = frozenset(
    "nfs nfs4 cifs smb3 smbfs 9p afs ceph glusterfs lustre gpfs beegfs fuse.sshfs fuse.glusterfs fuse.ceph "  # noqa: SIM905
    "fuse.s3fs fuse.gcsfuse fuse.juicefs".split()
)


def absolute(path: str | os.PathLike[str]) -> Path:
    """``path`` wherever the program goes, and never a name that SQLite reserves, such as ``:memory:``.

    Raises:
        ArgumentTypeError, ConfigurationError: if it is no name of a file.
        StoreError: if it is relative, and the current directory was removed.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentTypeError(f"the name of a file must be a str, not {type(path).__name__}")
    try:
        if path == "" or b"\0" in os.fsencode(path):
            raise ConfigurationError(f"{path!r} is no name of a file")
        return Path(path).absolute()
    except UnicodeEncodeError as e:
        raise ConfigurationError(f"{path!r} is no name of a file: {e.reason}") from None
    except OSError as e:
        raise StoreError(f"cannot open {path!r} in the current directory: {e.strerror or e}") from e


def connect(path: Path, kind: str, schema: str, version: int) -> sqlite3.Connection:
    """A connection to the SQLite file ``path``, in autocommit mode; the file is created if missing.

    Args:
        kind: kind of file, for errors: ``FileStore`` or ``journal``.
        schema: statements that create the tables.
        version: of the schema, kept in ``PRAGMA user_version``. Distinguishes the kinds of files, too.

    Raises:
        StoreError: if it cannot be opened, or is another kind of file.
        sqlite3.OperationalError: if it is locked.
    """
    _claim(path, kind)
    try:
        connection = sqlite3.connect(
            path, timeout=MAX_BUSY_MS / 1000, isolation_level=None, check_same_thread=False
        )
    except sqlite3.OperationalError as e:
        raise StoreError(f"cannot open the {kind} file {str(path)!r}: {_why_not_opened(path, e)}") from e
    try:
        _identify(connection, path, kind, schema, version)
        _claim(path, kind)  # again, as SQLite has removed what it has used of the files beside it
    except BaseException:
        connection.close()
        raise
    return connection


def _claim(path: Path, kind: str) -> None:
    """Make ``path`` a file of this user alone, whose mode SQLite gives to the files beside it, too.

    Those are made here, empty: in a directory such as that of temporary files, others could make them, and
    SQLite would take what is in them for the contents of this one.

    Not by a descriptor of the file: closing one would drop the locks of this process on it.

    Raises:
        StoreError: if one belongs to another user, or cannot be created.
    """
    try:
        _claim_one(path, path.stat)
        for suffix in BESIDE:
            beside = Path(f"{os.path.realpath(path)}{suffix}")
            with suppress(FileNotFoundError):  # it is just being removed, with the file itself or by SQLite
                _claim_one(beside, beside.lstat)  # not what it links to, maybe another file of this user
    except OSError as e:
        raise StoreError(f"cannot open the {kind} file {str(path)!r}: {e.strerror or e}") from e


def _claim_one(path: Path, look: Callable[[], os.stat_result]) -> None:
    try:
        status = look()
    except FileNotFoundError:
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        try:
            os.link(draft, path)
        except FileExistsError:
            pass  # another process was first
        finally:
            draft.unlink()
        status = look()
    if status.st_uid != os.geteuid():
        raise PermissionError(f"{path.name!r} belongs to user {status.st_uid}")
    if stat.S_ISLNK(status.st_mode):
        raise PermissionError(f"{path.name!r} is a link")
    if stat.S_ISREG(status.st_mode) and stat.S_IMODE(status.st_mode) & 0o077:
        path.chmod(0o600)


def _identify(connection: sqlite3.Connection, path: Path, kind: str, schema: str, version: int) -> None:
    """Check that the file is one of this kind, or make it one if it is empty."""
    try:
        # In transactions, as other processes may be filling the file at this moment.
        connection.execute("BEGIN")
        known, empty = _header(connection)
        connection.execute("COMMIT")
        if empty:
            connection.execute("PRAGMA journal_mode = TRUNCATE")  # which leaves what is beside it
            connection.execute("BEGIN IMMEDIATE")
            known, empty = _header(connection)
            if empty:
                for statement in schema.split(";"):
                    connection.execute(statement)
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {version}")
                known, _ = _header(connection)
            connection.execute("COMMIT")
    except DAMAGE_ERRORS as e:
        if is_busy(e):
            raise
        raise StoreError(f"{str(path)!r} is no {kind} file: {_what_it_is(path, e)}") from e
    if known[0] != APPLICATION_ID:
        raise StoreError(f"{str(path)!r} is no {kind} file: it is an SQLite database of another program")
    if known[1] != version:
        raise StoreError(
            f"{str(path)!r} is no {kind} file of this release: its format is {known[1]}, not {version}"
        )


def _header(connection: sqlite3.Connection) -> tuple[tuple[int, int], bool]:
    """Application id and version, and whether the file is empty. Called inside a transaction."""
    tables: int = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    application: int = connection.execute("PRAGMA application_id").fetchone()[0]
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    return (application, version), not tables and (application, version) == (0, 0)


def _why_not_opened(path: Path, error: sqlite3.Error) -> str:
    """The reason from the operating system, because SQLite does not report it."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError as e:
        writable = not path.parent.is_dir() or os.access(path.parent, os.W_OK)
        return e.strerror or str(e) if writable else os.strerror(errno.EACCES)
    except OSError as e:
        return e.strerror or str(e)
    return str(error)


def _what_it_is(path: Path, error: Exception) -> str:
    """A description of a file that is not a database. No connection has it open, so this drops no lock."""
    try:
        with path.open("rb") as file:
            begin = file.read(4096)
    except OSError as e:
        return e.strerror or str(e)
    if is_torch_file_store(begin):
        return (
            "it looks like a file of torch.distributed.FileStore; use a different path for each kind of store"
        )
    if begin.startswith(b"SQLite format 3\0"):
        return f"it is a damaged SQLite database ({error}); `sqlite3 FILE .recover` may recover the contents"
    return f"it begins with {begin[:16]!r}; choose another path, or remove it if it is not needed"


def is_torch_file_store(begin: bytes) -> bool:
    """Whether a file that begins with ``begin`` looks like one of ``torch.distributed.FileStore``.

    It is a sequence of strings, each after its length as a 32-bit number. The first is a key: ``refcount/``,
    or a name after ``/`` or ``-``.
    """
    length = int.from_bytes(begin[:4], "little")
    key = begin[4 : 4 + length]
    return 0 < length == len(key) and (key == b"refcount/" or key[:1] in (b"/", b"-"))


def checked(value: object, kind: type[_T]) -> _T:
    """Return ``value``, which was read from a file and should be a ``kind``: SQLite itself checks no types.

    Raises:
        sqlite3.DatabaseError: if it is something else; the file is damaged, or another program wrote to it.
    """
    if not isinstance(value, kind):
        raise sqlite3.DatabaseError(f"it has a {type(value).__name__} where a {kind.__name__} belongs")
    return value


def is_busy(error: Exception) -> bool:
    """Whether ``error`` only means that another connection holds a lock."""
    return isinstance(error, sqlite3.OperationalError) and "locked" in str(error)


def check_file_system(path: Path, allow_network: bool) -> None:
    """Refuse a network file system, unless the caller or the environment allows it.

    SQLite relies on the file system's locks. Some network file systems grant one lock to two hosts, or forget
    it when their server restarts: then two writers may damage the file.

    Raises:
        ConfigurationError: if it is one; the message names the remedies.
    """
    kind = file_system_of(path)
    if kind in _NETWORK_FILE_SYSTEMS and not (allow_network or environment.allows_network_file_system()):
        raise ConfigurationError(
            f"{str(path)!r} is on a network file system ({kind}), whose locks may not separate writers on "
            f"two hosts. Use a TCPStore, or a directory of this host; if this file system's locks can be "
            f"trusted, pass allow_network_file_system=True or set {environment.ALLOW_NETWORK_FILE_SYSTEM}=1"
        )


def file_system_of(path: Path) -> str:
    """The type of the file system of ``path``, as Linux names it; empty where that is unknown."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text()
        place = os.path.realpath(path)
    except OSError:
        return ""
    found, kind = "", ""
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        mount = before.split()[4].encode().decode("unicode_escape")  # blanks are written as \040
        if len(mount) >= len(found) and (place + "/").startswith(mount.rstrip("/") + "/"):
            found, kind = mount, after.split()[0]
    return kind
