# in one terminal
pgmb work transaction:app --install
# in another
python transaction.py
