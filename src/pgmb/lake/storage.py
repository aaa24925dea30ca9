"""Where a table's files lie: a folder, or whatever `deltalake` can open by URL, such as S3."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
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
            url = _absolute(unquote(urlsplit(url).path))
        elif not scheme:
            url = _absolute(url)
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

    def above(self) -> Iterator[str]:
        """The URLs of the folders that this one lies in."""
        if self.folder is not None:
            yield from map(str, self.folder.resolve().parents)
            return
        whole = urlsplit(self.url)
        parts = whole.path.strip("/").split("/") if whole.path.strip("/") else []
        for count in range(len(parts) - 1, -1, -1):
            yield whole._replace(path="/".join(["", *parts[:count]])).geturl()

    def first_file(self) -> str | None:
        """The path of a file in the root or below; None if there is none."""
        if self.folder is not None:
            found = (path for path in self.folder.rglob("*") if not path.is_dir())
            return next((path.relative_to(self.folder).as_posix() for path in found), None)
        for entry in self.files().get_file_info(pafs.FileSelector("", allow_not_found=True)):
            # An object store has a folder only if an object's name begins with it.
            return str(entry.path)
        return None

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


def _absolute(path: str) -> str:
    """Without segments like `..`. Links stay as they are: where they lead may change."""
    return os.path.normpath(Path(path).absolute())
