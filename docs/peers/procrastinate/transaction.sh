# in one terminal
procrastinate --app transaction.app schema --apply
procrastinate --app transaction.app worker
# in another
python transaction.py
