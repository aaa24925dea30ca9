"""The worker of compose.yaml: replace it with your own handlers."""

import pgmb

app = pgmb.App()


@app.on("greet")
def greet(name: str) -> None:
    print(f"hello {name}", flush=True)
