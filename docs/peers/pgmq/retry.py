from pgmq import PGMQueue


def charge(order: int) -> None:
    raise RuntimeError(f"card refused for order {order}")


queue = PGMQueue()
queue.create_queue("charges")
queue.create_queue("charges_dead")
queue.send("charges", {"order": 42})
while True:
    for message in queue.read_with_poll("charges"):
        try:
            charge(message.message["order"])
        except Exception as error:
            if message.read_ct < 3:
                queue.set_vt("charges", message.msg_id, 2**message.read_ct)
                continue
            queue.send("charges_dead", message.message, headers={"error": str(error)})
        queue.delete("charges", message.msg_id)
