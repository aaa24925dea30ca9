# in one terminal
celery --app retry worker --loglevel info
# in another
celery --app retry call retry.charge --args '[42]'
psql -c "select payload from kombu_message join kombu_queue on queue_id = kombu_queue.id where name = 'dead'"
