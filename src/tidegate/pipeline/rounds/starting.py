"""Starting an app: everything is opened, put together and handed to a `Run`; what fails here fails before any round.

The order matters: the app's turn is taken first, so that a second process is told before it has opened or changed
anything else; the engine is made last, when topics and definition are known.

Thread rule: any thread; functions keep nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from tidegate.clock import Clock, SystemClock
from tidegate.errors import ConflictError, InvalidError
from tidegate.files import Files
from tidegate.log.kafka.log import KafkaLog
from tidegate.log.locks import LOCK_NAME
from tidegate.log.log import Log, folder_path, is_kafka, open_log
from tidegate.metrics import Metrics
from tidegate.pipeline.definition.sampling import check_fields
from tidegate.pipeline.rounds.engine import Engine
from tidegate.pipeline.rounds.generation import Generation
from tidegate.pipeline.rounds.heads import Heads
from tidegate.pipeline.rounds.local import LocalEngine
from tidegate.pipeline.rounds.lookups import LookedUpTables
from tidegate.pipeline.rounds.master import Master, Targets
from tidegate.pipeline.rounds.opening import Opened, open_app
from tidegate.pipeline.rounds.orders import Delivery
from tidegate.pipeline.rounds.progress import Progress
from tidegate.pipeline.rounds.records import Records
from tidegate.pipeline.rounds.run import Run
from tidegate.pipeline.rounds.settings import RunSettings
from tidegate.pipeline.rounds.tracking import Tracker
from tidegate.pipeline.tasks.opening import open_app_log
from tidegate.pipeline.tasks.setup import WorkerSetup
from tidegate.pipeline.tasks.worker import Worker
from tidegate.randomness import Randomness, SystemRandomness
from tidegate.scheduling import Scheduler, ThreadScheduler
from tidegate.storage import open_backend
from tidegate.storage.backends.base import StorageBackend

MakeEngine = Callable[[WorkerSetup], Engine]


def start_run(
    setup: WorkerSetup,
    engine: Engine | MakeEngine | None = None,
    *,
    settings: RunSettings | None = None,
    log: Log | KafkaLog | None = None,
    backend: StorageBackend | None = None,
    clock: Clock | None = None,
    scheduler: Scheduler | None = None,
    randomness: Randomness | None = None,
    files: Files | None = None,
    metrics: Metrics | None = None,
    progress: Callable[[Progress], None] | None = None,
    begins: bool = True,
) -> Run:
    """Take the app's turn and begin rounds; without `begins`, `Run.begin` does.

    `engine` None is the local one; a function is called with the setup once topics are known. What was handed in open
    is left open. A clock of one's own comes with a scheduler, or the lease is renewed between rounds only.
    """
    settings = settings or RunSettings()
    if clock is None and scheduler is None:
        scheduler = ThreadScheduler(SystemClock(), f"tidegate-lease-{setup.app}")
        owns_scheduler = True
    else:
        owns_scheduler = False
    clock = clock or SystemClock()
    randomness = randomness or SystemRandomness()
    metrics = metrics or Metrics()
    with ExitStack() as resources:
        if owns_scheduler and scheduler is not None:
            resources.callback(scheduler.close)
        if backend is None:
            backend = open_backend(setup.state, files=files, clock=clock, randomness=randomness)
            resources.callback(backend.close)
        records = Records(backend, setup.app)
        generation = Generation(
            backend,
            records,
            clock=clock,
            randomness=randomness,
            lease_ms=settings.lease_ms,
            scheduler=scheduler,
            in_use=partial(_locked_output, setup, files or Files()),
        )
        resources.callback(generation.release)
        if log is None:
            log = _open_log(setup, settings, files, clock)
            resources.callback(log.close)
        fields = check_fields(setup.flows, log)
        if fields.wrong:
            raise InvalidError(
                f"app {setup.app} was not started, its results would be empty or wrong:\n- "
                + "\n- ".join(fields.wrong)
            )
        opened = open_app(setup, log, records, generation, clock=clock, randomness=randomness)
        opened = replace(opened, notes=(*opened.notes, *fields.notes))
        resources.callback(opened.heads.close)
        made, deliver = _engine(engine, opened, resources, log, backend, clock, randomness, files, metrics)
        tables = LookedUpTables(
            backend, log, opened.heads, opened.setup.flows, clock=clock, randomness=randomness
        )
        resources.callback(tables.close)
        master = Master(
            opened,
            made,
            backend,
            deliver,
            clock=clock,
            randomness=randomness,
            metrics=metrics,
            settings=settings,
            tables=tables,
        )
        tracker = Tracker(opened, master, clock=clock, processes=made.processes)
        run = Run(
            opened,
            made,
            master,
            tracker,
            clock=clock,
            settings=settings,
            resources=resources.pop_all(),
            look=_looking(log, opened),
            show=progress,
        )
    return run.begin() if begins else run


def _engine(
    engine: Engine | MakeEngine | None,
    opened: Opened,
    resources: ExitStack,
    log: Log | KafkaLog,
    backend: StorageBackend,
    clock: Clock,
    randomness: Randomness,
    files: Files | None,
    metrics: Metrics,
) -> tuple[Engine, Callable[[Sequence[Delivery]], None]]:
    """The engine, and what the master delivers with: the local engine's own worker, or one beside Spark's.

    The local engine's storage is measured with the run; Spark's workers are other processes and count for themselves.
    """
    if engine is None:
        local = LocalEngine(
            opened.setup,
            log=log,
            backend=backend,
            clock=clock,
            randomness=randomness,
            files=files,
            metrics=metrics,
        )
        resources.callback(local.close)
        return local, local.deliver
    if callable(engine):
        made = engine(opened.setup)
        resources.callback(made.close)
    else:
        made = engine
    if isinstance(made, LocalEngine):
        return made, made.deliver
    # Tasks deliver in their own processes, so this one opens a partition only while it delivers (log=None).
    worker = Worker(opened.setup, backend=backend, clock=clock, randomness=randomness, files=files)
    resources.callback(worker.close)
    return made, worker.deliver


def _locked_output(setup: WorkerSetup, files: Files) -> str | None:
    """A partition of the app's output topics that another process has open for writing; of a folder only."""
    if is_kafka(setup.log):
        return None
    folder = folder_path(setup.log)
    topics = {sink.topic for flow in setup.flows for sink in flow.topics}
    try:
        names = [name for name in files.list(folder) if name.rpartition("-")[0] in topics]
    except FileNotFoundError:
        return None
    for name in names:
        try:
            files.lock(folder / name / LOCK_NAME, create=False).release()
        except ConflictError:
            return f"partition {name}"
        except FileNotFoundError:
            continue
    return None


def _open_log(setup: WorkerSetup, settings: RunSettings, files: Files | None, clock: Clock) -> Log | KafkaLog:
    if settings.maintains_log and not is_kafka(setup.log):
        return open_log(setup.log, files=files, clock=clock, maintenance=True)
    log: Log | KafkaLog = open_app_log(setup.log, setup.client, files=files, clock=clock)
    return log


def _looking(log: Log | KafkaLog, opened: Opened) -> Callable[[], Targets]:
    """Where the sources end now, for threads other than the master's."""
    topics = {flow.topic: flow.partitions for flow in opened.flows.values()}

    def look() -> Targets:
        heads = Heads(log)
        try:
            found = heads.look(topics)
        finally:
            heads.close()
        return {(topic, number): head.end for topic, each in found.items() for number, head in each.items()}

    return look
