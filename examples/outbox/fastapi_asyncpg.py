"""FastAPI with SQLAlchemy on asyncpg: an order and its event are committed together, or neither is.

pgmb work examples.outbox.fastapi_asyncpg:events --install
uvicorn examples.outbox.fastapi_asyncpg:api
curl -X POST localhost:8000/orders/5
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Depends, FastAPI
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import pgmb

URL = os.environ.get("DATABASE_URL", "postgresql:///shop")
engine = create_async_engine(URL.replace("postgresql:", "postgresql+asyncpg:", 1), pool_pre_ping=True)
sessions = async_sessionmaker(engine)
events = pgmb.App(URL)


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    total: Mapped[int]
    receipt_sent: Mapped[bool] = mapped_column(default=False)


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
    async with engine.begin() as conn:
        await conn.run_sync(Base.metadata.create_all)
    yield
    await events.aclose()
    await engine.dispose()


async def transaction() -> AsyncGenerator[AsyncSession]:
    async with sessions.begin() as session:
        yield session


api = FastAPI(lifespan=lifespan)


@api.post("/orders/{total}")
async def pay(total: int, session: Annotated[AsyncSession, Depends(transaction)]) -> int:
    order = Order(total=total)
    session.add(order)
    await session.flush()
    await events.apublish("order.paid", {"id": order.id}, conn=session)
    if total == 0:
        raise ValueError("nothing to pay")
    return order.id


@events.on("order.paid")
async def send_receipt(order: dict[str, int]) -> None:
    async with sessions.begin() as session:
        found = await session.get_one(Order, order["id"])
        found.receipt_sent = True
