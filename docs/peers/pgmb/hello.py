import pgmb

app = pgmb.App()


@app.on("greet")
def greet(name: str) -> None:
    print(f"hello {name}")
