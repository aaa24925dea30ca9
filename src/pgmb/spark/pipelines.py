"""For pipelines of your own: merge batches into a Delta table once, and hand over between queries."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, cast

import pyarrow

from pgmb.errors import Conflict
from pgmb.spark.source.offsets import Offset

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# The stubs of pyarrow are incomplete.
pa: Any = pyarrow

_PLACE: Final = "__place"
_MERGED: Final = "pgmb.merged"
"""The field of a commit that says which batch it holds."""
_RECENT: Final = 1000
"""Commits in which a repeated batch is looked for. One that is older is merged again."""


def upsert(
    table: str,
    keys: Sequence[str],
    app: str,
    *,
    latest: str | None = "seq",
    options: Mapping[str, str] | None = None,
) -> Callable[[DataFrame, int], None]:
    """A function for `foreachBatch` that merges rows into a Delta table by their keys, each batch once.

    table    path or URL; it is created with the columns of the first batch
    app      the name under which batches are committed: one of its own for each query and table
    latest   the column that orders rows with the same keys: the highest wins, in whatever order batches come.
             None: keys are unique within a batch, and a later batch wins
    options  of the storage, by the names of `deltalake`

    The number of the batch is the version of the commit: a batch that is repeated after a crash changes
    nothing. From an older checkpoint, a number may come again with other rows. With `latest` they are merged.
    Without it, they are merged if the batch is the last one that was committed; otherwise the function raises
    Conflict, because newer rows could be lost. The batch is collected on the driver and merged there, so it
    must fit into its memory.
    """
    from pgmb.lake.storage import Storage

    storage = Storage.at(table, options)
    if not keys:
        raise ValueError("upsert needs at least one key column")

    def merge(frame: DataFrame, batch: int) -> None:
        # A query with a new checkpoint counts batches from 0 again.
        query = frame.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
        merge_rows(
            storage.url,
            newest_rows(_plain(frame.toArrow()), keys, latest),
            keys,
            f"{app}:{query}" if query else app,
            batch,
            latest,
            storage.options,
        )

    return merge


def merge_rows(
    url: str,
    rows: Any,
    keys: Sequence[str],
    app: str,
    version: int,
    latest: str | None,
    options: Mapping[str, str] | None = None,
) -> bool:
    """Merge rows with unique keys into a table, as this version of an application. False: it had been.

    Raises Conflict if later versions were committed, this one held other rows, and nothing orders rows.
    """
    from deltalake import CommitProperties, DeltaTable, Schema, Transaction

    given = dict(options or {})
    DeltaTable.create(url, Schema.from_arrow(rows.schema), mode="ignore", storage_options=given)
    table = DeltaTable(url, storage_options=given)
    # On the same state that is merged into: if another commit of this application came later, it conflicts.
    done = table.transaction_version(app)
    digest = _digest(rows, keys)
    if done is not None and done >= version:
        if _committed_digest(table, app, version) == digest:
            return False
        if latest is None and done > version:
            refused = Conflict(
                f"batch {version} of {app!r} holds other rows than before, and {done} is committed"
            )
            refused.advise(
                "The checkpoint is older than the table. Go on from the newest one, or name a column that"
                " orders rows, with latest=."
            )
            raise refused
    merging = table.merge(
        rows,
        " and ".join(f"target.{_quoted(key)} = source.{_quoted(key)}" for key in keys),
        source_alias="source",
        target_alias="target",
        commit_properties=CommitProperties(
            app_transactions=[Transaction(app, version if done is None else max(done, version))],
            custom_metadata={_MERGED: json.dumps({"app": app, "version": version, "digest": digest})},
        ),
    )
    newer = None if latest is None else f"source.{_quoted(latest)} >= target.{_quoted(latest)}"
    merging.when_matched_update_all(predicate=newer).when_not_matched_insert_all().execute()
    return True


def _digest(rows: Any, keys: Sequence[str]) -> str:
    """Of the rows, in whatever order and batches they come."""
    sink = pa.BufferOutputStream()
    ordered = rows.sort_by([(key, "ascending") for key in keys]).combine_chunks()
    with pa.ipc.new_stream(sink, ordered.schema) as stream:
        stream.write_table(ordered)
    return sha256(sink.getvalue()).hexdigest()


def _committed_digest(table: Any, app: str, version: int) -> str | None:
    """Of the rows that were committed last as this version; None if no recent commit says."""
    for commit in table.history(_RECENT):
        if _MERGED in commit:
            merged = json.loads(commit[_MERGED])
            if (merged["app"], merged["version"]) == (app, version):
                return str(merged["digest"])
    return None


def newest_rows(rows: Any, keys: Sequence[str], latest: str | None) -> Any:
    """Of rows with the same keys that with the highest `latest`; without it, keys must be unique."""
    for name in (*keys, *([] if latest is None else [latest])):
        if name not in rows.schema.names:
            raise ValueError(f"the batch has no column {name}: it has {', '.join(rows.schema.names)}")
        if rows.column(name).null_count:
            raise ValueError(f"column {name} is null in {rows.column(name).null_count} rows of the batch")
    if latest is not None:
        rows = rows.sort_by(latest)
    placed = rows.append_column(_PLACE, pa.array(range(rows.num_rows), pa.int64()))
    last = placed.group_by(list(keys)).aggregate([(_PLACE, "max")]).column(f"{_PLACE}_max")
    if latest is None and len(last) < rows.num_rows:
        raise ValueError(
            f"the batch has {rows.num_rows - len(last)} rows whose keys are not unique: name a column that"
            " orders them, with latest="
        )
    return rows.take(last)


def border(checkpoint: str, stream: str | None = None, *, options: Mapping[str, str] | None = None) -> str:
    """Where a streaming query stands: the offset after its last committed batch, from its checkpoint.

    Pass it as `endingOffsets` to a batch read, which then has exactly what the query has processed, or as
    `startingOffsets` to another query, which goes on from there. `stream` chooses a source if there are
    several.
    """
    from pgmb.lake.storage import Storage

    files = Storage.at(checkpoint, options).files()
    committed = _numbers(files, "commits")
    if not committed:
        raise ValueError(f"no batch of the query with the checkpoint {checkpoint} is committed yet")
    with files.open_input_file(f"offsets/{max(committed)}") as source:
        text: str = source.read().decode()
    found = [offset for offset in map(_offset, text.splitlines()) if offset is not None]
    if stream is not None:
        found = [offset for offset in found if offset.stream == stream]
    if len(found) != 1:
        named = f" of stream {stream}" if stream is not None else ""
        raise ValueError(
            f"the checkpoint {checkpoint} has {len(found)} sources{named} of pgmb: name the stream of one"
        )
    return json.dumps(found[0].dump())


def _numbers(files: Any, folder: str) -> list[int]:
    from pyarrow.fs import FileSelector

    try:
        listed = files.get_file_info(FileSelector(folder))
    except FileNotFoundError:
        return []
    return [int(one.base_name) for one in listed if one.base_name.isdecimal()]


def _offset(line: str) -> Offset | None:
    try:
        given: Any = json.loads(line)
        return Offset.parse(cast("dict[str, Any]", given)) if isinstance(given, dict) else None
    except ValueError:
        return None


def _plain(rows: Any) -> Any:
    """Times in UTC, as Delta stores them."""
    schema = pa.schema(
        [
            field.with_type(pa.timestamp("us", tz="UTC"))
            if pa.types.is_timestamp(field.type) and field.type.tz is not None
            else field
            for field in rows.schema
        ]
    )
    return rows.cast(schema)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
