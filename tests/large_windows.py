"""One hot key and windows that keep lists, in a process of its own: `large_windows.py FOLDER make|run …`."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa

import tidegate as tg
from tidegate.errors import OverloadError

MIB = 1 << 20
START = 1_767_225_600_000
POOL, CEILING = 64 * MIB, 448 * MIB
STEP = 50_000
ROUND = (
    100_000  # records a round for the target "rounds", whose topic gets the growing window again and again
)


def make(folder: Path, records: int) -> None:
    """Nine of ten records have one key; all fall into one day."""
    with tg.Log(folder / "log") as log:
        log.create_topic("orders", partitions=1)
        with log.writer("orders", durability="os") as writer:
            for start in range(0, records, STEP):
                numbers = np.arange(start, min(records, start + STEP))
                writer.write(
                    pa.record_batch(
                        {
                            "key": [b"hot" if n % 10 else b"k%d" % (n % 1000) for n in numbers.tolist()],
                            "value": [
                                b'{"id":"order-%024d","amount":%d}' % (n, n % 100) for n in numbers.tolist()
                            ],
                            "timestamp": START + numbers * (80_000_000 // max(records, 1)),
                        }
                    )
                )


def define(folder: Path, kind: str, target: str, ceiling: int = CEILING) -> tg.App:
    app = tg.App(
        f"{kind}-{target}", log=str(folder / "log"), state=str(folder / "state"), storage={
            "memory_ceiling_bytes": ceiling, "worker_total_bytes": POOL, "max_batch_bytes": 16 * MIB,
            "write_buffer": {"reserve_bytes": 4 * MIB, "soft_max_bytes": POOL // 3},
            "base_runs": {"reserve_bytes": 4 * MIB, "soft_max_bytes": POOL // 3},
            "state_cache": {"reserve_bytes": MIB, "soft_max_bytes": POOL // 8},
        },
    )  # fmt: skip
    kept = {
        "collect": tg.collect("id"),
        "distinct": tg.count_distinct("id"),
        "top": tg.top_k("amount", 5),
        "count": tg.count(),
    }[kind]
    windows = (
        app.stream("orders", value=tg.Json(id="string", amount="int64"))
        .window(
            tg.Tumbling("1d", grace="30s", retention="2d"), emit="close" if target == "close" else "update"
        )
        .agg(kept=kept, n=tg.count())
    )
    if target != "table":
        out = f"out-{kind}-{target}"
        with tg.Log(folder / "log") as log:
            log.create_topic(out, 1, {"max.message.bytes": str(2**31 - 1)}, if_not_exists=True)
        windows = windows.to_topic(out)
    windows.to_table(f"{kind}-{target}")
    return app


def run(folder: Path, kind: str, target: str, ceiling: int) -> None:
    app = define(folder, kind, target, ceiling)
    try:
        summary = app.run(
            "local",
            until="caught_up",
            close=target == "close",
            round_records=ROUND if target == "rounds" else None,
        )
        print("ran", summary.records if hasattr(summary, "records") else "")
        with app.open_table(f"{kind}-{target}") as table:
            for key in ("k10", "hot"):
                for row in table.fetch(key):
                    kept = row.value["kept"]
                    print("row", key, row.value["n"], len(kept) if isinstance(kept, list) else kept)
    except OverloadError as error:
        print("refused", error.reason, error)


if __name__ == "__main__":
    place = Path(sys.argv[1])
    if sys.argv[2] == "make":
        make(place, int(sys.argv[3]))
    else:
        run(place, sys.argv[3], sys.argv[4], int(sys.argv[5]) if len(sys.argv) > 5 else CEILING)
