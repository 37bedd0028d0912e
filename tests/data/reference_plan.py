"""The order of docs/bucket-plan.md in plain Python: what another language would write down first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

MASK = 2**64 - 1


def splitmix64(seed: int) -> Iterator[int]:
    while True:
        seed = (seed + 0x9E3779B97F4A7C15) & MASK
        z = ((seed ^ seed >> 30) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & MASK
        yield z ^ z >> 31


def below(random: Iterator[int], bound: int) -> int:
    product = next(random) * bound
    while product & MASK < 2**64 % bound:
        product = next(random) * bound
    return product >> 64


def shuffle(random: Iterator[int], items: list[Any]) -> None:
    for i in range(len(items) - 1, 0, -1):
        j = below(random, i + 1)
        items[i], items[j] = items[j], items[i]


def fixed_plan(lengths: Sequence[int], m: int, bucket: int, seed: int) -> list[list[int]]:
    random, micro, left = splitmix64(seed), [], []
    order = sorted(range(len(lengths)), key=lambda record: lengths[record])
    for start in range(0, len(order), bucket):
        records = order[start : start + bucket]
        shuffle(random, records)
        whole = len(records) - len(records) % m
        micro += [records[k : k + m] for k in range(0, whole, m)]
        left += records[whole:]
    shuffle(random, micro)
    left.sort(key=lambda record: (lengths[record], record))
    return micro + [left[k : k + m] for k in range(0, len(left), m)]


def variable_plan(
    lengths: Sequence[int],
    *,
    max_rows: int | None,
    token_budget: int | None,
    row_overhead: int,
    bucket: int | str | None,
    seed: int,
) -> list[list[int]]:
    random = splitmix64(seed)
    order = list(range(len(lengths)))
    if bucket is not None:
        order.sort(key=lambda record: lengths[record])
    if bucket == "width":
        buckets = [list(same) for _, same in groupby(order, key=lambda record: lengths[record])]
    else:
        size = bucket or max(1, len(order))
        buckets = [order[start : start + size] for start in range(0, len(order), size)]
    micro: list[list[int]] = []
    for records in buckets:
        if bucket is not None:
            shuffle(random, records)
        if bucket == "width" or not micro:
            micro.append([])
        for record in records:
            widths = [max(1, lengths[other] + row_overhead) for other in [*micro[-1], record]]
            too_many = max_rows is not None and len(widths) > max_rows
            too_wide = token_budget is not None and len(widths) * max(widths) > token_budget
            if too_many or too_wide:
                micro.append([])
            micro[-1].append(record)
    if bucket is not None:
        shuffle(random, micro)
    return micro
