import procrastinate

app = procrastinate.App(connector=procrastinate.PsycopgConnector())


@app.task(retry=procrastinate.RetryStrategy(max_attempts=2, exponential_wait=1))
def charge(order: int) -> None:
    raise RuntimeError(f"card refused for order {order}")
