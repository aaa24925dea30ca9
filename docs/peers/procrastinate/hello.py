import procrastinate

app = procrastinate.App(connector=procrastinate.PsycopgConnector())


@app.task
def greet(name: str) -> None:
    print(f"hello {name}")
