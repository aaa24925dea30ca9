# in one terminal
pgq install
pgq run transaction:main
# in another
python transaction.py
