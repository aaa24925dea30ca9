python transaction.py
