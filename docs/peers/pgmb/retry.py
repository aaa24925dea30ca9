import pgmb

app = pgmb.App()


@app.on("charge", retry=lambda attempt: 0.5 * 2**attempt, max_attempts=3)
def charge(order: int) -> None:
    raise RuntimeError(f"card refused for order {order}")
