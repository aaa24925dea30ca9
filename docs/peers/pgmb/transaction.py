import pgmb

app = pgmb.App()


@app.on("order.paid")
def receipt(order: int) -> None:
    print(f"receipt for order {order}")


if __name__ == "__main__":
    with app.broker.connection() as conn, conn.transaction():
        conn.execute("insert into orders values (42)")
        app.publish("order.paid", 42, conn=conn)
