"""A table's rows as a Parquet file, batch by batch; the file appears when it is complete."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tidegate.files import Files


def write_parquet(
    path: Path, schema: pa.Schema, batches: Iterator[pa.RecordBatch], *, files: Files | None = None
) -> int:
    """Write and sync beside the name, then rename; how many rows there were."""
    files = files or Files()
    temporary, rows = path.with_name(path.name + ".tmp"), 0
    try:
        with pq.ParquetWriter(temporary, schema, compression="zstd") as writer:
            for batch in batches:
                writer.write_batch(batch.cast(schema) if batch.schema != schema else batch)
                rows += batch.num_rows
        with files.open(temporary, write=True) as file:
            file.sync()
        files.rename(temporary, path)
        files.sync_folder(path.parent)
    except BaseException:
        files.unlink(temporary, missing_ok=True)
        raise
    return rows
