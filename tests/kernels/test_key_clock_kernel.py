"""The table of keys in memory against a dict, compiled and as plain Python with every access checked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.kernels import key_clock
from tidegate.kernels.key_clock import BELOW_ZERO, FULL, ROWS, SLOT, STATE

Model = dict[int, list[int]]  # key → tick, rows, state

SIZE = 16
MOST = 12
# few homes for many keys, so that stretches meet, wrap around the end and are closed again
CROWDED = [key for key in range(4000) if key_clock.home(key, SIZE - 1) in (14, 15, 0)][:40]
KEYS = st.one_of(st.sampled_from(CROWDED), st.sampled_from([0, -1, 2**63 - 1, -(2**63)]))
OPERATION = st.tuples(
    st.sampled_from(["add", "state", "take", "touch", "drop"]),
    st.lists(st.tuples(KEYS, st.integers(0, 9)), max_size=5),
)


def slots(size: int = SIZE) -> Any:
    return np.zeros(SLOT * size, np.int64)


def contents(table: Any) -> Model:
    lines = table.reshape(-1, SLOT).tolist()
    return {key: [tick, rows, state] for key, tick, rows, state in lines if rows or state}


def expected_add(
    model: Model, keys: list[int], amounts: list[int], column: int, tick: int
) -> tuple[int, int]:
    """The twin: what `add_bytes` answers, and how many keys it did."""
    for done, (key, amount) in enumerate(zip(keys, amounts, strict=True)):
        line = model.get(key, [tick, 0, 0])
        if line[column - 1] + amount < 0:
            return BELOW_ZERO, done
        if key not in model and amount:
            if len(model) >= MOST:
                return FULL, done
            model[key] = line
        line[column - 1] += amount
        if key in model and not (line[1] or line[2]):
            del model[key]
    return 0, len(keys)


@pytest.mark.parametrize("form", ["compiled", "checked"])
@settings(max_examples=200, deadline=None)
@given(st.lists(OPERATION, max_size=25))
def test_every_operation_equals_a_dict(
    form: str, operations: list[tuple[str, list[tuple[int, int]]]]
) -> None:
    def run(name: str, *arguments: Any) -> Any:
        function = getattr(key_clock, name)
        return (function if form == "compiled" else function.py_func)(*arguments)

    table, model = slots(), Model()
    for tick, (what, pairs) in enumerate(operations, 1):
        keys, amounts = [key for key, _ in pairs], [amount for _, amount in pairs]
        column = STATE if what == "state" else ROWS
        flat = np.array(keys, np.int64)
        if what in ("add", "state", "take"):
            signed = [-amount if what == "take" else amount for amount in amounts]
            progress = np.array([0, len(model)], np.int64)
            status, done = expected_add(model, keys, signed, column, tick)
            sizes = np.array(signed, np.int64)
            assert run("add_bytes", table, flat, sizes, column, tick, MOST, progress) == status
            assert list(progress) == [done, len(model)]
        elif what == "touch":
            run("touch", table, flat, tick)
            for key in set(keys) & set(model):
                model[key][0] = tick
        else:
            assert run("drop", table, flat) == len(set(keys) & set(model))
            for key in keys:
                model.pop(key, None)
        assert contents(table) == model
        found = np.full(len(CROWDED), -1, np.int64)
        run("look_up", table, np.array(CROWDED, np.int64), found)
        assert found.tolist() == [sum(model.get(key, [0])[1:]) for key in CROWDED]
    larger = slots(4 * SIZE)
    run("rehash", table, larger)
    assert contents(larger) == model
    held = slots()
    for place, key in enumerate(sorted(model)[::2]):
        run("add_bytes", held, np.array([key]), np.array([1]), ROWS, 0, MOST, np.array([0, place]))
    for column, least in ((ROWS, 0), (ROWS, 1), (STATE, 2)):
        lines = np.zeros((3, len(model)), np.int64)
        count = run("free_keys", table, held, column, least, *lines)
        assert {tuple(line) for line in lines[:, :count].T.tolist()} == {
            (key, model[key][0], model[key][column - 1])
            for key in sorted(model)[1::2]
            if model[key][column - 1] >= least
        }
