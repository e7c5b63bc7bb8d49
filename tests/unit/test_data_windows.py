"""Windows and segments, each against the obvious slices."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from keel.data import SlidingWindows, TokenStream, evaluation_segments
from keel.errors import KeelError


def make_stream(lengths: list[int]) -> TokenStream:
    total = sum(lengths)
    return TokenStream(
        ids=np.arange(100, 100 + total, dtype=np.int32),
        starts=np.cumsum([0, *lengths[:-1]], dtype=np.int64),
        token_bytes=(np.arange(total) % 7).astype(np.uint16),
        names=[str(index) for index in range(len(lengths))],
    )


@pytest.mark.parametrize(
    ("total", "length", "stride", "count"),
    [(10, 10, 1, 1), (10, 4, 2, 4), (11, 4, 2, 4), (12, 4, 2, 5), (10, 4, 4, 2), (10, 3, 5, 2), (10, 4, 99, 1)],
)
def test_sliding_windows(total: int, length: int, stride: int, count: int) -> None:
    windows = SlidingWindows(make_stream([total]), length, stride)
    assert len(windows) == count
    expected = [list(range(100 + low, 100 + low + length)) for low in range(0, total - length + 1, stride)]
    assert [window["input_ids"].tolist() for window in windows] == expected
    for window in windows:
        assert window["input_ids"].dtype == torch.int64
        assert torch.equal(window["labels"], window["input_ids"])
        assert window["labels"].data_ptr() != window["input_ids"].data_ptr()
    for index in (-1, count):
        with pytest.raises(IndexError):
            windows[index]


def test_windows_hold_no_copy_and_give_one() -> None:
    stream = make_stream([50])
    windows = SlidingWindows(stream, 8, 4)
    assert windows.stream.ids is stream.ids
    windows[0]["input_ids"][:] = -1
    assert stream.ids[0] == 100
    batch = next(iter(DataLoader(windows, batch_size=3)))
    assert batch["input_ids"].shape == batch["labels"].shape == (3, 8)


@pytest.mark.parametrize(
    ("length", "stride", "message"),
    [
        (11, 1, r"a window of 11 tokens does not fit into a split of 10 tokens; give more text or a shorter window"),
        (1, 1, r"window is 1 tokens, expected at least 2"),
        (4, 0, r"stride is 0 tokens, expected at least 1"),
    ],
)
def test_bad_windows(length: int, stride: int, message: str) -> None:
    with pytest.raises(KeelError, match=message):
        SlidingWindows(make_stream([10]), length, stride)


@pytest.mark.parametrize(
    ("lengths", "length", "count", "starts"),
    [
        ([100], 99, 1, [0]),
        ([100], 9, 1, [0]),
        ([100], 9, 4, [0, 25, 50, 75]),
        ([100], 24, 4, [0, 25, 50, 75]),
        ([30, 40, 30], 9, 4, [0, 30, 50, 75]),  # the last document starts too late in its stretch to fit
        ([30, 35, 35], 9, 4, [0, 30, 65, 75]),
        ([30, 35, 35], 10, 4, [0, 30, 50, 75]),
        ([33, 33, 34], 9, 3, [0, 33, 66]),
        ([5] * 20, 9, 3, [0, 35, 70]),
        ([7, 3], 2, 3, [0, 3, 7]),
    ],
)
def test_segments(lengths: list[int], length: int, count: int, starts: list[int]) -> None:
    stream = make_stream(lengths)
    segments = evaluation_segments(stream, length, count)
    assert [segment.start for segment in segments] == starts
    document_of = [index for index, size in enumerate(lengths) for _ in range(size)]
    for segment in segments:
        low, high = segment.start, segment.start + length + 1
        assert segment.ids.dtype == torch.int64
        assert segment.ids.tolist() == list(range(100 + low, 100 + high))
        assert segment.document_T.tolist() == document_of[low + 1 : high]
        assert segment.bytes.tolist() == [position % 7 for position in range(low + 1, high)]
    ends = [start + length + 1 for start in starts]
    assert all(end <= start for end, start in zip(ends, [*starts[1:], len(stream)], strict=True))
    anywhere = [segment.start for segment in evaluation_segments(stream, length, count, at_starts=False)]
    assert anywhere == [index * len(stream) // count for index in range(count)]


@pytest.mark.parametrize(
    ("length", "count", "message"),
    [
        (100, 1, r"1 evaluation segment\(s\) of 100 tokens need 101 tokens, the split has 100; .* lengths up to 99$"),
        (50, 2, r"2 evaluation segment\(s\) of 50 tokens need 102 tokens, the split has 100; .* lengths up to 49$"),
        (1, 99, r"lengths up to 0$"),
        (0, 1, r"expected at least 1 of at least 1"),
        (1, 0, r"expected at least 1 of at least 1"),
    ],
)
def test_bad_segments(length: int, count: int, message: str) -> None:
    with pytest.raises(KeelError, match=message):
        evaluation_segments(make_stream([60, 40]), length, count)
