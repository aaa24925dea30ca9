# in one terminal
procrastinate --app retry.app schema --apply
procrastinate --app retry.app worker
# in another
procrastinate --app retry.app defer retry.charge '{"order": 42}'
procrastinate --app retry.app shell list_jobs status=failed details=true
