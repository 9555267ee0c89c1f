"""Numbers in even steps, as a comparison of neighbours finds them."""

from __future__ import annotations

import numpy as np
import pytest

from tidegate.kernels.sorting import BLOCK, halves_are_even, words_are_even


@pytest.mark.parametrize("step", [0, 1, -3, 7])
@pytest.mark.parametrize("count", [1, 2, BLOCK, BLOCK + 1, 2 * BLOCK + 5])
def test_a_single_number_out_of_step_is_found_wherever_it_is(count: int, step: int) -> None:
    for kernel, kind in ((words_are_even, np.int64), (halves_are_even, np.int32)):
        numbers = (np.arange(count) * step + 11).astype(kind)
        assert kernel(numbers, step)
        for place in {0, 1, count // 2, BLOCK - 1, BLOCK, count - 1}:
            if 0 <= place < count and count > 1:
                changed = numbers.copy()
                changed[place] += 1
                assert not kernel(changed, step)
                assert not kernel.py_func(changed[max(0, place - 2) : place + 3], step)
        assert not kernel(numbers, step + 1) or count == 1
        assert kernel.py_func(numbers[:50], step)
