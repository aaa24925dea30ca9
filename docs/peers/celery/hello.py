from celery import Celery

app = Celery(broker="sqla+postgresql+psycopg://")


@app.task
def greet(name: str) -> None:
    print(f"hello {name}")
