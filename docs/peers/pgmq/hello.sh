python hello.py
