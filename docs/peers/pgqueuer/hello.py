from contextlib import asynccontextmanager

import asyncpg
from pgqueuer import AsyncpgDriver, Job, PgQueuer


@asynccontextmanager
async def main():
    app = PgQueuer(AsyncpgDriver(await asyncpg.connect()))

    @app.entrypoint("greet")
    async def greet(job: Job) -> None:
        print(f"hello {job.payload.decode()}")

    yield app
