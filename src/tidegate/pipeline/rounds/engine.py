"""What the master asks of an engine: run one round's orders, wherever, and bring the results back.

An engine keeps nothing that counts. It may run an order twice, at once or after each other, and lose all it has
between two rounds: results are taken from whichever attempt answers, and only the master's commit makes them real.

E1  `run` returns one result for every source and every task that was ordered, in any order.
E2  errors keep their type: what a task raised as a `TidegateError` is raised here as the same class.
E3  for a co-partitioned flow the events of source i go to task i; for a re-keyed one, to the task that owns the key,
    those of one source in the order of its offsets.
"""

from __future__ import annotations

from typing import Protocol

from tidegate.pipeline.rounds.orders import RoundOrder, RoundResult


class Engine(Protocol):
    """Where the work of rounds is done."""

    @property
    def name(self) -> str:
        """`local` or `spark`: for people."""
        ...

    @property
    def slots(self) -> int:
        """How many tasks run at the same time."""
        ...

    @property
    def processes(self) -> int:
        """How many worker processes hold state, each with the budgets of the app's storage config."""
        ...

    def place(self, flow: str, task: int) -> int:
        """Which of the processes keeps the state of a task; 0 ≤ place < `processes`."""
        ...

    def run(self, order: RoundOrder) -> RoundResult:
        """Do one round's work."""
        ...

    def cancel(self) -> None:
        """End the work that is being done now, from any thread, where that is possible; its round does not count."""
        ...

    def close(self) -> None:
        """Let go of workers; state that counts is in tokens."""
        ...
