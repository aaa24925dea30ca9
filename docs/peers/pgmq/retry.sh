# in one terminal
python retry.py
# in another
psql -c 'select message, headers from pgmq.q_charges_dead'
