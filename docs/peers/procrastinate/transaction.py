import procrastinate
import psycopg

app = procrastinate.App(connector=procrastinate.PsycopgConnector())


@app.task(name="receipt")
def receipt(order: int) -> None:
    print(f"receipt for order {order}")


if __name__ == "__main__":
    with app.open(), psycopg.connect() as conn:
        conn.execute("insert into orders values (42)")
        receipt.configure(connection=conn).defer(order=42)
