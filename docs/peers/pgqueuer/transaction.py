import asyncio
from contextlib import asynccontextmanager

import asyncpg
from pgqueuer import AsyncpgDriver, Job, PgQueuer, Queries


@asynccontextmanager
async def main():
    app = PgQueuer(AsyncpgDriver(await asyncpg.connect()))

    @app.entrypoint("receipt")
    async def receipt(job: Job) -> None:
        print(f"receipt for order {job.payload.decode()}")

    yield app


async def pay() -> None:
    conn = await asyncpg.connect()
    async with conn.transaction():
        await conn.execute("insert into orders values (42)")
        await Queries(AsyncpgDriver(conn)).enqueue("receipt", b"42")


if __name__ == "__main__":
    asyncio.run(pay())
