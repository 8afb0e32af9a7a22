"""``FileStore``: a store that is an SQLite file, for processes that share a file system and nothing else."""

from __future__ import annotations

import itertools
import os

from zmqgrad.runtime.arguments import as_integer
from zmqgrad.store.arguments import DEFAULT_TIMEOUT, Timeout
from zmqgrad.store.file_connection import FileConnection
from zmqgrad.store.sqlite import absolute, check_file_system
from zmqgrad.store.transactional import TransactionalStore
from zmqgrad.store.watch_cache import Registration
from zmqgrad.store.watch_targets import Target

_numbers = itertools.count()


class FileStore(TransactionalStore):
    """A store in the SQLite file ``file_name``, created if missing, which all processes must see.

    Each call is one transaction, whose writes survive SIGKILL of any process. Waiting clients poll every
    0.5-50 ms. Blocked pops are served in no particular order. A watch compares snapshots, so it may miss
    values that were soon replaced.

    Args:
        file_name: the path. Give each job its own path, because a leftover file holds the keys of its job.
        world_size: the file is removed once this many stores on it were closed and none is open; -1: never.
        timeout: how long blocking calls wait for keys, and all calls for the lock on the file.
        allow_network_file_system: accept a path on NFS, SMB or the like, if its locks can be trusted.

    Raises:
        StoreError: if the file cannot be opened or is another kind of file.
        ConfigurationError: if it is on a network file system, and that was not allowed.

    Example:
        >>> with FileStore("/tmp/zmqgrad-example/store") as store:  # doctest: +SKIP
        ...     store.set("step", "7")
    """

    def __init__(
        self,
        file_name: str,
        world_size: int = -1,
        timeout: Timeout = DEFAULT_TIMEOUT,
        *,
        allow_network_file_system: bool = False,
    ) -> None:
        place = absolute(file_name)
        self._path = os.fspath(file_name)
        world_size = as_integer(world_size, "the world size")
        check_file_system(place, allow_network_file_system)
        self._allow_network = allow_network_file_system
        self._connection = FileConnection(f"file-store-{next(_numbers)}", place, world_size)
        super().__init__(self._connection, timeout)

    @property
    def path(self) -> str:
        """The file, as given."""
        return self._path

    def _register(self, target: Target) -> Registration:
        found = super()._register(target)
        self._connection.start_watching()
        return found

    def clone(self) -> FileStore:
        place = str(self._connection.path)
        return FileStore(place, timeout=self._timeout, allow_network_file_system=self._allow_network)

    def disown(self) -> None:
        """Make :meth:`close` leave the file alone: it turned out to be that of another job."""
        self._connection.disown()

    def __repr__(self) -> str:
        return f"<FileStore {self._path!r}>"
