import psycopg
from celery import Celery

app = Celery(broker="sqla+postgresql+psycopg://", beat_schedule={"relay": {"task": "relay", "schedule": 1}})


@app.task(name="receipt")
def receipt(order: int) -> None:
    print(f"receipt for order {order}")


@app.task(name="relay")
def relay() -> None:
    with psycopg.connect() as conn:
        for (order,) in conn.execute("delete from outbox returning order_id"):
            receipt.delay(order)


if __name__ == "__main__":
    with psycopg.connect() as conn:
        conn.execute("insert into orders values (42)")
        conn.execute("insert into outbox values (42)")
