# in one terminal
psql -c 'create table outbox (order_id int)'
celery --app transaction worker --loglevel info --beat
# in another
python transaction.py
