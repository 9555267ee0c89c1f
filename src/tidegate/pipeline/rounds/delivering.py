"""Who brings a commit's parcels into the log: the tasks of the next round, or the master.

A task delivers its own parcel of the last commit first thing in the next round, all of them at once. That needs each
partition of a topic to be fed by one task; where several feed one, the order of their sections is the order of their
bases, and the master delivers them one after the other.

D1  commit N+1 exists only if all parcels of commit N are in the log: handed to tasks of round N+1 that answered, or
    delivered before the round began.

Thread rule: pure functions.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tidegate.pipeline.rounds.orders import Delivery

Task = tuple[str, int]


def split_deliveries(
    deliveries: Sequence[Delivery], tasks: Collection[Task]
) -> tuple[dict[Task, tuple[Delivery, ...]], tuple[Delivery, ...]]:
    """Those for tasks of the next round, by task, and those the master delivers before it."""
    if _share_a_partition(deliveries):
        return {}, in_order(deliveries)
    handed: dict[Task, tuple[Delivery, ...]] = {}
    own: list[Delivery] = []
    for each in deliveries:
        task = (each.flow, each.task)
        if task in tasks:
            handed[task] = (*handed.get(task, ()), each)
        else:
            own.append(each)
    return handed, tuple(own)


def in_order(deliveries: Sequence[Delivery]) -> tuple[Delivery, ...]:
    """By round, flow and task: the order in which bases were given."""
    return tuple(sorted(deliveries, key=lambda each: (each.round, each.flow, each.task)))


def _share_a_partition(deliveries: Sequence[Delivery]) -> bool:
    fed: dict[tuple[str, int], Task] = {}
    for each in deliveries:
        for section in each.parcel.sections:
            task = (each.flow, each.task)
            if fed.setdefault((section.topic, section.partition), task) != task:
                return True
    return False
