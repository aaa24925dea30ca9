# in one terminal
procrastinate --app hello.app schema --apply
procrastinate --app hello.app worker
# in another
procrastinate --app hello.app defer hello.greet '{"name": "world"}'
