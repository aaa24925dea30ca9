from celery import Celery, Task

app = Celery(broker="sqla+postgresql+psycopg://")


class Buried(Task):
    def on_failure(self, exc, task_id, args, kwargs, einfo):
        self.apply_async(args, kwargs, queue="dead", headers={"error": str(exc)})


@app.task(base=Buried, autoretry_for=(Exception,), max_retries=2, retry_backoff=1)
def charge(order: int) -> None:
    raise RuntimeError(f"card refused for order {order}")
