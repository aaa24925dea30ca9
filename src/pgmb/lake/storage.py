"""Where a table's files lie: a folder, or whatever `deltalake` can open by URL, such as S3."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec
import pyarrow
import pyarrow.fs

pafs: Any = pyarrow.fs


class Storage(msgspec.Struct, frozen=True):
    """The root of a table, and the options that open it, by the names of `deltalake`."""

    url: str
    options: dict[str, str] = {}

    @classmethod
    def at(cls, url: str, options: Mapping[str, str] | None = None) -> Storage:
        """The storage at a URL or path. A path is made absolute, since tasks may run in other folders."""
        scheme = urlsplit(url).scheme
        if scheme == "file":
            url = unquote(urlsplit(url).path)
        elif not scheme:
            url = str(Path(url).absolute())
        return cls(url.rstrip("/"), dict(options or {}))

    @property
    def folder(self) -> Path | None:
        """The root as a path, if it is one."""
        return None if urlsplit(self.url).scheme else Path(self.url)

    def files(self) -> Any:
        """An Arrow file system whose paths are relative to the root."""
        if self.folder is not None:
            return pafs.SubTreeFileSystem(str(self.folder), pafs.LocalFileSystem())
        from deltalake.fs import DeltaStorageHandler

        return pafs.PyFileSystem(DeltaStorageHandler(self.url, self.options))

    def make_folder(self, path: str) -> None:
        """Make the folder of a file. Object stores have none."""
        if self.folder is not None:
            (self.folder / path).parent.mkdir(parents=True, exist_ok=True)

    def flush(self, *paths: str) -> None:
        """Bring files and their folders to disk: retention relies on them. Object stores have done so."""
        if self.folder is None:
            return
        files = [self.folder / path for path in paths]
        folders = dict.fromkeys(
            folder for file in files for folder in file.parents if folder.is_relative_to(self.folder)
        )
        for place in (*files, *folders):
            descriptor = os.open(place, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
