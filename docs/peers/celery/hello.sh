# in one terminal
celery --app hello worker --loglevel info
# in another
celery --app hello call hello.greet --args '["world"]'
