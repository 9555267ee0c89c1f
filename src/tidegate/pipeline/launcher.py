"""Start an app: open everything, connect it and hand it to a `Run`; failures here come before any round.

The order matters. The lease is taken first, so that a second process fails before it has opened or changed anything
else; the engine is created last, when topics and definition are known.

Thread rule: any thread; functions keep no state.
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
from tidegate.pipeline.checkpoint import Records
from tidegate.pipeline.coordinator import Coordinator, Engine
from tidegate.pipeline.lease import AppLease
from tidegate.pipeline.local_engine import LocalEngine
from tidegate.pipeline.log_end_offsets import LogEndOffsets
from tidegate.pipeline.lookup import TableCommits
from tidegate.pipeline.messages import Delivery
from tidegate.pipeline.progress import Progress
from tidegate.pipeline.query import Run
from tidegate.pipeline.recovery import Opened, open_app
from tidegate.pipeline.sampling import check_fields
from tidegate.pipeline.settings import RunSettings, WorkerSetup
from tidegate.pipeline.worker import Worker, open_app_log
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
    """Take the app's lease and begin rounds; without `begins`, `Run.begin` does.

    `engine` None is the local one; a function is called with the setup once topics are known. Resources that were
    passed in open stay open. Pass a scheduler with a custom clock; otherwise the lease is renewed between rounds
    only.
    """
    settings = settings or RunSettings()
    setup = replace(setup, storage=replace(setup.storage, garbage_grace_ms=settings.grace_ms))
    randomness = randomness or SystemRandomness()
    metrics = metrics or Metrics()
    with ExitStack() as resources:
        if clock is None and scheduler is None:
            scheduler = ThreadScheduler(SystemClock(), f"tidegate-lease-{setup.app}")
            resources.callback(scheduler.close)
        clock = clock or SystemClock()
        if backend is None:
            backend = open_backend(setup.state, files=files, clock=clock, randomness=randomness)
            resources.callback(backend.close)
        records = Records(backend, setup.app)
        generation = AppLease(
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
        made, deliver = _engine(engine, opened, resources, log, backend, clock, randomness, files, metrics)
        tables = TableCommits(
            backend, log, opened.heads, opened.setup.flows, clock=clock, randomness=randomness
        )
        resources.callback(tables.close)
        coordinator = Coordinator(
            opened,
            made,
            deliver,
            clock=clock,
            randomness=randomness,
            metrics=metrics,
            settings=settings,
            tables=tables,
        )
        topics = {flow.topic: flow.partitions for flow in opened.flows.values()}
        run = Run(
            opened,
            made,
            coordinator,
            clock=clock,
            settings=settings,
            resources=resources.pop_all(),
            # of its own: other threads than the coordinator's look
            look=lambda: LogEndOffsets(log).ends(topics),
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
    """Return the engine and the coordinator's deliverer: the local engine's own worker, or a separate one beside
    Spark's.

    The local engine's storage is measured with the run; Spark's workers are other processes with their own metrics.
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
    # Tasks deliver in their own processes; this process opens a partition only while it delivers (log=None).
    worker = Worker(opened.setup, backend=backend, clock=clock, randomness=randomness, files=files)
    resources.callback(worker.close)
    return made, worker.deliver


def _locked_output(setup: WorkerSetup, files: Files) -> str | None:
    """Return an output partition of the app that another process holds open for writing, or None (log folders)."""
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
