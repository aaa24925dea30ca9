from pgmq import PGMQueue

queue = PGMQueue()
queue.create_queue("greetings")
queue.send("greetings", {"name": "world"})
while True:
    for message in queue.read_with_poll("greetings"):
        print(f"hello {message.message['name']}")
        queue.delete("greetings", message.msg_id)
