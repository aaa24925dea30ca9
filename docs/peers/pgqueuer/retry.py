from contextlib import asynccontextmanager
from datetime import timedelta

import asyncpg
from pgqueuer import AsyncpgDriver, DatabaseRetryEntrypointExecutor, Job, PgQueuer


def backoff(parameters):
    return DatabaseRetryEntrypointExecutor(parameters, max_attempts=2, initial_delay=timedelta(seconds=1))


@asynccontextmanager
async def main():
    app = PgQueuer(AsyncpgDriver(await asyncpg.connect()))

    @app.entrypoint("charge", executor_factory=backoff, on_failure="hold")
    async def charge(job: Job) -> None:
        raise RuntimeError(f"card refused for order {job.payload.decode()}")

    yield app
