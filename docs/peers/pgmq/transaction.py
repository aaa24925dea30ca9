from pgmq import PGMQueue

queue = PGMQueue()
queue.create_queue("receipts")
with queue.pool.connection() as conn:
    conn.execute("insert into orders values (42)")
    queue.send("receipts", {"order": 42}, conn=conn)
while True:
    for message in queue.read_with_poll("receipts"):
        print(f"receipt for order {message.message['order']}")
        queue.delete("receipts", message.msg_id)
